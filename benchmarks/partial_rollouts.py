"""Effect on learning of weights that load during rollouts: responses of the quickstart's toy may then span versions.

    python benchmarks/partial_rollouts.py [--seeds 0 1 2] [--slots 64] [--quick] [--json FILE]

For each seed, the warm-up of config/quickstart.yaml runs once. From its weights the second stage runs twice in style
fully_async: with `synchronizer.load_in_flight`, and without it, when new weights load while no rollout is in progress.
Reported after the same number of steps: accuracy on the held-out tasks, the share of responses whose tokens have
several versions, and the staleness of the trained rows in versions, counted from the oldest token.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from report import Report, make_parser

from rftdask import Experiment
from rftdask.models.toy import build_toy_model, write_toy_tasks

QUICKSTART = Path(__file__).parents[1] / "config" / "quickstart.yaml"


def warm_up(root: Path, seed: int, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shared sections with the model of the first stage, and the sections of the second stage."""
    tree = yaml.safe_load(QUICKSTART.read_text())
    tree |= {"checkpoint_root_dir": str(root), "seed": seed, "monitor": {"monitor_type": "none"}}
    first, second = tree["stages"]
    if quick:
        first["trainer"]["total_steps"], second["trainer"]["total_steps"] = 2, 2
    experiment = Experiment(**{**tree, "name": f"warm-{seed}", "stages": [first]})
    experiment.run("none")
    tree["model"]["model_path"] = experiment.model_path()
    return tree, second


def learn(tree: dict[str, Any], second: dict[str, Any], in_flight: bool, slots: int) -> tuple[float, float, float]:
    """Return the final accuracy, the share of responses that span versions, and the mean staleness of a run."""
    style = {"sync_style": "fully_async", "load_in_flight": in_flight}
    second["explorer"]["slots_per_engine"] = slots
    name = f"seed-{tree['seed']}-{in_flight}"
    experiment = Experiment(**{**tree, "name": name, "stages": [second], "synchronizer": style})
    summary = experiment.run("none")
    rows, metrics = experiment.experiences(), experiment.metrics("trainer")
    spans = float((rows["min_policy_version"] < rows["max_policy_version"]).mean())
    return float(summary.accuracy_after), spans, float(metrics["staleness"].mean())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--slots", type=int, default=64, help="concurrent rollouts of the engine")
    args = parser.parse_args()
    report = Report(args)
    with tempfile.TemporaryDirectory(prefix="rftdask-partial-") as folder:
        write_toy_tasks(Path(folder) / "toy")
        build_toy_model(Path(folder) / "toy/model", hidden_size=256, intermediate_size=512, num_layers=1, num_heads=8)
        for seed in args.seeds[:1] if args.quick else args.seeds:
            stages = warm_up(Path(folder), seed, args.quick)
            for in_flight in (True, False):
                accuracy, spans, staleness = learn(*stages, in_flight, args.slots)
                what = f"seed {seed}, {'with' if in_flight else 'without'} load_in_flight"
                report.add(f"{what}: accuracy", accuracy, "of held-out tasks")
                report.add(f"{what}: rows of several versions", spans, "of all rows")
                report.add(f"{what}: staleness", staleness, "versions", less_is_better=True)
    report.write()


if __name__ == "__main__":
    main()
