"""Promises of the train engine and the engine at the Tinker service, by its SDK against a server of ours."""

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("tinker", reason="needs the package tinker: pip install 'rftdask[tinker]'")

import torch
from safetensors.torch import load

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, join_batches, supervised_batch
from rftdask.config import Config
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.tinker import TinkerEngine
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import DataError, EngineError, MismatchError, ProcessLostError, RoleError, UserError
from rftdask.models.tinker_service import API_KEY, read_sampler_path
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import MODEL_FILE, published_versions, weights_folder
from rftdask.testing.train_engine import TrainEngineContract
from rftdask.trainer.checkpoint import checkpoint_steps
from rftdask.trainer.engines.base import TrainEngine
from rftdask.trainer.engines.tinker import TinkerTrainEngine
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.tinker_server import TinkerServer, served
from tests.unit.synchronizer.sync_cases import publish_weights
from tests.unit.trainer.trainer_cases import engine_config

pytestmark = [
    pytest.mark.extras,
    # Of the package, about its own parts: it leaves a connection open.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[TinkerServer]:
    with served() as server:
        yield server
    gc.collect()  # here, where an unclosed resource is not an error


@pytest.fixture
def server(running: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> TinkerServer:
    monkeypatch.setenv(API_KEY, "tml-test")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    running.requests.clear()
    running.is_stuck = running.refuses_deletes = False
    return running


def config_at(server: TinkerServer, model: Path, **overrides: Any) -> Config:
    at: dict[str, Any] = {"model__tinker__enable": True, "model__tinker__base_url": server.url}
    return engine_config(model, **{**at, **overrides})


def batch_of(number: int = 0) -> TrainingBatch:
    made: TrainingBatch = TrainEngineContract().batch(number)
    return made


class TestContract(TrainEngineContract):
    algorithm: ClassVar[str] = "grpo"
    measures = False

    @pytest.fixture(autouse=True)
    def at_the_service(self, model: Path, server: TinkerServer, tmp_path: Path) -> None:
        self.config = config_at(server, model, checkpoint_root_dir=str(tmp_path))

    def engine(self) -> TrainEngine:
        return TinkerTrainEngine(self.config, make_algorithm(self.algorithm))

    def test_file_names_are_valid_on_any_storage(self) -> None:
        """No Hugging Face folder is exported either, since the service holds the model."""
        made = self.trained(0)
        assert list(made.weights()) == ["sampler.json"]
        assert sorted(made.state_files()) == ["actor/lora_adapter/sampler.json", "actor/tinker_state.json"]
        assert made.export_files() == {}


class TestContractOnADataset(TestContract):
    algorithm = "sft"
    measures = True


def moved(engine: TrainEngine, batches: Sequence[TrainingBatch]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = engine.train_step(batch, step)
    return metrics


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("grpo", {}),
        ("grpo", {"trainer__ppo_epochs": 2, "algorithm__bypass_old_logprobs": False}),
        ("gspo", {"trainer__ppo_mini_batch_size": 16}),
        ("reinforceplusplus", {}),
        ("sft", {}),
        ("dpo", {}),
    ],
)
def test_gradients_are_those_of_the_torch_engine(
    model: Path, server: TinkerServer, algorithm: str, overrides: dict[str, Any]
) -> None:
    # With an epsilon far above the gradients AdamW moves each weight in proportion to its gradient.
    args = {"algorithm__optimizer__optimizer_args": {"eps": 10.0}, "algorithm__optimizer__lr": 10.0}
    dataset = {"buffer__trainer_input__experience_buffer__path": "rows.jsonl"} if algorithm in ("sft", "dpo") else {}
    overrides = {**args, "algorithm__algorithm_type": algorithm, **dataset, **overrides}
    made = make_algorithm(algorithm)
    batches = [batch_of(number) for number in range(2)]
    ours = TorchEngine(engine_config(model, deterministic=True, **overrides), made)
    before = load(bytes(ours.weights()[MODEL_FILE]))
    theirs = TinkerTrainEngine(config_at(server, model, **overrides), made)
    told = [moved(engine, batches) for engine in (ours, theirs)]

    after = load(bytes(ours.weights()[MODEL_FILE]))
    there = server.saved[_path(theirs)].model.state_dict()
    for name, weights in after.items():
        steps = [(each[name] - before[name]).double() for each in (after, there)]
        assert steps[0].norm() > 0
        torch.testing.assert_close(steps[1], steps[0], rtol=1e-3, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert weights.shape == there[name].shape
    assert told[1].keys() >= told[0].keys() - {"grad_norm", "num_skipped_steps"}
    for name in told[0].keys() & told[1].keys():
        assert told[1][name] == pytest.approx(told[0][name], rel=1e-3, abs=1e-5), name


def _path(engine: TrainEngine) -> str:
    return str(json.loads(bytes(engine.weights()["sampler.json"]))["sampler_path"])


def test_settings_of_the_adapter_and_of_adamw_arrive(model: Path, server: TinkerServer) -> None:
    optimizer = {"algorithm__optimizer__betas": [0.8, 0.9], "algorithm__optimizer__weight_decay": 0.1}
    keys = {"model__tinker__rank": 4, "model__tinker__train_unembed": False, "seed": 7, "trainer__grad_clip": 0.5}
    config = config_at(server, model, **optimizer, **keys)
    moved(TinkerTrainEngine(config, make_algorithm("grpo")), [batch_of()])
    [made], [step] = server.asked("create_model"), server.asked("optim_step")
    adapter = {"rank": 4, "seed": 7, "train_mlp": True, "train_attn": True, "train_unembed": False}
    assert (made["base_model"], made["lora_config"]) == (str(model), adapter)
    assert step["adam_params"] == {
        **{"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    }


@pytest.mark.parametrize(
    ("key", "value"), {"rank": 4, "seed": 11, "train_mlp": False, "train_attn": False, "train_unembed": False}.items()
)
def test_a_key_of_the_adapter_reaches_the_service(model: Path, server: TinkerServer, key: str, value: Any) -> None:
    config = config_at(server, model, **{f"model__tinker__{key}": value})
    moved(TinkerTrainEngine(config, make_algorithm("grpo")), [batch_of()])
    [made] = server.asked("create_model")
    assert made["lora_config"][key] == value


def requests_of(num: int, **sampling: Any) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=6, **sampling)
    return [GenerateRequest((5, 6, 7 + number), params, seed=number) for number in range(num)]


def test_samples_have_the_logprobs_of_the_loaded_weights(model: Path, server: TinkerServer, tmp_path: Path) -> None:
    trained = TinkerTrainEngine(config_at(server, model), make_algorithm("sft"))
    engine = TinkerEngine(str(model), server.url)
    here = TransformersEngine(str(model))
    for version in (0, 1):
        if version:
            moved(trained, [batch_of()])
            file = tmp_path / "sampler.json"
            file.write_bytes(bytes(trained.weights()["sampler.json"]))
            engine.load_verified(1, [file], None)
            here._model.load_state_dict(server.saved[read_sampler_path([file])].model.state_dict())
        made = engine.generate(requests_of(4))
        pairs = [(r.prompt_tokens, g.tokens) for r, g in zip(requests_of(4), made, strict=True)]
        for generation, scored, wanted in zip(made, engine.logprobs(pairs), here.logprobs(pairs), strict=True):
            assert generation.logprobs == pytest.approx(wanted, abs=1e-5)
            assert scored == pytest.approx(wanted, abs=1e-5)
            assert generation.min_policy_version == generation.max_policy_version == version
    engine.close()


def test_a_response_goes_on_with_the_weights_it_began_with(model: Path, server: TinkerServer, tmp_path: Path) -> None:
    file = tmp_path / "sampler.json"
    trained = TinkerTrainEngine(config_at(server, model), make_algorithm("sft"))
    file.write_bytes(bytes(trained.weights()["sampler.json"]))
    engine = TinkerEngine(str(model), server.url)
    first, second = requests_of(2)
    answers: dict[int, Generation] = {}
    turns = iter([[(1, first)], [(2, second), (3, second), (3, None)]])

    def take() -> Sequence[tuple[int, GenerateRequest | None]]:
        taken = next(turns, [])
        if len(taken) > 1:
            engine.load_weights(1, [file])
        return taken

    engine.serve(take, answers.__setitem__)
    assert {number: answer.min_policy_version for number, answer in answers.items()} == {1: 0, 2: 1}


def test_sampling_parameters_reach_the_tinker_service(model: Path, server: TinkerServer) -> None:
    engine = TinkerEngine(str(model), server.url)
    [made] = engine.generate(requests_of(1, temperature=0.0, top_p=0.9, top_k=5, ignore_eos=True))
    sent = server.asked("asample")[-1]["sampling_params"]
    assert sent == {"max_tokens": 6, "seed": 0, "stop": [], "temperature": 0.0, "top_k": 5, "top_p": 0.9}
    assert made.finish_reason in ("stop", "length")
    with pytest.raises(RoleError, match="cannot answer request 0: the service does not accept repetition_penalty"):
        engine.generate(requests_of(1, repetition_penalty=1.1))


def tell_named(engine: TinkerTrainEngine, storage: Storage) -> None:
    """Call `keep_only` as the trainer does before it requests weights."""
    engine.keep_only(published_versions(storage), checkpoint_steps(storage))


@pytest.fixture
def config(model: Path, server: TinkerServer, tmp_path: Path) -> Config:
    return config_at(server, model, checkpoint_root_dir=str(tmp_path))


@pytest.fixture
def storage(config: Config) -> Storage:
    return open_storage(config.checkpoint_job_dir)


def test_weights_the_run_no_longer_names_are_deleted(config: Config, storage: Storage, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config, make_algorithm("sft"))
    paths = {}
    for step in (1, 2, 3):
        engine.train_step(batch_of(step), step)
        tell_named(engine, storage)
        paths[step] = _path(engine)
        publish_weights(storage, step, engine.weights())
        if step == 2:
            storage.remove(weights_folder(1))
    # Deletion follows at the next step: version 2 exists and 1 does not; 3 is handed out but not written yet.
    assert server.asked("delete") == [paths[1]]
    assert paths[1] not in server.saved and {paths[2], paths[3]} <= server.saved.keys()


def test_a_failed_deletion_is_only_logged(
    config: Config, storage: Storage, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TinkerTrainEngine(config, make_algorithm("sft"))
    server.refuses_deletes = True
    for step in (1, 2):
        engine.train_step(batch_of(step), step)
        publish_weights(storage, step, engine.weights())
    storage.remove(weights_folder(1))
    engine.train_step(batch_of(3), 3)
    tell_named(engine, storage)
    assert _path(engine) in server.saved
    assert "sampler_weights/step-1 at the service: the Tinker service rejected the request" in caplog.text
    tell_named(engine, storage)
    assert len(server.asked("delete")) == 1  # it is not tried again


def test_saved_states_stay_until_a_newer_checkpoint(config: Config, storage: Storage, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config, make_algorithm("sft"))
    for step in (1, 2):
        engine.train_step(batch_of(step), step)
        publish_weights(storage, step, engine.weights())
        engine.state_files()  # in the background they may not be written yet
    storage.remove(weights_folder(1))
    engine.train_step(batch_of(3), 3)
    tell_named(engine, storage)
    assert server.asked("delete") == []
    storage.put("global_step_2/manifest.json", b"{}")
    engine.train_step(batch_of(4), 4)
    tell_named(engine, storage)
    assert [path.rpartition("://")[2].split("/", 1)[1] for path in server.asked("delete")] == [
        "sampler_weights/step-1",
        "weights/step-1",
    ]


def test_errors_of_the_service_become_ours(model: Path, server: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = TinkerTrainEngine(config_at(server, model.parent / "nothing"), make_algorithm("sft"))
    with pytest.raises(
        UserError, match=r"rejected the request while creating an adapter of .*nothing: .*no such model"
    ):
        unknown.weights()
    engine = TinkerEngine(str(model), server.url, timeout_s=1.0)
    trained = TinkerTrainEngine(config_at(server, model), make_algorithm("sft"), timeout_s=1.0)
    server.is_stuck = True
    with pytest.raises(EngineError, match=r"did not respond for 1 s"):
        engine.generate(requests_of(1))
    with pytest.raises(ProcessLostError, match=r"did not respond for 1 s while creating an adapter of"):
        trained.train_step(batch_of(), 1)
    server.is_stuck = False
    monkeypatch.setenv(API_KEY, "tml-another")
    with pytest.raises(UserError, match=r"rejected the request while opening a session: .*the key is not known"):
        TinkerEngine(str(model), server.url)
    monkeypatch.setenv(API_KEY, "another")
    with pytest.raises(UserError, match="must start with the 'tml-' prefix"):
        TinkerEngine(str(model), server.url)
    with pytest.raises(EngineError, match="did not respond for 1 s while opening a session"):
        monkeypatch.setenv(API_KEY, "tml-test")
        TinkerEngine(str(model), "http://127.0.0.1:9", timeout_s=1.0)


def test_a_loss_that_is_not_finite_trains_nothing(model: Path, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config_at(server, model), make_algorithm("grpo"))
    batch = batch_of()
    batch.rollout_logprobs[batch.loss_mask] = np.nan
    with pytest.raises(ValueError, match="rollout_logprobs_BT is nan"):
        engine.train_step(batch, 1)
    assert server.asked("optim_step") == []


def test_rollouts_of_another_policy_train_nothing(model: Path, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config_at(server, model), make_algorithm("grpo"))
    engine.compares_first_update = True
    batch = join_batches([batch_of(0), batch_of(1)])
    batch.rollout_logprobs[:] = -20.0
    with pytest.raises(MismatchError, match="step 1: for 100% of"):
        engine.train_step(batch, 1)
    assert server.asked("optim_step") == []


def test_rows_of_another_temperature_are_refused(model: Path, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config_at(server, model), make_algorithm("grpo"))
    batch = batch_of()
    batch.temperatures[3] = 0.5
    with pytest.raises(DataError, match=r"t/0/0/3/0 was sampled at temperature 0.5"):
        engine.train_step(batch, 1)


def test_a_checkpoint_names_step_path_and_coefficients(model: Path, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config_at(server, model), make_algorithm("grpo"))
    moved(engine, [batch_of()])
    files = engine.state_files()
    resumed = TinkerTrainEngine(config_at(server, model), make_algorithm("grpo"))
    resumed.load_state_files(files)
    assert len(server.asked("create_model")) == 1  # a resumed engine creates no other
    # What it began with is not saved again, nor published again under another path.
    assert {name: bytes(data) for name, data in resumed.state_files().items()} == files
    assert (len(server.asked("save_weights")), len(server.asked("save_weights_for_sampler"))) == (1, 1)


def test_purely_supervised_rows_need_no_reference(model: Path, server: TinkerServer) -> None:
    engine = TinkerTrainEngine(config_at(server, model), make_algorithm("sft"))
    rows = [([5, 6, 7], 1, None), ([5, 9], 1, None)]
    assert engine.train_step(supervised_batch(rows, ["a", "b"]), 1)["loss"] > 0
    assert server.asked("asample") == []
