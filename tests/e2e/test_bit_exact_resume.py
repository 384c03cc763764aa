"""A real run on the CPU, style fixed, killed as a whole at random moments and started again until it is done, ends with
the very bits of a run that nobody disturbed.
"""

import random
import time
from pathlib import Path

from tests.e2e.toy_runs import DEADLINE_S, finish, run_folder, write_grpo_config
from tests.integration.run_cases import RunProcess, assert_sound, final_weights, ledger_of, num_steps

STEPS = 6


def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = write_grpo_config(tmp_path / "undisturbed")
    finish(str(undisturbed))
    initial = (tmp_path / "undisturbed" / "model" / "model.safetensors").read_bytes()
    assert final_weights(run_folder(undisturbed)) != initial

    config = write_grpo_config(tmp_path / "killed")
    folder = run_folder(config)
    moments = sorted(random.SystemRandom().sample(range(1, STEPS), 2))
    for step in moments:
        with RunProcess("run", str(config)) as run:
            run.wait_until(lambda step=step: num_steps(folder) >= step, DEADLINE_S)
            time.sleep(random.SystemRandom().uniform(0.0, 0.2))  # anywhere within a step
            run.kill()
            run.wait_for_no_survivors()
    finish(str(config))

    assert assert_sound(folder)["checkpoint"] == STEPS
    # The two models are in two folders, so nothing but the model's path may tell the runs apart.
    assert ledger_of(folder) == ledger_of(run_folder(undisturbed)), moments
    assert final_weights(folder) == final_weights(run_folder(undisturbed)), moments
