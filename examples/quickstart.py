"""A model that learns on a laptop, in a minute: makes a toy model and its tasks, then runs config/quickstart.yaml.

    python examples/quickstart.py [KEY=VALUE]...

Everything after the first two calls is what any run does; `rftdask run config/quickstart.yaml` continues or repeats it.
"""

import sys
import time
from functools import partial
from pathlib import Path

from rftdask import Experiment
from rftdask.models.toy import build_toy_model, write_toy_tasks
from rftdask.processes.zygote import call
from rftdask.reports.summary import print_summary

CONFIG = Path(__file__).parent.parent / "config" / "quickstart.yaml"


def make_toy(assets: Path) -> None:
    """The model and its tasks, unless they are there."""
    if not (assets / "model" / "model.safetensors").exists():  # the last file that is written
        write_toy_tasks(assets)
        # One wide layer of many heads learns these sums in fewer steps than deeper models of as many weights. vLLM on a
        # CPU takes heads of 32, and no smaller ones.
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 1, "num_heads": 8}
        call(partial(build_toy_model, assets / "model", **sizes))  # in one of the run's processes, which have torch


def main(overrides: list[str]) -> None:
    began = time.monotonic()
    experiment = Experiment.from_yaml(CONFIG, *overrides)
    experiment.prepare()
    make_toy(Path(experiment.config.checkpoint_root_dir) / "toy")
    summary = experiment.run()
    print_summary(summary)
    seconds = time.monotonic() - began
    before, after = summary.accuracy_before, summary.accuracy_after
    print(f"quickstart: accuracy {before:.2f} -> {after:.2f} in {seconds:.0f} s, run: {experiment.url}")


if __name__ == "__main__":
    main(sys.argv[1:])
