"""Runner: runs Data-Juicer's operators over rows in files, with the Python of its environment, which has no rftdask.

    python -I runner.py            lines of JSON on stdin and stdout, all other output goes to stderr
    > {"operators": [{name: args}, ...], "text_key": ..., "num_process": ..., "custom_operator_paths": [...],
       "only_check": false}
    < {"ready": true}
    > {"rows": FILE.jsonl, "out": FILE.jsonl}
    < {"operator": name, "rows": remaining, "dropped": [numbers of rows]}  one for each operator
    < {"done": rows}
    < {"error": text, "operator": name, "kind": "needs" | "wrong" | "failed", "packages": [...]}, instead of any reply

A line of `out` is {"row": number, "changed": {column: value}, "removed": [column], "stats": {name: value}}. The process
ends as soon as its stdin closes. It imports only the standard library and Data-Juicer.
"""

import importlib
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]
ROW = "__rftdask_row__"
"""Column with the number of each row."""
PRIVATE = "__dj__"
"""Prefix of the internal columns of operators."""
STATS = f"{PRIVATE}stats__"
OTHER_ROWS = "it makes new rows, which is not supported; use filters, mappers, deduplicators or selectors"


class Failed(Exception):
    """An error reply: text, operator, kind, packages."""


def load(module: str) -> Any:
    """Import a module of Data-Juicer; by name, because type checks run where it is not installed."""
    return importlib.import_module(f"data_juicer.{module}")


def refuse_installs() -> None:
    """Make Data-Juicer's own installations fail: it would fetch gigabytes in the middle of a pipeline."""

    def refuse(_cls: type, package_spec: str, _pip_args: Any = None) -> None:
        raise ImportError(f"the package {package_spec} is not installed", name=package_spec)

    load("utils.lazy_loader").LazyLoader._install_package = classmethod(refuse)
    if importlib.util.find_spec("torch") is None:
        # After each operator it frees GPU memory, which needs torch.
        models = load("utils.model_utils").MODEL_ZOO
        load("ops.base_op").free_models = lambda clear_model_zoo=True: models.clear()


def missing_package(error: BaseException | None) -> str | None:
    """Return the package whose absence caused an error, directly or through its causes; None: another error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ImportError) and error.name and not error.name.startswith("data_juicer"):
            # A module name gives its package; the name from `refuse_installs` is a requirement already.
            return error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) else error.name
        error = error.__cause__ or error.__context__
    return None


def load_operators(spec: dict[str, Any]) -> list[Any]:
    """Make the operators. Raises: Failed: everything that is wrong or missing, at once."""
    refuse_installs()
    preflight, ops = load("core.preflight"), load("ops")
    if spec["custom_operator_paths"]:
        load("config.config").load_custom_operators(spec["custom_operator_paths"])
    defaults = {"text_key": spec["text_key"], "num_proc": spec["num_process"]}
    process = [{name: {**defaults, **(args or {})} for name, args in entry.items()} for entry in spec["operators"]]
    try:
        preflight.pre_instantiation_check(process)
    except preflight.PipelineConfigError as error:
        text = "; ".join(map(str, error.errors))
        raise Failed(text, error.errors[0].op_name, "wrong", []) from error
    operators: list[Any] = []
    needed: dict[str, str] = {}
    for entry in process if not spec["only_check"] else ():
        (name,) = entry
        try:
            operators += ops.load_ops([entry])
        except Exception as error:
            package = missing_package(error)
            if package is None:
                raise Failed(f"{type(error).__name__}: {error}", name, "wrong", []) from error
            needed.setdefault(package, name)
    if needed:
        raise Failed("", ", ".join(dict.fromkeys(needed.values())), "needs", list(needed))
    for operator in operators:
        if operator.num_proc == 1:
            # One process would be a fork for each step of each operator: 1.7 s instead of 0.07 s for eight rows.
            operator.num_proc, operator.auto_op_parallelism = None, False
    return operators


def process_rows(operators: list[Any], rows: list[Row], say: Callable[[Row], None]) -> Iterator[Row]:
    """Run the operators over the rows, one after another; yield the lines of `out`."""
    dataset = load("core.data").NestedDataset.from_list(number_rows(rows))
    before = dataset.to_list()  # a dataset may change types
    for operator in operators:
        name, numbers = operator._name, numbers_of(dataset)
        try:
            dataset = dataset.process([operator], open_monitor=False)
        except Exception as error:
            package = missing_package(error)
            kind = "failed" if package is None else "needs"
            raise Failed(f"{type(error).__name__}: {error}", name, kind, [package] if package else []) from error
        if ROW not in dataset.column_names:
            raise Failed(OTHER_ROWS, name, "wrong", [])
        say({"operator": name, "rows": len(dataset), "dropped": sorted(numbers - numbers_of(dataset))})
    yield from compare_rows(rows, before, dataset.to_list())


def number_rows(rows: Sequence[Row]) -> list[Row]:
    """Add to each row its number, and all columns: a dataset takes its columns from the first row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [{**dict.fromkeys(columns), **row, ROW: number} for number, row in enumerate(rows)]


def compare_rows(rows: Sequence[Row], before: Sequence[Row], after: Sequence[Row]) -> Iterator[Row]:
    """Yield the lines of `out`, one per remaining row. before: rows of the dataset before the first operator."""
    for remaining in after:
        row = dict(remaining)
        number, stats = row.pop(ROW), row.pop(STATS, None) or {}
        old = before[number]
        yield {
            "row": number,
            "changed": {
                key: value
                for key, value in row.items()
                if not key.startswith(PRIVATE) and (key not in old or old[key] != value)
            },
            "removed": [key for key in rows[number] if key not in row],
            "stats": {key: value for key, value in stats.items() if value is not None},
        }


def numbers_of(dataset: Any) -> set[int]:
    return set(dataset.with_format(None)[ROW][:]) if len(dataset) else set()


def main() -> None:
    source, sink = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of libraries go to stderr, line by line, so that the last lines before a kill are kept
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace")
    # Operators fork, and a fork closes sys.stdin, which would deadlock with a thread that reads it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        rest = b""
        while data := os.read(source, 1 << 16):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                lines.put(line)
        # The parent is gone: end with all forks.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()

    def say(message: Row) -> None:
        sink.write(json.dumps(message) + "\n")
        sink.flush()

    try:
        operators = load_operators(json.loads(lines.get()))
        say({"ready": True})
        while True:
            request = json.loads(lines.get())
            with open(request["rows"], encoding="utf-8") as file:
                rows: list[Row] = [json.loads(line) for line in file]
            count = 0
            with open(request["out"], "w", encoding="utf-8") as out:
                for line in process_rows(operators, rows, say):
                    out.write(json.dumps(line, default=str) + "\n")
                    count += 1
            say({"done": count})
    except Failed as error:
        text, operator, kind, packages = error.args
        say({"error": text, "operator": operator, "kind": kind, "packages": packages})
    except Exception as error:
        traceback.print_exc()
        package = missing_package(error)
        say(
            {
                "error": f"{type(error).__name__}: {error}",
                "operator": "",
                "kind": "needs" if package else "failed",
                "packages": [package] if package else [],
            }
        )
    os._exit(1)


if __name__ == "__main__":
    main()
