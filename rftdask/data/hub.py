"""Names on the Hugging Face Hub: looked up on this machine first, then asked for once.

The Hub's own clients try an unreachable server again for 25 s, for every name and in every process. Here a name that is
in the local cache is used from there, whatever the Hub has by now; for another one the Hub gets one request, and no
answer is an error at once. It knows neither tokenizers nor weights, and needs no torch.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rftdask.errors import DataError

_ANSWER_TIMEOUT_S = 5.0
_SILENCE_REMEMBERED_S = 30.0
"""A check of one configuration asks for several names; it waits for a silent Hub once."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken")

_silence: tuple[str, float, str] = ("", 0.0, "")
"""(server, monotonic time, reason) of the last request without an answer."""


def is_model_name(path: str) -> bool:
    """True for what can be the name of a model on the Hub, "owner/model", where `path` is no folder."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def local_model(path: str) -> str:
    """Find the folder of a whole model: `path` if it is one, or its copy in the local cache; else `path`, a name.

    Give it to `from_pretrained`, which asks the Hub about a name even where the files are in the cache.
    """
    # A folder that is there wins over a model of that name, as it does in `from_pretrained`.
    folder = None if Path(path).exists() else cached_folder(path)
    return str(folder) if folder is not None and has_weights(folder) and has_tokenizer(folder) else path


def cached_folder(name: str) -> Path | None:
    """Find the newest copy of a model in the local cache, with its config.json and maybe no more."""
    if not is_model_name(name):
        return None
    # Late: 0.2 s, and models in folders do without it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        # The cache refuses what can be no name on the Hub, so there is nothing to be had under it.
        return None
    return Path(file).parent if isinstance(file, str) else None


def require_hub(what: str, advice: str) -> None:
    """Ask the Hub for any answer, once. `what` is not on this machine; `advice` says what to do without the Hub.

    Raises: DataError: it gives no answer in 5 s; one line with `what`, the server, the reason and `advice`.
    """
    global _silence
    from huggingface_hub import constants, get_session  # late: 0.2 s, and models in folders do without it

    server, asked_at, reason = _silence
    if server != constants.ENDPOINT or time.monotonic() - asked_at > _SILENCE_REMEMBERED_S:
        reasons = [f"nothing in {_ANSWER_TIMEOUT_S:.0f} s"]

        def ask() -> None:
            try:
                get_session().head(constants.ENDPOINT, timeout=_ANSWER_TIMEOUT_S)
                reasons.append("")  # any status is an answer
            except Exception as error:  # of whatever HTTP library the Hub's client uses
                reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)

        # In a thread, because the look-up of a name has a deadline of its own that no argument sets.
        thread = threading.Thread(target=ask, name="hub-answer", daemon=True)
        thread.start()
        thread.join(_ANSWER_TIMEOUT_S)
        reason = reasons[-1]
        # Silence alone is remembered: after an answer the next name may ask again, for that costs little.
        _silence = (constants.ENDPOINT if reason else "", time.monotonic(), reason)
    if reason:
        raise DataError(f"{what} is not on this machine, and {constants.ENDPOINT} does not answer ({reason}); {advice}")


def require_model(path: str, key: str) -> None:
    """Raises: DataError: the model that `key` names is neither on this machine nor within reach."""
    if local_model(path) == path:
        require_hub(
            f"{key}: {path!r}",
            f"give a folder of it (hf download {path} --local-dir DIR, where there is a network)",
        )


@contextmanager
def without_hub() -> Iterator[None]:
    """Let the `datasets` library look into its local cache alone, in this process and for this block."""
    import datasets  # late: 0.6 s

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def has_weights(folder: Path) -> bool:
    """Whether all weight files are there that the folder's index names."""
    # Several files are named by an index; a single one has a fixed name.
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / name).is_file() for name in names)


def has_tokenizer(folder: Path) -> bool:
    """Whether a vocabulary is there, or a tokenizer that needs none: one of bytes, or the model's own code."""
    settings = folder / "tokenizer_config.json"
    needs_none = settings.is_file() and re.search(rb"auto_map|ByT5|Canine|Perceiver", settings.read_bytes())
    return bool(needs_none) or any(path.is_file() for name in _VOCABULARIES for path in folder.glob(name))
