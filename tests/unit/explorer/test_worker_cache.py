"""Promises of what a worker process keeps: the config is read once for each fingerprint, and another run's, or another
config's, is never given out; the tests of engines and sandboxes are those of their rooms.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rftdask.config import Config, load_config
from rftdask.errors import ConfigError, DataError
from rftdask.explorer.worker_cache import WorkerCache, engine_spec, sampling_params
from rftdask.run.run_folder import record_config
from rftdask.storage import Storage, open_storage


def config(*overrides: str) -> Config:
    tree = {
        "model": {"model_path": "none", "max_model_len": 64},
        "buffer": {"batch_size": 8, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"rollout_model": {"engine_type": "fake"}},
    }
    return load_config(tree, overrides)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


def test_the_config_is_read_once(storage: Storage) -> None:
    cache, fingerprint = WorkerCache(), record_config(storage, config())
    first = cache.open(storage, fingerprint)
    storage.remove(f"control/config-{fingerprint}.json")
    assert cache.open(storage, fingerprint) is first
    assert first == config()


def test_another_config_of_the_run_is_read_anew_and_takes_nothing_over(storage: Storage) -> None:
    cache = WorkerCache()
    fingerprints = [record_config(storage, config(f"explorer.max_timeout={seconds}")) for seconds in (7, 9)]
    configs, tokenizers = [], []
    for fingerprint in fingerprints:
        configs.append(cache.open(storage, fingerprint))
        cache.add_task_times(1, [1.0])
        tokenizers.append(cache.tokenizer())
    assert [each.explorer.max_timeout for each in configs] == [7, 9]
    assert tokenizers[0] is not tokenizers[1]


def test_a_config_that_cannot_be_read_leaves_the_cache_as_it_was(storage: Storage) -> None:
    cache, fingerprint = WorkerCache(), record_config(storage, config())
    first = cache.open(storage, fingerprint)
    with pytest.raises(DataError):
        cache.open(storage, "0" * 32)
    assert cache.open(storage, fingerprint) is first


def test_an_engine_knows_each_way_in_which_the_run_samples() -> None:
    evals = "buffer.explorer_input.eval_tasksets=[{name: a, path: a.jsonl, rollout_args: {temperature: 0.0}}]"
    judge = "explorer.auxiliary_models=[{engine_type: fake, name: judge, model_path: none}]"
    run = config(evals, judge, "model.temperature=0.7", "model.max_response_tokens=8")
    policy, auxiliary = (engine_spec(section, run, 1, None).sampling for _, section in run.explorer.engines())
    assert [(each.max_tokens, each.temperature) for each in policy] == [(8, 0.7), (8, 0.0)]
    assert [(each.max_tokens, each.temperature) for each in auxiliary] == [(8, 0.7)]
    baseline = config("algorithm.algorithm_type=remax", "model.max_response_tokens=8")
    assert [e.temperature for e in engine_spec(baseline.explorer.rollout_model, baseline, 1, None).sampling] == [1, 0]


def test_an_unknown_taskset_is_named_beside_the_known_ones(storage: Storage) -> None:
    cache = WorkerCache()
    cache.open(storage, record_config(storage, config()))
    with pytest.raises(DataError, match="no taskset is called 'gsm9k'; there are "):
        cache.taskset("gsm9k")


def test_a_temperature_may_follow_a_schedule_of_explore_steps() -> None:
    way = "buffer.explorer_input.taskset.rollout_args={temperature: 1.0, final_temperature: 0.6, temperature_steps: 4}"
    run = config(way)
    taskset = run.buffer.explorer_input.train_tasksets[0]
    found = [sampling_params(taskset, run, step).temperature for step in range(1, 8)]
    assert found == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6])
    for wrong, message in (
        ("taskset.rollout_args={final_temperature: 0.6}", "give both"),
        ("eval_tasksets=[{path: e, rollout_args: {final_temperature: 0.6, temperature_steps: 2}}]", "stays"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(f"buffer.explorer_input.{wrong}")
