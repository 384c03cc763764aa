"""Convert: a checkpoint of a run as a Hugging Face folder, without a network.

It knows the files of a run and nothing of trainers at work, so it may run while one is. Invariant: the folder appears
whole or not at all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load

from rftdask.buffer.batches.lineage import lineage_of
from rftdask.config import Config
from rftdask.errors import DataError, UserError
from rftdask.models.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, add_adapter, load_adapter, merged, settings_of
from rftdask.reports.run_reader import open_stages
from rftdask.run.run_folder import read_run
from rftdask.storage import Storage
from rftdask.synchronizer.published import CHECKPOINT_ADAPTER_FOLDER, model_files
from rftdask.trainer.checkpoint import (
    HF_FOLDER,
    Checkpoints,
    checkpoint_folder,
    checkpoint_steps,
    newest_valid_checkpoint,
)
from rftdask.trainer.model import SCALAR_HEAD, dtype_at_rest, export_hf, load_policy

_STEP = "global_step_"
_MADE = 4
"""Parts of the path of what a stage made, below the run: <stage>/global_step_<N>/actor/huggingface."""


@dataclass(frozen=True)
class Converted:
    """A Hugging Face folder and the checkpoint that it was made from."""

    run: str
    step: int
    folder: Path


def convert(source: str, out: str | Path, *, step: int | None = None, merge_lora: bool = True) -> Converted:
    """Write the policy of a checkpoint with its tokenizer and generation config, in the data type of the model's files.

    Args:
        source: folder or URL of a run, or of one of its checkpoints (.../global_step_40).
        out: folder to make; it must not exist, or be empty.
        step: of the checkpoint; None: the newest. Of a run with stages, the last stage that has one.
        merge_lora: False writes the adapters alone, in PEFT's layout.

    Raises: UserError: `out` is in use, or what is asked for is not there. DataError, StorageError: it cannot be read.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; give a folder that does not, so that nothing is mixed up")
    storage, config, step = _find(source, step)
    files = Checkpoints(storage, lineage_of(storage)).files(step)
    if files is None:
        steps = ", ".join(map(str, checkpoint_steps(storage))) or "none"
        raise UserError(f"{storage.url} has no checkpoint of step {step}; there are: {steps}")
    # Only now: what is refused above leaves nothing behind.
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the move is a rename and the folder appears whole.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        if merge_lora:
            _write_model(_model_of(storage, config), config, files, whole)
        elif config.model.lora_configs:
            for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
                (whole / name).write_bytes(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{name}"])
        else:
            raise UserError(f"run {config.name} trains all weights, so it has no adapters; leave out --adapter")
        if target.exists():
            # An empty folder may be there, into which the move would go.
            target.rmdir()
        # By one rename: who looks at the folder finds all of it or nothing.
        shutil.move(whole, target)
    return Converted(storage.url, step, target)


def _find(source: str, step: int | None) -> tuple[Storage, Config, int]:
    """The folder of the run or stage, its config, and the step of the checkpoint."""
    # Of a run, or of one of its checkpoints: then the folder above is the run.
    run, _, name = source.rstrip("/").rpartition("/")
    if name.startswith(_STEP) and name.removeprefix(_STEP).isdigit():
        named = int(name.removeprefix(_STEP))
        if step not in (None, named):
            raise UserError(f"{source} is the checkpoint of step {named}, not of step {step}; leave one of them out")
        source, step = run or ".", named
    stages = open_stages(source)
    # Stages train one after the other, so the last one with a checkpoint has the newest model.
    stage = next((stage for stage in reversed(stages) if checkpoint_steps(stage.storage)), stages[0])
    storage, config = stage.storage, stage.config
    found = newest_valid_checkpoint(storage) if step is None else step
    if found is None:
        raise UserError(f"{storage.url} has no checkpoint yet; trainer.save_interval says when there is one")
    return storage, config, found


def _model_of(storage: Storage, config: Config) -> str:
    """Folder or name of a model that the weights of a checkpoint fit into.

    The run's own, if it has one: the path that its config names may be relative, or gone with the place it began in.
    """
    models = [f"{checkpoint_folder(step)}/{HF_FOLDER}" for step in reversed(checkpoint_steps(storage))]
    own = next((model for model in models if storage.exists(f"{model}/config.json")), None)
    # Adapters are added to the model that they were trained on; in the run's own they are merged.
    if own is not None and not config.model.lora_configs and "://" not in storage.url:
        return f"{storage.url}/{own}"
    path = config.model.model_path
    # Of a relative path, or of a run that was moved: seen from where it began, or made by a stage beside this one.
    began, beside = read_run(storage).get("cwd", ""), Path(storage.url).parent.joinpath(*Path(path).parts[-_MADE:])
    places = (Path(path).expanduser(), Path(str(began), path), beside)
    return next((str(place) for place in places if (place / "config.json").is_file()), path)


def _write_model(path: str, config: Config, files: Mapping[str, bytes], folder: Path) -> None:
    trust = config.model.trust_remote_code
    trained = {name: tensor for file in model_files(files) for name, tensor in load(files[file]).items()}
    # The architecture and the tokenizer; the weights, too, where adapters alone were trained.
    model, tokenizer = load_policy(
        path, "float32", "cpu", trust_remote_code=trust, offline=True, scalar_head=SCALAR_HEAD in trained
    )
    if config.model.lora_configs:
        add_adapter(model, settings_of(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{ADAPTER_CONFIG_FILE}"]))
        load_adapter(model, load(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{ADAPTER_FILE}"]), "the checkpoint")
        merged(model)
    else:
        missing, unexpected = model.load_state_dict(trained, strict=False)
        # A tied weight is stored once, under one of its names.
        missing = sorted(set(missing) - set(getattr(model, "all_tied_weights_keys", None) or ()))
        if missing or unexpected:
            differ = f"missing {missing}, unexpected {sorted(unexpected)}"
            raise DataError(f"the checkpoint does not fit the model {path}: {differ}")
    export_hf(model, tokenizer, folder, dtype=dtype_at_rest(path, trust_remote_code=trust, offline=True))
