"""A `private` run leaves nothing to other users, and values from the environment are in no file."""

import hashlib
import stat
from pathlib import Path

import pytest
import yaml

from tests.integration.run_cases import RunProcess, call_cli, run_folder

MASKLESS = "import os, sys; os.umask(0); os.execv(sys.executable, [sys.executable, '-m', 'rftdask', *sys.argv[1:]])"
WORKFLOW = """
import hashlib, os
from rftdask.rollouts.workflows.registry import workflow

@workflow("asks_a_judge")
async def asks_a_judge(task, model):
    found = task.workflow_args["judges"][0]["url"] + os.environ["KEY_OF_JUDGE"]
    assert hashlib.sha256(found.encode()).hexdigest() == task.workflow_args["sha256"], "it is not what was set"
    return float(len((await model.generate(task.prompt)).text))
"""
URL, KEY = "https://me:hunter2@judge/v1", "correct horse battery staple"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_private_run_leaves_nothing_to_others_and_no_secret(config: Path, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "judging.py").write_text(WORKFLOW)
    tree = yaml.safe_load(config.read_text())
    tree["explorer"] |= {"plugin_dirs": [str(tmp_path / "plugins")], "env_vars": {"KEY_OF_JUDGE": "${oc.env:MY_KEY}"}}
    digest = hashlib.sha256(f"{URL}{KEY}".encode()).hexdigest()
    tree["buffer"]["explorer_input"]["taskset"] |= {
        "default_workflow_type": "asks_a_judge",
        "workflow_args": {"judges": [{"url": "${oc.env:MY_JUDGE}"}], "sha256": digest},
    }
    config.write_text(yaml.safe_dump(tree))
    folder = run_folder(config)
    for steps in (2, 3):
        changes = ("private=true", f"trainer.total_steps={steps}", "monitor.monitor_type=tensorboard")
        words = ("run", str(config), *changes, "--progress", "none")
        with RunProcess(*words, env={"MY_JUDGE": URL, "MY_KEY": KEY}, program=("-c", MASKLESS)) as run:
            ended = run.end(code=0)
        assert not any(secret in ended.out + ended.err for secret in ("hunter2", KEY))
    statuses = call_cli("experiences", str(folder), "--csv", "--sql", "select distinct status from experiences")
    assert statuses.out == "status\nok\n", "the workflow got what was set"
    assert call_cli("report", str(folder)).code == 0
    files = [folder, *folder.rglob("*")]
    assert not [str(path) for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert stat.S_IMODE(folder.parent.stat().st_mode) & 0o077, "what is above a run is not the run's"
    secrets = (b"hunter2", KEY.encode())
    assert not [str(path) for path in files if path.is_file() and any(s in path.read_bytes() for s in secrets)]
    refused = call_cli("run", str(config))
    assert refused.code == 2 and "MY_JUDGE" in refused.err and "MY_KEY" in refused.err
