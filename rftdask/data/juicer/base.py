"""Juicer: operators of Data-Juicer over rows, wherever it runs: in a process beside ours, or in somebody's service.

    pipeline = Pipeline([{"text_length_filter": {"min_len": 10}}], text_key="prompt")
    with open_juicer(pipeline, log_file, what="...") as juicer:
        for result in juicer.run([{"prompt": "1+1?"}]):     # in the order in which Data-Juicer leaves them
            print(result.row, result.changed, result.stats)

What comes back names its row by number, so that whoever asks keeps the rows as they were but for what was changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from rftdask.config.base import plain
from rftdask.errors import DataError, UserError

SILENCE_S = 1800.0
"""Longest silence of an operator: a model that it loads or downloads, or one answer of a server."""
RECIPE = {"process", "text_keys", "np", "dataset_path", "custom_operator_paths"}
"""Keys of a recipe that are taken."""
_IDLE_IN_RECIPE = {
    *("project_name", "job_id", "executor_type", "export_path", "export_type", "export_shard_size", "work_dir"),
    *("export_in_parallel", "export_original_dataset", "keep_stats_in_res_ds", "keep_hashes_in_res_ds", "temp_dir"),
    *("use_cache", "ds_cache_dir", "cache_compress", "use_checkpoint", "open_tracer", "op_list_to_trace", "trace_num"),
    *("open_monitor", "op_fusion", "fusion_strategy", "debug", "strict_preflight", "turbo", "save_stats_in_one_file"),
}
"""Keys of a recipe that change no row: where things go, and how fast."""


@dataclass(frozen=True)
class Pipeline:
    """What is run over the rows."""

    operators: Sequence[Mapping[str, Mapping[str, Any]]]
    """[{name: args}, ...], run in this order."""
    text_key: str
    """The column that operators of text read, unless their own `text_key` says another one."""
    num_process: int = 1
    """Processes of each operator, at most. 1: none beside the one that has Data-Juicer, fastest for few rows."""
    custom_operator_paths: Sequence[str] = ()
    """Files and folders with operators of the user's."""

    @property
    def names(self) -> list[str]:
        """Names of the operators, in their order."""
        return [name for entry in self.operators for name in entry]


@dataclass(frozen=True)
class OperatorResult:
    """What an operator left."""

    operator: str
    """Its name; of a service, which tells of all together, the names with commas between them."""
    rows: int
    dropped: Sequence[int]
    """Numbers of the rows that are gone, ascending."""


@dataclass(frozen=True)
class RowResult:
    """A row that is left. Example: RowResult(3, {"text": "HI"}, [], {"text_len": 2})"""

    row: int
    """Its number among the rows that went in."""
    changed: Mapping[str, Any]
    """Columns that operators changed or added."""
    removed: Sequence[str]
    """Columns that are gone."""
    stats: Mapping[str, Any]
    """What filters measured of it, by name."""


class Juicer(ABC):
    """One pipeline, for any number of `run`s; a context manager."""

    @abstractmethod
    def run(
        self, rows: Sequence[Mapping[str, Any]], say: Callable[[OperatorResult], None] = lambda result: None
    ) -> list[RowResult]:
        """Run the operators over the rows, one after another. say: is told what each one left, as it is done.

        Raises: DataError: an operator failed on the rows; NotInstalledError: it needs a package; ProcessLostError: what
            has Data-Juicer died or does not answer; WaitTimeout: it has been silent too long. After an error it is
            closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of it; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_recipe(path: str, where: str) -> dict[str, Any]:
    """The keys `RECIPE` of a recipe of Data-Juicer (YAML).

    where: the key of the configuration that names it. Raises: DataError: it is none, or asks for what is not taken.
    """
    at = f"{where} {path}"
    try:
        recipe = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{at}: {error}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("process"), list):
        raise DataError(f"{at}: it is no recipe of Data-Juicer, which has a list `process`")
    if unknown := sorted(set(recipe) - RECIPE - _IDLE_IN_RECIPE):
        raise DataError(f"{at}: {', '.join(unknown)}: not taken here; of a recipe {', '.join(sorted(RECIPE))} are")
    return {key: value for key, value in recipe.items() if key in RECIPE}


def read_operators(entries: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Operators as {name: args}, of entries that are that, or a name, or {name: ..., args: ...}.

    Raises: UserError: an entry is none of these.
    """
    operators = []
    for number, entry in enumerate(plain(tuple(entries))):
        named = isinstance(entry, dict) and "name" in entry and not set(entry) - {"name", "args"}
        name, args = (entry["name"], entry.get("args")) if named else (entry, None)
        if isinstance(entry, dict) and not named and len(entry) == 1:
            ((name, args),) = entry.items()
        if not isinstance(name, str) or not isinstance(args, dict | None):
            told = "an operator is a name, {name: {argument: value}}, or {name: ..., args: {argument: value}}"
            raise UserError(f"{where}[{number}]: {entry!r}: {told}")
        operators.append({name: args or {}})
    return operators


def as_list(value: Any) -> list[str]:
    """One text or several, as a recipe gives them; none of an empty one."""
    return [str(each) for each in (value if isinstance(value, list) else [value] if value else [])]
