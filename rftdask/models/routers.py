"""Routers of a mixture of experts: record or replay the experts of each token, and compute the load-balancing loss.

In the models of transformers a router scores E experts and chooses K of them by `topk`. That choice is recorded or
replaced, so the model's use of the chosen scores, and its gradient, stay unchanged.
Invariant: a pass that replays the choices of a pass over the same tokens with the same weights gives the same bits.

Letters: S tokens of a pass; R routers, from the first layer on; K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from rftdask.errors import DataError

_SIZES = ("num_experts", "num_local_experts", "n_routed_experts")  # names of the number of experts in configurations


def routers_of(model: PreTrainedModel, key: str) -> tuple[list[torch.nn.Module], int]:
    """Return the routers of a model, from the first layer on, and the index of the logits among their outputs.

    Raises: DataError: transformers does not know routers in the model. key: option that needs them.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = recorder.target_class if isinstance(recorder, OutputRecorder) else ()
    routers = [module for module in model.modules() if isinstance(module, kind)]
    if not isinstance(recorder, OutputRecorder) or not routers:
        raise DataError(f"{key}: {type(model).__name__} has no routers of experts; leave it out")
    return routers, recorder.index


class Routers:
    """Records the choices of all routers of a model (`taken`), or replays them (`give`) in all later passes, including
    recomputation in the backward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Hook into every later pass of `model`. Raises: DataError: the model has no routers, or hides them."""
        routers, _ = routers_of(model, "algorithm.enable_router_replay")
        config = model.config.get_text_config()
        self._name = type(model).__name__
        self.num_taken = int(config.num_experts_per_tok)
        """K."""
        self._num_experts = next((int(getattr(config, name)) for name in _SIZES if hasattr(config, name)), 0)
        self._taken: list[list[Tensor]] = [[] for _ in routers]  # [S, K] int64 of each choice of the last pass
        self._given_SRK: Tensor | None = None
        self._same: list[tuple[Tensor, Tensor]] = []
        # The parent of each router, since some models choose in it.
        blocks = [block for block in model.modules() if any(child in routers for child in block.children())]
        for number, block in enumerate(blocks):
            choosing = partial(_Choosing, self, number)
            modes: list[TorchFunctionMode] = []

            def enter(*_: Any, modes: list[TorchFunctionMode] = modes, choosing: Any = choosing) -> None:
                modes.append(choosing())
                modes[-1].__enter__()

            def leave(*_: Any, modes: list[TorchFunctionMode] = modes) -> None:
                modes.pop().__exit__(None, None, None)

            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave, always_call=True)

    @property
    def num_choices(self) -> int:
        """R * K: number of choices of a token."""
        return len(self._taken) * self.num_taken

    def give(self, experts_SX: Tensor | None) -> None:
        """Make later passes use these experts: [S, R * K], -1 where the router chooses. None: it always chooses."""
        self._given_SRK = None if experts_SX is None else experts_SX.long().unflatten(1, (-1, self.num_taken))
        self._taken, self._same = [[] for _ in self._taken], []

    def taken(self) -> Tensor:
        """Return [S, R * K] int16 experts of the last pass. Raises: DataError: it did not choose by `topk`."""
        counts = {len(choices) for choices in self._taken}
        taken, self._taken = self._taken, [[] for _ in self._taken]
        if counts != {1}:
            raise DataError(
                f"{self._name} does not choose experts by one topk in each layer, so they cannot be recorded"
            )
        return torch.cat([choices[0] for choices in taken], dim=1).to(torch.int16)

    def agreement(self) -> dict[str, Tensor]:
        """Return counts since `give`: routed_choices of replayed experts, and router_agreement, those that the routers
        would have chosen too; empty: none were replayed."""
        sums = [torch.stack(numbers).sum() for numbers in zip(*self._same, strict=True)]
        return dict(zip(("router_agreement", "routed_choices"), sums, strict=bool(sums)))

    def choose(self, number: int, scores_SE: Tensor, chosen: Any) -> Any:
        """Return the (values, indices) of a `topk` in the block of router `number`; chosen: its original result."""
        shape = (scores_SE.shape[-1], chosen.indices.shape[-1])
        if scores_SE.dim() != 2 or shape != (self._num_experts, self.num_taken):
            return chosen  # a choice among groups of experts, or something else
        indices_SK = chosen.indices
        if self._given_SRK is not None:
            replayed_SK = self._given_SRK[:, number]
            known_SK = replayed_SK >= 0
            same_SK = (replayed_SK[:, :, None] == indices_SK[:, None, :]).any(-1) & known_SK
            self._same.append((same_SK.sum(), known_SK.sum()))
            indices_SK = torch.where(known_SK, replayed_SK, indices_SK)
            chosen = torch.return_types.topk((scores_SE.gather(-1, indices_SK), indices_SK))
        else:
            self._taken[number].append(indices_SK)
        return chosen


class _Choosing(TorchFunctionMode):
    """Mode in which every `topk` goes through `routers.choose`."""

    def __init__(self, routers: Routers, number: int) -> None:
        super().__init__()
        self._routers, self._number = routers, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # All models of transformers pass the scores as the first positional argument.
        return self._routers.choose(self._number, args[0], out) if func in (torch.topk, Tensor.topk) else out


class RouterLoss:
    """Auxiliary loss that balances the use of experts, over all tokens of a pass in a block of `listening`, prompts
    included. Invariant: the outputs of the model do not change."""

    def __init__(self, model: PreTrainedModel, coef: float) -> None:
        """Raises: DataError: transformers does not know routers in the model."""
        self._routers, self._index = routers_of(model, f"trainer.router_aux_loss_coef {coef}")
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # late: few models need it

        self._loss, self._coef = load_balancing_loss_func, coef
        self._experts_per_token = int(model.config.get_text_config().num_experts_per_tok)
        self._logits: list[Tensor] = []  # [S, E] logits of each router and call in the last pass, E experts

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the routers' logits in the block; exclude the backward pass, which may call routers again."""
        self._logits = []

        def record(_module: Any, _inputs: Any, output: Any) -> None:
            self._logits.append(output[self._index] if isinstance(output, tuple) else output)

        handles: list[RemovableHandle] = [router.register_forward_hook(record) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def term(self, share: float) -> Tensor:
        """Return [] the term of the last pass in the loss of an update, with gradient.

        E sum_e f_e P_e with f_e the fraction of tokens routed to expert e times the experts per token, and P_e its mean
        probability. Source: Switch Transformer, arXiv:2101.03961, equations 4 to 6, over all layers together as in
        transformers.

        Args: share: fraction of the update's tokens in the pass, 0 to 1.
        """
        logits: Any = tuple(self._logits)  # transformers annotates a tuple of length one
        return share * self._coef * cast(Tensor, self._loss(logits, logits[0].shape[-1], self._experts_per_token))
