"""Translation of TRL training scripts: GRPO, RLOO, SFT, DPO, KTO and reward models.

The script is parsed and never executed. Values that it computes at run time, such as command-line arguments, are
reported as missing.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from rftdask.compat.imported import Imported, read_keys
from rftdask.errors import DataError

_RATE = {"GRPO": 1e-6, "RLOO": 1e-6, "SFT": 2e-5, "DPO": 1e-6, "KTO": 1e-6, "Reward": 1e-4}
"""Default learning rates of TRL's configurations."""
_ROLLS_OUT = ("GRPO", "RLOO")
_ALGORITHMS = {"GRPO": "grpo", "RLOO": "rloo", "SFT": "sft", "DPO": "dpo", "KTO": "kto", "Reward": "reward_model"}
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_LOSSES = ("cispo", "sapo", "vespo")
KEYS, ROLLOUT_KEYS = read_keys("trl"), read_keys("trl_rollouts")


def read_trl(path: str | Path) -> Imported:
    """Return the configuration of a script. Raises: DataError: it makes no known TRL configuration."""
    try:
        script = ast.parse(Path(path).read_text(encoding="utf-8"), filename=str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read as Python: {error}") from error
    calls = [node for node in ast.walk(script) if isinstance(node, ast.Call)]
    # Names that are given a literal once, anywhere; what is given twice may be either.
    names: dict[str, Any] = {}
    for node in ast.walk(script):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            names[name] = node.value if name not in names else None
    config = next((call for call in calls if _name(call) in {f"{kind}Config" for kind in _ALGORITHMS}), None)
    if config is None:
        known = ", ".join(f"{kind}Config" for kind in _ALGORITHMS)
        raise DataError(f"{path} makes none of {known}; values from its command line are not in the script")
    kind = _name(config).removesuffix("Config")
    trainer = next((call for call in calls if _name(call) == f"{kind}Trainer"), None)

    given: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for keyword in config.keywords:
        value = _literal(keyword.value, names)
        if keyword.arg is None or value is _Unknown:
            unread[keyword.arg or "**"] = f"{ast.unparse(keyword.value)} is computed while the script runs"
        else:
            given[keyword.arg] = value
    imported = Imported("trl", given, left=unread)
    imported.set("mode", "both" if kind in _ROLLS_OUT else "train")
    imported.set("algorithm.optimizer.lr", imported.get("learning_rate", _RATE[kind]), "learning_rate")
    betas = [imported.get("adam_beta1", 0.9), imported.get("adam_beta2", 0.999)]
    imported.set("algorithm.optimizer.betas", betas, "adam_beta1", "adam_beta2")
    if imported.get("optim", "adamw_torch").startswith("adamw_torch"):
        imported.taken["optim"] = "adam"
    (_rollouts if kind in _ROLLS_OUT else _rows)(imported, kind)
    _trainer(imported, kind, trainer, calls, names)
    imported.take({**KEYS, **(ROLLOUT_KEYS if kind in _ROLLS_OUT else {})})
    return imported.finish()


def _rollouts(imported: Imported, kind: str) -> None:
    get, loss = imported.get, imported.get("loss_type", "dapo")
    algorithm = loss if loss in _LOSSES else _ALGORITHMS[kind]
    if get("importance_sampling_level", "token") == "sequence":
        algorithm = "gspo"
    imported.set("algorithm.algorithm_type", algorithm, "importance_sampling_level")
    if kind == "GRPO":
        if loss in _AGGREGATIONS:
            imported.set("algorithm.loss_agg_mode", _AGGREGATIONS[loss], "loss_type")
        elif loss in _LOSSES:
            imported.taken["loss_type"] = "algorithm.algorithm_type"
        else:
            imported.left["loss_type"] = f"there is no {loss}; docs/algorithms.md lists what there is"
        scale = {True: "group", False: "none"}.get(get("scale_rewards", "group"), get("scale_rewards", "group"))
        if scale == "none":
            imported.set("algorithm.advantage_fn_args.std", "none", "scale_rewards")
        elif scale == "batch":
            imported.set("algorithm.advantage_fn_args.std_cal_level", "batch", "scale_rewards")
        elif "scale_rewards" in imported.given:
            imported.taken["scale_rewards"] = "as it is"
    if loss not in _LOSSES:
        low = get("epsilon", 0.2)
        imported.set("algorithm.policy_loss_fn_args.clip_range_low", low, "epsilon")
        imported.set("algorithm.policy_loss_fn_args.clip_range_high", get("epsilon_high", low), "epsilon_high")
    beta = get("beta", 0.0 if kind == "GRPO" else 0.05)
    if kind == "GRPO":
        estimate = "corrected_k3" if get("use_bias_correction_kl", True) else "k3"
        imported.set("algorithm.kl_loss_fn", estimate if beta else "none", "beta", "use_bias_correction_kl")
        term = "algorithm.kl_loss_fn_args"
    else:  # its rewards pay for the distance, and the loss has no term of it
        imported.set("algorithm.kl_loss_fn", "none")
        imported.set("algorithm.kl_penalty_fn", "k1" if beta else "none", "beta")
        term = "algorithm.kl_penalty_fn_args"
    if beta:
        imported.set(f"{term}.kl_coef", beta)
    if get("entropy_coef", 0.0):
        imported.set("algorithm.entropy_loss_fn_args.entropy_coef", get("entropy_coef", 0.0), "entropy_coef")
    # There 0 is off, and here -1.
    imported.set("model.top_k", get("top_k", 0) or -1, "top_k")
    imported.set("explorer.rollout_model.engine_type", "vllm" if get("use_vllm", False) else "transformers", "use_vllm")
    if get("mask_truncated_completions", False):
        operators = [{"name": "mask_response_truncated"}]
        imported.set("data_processor.experience_pipeline.operators", operators, "mask_truncated_completions")
    answers = get("per_device_train_batch_size", 8) * get("gradient_accumulation_steps", 1)
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    imported.set("buffer.batch_size", max(1, answers // get("num_generations", 8)), *sizes)
    imported.left["(processes)"] = "buffer.batch_size is for one process; multiply it by those of `accelerate launch`"


def _rows(imported: Imported, kind: str) -> None:
    imported.set("algorithm.algorithm_type", _ALGORITHMS[kind])
    imported.set("model.max_model_len", imported.get("max_length", 1024), "max_length")
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    imported.set("buffer.train_batch_size", imported.get(sizes[0], 8) * imported.get(sizes[1], 1), *sizes)
    imported.set("trainer.micro_batch_size", imported.get(sizes[0], 8))
    imported.left["(processes)"] = "train_batch_size is for one process; multiply it by those of `accelerate launch`"
    if kind in ("DPO", "KTO"):
        imported.set("algorithm.policy_loss_fn_args.beta", imported.get("beta", 0.1), "beta")
    if kind == "DPO":
        loss = imported.get("loss_type", "sigmoid")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        if loss in ("sigmoid", "hinge", "ipo"):
            imported.set("algorithm.policy_loss_fn_args.loss_type", loss, "loss_type")
        if "label_smoothing" in imported.given:
            imported.set(
                "algorithm.policy_loss_fn_args.label_smoothing", imported.given["label_smoothing"], "label_smoothing"
            )
    if imported.get("assistant_only_loss", False):
        key = "buffer.trainer_input.experience_buffer.format.return_assistant_tokens_mask"
        imported.set(key, True, "assistant_only_loss")


def _trainer(
    imported: Imported, kind: str, trainer: ast.Call | None, calls: list[ast.Call], names: dict[str, Any]
) -> None:
    """Translate the arguments of the TRL trainer: model, dataset, reward functions and adapters."""
    given = {keyword.arg: keyword.value for keyword in trainer.keywords} if trainer is not None else {}
    if trainer is not None and trainer.args:
        given.setdefault("model", trainer.args[0])
    model = _literal(given.get("model"), names)
    if not isinstance(model, str):
        loads = (call for call in calls if _name(call) == "from_pretrained" and call.args)
        model = next((name for call in loads if isinstance(name := _literal(call.args[0], names), str)), None)
    if model is None:
        model, imported.left["model"] = "MODEL", "the script computes it; set model.model_path"
    imported.set("model.model_path", model)

    data: dict[str, Any] = {"path": "DATA"}
    loaded = next((call for call in calls if _name(call) == "load_dataset" and call.args), None)
    if loaded is None:
        imported.left["train_dataset"] = "the script makes it; write it as jsonl and set its path"
    else:
        texts = [_literal(argument, names) for argument in loaded.args]
        data = {"path": texts[0], **({"subset_name": texts[1]} if len(texts) > 1 and texts[1] else {})}
        if _Unknown in texts:
            data = {"path": "DATA"}
            imported.left["load_dataset"] = "its names are computed; set the data's path"
        split = next((_literal(word.value, names) for word in loaded.keywords if word.arg == "split"), "train")
        data["split"] = split if isinstance(split, str) else "train"
        files = next((_literal(word.value, names) for word in loaded.keywords if word.arg == "data_files"), None)
        if isinstance(files, str):  # load_dataset("csv", data_files="tasks.csv")
            data = {"path": files}
        elif files is not None:
            imported.left["data_files"] = "the path of the data must be one file, or a folder of files"
    if kind in _ROLLS_OUT:
        data["format"] = {"prompt_key": "prompt", "response_key": "solution"}
        imported.left["(columns)"] = "prompt and solution are guessed; set the columns in format of the taskset"
        imported.set("buffer.explorer_input.taskset", data)
        _rewards(imported, given.get("reward_funcs"), names)
    else:
        imported.set("buffer.trainer_input.experience_buffer", data)
        # TRL detects chats by the column `messages`; here the configuration decides.
        imported.left["(columns)"] = "set format: {prompt_type: plaintext} for columns of text (docs/data.md)"
    lora = next((call for call in calls if _name(call) == "LoraConfig"), None)
    if lora is not None:
        words = {word.arg: _literal(word.value, names) for word in lora.keywords}
        ours = {
            "r": "lora_rank",
            "lora_alpha": "lora_alpha",
            "target_modules": "target_modules",
            "use_rslora": "use_rslora",
        }
        adapter = {ours[key]: value for key, value in words.items() if key in ours and value is not _Unknown}
        imported.set("model.lora_configs", [{"lora_rank": 8, "lora_alpha": 8, **adapter}])
        for key in words.keys() - ours.keys() - {"task_type", "bias"}:
            imported.left[f"LoraConfig.{key}"] = "adapters have rank, alpha, modules and rslora or dora here"


def _rewards(imported: Imported, given: ast.expr | None, names: dict[str, Any]) -> None:
    given = names.get(given.id, given) if isinstance(given, ast.Name) else given
    parts = given.elts if isinstance(given, ast.List | ast.Tuple) else [given] if given is not None else []
    rewards = [ast.unparse(part) for part in parts]
    reward = "accuracy_reward" if rewards == ["accuracy_reward"] else "my_rewards.reward"
    imported.set("buffer.explorer_input.default_reward_fn_type", reward)
    if reward != "accuracy_reward":
        # Not the folder of the script, which would be imported, and train, as all that is in such a folder.
        imported.set("explorer.plugin_dirs", ["plugins"])
        imported.left["reward_funcs"] = (
            f"{', '.join(rewards) or 'none is named'}: (completions, **columns) -> list must become reward(response, "
            "truth, task) -> float in plugins/my_rewards.py; several are parts of one sum (docs/workflows.md)"
        )


class _Unknown:
    """Stands for a value that the script computes."""


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _literal(node: ast.expr | None, names: dict[str, Any]) -> Any:
    """Return the value of a literal, or of a name that is assigned one; else _Unknown."""
    if isinstance(node, ast.Name):
        node = names.get(node.id)
    try:
        return ast.literal_eval(node) if node is not None else _Unknown
    except ValueError:
        return _Unknown
