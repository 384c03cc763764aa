"""Trinity-RFT: its policy loss classes and trainer-side advantage functions. Imported late: it may not be there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rftdask.testing.conformance.cases import NOT_EXTREME, Batch, Case, advantages_of, loss_of, token_rewards


def cases() -> list[Case]:
    """Raises: ImportError: Trinity-RFT or what its algorithm package imports (verl, ray) is not installed."""
    from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN  # heavy and optional

    def case(what: str, name: str, kinds: tuple[str, ...] = NOT_EXTREME, differs: str = "", **args: Any) -> Case:
        """The loss of this name here and there, with the same arguments."""
        cls = POLICY_LOSS_FN.get(name)
        module = cls(**{**cls.default_args(), **args})

        def theirs(b: Batch) -> Tensor:
            given = {"log_prob": b.policy, "old_log_probs": b.old, "ref_log_prob": b.ref, "advantages": b.advantages}
            loss: Tensor = module(**given, response_mask=b.float_mask)[0]
            return loss

        kind = name if name in ("gspo", "dpo", "sft") else "grpo"
        ours = loss_of(kind, policy_loss_fn=name, policy_loss_fn_args=args)
        # Its means add 1e-8 to the denominator. Where it differs, it does so by far more.
        return Case(what, ours, theirs, kinds, differs=differs, tolerance_64=1e-10 if differs else 1e-7)

    def rec(clip: str, weight: str, regularizer: str) -> Case:
        args: dict[str, Any] = {
            "clip_mode": clip,
            "weight": weight,
            "regularizer": regularizer,
            "regularizer_coef": 0.1,
        }
        return case(f"rec loss, {clip} clip, weight {weight}, {regularizer}", "rec", **args)

    same = ("ppo", "cispo", "topr", "opmd", "sppo", "rec", "importance_sampling")
    detached = "the gate is detached and multiplies log p: its gradient grows with the ratio, nothing is clipped"
    one_logit = "all pairs of a micro-batch are summed into one logit; ours has one per pair"
    by_width = "divides by the padded width, not also by the number of sequences"
    norm = "seq-mean-token-sum-norm"
    return [
        *(case(f"{name} loss", name) for name in same),
        rec("one-side", "importance_sampling", "k2"),
        rec("two-side", "advantage", "forward-kl"),
        rec("ring", "none", "none"),
        case("sft loss", "sft", (*NOT_EXTREME, "extreme")),
        case("ppo loss, sequence masking", "ppo", enable_sequence_masking=True),
        case("gspo loss", "gspo", ("padded", "holes", "short")),
        case("sapo loss", "sapo", differs=detached),
        case("dpo loss", "dpo", ("padded", "holes"), one_logit),
        case(norm, "ppo", ("padded",), by_width, loss_agg_mode=norm),
        *_advantage_cases(),
    ]


def _advantage_cases() -> list[Case]:
    from trinity.algorithm.advantage_fn.clipb_advantage import ClipBAdvantageFn
    from trinity.algorithm.advantage_fn.clipv_advantage import ClipVAdvantageFn
    from trinity.algorithm.advantage_fn.grpo_advantage import GRPOAdvantageFn
    from trinity.algorithm.advantage_fn.on_policy_distill_advantage import OnPolicyDistillAdvantage
    from trinity.algorithm.advantage_fn.ppo_advantage import PPOAdvantageFn
    from trinity.algorithm.advantage_fn.reinforce_plus_plus_advantage import REINFORCEPLUSPLUSAdvantageFn
    from trinity.algorithm.advantage_fn.rloo_advantage import RLOOAdvantageFn

    def case(
        what: str, name: str, cls: Callable[..., Any], kinds: tuple[str, ...], differs: str = "", **args: Any
    ) -> Case:
        function = cls(**args)

        def theirs(b: Batch) -> Tensor:
            batch = {
                "token_level_rewards": token_rewards(b),
                "response_mask": b.float_mask,
                "values": b.values,
                "old_log_probs": b.old,
                "rollout_log_probs": b.old,
                "teacher_logprobs": b.ref,
                "entropys": b.entropy,
                "necs": b.entropy_change,
            }
            rows = SimpleNamespace(batch=batch, non_tensor_batch={"uid": b.groups.tolist()})
            after = function(rows)[0].batch
            advantages_NT: Tensor = after["advantages"] * after["response_mask"]  # which some take tokens out of
            return advantages_NT

        return Case(what, advantages_of(name, args), theirs, kinds, differs=differs, float32_only=True)

    whole, holes = ("padded", "short"), ("padded", "holes")
    enters = "tool output and padding enter the recursion; ours steps over them"
    return [
        case("grpo advantage", "grpo", GRPOAdvantageFn, whole),
        case("rloo advantage", "rloo", RLOOAdvantageFn, whole),
        case("reinforceplusplus advantage", "reinforceplusplus", REINFORCEPLUSPLUSAdvantageFn, whole),
        case("on_policy_distill advantage", "on_policy_distill", OnPolicyDistillAdvantage, whole),
        case("clipb advantage, mu 0.5", "clipb", ClipBAdvantageFn, holes, mu=0.5),
        *(
            case(f"clipv advantage, {args}", "clipv", ClipVAdvantageFn, holes, mu=0.1, max_frac=share)
            for share, args in ((x, f"mu 0.1, at most {x} of the tokens") for x in (0.1, 1.0))
        ),
        case("GAE advantage", "ppo", PPOAdvantageFn, ("holes",), enters, gamma=0.9),
    ]
