"""Task pipeline: `data_processor.task_pipeline`, which makes the dataset of a run before it starts.

    inputs -> rows with text -> Data-Juicer's operators -> scores, order, top_k -> dataset/rows.jsonl, report.json

The first taskset, or the dataset of SFT and preferences, reads the result (`Config.pipeline_place`). It is made once: a
later start takes it as it is, and another pipeline in its folder is refused. Columns that no operator changed are as
they were, to the last type. Invariant: report.json is written last, so with it the dataset is whole.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard

from rftdask.config import Config, replace
from rftdask.config.base import plain
from rftdask.config.schema.run import MADE_ROWS
from rftdask.data.datasets import open_dataset
from rftdask.data.juicer.base import OperatorResult, Pipeline, as_list, read_operators, read_recipe
from rftdask.data.juicer.environment import VERSION, find_environment
from rftdask.data.juicer.session import check_juicer, open_juicer
from rftdask.errors import DataError, NotFoundError, StorageError, UserError
from rftdask.storage import open_storage

log = logging.getLogger(__name__)

KEY = "data_processor.task_pipeline"
REPORT, READABLE, LOG = "dataset/report.json", "dataset/report.txt", "dataset/data_juicer.log"
SOURCE = "source_row"
"""Column that says where a row is from, FILE#ROW, unless the rows have one of that name."""
WEIGHTS = {"difficulty": -0.7, "usage_frequency": -0.5, "quality": 1.0}
"""Of the priority, unless others are given. Nothing has been used before the first step, so the second adds 0."""
QUALITY = {
    "alnum_ratio": 1,
    "char_rep_ratio": -1,
    "flagged_words_ratio": -1,
    "special_char_ratio": -1,
    "stopwords_ratio": 1,
    "word_rep_ratio": -1,
    "llm_quality_score": 1,
}
"""Statistics within [0, 1] whose mean is the quality; -1: less is better, so one minus it counts."""
DIFFICULTY = {"perplexity": 1, "lang_score": -1, "llm_difficulty_score": 1}
"""The same of the difficulty; the perplexity is scaled to [0, 1] over the dataset."""
_NUM_SHOWN = 3


def check_pipeline(stage: Config) -> None:
    """Whether the dataset of a stage could be made here, unless it is made already; makes nothing.

    Raises: NotInstalledError: there is no environment; UserError: an operator or an argument does not exist, the
        service does not answer, or the folder has the dataset of another pipeline.
    """
    if not stage.makes_dataset or _is_made(stage):
        return
    url = stage.service.data_juicer.server_url
    with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
        check_juicer(_read_section(stage)[0], Path(folder, "log"), KEY, server_url=url)


@contextmanager
def standing_in(stages: Sequence[Config]) -> Iterator[list[Config]]:
    """The stages with what goes into their pipelines in place of what comes out, where that is not made yet: for the
    checks before anything starts. Raises: DataError: an input cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
        found = []
        for number, stage in enumerate(stages):
            if stage.makes_dataset and not _is_made(stage):
                file = Path(folder, f"{number}.jsonl")
                _write(file, _gather(stage)[0])
                stage = replace(stage, {**_at(stage, str(file)), KEY: {}})
            found.append(stage)
        yield found


def missing_datasets(stages: Sequence[Config]) -> list[Config]:
    """The stages whose dataset is not made yet. Raises: UserError: one is there, of another pipeline."""
    return [stage for stage in stages if stage.makes_dataset and not _is_made(stage)]


def make_datasets(stages: Sequence[Config], say: Callable[[str], None]) -> bool:
    """Make what is not made of the datasets of the stages, of which no other process does. Returns: whether there was
    any.

    say: is told what happens, since it may take hours.

    Raises: DataError: an input cannot be read, an operator failed, or nothing stays; NotInstalledError: an operator
        needs a package; ProcessLostError, WaitTimeout: the process of Data-Juicer died or hangs.
    """
    missing = missing_datasets(stages)
    for stage in missing:
        say(f"{KEY}:")
        say(_make(stage, say))
    return bool(missing)


def score_rows(stats: Sequence[Mapping[str, Any]], weights: Mapping[str, float]) -> list[dict[str, float]]:
    """`quality_score`, `difficulty_score` and `priority` of each row, as far as its statistics go.

    stats: what Data-Juicer's filters measured of each row. A row of which nothing of both was measured has no scores.
    """
    seen = [row["perplexity"] for row in stats if _is_number(row.get("perplexity"))]
    low, high = (min(seen), max(seen)) if seen else (0.0, 0.0)
    scores = []
    for row in stats:
        found: dict[str, float] = {}
        for name, parts in (("quality_score", QUALITY), ("difficulty_score", DIFFICULTY)):
            values: list[float] = []
            for key, sign in parts.items():
                if not _is_number(value := row.get(key)):
                    continue
                if key == "perplexity":  # alike in all rows it says nothing
                    value = (value - low) / (high - low) if high > low else 0.0
                values.append(value if sign > 0 else 1.0 - value)
            if values:
                found[name] = sum(values) / len(values)
        if found:
            parts_of = (("quality", "quality_score"), ("difficulty", "difficulty_score"))
            found["priority"] = sum(weights.get(weight, 0.0) * found.get(name, 0.0) for weight, name in parts_of)
        scores.append(found)
    return scores


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_section(stage: Config) -> tuple[Pipeline, list[str]]:
    """What is run, and over which inputs. Raises: DataError: the recipe is none, or asks for what is not taken."""
    section = stage.data_processor.task_pipeline
    recipe: dict[str, Any] = {}
    operators = read_operators(section.operators, f"{KEY}.operators")
    if section.config_path is not None:
        recipe = read_recipe(section.config_path, f"{KEY}.config_path")
        operators = read_operators(recipe["process"], f"{KEY}.config_path {section.config_path}: process")
    inputs = list(section.inputs) or [str(path) for path in [recipe.get("dataset_path")] if path]
    if not inputs:
        raise DataError(f"{KEY}.inputs: required, since the recipe {section.config_path} has no dataset_path")
    return Pipeline(
        operators=operators,
        text_key=_fields(stage, recipe)[0],
        num_process=int(recipe.get("np") or section.num_process),
        custom_operator_paths=as_list(recipe.get("custom_operator_paths")),
    ), inputs


def _fields(stage: Config, recipe: Mapping[str, Any]) -> list[str]:
    """Columns that have to hold something; the first is the one that operators of text read."""
    section, dataset = stage.data_processor.task_pipeline, stage.pipeline_dataset
    assert dataset is not None
    return list(section.target_fields) or as_list(recipe.get("text_keys")) or [dataset.format.prompt_key]


def _told(stage: Config) -> dict[str, Any]:
    """What decides which rows come out, beside the rows that go in."""
    section, dataset = stage.data_processor.task_pipeline, stage.pipeline_dataset
    assert dataset is not None
    pipeline, inputs = _read_section(stage)
    return {
        "operators": list(pipeline.operators),
        "custom_operator_paths": list(pipeline.custom_operator_paths),
        "inputs": inputs,
        "split": dataset.split,
        "subset_name": dataset.subset_name,
        "text_key": pipeline.text_key,
        "target_fields": list(section.target_fields),
        "priority_weights": plain(section.priority_weights) or WEIGHTS,
        "top_k": section.top_k,
        "data_juicer": VERSION,
    }


def _is_made(stage: Config) -> bool:
    """Whether the dataset is there. Raises: UserError: it is of another pipeline."""
    storage = open_storage(stage.checkpoint_job_dir)
    try:
        report = json.loads(storage.get(REPORT))
    except NotFoundError:
        return False
    told = json.loads(json.dumps(_told(stage)))
    if other := [key for key in told if report["pipeline"].get(key) != told[key]]:
        changes = "".join(f"\n  {key}: was {report['pipeline'].get(key)!r}, is {told[key]!r}" for key in other)
        raise UserError(
            f"{storage.url}/{MADE_ROWS} was made by another {KEY}:{changes}\nset it back, choose another name, or "
            f"remove {storage.url}/{os.path.dirname(MADE_ROWS)} to make it again"
        )
    for path, fingerprint in report["inputs"].items():
        with suppress(DataError):  # it need not be there any more
            if os.path.isfile(path) and open_dataset(path).fingerprint != fingerprint:
                log.warning("%s.inputs: %s has changed; the run has the dataset that was made of it before", KEY, path)
    return True


def _gather(stage: Config) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All rows of the inputs, each with its source; and the fingerprints of the inputs."""
    rows: list[dict[str, Any]] = []
    fingerprints = {}
    dataset = stage.pipeline_dataset
    assert dataset is not None
    for path in _read_section(stage)[1]:
        read = open_dataset(path, split=dataset.split, subset_name=dataset.subset_name)
        fingerprints[path] = read.fingerprint
        name = os.path.basename(path.rstrip("/"))
        rows += [{SOURCE: f"{name}#{number}", **read[number]} for number in range(len(read))]
    return rows, fingerprints


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            try:
                out.write(json.dumps(row) + "\n")
            except TypeError as error:
                raise DataError(f"{KEY}.inputs: row {row[SOURCE]}: {error}; it takes what JSON can say") from error


def _make(stage: Config, say: Callable[[str], None]) -> str:
    """Make the dataset of a stage; the report for people."""
    began, storage, told = time.monotonic(), open_storage(stage.checkpoint_job_dir), _told(stage)
    url, (pipeline, _) = stage.service.data_juicer.server_url, _read_section(stage)
    gathered, fingerprints = _gather(stage)
    # As the reference does: an operator is given no row without text.
    fields = told["target_fields"] or [told["text_key"]]
    if absent := [field for field in fields if not any(field in row for row in gathered)]:
        columns = ", ".join(dict.fromkeys(key for row in gathered for key in row))
        raise DataError(f"{KEY}.target_fields: no row has {', '.join(absent)}; there are {columns}")
    rows = [row for row in gathered if all(row.get(field) is not None for field in fields)]
    empty = [str(row[SOURCE]) for row in gathered if not all(row.get(field) is not None for field in fields)]
    results: list[OperatorResult] = []

    def on_result(result: OperatorResult) -> None:
        results.append(result)
        say(f"  {result.operator}: {result.rows:,} left")

    with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
        said = Path(folder, "log")
        try:
            with open_juicer(pipeline, said, KEY, server_url=url) as juicer:
                say(f"  {len(rows):,} rows go through {len(pipeline.operators)} operators of Data-Juicer")
                lines = juicer.run(rows, on_result)
        finally:
            if url is None:  # a service keeps its own
                with suppress(StorageError, OSError):  # what failed before says more
                    storage.put(LOG, said.read_bytes())
    # Of equal priority in the order of the inputs; without scores all are equal.
    scores = score_rows([line.stats for line in lines], told["priority_weights"])
    order = sorted(range(len(lines)), key=lambda number: -scores[number].get("priority", 0.0))
    staying = order if told["top_k"] == -1 else order[: told["top_k"]]
    made = []
    for number in staying:
        line = lines[number]
        row = {key: value for key, value in rows[line.row].items() if key not in line.removed}
        made.append({**row, **line.changed, **line.stats, **scores[number]})
    below = [str(rows[lines[number].row][SOURCE]) for number in order[len(staying) :]]
    dropped = [
        {"why": f"without a value in {', '.join(fields)}", "rows": empty},
        *_by_operator(results, rows),
        {"why": f"below the top {told['top_k']:,} by priority", "rows": below},
    ]
    report = {
        "pipeline": told,
        "inputs": fingerprints,
        "service": url,
        "packages": {} if url else dict(find_environment(KEY).packages),
        "rows_in": len(gathered),
        "rows_out": len(made),
        "dropped": [{**each, "count": len(each["rows"])} for each in dropped if each["rows"]],
        "seconds": round(time.monotonic() - began, 1),
    }
    readable = _render(report)
    if not made:
        raise DataError(f"{KEY}: no row stays:\n{readable}")
    storage.put(MADE_ROWS, "".join(json.dumps(row, default=str) + "\n" for row in made).encode())
    storage.put(READABLE, readable.encode())
    storage.put(REPORT, json.dumps(report, indent=1).encode())
    return readable


def _by_operator(results: Sequence[OperatorResult], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"why": f"by {each.operator} (operator {number})", "rows": [str(rows[row][SOURCE]) for row in each.dropped]}
        for number, each in enumerate(results, start=1)
    ]


def _render(report: Mapping[str, Any]) -> str:
    lines = [f"{report['rows_out']:,} rows of {report['rows_in']:,} in {', '.join(report['inputs'])}"]
    for each in report["dropped"]:
        lines.append(f"  {each['count']:,} dropped {each['why']}, such as {', '.join(each['rows'][:_NUM_SHOWN])}")
    names = [name for entry in report["pipeline"]["operators"] for name in entry]
    by = f"the service at {report['service']}" if report["service"] else f"Data-Juicer {VERSION}"
    lines.append(f"operators: {', '.join(names)}; {by}; {report['seconds']} s")
    return "\n".join(lines) + "\n"


def _at(stage: Config, path: str) -> dict[str, Any]:
    """The change of a config that gives its dataset another path."""
    place = stage.pipeline_place or ()
    if place[-1] != 0:
        return {".".join(map(str, (*place, "path"))): path}
    first, *others = plain(stage.buffer.explorer_input.tasksets)  # a list can be replaced, not addressed
    return {".".join(map(str, place[:-1])): [{**first, "path": path}, *others]}
