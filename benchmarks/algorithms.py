"""Speed and memory of the algorithms on this machine.

    OMP_NUM_THREADS=1 python benchmarks/algorithms.py [--quick] [--json FILE]

Three goals are measured: advantages of 100,000 experiences at 1,000,000 experiences/s or more; each loss, forward and
backward over a [64, 1024] batch, within 1.5 times a minimal inline PPO loss; and at most three tensors of the logprobs'
size kept for backward. Nothing is asserted, because a busy machine is not a bug.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from report import Report, make_parser
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.config.schema.algorithm import registered_parts

NUM_EXPERIENCES = 100_000
GROUP_SIZE = 8
ROWS, WIDTH = 64, 1024


def best_of(function: Callable[[], object], repeats: int) -> float:
    """Return the shortest of `repeats` runs, in seconds; other processes slowed the longer ones."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def best_of_both(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the best times of two functions that alternate, so that load on the machine affects both."""
    times = [(best_of(first, 2), best_of(second, 2)) for _ in range(rounds)]
    return min(one for one, _ in times), min(other for _, other in times)


def advantages(report: Report) -> None:
    """Measure the rates of the functions that need only rewards; the broadcast to 512 tokens per row is a row of its
    own.
    """
    inputs = AdvantageInputs(
        rewards_N=torch.randn(NUM_EXPERIENCES),
        group_N=torch.arange(NUM_EXPERIENCES) // GROUP_SIZE,
        lengths_N=torch.full((NUM_EXPERIENCES,), 512),
    )
    for name, part in registered_parts("advantage_fn").items():
        if set(part.traits["needs"]) <= {"lengths_N"}:
            function = part.load()()
            seconds = best_of(lambda function=function: function(inputs), 5)  # type: ignore[misc]
            report.add(f"advantages, {name}", NUM_EXPERIENCES / seconds, "experiences/s", goal=1e6)


def inline_ppo(logprobs: Tensor, batch: LossInputs, total: Tensor) -> None:
    """Minimal PPO loss: no mask of invalid values, no checks, no metrics, no dual clip."""
    assert batch.advantages_BT is not None
    ratio = torch.exp(logprobs - batch.rollout_logprobs_BT)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * batch.advantages_BT, clipped * batch.advantages_BT)
    ((loss * batch.loss_mask_BT).sum() / total).backward()


def num_kept(compute: Callable[[], object], batch: LossInputs) -> float:
    """Return how many tensors of the logprobs' size `compute` keeps for its backward pass, without its inputs."""
    inputs = {tensor.data_ptr() for tensor in vars(batch).values() if isinstance(tensor, Tensor)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in inputs:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compute()  # kept alive, so that no two tensors have the same address
    del result
    return sum(kept.values()) / (batch.policy_logprobs_BT.numel() * batch.policy_logprobs_BT.element_size())


def losses(report: Report, rounds: int) -> None:
    """Measure the time of each loss as the trainer calls it, against the inline loss, and the tensors it keeps."""
    rollout = -torch.rand(ROWS, WIDTH) - 0.1
    mask = torch.arange(WIDTH)[None] < torch.randint(WIDTH // 2, WIDTH + 1, (ROWS, 1))
    logprobs = (rollout + 0.1 * torch.randn(ROWS, WIDTH)).requires_grad_()
    batch = LossInputs(
        policy_logprobs_BT=logprobs,
        rollout_logprobs_BT=rollout,
        loss_mask_BT=mask,
        token_weights_BT=mask / mask.sum(),
        advantages_BT=torch.randn(ROWS, 1).expand(ROWS, WIDTH).contiguous(),
        ref_logprobs_BT=rollout,
        expert_mask_B=torch.arange(ROWS) % 8 == 0,
        divergence_BT=torch.rand(ROWS, WIDTH, requires_grad=True),  # input of jsd, which is computed with the logits
        rewards_B=torch.arange(ROWS) % 2.0,
        kl_baseline=0.0,
    )
    # m2po does more work for sequences above its threshold; with this value every sequence is above it.
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in registered_parts("policy_loss_fn")]
    cases += [("m2po", {"scope": scope, "m2_threshold": 0.004}) for scope in ("sequence", "batch")]
    for name, arguments in cases:
        kind = name if name in registered_parts("algorithm_type") else "dpo" if name == "bradley_terry" else "grpo"
        algorithm = make_algorithm(kind, policy_loss_fn=name, policy_loss_fn_args=arguments, kl_loss_fn="none")
        weights = algorithm.token_weights(mask, expert_mask_B=batch.expert_mask_B)
        ready = replace(batch, token_weights_BT=weights)
        base, seconds = best_of_both(
            lambda: inline_ppo(logprobs, batch, mask.sum()),
            lambda algorithm=algorithm, ready=ready: algorithm.compute_loss(ready)[0].backward(),  # type: ignore[misc]
            rounds,
        )
        kept = num_kept(lambda algorithm=algorithm, ready=ready: algorithm.compute_loss(ready), ready)  # type: ignore[misc]
        name += " " * bool(arguments) + ", ".join(f"{key} {value}" for key, value in arguments.items())
        report.add(
            f"loss {name}", seconds * 1e3, "ms", less_is_better=True, against="PPO inline", other=base * 1e3,
            goal=1 / 1.5, goal_of="ratio",
        )  # fmt: skip
        report.add(f"loss {name}: kept for backward", kept, "tensors", less_is_better=True, goal=3)


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    report = Report(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    advantages(report)
    losses(report, 1 if arguments.quick else 15)
    report.write()


if __name__ == "__main__":
    main()
