"""Routers: the experts that each token of a mixture of experts goes to, told of a forward pass or given to it.

In the models of transformers a router scores E experts, and the choice is a `topk` of K of them. It is told or replaced
there, so that what a model makes of the chosen scores stays its own, and has its gradient. It knows no batches.
Invariant: a pass that is given the choices of a pass over the same tokens with the same weights gives the same bits.

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

_SIZES = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of experts."""


def routers_of(model: PreTrainedModel) -> tuple[list[torch.nn.Module], int]:
    """The routers of a model, from the first layer on, and which of their outputs, if several, the logits are.

    Raises: DataError: it has no routers that transformers could tell of.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = recorder.target_class if isinstance(recorder, OutputRecorder) else ()
    found = [each for each in model.modules() if isinstance(each, kind)]
    if not isinstance(recorder, OutputRecorder) or not found:
        raise DataError(f"{type(model).__name__} has no routers of experts")
    return found, recorder.index


class Routers:
    """Example:
    routers = Routers(model)
    model(tokens)
    taken_SRK = routers.taken()
    routers.give(taken_SRK)  # to all passes from here on, also those that the backward pass makes again
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """From here on it hears every pass of `model`. Raises: DataError: the model has no routers, or hides them."""
        routers, _ = routers_of(model)
        config = model.config.get_text_config()
        self._name = type(model).__name__
        self.num_taken = int(config.num_experts_per_tok)
        """K."""
        self._num_experts = next((int(getattr(config, name)) for name in _SIZES if hasattr(config, name)), 0)
        self._taken: list[list[Tensor]] = [[] for _ in routers]
        """[S, K] int64 of each choice of the last pass."""
        self._given_SRK: Tensor | None = None
        self._same: list[tuple[Tensor, Tensor]] = []
        # The block that holds a router, since some models choose there and not in the router itself.
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
        """R * K: what one token chooses."""
        return len(self._taken) * self.num_taken

    def give(self, experts_SX: Tensor | None) -> None:
        """Let the passes from here on take these experts: [S, R * K], -1 where a token chooses. None: all choose."""
        self._given_SRK = None if experts_SX is None else experts_SX.long().unflatten(1, (-1, self.num_taken))
        self._taken, self._same = [[] for _ in self._taken], []

    def taken(self) -> Tensor:
        """[S, R * K] int16 that the last pass has taken. Raises: DataError: it did not choose by `topk`."""
        counts = {len(choices) for choices in self._taken}
        taken, self._taken = self._taken, [[] for _ in self._taken]
        if counts != {1}:
            raise DataError(f"{self._name} does not choose its experts by one topk in each layer; they cannot be told")
        return torch.cat([choices[0] for choices in taken], dim=1).to(torch.int16)

    def agreement(self) -> dict[str, Tensor]:
        """Of the experts that were given since `give`: router_agreement, how many the tokens would have chosen, and
        routed_choices, how many they are. Empty: none were.
        """
        sums = [torch.stack(numbers).sum() for numbers in zip(*self._same, strict=True)]
        return dict(zip(("router_agreement", "routed_choices"), sums, strict=bool(sums)))

    def choose(self, number: int, scores_SE: Tensor, chosen: Any) -> Any:
        """What a `topk` in the block of router `number` returns, given what it would return: (values, indices)."""
        shape = (scores_SE.shape[-1], chosen.indices.shape[-1])
        if scores_SE.dim() != 2 or shape != (self._num_experts, self.num_taken):
            return chosen  # of groups of experts, or nothing of theirs
        indices_SK = chosen.indices
        if self._given_SRK is not None:
            given_SK = self._given_SRK[:, number]
            known_SK = given_SK >= 0
            same_SK = (given_SK[:, :, None] == indices_SK[:, None, :]).any(-1) & known_SK
            self._same.append((same_SK.sum(), known_SK.sum()))
            indices_SK = torch.where(known_SK, given_SK, indices_SK)
            chosen = torch.return_types.topk((scores_SE.gather(-1, indices_SK), indices_SK))
        else:
            self._taken[number].append(indices_SK)
        return chosen


class _Choosing(TorchFunctionMode):
    """Within it every `topk` is put to `routers.choose`."""

    def __init__(self, routers: Routers, number: int) -> None:
        super().__init__()
        self._routers, self._number = routers, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # All models of transformers give the scores by place.
        return self._routers.choose(self._number, args[0], out) if func in (torch.topk, Tensor.topk) else out


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
