"""`rftdask examples toy`: a small model and its tasks, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftdask.cli.common import say
from rftdask.config import load_config
from rftdask.driver.convert import convert
from rftdask.driver.experiment import Experiment
from rftdask.errors import UserError
from rftdask.models.toy import build_toy_model, write_toy_tasks
from rftdask.storage.temporary import TemporaryFolder


def toy(
    to: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Output folder")] = "toy",
    warm: Annotated[bool, typer.Option("--warm", help="Train the model on sums first, for half a minute")] = False,
) -> None:
    """Create a small model that learns sums on a CPU.

    It learns in seconds. Nothing is downloaded.
    """
    folder = Path(to)
    if (folder / "model").exists():
        raise UserError(f"{folder / 'model'} already exists; name another folder, or remove it")
    write_toy_tasks(folder)
    if warm:
        with TemporaryFolder("toy") as root:
            # The size of the model in config/quickstart.yaml, which starts from this warm-up.
            build_toy_model(Path(root) / "raw", hidden_size=256, intermediate_size=512, num_layers=1, num_heads=8)
            optimizer = {"lr": 4e-4, "lr_warmup_steps": 5, "betas": [0.9, 0.99], "weight_decay": 0.0}
            rows = {
                "path": str(folder / "sft.jsonl"),
                "format": {"prompt_type": "raw"},
                "data_selector": {"selector_type": "shuffle"},
            }
            tree = {
                "mode": "train",
                "name": "warmup",
                "checkpoint_root_dir": root,
                "model": {"model_path": f"{root}/raw", "max_prompt_tokens": 16, "max_response_tokens": 4},
                "algorithm": {"algorithm_type": "sft", "optimizer": optimizer},
                "buffer": {"train_batch_size": 32, "total_epochs": 100, "trainer_input": {"experience_buffer": rows}},
                "trainer": {"total_steps": 320},
                "monitor": {"monitor_type": "none"},
            }
            experiment = Experiment(load_config(tree))
            experiment.run()
            convert(experiment.url, folder / "model")
    else:
        build_toy_model(folder / "model", hidden_size=128, intermediate_size=256, num_layers=1, num_heads=4)
    say(f"wrote {folder}/model and {', '.join(sorted(path.name for path in folder.glob('*.jsonl')))}")
