"""Router loss: the auxiliary loss that keeps the experts of a mixture of experts evenly used.

It listens to the routers of a model in one forward pass; the loss is transformers' own, of all tokens of the pass,
prompts included. It knows no batches. Invariant: what the model computes is the same with it and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from rftdask.errors import DataError
from rftdask.models.routers import routers_of


class RouterLoss:
    """Example:
    router_loss = RouterLoss(model, coef=0.001)
    with router_loss.listening():
        loss = loss_of(model(...))
    (loss + router_loss.term(share=1.0)).backward()
    """

    def __init__(self, model: PreTrainedModel, coef: float) -> None:
        """Raises: DataError: the model has no routers that transformers could tell of."""
        try:
            self._routers, self._index = routers_of(model)
        except DataError as error:
            raise DataError(f"trainer.router_aux_loss_coef {coef}: {error}; leave it out") from error
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # late: few models need it

        self._loss = load_balancing_loss_func
        self._coef = coef
        self._experts_per_token = int(model.config.get_text_config().num_experts_per_tok)
        self._logits: list[Tensor] = []
        """[S, E] of each router and call, E experts, of the last pass."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the routers are heard; not in the backward pass, which may call them again."""
        self._logits = []

        def hear(_module: Any, _inputs: Any, output: Any) -> None:
            self._logits.append(output[self._index] if isinstance(output, tuple) else output)

        handles: list[RemovableHandle] = [router.register_forward_hook(hear) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def term(self, share: float) -> Tensor:
        """[] what the last pass adds to the loss of an update of whose tokens it has `share`, 0 to 1; with gradient.

        E sum_e f_e P_e, f_e the share of the tokens that go to expert e times the experts of a token, P_e its mean
        probability: the experts of a token where all are used alike. Source: Switch Transformer, arXiv:2101.03961,
        equations 4 to 6, over all layers together as in transformers.
        """
        num_experts = self._logits[0].shape[-1]
        # Its annotation says a tuple of one, and an int for no tuple.
        logits: Any = tuple(self._logits)
        return share * self._coef * cast(Tensor, self._loss(logits, num_experts, self._experts_per_token))
