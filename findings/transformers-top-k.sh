#!/usr/bin/env bash
# Expected: generate(do_sample=True) of a model without a generation config samples from the model's distribution.
# Happens:  it samples from the 50 most likely tokens. The generation config of the model has None for top_k, in memory
#           and in the saved file, and the default of 50 is added in the call. top_k=0 gives the distribution of the
#           model.
# Hurts:    rollouts: the log probabilities that training computes belong to another distribution, entropies are too
#           low, and tokens outside of the 50 are never explored.
# Seen:     transformers 5.19.0 with torch 2.13.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.19.0" "torch==2.13.0" || exit 75
cd "$folder"
export TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
venv/bin/python - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes)).eval()


def num_tokens(**settings):
    """Return how many different tokens 5000 samples of the first token have."""
    prompt = torch.tensor([[1, 2, 3]])
    rows = model.generate(prompt, do_sample=True, max_new_tokens=1, num_return_sequences=5000, pad_token_id=0, **settings)
    return len(rows[:, -1].unique())


default, whole = num_tokens(), num_tokens(top_k=0)
print("transformers", transformers.__version__)
print("generation_config.top_k:", model.generation_config.top_k)
print(f"different tokens of 5000 samples: {default} by default, {whole} with top_k=0, of a vocabulary of 500")
assert model.generation_config.top_k is None
assert default == 50 and whole > 400
PYTHON
