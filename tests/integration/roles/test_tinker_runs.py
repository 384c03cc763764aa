"""A run whose policy is at the Tinker service, through its SDK, against our stand-in server."""

import os
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason="needs the package tinker: pip install 'rftdask[tinker]'")

from rftdask.models.tinker_service import API_KEY
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from rftdask.synchronizer.published import published_versions
from tests.e2e.toy_runs import run_folder, write_grpo_config
from tests.integration.run_cases import RunProcess, assert_sound, num_steps
from tests.tinker_server import served

pytestmark = [
    pytest.mark.extras,
    # Warnings of the package about its own modules.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

STEPS = 16
KEY = "tml-test-of-a-run"


def test_a_policy_at_the_service_learns_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    with served() as server:
        config = write_grpo_config(
            tmp_path,
            **{
                "model": {"tinker": {"enable": True, "base_url": server.url}},
                "algorithm": {"repeat_times": 8, "optimizer": {"lr": 2.0e-2}},
                "trainer": {"total_steps": STEPS, "save_interval": 3},
                "buffer": {
                    "explorer_input": {
                        "taskset": {
                            "path": str(tmp_path / "toy" / "train.jsonl"),
                            "format": {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"},
                        },
                        "default_reward_fn_type": "tests.e2e.toy_reward.even_codes",
                    }
                },
            },
        )
        folder = run_folder(config)
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        env = {API_KEY: KEY, "TINKER_TELEMETRY": "0", "PYTHONPATH": path}
        arguments = ("run", str(config), "--progress", "plain")
        with RunProcess(*arguments, env=env) as run:
            run.wait_until(lambda: num_steps(folder) >= 7)
            run.kill()
            run.wait_for_no_survivors()
        assert server.asked("load_weights") == []
        with RunProcess(*arguments, env=env) as run:
            run.end(code=0)
        [resumed] = server.asked("load_weights")

    storage = open_storage(folder)
    assert resumed["optimizer"] and resumed["path"].rpartition("/")[2] in ("step-3", "step-6")
    status = assert_sound(folder)
    assert status["checkpoint"] == status["published"] == status["step"] == STEPS
    rewards = read_metrics(storage, "trainer").drop_duplicates("step", keep="last").sort_values("step")["reward"]
    assert rewards[-4:].mean() > rewards[:4].mean() + 0.2, rewards.tolist()
    # Publications are paths, and paths removed from the folder are deleted at the service, except those that the first
    # life saved and those published only for the last step.
    assert {file.name for file in folder.glob(f"weights/{STEPS}/*")} == {"MANIFEST.json", "sampler.json"}
    assert not [*folder.rglob("*.safetensors")]
    assert published_versions(storage)[-1] == STEPS
    assert server.asked("delete")
    assert not [file for file in folder.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
