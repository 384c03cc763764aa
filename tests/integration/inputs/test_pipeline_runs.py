"""Whole runs with `data_processor`, over a stand-in for Data-Juicer."""

from pathlib import Path

import pytest

from rftdask.data.juicer.environment import PLACE
from rftdask.reports.lineage.tables import RunTables
from rftdask.run.lease import DATASET, Lease
from rftdask.storage import open_storage
from tests.integration.run_cases import call_cli, finish, finish_alone, run_folder, write_config
from tests.unit.data.fake_data_juicer.environment import make_stand_in

SHORT = ("buffer.explorer_input.eval_tasksets=[]", "trainer.save_interval=1")
PIPELINE = (
    "data_processor.task_pipeline.operators=[{name: text_length_filter, args: {min_len: 5}}]",
    "data_processor.task_pipeline.target_fields=[question]",
)


@pytest.mark.slow
def test_rows_that_pass_a_pipeline_are_trained(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "none"))
    for command in ("validate", "run"):
        refused = call_cli(command, str(config), *SHORT, *PIPELINE)
        assert (refused.code, "run `rftdask data setup` once" in refused.err) == (2, True)
    assert not (run_folder(config) / "dataset").exists()
    monkeypatch.setenv(PLACE, str(make_stand_in(tmp_path / "environment")))
    with Lease(open_storage(run_folder(config)), DATASET):
        refused = call_cli("run", str(config), *SHORT, *PIPELINE)
    assert (refused.code, "makes its dataset; wait for it, or stop it" in refused.err) == (2, True)
    assert not (run_folder(config) / "dataset").exists()
    ended = finish(config, *SHORT, *PIPELINE, "trainer.total_steps=2")
    assert "text_length_filter: 6 left" in ended.err
    monkeypatch.setenv(PLACE, str(tmp_path / "none"))
    finish(config, *SHORT, *PIPELINE, "trainer.total_steps=3")
    rows = RunTables(run_folder(config)).table("experiences").to_pylist()
    assert {row["prompt_text"] for row in rows} == {f"{number}+1=" for number in range(10, 16)}


@pytest.mark.slow
def test_results_of_data_juicer_are_committed_with_experiences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, at = write_config(tmp_path), "data_processor.experience_pipeline"
    measures = "{text_length_filter: {min_len: 5, text_key: prompt_text}}"
    shapes = "{reward_shaping_configs: [{stats_key: text_len, op_type: MUL, weight: 2.0}]}"
    operators = (
        f"{at}.operators=[{{name: data_juicer, args: {{operators: [{measures}]}}}},"
        f" {{name: reward_shaping_mapper, args: {shapes}}}]",
        f"{at}.stage=commit",
        "buffer.explorer_input.taskset.data_selector.selector_type=shuffle",
    )
    monkeypatch.setenv(PLACE, str(tmp_path / "none"))
    refused = call_cli("run", str(config), *SHORT, *operators)
    assert (refused.code, "run `rftdask data setup` once" in refused.err) == (2, True)
    monkeypatch.setenv(PLACE, str(make_stand_in(tmp_path / "environment")))
    finish_alone(config, *SHORT, *operators, "trainer.total_steps=2")
    tables = RunTables(run_folder(config))
    rows = tables.table("experiences").to_pylist()
    short = {row["uid"] for row in rows if len(row["prompt_text"]) < 5}
    assert 0 < len(short) < len(rows)
    assert {row["uid"] for row in rows if row["status"] == "filtered"} == short
    assert {row["error"] for row in rows} == {"", "operator data_juicer: left_out (text_length_filter)"}
    for row in rows:
        if row["uid"] not in short:
            metrics = dict(row["metrics"])
            assert metrics["text_len"] == len(row["prompt_text"])
            assert row["reward"] == metrics.get("unshaped_reward", 0.0) * 2 * metrics["text_len"]
    trained = {row["uid"] for row in tables.table("states").to_pylist() if row["state"] == "trained"}
    assert trained and not trained & short
