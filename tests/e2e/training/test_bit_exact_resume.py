"""Promise: a real run on the CPU, style fixed, of one or two ranks, killed at random moments, ends with the bits of an
undisturbed run with the same number of ranks. Either the whole run is killed and restarted, or one rank, which the
run replaces, also between two updates from one batch.
"""

import random
import time
from pathlib import Path

import pytest

from rftdask import Experiment
from tests.e2e.own_losses import KILL_AT
from tests.e2e.toy_runs import DEADLINE_S, run_folder, write_grpo_config
from tests.integration.run_cases import TRAINER, RunProcess, assert_sound, final_weights, ledger_of, num_steps

STEPS = 20


def write_config(folder: Path, num_ranks: int) -> Path:
    trainer = {"total_steps": STEPS, "save_interval": 3, "num_ranks": num_ranks, "save_hf_checkpoint": "never"}
    # Sixteen experiences make two updates, and each is trained twice.
    trainer |= {"ppo_epochs": 2, "ppo_mini_batch_size": 8}
    algorithm = {"policy_loss_fn": "tests.e2e.own_losses.KilledPpo"}
    return write_grpo_config(folder, trainer=trainer, algorithm=algorithm, cluster={"num_cpus": 1 + num_ranks})


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_run_ends_with_undisturbed_weights(tmp_path: Path, num_ranks: int) -> None:
    undisturbed = write_config(tmp_path / "undisturbed", num_ranks)
    # In this process, which has loaded the modules of a driver.
    assert Experiment.from_yaml(undisturbed).run(progress="none").status == "finished"
    initial = (tmp_path / "undisturbed" / "model" / "model.safetensors").read_bytes()
    assert final_weights(run_folder(undisturbed)) != initial

    config = write_config(tmp_path / "killed", num_ranks)
    folder = run_folder(config)
    dice = random.SystemRandom()
    first, second = sorted(dice.sample(range(2, STEPS - 2), 2))
    # Call 7 of the loss is the third update of step 2.
    killed_between_updates = tmp_path / "killed between updates"
    with RunProcess("run", str(config), env={KILL_AT: f"7 {killed_between_updates}"}) as run:
        run.wait_until(lambda: killed_between_updates.exists() and num_steps(folder) >= first, DEADLINE_S)
        time.sleep(dice.uniform(0.0, 0.1))  # anywhere within a step
        run.kill()
        run.wait_for_no_survivors()
    with RunProcess("run", str(config)) as run:
        # Choose the victims before they train, so that nothing slow happens between the step and the kill.
        run.wait_until(lambda: len(run.children(TRAINER)) == num_ranks, DEADLINE_S)
        rank = dice.choice(run.children(TRAINER))
        run.wait_until(lambda: num_steps(folder) >= second, DEADLINE_S)
        time.sleep(dice.uniform(0.0, 0.1))
        rank.kill()
        ended = run.end(DEADLINE_S)
        assert ended.code == 0, ((first, second), ended)
        run.wait_for_no_survivors()
    assert assert_sound(folder)["step"] == STEPS, (first, second)
    assert ledger_of(folder) == ledger_of(run_folder(undisturbed))
    assert state_of(folder) == state_of(run_folder(undisturbed)), (first, second)


def state_of(folder: Path) -> dict[str, bytes]:
    """Return every weight and the complete state of the optimizer after the last step."""
    last = folder / f"global_step_{STEPS}" / "actor"
    state = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert any(path.startswith("model") for path in state)
    return state
