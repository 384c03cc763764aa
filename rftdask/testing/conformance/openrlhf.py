"""OpenRLHF: the modules of openrlhf.models.loss.

Its package imports deepspeed and flash-attn, which the losses never call. If they are missing, empty modules replace
them during the import, and the __init__ of the package does not run.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from rftdask.testing.conformance.cases import NOT_EMPTY, Batch, Case, loss_of, value_loss_of

UNUSED_BY_THE_LOSSES = ("deepspeed",)


def cases() -> list[Case]:
    """Raises: ImportError: OpenRLHF is not installed."""
    losses = _import_losses()

    def ppo(**settings: Any) -> Callable[[Batch], Tensor]:
        module = losses.PolicyLoss(**settings)
        return lambda b: module(b.policy, b.old, b.advantages, b.float_mask, rollout_log_probs=b.sampler)[0]

    def value(clip: float) -> Callable[[Batch], Tensor]:
        module = losses.ValueLoss(clip_eps=clip)
        return lambda b: module(b.policy, b.old, b.ref, b.float_mask)

    def sft(token_level: bool) -> Callable[[Batch], Tensor]:
        module = losses.SFTLoss(token_level_loss=token_level)
        return lambda b: module(b.policy, b.float_mask)

    def dpo(**settings: Any) -> Callable[[Batch], Tensor]:
        module = losses.DPOLoss(beta=0.1, **settings)

        def theirs(b: Batch) -> Tensor:
            policy, ref = ((x * b.mask).sum(-1) for x in (b.policy, b.ref))
            loss: Tensor = module(policy[::2], policy[1::2], ref[::2], ref[1::2])[0]
            return loss

        return theirs

    no_dual: dict[str, Any] = {"policy_loss_fn_args": {"clip_ratio_c": None}}
    by_sequence: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
    loose: dict[str, Any] = {"tolerance_64": 1e-7}
    holes = ("padded", "holes")

    def corrected(method: str) -> Callable[[Batch], Tensor]:
        return loss_of(**no_dual, correct=True, rollout_correction={"method": method, "low": 0.5, "high": 5.0})

    def is_ppo(mode: str) -> Callable[[Batch], Tensor]:
        return ppo(is_correction_level="token", is_correction_mode=mode)

    def our_dpo(**args: Any) -> Callable[[Batch], Tensor]:
        return loss_of("dpo", policy_loss_fn_args=args)

    def decoupled(cap: float) -> Case:
        theirs = ppo(is_correction_level="token", is_correction_mode="mask", is_correction_threshold=(0.0, cap))
        args = {"clip_ratio_c": None, "behavior_weight_cap": cap}
        ours = loss_of("decoupled_ppo", correct=True, policy_loss_fn_args=args)
        return Case(f"decoupled_ppo loss, behavior weights up to {cap}", ours, theirs)

    gspo = loss_of("gspo", policy_loss_fn_args={"clip_range_low": 0.2, "clip_range_high": 0.2})
    by_sum = "log-ratios are summed: ours is ipo_sum; ours of ipo are means over tokens, as in TRL"
    return [
        Case("ppo loss, token mean", loss_of(**no_dual), ppo()),
        Case("ppo loss, sequence mean", loss_of(**no_dual, **by_sequence), ppo(token_level_loss=False), **loose),
        Case("ppo loss, dual clip 3", loss_of(), ppo(dual_clip=3.0)),
        Case("ppo loss with TIS (token, clipped to a band)", corrected("truncate"), is_ppo("clip")),
        Case("ppo loss with IcePop", corrected("mask"), is_ppo("mask")),
        decoupled(5.0),
        decoupled(1.1),
        *(Case(f"value loss, clipped at {clip}", value_loss_of(clip), value(clip)) for clip in (0.2, 5.0)),
        Case("gspo loss", gspo, ppo(policy_loss_type="gspo"), ("padded", "holes", "short"), **loose),
        Case("sft loss, token mean", loss_of("sft"), sft(True)),
        Case("sft loss, sequence mean", loss_of("sft", **by_sequence), sft(False), **loose),
        Case("dpo loss", our_dpo(), dpo(), NOT_EMPTY),
        Case("dpo loss, label smoothing 0.1", our_dpo(label_smoothing=0.1), dpo(label_smoothing=0.1), holes),
        Case("ipo_sum loss", our_dpo(loss_type="ipo_sum"), dpo(ipo=True), holes),
        Case("ipo loss", our_dpo(loss_type="ipo"), dpo(ipo=True), holes, differs=by_sum),
    ]


def _import_losses() -> ModuleType:
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("openrlhf is not installed")
    stand_ins = [name for name in UNUSED_BY_THE_LOSSES if importlib.util.find_spec(name) is None]
    for name in stand_ins:
        sys.modules[name] = ModuleType(name)
    package = ModuleType("openrlhf.models")
    package.__path__ = [f"{folder}/models" for folder in spec.submodule_search_locations]
    sys.modules.setdefault("openrlhf.models", package)
    try:
        return importlib.import_module("openrlhf.models.loss")
    finally:
        for name in stand_ins:
            del sys.modules[name]
