"""Train a model that learns on a laptop in a minute: creates a toy model and its tasks, then runs
config/quickstart.yaml.

    python examples/quickstart.py [KEY=VALUE]...

After the first two calls this is an ordinary run: `rftdask run config/quickstart.yaml` resumes or repeats it.
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
    """Create the model and its tasks if they do not exist."""
    if not (assets / "model" / "model.safetensors").exists():  # the last file to be written
        write_toy_tasks(assets)
        # One wide layer with many heads learns these sums in fewer steps than deeper models of the same size. vLLM on a
        # CPU requires heads of at least 32.
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 1, "num_heads": 8}
        call(
            partial(build_toy_model, assets / "model", **sizes)
        )  # run by one of the run's processes, which have imported torch


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
