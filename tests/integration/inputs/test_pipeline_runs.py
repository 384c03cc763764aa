"""Whole runs with `data_processor.task_pipeline`, over a stand-in for Data-Juicer. Promises:

- what the pipeline leaves is trained, and nothing else; a later start needs no Data-Juicer;
- without its environment nothing starts, and the command that makes it is named.
"""

from pathlib import Path

import pytest

from rftdask.data.juicer.environment import PLACE
from rftdask.provenance.tables import RunTables
from tests.integration.run_cases import call_cli, finish, run_folder, write_config
from tests.unit.data.fake_data_juicer.environment import make_stand_in

SHORT = ("buffer.explorer_input.eval_tasksets=[]", "trainer.save_interval=1")
PIPELINE = (
    "data_processor.task_pipeline.operators=[{name: text_length_filter, args: {min_len: 5}}]",
    "data_processor.task_pipeline.target_fields=[question]",
)


@pytest.mark.slow
def test_what_a_pipeline_leaves_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    monkeypatch.setenv(PLACE, str(tmp_path / "none"))
    for command in ("validate", "run"):
        refused = call_cli(command, str(config), *SHORT, *PIPELINE)
        assert (refused.code, "run `rftdask data setup` once" in refused.err) == (2, True)
    assert not (run_folder(config) / "dataset").exists()
    monkeypatch.setenv(PLACE, str(make_stand_in(tmp_path / "environment")))
    said = finish(config, *SHORT, *PIPELINE, "trainer.total_steps=2")
    assert "text_length_filter: 6 left" in said.err
    monkeypatch.setenv(PLACE, str(tmp_path / "none"))
    finish(config, *SHORT, *PIPELINE, "trainer.total_steps=3")
    rows = RunTables(run_folder(config)).table("experiences").to_pylist()
    assert {row["prompt_text"] for row in rows} == {f"{number}+1=" for number in range(10, 16)}
