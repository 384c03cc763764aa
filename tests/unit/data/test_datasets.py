"""Promises of datasets: equal rows in every file format, a fingerprint of the content, and errors with a place."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftdask.data import datasets
from rftdask.data.datasets import Dataset, find_bad_rows, open_dataset
from rftdask.errors import DataError
from rftdask.storage import open_storage
from tests.unit.storage.s3_proxy import mark_folder

ROWS = [
    {"question": "1+1?", "answer": "2"},
    {"question": 'a\u2028b, "c"\n', "answer": "d"},
    {"question": "é", "answer": ""},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write `rows` in the format of the suffix of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *quoted]) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return path


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    return [dict(dataset[index]) for index in range(len(dataset))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    dataset = open_dataset(str(write(tmp_path / f"tasks{suffix}", ROWS)))
    assert rows_of(dataset) == ROWS
    assert dataset.columns == ("question", "answer")


def test_local_files_are_read_without_the_datasets_package(tmp_path: Path) -> None:
    loaded = "datasets" in sys.modules
    open_dataset(str(write(tmp_path / "tasks.jsonl", ROWS)))
    assert ("datasets" in sys.modules) == loaded


@pytest.mark.parametrize("names", [["train.jsonl", "test.jsonl"], ["train-00000-of-00001.parquet", "test-0.parquet"]])
def test_a_folder_gives_the_files_of_the_split(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path / names[0], ROWS)
    write(tmp_path / names[1], ROWS[:1])
    assert rows_of(open_dataset(str(tmp_path))) == ROWS
    assert rows_of(open_dataset(str(tmp_path), split="test")) == ROWS[:1]
    with pytest.raises(DataError, match="no file of split 'validation'.*" + names[1]):
        open_dataset(str(tmp_path), split="validation")


def test_files_without_a_split_name_are_training_data(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.parquet", ROWS[:1])
    assert rows_of(open_dataset(str(tmp_path))) == ROWS


def test_the_empty_object_of_a_folder_is_no_file(s3_url: str) -> None:
    url = f"{s3_url}/rows.jsonl"
    open_storage(url).put("part-0.jsonl", b'{"prompt": "1+1=", "response": "2"}\n')
    mark_folder(url)
    assert len(open_dataset(url)) == 1


def test_a_subset_is_a_subfolder(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train.jsonl", ROWS)
    assert len(open_dataset(str(tmp_path), subset_name="main")) == 3
    with pytest.raises(DataError, match=r"no subset 'mian'; nearest in .*: main"):
        open_dataset(str(tmp_path), subset_name="mian")


def test_columns_are_those_of_all_rows(tmp_path: Path) -> None:
    assert open_dataset(str(write(tmp_path / "a.jsonl", [{"x": 1}, {"y": 2}]))).columns == ("x", "y")


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    first = open_dataset(str(write(tmp_path / "a.jsonl", ROWS))).fingerprint
    assert open_dataset(str(write(tmp_path / "elsewhere" / "b.jsonl", ROWS))).fingerprint == first
    assert open_dataset(str(write(tmp_path / "c.jsonl", ROWS[:2]))).fingerprint != first


def test_a_row_beyond_the_end_is_an_index_error(tmp_path: Path) -> None:
    dataset = open_dataset(str(write(tmp_path / "a.jsonl", ROWS)))
    for index in (3, -1):
        with pytest.raises(IndexError):
            dataset[index]


def test_a_missing_file_names_its_nearest_neighbors(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"trian\.jsonl does not exist; nearest in .*: train\.jsonl"):
        open_dataset(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="neither does its folder"):
        open_dataset(str(tmp_path / "nowhere" / "train.jsonl"))


def test_a_misspelled_folder_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "gsm8k" / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset("data/gsm8k")) == 3
    with pytest.raises(DataError, match=r"data/gsm9k does not exist; nearest in .*: gsm8k"):
        open_dataset("data/gsm9k")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"x": 1}\n\n{"x": \n', r"a\.jsonl:3: not a line of JSON"),
        ("a.jsonl", b'{"x": 1}\n[2]\n', r"a\.jsonl:2: a list where an object"),
        ("a.jsonl", b'{"x": 1}\n{"x": "\xff"}\n', r"a\.jsonl:2: not UTF-8"),
        ("a.jsonl", b"\n", "has no rows"),
        ("a.json", b"[1]", "item 0 is a int"),
        ("a.csv", b"x,y\n1,2\n1,2,3\n", r"a\.csv:3: the number of fields"),
        ("a.csv", b"x,y\n1\n", r"a\.csv:2: the number of fields"),
        ("a.parquet", b"no", "not a readable Parquet file"),
        ("a.txt", b"no", r"unknown kind of file; use one of \.jsonl"),
    ],
)
def test_a_damaged_file_raises_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_dataset(str(tmp_path / name))


def test_a_folder_without_data_is_refused_with_its_content(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(DataError, match=r"holds \['readme.md'\]"):
        open_dataset(str(tmp_path))


def test_arguments_for_a_generator_are_refused_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset_args \['size'\]"):
        open_dataset(str(write(tmp_path / "a.jsonl", ROWS)), dataset_args={"size": 3})


@pytest.mark.extras
class TestReasoningGym:
    def test_the_same_arguments_give_the_same_rows(self) -> None:
        first, second, other = (
            open_dataset("reasoning-gym:chain_sum", dataset_args={"size": 3, "seed": seed}) for seed in (1, 1, 2)
        )
        assert rows_of(first) == rows_of(second) != rows_of(other)
        assert first.fingerprint == second.fingerprint != other.fingerprint
        assert first.columns == ("question", "answer", "metadata")

    def test_wrong_names_and_arguments_are_data_errors(self) -> None:
        with pytest.raises(DataError, match="no 'chain_sums'; nearest: chain_sum"):
            open_dataset("reasoning-gym:chain_sums")
        with pytest.raises(DataError, match="sizes"):
            open_dataset("reasoning-gym:chain_sum", dataset_args={"sizes": 3})


@pytest.mark.parametrize("name", ["tasks.jsonl", "folder"])
def test_a_silent_server_times_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/{name}"
        with pytest.raises(DataError, match=f"dataset {url}: its server has not answered for 0 s; check the address"):
            open_dataset(url)


def test_the_fingerprint_of_a_saved_dataset_is_of_its_rows(tmp_path: Path) -> None:
    saved = pytest.importorskip("datasets").Dataset
    for name, rows in (("first", ROWS), ("again", ROWS), ("other", ROWS[::-1])):
        saved.from_list(rows).save_to_disk(str(tmp_path / name))
        state = json.loads((tmp_path / name / "state.json").read_text())
        (tmp_path / name / "state.json").write_text(json.dumps({**state, "_fingerprint": "the same"}))
    first, again, other = (open_dataset(str(tmp_path / name)).fingerprint for name in ("first", "again", "other"))
    assert first == again != other


def test_the_longest_and_evenly_spaced_rows_are_tokenized() -> None:
    said, tokenized = list[str](), list[int]()

    def read(number: int) -> int:
        if number == 7:
            raise DataError("row 7 is bad")
        return 900 if number == 123_457 else 5

    def tokenize(number: int) -> None:
        tokenized.append(number)
        if number == 123_457:
            raise DataError("row 123457 is long")

    text = "row 7 is bad; rows with errors: 2 (7, 123457)"
    assert find_bad_rows("data", 200_000, read, tokenize, said.append) == (2, text)
    assert tokenized[0] == 123_457
    assert set(range(0, 200_000, 400)) < set(tokenized)
    assert len(tokenized) <= 1000
    count = len(tokenized)
    assert said == [f"data: the lengths of {count} of 200000 rows are checked, the longest and some in between"]


def test_all_rows_of_a_small_dataset_are_tokenized_once() -> None:
    said, tokenized = list[str](), list[int]()
    assert find_bad_rows("data", 1000, lambda number: 1, tokenized.append, said.append) == (0, "")
    assert (tokenized, said) == (list(range(1000)), [])
