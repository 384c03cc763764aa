"""Promises of operator `data_juicer`, with fake_data_juicer in an environment of its own, or a fake service."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rftdask.algorithm.compose import make_part
from rftdask.algorithm.operators import DataJuicer
from rftdask.buffer.batches.operator_pipeline import filter_experiences, operators_of
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.data.juicer import check_juicer_env
from rftdask.data.juicer.environment import PLACE
from rftdask.errors import ConfigError, NotInstalledError, OperatorError, UserError
from tests.unit.buffer.batches.test_operator_pipeline import group
from tests.unit.data.fake_data_juicer.environment import make_stand_in
from tests.unit.data.fake_data_juicer.fake_service import serving

make_operator = partial(make_part, "operator")
REAL = os.environ.get(PLACE)
SHORT: dict[str, Any] = {"text_length_filter": {"min_len": 3}}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("juicer") / "environment")


@pytest.fixture(autouse=True)
def here(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLACE, str(stand_in))
    monkeypatch.setenv("FAKE_INSTALLED", str(tmp_path / "installed"))


@pytest.fixture
def closing() -> Iterator[list[DataJuicer]]:
    made: list[DataJuicer] = []
    yield made
    for each in made:
        each.close()


def answers(*texts: str, rewards: list[float | None] | None = None) -> list[Experience]:
    rows = group(0, rewards or [1.0] * len(texts), metrics={"accuracy": 0.1})
    return [replace(row, response_text=text, prompt_text="1+1?") for row, text in zip(rows, texts, strict=True)]


def test_statistics_shape_rewards_and_dropped_rows_are_named(closing: list[DataJuicer]) -> None:
    juicer = make_operator("data_juicer", {"operators": [SHORT, "upper_mapper"]})
    closing.append(juicer)
    rules = [{"stats_key": "text_len", "op_type": "MUL", "weight": 0.5}]
    shaping = make_operator("reward_shaping_mapper", {"reward_shaping_configs": rules})
    rows = answers("four", "no", "a-b", "gone", "failed", rewards=[1.0, 1.0, 2.0, 0.0, None])
    found = filter_experiences([make_operator("reward_filter", {"threshold": 0.5}), juicer, shaping], rows, None)
    assert [(str(e.status), e.error) for e in found] == [
        ("ok", ""),
        ("filtered", "operator data_juicer: left_out (text_length_filter)"),
        ("ok", ""),
        ("filtered", "operator reward_filter: reward_range"),
        ("failed", ""),
    ]
    assert [e.reward for e in found] == [2.0, 1.0, 3.0, 0.0, None]
    assert found[0].metrics == {"accuracy": 0.1, "text_len": 4.0, "alnum_ratio": 1.0, "unshaped_reward": 1.0}
    assert found[2].metrics["alnum_ratio"] == 2 / 3
    assert [e.metrics for e in (found[1], found[3], found[4])] == [{"accuracy": 0.1}] * 3
    assert [e.response_text for e in found] == [e.response_text for e in rows]


def test_a_reward_that_it_changes_is_the_reward(closing: list[DataJuicer]) -> None:
    juicer = make_operator("data_juicer", {"operators": [{"name": "half_mapper"}]})
    closing.append(juicer)
    [half] = filter_experiences([juicer], answers("four"), None)
    assert (half.reward, half.metrics["unshaped_reward"]) == (0.5, 1.0)


def test_its_process_is_kept_and_started_once_more_when_it_died(closing: list[DataJuicer], tmp_path: Path) -> None:
    juicer = make_operator("data_juicer", {"operators": [SHORT, "dies_once_mapper"]})
    closing.append(juicer)
    assert [str(e.status) for e in filter_experiences([juicer], answers("four", "no"), None)] == ["ok", "filtered"]
    assert (tmp_path / "installed.died").exists()
    kept = juicer._juicer
    filter_experiences([juicer], answers("more"), None)
    assert juicer._juicer is kept and kept._process.poll() is None
    juicer.close()
    assert kept._process.poll() is not None
    dying = make_operator("data_juicer", {"operators": [{"dies_mapper": {}}]})
    with pytest.raises(OperatorError) as caught:
        filter_experiences([dying], answers("four"), None)
    told = "operator data_juicer failed on task t/0/0: ProcessLostError: the process of Data-Juicer ended with code 7"
    assert str(caught.value).startswith(told)
    assert "| out of memory" in str(caught.value)


def test_a_service_takes_its_place(monkeypatch: pytest.MonkeyPatch, closing: list[DataJuicer]) -> None:
    monkeypatch.setenv(PLACE, "/nowhere")
    with serving() as service:
        stage = config({"operators": [SHORT]}, service={"data_juicer": {"server_url": service.url}})
        check_juicer_env(stage)
        [juicer] = operators_of(stage)
        closing.append(juicer)
        juicer.check()
        found = filter_experiences([juicer], answers("four", "no"), None)
        assert [(e.metrics.get("text_len"), e.error) for e in found] == [
            (4.0, ""),
            (None, "operator data_juicer: left_out (text_length_filter)"),
        ]


def config(args: dict[str, Any], stage: str | None = "commit", **sections: Any) -> Config:
    pipeline: dict[str, Any] = {"operators": [{"name": "data_juicer", "args": args}]}
    if stage is not None:
        pipeline["stage"] = stage
    tree = {
        "model": {"model_path": "tiny", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "data_processor": {"experience_pipeline": pipeline},
    }
    return load_config({**tree, **sections})


def test_it_runs_only_at_the_commit() -> None:
    with pytest.raises(
        ConfigError, match=r"experience_pipeline.stage: batch: operators\[0\] data_juicer runs only at commit"
    ):
        config({"operators": [SHORT]}, "batch")
    told = config({"operators": [SHORT], "np": 3}, None)
    assert told.data_processor.experience_pipeline.stage == "commit"
    assert told.data_processor.experience_pipeline.operators[0]["args"]["num_process"] == 3
    assert "experience_pipeline.stage: commit, where data_juicer can run" in "\n".join(told.warnings)


def test_missing_packages_are_reported_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"operators\[0\]: .*needs exactly one of operators and config_path"):
        operators_of(config({}))
    with pytest.raises(UserError, match=r"operators\[0\]: .*operators\[0\]: 3: an operator is a name"):
        operators_of(config({"operators": [3]}))
    (tmp_path / "recipe.yaml").write_text("process: [txt_filter]\ntext_keys: prompt_text\n")
    [juicer] = operators_of(config({"config_path": str(tmp_path / "recipe.yaml")}))
    with pytest.raises(UserError, match=r"\[txt_filter\] unknown operator"):
        juicer.check()
    monkeypatch.setenv(PLACE, "/nowhere")
    with pytest.raises(NotInstalledError, match="operator data_juicer needs Data-Juicer, which has an environment"):
        juicer.check()
    with pytest.raises(NotInstalledError, match=r"experience_pipeline.operators\[0\] needs Data-Juicer"):
        check_juicer_env(config({"operators": [SHORT]}))
    check_juicer_env(config({"operators": [SHORT]}, mode="train"))  # a trainer runs no operators


@pytest.mark.extras
def test_the_real_data_juicer(monkeypatch: pytest.MonkeyPatch, closing: list[DataJuicer]) -> None:
    monkeypatch.delenv(PLACE)
    if given := REAL:
        monkeypatch.setenv(PLACE, given)
    juicer = make_operator(
        "data_juicer", {"operators": [{"words_num_filter": {"min_num": 2}}, "document_deduplicator"]}
    )
    closing.append(juicer)
    try:
        juicer.check()
    except NotInstalledError as error:
        pytest.skip(str(error))
    for _ in range(2):
        found = filter_experiences([juicer], answers("one and two", "one and two", "one"), None)
        assert [e.error.rpartition(": ")[2] for e in found] == [
            "",
            "left_out (document_deduplicator)",
            "left_out (words_num_filter)",
        ]
        assert found[0].metrics["num_words"] == 3
