"""Uploads the model of a run to the Hugging Face Hub, with a card of its data, settings and results."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from rftdask.config import Config
from rftdask.data.hub import is_model_name
from rftdask.driver.convert import convert
from rftdask.errors import UserError
from rftdask.reports.run_reader import open_stages
from rftdask.reports.summary import RunSummary, learned, percent, summarize
from rftdask.run.run_folder import read_end, read_run_config
from rftdask.storage import open_storage
from rftdask.storage.temporary import TemporaryFolder


def push(run: str, repo: str, *, step: int | None = None, private: bool = True, merge_lora: bool = True) -> str:
    """Write a checkpoint as a Hugging Face folder with a card, and upload it in one commit. Returns: URL of its page.

    huggingface_hub chooses the Hub and the token: HF_ENDPOINT, HF_TOKEN or `hf auth login`.
    Raises: UserError: `repo` is not a valid name, or the Hub refuses; DataError: no such run or checkpoint.
    """
    if not is_model_name(repo):
        raise UserError(f"{repo}: not a model name of the Hub; use OWNER/NAME")
    storage, stages = open_storage(run), open_stages(run)
    config = read_run_config(storage)
    summary = summarize(config, storage.url, stages, status=read_end(storage) or "as found")
    with TemporaryFolder("push") as folder:
        done = convert(run, Path(folder) / "model", step=step, merge_lora=merge_lora)
        (done.folder / "README.md").write_text(model_card(config, summary, done.step), encoding="utf-8")
        api = HfApi()
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            message = f"step {done.step} of {config.name}"
            commit = api.upload_folder(repo_id=repo, folder_path=done.folder, commit_message=message)
        except (HfHubHTTPError, LocalTokenNotFoundError) as error:
            raise UserError(f"{api.endpoint} rejects {repo}: {str(error).splitlines()[0]}") from error
    return str(commit.repo_url)


def model_card(config: Config, summary: RunSummary, step: int) -> str:
    """Return the README.md of a model: its base, data, algorithm, settings and results."""
    stages = config.stage_configs()
    last = stages[-1]
    base = stages[0].model.model_path
    all_paths = [taskset.path for stage in stages for taskset in stage.buffer.explorer_input.train_tasksets]
    all_paths += [
        stage.buffer.trainer_input.experience_buffer.path or ""
        for stage in stages
        if stage.algorithm.schema_type != "experience"
    ]
    paths = list(dict.fromkeys(filter(None, all_paths)))
    data = ModelCardData(
        library_name="transformers",
        # Local folders mean nothing to other users.
        base_model=base if is_model_name(base) and not Path(base).exists() else None,
        datasets=[path for path in paths if is_model_name(path) and not Path(path).exists()] or None,
        tags=["rftdask", *dict.fromkeys(stage.algorithm.algorithm_type for stage in stages)],
    )
    lines = ["---", data.to_yaml(), "---", f"# {config.name}", "", f"{learned(summary).capitalize()}.", ""]
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
        f"The weights are of step {step}, from `{base}`. Trained on:",
        "",
        *(f"- `{path}`" for path in paths),
        "",
    ]
    if last.has_explorer:
        per_step = f"{last.buffer.batch_size} tasks x {last.algorithm.repeat_times} rollouts in a step"
        reward = last.buffer.explorer_input.default_reward_fn_type or "of its workflow"
        lines += [f"{per_step}; reward `{reward}`; sync style `{last.synchronizer.sync_style}`.", ""]
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    lines += [f"Made with {versions}.", "", "## Settings", "", "```yaml", summary.config_yaml.rstrip(), "```", ""]
    return "\n".join(lines)
