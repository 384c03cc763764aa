"""How many tasks or rows a dataset has, where that can be told quickly: local files and generated datasets.

Reads no row into memory for longer than a line and asks nobody on the network. None means: known when it is read.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path

GENERATED = "reasoning-gym:"
"""Prefix of a generated dataset; its size is `dataset_args.size`."""
_GENERATED_SIZE = 1000
"""Size of a reasoning-gym dataset when none is given, as the one who reads it has it."""


def count_rows(path: str, split: str, dataset_args: dict[str, object]) -> int | None:
    """Rows of the dataset at `path`, or None when it is not here or cannot be counted."""
    if path.startswith(GENERATED):
        size = dataset_args.get("size", _GENERATED_SIZE)
        return size if isinstance(size, int) else None
    place = Path(path).expanduser()
    if place.is_file():
        return _count_file(place)
    if place.is_dir():
        return _count_folder(place, split)
    return None


def _count_folder(folder: Path, split: str) -> int | None:
    """All files of the split: those named after it, or every data file when none is."""
    files = sorted(file for file in folder.iterdir() if file.suffix in _COUNTERS)
    files = [file for file in files if file.name.startswith(split)] or files
    counts = [_count_file(file) for file in files]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count_file(file: Path) -> int | None:
    counter = _COUNTERS.get(file.suffix)
    try:
        return counter(file) if counter else None
    except (OSError, ValueError, csv.Error):
        return None  # whoever reads the data says what is wrong with it


def _count_jsonl(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _count_json(file: Path) -> int | None:
    with file.open("rb") as text:
        if not text.read(64).lstrip().startswith(b"["):
            return _count_jsonl(file)  # JSON lines under the name .json, as datasets reads them too
        text.seek(0)
        return len(json.load(text))


def _count_csv(file: Path) -> int:
    with file.open(newline="", encoding="utf-8") as text:
        return max(sum(1 for row in csv.reader(text) if row) - 1, 0)


def _count_parquet(file: Path) -> int | None:
    try:
        import pyarrow as pa  # late: only for this, and a plan without it is still a plan
        import pyarrow.parquet as pq
    except ImportError:
        return None
    try:
        return int(pq.read_metadata(file).num_rows)
    except pa.ArrowException:
        return None


_COUNTERS: dict[str, Callable[[Path], int | None]] = {
    ".jsonl": _count_jsonl,
    ".json": _count_json,
    ".csv": _count_csv,
    ".parquet": _count_parquet,
}
