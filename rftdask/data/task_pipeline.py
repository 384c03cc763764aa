"""Task pipeline: makes the dataset of a run before it starts, as `data_processor.task_pipeline` configures it.

    inputs -> rows with text -> Data-Juicer's operators -> scores, order, top_k -> dataset/rows.jsonl, report.json

The first taskset, or the dataset of SFT and preferences, reads the result (`Config.pipeline_place`). It is made once: a
later start uses it, and a different pipeline in the same folder is refused. Columns that no operator changed keep
values and types. Invariant: report.json is written last, so a dataset with a report is complete.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard

from rftdask.config import Config, replace
from rftdask.config.base import plain
from rftdask.config.schema.run import MADE_ROWS
from rftdask.data.datasets import open_dataset, own_value
from rftdask.data.juicer import check_juicer, open_juicer
from rftdask.data.juicer.base import OperatorResult, Pipeline, make_pipeline, read_recipe
from rftdask.data.juicer.environment import VERSION, find_environment
from rftdask.errors import DataError, NotFoundError, StorageError, UserError
from rftdask.storage import open_storage
from rftdask.storage.temporary import TemporaryFolder

log = logging.getLogger(__name__)

KEY = "data_processor.task_pipeline"
REPORT, READABLE, LOG = "dataset/report.json", "dataset/report.txt", "dataset/data_juicer.log"
SOURCE = "source_row"
"""Column with the origin of a row, FILE#ROW, unless the rows have a column of that name."""
WEIGHTS = {"difficulty": -0.7, "usage_frequency": -0.5, "quality": 1.0}
"""Default weights of the priority. Before the first step no row was used, so usage_frequency adds 0."""
QUALITY = {
    "alnum_ratio": 1,
    "char_rep_ratio": -1,
    "flagged_words_ratio": -1,
    "special_char_ratio": -1,
    "stopwords_ratio": 1,
    "word_rep_ratio": -1,
    "llm_quality_score": 1,
}
"""Statistics within [0, 1] whose mean is the quality. -1: less is better, so 1 - value counts."""
DIFFICULTY = {"perplexity": 1, "lang_score": -1, "llm_difficulty_score": 1}
"""Statistics of the difficulty, as in QUALITY; the perplexity is scaled to [0, 1] over the dataset."""
NUM_EXAMPLES = 3
"""Number of dropped rows that a report for people shows per reason."""


def check_pipeline(stage: Config) -> None:
    """Check that the dataset of a stage exists or can be made here; makes nothing.

    Raises: NotInstalledError: there is no environment; UserError: an operator or an argument does not exist, the
        service does not answer, or the folder has the dataset of a different pipeline.
    """
    if not stage.makes_dataset or _is_made(stage):
        return
    check_juicer(_read_section(stage)[0], KEY, server_url=stage.service.data_juicer.server_url)


@contextmanager
def standing_in(stages: Sequence[Config]) -> Iterator[list[Config]]:
    """Provide the stages for checks before the start: where a dataset is not made yet, they read the pipeline's input.

    Raises: DataError: an input cannot be read.
    """
    with TemporaryFolder("pipeline") as folder:
        checked = []
        for number, stage in enumerate(stages):
            if stage.makes_dataset and not _is_made(stage):
                file = Path(folder, f"{number}.jsonl")
                _write(file, _gather(stage)[0])
                stage = replace(stage, {**_at(stage, str(file)), KEY: {}})
            checked.append(stage)
        yield checked


def missing_datasets(stages: Sequence[Config]) -> list[Config]:
    """Return the stages whose dataset is not made yet. Raises: UserError: a different pipeline made one."""
    return [stage for stage in stages if stage.makes_dataset and not _is_made(stage)]


def make_datasets(stages: Sequence[Config], say: Callable[[str], None]) -> bool:
    """Make the missing datasets of the stages. Only one process may do this. Returns: True if there were any.

    say: called with lines on the progress, which may take hours.
    Raises: DataError: an input cannot be read, an operator failed, or no row remains; NotInstalledError: an operator
        needs a package; ProcessLostError, WaitTimeout: the process of Data-Juicer died or hangs.
    """
    missing = missing_datasets(stages)
    for stage in missing:
        say(f"{KEY}:")
        say(_make(stage, say))
    return bool(missing)


def score_rows(stats: Sequence[Mapping[str, Any]], weights: Mapping[str, float]) -> list[dict[str, float]]:
    """Compute `quality_score`, `difficulty_score` and `priority` of each row, if it has statistics for them.

    stats: statistics of Data-Juicer's filters per row.
    """
    perplexities = [row["perplexity"] for row in stats if _is_number(row.get("perplexity"))]
    low, high = (min(perplexities), max(perplexities)) if perplexities else (0.0, 0.0)
    scores = []
    for row in stats:
        row_scores: dict[str, float] = {}
        for name, parts in (("quality_score", QUALITY), ("difficulty_score", DIFFICULTY)):
            values: list[float] = []
            for key, sign in parts.items():
                if not _is_number(value := row.get(key)):
                    continue
                if key == "perplexity":  # a constant carries no information
                    value = (value - low) / (high - low) if high > low else 0.0
                values.append(value if sign > 0 else 1.0 - value)
            if values:
                row_scores[name] = sum(values) / len(values)
        if row_scores:
            row_scores["priority"] = sum(
                weights.get(name, 0.0) * row_scores.get(f"{name}_score", 0.0) for name in ("quality", "difficulty")
            )
        scores.append(row_scores)
    return scores


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_section(stage: Config) -> tuple[Pipeline, list[str]]:
    """Return the pipeline of a stage and its inputs. Raises: DataError: an invalid recipe, or unsupported keys."""
    section = stage.data_processor.task_pipeline
    recipe: dict[str, Any] = {}
    entries, where = section.operators, f"{KEY}.operators"
    if section.config_path is not None:
        recipe = read_recipe(section.config_path, f"{KEY}.config_path")
        entries, where = recipe["process"], f"{KEY}.config_path {section.config_path}: process"
    inputs = list(section.inputs) or [str(path) for path in [recipe.get("dataset_path")] if path]
    if not inputs:
        raise DataError(f"{KEY}.inputs: required, since the recipe {section.config_path} has no dataset_path")
    # Text operators read the first of the columns that must have a value.
    dataset = stage.pipeline_dataset
    assert dataset is not None
    fields = list(section.target_fields) or recipe.get("text_keys") or [dataset.format.prompt_key]
    return make_pipeline(entries, where, recipe, fields[0], section.num_process), inputs


def _identity(stage: Config) -> dict[str, Any]:
    """Return everything that determines the output rows, except the content of the inputs."""
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
    """Return True if the dataset exists. Raises: UserError: a different pipeline made it."""
    storage = open_storage(stage.checkpoint_job_dir)
    try:
        report = json.loads(storage.get(REPORT))
    except NotFoundError:
        return False
    new, old = json.loads(json.dumps(_identity(stage))), report["pipeline"]
    if changed := [key for key in new if old.get(key) != new[key]]:
        changes = "".join(f"\n  {key}: was {old.get(key)!r}, is {new[key]!r}" for key in changed)
        raise UserError(
            f"{storage.url}/{MADE_ROWS} was made by another {KEY}:{changes}\nset it back, choose another name, or "
            f"remove {storage.url}/{os.path.dirname(MADE_ROWS)} to make it again"
        )
    for path, fingerprint in report["inputs"].items():
        with suppress(DataError):  # the input is no longer needed
            if os.path.isfile(path) and open_dataset(path).fingerprint != fingerprint:
                log.warning("%s.inputs: %s has changed; the run keeps the dataset made from its old rows", KEY, path)
    return True


def _gather(stage: Config) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return all rows of the inputs, each with its source, and the fingerprints of the inputs."""
    rows: list[dict[str, Any]] = []
    fingerprints = {}
    dataset = stage.pipeline_dataset
    assert dataset is not None
    for path in _read_section(stage)[1]:
        read = open_dataset(path, split=dataset.split, subset_name=dataset.subset_name)
        fingerprints[path] = read.fingerprint
        name = os.path.basename(path.rstrip("/"))
        for number in range(len(read)):
            row = read[number]
            # Without the nulls of Arrow structs, because JSON has no way to distinguish them from stored ones.
            rows.append({SOURCE: f"{name}#{number}", **{column: own_value(row, column) for column in row}})
    return rows, fingerprints


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            try:
                out.write(json.dumps(row) + "\n")
            except TypeError as error:
                raise DataError(f"{KEY}.inputs: row {row[SOURCE]}: {error}; only JSON values are supported") from error


def _make(stage: Config, say: Callable[[str], None]) -> str:
    """Make the dataset of a stage; return the report for people."""
    began, storage, identity = time.monotonic(), open_storage(stage.checkpoint_job_dir), _identity(stage)
    url, (pipeline, _) = stage.service.data_juicer.server_url, _read_section(stage)
    gathered, fingerprints = _gather(stage)
    # As in the reference, operators get no rows without text.
    fields = identity["target_fields"] or [identity["text_key"]]
    if absent := [field for field in fields if not any(field in row for row in gathered)]:
        columns = ", ".join(dict.fromkeys(key for row in gathered for key in row))
        raise DataError(f"{KEY}.target_fields: no row has {', '.join(absent)}; the columns are {columns}")
    rows = [row for row in gathered if all(row.get(field) is not None for field in fields)]
    empty = [str(row[SOURCE]) for row in gathered if any(row.get(field) is None for field in fields)]
    results: list[OperatorResult] = []

    def on_result(result: OperatorResult) -> None:
        results.append(result)
        say(f"  {result.operator}: {result.rows:,} left")

    with TemporaryFolder("pipeline") as folder:
        log_file = Path(folder, "log")
        try:
            with open_juicer(pipeline, KEY, server_url=url, log_file=log_file) as juicer:
                say(f"  {len(rows):,} rows go through {len(pipeline.operators)} operators of Data-Juicer")
                lines = juicer.run(rows, on_result)
        finally:
            if url is None:  # a service has its own log
                with suppress(StorageError, OSError):  # must not hide the first error
                    storage.put(LOG, log_file.read_bytes())
    # A stable sort: rows of equal priority, or without scores, keep the order of the inputs.
    scores = score_rows([line.stats for line in lines], identity["priority_weights"])
    order = sorted(range(len(lines)), key=lambda number: -scores[number].get("priority", 0.0))
    top = order if identity["top_k"] == -1 else order[: identity["top_k"]]
    made = []
    for number in top:
        line = lines[number]
        row = {key: value for key, value in rows[line.row].items() if key not in line.removed}
        made.append({**row, **line.changed, **line.stats, **scores[number]})
    dropped = {f"without a value in {', '.join(fields)}": empty}
    for number, result in enumerate(results, start=1):
        dropped[f"by {result.operator} (operator {number})"] = [str(rows[row][SOURCE]) for row in result.dropped]
    below = [str(rows[lines[number].row][SOURCE]) for number in order[len(top) :]]
    dropped[f"below the top {identity['top_k']:,} by priority"] = below
    report = {
        "pipeline": identity,
        "inputs": fingerprints,
        "service": url,
        "packages": {} if url else dict(find_environment(KEY).packages),
        "rows_in": len(gathered),
        "rows_out": len(made),
        "dropped": [{"why": why, "rows": rows, "count": len(rows)} for why, rows in dropped.items() if rows],
        "seconds": round(time.monotonic() - began, 1),
    }
    readable = _render(report)
    if not made:
        raise DataError(f"{KEY}: no row remains:\n{readable}")
    storage.put(MADE_ROWS, "".join(json.dumps(row, default=str) + "\n" for row in made).encode())
    storage.put(READABLE, readable.encode())
    storage.put(REPORT, json.dumps(report, indent=1).encode())
    return readable


def _render(report: Mapping[str, Any]) -> str:
    lines = [f"{report['rows_out']:,} rows of {report['rows_in']:,} in {', '.join(report['inputs'])}"]
    for drop in report["dropped"]:
        lines.append(f"  {drop['count']:,} dropped {drop['why']}, such as {', '.join(drop['rows'][:NUM_EXAMPLES])}")
    names = [name for entry in report["pipeline"]["operators"] for name in entry]
    by = f"the service at {report['service']}" if report["service"] else f"Data-Juicer {VERSION}"
    lines.append(f"operators: {', '.join(names)}; {by}; {report['seconds']} s")
    return "\n".join(lines) + "\n"


def _at(stage: Config, path: str) -> dict[str, Any]:
    """Return the config change that sets the path of a stage's dataset."""
    place = stage.pipeline_place or ()
    if place[-1] != 0:
        return {".".join(map(str, (*place, "path"))): path}
    first, *others = plain(stage.buffer.explorer_input.tasksets)  # a list can be replaced, not addressed
    return {".".join(map(str, place[:-1])): [{**first, "path": path}, *others]}
