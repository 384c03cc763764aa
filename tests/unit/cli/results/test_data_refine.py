"""Promises of `rftdask data refine`: the result does not depend on workers, and an interrupted command continues."""

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftdask.cli.results import data_refine as module
from rftdask.cli.results.data_refine import REPORT, Refined, Steps, on_workers, read_parts, refine
from rftdask.data.datasets import open_dataset
from rftdask.data.juicer.environment import PLACE
from rftdask.errors import DataError, UserError
from tests.unit.data.fake_data_juicer.environment import make_stand_in

ROWS = [{"prompt": f"q{number % 7} ", "level": number % 5} for number in range(20)]
SCORE = """
def level(row):
    return {"score": row["level"], "double": 2 * row["level"]}


def fails(row):
    return 1 / (row["level"] - 3)
"""


def here(function: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
    return [function(number) for number in numbers]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (tmp_path / "own_refine_scores.py").write_text(SCORE)
    monkeypatch.syspath_prepend(tmp_path)
    return str(path)


def kept(out: Path) -> list[str]:
    dataset = open_dataset(str(out))
    return [dataset[number]["source_row"] for number in range(len(dataset))]


@pytest.mark.parametrize("part_rows", [1, 7, 1000])
def test_the_result_does_not_depend_on_the_parts(
    rows: str, tmp_path: Path, part_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_ROWS", part_rows)
    steps = Steps("level > 0", unique=("prompt",), score="own_refine_scores.level", top=3)
    result = refine(rows, str(tmp_path / "out"), steps, here)
    # Without level 0 rows 1 to 4, 6 to 9 and so on; each text once: 1, 2, 3, 4, 6, 7, 12; the three of largest level.
    assert kept(tmp_path / "out") == ["rows.jsonl#2", "rows.jsonl#3", "rows.jsonl#4"]
    assert result.rows_in == 20 == result.rows_out + sum(result.dropped.values())
    assert result.dropped == {"not (level > 0)": 4, "with the text of an earlier row in prompt": 9, "below the top": 4}
    assert json.loads((tmp_path / "out" / REPORT).read_text())["rows_out"] == 3
    assert sorted(each.name for each in (tmp_path / "out").iterdir() if each.suffix != ".parquet") == [
        "report",
        "scored",
    ]


def test_a_score_is_a_column_and_parquet_is_read_by_row_groups(rows: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet", row_group_size=6)
    assert [part.count for part in read_parts(str(tmp_path / "in.parquet"))] == [6, 6, 6, 2]
    refine(str(tmp_path / "in.parquet"), str(tmp_path / "out"), Steps(score="own_refine_scores.level"), here)
    dataset = open_dataset(str(tmp_path / "out"))
    assert [dataset[4][name] for name in ("level", "score", "double")] == [4, 4.0, 8.0]


def test_a_column_that_the_first_row_lacks_is_kept(rows: str, tmp_path: Path) -> None:
    with open(rows, "a") as file:
        file.write(json.dumps({"prompt": "q", "answer": "4"}) + "\n")
    refine(rows, str(tmp_path / "out"), Steps("level > 3 OR answer = '4'"), here)
    dataset = open_dataset(str(tmp_path / "out"))
    assert [dataset[number].get("answer") for number in range(len(dataset))] == [*[None] * 4, "4"]


@pytest.mark.parametrize("part_rows", [6, 1000])
def test_filters_and_mappers_change_rows_and_columns(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_rows: int
) -> None:
    monkeypatch.setenv(PLACE, str(make_stand_in(tmp_path / "environment")))
    monkeypatch.setattr(module, "PART_ROWS", part_rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": "x" * n, "n": n}) + "\n" for n in range(1, 9)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("text_keys: q\nprocess: [{text_length_filter: {min_len: 3}}, {upper_mapper: {}}]\n")
    result = refine(rows, str(tmp_path / "out"), Steps("n != 1", str(recipe)), here)
    assert result.dropped == {"not (n != 1)": 1, "by text_length_filter (operator 1)": 1}
    assert result.examples["by text_length_filter (operator 1)"] == ["rows.jsonl#1"]
    dataset = open_dataset(str(tmp_path / "out"))
    assert [dict(dataset[number]) for number in (0, 3)] == [
        {"q": "XXX", "n": 3, "source_row": "rows.jsonl#2", "text_len": 3.0, "alnum_ratio": 1.0},
        {"q": "XXXXXX", "n": 6, "source_row": "rows.jsonl#5", "text_len": 6.0, "alnum_ratio": 1.0},
    ]
    assert isinstance(dataset[0]["text_len"], float), "in all parts, whatever their numbers are"
    recipe.write_text("text_keys: q\nprocess: [upper_mapper]\n")
    with pytest.raises(UserError, match="was made by another command"):
        refine(rows, str(tmp_path / "out"), Steps("n != 1", str(recipe)), here)


def test_the_same_command_continues_and_another_is_refused(rows: str, tmp_path: Path) -> None:
    steps, out = Steps(unique=("prompt",)), str(tmp_path / "out")
    done: list[int] = []

    def ends_early(function: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
        done.extend(numbers)
        here(function, numbers)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refine(rows, out, steps, ends_early)
    scored = tmp_path / "out/scored/000000.parquet"
    before = scored.stat().st_mtime_ns
    with pytest.raises(UserError, match="was made by another command"):
        refine(rows, out, Steps(where="level > 1"), here)
    seen: list[int] = []

    def looks(function: Callable[[int], Any], numbers: Sequence[int]) -> list[Any]:
        seen.append(scored.stat().st_mtime_ns)
        return here(function, numbers)

    assert refine(rows, out, steps, looks).rows_out == 7
    assert seen == [before, before]  # the first part was not done again
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("")
    with pytest.raises(UserError, match="is not empty, and was not made by this command"):
        refine(rows, str(tmp_path / "full"), steps, here)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ({"where": "colour = 1"}, r"--where 'colour = 1': .*colour.*\(columns: prompt, level"),
        ({"unique": ("text",)}, "--unique text: no such column; columns: prompt, level"),
        ({"score": "own_refine_scores.fails"}, r"row rows.jsonl#3: ZeroDivisionError"),
        ({"score": "own_refine_scores.none"}, "has no 'none'"),
        ({"juicer": "[1"}, "--juicer: not a JSON list"),
        ({"juicer": "nowhere.yaml"}, "--juicer nowhere.yaml: .*No such file"),
        ({"juicer": '["document_deduplicator"]'}, "--juicer: document_deduplicator: a worker sees a part of the rows"),
        ({"where": "level > 9"}, "no row of .* remains: 0 of 20 rows remain"),
    ],
)
def test_a_wrong_step_raises_with_its_row_or_column(rows: str, tmp_path: Path, steps: Any, told: str) -> None:
    with pytest.raises((DataError, UserError), match=f"(?s){told}"):
        refine(rows, str(tmp_path / "out"), Steps(**steps), here)


def test_steps_and_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to do"):
        Steps()
    with pytest.raises(UserError, match="give both"):
        Steps(unique=("a",), top=3)
    with pytest.raises(DataError, match=r"no rows in \.jsonl or \.parquet files"):
        read_parts(str(tmp_path / "absent"))
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not an object"):
        refine(str(tmp_path / "bad.jsonl"), str(tmp_path / "out"), Steps(unique=("a",)), here)
    told = Refined(3, 1, {"below the top": 2}, {"below the top": ["a#0", "a#1"]})
    assert told.render() == "1 of 3 rows remain\n  2 below the top, such as a#0, a#1"


@pytest.mark.slow
def test_dask_workers_give_the_same_result(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 5)
    steps = Steps("level > 0", unique=("prompt",))
    refine(rows, str(tmp_path / "here"), steps, here)
    # Dask's own port may be another cluster's; a warning of it is an error here.
    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 8787))
        with on_workers(2) as submit:
            refine(rows, str(tmp_path / "there"), steps, submit)
    assert kept(tmp_path / "there") == kept(tmp_path / "here")
