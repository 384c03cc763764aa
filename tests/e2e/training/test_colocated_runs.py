"""Runs whose trainer and engines alternate on a device (mode colocate)."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import local
from tests.e2e.gloo_ranks import run_ranks
from tests.e2e.toy_runs import DEADLINE_S, run_folder, write_grpo_config
from tests.e2e.training.test_ranks_agree import batch_for, engine, strategy_of
from tests.integration import run_cases
from tests.integration import run_cases as runs

pytestmark = pytest.mark.slow


def trained(gangs: dict[int, Ranks], model: str, strategy: str, away: bool) -> tuple[str, int]:
    """Return a digest of the state of a PPO rank, with critic and reference, after three steps, and the numbers that
    stayed on the device while it was away.
    """
    ranks, stayed = gangs[2], 0
    trainer = engine(model, "ppo", strategy_of(strategy, ranks), algorithm__kl_loss_fn="k2")
    for step in (1, 2, 3):
        trainer.train_step(batch_for("ppo", step), step)
        trainer.fingerprint()  # its pass leaves weights gathered that a step would shard again
        if away:
            trainer.leave_device()
            stayed += sum(int(local(each).isfinite().sum()) for each in trainer._tensors() if each.is_floating_point())
            if strategy == "fsdp2":  # weights that ranks gathered for a pass are sharded again
                stayed += sum(not isinstance(each, DTensor) for each in trainer._model.parameters())
            trainer.return_to_device()
    files = trainer.state_files()
    return sha256(b"".join(files[name] for name in sorted(files))).hexdigest(), stayed


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_that_left_their_device_go_on_to_the_bit(tmp_path: Path, strategy: str) -> None:
    build_toy_model(tmp_path / "model", hidden_size=18, intermediate_size=33, num_layers=2, num_heads=3)
    for name in ("away", "there"):
        (tmp_path / name).mkdir()
    away = run_ranks(2, tmp_path / "away", trained, str(tmp_path / "model"), strategy, True)
    there = run_ranks(2, tmp_path / "there", trained, str(tmp_path / "model"), strategy, False)
    assert [digest for digest, _ in away] == [digest for digest, _ in there]
    assert [stayed for _, stayed in away] == [0, 0]


# One thread each, as in the compared runs.
ALONE, TOGETHER = "cluster.num_cpus=2", "cluster.num_cpus=1"


@pytest.mark.long
def test_alternating_on_a_device_changes_no_bit_despite_kills(tmp_path: Path) -> None:
    trainer_settings = {"total_steps": 8, "save_interval": 2, "save_hf_checkpoint": "never"}
    # Every other turn starts with the weights of the turn before, so none are loaded over the returned ones.
    sync = {"sync_offset": 0, "sync_interval": 2}
    undisturbed = write_grpo_config(tmp_path / "both", trainer=trainer_settings, synchronizer=sync)
    runs.finish_alone(undisturbed, ALONE)
    config = write_grpo_config(tmp_path / "colocate", trainer=trainer_settings, synchronizer=sync)
    folder = run_folder(config)
    command = ("run", str(config), TOGETHER, "mode=colocate", "--progress", "plain")
    with runs.RunProcess(*command) as run:
        run.wait_until(lambda: runs.num_steps(folder) >= 1, DEADLINE_S)
        run.children(runs.ENGINE)[0].kill()
        run.wait_until(lambda: runs.num_steps(folder) >= 2, DEADLINE_S)
        run.kill()  # the driver and its workers; the holder of the device lock ends with them
        run.wait_for_no_survivors()
    with runs.RunProcess(*command) as run:
        # Choose the victim before it trains, so that nothing slow happens between the step and the kill.
        run.wait_until(lambda: bool(run.children(runs.TRAINER)), DEADLINE_S)
        (trainer,) = run.children(runs.TRAINER)
        run.wait_until(lambda: runs.num_steps(folder) >= 3, DEADLINE_S)
        trainer.kill()
        ended = run.end(DEADLINE_S, code=0)
    assert "they take turns on what each machine has (colocate)" in ended.out + ended.err
    # An engine with NaN weights reports it and ends, and another one would replace it.
    logs = "".join(file.read_text() for file in (folder / "log").rglob("engine.log"))
    assert "not numbers" not in logs
    assert "up to nan" not in logs
    written = json.loads((folder / "run.json").read_text())
    assert written["placement"] == "1 rank, 1 engine; they take turns on what each machine has (colocate)"
    assert (written["config"]["mode"], written["config"]["cluster"]["colocate"]) == ("both", True)
    assert runs.assert_same_run(folder, run_folder(undisturbed))["step"] == 8


def test_two_ranks_and_two_engines_share_two_places(tmp_path: Path) -> None:
    config = run_cases.write_config(tmp_path)
    several = ("mode=colocate", "trainer.num_ranks=2", "explorer.rollout_model.engine_num=2")
    runs.finish_alone(config, *several, "synchronizer.sync_style=fully_async")
    assert runs.assert_sound(run_cases.run_folder(config))["step"] == 10
