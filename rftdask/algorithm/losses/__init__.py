"""The losses, one file an algorithm, as in its paper.

    ratio/      r = pi / pi_old of the sampled token, clipped or gated, times the advantage: PPO and what came of it
    reinforce/  log pi times the advantage and a weight that carries no gradient
    imitation/  log pi of what somebody else wrote: SFT, mixtures with rollouts
    preference/ what somebody prefers: DPO and its kin, by pairs of responses; KTO, by verdicts on single ones

Every file reads alike. Symbols: pi the policy that is trained, pi_old the policy that sampled (or the trainer's before
the step), A the advantage, sg() stops the gradient. Suffixes are shapes: B sequences of T tokens, P pairs. A
loss gives one number per token, [B, T]; what stands outside the loss mask weighs 0 later, and log-ratios are held
within +-20. Gradients are autograd's. `base.py` has what all of them take.

An algorithm type (`class ...Algorithm`) is the name and the defaults that `algorithm.algorithm_type` chooses; it stands
beside the loss that makes it special, or, where the loss is PPO's, beside its advantage (../advantages/).

Knows nothing of aggregation, of the KL and entropy terms, of models or of where batches come from.
"""
