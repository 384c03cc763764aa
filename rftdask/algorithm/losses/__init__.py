"""Losses, one module per family, each as in its paper.

    ratio       r = pi / pi_old of the sampled token, clipped or gated, times the advantage: PPO and its successors
    reinforce   log pi times the advantage and a weight without gradient
    imitation   log pi of given responses: SFT, mixtures with rollouts, distillation
    preference  DPO and its variants for pairs of responses; KTO for single responses with a verdict

Symbols: pi is the trained policy, pi_old the policy that sampled (or the trainer's before the step), A the advantage,
sg() stops the gradient. Suffixes are shapes: B sequences of T tokens, P pairs. A loss returns one number per token,
[B, T]. Positions outside the loss mask get weight 0 later, and log-ratios are clamped to +-20. Gradients come from
autograd. `base.py` defines the inputs.

An algorithm type (`class ...Algorithm`) is a value of `algorithm.algorithm_type` with its defaults. It is defined next
to the loss that characterizes it or, if the loss is PPO's, next to its advantage (../advantages/).

Knows nothing of aggregation, KL and entropy terms, models, or the source of batches.
"""
