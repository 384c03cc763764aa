#!/usr/bin/env bash
# Expected: a model that from_pretrained loads and generate uses can be saved by save_pretrained.
# Happens:  if its generation_config.json has a temperature or top_p without do_sample, as many on the Hub do, loading and
#           generating work, and saving raises ValueError.
# Hurts:    training scripts: the error comes with the first save, which may be the last step.
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

def save_toy(folder):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


import json
import pathlib

save_toy("model")
written = {"temperature": 0.6, "top_p": 0.95, "bos_token_id": 1, "eos_token_id": 2}
pathlib.Path("model/generation_config.json").write_text(json.dumps(written))
model = AutoModelForCausalLM.from_pretrained("model")
tokens = model.generate(torch.tensor([[1, 5]]), max_new_tokens=3)
try:
    model.save_pretrained("again")
    saved = "saved"
except ValueError as error:
    saved = f"ValueError: {str(error).splitlines()[0]}"
print("transformers", transformers.__version__)
print("loaded with temperature", model.generation_config.temperature, "and do_sample", model.generation_config.do_sample)
print("generated", tuple(tokens.shape))
print("save_pretrained:", saved)
assert saved.startswith("ValueError: GenerationConfig is invalid")
PYTHON
