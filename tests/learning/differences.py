"""What a difference to a peer does to learning: the same run with our formula and with theirs in its place.

    python -m tests.learning.differences [NAME...] [--seeds 0,1,2]

A line for each: the metric of the run with ours, and with theirs, of each seed. Nothing is asserted. These are of what
`rftdask conformance` calls "differs"; docs/algorithms.md says of all of it why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rftdask.algorithm.advantages import turns
from rftdask.algorithm.losses.preference import dpo
from rftdask.algorithm.losses.ratio import sapo
from tests.learning.cases import CASES, MANY_UPDATES, Case, learn

Both = Callable[[], AbstractContextManager[Any]]


def _detached_gate() -> AbstractContextManager[Any]:
    """Trinity-RFT's: -A sg(gate) log p."""

    def theirs(self: sapo.Sapo, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        tau_BT = torch.where(advantages_BT > 0, torch.full_like(log_r_BT, self.tau_pos), self.tau_neg)
        gate_BT = torch.sigmoid(tau_BT * (log_r_BT.exp() - 1.0)) * (4.0 / tau_BT)
        return -advantages_BT * gate_BT.detach() * inputs.policy_logprobs_BT, {}

    return mock.patch.object(sapo.Sapo, "__call__", theirs)


def _one_logit() -> AbstractContextManager[Any]:
    """Trinity-RFT's: the margins of all pairs of a pass are summed into one."""
    ours = dpo.Dpo.per_pair

    def theirs(self: dpo.Dpo, rewards_P2: Tensor) -> Tensor:
        return ours(self, rewards_P2.sum(0, keepdim=True).expand_as(rewards_P2))

    return mock.patch.object(dpo.Dpo, "per_pair", theirs)


def _gigpo(change: Callable[[turns.Gigpo, Any], tuple[turns.Gigpo, Any]]) -> AbstractContextManager[Any]:
    ours = turns.Gigpo.compute

    def changed(self: turns.Gigpo, inputs: Any) -> Any:
        function, given = change(self, inputs)
        return ours(function, given)

    return mock.patch.object(turns.Gigpo, "compute", changed)


def _states_of_all_tasks() -> AbstractContextManager[Any]:
    """Trinity-RFT's: turns from equal states are compared across tasks."""
    return _gigpo(lambda function, inputs: (replace(function, anchor_scope="batch"), inputs))


def _turns_told_nothing(inputs: Any) -> Any:
    return replace(inputs, turn_rewards_N=torch.zeros_like(inputs.rewards_N))


def _no_turn_rewards() -> AbstractContextManager[Any]:
    """A workflow that tells its states, and of its turns no rewards."""
    return _gigpo(lambda function, inputs: (function, _turns_told_nothing(inputs)))


def _turns_alone() -> AbstractContextManager[Any]:
    """Trinity-RFT's: what a rollout's reward is beyond its turns' is dropped."""

    def theirs(function: turns.Gigpo, inputs: Any) -> tuple[turns.Gigpo, Any]:
        given = _turns_told_nothing(inputs)
        return function, replace(given, rewards_N=torch.zeros_like(inputs.rewards_N))

    return _gigpo(theirs)


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


SGD = "algorithm.optimizer.optimizer_type=sgd", "algorithm.optimizer.betas=[0.9,0.999]"

# Name -> (case, metric, ours, theirs).
DIFFERENCES: Mapping[str, tuple[Case, str, Both, Both]] = {
    "sapo: the gate is detached": (
        replace(_case("sapo"), steps=48, settings=MANY_UPDATES),
        "drift",
        nullcontext,
        _detached_gate,
    ),
    # By plain gradients: Adam divides by the size of what is left of them.
    "dpo: one logit of all pairs": (
        replace(_case("dpo"), lr=5.0, settings=SGD),
        "preference",
        nullcontext,
        _one_logit,
    ),
    "gigpo: states of all tasks": (_case("gigpo"), "accuracy", nullcontext, _states_of_all_tasks),
    "gigpo: rewards of turns alone": (_case("gigpo"), "accuracy", _no_turn_rewards, _turns_alone),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all of them if none is named")
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    for name, (case, metric, ours, theirs) in DIFFERENCES.items():
        if args.names and name not in args.names:
            continue
        found = []
        for broken in (ours, theirs):
            with broken():
                found.append([f"{learn(case, int(seed)).after[metric]:.2f}" for seed in args.seeds.split(",")])
        print(f"{name:32} {metric}: ours {', '.join(found[0])}; theirs {', '.join(found[1])}", flush=True)


if __name__ == "__main__":
    main()
