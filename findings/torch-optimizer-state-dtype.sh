#!/usr/bin/env bash
# Expected: load_state_dict of an optimizer restores the tensors that state_dict returned.
# Happens:  it converts each tensor of a parameter's state to the type of the parameter, except the one named "step". An
#           optimizer that keeps float32 moments for bfloat16 weights continues with moments in bfloat16. Nothing warns.
# Hurts:    own optimizers for bfloat16 training: float32 moments are there to keep small updates, and the first resume
#           loses them. A run without an interruption does not show it.
# Seen:     torch 2.13.0, November 2026; the state dict itself has float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" "numpy" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch


class Momentum(torch.optim.Optimizer):
    """Momentum in float32, for parameters of any type."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", torch.tensor(0.0)).add_(1)
                moment = state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                moment.mul_(0.999).add_(parameter.grad.float())
                parameter.add_(moment, alpha=-group["lr"])


def optimizer():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    return weight, Momentum([weight])


weight, before = optimizer()
before.step()
before.step()
saved = before.state_dict()
new_weight, after = optimizer()
after.load_state_dict(saved)
old, new = before.state[weight], after.state[new_weight]
print("torch", torch.__version__)
print("state dict: moment", saved["state"][0]["moment"].dtype)
print("saved:   moment", old["moment"].item(), old["moment"].dtype, "step", old["step"].dtype)
print("loaded:  moment", new["moment"].item(), new["moment"].dtype, "step", new["step"].dtype)
assert saved["state"][0]["moment"].dtype == old["moment"].dtype == torch.float32
assert new["moment"].dtype == torch.bfloat16 and new["moment"].item() != old["moment"].item()
assert new["step"].dtype == torch.float32
PYTHON
