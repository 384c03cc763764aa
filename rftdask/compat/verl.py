"""Translation of verl configurations (`ppo_trainer.yaml` and similar)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rftdask.compat.imported import Imported, Key, read_keys
from rftdask.config.trinity.translate import NEEDLESS, VERL, leaves
from rftdask.errors import DataError

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEYS = read_keys("verl") | {key: Key(ours) for key, ours in VERL.items()}
"""Keys of verl with one key here. `read_verl` translates those that need more than one."""
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforceplusplus",
}
"""`algorithm.adv_estimator` -> algorithm."""
LOSSES = {"gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
"""`actor_rollout_ref.actor.policy_loss.loss_mode` -> algorithm."""


def read_verl(path: str | Path) -> Imported:
    """Return the configuration of a verl YAML file. Raises: DataError: it is not a verl configuration."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict) or "actor_rollout_ref" not in tree:  # other systems also have `data` and `algorithm`
        raise DataError(f"{path} has no actor_rollout_ref; it is not a verl configuration")
    # Negative means never there, and 0 does here.
    given = {key: 0 if key.endswith("_freq") and value == -1 else value for key, value in leaves(tree)}
    imported = Imported("verl", {key: value for key, value in given.items() if value is not None})
    _algorithm(imported)
    _data(imported)
    imported.take(KEYS)
    for key in imported.given:
        # A whole section may stand for what is always so here.
        why = next((why for needless, why in NEEDLESS.items() if f"{key}.".startswith(f"{needless}.")), None)
        if why is not None and key not in imported.taken:
            imported.left[key] = why
    return imported.finish()


def _algorithm(imported: Imported) -> None:
    get, actor = imported.get, f"{_ACTOR}."
    estimator, mode = get("algorithm.adv_estimator", "gae"), get(f"{actor}policy_loss.loss_mode", "vanilla")
    if (name := LOSSES.get(mode) or ESTIMATORS.get(estimator)) is not None:
        imported.set("algorithm.algorithm_type", name, "algorithm.adv_estimator", f"{actor}policy_loss.loss_mode")
    if estimator not in ESTIMATORS:
        imported.left["algorithm.adv_estimator"] = f"there is no {estimator}; docs/algorithms.md lists what there is"
    if mode not in LOSSES and mode != "vanilla":
        imported.left[f"{actor}policy_loss.loss_mode"] = f"there is no {mode}; docs/algorithms.md lists what there is"
    if name != "ppo":
        for key in ("gamma", "lam"):
            if f"algorithm.{key}" in imported.given:
                imported.taken[f"algorithm.{key}"] = ""
                imported.left[f"algorithm.{key}"] = f"{name} has none"
    if name == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo", True):
        imported.set("algorithm.advantage_fn_args.std", "none", "algorithm.norm_adv_by_std_in_grpo")
    elif "algorithm.norm_adv_by_std_in_grpo" in imported.given:
        imported.taken["algorithm.norm_adv_by_std_in_grpo"] = "as it is"
    clip = get(f"{actor}clip_ratio", 0.2)
    for side in ("low", "high") if name not in LOSSES.values() else ():
        ours, theirs = f"algorithm.policy_loss_fn_args.clip_range_{side}", f"{actor}clip_ratio_{side}"
        imported.set(ours, get(theirs, clip), theirs, f"{actor}clip_ratio")
    # verl counts prompts, and here experiences are counted.
    size = get(f"{actor}ppo_mini_batch_size", 256)
    if size < get("data.train_batch_size", 1024):
        imported.set("trainer.ppo_mini_batch_size", size * get(f"{_ROLLOUT}.n", 1), f"{actor}ppo_mini_batch_size")
    elif f"{actor}ppo_mini_batch_size" in imported.given:
        imported.taken[f"{actor}ppo_mini_batch_size"] = "the whole batch"
    of_loss = ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
    of_reward = ("use_kl_in_reward", "kl_ctrl.kl_coef", "kl_penalty")
    _kl(imported, "kl_loss_fn", tuple(actor + key for key in of_loss), "low_var_kl")
    _kl(imported, "kl_penalty_fn", tuple(f"algorithm.{key}" for key in of_reward), "kl")
    if entropy := get(f"{actor}entropy_coeff", 0.0):
        imported.set("algorithm.entropy_loss_fn_args.entropy_coef", entropy, f"{actor}entropy_coeff")
    elif f"{actor}entropy_coeff" in imported.given:
        imported.taken[f"{actor}entropy_coeff"] = "none"


def _kl(imported: Imported, ours: str, keys: tuple[str, ...], default: str) -> None:
    """Translate a KL term. keys: its switch, its coefficient and its estimate."""
    used, coefficient, kind = keys
    if not imported.get(used, False):
        imported.set(f"algorithm.{ours}", "none", *keys)
        return
    estimate = imported.get(kind, default)
    imported.set(f"algorithm.{ours}", {"kl": "k1", "mse": "k2"}.get(estimate, estimate), used, kind)
    imported.set(f"algorithm.{ours}_args.kl_coef", imported.get(coefficient, 0.001), coefficient)


def _data(imported: Imported) -> None:
    columns = {
        "prompt_type": "messages",
        "messages_key": imported.get("data.prompt_key", "prompt"),
        "response_key": "ground_truth",
    }
    why = "rows of verl have their answer at reward_model.ground_truth; move it to a column ground_truth"
    for theirs, is_eval in (("data.train_files", False), ("data.val_files", True)):
        paths = imported.given.get(theirs)
        names: list[Any] = paths if isinstance(paths, list) else [paths] if paths else []
        sets: list[dict[str, Any]] = [
            {"name": f"{'eval' if is_eval else 'train'}_{n}", "path": str(path), "format": dict(columns)}
            for n, path in enumerate(names)
        ]
        if is_eval:
            keys = {f"{_ROLLOUT}.val_kwargs.{word}": word for word in ("temperature", "top_p", "top_k")}
            # Greedy by default, as in verl.
            sampling = {word: imported.given[key] for key, word in keys.items() if key in imported.given}
            imported.taken.update({key: "rollout_args of eval_tasksets" for key in keys if key in imported.given})
            for taskset in sets:
                taskset["rollout_args"] = {"temperature": 0.0, **sampling}
        if sets:
            ours = "buffer.explorer_input." + ("eval_tasksets" if is_eval else "tasksets")
            imported.set(ours, sets, theirs, "data.prompt_key")
            imported.left[f"{theirs} (rows)"] = why
    if imported.get("data.shuffle", True):
        for taskset in imported.tree.get("buffer", {}).get("explorer_input", {}).get("tasksets", ()):
            taskset["data_selector"] = {"selector_type": "shuffle"}
    if "data.shuffle" in imported.given:
        imported.taken["data.shuffle"] = "data_selector"
    name = imported.get("custom_reward_function.name", "compute_score")
    reward = "math_reward"
    if path := imported.given.get("custom_reward_function.path"):
        reward = f"{Path(path).stem}.{name}"
        imported.left["custom_reward_function.path"] = (
            f"{name}(data_source, solution_str, ground_truth, extra_info) must become {name}(response, truth, task) "
            f"in plugins/{Path(path).name}"
        )
        imported.taken["custom_reward_function.name"] = "default_reward_fn_type"
        # Not its own folder, all of whose files would be imported.
        imported.set("explorer.plugin_dirs", ["plugins"])
    else:
        imported.left["(reward)"] = "verl chooses a score by data_source; here it is math_reward, see docs/workflows.md"
    imported.set("buffer.explorer_input.default_reward_fn_type", reward)
