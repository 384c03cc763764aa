"""Reward of a trained reward model, which runs in the worker."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.hub import local_model
from rftdask.data.supervised import SftRows
from rftdask.data.task import Task
from rftdask.errors import DataError
from rftdask.rollouts.rewards.registry import reward

_ONE_AT_A_TIME = threading.Lock()
"""Threads would compete for the same cores, and each would load the model."""


# In the worker, because the sandbox process of every rollout would load the model.
@reward("reward_model", in_process=True, in_thread=True)
def reward_model(response: str, truth: str, task: Task, model_path: str, device: str = "cpu") -> float:
    """Score of the task with this response by the model at `model_path` (AutoModelForSequenceClassification, num_labels
    1), tokenized as for algorithm type reward_model; any real number.

    Each process loads the model once, in float32, and scores one response at a time in a thread, so a score does not
    depend on other responses.
    Raises: DataError: the model cannot be loaded, is not a reward model, or the prompt is too long for it.
    """
    import torch  # late: workers without this reward do not load torch

    columns, row = FormatConfig(prompt_type="raw"), dict[str, Any](prompt=task.prompt, response=response)
    if task.messages:
        columns = FormatConfig(messages_key="messages")
        messages = [*map(dict, task.messages), {"role": "assistant", "content": response}]
        row = {"messages": messages, "tools": list(task.tools)}
    with _ONE_AT_A_TIME, torch.no_grad():
        model, tokenizer = _load(model_path, device)
        max_tokens = getattr(model.config, "max_position_embeddings", 1 << 20)
        # Training uses the same reader.
        [(tokens, *_)] = SftRows(RowsDataset([[row]], ""), tokenizer, columns, max_tokens).read([0])
        return float(model(torch.tensor([tokens], device=device)).logits[0, 0])


@lru_cache(maxsize=2)
def _load(model_path: str, device: str) -> tuple[Any, Any]:
    from safetensors import SafetensorError  # late, as torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = local_model(model_path)
    try:
        kind: Any = AutoModelForSequenceClassification
        model, report = kind.from_pretrained(source, dtype="float32", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"reward_model: model_path {model_path} cannot be loaded: {error}") from error
    if report["missing_keys"] or model.config.num_labels != 1:
        raise DataError(
            f"reward_model: model_path {model_path} is not a reward model (num_labels {model.config.num_labels}, "
            f"missing {sorted(report['missing_keys'])}); use a model exported by algorithm type reward_model"
        )
    return model.to(device).eval(), tokenizer
