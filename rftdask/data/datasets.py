"""Datasets: rows by number, from files, folders, the Hub, generators and databases.

Rows are plain dicts; this module does not interpret columns. A dataset is read once and never changes. Its
`fingerprint` identifies its content, so a run can check that it resumes with the same rows in the same order.
"""

from __future__ import annotations

import csv
import importlib
import importlib.metadata
import io
import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any, Protocol

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.config import fill_from_environment
from rftdask.config.plugins import nearest
from rftdask.config.schema.run import MADE_ROWS
from rftdask.data.hub import require_hub, without_hub
from rftdask.errors import DataError
from rftdask.storage.base import in_daemon
from rftdask.storage.checked_json import parse_json
from rftdask.storage.staging import staged

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
REASONING_GYM = "reasoning-gym:"
VERIFIERS = "verifiers:"
SEEDS = "seeds:"
_HASHED_ROWS = 1000
"""Rows hashed at a time, which limits memory."""
CHECK_S = 60.0
"""Seconds to read the rows of a dataset before a run."""
LENGTHS_S = 20.0
"""Seconds to tokenize rows of a dataset before a run."""
_NUM_LENGTHS = 1000
"""Rows of a dataset that are tokenized before a run, at a few hundred a second."""
_PROGRESS_S = 5.0
"""Seconds between two lines on the progress of the check."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds for a server to answer whether a dataset exists; clients would wait for minutes."""


class Dataset(Protocol):
    """Rows 0 .. len-1 of one table."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns; a row of a .jsonl file may lack some."""

    @property
    def fingerprint(self) -> str:
        """Hash that changes when the rows or their order change."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def open_dataset(
    path: str,
    *,
    split: str = "train",
    subset_name: str | None = None,
    dataset_args: Mapping[str, Any] | None = None,
    table: str | None = None,
) -> Dataset:
    """Open the dataset at `path`: a file, a folder, a name on the Hub, a generator, or a table of a database.

    Args:
        path: .jsonl, .json, .csv or .parquet file (any fsspec URL), a folder of them, a folder written by
            `datasets.save_to_disk`, a Hub name such as "openai/gsm8k", or a generator: "reasoning-gym:countdown",
            "verifiers:<taskset>", or "seeds:<N>", which makes rows {"prompt": "game 0", "seed": 0}, ... for games.
        split: for a folder, selects the files whose name begins with it ("train.jsonl",
            "train-00000-of-00002.parquet"); ignored for single files, generators and tables.
        subset_name: a subfolder, or the configuration of a Hub dataset.
        dataset_args: arguments of a generator. reasoning-gym: by default size 1000 and seed 42. verifiers: size, the
            number of tasks (default: all), and settings such as {taskset: {...}, agent: {harness: {...}}}.
        table: table of the database whose URL is `path`.

    Raises: DataError: it does not exist, has no rows, or is not readable; the message names the path.
    """
    arguments = dict(dataset_args or {})
    if path.startswith((REASONING_GYM, VERIFIERS)):
        made = (_reasoning_gym if path.startswith(REASONING_GYM) else _verifiers)(path, arguments)
        if not len(made):
            raise DataError(f"dataset {path} has no rows (dataset_args {arguments})")
        return made
    if path.startswith(SEEDS):
        count = path.removeprefix(SEEDS)
        if dataset_args or not count.isdecimal() or not int(count):
            raise DataError(f"dataset {path}: use {SEEDS}<number of rows>, without dataset_args")
        return RowsDataset(
            [[{"prompt": f"game {seed}", "response": "", "seed": seed} for seed in range(int(count))]], _digest([path])
        )
    if dataset_args:
        raise DataError(
            f"dataset {path}: dataset_args {sorted(dataset_args)} are for {REASONING_GYM}<name> and {VERIFIERS}<name> "
            "only; remove them"
        )
    if table is not None:
        try:
            from rftdask.data.database import read_table  # late: SQLAlchemy is an extra
        except ModuleNotFoundError as error:
            raise DataError(f"dataset {path} needs SQLAlchemy ({error}); run `pip install 'rftdask[sql]'`") from error
        rows, fingerprint = read_table(path, table)
        return RowsDataset([rows], fingerprint)
    try:
        dataset = _open_path(path, split, subset_name)
        if not len(dataset):
            raise DataError(f"dataset {path} has no rows")
        return dataset
    except DataError:
        raise
    except Exception as error:  # from the library of the protocol
        if "://" not in path and not isinstance(error, OSError):
            raise
        raise DataError(f"dataset {path} cannot be read: {type(error).__name__}: {error}") from error


def _open_path(path: str, split: str, subset_name: str | None) -> Dataset:
    try:
        filesystem, root = fsspec.core.url_to_fs(fill_from_environment(path))
    except (ImportError, ValueError) as error:  # an unknown protocol, or its package is missing
        raise DataError(f"dataset {path}: {error}") from error
    if "://" not in path:
        root = staged(root)
    # A file by its suffix first: to find out whether it is a folder, a web server would send all of it.
    if path.endswith(SUFFIXES) and _answer(path, lambda: filesystem.isfile(root)):
        return _read_files(filesystem, [root])
    if _answer(path, lambda: filesystem.isdir(root)):
        return _open_folder(filesystem, root, path, split, subset_name)
    if _answer(path, lambda: filesystem.exists(root)):
        return _read_files(filesystem, [root])
    parts = path.split("/")
    is_hub_name = len(parts) <= 2 and all(parts) and not path.startswith((".", "~")) and not path.endswith(SUFFIXES)
    # If there is a folder "data", "data/gsm9k" is a misspelled file, not a dataset of the Hub user "data".
    if is_hub_name and not ("/" in path and filesystem.isdir(root.rpartition("/")[0])):
        return _open_hub(path, split, subset_name)
    made = "; data_processor.task_pipeline makes it when the run starts" if path.endswith(f"/{MADE_ROWS}") else ""
    raise DataError(f"dataset {path} does not exist{made or _neighbors(filesystem, root)}")


def _answer(path: str, request: Callable[[], Any]) -> Any:
    """Return `request()`, with a deadline if `path` is remote. Raises: DataError: the server does not answer."""
    if "://" not in path:
        return request()
    # In a thread, because a client may not support deadlines.
    answer = in_daemon(request, "dataset-answer")
    try:
        return answer.result(ANSWER_TIMEOUT_S)
    except TimeoutError:
        if answer.done():  # raised by the client
            raise
        raise DataError(
            f"dataset {path}: its server has not answered for {ANSWER_TIMEOUT_S:.0f} s; check the address, and that "
            "this machine can reach it"
        ) from None


class TableRow(dict[str, Any]):
    """Row of an Arrow table, whose structs have the keys of all rows: null where the row itself lacks the key."""

    def __init__(self, values: Mapping[str, Any], schema: pa.Schema) -> None:
        super().__init__(values)
        self.schema = schema


def own_value(row: Mapping[str, Any], column: str) -> Any:
    """Return a value of a row; of a `TableRow` without the nulls in its structs, which stand for missing keys."""
    value = row.get(column)
    if not isinstance(row, TableRow) or (place := row.schema.get_field_index(column)) < 0:
        return value
    return _without_nulls(value, row.schema.field(place).type)


def _without_nulls(value: Any, kind: pa.DataType) -> Any:
    # By type: a null inside JSON text, or of a list, was stored by somebody.
    if isinstance(value, Mapping) and pa.types.is_struct(kind):
        kinds = {field.name: field.type for field in kind}
        return {key: _without_nulls(item, kinds.get(key)) for key, item in value.items() if item is not None}
    if isinstance(value, list) and isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return [_without_nulls(item, kind.value_type) for item in value]
    return value


Say = Callable[[str], None]
"""Prints or logs a line about the progress of a check."""


def find_bad_rows(
    name: str,
    num_rows: int,
    read: Callable[[int], int],
    tokenize: Callable[[int], object] | None = None,
    say: Say = log.info,
) -> tuple[int, str]:
    """Check the rows of a dataset: `read` all in CHECK_S seconds, then `tokenize` up to 1000 of them in LENGTHS_S.

    Those are half the longest, half evenly spaced. Reports progress, and rows that were not reached.

    Args:
        read: returns the number of characters of the row with this number. Raises: DataError: it cannot be used.
        tokenize: raises DataError if the row does not fit. None: lengths are not checked.
    Returns: the number of bad rows, and a text with the first error; (0, "") without one.
    """
    first, bad, sizes = "", set[int](), np.zeros(num_rows, np.int64)

    def run(what: str, numbers: Sequence[int], check: Callable[[int], object], limit_s: float) -> None:
        nonlocal first
        began = noted = time.monotonic()
        for place, number in enumerate(numbers):
            now = time.monotonic()
            if now - began > limit_s:
                log.warning("%s: only %d of %d %s were checked, in %.0f s", name, place, len(numbers), what, limit_s)
                break
            if now - noted > _PROGRESS_S:
                noted = now
                say(f"{name}: {place} of {len(numbers)} {what} are checked")
            try:
                check(number)
            except DataError as error:
                first = first or str(error)
                bad.add(number)

    def measure(number: int) -> None:
        sizes[number] = read(number)

    run("rows", range(num_rows), measure, CHECK_S)
    if tokenize is not None:
        spaced = range(0, num_rows, max(1, -(-2 * num_rows // _NUM_LENGTHS)))
        longest = np.argsort(-sizes, kind="stable")[: _NUM_LENGTHS // 2].tolist()
        chosen = range(num_rows) if num_rows <= _NUM_LENGTHS else list(dict.fromkeys([*longest, *spaced]))
        if num_rows > _NUM_LENGTHS:
            say(f"{name}: the lengths of {len(chosen)} of {num_rows} rows are checked, the longest and some in between")
        run("lengths", [number for number in chosen if number not in bad], tokenize, LENGTHS_S)
    if len(bad) > 1:
        some = ", ".join(map(str, sorted(bad)[:5]))
        first += f"; rows with errors: {len(bad)} ({some}{', ...' * (len(bad) > 5)})"
    return len(bad), first


class RowsDataset:
    """Rows in memory, in one part per file; a part is a list of dicts or an Arrow table."""

    def __init__(self, parts: Sequence[Sequence[dict[str, Any]] | pa.Table], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        # All keys of any row: a line of JSON may lack some.
        names = (p.column_names if isinstance(p, pa.Table) else chain.from_iterable(p) for p in parts)
        self.columns = tuple(dict.fromkeys(chain.from_iterable(names)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        offset = index - (self._ends[number] - len(part))
        if not isinstance(part, pa.Table):
            return part[offset]
        return TableRow(part.slice(offset, 1).to_pylist()[0], part.schema)


class WrappedDataset:
    """Adapts a dataset object of another package."""

    def __init__(
        self, rows: Any, columns: Iterable[str], fingerprint: str = "", schema: pa.Schema | None = None
    ) -> None:
        """fingerprint: "" computes it from all rows of `rows`, a `datasets.Dataset`, whose Arrow schema is `schema`."""
        self._schema = schema
        self._rows = rows
        self.columns = tuple(columns)
        self._fingerprint = fingerprint

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:  # lazily: a worker that reads some rows does not need it
            digest = blake2b(digest_size=16)
            for table in self._rows.with_format("arrow").iter(_HASHED_ROWS):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, table.schema) as stream:
                    stream.write_table(table)
                digest.update(sink.getvalue())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = dict(self._rows[index])
        return row if self._schema is None else TableRow(row, self._schema)


# Files


def _open_folder(filesystem: Any, root: str, path: str, split: str, subset_name: str | None) -> Dataset:
    if subset_name:
        root = f"{root.rstrip('/')}/{subset_name}"
        if not filesystem.isdir(root):
            raise DataError(f"dataset {path}: no subset {subset_name!r}{_neighbors(filesystem, root)}")
    names = _names_in(filesystem, root)
    if "dataset_dict.json" in names or "state.json" in names:
        return _open_saved(root if "://" not in path else path, split)
    files = [name for name in names if name.endswith(SUFFIXES)]
    if not files:
        raise DataError(f"dataset {path}: no {', '.join(SUFFIXES)} file in the folder; it holds {names[:10]}")
    # "train" for "train.jsonl" and for "train-00000-of-00002.parquet".
    splits = [name.rsplit(".", 1)[0].split("-")[0] for name in files]
    chosen = [name for name, name_of_split in zip(files, splits, strict=True) if name_of_split == split]
    # If no file names a split, all files belong to train.
    if not chosen and (split != "train" or not {"train", "test", "validation"}.isdisjoint(splits)):
        raise DataError(f"dataset {path}: no file of split {split!r}; the folder holds {files[:10]}")
    return _read_files(filesystem, [f"{root.rstrip('/')}/{name}" for name in chosen or files])


def _names_in(filesystem: Any, folder: str) -> list[str]:
    entries = {entry.rstrip("/") for entry in filesystem.ls(folder, detail=False)}
    # An object store may list the folder itself, by the empty object that marks it.
    return sorted(entry.rpartition("/")[2] for entry in entries - {folder.rstrip("/")})


def _neighbors(filesystem: Any, root: str) -> str:
    """Return the end of a message about a missing `root`: similar names in its folder, or that it has no folder."""
    folder, _, name = root.rstrip("/").rpartition("/")
    try:
        names = _names_in(filesystem, folder)
    except OSError:
        return f", and neither does its folder {folder}"
    similar = nearest(name, names) or names[:5]
    return f"; nearest in {folder}: {', '.join(similar)}" if similar else f": {folder} is empty"


def _read_files(filesystem: Any, files: Sequence[str]) -> Dataset:
    digest = blake2b(digest_size=16)
    parts: list[Sequence[dict[str, Any]] | pa.Table] = []
    for file in files:
        if not filesystem.isfile(file):  # reading a FIFO could block forever
            raise DataError(f"dataset {file} is not a regular file")
        content = filesystem.cat_file(file)
        # With the length: rows that move from one file to the next make another dataset.
        digest.update(len(content).to_bytes(8, "big") + content)
        parts.append(_parse(file, content))
    return RowsDataset(parts, digest.hexdigest())


def _parse(file: str, content: bytes) -> Sequence[dict[str, Any]] | pa.Table:
    if file.endswith(".parquet"):
        try:
            return pq.read_table(pa.BufferReader(content))
        except pa.ArrowException as error:
            raise DataError(f"{file} is not a readable Parquet file: {error}") from error
    if not file.endswith(SUFFIXES):
        raise DataError(f"{file}: unknown kind of file; use one of {', '.join(SUFFIXES)}")
    try:
        # Without the byte order mark of some editors, which would become part of the first column's name.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line_number}: not UTF-8; save it as UTF-8") from error
    if file.endswith(".csv"):
        return _parse_csv(file, text)
    rows: list[dict[str, Any]] = []
    if file.endswith(".json") and text.lstrip().startswith("["):
        try:
            rows = parse_json(text)
        except ValueError as error:
            raise DataError(f"{file}: not JSON: {error}") from error
        for number, item in enumerate(rows):
            if not isinstance(item, dict):
                raise DataError(f"{file}: item {number} is a {type(item).__name__}, not an object {{column: value}}")
    else:
        # Not splitlines, which also breaks at U+2028 and others that JSON allows inside strings.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                rows.append(parse_json(line))
            except ValueError as error:
                raise DataError(f"{file}:{number}: not a line of JSON: {error}") from error
            if not isinstance(rows[-1], dict):
                kind = type(rows[-1]).__name__
                raise DataError(f"{file}:{number}: a {kind} where an object {{column: value}} is expected")
    return rows


def _parse_csv(file: str, text: str) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            # DictReader stores surplus fields under the key None, and None as the value of missing fields.
            if None in row or None in row.values():
                raise DataError(f"{file}:{reader.line_num}: the number of fields differs from the header's")
            rows.append(dict(row))
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: not CSV: {error}") from error
    return rows


# Other packages


def _open_hub(path: str, split: str, subset_name: str | None) -> Dataset:
    import datasets  # late: 0.6 s, and local files do without it

    which = f"split {split!r}, subset {subset_name!r}"
    try:
        try:
            # The local cache first: a run must start on a node without a network, or with a slow one.
            with without_hub():
                rows = datasets.load_dataset(path, subset_name, split=split)
        except (OSError, ValueError):  # not in the cache, or incomplete
            require_hub(
                f"dataset {path} ({which})",
                f"pass a local copy (run hf download {path} --repo-type dataset --local-dir DIR on a machine with a "
                "network)",
            )
            rows = datasets.load_dataset(path, subset_name, split=split)
    except (OSError, ValueError) as error:  # not found, not reachable, or no such split or configuration
        raise DataError(
            f"dataset {path}: no such file, and it could not be loaded as a Hub dataset ({which}): {error}"
        ) from error
    return WrappedDataset(rows, rows.column_names, schema=rows.features.arrow_schema)


def _open_saved(path: str, split: str) -> Dataset:
    import datasets  # late: 0.6 s, and other folders do without it

    try:
        rows = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise DataError(f"dataset {path}: not a readable saved dataset: {error}") from error
    if isinstance(rows, dict):  # a DatasetDict: one dataset for each split
        if split not in rows:
            raise DataError(f"dataset {path}: no split {split!r}; it has {', '.join(rows)}")
        rows = rows[split]
    return WrappedDataset(rows, rows.column_names, schema=rows.features.arrow_schema)


def _digest(tree: object) -> str:
    return blake2b(json.dumps(tree, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _reasoning_gym(path: str, arguments: dict[str, Any]) -> Dataset:
    try:
        # Late: optional, and its import takes 2 s. By name, so that the type check does not depend on it.
        reasoning_gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise DataError(f"dataset {path} needs reasoning-gym: pip install 'rftdask[reasoning-gym]'") from error
    name, known = path.removeprefix(REASONING_GYM), reasoning_gym.factory.DATASETS
    if name not in known:
        raise DataError(
            f"dataset {path}: reasoning-gym has no {name!r}; nearest: {', '.join(nearest(name, known)) or '-'}"
        )
    arguments.setdefault("size", 1000)
    arguments.setdefault("seed", 42)
    filled = fill_from_environment(arguments)
    try:
        rows = reasoning_gym.create_dataset(name, **filled)
    except (TypeError, ValueError, AssertionError) as error:  # raised for wrong arguments
        raise DataError(f"dataset {path}: dataset_args {arguments}: {error}") from error
    # With the version, which may generate other rows from the same seed.
    fingerprint = _digest([name, filled, importlib.metadata.version("reasoning-gym")])
    return WrappedDataset(rows, rows[0] if len(rows) else (), fingerprint)


def _verifiers(path: str, arguments: dict[str, Any]) -> Dataset:
    """Make rows of the tasks of an environment: prompt and response as text, and the data for verifiers_workflow."""
    try:
        # Late: optional, and its import takes seconds. By name: see _reasoning_gym.
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    except ImportError as error:
        raise DataError(f"dataset {path} needs verifiers: pip install 'rftdask[verifiers]'") from error
    size = arguments.pop("size", None)
    name = path.removeprefix(VERIFIERS)
    environment = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
    try:
        for role, field in loaders.env_config_type(name, arguments.get("id", "")).model_fields.items():
            # Programs run on this machine by default, not on the machines of a service (the default of verifiers).
            if getattr(getattr(field.default, "runtime", None), "type", None) == "prime":
                environment[role] = {"runtime": {"type": "subprocess"}, **arguments.get(role, {})}
        taskset = loaders.load_environment(loaders.resolve_env_config(fill_from_environment(environment))).taskset
        if size is None and not taskset.bounded:
            raise DataError(f"dataset {path} is infinite; set dataset_args.size")
        tasks = list(taskset if size is None else taskset.take(int(size)))
    except DataError:
        raise
    except Exception as error:  # an environment is third-party code that checks its own settings
        raise DataError(f"dataset {path}: dataset_args {arguments}: {type(error).__name__}: {error}") from error
    rows = []
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_none=True)
        rows.append(
            {
                "prompt": task.data.prompt_text or f"task {task.data.idx}",
                "response": str(data.get("answer", "")),
                "task": data,
                "environment": dict(environment),
            }
        )
    return WrappedDataset(rows, rows[0] if rows else (), _digest(rows))
