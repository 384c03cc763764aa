"""The policy losses by name."""

from rftdask.algorithm.losses.base import PolicyLoss
from rftdask.algorithm.losses.gradient_losses import Opmd, Rec, Sppo, Topr
from rftdask.algorithm.losses.imitation_losses import Mix, MixChord, Sft, SftIs, SftPhi
from rftdask.algorithm.losses.offpolicy_losses import DecoupledPpo, Dppo, M2po, Vespo
from rftdask.algorithm.losses.preference_losses import Dpo
from rftdask.algorithm.losses.ratio_losses import Cispo, Gspo, ImportanceSampling, Ppo, Sapo

POLICY_LOSS_FNS: dict[str, type[PolicyLoss]] = {
    "ppo": Ppo,
    "gspo": Gspo,
    "cispo": Cispo,
    "sapo": Sapo,
    "importance_sampling": ImportanceSampling,
    "topr": Topr,
    "opmd": Opmd,
    "sppo": Sppo,
    "rec": Rec,
    "decoupled_ppo": DecoupledPpo,
    "m2po": M2po,
    "dppo": Dppo,
    "vespo": Vespo,
    "sft": Sft,
    "sft_is": SftIs,
    "sft_phi": SftPhi,
    "mix": Mix,
    "mix_chord": MixChord,
    "dpo": Dpo,
}
