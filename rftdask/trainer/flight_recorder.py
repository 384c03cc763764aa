"""Flight recorder: what torch remembers of the collective calls of a rank, in a sentence, for the error of one that
waited in vain.

torch keeps the last calls of each process. Where NCCL's watchdog ends a process that waited too long, it writes them to
a file first, next to the rank's log; torch's own tool compares the files of all ranks (torchfrtrace).
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

_FILE = "collectives-rank-"
_PACKAGE = Path(__file__).parents[1]


def recording(folder: str | None) -> dict[str, str]:
    """Environment of a rank whose watchdog is to leave a file in `folder`, that of its log; None: nowhere of ours."""
    if folder is None:
        return {}
    prefix = str(Path(folder, _FILE))
    # Each under its name of today and that of torch 2.11.
    files = {"TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix}
    wanted = {**files, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    return {name: value for name, value in wanted.items() if name not in os.environ}  # the user's own choice stays


def forget(folder: str | None, rank: int) -> None:
    """Remove what an earlier life of the rank left."""
    if folder is not None:
        Path(folder, f"{_FILE}{rank}").unlink(missing_ok=True)


def left_behind(folder: str | None, rank: int) -> str:
    """What a rank that was ended by the watchdog waited for; "": it left nothing."""
    file = Path(folder or "/nowhere", f"{_FILE}{rank}")
    try:
        return f"{summary(file.read_bytes())} (all of it: torchfrtrace {file.parent} --prefix {_FILE})"
    except (OSError, ValueError):
        return ""


def of_this_process() -> str:
    """What this rank waited for last; "" where torch does not tell."""
    import torch  # late: the rank has it, and who reads what a rank left needs none

    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    try:
        return "" if dump is None else summary(dump())
    except (RuntimeError, ValueError):
        return ""


def summary(data: bytes) -> str:
    """The last call of each group of ranks, as torch recorded it. Raises: ValueError: `data` is no such record.

    Example: "its last call in default_pg was number 7, nccl:all_reduce of [[4096]] Float, started and not completed, at
    rftdask/trainer/ranks.py:52"
    """
    try:
        entries: list[dict[str, Any]] = _Plain(io.BytesIO(data)).load()["entries"]
        # Calls are in their order, so of each group the last one stays.
        last = {str(entry["process_group"][1]): entry for entry in entries}
        return "; ".join(_told(group, entry) for group, entry in last.items())
    except (pickle.UnpicklingError, LookupError, TypeError, EOFError, AttributeError) as error:
        raise ValueError(f"no record of collective calls: {error}") from error


def _told(group: str, entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    # gloo says of every call that it was scheduled, whatever became of it.
    known = entry["profiling_name"].startswith("nccl")
    state = "" if not known else f", {entry['state']}" + (" and not completed" * (entry["state"] != "completed"))
    # Wherever the package is on that machine; torch itself may be below a folder of its name, too.
    places = [(*frame["filename"].rpartition("/rftdask/")[1:], frame["line"]) for frame in entry.get("frames", ())]
    ours = (f", at rftdask/{file}:{line}" for folder, file, line in places if folder and (_PACKAGE / file).is_file())
    at = next(ours, "")
    return (
        f"its last call in {group} was number {number}, {entry['profiling_name']} of {entry['input_sizes']} "
        f"{' '.join(dict.fromkeys(entry['input_dtypes']))}{state}{at}"
    )


class _Plain(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers, which is all that a record has."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises: pickle.UnpicklingError, always."""
        raise pickle.UnpicklingError(f"{module}.{name} in a record of collective calls")
