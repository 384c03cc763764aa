"""Flight recorder: summarizes torch's record of a rank's collective calls, for the error of a rank that timed out.

torch records the last calls of each process. Before NCCL's watchdog ends a process that waited too long, it writes them
to a file next to the rank's log; torch's own tool, torchfrtrace, compares the files of all ranks.
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
    """Return the environment that makes a rank's watchdog write a file to `folder`, that of its log; None: no file."""
    if folder is None:
        return {}
    prefix = str(Path(folder, _FILE))
    # The current name of the variable, and that of torch 2.11.
    files = {"TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix}
    variables = {**files, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    return {name: value for name, value in variables.items() if name not in os.environ}  # the user's values win


def forget(folder: str | None, rank: int) -> None:
    """Remove the file of an earlier process of the rank."""
    if folder is not None:
        Path(folder, f"{_FILE}{rank}").unlink(missing_ok=True)


def left_behind(folder: str | None, rank: int) -> str:
    """Return the last calls of a rank that the watchdog ended; "": it left no file."""
    file = Path(folder or "/nowhere", f"{_FILE}{rank}")
    try:
        return f"{summary(file.read_bytes())} (all calls: torchfrtrace {file.parent} --prefix {_FILE})"
    except (OSError, ValueError):
        return ""


def of_this_process() -> str:
    """Return the last calls of this rank; "" if torch has no record."""
    import torch  # late: readers of a rank's file do not need it

    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    try:
        return "" if dump is None else summary(dump())
    except (RuntimeError, ValueError):
        return ""


def summary(data: bytes) -> str:
    """Return the last call of each group of ranks. Raises: ValueError: `data` is not a record of torch.

    Example: "its last call in default_pg was number 7, nccl:all_reduce of [[4096]] Float, started and not completed, at
    rftdask/trainer/process_ranks.py:63"
    """
    try:
        entries: list[dict[str, Any]] = _Plain(io.BytesIO(data)).load()["entries"]
        last = {str(entry["process_group"][1]): entry for entry in entries}  # entries are in order
        return "; ".join(_describe(group, entry) for group, entry in last.items())
    except (pickle.UnpicklingError, LookupError, TypeError, EOFError, AttributeError) as error:
        raise ValueError(f"no record of collective calls: {error}") from error


def _describe(group: str, entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    # gloo marks every call as scheduled, also completed ones.
    has_state = entry["profiling_name"].startswith("nccl")
    state = f", {entry['state']}{' and not completed' * (entry['state'] != 'completed')}" if has_state else ""
    # Checked for existence, since torch may also be installed below a folder named rftdask.
    frames = [(*frame["filename"].rpartition("/rftdask/")[1:], frame["line"]) for frame in entry.get("frames", ())]
    ours = (f", at rftdask/{file}:{line}" for folder, file, line in frames if folder and (_PACKAGE / file).is_file())
    return (
        f"its last call in {group} was number {number}, {entry['profiling_name']} of {entry['input_sizes']} "
        f"{' '.join(dict.fromkeys(entry['input_dtypes']))}{state}{next(ours, '')}"
    )


class _Plain(pickle.Unpickler):
    """Unpickler that only reads dicts, lists, texts and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises: pickle.UnpicklingError: always."""
        raise pickle.UnpicklingError(f"{module}.{name} in a record of collective calls")
