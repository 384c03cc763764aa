"""Configs and jobs for the tests of batch systems."""

from pathlib import Path

from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.config import Config, load_config
from rftdask.storage import open_storage


def configured(folder: Path, *overrides: str) -> Config:
    tree = {
        "name": "try",
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"total_steps": 9, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "cluster": {"type": "slurm", "slurm": {"trainer": {"gres": "gpu:1", "cpus": 2}}},
    }
    return load_config(tree, overrides)


def private(config: Config) -> SecretsDir:
    return SecretsDir.of(config, open_storage(config.checkpoint_job_dir))


DRIVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
