"""Push: the model of a run on the Hugging Face Hub, with a card: what it was trained on, how, and what came of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rftdask.config import Config
from rftdask.data.hub import is_model_name
from rftdask.driver.convert import convert
from rftdask.errors import UserError
from rftdask.reports.run_reader import open_stages
from rftdask.reports.summary import RunSummary, learned, percent, summarize
from rftdask.run.run_folder import read_end, read_run_config
from rftdask.storage import open_storage


def push(run: str, repo: str, *, step: int | None = None, private: bool = True, merge_lora: bool = True) -> str:
    """Write a checkpoint as a Hugging Face folder, add its card, and upload both in one commit; the page's URL.

    The Hub and the token are those of huggingface_hub: HF_ENDPOINT, HF_TOKEN or `hf auth login`.
    Raises: UserError: no such name, or the Hub refuses; DataError: there is no such run or checkpoint.
    """
    if not is_model_name(repo):
        raise UserError(f"{repo}: a model of the Hub is named OWNER/NAME")
    from huggingface_hub import HfApi  # late: 0.2 s, and asked for by this alone
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    storage, stages = open_storage(run), open_stages(run)
    config = read_run_config(storage)
    summary = summarize(config, storage.url, stages, status=read_end(storage) or "as found")
    with tempfile.TemporaryDirectory(prefix="rftdask-push-") as folder:
        done = convert(run, Path(folder) / "model", step=step, merge_lora=merge_lora)
        (done.folder / "README.md").write_text(model_card(config, summary, done.step), encoding="utf-8")
        api = HfApi()
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            said = f"step {done.step} of {config.name}"
            found = api.upload_folder(repo_id=repo, folder_path=done.folder, commit_message=said)
        except (HfHubHTTPError, LocalTokenNotFoundError) as error:
            raise UserError(f"{api.endpoint} does not take {repo}: {str(error).splitlines()[0]}") from error
    return str(found.repo_url)


def model_card(config: Config, summary: RunSummary, step: int) -> str:
    """README.md of a model: its base, data, algorithm, settings and results, and how to train it again."""
    from huggingface_hub import ModelCardData  # late, as above

    stages = config.stage_configs()
    last = stages[-1]
    base = stages[0].model.model_path
    sets = [taskset for stage in stages for taskset in stage.buffer.explorer_input.train_tasksets]
    rows = [
        stage.buffer.trainer_input.experience_buffer for stage in stages if stage.algorithm.schema_type != "experience"
    ]
    paths = list(dict.fromkeys([*(each.path for each in sets), *(each.path for each in rows if each.path)]))
    data = ModelCardData(
        library_name="transformers",
        # Folders of this machine say nothing elsewhere.
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
