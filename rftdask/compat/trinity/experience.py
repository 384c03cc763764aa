"""Experience and EID, with the interface of Trinity-RFT.

Training uses the recorded calls of the policy (rollouts/policy/recording.py), not these objects. Only their rewards,
metrics and info are read.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class EID:
    """Identity of an experience."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    @property
    def uid(self) -> str:
        """Identity of the experience."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """Identity of its step."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """Identity of its run."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """Identity of its task."""
        return f"{self.batch}/{self.task}"


_TENSORS = {"tokens": torch.int32, "action_mask": torch.bool, "chosen": torch.int32, "rejected": torch.int32} | {
    name: torch.float32 for name in ("logprobs", "token_level_reward", "advantages", "returns", "teacher_logprobs")
}
"""Fields that are tensors, and the dtype for lists."""


class Experience:
    """An experience. Takes keyword arguments only; `tokens` is required, and lists become tensors. Without
    `action_mask`, chosen and rejected, the policy sampled every token after `prompt_length`."""

    is_conversation = False
    """True if it stands for all calls of the policy so far."""

    def __init__(
        self,
        *,
        tokens: Sequence[int] | Tensor,
        eid: EID | dict[str, Any] | None = None,
        prompt_length: int = 1,
        info: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        **fields: Any,
    ) -> None:
        known = {"reward", "truncate_status", "response_text", "prompt_text", "messages", "tools", "routed_experts"}
        known |= {"chosen_messages", "rejected_messages", "multi_modal_inputs", "custom_fields", *_TENSORS}
        if unknown := sorted(set(fields) - known):
            raise TypeError(f"Experience takes no {', '.join(unknown)}")
        self.eid = EID(**eid) if isinstance(eid, dict) else eid or EID()
        self.info = info or {}
        self.metrics = metrics or {}
        self.tokens: Tensor
        self.action_mask: Tensor | None
        self.logprobs: Tensor
        self.advantages: Tensor | None
        self.reward: float | None
        self.truncate_status: str | None
        self.response_text: str | None
        for name in known:
            value = tokens if name == "tokens" else fields.get(name)
            if name in _TENSORS and value is not None and not isinstance(value, Tensor):
                value = torch.tensor(list(value), dtype=_TENSORS[name])
            setattr(self, name, value)
        pairs = fields.get("chosen") is not None and fields.get("rejected") is not None
        self.prompt_length = len(self.tokens) if pairs and self.action_mask is None else prompt_length
        if self.action_mask is None and not pairs:
            if not 0 < prompt_length < len(self.tokens):
                raise AssertionError(f"prompt_length {prompt_length} must be within 1..{len(self.tokens) - 1}")
            self.action_mask = torch.ones(len(self.tokens) - prompt_length, dtype=torch.bool)


def group_by(experiences: Sequence[Experience], id_type: str) -> dict[str, list[Experience]]:
    """Return experiences by task, run or step, in their order. Raises: ValueError: unknown id_type."""
    ids = {"task": "tid", "run": "rid", "step": "sid"}
    if id_type not in ids:
        raise ValueError(f"id_type {id_type!r} is not one of {', '.join(ids)}")
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, ids[id_type]), []).append(experience)
    return groups
