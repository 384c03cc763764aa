"""Effect on learning of each difference from a peer: the same run with our formula and with the peer's.

    python -m tests.learning.differences [NAME...] [--seeds 0,1,2]

Prints one line per difference: the number with ours and with the peer's, for each seed. If learning shows less than the
formula, the number comes from a policy of eight words (exact.py). Every row of `rftdask conformance` with result
"differs" has a line, whichever formula it favors; docs/algorithms.md explains our choice. Some of them are tests, with
seed 0.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rftdask.algorithm import aggregation, kl
from rftdask.algorithm.advantages import tokens, turns
from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.losses.preference import Dpo, Orpo
from rftdask.algorithm.losses.ratio import Sapo
from rftdask.algorithm.losses.reinforce import Cispo
from tests.learning import exact
from tests.learning.cases import CASES, MANY_UPDATES, Case, Patch, instead, learn


@instead(Sapo, "__call__")
def _detached_gate(ours: Any, self: Sapo, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Trinity-RFT's: -A sg(gate) log p."""
    advantages_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
    tau_BT = torch.where(advantages_BT > 0, torch.full_like(log_r_BT, self.tau_pos), self.tau_neg)
    gate_BT = torch.sigmoid(tau_BT * (log_r_BT.exp() - 1.0)) * (4.0 / tau_BT)
    return -advantages_BT * gate_BT.detach() * inputs.policy_logprobs_BT, {}


@instead(Dpo, "per_pair")
def _one_logit(ours: Any, self: Dpo, rewards_P2: Tensor) -> Any:
    """Trinity-RFT's: the margins of all pairs of a pass are summed into one."""
    return ours(self, rewards_P2.sum(0, keepdim=True).expand_as(rewards_P2))


@instead(turns.Gigpo, "compute")
def _states_of_all_tasks(ours: Any, self: turns.Gigpo, inputs: Any) -> Any:
    """Trinity-RFT's: turns from equal states are compared across tasks."""
    return ours(replace(self, anchor_scope="batch"), inputs)


@instead(turns.Gigpo, "compute")
def _no_turn_rewards(ours: Any, self: turns.Gigpo, inputs: Any) -> Any:
    """Workflow that reports its states but no rewards of turns."""
    return ours(self, replace(inputs, turn_rewards_N=torch.zeros_like(inputs.rewards_N)))


@instead(turns.Gigpo, "compute")
def _turns_alone(ours: Any, self: turns.Gigpo, inputs: Any) -> Any:
    """Trinity-RFT's: the part of a rollout's reward that exceeds the sum of its turns' is dropped."""
    nothing_N = torch.zeros_like(inputs.rewards_N)
    return ours(self, replace(inputs, turn_rewards_N=nothing_N, rewards_N=nothing_N))


@instead(Cispo, "__call__")
def _cap(ours: Any, self: Cispo, inputs: Any) -> Any:
    """TRL's: epsilon_high is the largest weight."""
    return ours(replace(self, clip_range_high=self.clip_range_high - 1.0), inputs)


def _all_rows_count(rate: float) -> Patch:
    """TRL's: the mean is over all rows, with or without a token to train. rate: learning rate, relative to ours."""

    @instead(aggregation, "row_weights")
    def theirs(ours: Any, counts_B: Tensor, mode: str, **more: Any) -> Tensor:
        return ours(counts_B, mode, **more) * (rate * (counts_B > 0).float().mean())

    return theirs


@instead(kl.CorrectedK3, "estimate")
def _ratio_of_two(
    ours: Any, self: kl.CorrectedK3, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor
) -> Tensor:
    """Trinity-RFT's: the correcting ratio is at most 2."""
    ratio = (policy_logprobs - old_logprobs).exp().clamp(max=2.0)
    return ratio * kl.K3().estimate(difference, policy_logprobs, None)


@instead(Orpo, "__call__")
def _sft_by_token(ours: Any, self: Orpo, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's, except for its prompts: the SFT part is a mean over the tokens of all chosen responses."""
    loss_BT, metrics = ours(self, inputs)
    chosen_P = self.rewards(inputs).view(-1, 2)[:, 0]
    lengths_P = inputs.loss_mask_BT.sum(-1).view(-1, 2)[:, 0]
    moved_P = chosen_P * (1.0 - lengths_P / lengths_P.double().mean()).to(chosen_P.dtype)
    return loss_BT + inputs.spread(moved_P.repeat_interleave(2)), metrics


@instead(Dpo, "__call__")
def _sums_over_tokens(ours: Any, self: Dpo, inputs: Any) -> Any:
    """OpenRLHF's: the margin of IPO is over whole responses; beta is 0.1."""
    return ours(replace(self, loss_type="ipo_sum", beta=0.1), inputs)


@instead(Algorithm, "compute_loss")
def _sum_of_a_pass(ours: Any, self: Algorithm, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Trinity-RFT's: a pass is its sum over the width, weighted by its number of rows, so the weight of a row depends
    on its pass.
    """
    loss, metrics = ours(self, inputs)
    return loss * len(inputs.policy_logprobs_BT), metrics


@instead(tokens.Gae, "compute")
def _tools_enter(ours: Any, self: tokens.Gae, inputs: Any) -> Any:
    """Trinity-RFT's: a tool's output between two actions of the policy is a step like any other."""
    mask_Q, row_Q = inputs.loss_mask_Q, inputs.row_Q
    places_Q = torch.arange(len(row_Q))
    ends = torch.full((len(inputs.rewards_N),), -1).scatter_reduce(0, row_Q[mask_Q], places_Q[mask_Q], "amax")
    begins = torch.full_like(ends, len(row_Q)).scatter_reduce(0, row_Q[mask_Q], places_Q[mask_Q], "amin")
    between_Q = (places_Q >= begins[row_Q]) & (places_Q <= ends[row_Q])
    every = replace(inputs, loss_mask_Q=between_Q, token_rewards_Q=inputs.token_rewards())
    result = ours(replace(self, whiten=False), every)
    return tokens.token_result(inputs, tokens.whiten(inputs, result.advantages_Q), {}, result.returns_Q)


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@dataclass(frozen=True)
class Run:
    """A run of a toy, measured by one metric."""

    row: str
    """Function of the table of conformance."""
    case: Case
    metric: str
    theirs: Patch
    ours: Patch = nullcontext

    def measure(self, seed: int) -> tuple[float, float]:
        """Return the metric with ours and with the peer's formula."""
        found = []
        for formula in (self.ours, self.theirs):
            with formula():
                found.append(learn(self.case, seed).after[self.metric])
        return found[0], found[1]


@dataclass(frozen=True)
class Exact:
    """A number of a policy of eight words."""

    row: str
    metric: str
    measure: Callable[[int], tuple[float, float]]


SGD = "algorithm.optimizer.optimizer_type=sgd", "algorithm.optimizer.betas=[0.9,0.999]"
CUT = "data_processor.experience_pipeline.operators=[{name: mask_response_truncated}]", "model.max_response_tokens=2"
LENGTHS = "model.max_response_tokens=13"


def _passes(num_rows: int) -> Run:
    settings = (*SGD, f"trainer.micro_batch_size={num_rows}")
    return Run(
        "seq-mean-token-sum-norm", replace(_case("dr_grpo"), lr=2.0, settings=settings), "accuracy", _sum_of_a_pass
    )


def _ipo(beta: float) -> Run:
    settings = (LENGTHS, f"algorithm.policy_loss_fn_args={{loss_type: ipo, beta: {beta}}}")
    case = replace(_case("dpo"), dataset="lengths", settings=settings)
    return Run("ipo loss", case, "accuracy", _sums_over_tokens)


ANCHORED = _case("grpo-corrected_k3")
EMPTY = Run(
    "grpo loss with empty rows",
    replace(_case("dr_grpo"), lr=0.1, settings=(*SGD, *CUT, "algorithm.loss_agg_mode=seq-mean-token-mean")),
    "accuracy",
    _all_rows_count(1.0),
)

DIFFERENCES: Mapping[str, Run | Exact] = {
    "cispo: 0.28 is the largest weight": Run(
        "cispo loss, epsilon_high 0.28 as a distance",
        # Plain gradients, because Adam divides by their scale.
        replace(_case("cispo"), lr=0.05, settings=SGD),
        "accuracy",
        _cap,
    ),
    "empty rows: weight of the others": Exact(
        "grpo loss with empty rows", "share of their weight without the empty ones", exact.step_of_the_masked
    ),
    "empty rows: half of a batch": EMPTY,
    "empty rows: theirs at twice the rate": replace(EMPTY, theirs=_all_rows_count(2.0)),
    "corrected_k3: bias": Exact(
        "corrected_k3 penalty in the loss", "bias of the gradient, over its norm", exact.bias_of_corrected_k3
    ),
    "corrected_k3: deviation": Exact(
        "corrected_k3 penalty in the loss", "deviation by a token, over the norm", exact.deviation_of_corrected_k3
    ),
    "corrected_k3: a run that goes far": Run(
        "corrected_k3 penalty in the loss",
        replace(ANCHORED, lr=3e-2, steps=48, settings=(*ANCHORED.settings, *MANY_UPDATES)),
        "strayed",
        _ratio_of_two,
    ),
    "k3: the way back": Exact("k3 estimate in a loss", "KL that is left", exact.back_from_certainty),
    "orpo: by token": Run(
        "orpo loss", replace(_case("orpo"), dataset="lengths", steps=10, settings=(LENGTHS,)), "accuracy", _sft_by_token
    ),
    "ipo: sums, the same beta": _ipo(0.1),
    "ipo: sums, ours with beta times the mean length": _ipo(0.75),
    "sapo: the gate is detached": Run(
        "sapo loss", replace(_case("sapo"), steps=48, settings=MANY_UPDATES), "drift", _detached_gate
    ),
    "dpo: one logit of all pairs": Run(
        "dpo loss", replace(_case("dpo"), lr=5.0, settings=SGD), "preference", _one_logit
    ),
    "token-sum-norm: passes of 64 rows": _passes(64),
    "token-sum-norm: passes of 8 rows": _passes(8),
    "gae: tokens of tools count": Run(
        "GAE advantage",
        replace(
            _case("ppo"),
            toy="tool",
            settings=(
                "buffer.batch_size=32",
                "trainer.critic.lr=1e-2",
                "trainer.critic_warmup=4",
                "algorithm.advantage_fn_args={lam: 0.8}",
            ),
        ),
        "earned",
        _tools_enter,
    ),
    "gigpo: states of all tasks": Run(
        "gigpo advantage, states of a task", _case("gigpo"), "accuracy", _states_of_all_tasks
    ),
    "gigpo: rewards of turns only": Run(
        "gigpo advantage, rewards beyond the turns'", _case("gigpo"), "accuracy", _turns_alone, _no_turn_rewards
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all of them if none is named")
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    for name, difference in DIFFERENCES.items():
        if args.names and name not in args.names:
            continue
        pairs = [difference.measure(int(seed)) for seed in args.seeds.split(",")]
        ours, theirs = (", ".join(f"{number:.2f}" for number in numbers) for numbers in zip(*pairs, strict=True))
        print(f"| {name} | {difference.metric} | {ours} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
