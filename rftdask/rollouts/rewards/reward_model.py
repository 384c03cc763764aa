"""Reward of a trained reward model, which the worker itself holds."""

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
"""Threads would share the same cores, and each would load the model."""


# In the worker itself: a sandbox is a process per rollout, and each would load the model.
@reward("reward_model", in_process=True, in_thread=True)
def reward_model(response: str, truth: str, task: Task, model_path: str, device: str = "cpu") -> float:
    """The score that the model at `model_path` (AutoModelForSequenceClassification, num_labels 1) gives the task with
    this response, tokenized as algorithm type reward_model does; of any size and sign.

    Each process loads the model once, in float32, and scores one response at a time, beside its event loop: the same
    response has the same score whatever comes with it.
    Raises: DataError: it cannot be loaded, is no reward model, or the prompt is too long for it.
    """
    import torch  # late: workers without this reward hold no torch

    columns, row = FormatConfig(prompt_type="raw"), dict[str, Any](prompt=task.prompt, response=response)
    if task.messages:
        columns = FormatConfig(messages_key="messages")
        row = {"messages": [*map(dict, task.messages), {"role": "assistant", "content": response}]}
    with _ONE_AT_A_TIME, torch.no_grad():
        model, tokenizer = _load(model_path, device)
        max_tokens = getattr(model.config, "max_position_embeddings", 1 << 20)
        # By the reader that training uses, so that the model sees what it was trained on.
        [(tokens, *_)] = SftRows(RowsDataset([[row]], ""), tokenizer, columns, max_tokens).read([0])
        return float(model(torch.tensor([tokens], device=device)).logits[0, 0])


@lru_cache(maxsize=2)
def _load(model_path: str, device: str) -> tuple[Any, Any]:
    from safetensors import SafetensorError  # late, as torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = local_model(model_path)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            source, dtype="float32", output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"reward_model: model_path {model_path} cannot be loaded: {error}") from error
    model, report = loaded
    if report["missing_keys"] or model.config.num_labels != 1:
        raise DataError(
            f"reward_model: model_path {model_path} is no reward model (num_labels {model.config.num_labels}, missing "
            f"{sorted(report['missing_keys'])}); give what algorithm type reward_model exports"
        )
    return model.to(device).eval(), tokenizer
