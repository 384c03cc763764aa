"""Promises of an installation without extras, as on a login node. Runs in the environment $RFTDASK_LIGHT, which CI
creates; otherwise in this one, with the packages of the extra train hidden.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.run_cases import call_cli, run_folder, write_config

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow
_HIDE = """
import sys
from importlib.machinery import PathFinder
class Hiding:
    find_distributions = staticmethod(PathFinder.find_distributions)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in %r else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding()
"""
_HIDDEN = {"torch", "transformers", "tokenizers", "safetensors", "datasets", "tensorboard", "bokeh"}
_REMEDY = "pip install 'rftdask[train]'"


def rftdask(cwd: Path, *arguments: str) -> tuple[int, str]:
    """Return (exit code, output)."""
    python, env = os.environ.get("RFTDASK_LIGHT"), dict(os.environ)
    env.pop("PYTHONPATH", None)
    # A SLURM that lists nodes and accepts no jobs, so that a SLURM of this machine is not used.
    (cwd / "bin").mkdir(exist_ok=True)
    (cwd / "bin" / "sinfo").write_text("#!/bin/sh\necho 'main*|8|16|gpu:1|64000|1-00:00:00'\n")
    (cwd / "bin" / "sinfo").chmod(0o755)
    env["PATH"] = f"{cwd / 'bin'}:/nowhere"
    if python is None:
        (cwd / "hide").mkdir(exist_ok=True)
        (cwd / "hide" / "sitecustomize.py").write_text(_HIDE % _HIDDEN)
        python, env["PYTHONPATH"] = sys.executable, os.pathsep.join([str(cwd / "hide"), str(ROOT)])
    command = [python, "-m", "rftdask", *arguments]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_light_install_checks_submits_and_names_extras(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    assert call_cli("run", config, "--progress", "none").code == 0  # with all packages installed

    code, output = rftdask(tmp_path, "validate", str(ROOT / "config" / "quickstart.yaml"))
    assert (code, "train steps" in output) == (0, True), output
    code, output = rftdask(
        tmp_path, "estimate", str(ROOT / "config" / "gsm8k-grpo.yaml"), "--gpus", "8", "--gpu", "H200"
    )
    assert (code, "trainer: fits" in output) == (0, True), output

    slurm = ("cluster.type=slurm", "cluster.python=/nodes/bin/python")
    code, output = rftdask(tmp_path, "submit", str(ROOT / "config" / "gsm8k-grpo.yaml"), "--dry-run", *slurm)
    assert (code, "/nodes/bin/python -m rftdask run" in output) == (0, True), output

    folder = str(run_folder(Path(config)))
    code, output = rftdask(tmp_path, "status", folder)
    assert (code, "complete" in output) == (0, True), output
    code, output = rftdask(tmp_path, "report", folder)
    assert (code, output.strip()) == (0, f"{folder}/report.html"), output

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    debug = ("debug", config, "explorer.rollout_model.engine_type=transformers", "model.model_path=model", "--once")
    for command in (("run", config, "name=other"), ("convert", folder, str(tmp_path / "out")), debug):
        code, output = rftdask(tmp_path, *command)
        assert (code, _REMEDY in output, "Traceback" in output) == (2, True, False), output


def test_checks_impossible_on_a_login_node_run_at_the_start(tmp_path: Path) -> None:
    """The submission reaches a SLURM that accepts no job."""
    config, model = str(write_config(tmp_path)), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 4, "hidden_size": 2, "num_hidden_layers": 1}')
    (model / "tokenizer.json").write_text("{}")
    head = b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}'
    (model / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(32))
    changes = ("cluster.type=slurm", "trainer.trainer_type=torch", f"model.model_path={model}")
    code, output = rftdask(tmp_path, "submit", config, *changes)
    assert code == 2
    assert "not checked here, and checked where the run starts: torch is not installed" in output, output
    assert "squeue is not installed: use a login node" in output.splitlines()[-1], output
