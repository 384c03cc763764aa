"""Converts a checkpoint of a run to a Hugging Face folder, without a network, or uploads it to the Hub with a card.

It reads only the files of a run, so the run may be active. Invariant: the folder appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError  # type: ignore[attr-defined]
from safetensors.torch import load

from rftdask.buffer.batches.ledger import lineage_of
from rftdask.config import Config
from rftdask.config.yaml_source import to_yaml
from rftdask.data.hub import is_model_name
from rftdask.data.tokenizer import configured_template
from rftdask.errors import DataError, UserError
from rftdask.models.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, add_adapter, load_adapter, merged, settings_of
from rftdask.reports.run_reader import open_stages
from rftdask.reports.summary import RunSummary, learned, percent, summarize
from rftdask.run.run_folder import read_end, read_run, read_run_config
from rftdask.storage import Storage, open_storage
from rftdask.storage.temporary import TemporaryFolder
from rftdask.synchronizer.published import CHECKPOINT_ADAPTER_FOLDER, model_files
from rftdask.trainer.checkpoint import (
    HF_FOLDER,
    Checkpoints,
    checkpoint_folder,
    checkpoint_steps,
    newest_valid_checkpoint,
)
from rftdask.trainer.model import SCALAR_HEAD, dtype_at_rest, export_hf, load_policy, read_only_files

_STEP = "global_step_"
_MODEL_PATH_PARTS = 4
"""Parts of the path of a stage's model below the run: <stage>/global_step_<N>/actor/huggingface."""
_SHOWN_KEYS = ("mode", "seed", "stages", "algorithm", "model", "buffer", "explorer", "trainer", "synchronizer")
"""Keys of a configuration that a model card may show. The others describe machines and places."""
_LOCAL_PATH = re.compile(r"(~|\.{1,2})/\S*|/[^\s/]+/\S*")


@dataclass(frozen=True)
class Converted:
    run: str
    step: int
    folder: Path


def convert(source: str, out: str | Path, *, step: int | None = None, merge_lora: bool = True) -> Converted:
    """Write the policy of a checkpoint with its tokenizer and generation config, in the data type of the model's files.

    Args: source: folder or URL of a run, or of one of its checkpoints (.../global_step_40). out: empty or new folder.
    step: None: the newest, of the last stage with any. merge_lora: False writes only the adapters, in PEFT's layout.
    Raises: UserError: `out` is in use, or the checkpoint does not exist. DataError, StorageError: it cannot be read.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists and is not empty; give a new folder")
    storage, config, step = _find(source, step)
    files = Checkpoints(storage, lineage_of(storage)).files(step)
    if files is None:
        steps = ", ".join(map(str, checkpoint_steps(storage))) or "none"
        raise UserError(f"{storage.url} has no checkpoint of step {step}; its steps are: {steps}")
    # After the checks, so that a rejected command leaves nothing behind.
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent folder, so that the move is a rename and the target appears whole.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        if merge_lora:
            model = _model_of(storage, config)
            # A model of the run already has the template of the run, whose file may be gone.
            template = None if model.startswith(storage.url) else configured_template(config)
            _write_model(model, config, files, whole, template)
        elif config.model.lora_configs:
            for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
                (whole / name).write_bytes(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{name}"])
        else:
            raise UserError(f"run {config.name} trains all weights, so it has no adapters; leave out --adapter")
        if target.exists():
            # An empty target, into which the folder would be moved.
            target.rmdir()
        shutil.move(whole, target)
    return Converted(storage.url, step, target)


def _find(source: str, step: int | None) -> tuple[Storage, Config, int]:
    """Return the folder of the run or stage, its config, and the step of the checkpoint."""
    run, _, name = source.rstrip("/").rpartition("/")
    if name.startswith(_STEP) and name.removeprefix(_STEP).isdigit():
        named = int(name.removeprefix(_STEP))
        if step not in (None, named):
            raise UserError(f"{source} is the checkpoint of step {named}, not of step {step}; leave one of them out")
        source, step = run or ".", named
    stages = open_stages(source)
    # Stages train in order, so the last one with a checkpoint has the newest model.
    stage = next((stage for stage in reversed(stages) if checkpoint_steps(stage.storage)), stages[0])
    storage, config = stage.storage, stage.config
    step = newest_valid_checkpoint(storage) if step is None else step
    if step is None:
        raise UserError(f"{storage.url} has no checkpoint yet; trainer.save_interval sets when one is written")
    return storage, config, step


def _model_of(storage: Storage, config: Config) -> str:
    """Find a model that fits the weights of a checkpoint, first inside the run: paths of its config may be outdated."""
    models = [f"{checkpoint_folder(step)}/{HF_FOLDER}" for step in reversed(checkpoint_steps(storage))]
    model = next((model for model in models if storage.exists(f"{model}/config.json")), None)
    # Adapters need their base model; models inside the run have them merged.
    if model is not None and not config.model.lora_configs and "://" not in storage.url:
        return f"{storage.url}/{model}"
    path = config.model.model_path
    # A relative path is resolved from the run's first working directory, or as the model of a sibling stage.
    sibling = Path(storage.url).parent.joinpath(*Path(path).parts[-_MODEL_PATH_PARTS:])
    places = (Path(path).expanduser(), Path(str(read_run(storage).get("cwd", "")), path), sibling)
    return next((str(place) for place in places if (place / "config.json").is_file()), path)


def _write_model(path: str, config: Config, files: Mapping[str, bytes], folder: Path, template: str | None) -> None:
    trust = config.model.trust_remote_code
    trained = {name: tensor for file in model_files(files) for name, tensor in load(files[file]).items()}
    model, tokenizer = load_policy(
        path, "float32", "cpu", trust_remote_code=trust, offline=True, scalar_head=SCALAR_HEAD in trained
    )
    if config.model.lora_configs:
        add_adapter(model, settings_of(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{ADAPTER_CONFIG_FILE}"]))
        load_adapter(model, load(files[f"{CHECKPOINT_ADAPTER_FOLDER}/{ADAPTER_FILE}"]), "the checkpoint")
        merged(model)
    else:
        missing, unexpected = model.load_state_dict(trained, strict=False)
        # Tied weights are stored under one of their names.
        missing = sorted(set(missing) - set(getattr(model, "all_tied_weights_keys", None) or ()))
        if missing or unexpected:
            differ = f"missing {missing}, unexpected {sorted(unexpected)}"
            raise DataError(f"the checkpoint does not fit the model {path}: {differ}; is it the model of this run?")
    dtype = dtype_at_rest(path, trust_remote_code=trust, offline=True)
    export_hf(model, tokenizer, folder, dtype=dtype, files=read_only_files(path, template))


def push(run: str, repo: str, *, step: int | None = None, private: bool = True, merge_lora: bool = True) -> str:
    """Write a checkpoint as a Hugging Face folder with a card, and upload it in one commit. Returns: URL of its page.

    huggingface_hub chooses the Hub and the token: HF_ENDPOINT, HF_TOKEN or `hf auth login`.
    Raises: UserError: `repo` is not a valid name, or the Hub refuses or cannot be reached; DataError: no such run or
    checkpoint.
    """
    if not is_model_name(repo):
        raise UserError(f"{repo}: not a model name of the Hub; use OWNER/NAME")
    storage, stages = open_storage(run), open_stages(run)
    config = read_run_config(storage)
    summary = summarize(config, storage.url, stages, status=read_end(storage) or "as found")
    with TemporaryFolder("push") as folder:
        done = convert(run, Path(folder) / "model", step=step, merge_lora=merge_lora)
        card = model_card(config, summary, done.step, repo, done.folder)
        (done.folder / "README.md").write_text(card, encoding="utf-8")
        api = HfApi()
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            message = f"step {done.step} of {config.name}"
            commit = api.upload_folder(repo_id=repo, folder_path=done.folder, commit_message=message)
        except (HfHubHTTPError, LocalTokenNotFoundError) as error:
            raise UserError(f"{api.endpoint} rejects {repo}: {str(error).splitlines()[0]}") from error
        except (HTTPError, ConnectionError) as error:  # of httpx or httpx2, by the version of huggingface_hub
            why = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(
                f"{api.endpoint} cannot be reached: {why}; check the network and HF_ENDPOINT, or write the model to a "
                "folder with rftdask convert"
            ) from error
    return str(commit.repo_url)


def model_card(config: Config, summary: RunSummary, step: int, repo: str, folder: Path) -> str:
    """Return the README.md of a model: usage, base, data, results, and the settings that differ from the defaults.

    It has only the last part of local paths, and no section about machines. folder: the model's files.
    """
    stages = config.stage_configs()
    last, task = stages[-1], _task_of(folder)
    all_paths = [taskset.path for stage in stages for taskset in stage.buffer.explorer_input.train_tasksets]
    all_paths += [
        stage.buffer.trainer_input.experience_buffer.path or ""
        for stage in stages
        if stage.algorithm.schema_type != "experience"
    ]
    paths = list(dict.fromkeys(filter(None, all_paths)))
    base, evals = stages[0].model.model_path, last.buffer.explorer_input.eval_tasksets
    results = []
    if summary.accuracy_after is not None and evals:
        results.append(
            EvalResult(
                task_type=task,
                dataset_type=evals[0].path if _is_public(evals[0].path) else "custom",
                dataset_name=", ".join(str(taskset.name) for taskset in evals),
                metric_type="accuracy",
                metric_value=round(summary.accuracy_after, 4),
            )
        )
    data = ModelCardData(
        library_name="peft" if (folder / ADAPTER_CONFIG_FILE).exists() else "transformers",
        pipeline_tag=task,
        # Local folders mean nothing to other users.
        base_model=base if _is_public(base) else None,
        datasets=[path for path in paths if _is_public(path)] or None,
        tags=["rftdask", *dict.fromkeys(stage.algorithm.algorithm_type for stage in stages)],
        model_name=config.name if results else None,
        eval_results=results or None,
    )
    lines = ["---", data.to_yaml(), "---", f"# {config.name}", ""]
    if summary.accuracy_after is not None or any(row.eval_losses for row in summary.stages):
        lines += [f"{learned(summary).capitalize()}.", ""]
    lines += ["## Usage", "", "```python", _usage(task, repo, folder), "```", ""]
    lines += [
        "## Training",
        "",
        "| stage | algorithm | steps | learning rate | accuracy before | after |",
        "|---|---|---|---|---|---|",
    ]
    for stage, row in zip(stages, summary.stages, strict=True):
        lr, accuracies = stage.algorithm.optimizer.lr, (percent(row.first_accuracy), percent(row.last_accuracy))
        lines.append(f"| {row.name} | {row.algorithm} | {row.steps} | {lr:g} | {accuracies[0]} | {accuracies[1]} |")
    lines += [
        "",
        f"The weights are of step {step}, from `{_public_name(base)}`. Trained on:",
        "",
        *(f"- `{_public_name(path)}`" for path in paths),
        "",
    ]
    if last.has_explorer:
        per_step = f"{last.buffer.batch_size} tasks x {last.algorithm.repeat_times} rollouts in a step"
        reward = last.buffer.explorer_input.default_reward_fn_type or "of its workflow"
        lines += [f"{per_step}; reward `{reward}`; sync style `{last.synchronizer.sync_style}`.", ""]
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    tree = {name: value for name, value in config.to_dict().items() if name in _SHOWN_KEYS}
    settings = to_yaml(_changed(tree, config.model_dump(mode="json", exclude_defaults=True)))
    lines += [f"Made with {versions}.", "", "## Settings that differ from the defaults", ""]
    return "\n".join([*lines, "```yaml", settings.rstrip(), "```", ""])


def _is_public(name: str) -> bool:
    """True for a name on the Hub."""
    return is_model_name(name) and not Path(name).exists()


def _public_name(path: str) -> str:
    return path if _is_public(path) else Path(path).name


def _task_of(folder: Path) -> str:
    """Task of a model as the Hub names it, by the class in its configuration; adapters are of language models."""
    file = folder / "config.json"
    architectures = json.loads(file.read_text()).get("architectures") if file.exists() else None
    architecture = (architectures or [""])[0]
    suffixes = {"ForSequenceClassification": "text-classification", "ForConditionalGeneration": "image-text-to-text"}
    return next((task for suffix, task in suffixes.items() if architecture.endswith(suffix)), "text-generation")


def _usage(task: str, repo: str, folder: Path) -> str:
    """Return Python code that loads a model of the Hub and calls it once."""
    file = folder / "tokenizer_config.json"
    chats = (folder / "chat_template.jinja").exists() or (file.exists() and "chat_template" in file.read_text())
    asked = '[{"role": "user", "content": "Hello"}]' if chats and task != "text-classification" else '"Hello"'
    lines = ["from transformers import pipeline", "", f'model = pipeline("{task}", model="{repo}")']
    return "\n".join([*lines, f"print(model({asked}))"])


def _changed(tree: Any, changed: Any, key: str = "") -> Any:
    """Return the values of `tree` that `changed` has as well, with the last part of each local path."""
    if isinstance(tree, dict) and isinstance(changed, dict):
        parts = {name: _changed(value, changed[name], name) for name, value in tree.items() if name in changed}
        return {name: part for name, part in parts.items() if part is not None and part != {}}
    if isinstance(tree, list | tuple) and isinstance(changed, list | tuple):
        return [_changed(value, other, key) for value, other in zip(tree, changed, strict=False)]
    if isinstance(tree, str) and (key.endswith(("path", "dir", "dirs", "folder")) or _LOCAL_PATH.fullmatch(tree)):
        return _public_name(tree)
    return tree
