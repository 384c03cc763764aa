"""Juicer: runs operators of Data-Juicer over rows, in a child process or in an HTTP service.

    pipeline = Pipeline([{"text_length_filter": {"min_len": 10}}], text_key="prompt")
    with open_juicer(pipeline, what="...") as juicer:
        for result in juicer.run([{"prompt": "1+1?"}]):     # in the order of Data-Juicer
            print(result.row, result.changed, result.stats)

Results name their rows by number and contain only changes, so that the caller keeps everything else unchanged.
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
"""Longest time without output of an operator, which may load or download a model, or wait for a server."""
RECIPE = {"process", "text_keys", "np", "dataset_path", "custom_operator_paths"}
"""Keys of a recipe that are used."""
_IGNORED_IN_RECIPE = {
    *("project_name", "job_id", "executor_type", "export_path", "export_type", "export_shard_size", "work_dir"),
    *("export_in_parallel", "export_original_dataset", "keep_stats_in_res_ds", "keep_hashes_in_res_ds", "temp_dir"),
    *("use_cache", "ds_cache_dir", "cache_compress", "use_checkpoint", "open_tracer", "op_list_to_trace", "trace_num"),
    *("open_monitor", "op_fusion", "fusion_strategy", "debug", "strict_preflight", "turbo", "save_stats_in_one_file"),
}
"""Keys of a recipe that do not change rows, only places and speed; they are ignored."""


@dataclass(frozen=True)
class Pipeline:
    """Operators with their settings."""

    operators: Sequence[Mapping[str, Mapping[str, Any]]]
    """[{name: args}, ...], run in this order."""
    text_key: str
    """Column that text operators read, unless an operator has its own `text_key`."""
    num_process: int = 1
    """Maximum number of processes per operator. 1: no additional processes, fastest for few rows."""
    custom_operator_paths: Sequence[str] = ()
    """Files and folders with the user's own operators."""

    @property
    def names(self) -> list[str]:
        return [name for entry in self.operators for name in entry]


@dataclass(frozen=True)
class OperatorResult:
    """Effect of an operator on the number of rows."""

    operator: str
    """Name of the operator; from a service, which reports all operators together, the names joined by commas."""
    rows: int
    """Number of rows that remain."""
    dropped: Sequence[int]
    """Numbers of the dropped rows, ascending."""


@dataclass(frozen=True)
class RowResult:
    """A row that remains. Example: RowResult(3, {"text": "HI"}, [], {"text_len": 2})"""

    row: int
    """Number among the input rows."""
    changed: Mapping[str, Any]
    """Columns that operators changed or added."""
    removed: Sequence[str]
    """Columns that operators removed."""
    stats: Mapping[str, Any]
    """Statistics from filters, by name."""


class Juicer(ABC):
    """One pipeline, for any number of `run` calls; a context manager."""

    @abstractmethod
    def run(
        self, rows: Sequence[Mapping[str, Any]], say: Callable[[OperatorResult], None] = lambda result: None
    ) -> list[RowResult]:
        """Run the operators over the rows, one after another. say: called with the result of each one.

        Raises: DataError: an operator failed on the rows; NotInstalledError: it needs a package; ProcessLostError: the
            process died or the service does not answer; WaitTimeout: no output for too long. An error closes the
            object.
        """

    @abstractmethod
    def close(self) -> None:
        """Release it. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_recipe(path: str, where: str) -> dict[str, Any]:
    """Read the keys `RECIPE` of a Data-Juicer recipe (YAML); one text in place of a list is a list of it.

    where: configuration key with `path`. Raises: DataError: not a recipe, or it has unsupported keys.
    """
    at = f"{where} {path}"
    try:
        recipe = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{at}: {error}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("process"), list):
        raise DataError(f"{at}: not a recipe of Data-Juicer, which has a list `process`")
    if unknown := sorted(set(recipe) - RECIPE - _IGNORED_IN_RECIPE):
        raise DataError(f"{at}: {', '.join(unknown)}: not supported; recipes may use {', '.join(sorted(RECIPE))}")
    for key in {"text_keys", "custom_operator_paths"} & recipe.keys():
        value = recipe[key]
        recipe[key] = [str(item) for item in (value if isinstance(value, list) else [value] if value else [])]
    return {key: value for key, value in recipe.items() if key in RECIPE}


def make_pipeline(
    entries: Sequence[Any], where: str, recipe: Mapping[str, Any], text_key: str, num_process: int = 1
) -> Pipeline:
    """Make the pipeline of these operators. recipe: its `np`, if any, replaces `num_process`.

    Args: entries: {name: args}, a name, or {name: ..., args: ...}. where: configuration key with them.
    Raises: UserError: another kind of entry.
    """
    operators = []
    for number, entry in enumerate(plain(tuple(entries))):
        named = isinstance(entry, dict) and "name" in entry and not set(entry) - {"name", "args"}
        name, args = (entry["name"], entry.get("args")) if named else (entry, None)
        if isinstance(entry, dict) and not named and len(entry) == 1:
            ((name, args),) = entry.items()
        if not isinstance(name, str) or not isinstance(args, dict | None):
            forms = "a name, {name: {argument: value}}, or {name: ..., args: {argument: value}}"
            raise UserError(f"{where}[{number}]: {entry!r}: an operator is {forms}")
        operators.append({name: args or {}})
    return Pipeline(operators, text_key, int(recipe.get("np") or num_process), recipe.get("custom_operator_paths", ()))
