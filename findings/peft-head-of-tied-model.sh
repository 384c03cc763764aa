#!/usr/bin/env bash
# Expected: merging an adapter gives the model that was trained.
# Happens:  with an adapter on lm_head of a model whose head is its embedding, as most small Qwen and Llama are, the merge
#           adds the adapter to the shared weight. The embedding changes as well, and the merged model is another one. There
#           is a warning, and no error.
# Hurts:    exports of such adapters: the logits during training are right, those of the exported model are not.
# Seen:     peft 0.21.2 with transformers 5.19.0 and torch 2.13.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "peft==0.21.2" "transformers==5.19.0" "torch==2.13.0" || exit 75
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


import warnings

import peft

warnings.simplefilter("ignore")
save_toy("model")
tokens, differences = torch.tensor([[1, 5, 7]]), {}
for target in ("q_proj", "lm_head"):
    model = AutoModelForCausalLM.from_pretrained("model")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False))
    with torch.no_grad():
        trained = adapted(tokens).logits
        merged = adapted.merge_and_unload()(tokens).logits
    differences[target] = float((trained - merged).abs().max())
print("peft", peft.__version__)
print("largest difference of the logits after the merge:", differences)
assert differences["q_proj"] < 1e-4 and differences["lm_head"] > 0.1
PYTHON
