"""Promises of the state of a worker process. Engines and sandboxes have tests of their own."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Timer
from typing import ClassVar

import pytest

from rftdask.algorithm.operators import ExperienceTable, Operator
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, load_config
from rftdask.engines.client import EngineSpec
from rftdask.engines.spec import engine_spec, sampling_params
from rftdask.errors import ConfigError, DataError, RoleError, StorageError
from rftdask.rollouts import work_unit_task
from rftdask.rollouts import worker_state as worker_cache
from rftdask.rollouts.concurrency_limits import SLOT
from rftdask.rollouts.worker_state import WorkerCache
from rftdask.run.run_folder import record_config
from rftdask.storage import Storage, open_storage
from tests.unit.rollouts.rollout_cases import CharTokenizer

JUDGE = "explorer.auxiliary_models=[{engine_type: fake, name: judge, model_path: none}]"
SAMPLING = [
    ("temperature", 0.25, "temperature"),
    ("top_p", 0.5, "top_p"),
    ("top_k", 7, "top_k"),
    ("repetition_penalty", 1.5, "repetition_penalty"),
    ("min_response_tokens", 2, "min_tokens"),
    ("max_response_tokens", 5, "max_tokens"),
]
"""(key of a model section, value, sampling parameter of the requests)."""


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


def opened(storage: Storage, run: Config) -> WorkerCache:
    cache = WorkerCache()
    cache.open(storage, record_config(storage, run))
    return cache


def test_the_config_is_read_once(storage: Storage) -> None:
    cache, fingerprint = WorkerCache(), record_config(storage, config())
    first = cache.open(storage, fingerprint)
    storage.remove(f"control/config-{fingerprint}.json")
    assert cache.open(storage, fingerprint) is first
    assert first == config()


def test_another_config_of_the_run_starts_with_a_clean_cache(storage: Storage) -> None:
    cache = WorkerCache()
    fingerprints = [record_config(storage, config(f"explorer.max_timeout={seconds}")) for seconds in (7, 9)]
    configs, tokenizers = [], []
    for fingerprint in fingerprints:
        configs.append(cache.open(storage, fingerprint))
        cache.add_task_times(1, [1.0])
        tokenizers.append(cache.tokenizer())
    assert [run.explorer.max_timeout for run in configs] == [7, 9]
    assert tokenizers[0] is not tokenizers[1]


class Remembers(Operator):
    """An operator that records closed operators."""

    closed: ClassVar[list[Operator]] = []

    def __call__(self, table: ExperienceTable) -> tuple[ExperienceTable, dict[str, float]]:
        return table, {}

    def close(self) -> None:
        self.closed.append(self)


def test_operators_are_kept_until_another_config_is_opened(storage: Storage) -> None:
    pipeline = f"data_processor.experience_pipeline.operators=[{{name: {__name__}.Remembers}}]"
    cache, fingerprint = WorkerCache(), record_config(storage, config(pipeline))
    cache.open(storage, fingerprint)
    [kept] = cache.operators()
    cache.open(storage, fingerprint)
    assert cache.operators()[0] is kept
    cache.open(storage, record_config(storage, config()))
    assert Remembers.closed == [kept]
    assert cache.operators() == []


def test_operators_run_in_one_thread_next_to_the_rollouts() -> None:
    began, goes_on, done = Event(), Event(), list[int]()

    def takes_long(slot: int, experiences: list[Experience]) -> None:
        began.set()
        assert goes_on.wait(30)
        done.append(slot)

    with work_unit_task._in_one_thread(takes_long) as on_group:
        on_group(2, [])
        on_group(1, [])
        assert began.wait(30) and not done
        goes_on.set()
    assert done == [2, 1]

    def fails(slot: int, experiences: list[Experience]) -> None:
        raise StorageError(f"group {slot}")

    with pytest.raises(StorageError, match="group 3"), work_unit_task._in_one_thread(fails) as on_group:
        on_group(3, [])
    goes_on.clear()
    with pytest.raises(RoleError), work_unit_task._in_one_thread(takes_long) as on_group:
        for slot in (4, 5):
            on_group(slot, [])
        Timer(0.2, goes_on.set).start()  # after the error below, which drops calls that have not begun
        raise RoleError("the engine failed")
    assert done[2:] in ([], [4])


def test_an_unreadable_config_leaves_the_cache_unchanged(storage: Storage) -> None:
    cache, fingerprint = WorkerCache(), record_config(storage, config())
    first = cache.open(storage, fingerprint)
    with pytest.raises(DataError):
        cache.open(storage, "0" * 32)
    assert cache.open(storage, fingerprint) is first


def test_an_engine_spec_lists_all_sampling_parameters() -> None:
    evals = "buffer.explorer_input.eval_tasksets=[{name: a, path: a.jsonl, rollout_args: {temperature: 0.0}}]"
    run = config(evals, JUDGE, "model.temperature=0.7", "model.max_response_tokens=8")
    policy, auxiliary = (engine_spec(section, run, 1, None).sampling for _, section in run.explorer.engines())
    assert [(params.max_tokens, params.temperature) for params in policy] == [(8, 0.7), (8, 0.0)]
    assert [(params.max_tokens, params.temperature) for params in auxiliary] == [(8, 0.7)]
    baseline = config("algorithm.algorithm_type=remax", "model.max_response_tokens=8")
    assert [e.temperature for e in engine_spec(baseline.explorer.rollout_model, baseline, 1, None).sampling] == [1, 0]


@pytest.mark.slow
def test_auxiliary_engines_ended_by_another_unit_are_restarted(storage: Storage) -> None:
    cache = opened(storage, config(JUDGE))
    ended = Event()

    def end_again_and_again() -> None:
        while not ended.is_set():
            cache.drop_auxiliary()

    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(end_again_and_again)
        try:
            for _ in range(3):
                with suppress(RoleError):  # it was ended as it loaded
                    cache.start_auxiliary(1)
        finally:
            ended.set()
        ending.result(60)
    [engine] = cache.start_auxiliary(1).values()
    assert engine.alive()
    cache.drop_auxiliary()


def test_an_unknown_taskset_is_an_error_with_the_known_ones(storage: Storage) -> None:
    cache = opened(storage, config())
    with pytest.raises(DataError, match="unknown taskset 'gsm9k'; the tasksets are "):
        cache.taskset("gsm9k")


def test_a_temperature_may_follow_a_schedule_of_explore_steps() -> None:
    way = "buffer.explorer_input.taskset.rollout_args={temperature: 1.0, final_temperature: 0.6, temperature_steps: 4}"
    run = config(way)
    taskset = run.buffer.explorer_input.train_tasksets[0]
    temperatures = [sampling_params(taskset, run, step).temperature for step in range(1, 8)]
    assert temperatures == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6])
    for wrong, message in (
        ("taskset.rollout_args={final_temperature: 0.6}", "give both"),
        ("eval_tasksets=[{path: e, rollout_args: {final_temperature: 0.6, temperature_steps: 2}}]", "must not change"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(f"buffer.explorer_input.{wrong}")


@pytest.mark.parametrize(
    ("key", "value", "parameter"),
    [
        *((f"model.{key}", *pair) for key, *pair in SAMPLING),
        *((f"explorer.rollout_model.{key}", *pair) for key, *pair in SAMPLING),
        ("buffer.explorer_input.taskset.rollout_args.temperature", 0.25, "temperature"),
        ("buffer.explorer_input.taskset.rollout_args.top_p", 0.5, "top_p"),
        ("buffer.explorer_input.taskset.rollout_args.top_k", 7, "top_k"),
        ("buffer.explorer_input.taskset.rollout_args.max_tokens", 5, "max_tokens"),
    ],
)
def test_sampling_keys_of_model_and_taskset_apply(key: str, value: float, parameter: str) -> None:
    runs = config(), config(f"{key}={value}")
    usual, changed = (sampling_params(run.buffer.explorer_input.train_tasksets[0], run) for run in runs)
    assert getattr(changed, parameter) == value != getattr(usual, parameter)


def test_an_auxiliary_model_has_lengths_and_sampling_of_its_own() -> None:
    judge = (
        "explorer.auxiliary_models=[{engine_type: fake, name: judge, model_path: none, temperature: 0.0, top_p: 0.9, "
        "max_response_tokens: 100, max_model_len: 1000}]"
    )
    run = config(judge, "model.max_response_tokens=8", "model.top_k=5")
    spec = engine_spec(run.explorer.auxiliary_models[0], run, 1, None)
    (sampling,) = spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (100, 0.0, 0.9, 5)
    assert (spec.model.max_prompt_tokens, spec.model.max_response_tokens, spec.model.max_model_len) == (900, 100, 1000)
    usual = config(JUDGE)
    assert usual.explorer.auxiliary_models[0].own_model(usual.model) == usual.model


def test_engines_that_measure_their_gpu_start_one_by_one(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts memory that another process allocates meanwhile as its own, and fails if another one frees memory."""
    events: list[tuple[str, str]] = []

    class Started:
        def __init__(self, spec: EngineSpec) -> None:
            self.spec = spec
            self.name = spec.section.name or "policy"
            events.append(("start", self.name))

        def alive(self) -> bool:
            return True

        def wait_ready(self) -> None:
            events.append(("ready", self.name))

    monkeypatch.setattr(worker_cache, "EngineClient", Started)
    monkeypatch.setattr(worker_cache, "_tokenizer", lambda model, config: None)
    monkeypatch.setattr(worker_cache, "text_engine", lambda engine, tokenizer, config: engine)
    run = config(
        "explorer.rollout_model={engine_type: vllm, gpu_memory_utilization: 0.3}",
        "explorer.auxiliary_models=[{engine_type: vllm, name: a, model_path: a, gpu_memory_utilization: 0.3}, "
        "{engine_type: fake, name: b, model_path: b}, "
        "{engine_type: vllm, name: c, model_path: c, gpu_memory_utilization: 0.3}]",
    )
    cache = opened(storage, run)
    cache.engine(engine_spec(run.explorer.rollout_model, run, 1, None))
    cache.auxiliary(1)
    starts = [event for event in events if event[0] == "start"]
    assert starts == [("start", name) for name in ("policy", "a", "b", "c")]
    assert events.index(("ready", "policy")) < events.index(("start", "a"))
    assert events.index(("ready", "a")) < events.index(("start", "c"))
    assert ("ready", "b") not in events[: events.index(("start", "c"))]
    cache.auxiliary(1)
    assert [event for event in events if event[0] == "start"] == starts


def test_no_load_in_flight_while_a_unit_needs_exact_weights() -> None:
    cache = WorkerCache()
    with cache.under_way(exact=False):
        assert cache.num_under_way and not cache.num_exact
        with cache.under_way(exact=True):
            assert cache.num_exact
        assert cache.num_under_way and not cache.num_exact
    assert not cache.num_under_way
    cache.wait_until_idle()


def test_a_cancelled_unit_stops_waiting_for_other_units(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_cache, "_POLL_INTERVAL_S", 0.01)
    cache = opened(storage, config("explorer.slots_per_engine=1"))
    with cache.start_lock() as start:
        # Waiting for the start lock.
        with pytest.raises(RoleError, match="was cancelled"), cache.start_lock(lambda: True):
            pass
        start.close()
    with cache.under_way(exact=False):
        for wait in (cache.wait_until_idle, cache.wait_for_slot):
            cache.shared()[0].enter(wait, (SLOT,), admit=lambda: None)
            checks: list[bool] = []

            def is_cancelled(checks: list[bool] = checks) -> bool:
                checks.append(True)
                return len(checks) > 1

            with pytest.raises(RoleError, match="was cancelled"), cache.start_lock(is_cancelled):
                wait()
            assert len(checks) == 2, "it polls"
    with cache.start_lock():  # the lock is free
        cache.wait_until_idle()


def test_overlapping_units_release_the_lock_and_count_time_once() -> None:
    cache = WorkerCache()
    with cache.start_lock() as start:
        start.close()
        with cache.start_lock():  # the next unit holds it already
            start.close()
            assert cache.mutex.locked()
    began_s = time.monotonic() - 3.0
    assert cache.count_time(began_s) >= 3.0
    assert cache.count_time(began_s) < 1.0


def test_keys_of_an_engine_section_apply() -> None:
    at = "explorer.rollout_model"
    keys = (f"{at}.engine_type=fake", f"{at}.tool_call_parser=openai", f"{at}.reasoning_parser=think")
    judge = "explorer.auxiliary_models=[{name: judge, model_path: far, engine_type: external}]"
    run = config(*keys, judge, "explorer.env_vars={TOKENIZERS: one}", "explorer.max_timeout=7")
    spec = engine_spec(run.explorer.rollout_model, run, 1, None)
    assert spec.section.engine_type == "fake"
    assert ("TOKENIZERS", "one") in spec.env
    assert {name: model.model_path for name, model in worker_cache.remote_models(run).items()} == {"judge": "far"}

    class Client:
        """Client without a running engine."""

        answered_s = 0.0

        def __init__(self, spec: EngineSpec) -> None:
            self.spec = spec

        def submit(self) -> None:
            raise NotImplementedError

    engine = worker_cache.text_engine(Client(spec), CharTokenizer(), run)  # type: ignore[arg-type]
    assert engine.parser is not None
    assert (engine.parser._calls_name, engine.parser._thoughts_name) == ("openai", "think")


def test_slots_follow_the_memory_of_the_engine_if_configured(storage: Storage) -> None:
    cache = WorkerCache()
    for slots, after in (("memory", [6, 50, 20, 6]), ("9", [9, 9, 9, 9]), ("null", [6, 6, 6, 6])):
        run = config(f"explorer.slots_per_engine={slots}", "explorer.tasks_per_batch=3", "algorithm.repeat_times=2")
        cache.open(storage, record_config(storage, run))
        places = cache.shared()[0]
        found = [cache.num_slots]
        # The mean of all that is remembered: 20, then 50, then 354.
        for lengths in ([10, 30], [80, 80, 50], [860] * 3):
            cache.add_lengths(lengths, 1000)
            found.append(cache.num_slots)
        assert found == after
        cache.add_lengths([], 1000)
        cache.add_lengths([1], None)
        assert cache.num_slots == after[-1], "nothing is known of it"
        for number in range(after[-1]):
            assert places.wait_for_slot(SLOT, 0)
            places.enter(number, (SLOT,), admit=lambda: None)
        assert not places.wait_for_slot(SLOT, 0)
