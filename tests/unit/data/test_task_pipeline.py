"""Promises of `data_processor.task_pipeline`, with fake_data_juicer in an environment of its own."""

import ast
import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdask.config import Config, load_config, replace
from rftdask.data.datasets import open_dataset
from rftdask.data.juicer import environment as environments
from rftdask.data.juicer import runner
from rftdask.data.juicer.base import Pipeline
from rftdask.data.juicer.environment import PLACE, Environment, find_environment, set_up
from rftdask.data.juicer.process import JuicerProcess
from rftdask.data.task_pipeline import REPORT, WEIGHTS, check_pipeline, make_datasets, score_rows, standing_in
from rftdask.errors import ConfigError, DataError, NotInstalledError, ProcessLostError, RftError, UserError, WaitTimeout
from rftdask.run.run_folder import check_run, open_run
from rftdask.storage import open_storage
from tests.living import wait_until_gone
from tests.unit.data.fake_data_juicer.environment import make_stand_in
from tests.unit.test_project import imported_names

SHORT = {"name": "text_length_filter", "args": {"min_len": 5}}
ROWS: list[dict[str, Any]] = [
    {"question": "what?!?!", "answer": 1},
    {"question": "one and one", "answer": 2.5, "level": {"a": 1}},
    {"question": "no", "answer": 3},
    {"answer": 4},
    {"question": "how many", "answer": 5, "tags": ["x"]},
]


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with only the fake."""
    return make_stand_in(tmp_path_factory.mktemp("juicer") / "environment")


@pytest.fixture
def here(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with tasks and an installed Data-Juicer; checks that nothing was installed."""
    monkeypatch.setenv(PLACE, str(stand_in))
    monkeypatch.setenv("FAKE_INSTALLED", str(tmp_path / "installed"))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    yield tmp_path
    assert not (tmp_path / "installed").exists()


def tree(folder: Path, operators: list[dict[str, Any]], **pipeline: Any) -> dict[str, Any]:
    taskset = {"path": str(folder / "tasks.jsonl"), "format": {"prompt_key": "question", "response_key": "answer"}}
    return {
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": taskset}},
        "data_processor": {"task_pipeline": {"operators": operators, "num_process": 1, **pipeline}},
    }


def config(folder: Path, operators: list[dict[str, Any]], **pipeline: Any) -> Config:
    return load_config(tree(folder, operators, **pipeline))


def make(stages: list[Config]) -> bool:
    return make_datasets(stages, lambda line: None)


def made(config: Config) -> list[dict[str, Any]]:
    dataset = open_dataset(f"{config.checkpoint_job_dir}/dataset/rows.jsonl")
    return [dict(dataset[number]) for number in range(len(dataset))]


def report(config: Config) -> dict[str, Any]:
    return dict(json.loads(open_storage(config.checkpoint_job_dir).get(REPORT)))


def test_rows_are_ordered_by_priority_and_otherwise_unchanged(here: Path) -> None:
    stage = config(here, [SHORT, {"name": "upper_mapper"}], top_k=2)
    assert make([stage])
    # The share of letters: how many 7/8, one and one 9/11, what?!?! 1/2. An answer stays the number it was.
    rows = made(stage)
    assert [{key: row.get(key) for key in ("question", "answer", "tags", "level")} for row in rows] == [
        {"question": "HOW MANY", "answer": 5, "tags": ["x"], "level": None},
        {"question": "ONE AND ONE", "answer": 2.5, "tags": None, "level": {"a": 1}},
    ]
    assert isinstance(rows[0]["answer"], int)
    assert "level" not in rows[0]
    assert [row["source_row"] for row in rows] == ["tasks.jsonl#4", "tasks.jsonl#1"]
    assert rows[0]["priority"] == rows[0]["quality_score"] == rows[0]["alnum_ratio"] == 7 / 8
    assert {key for row in rows for key in row if "dj" in key} == set()


def test_every_dropped_row_has_a_reason(here: Path) -> None:
    stage, said = config(here, [SHORT], top_k=2), list[str]()
    make_datasets([stage], said.append)
    assert said[1:3] == ["  4 rows go through 1 operators of Data-Juicer", "  text_length_filter: 3 left"]
    made_report = report(stage)
    assert (made_report["rows_in"], made_report["rows_out"]) == (5, 2)
    assert [(drop["why"], drop["rows"]) for drop in made_report["dropped"]] == [
        ("without a value in question", ["tasks.jsonl#3"]),
        ("by text_length_filter (operator 1)", ["tasks.jsonl#2"]),
        ("below the top 2 by priority", ["tasks.jsonl#0"]),
    ]
    assert made_report["inputs"] == {str(here / "tasks.jsonl"): open_dataset(str(here / "tasks.jsonl")).fingerprint}
    assert made_report["packages"] == {"py-data-juicer": "fake"}
    folder = open_storage(stage.checkpoint_job_dir)
    assert folder.get("dataset/report.txt").startswith(b"2 rows of 5 in ")
    assert b"what a library prints" in folder.get("dataset/data_juicer.log")


def test_the_section_sets_processes_weights_inputs_and_columns(here: Path) -> None:
    stage = config(here, [SHORT], num_process=3, priority_weights={"quality": -1})
    make([stage])
    assert [row["source_row"] for row in made(stage)] == ["tasks.jsonl#0", "tasks.jsonl#1", "tasks.jsonl#4"]
    log = open_storage(stage.checkpoint_job_dir).get("dataset/data_juicer.log")
    assert b"text_length_filter in 3 processes" in log
    (here / "more.jsonl").write_text('{"question": "and one more", "tags": ["y"]}\n')
    inputs = [str(here / "tasks.jsonl"), str(here / "more.jsonl")]
    stage = replace(config(here, [SHORT], inputs=inputs, target_fields=["question", "tags"]), {"name": "other"})
    make([stage])
    assert {row["source_row"] for row in made(stage)} == {"tasks.jsonl#4", "more.jsonl#0"}


def test_scores_are_those_of_the_reference() -> None:
    """Trinity-RFT 0.6.0, service/data_juicer/server/utils.py: group_scores, compute_priority_scores; by hand."""
    stats = [
        {"alnum_ratio": 0.8, "char_rep_ratio": 0.3, "perplexity": 10.0, "lang_score": 0.9, "text_len": 4},
        {"alnum_ratio": 0.4, "char_rep_ratio": 0.1, "perplexity": 30.0, "lang_score": 0.5, "text_len": 4},
        {"alnum_ratio": 0.6, "perplexity": 20.0},
        {"text_len": 4},
    ]
    first, second, third, none = score_rows(stats, WEIGHTS)
    assert first == pytest.approx({"quality_score": 0.75, "difficulty_score": 0.05, "priority": 0.75 - 0.7 * 0.05})
    assert second == pytest.approx({"quality_score": 0.65, "difficulty_score": 0.75, "priority": 0.65 - 0.7 * 0.75})
    assert third == pytest.approx({"quality_score": 0.6, "difficulty_score": 0.5, "priority": 0.6 - 0.35})
    assert none == {}
    [alike] = score_rows([{"perplexity": 7.0}], {"difficulty": 2.0})
    assert alike == {"difficulty_score": 0.0, "priority": 0.0}


def test_an_existing_dataset_is_reused_by_its_pipeline(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = config(here, [SHORT])
    assert make([stage])
    before = report(stage)
    monkeypatch.setenv(PLACE, "/nowhere")  # not needed again
    check_pipeline(stage)
    assert not make([stage])
    with standing_in([stage]) as read:
        assert read == [stage]
    with caplog.at_level(logging.WARNING):
        (here / "tasks.jsonl").write_text('{"question": "another", "answer": 1}\n')
        assert not make([stage])
    assert "has changed; the run keeps the dataset made from its old rows" in caplog.text
    assert report(stage) == before
    with pytest.raises(UserError, match=r"made by another .*\n  top_k: was -1, is 1\nset it back, choose another name"):
        make([config(here, [SHORT], top_k=1)])


def test_a_dataset_without_its_report_is_made_again(here: Path) -> None:
    stage = config(here, [SHORT])
    storage = open_storage(stage.checkpoint_job_dir)
    storage.put("dataset/rows.jsonl", b"half of ")
    assert make([stage])
    assert len(made(stage)) == 3


@pytest.mark.parametrize(
    ("operators", "error", "message"),
    [
        (["needs_mapper"], NotInstalledError, "operator needs_mapper of Data-Juicer needs ftfy: rftdask data setup"),
        (["needs_model_filter", "needs_mapper"], NotInstalledError, "needs torch: rftdask data setup --with 'torch'"),
        (["fails_mapper"], DataError, "operator fails_mapper of Data-Juicer failed: RuntimeError: no such verb"),
        (["counts_aggregator"], UserError, "operator counts_aggregator of Data-Juicer: it makes new rows"),
        (["upper_mappr"], UserError, r"\[upper_mappr\] unknown operator"),
        (["dies_mapper"], ProcessLostError, r"ended with code 7; its last lines:\n(.*\n)*  \| out of memory"),
    ],
)
def test_typed_errors_leave_no_dataset(here: Path, operators: list[str], error: type[RftError], message: str) -> None:
    stage = config(here, [{"name": name} for name in operators])
    with pytest.raises(error, match=message):
        make([stage])
    assert not open_storage(stage.checkpoint_job_dir).exists(REPORT)
    assert open_storage(stage.checkpoint_job_dir).exists("dataset/data_juicer.log")


def test_a_silent_process_is_killed(here: Path) -> None:
    pipeline = Pipeline([{"hangs_mapper": {}}], "question")
    with (
        pytest.raises(WaitTimeout, match="had no output for 1 s"),
        JuicerProcess(find_environment("x"), pipeline, here / "log", silence_s=1.0) as process,
    ):
        process.run([{"question": "why"}])
    assert process._process.poll() is not None


def test_the_process_ends_with_its_parent(here: Path) -> None:
    script = (
        "import os, sys, threading, time\nfrom pathlib import Path\n"
        "from rftdask.data.juicer.base import Pipeline\n"
        "from rftdask.data.juicer.environment import find_environment\n"
        "from rftdask.data.juicer.process import JuicerProcess\n"
        f"pipeline, log = Pipeline([{{'hangs_mapper': {{}}}}], 'question'), Path({str(here / 'log')!r})\n"
        "process = JuicerProcess(find_environment('x'), pipeline, log)\n"
        "threading.Thread(target=process.run, args=([{'question': 'why'}],), daemon=True).start()\n"
        "while 'what a library prints' not in log.read_text():\n    time.sleep(0.01)\n"
        "print(process._process.pid, flush=True)\nos._exit(0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    wait_until_gone(int(ended.stdout))


def test_without_an_environment_the_command_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(here / "none"))
    with pytest.raises(NotInstalledError, match=r"none exists in .*/none: run `rftdask data setup` once"):
        check_pipeline(config(here, [SHORT]))


def test_operators_are_checked_before_rows(here: Path) -> None:
    with pytest.raises(UserError, match=r"\[txt_filter\] unknown operator; \[other\] unknown operator"):
        check_pipeline(config(here, [{"name": "txt_filter"}, {"name": "other"}]))
    check_pipeline(config(here, [{"name": "needs_model_filter"}]))  # it is made with the rows


def test_until_a_dataset_is_made_its_input_is_checked(here: Path) -> None:
    stage = config(here, [SHORT], inputs=[str(here / "tasks.jsonl"), str(here / "tasks.jsonl")])
    with standing_in([stage]) as [read]:
        taskset = read.buffer.explorer_input.taskset
        assert taskset is not None
        assert len(open_dataset(taskset.path)) == 10
        assert read.pipeline_place is None
    several = tree(here, [SHORT])
    taskset = several["buffer"]["explorer_input"].pop("taskset")
    several["buffer"]["explorer_input"]["tasksets"] = [taskset, {**taskset, "name": "other"}]
    with standing_in([load_config(several)]) as [read]:
        first, second = read.buffer.explorer_input.tasksets
        assert len(open_dataset(first.path)) == 5
        assert second.path == str(here / "tasks.jsonl")


def test_a_recipe_defines_the_pipeline(here: Path) -> None:
    recipe = {
        "project_name": "demo",
        "dataset_path": str(here / "tasks.jsonl"),
        "text_keys": ["question"],
        "np": 2,
        "process": [{"text_length_filter": {"min_len": 9}}, "upper_mapper"],
    }
    (here / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    stage = config(here, [], config_path=str(here / "recipe.yaml"))
    make([stage])
    assert [row["question"] for row in made(stage)] == ["ONE AND ONE"]
    (here / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "generated_dataset_config": {}}))
    with pytest.raises(
        DataError, match="generated_dataset_config: not supported; recipes may use custom_operator_paths"
    ):
        check_pipeline(config(here, [], config_path=str(here / "recipe.yaml")))


def test_a_column_that_no_row_has_is_named(here: Path) -> None:
    with pytest.raises(
        DataError, match=r"target_fields: no row has query; the columns are source_row, question, answer"
    ):
        make([config(here, [SHORT], target_fields=["question", "query"])])


def test_the_taskset_reads_the_made_dataset_even_in_a_moved_run(here: Path) -> None:
    stage = config(here, [SHORT])
    taskset, pipeline = stage.buffer.explorer_input.taskset, stage.data_processor.task_pipeline
    assert taskset is not None
    assert taskset.path == f"{stage.checkpoint_job_dir}/dataset/rows.jsonl"
    assert pipeline.inputs == (str(here / "tasks.jsonl"),)
    assert load_config(stage.to_dict()) == stage
    open_run(open_storage(stage.checkpoint_job_dir), stage)
    (here / "moved").mkdir()
    os.rename(here / "runs", here / "moved/runs")
    moved = replace(stage, {"checkpoint_root_dir": str(here / "moved/runs")})
    check_run(open_storage(moved.checkpoint_job_dir), moved)
    other = replace(moved, {"data_processor.task_pipeline.top_k": 3})
    with pytest.raises(DataError, match=r"data_processor.task_pipeline.top_k: was -1, is 3"):
        check_run(open_storage(other.checkpoint_job_dir), other)


def test_the_dataset_of_sft_is_made_and_none_for_bench(here: Path) -> None:
    source = tree(here, [SHORT])
    buffer = {"path": str(here / "tasks.jsonl"), "format": {"prompt_key": "question", "response_key": "answer"}}
    source |= {"mode": "train", "algorithm": {"algorithm_type": "sft"}}
    source["buffer"] = {"batch_size": 2, "trainer_input": {"experience_buffer": buffer}}
    stage = load_config(source)
    assert make([stage])
    assert stage.buffer.trainer_input.experience_buffer.path == f"{stage.checkpoint_job_dir}/dataset/rows.jsonl"
    assert len(made(stage)) == 3
    bench = {**tree(here, [SHORT]), "mode": "bench"}
    bench["buffer"]["explorer_input"] = {"eval_tasksets": [{"name": "e", "path": str(here / "tasks.jsonl")}]}
    bench_stage = load_config(bench)
    assert "data_processor.task_pipeline: ignored: no taskset reads the result" in bench_stage.warnings
    assert not make([bench_stage])


def test_mistakes_are_reported_with_their_keys(here: Path) -> None:
    wrong = tree(here, [{"name": "a", "argz": {}}, {"args": {}}, {"name": "b", "args": 3}], top_k=0)
    wrong["data_processor"]["task_pipeline"]["priority_weights"] = {"qualty": 1, "quality": "much", "diversity": 1}
    wrong["service"] = {"data_juicer": {"server_url": "localhost:5005"}}
    with pytest.raises(ConfigError) as caught:
        load_config(wrong)
    at = "data_processor.task_pipeline"
    problems = "\n".join(caught.value.problems)
    for line in (
        f"{at}.operators[0]: takes name and args",
        f"{at}.operators[1]: takes name and args",
        f"{at}.operators[2].args: 3 is not {{argument: value}}",
        f"{at}.priority_weights.qualty: unknown; choose from quality",
        f"{at}.priority_weights.quality: 'much' is not a number",
        f"{at}.top_k: 0 keeps no row",
        "service.data_juicer.server_url: ",
    ):
        assert line in problems
    with pytest.raises(ConfigError, match=r"operators: required, unless config_path names a recipe"):
        load_config(tree(here, []))


def test_a_file_of_the_reference_runs_as_it_is(here: Path) -> None:
    source = tree(here, [SHORT], inputs=[str(here / "tasks.jsonl")], output={"path": "made"})
    source["buffer"]["explorer_input"]["taskset"]["path"] = "made"
    source["service"] = {"data_juicer": {"auto_start": True, "server_url": "http://localhost:5005", "port": 5005}}
    stage = load_config(source, origin="trinity")
    assert make([stage])
    assert len(made(stage)) == 3
    warnings = "\n".join(stage.warnings)
    assert "data_processor.task_pipeline.output: ignored: the dataset is written to the run folder" in warnings
    assert "service.data_juicer.server_url: ignored" in warnings


def test_explore_and_train_commands_share_a_made_dataset(here: Path) -> None:
    explores, trains = (load_config({**tree(here, [SHORT]), "mode": mode}) for mode in ("explore", "train"))
    open_run(open_storage(explores.checkpoint_job_dir), explores)
    check_run(open_storage(trains.checkpoint_job_dir), trains)
    assert (explores.makes_dataset, trains.makes_dataset) == (True, False)
    assert not make([trains])


def wheel(folder: Path, content: str) -> str:
    """A package of one module, for an installation without a network."""
    folder.mkdir()
    file = folder / "py_data_juicer-1.6.1-py3-none-any.whl"
    info = "py_data_juicer-1.6.1.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data_juicer/__init__.py", "")
        archive.writestr("data_juicer/core.py", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: py-data-juicer\nVersion: 1.6.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(file)


@pytest.mark.slow
def test_an_interrupted_setup_continues_a_complete_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "environment"))
    monkeypatch.setattr(environments, "REQUIREMENTS", (wheel(tmp_path / "broken", "import nowhere"),))
    with pytest.raises(UserError, match=r"import data_juicer.core: exit code 1, see above; run setup again"):
        set_up()
    with pytest.raises(NotInstalledError):
        find_environment("x")
    whole = wheel(tmp_path / "whole", "")
    monkeypatch.setattr(environments, "REQUIREMENTS", ("py-data-juicer==1.6.1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (next((tmp_path / "environment").glob("lib/python*/site-packages")) / "data_juicer/core.py").write_text("")
    assert set_up([whole]).endswith(f", with {whole}")
    assert find_environment("x").packages["py-data-juicer"] == "1.6.1"
    assert set_up().endswith(" already")
    assert set_up([whole]).endswith(" already")


def test_the_runner_imports_nothing_of_rftdask() -> None:
    """Its environment lacks rftdask and its requirements; Data-Juicer is imported by name."""
    found = imported_names("runner", False, ast.parse(Path(runner.__file__).read_text()))
    names = {source.partition(".")[0] for source, _ in found}
    assert names - {*sys.stdlib_module_names} == set()


@pytest.mark.extras
def test_the_real_data_juicer(tmp_path: Path) -> None:
    try:
        real: Environment = find_environment("this test")
    except NotInstalledError as error:
        pytest.skip(str(error))
    rows = [
        {"question": "Hello  world, how are you? 12", "answer": 1},
        {"question": "!!!! ####", "answer": 2, "level": {"a": 1}},
        {"question": "The quick brown fox", "answer": 3},
        {"question": "Hello  world, how are you? 12", "answer": 4},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    operators = [
        {"name": "text_length_filter", "args": {"min_len": 12}},
        {"name": "alphanumeric_filter"},
        {"name": "character_repetition_filter"},
        {"name": "document_deduplicator"},
        {"name": "remove_specific_chars_mapper", "args": {"chars_to_remove": "?"}},
    ]
    stage = config(tmp_path, operators, num_process=2)
    check_pipeline(stage)
    assert make([stage])
    first, second = sorted(made(stage), key=lambda row: str(row["source_row"]))
    assert (first["question"], first["answer"], first["source_row"]) == (
        "Hello  world, how are you 12",
        1,
        "tasks.jsonl#0",
    )
    assert second["source_row"] == "tasks.jsonl#2"
    assert first["quality_score"] == (first["alnum_ratio"] + 1 - first["char_rep_ratio"]) / 2
    assert {drop["why"]: drop["rows"] for drop in report(stage)["dropped"]} == {
        "by text_length_filter (operator 1)": ["tasks.jsonl#1"],
        "by document_deduplicator (operator 4)": ["tasks.jsonl#3"],
    }
    wrong = config(tmp_path, [{"name": "text_length_filter", "args": {"min_lenn": 12}}])
    wrong = replace(wrong, {"name": "wrong"})
    with pytest.raises(UserError, match=r"Unknown parameter 'min_lenn' \(did you mean: min_len"):
        check_pipeline(wrong)
    if "fasttext-predict" not in real.packages:
        lacking = replace(config(tmp_path, [{"name": "language_id_score_filter"}]), {"name": "lacking"})
        with pytest.raises(NotInstalledError, match="needs fasttext-predict: rftdask data setup --with 'fasttext-pred"):
            make([lacking])
