#!/usr/bin/env bash
# Expected: calling a tokenizer with truncation=True concerns this call.
# Happens:  the call sets truncation and padding in the tokenizer below, where they stay. save_pretrained then writes
#           them to tokenizer.json. A program that loads this file with the tokenizers package cuts all texts at the
#           length of that last call, and pads them. transformers itself ignores the two entries.
# Hurts:    servers and tools that read tokenizer.json directly: after training with max_length=512, prompts are cut at
#           512 tokens without a warning, although tests with transformers pass.
# Seen:     transformers 5.19.0 with tokenizers 0.23.3, November 2026; no_truncation() and no_padding() of its
#           backend_tokenizer before saving prevent it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.19.0" "tokenizers==0.23.3" || exit 75
cd "$folder"
export TRANSFORMERS_VERBOSITY=error
venv/bin/python - <<'PYTHON'
import json
import pathlib

import tokenizers
import transformers

words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
text = "a " * 10


def length_after_saving(name):
    tokenizer.save_pretrained(name)
    path = pathlib.Path(name, "tokenizer.json")
    loaded = transformers.AutoTokenizer.from_pretrained(name)
    settings = json.loads(path.read_text())["truncation"]
    return len(tokenizers.Tokenizer.from_file(str(path)).encode(text).ids), len(loaded(text)["input_ids"]), settings


print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
before = length_after_saving("before")
tokenizer([text], truncation=True, max_length=3, padding="max_length")
after = length_after_saving("after")
for name, (direct, loaded, settings) in {"before": before, "after": after}.items():
    print(f"{name} the call: tokenizers {direct} tokens, transformers {loaded}; in the file: {settings}")
assert before == (10, 10, None)
assert after[:2] == (3, 10) and after[2]["max_length"] == 3
PYTHON
