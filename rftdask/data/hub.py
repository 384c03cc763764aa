"""Names on the Hugging Face Hub: looked up in the local cache first, then requested once.

The clients of the Hub retry an unreachable server for 25 s, for every name and in every process. Here a name in the
local cache is used from there, even if the Hub has a newer version. For other names the Hub gets one request, and no
answer is an error at once. This module needs no torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rftdask.errors import DataError
from rftdask.storage.base import in_daemon

_ANSWER_TIMEOUT_S = 5.0
_SILENCE_REMEMBERED_S = 30.0
"""Checking a configuration looks up several names, but waits for an unreachable Hub only once."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken")

_silence: tuple[str, float, str] = ("", 0.0, "")
"""(server, monotonic time, reason) of the last request without an answer."""


def is_model_name(path: str) -> bool:
    """Return True if `path`, which is not a folder, can be a Hub name "owner/model"."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def local_model(path: str) -> str:
    """Return the folder of a complete model: `path` if it exists, or its copy in the local cache; otherwise `path`.

    Pass it to `from_pretrained`, which would contact the Hub about a name even if the files are cached.
    """
    # An existing folder wins over a model of that name, as in `from_pretrained`.
    folder = None if Path(path).exists() else cached_folder(path)
    return str(folder) if folder is not None and has_weights(folder) and has_tokenizer(folder) else path


def cached_folder(name: str) -> Path | None:
    """Return the newest copy of a model in the local cache, which may be incomplete except for config.json."""
    if not is_model_name(name):
        return None
    # Late: 0.2 s, and models in folders do not need it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def require_hub(what: str, advice: str) -> None:
    """Check with one request that the Hub answers.

    Args: what: the missing item; advice: what to do without the Hub.
    Raises: DataError: no answer in 5 s; one line with `what`, the server, the reason and `advice`.
    """
    global _silence
    from huggingface_hub import constants, get_session  # late: 0.2 s, and models in folders do not need it

    server, requested_at, reason = _silence
    if server != constants.ENDPOINT or time.monotonic() - requested_at > _SILENCE_REMEMBERED_S:
        request = partial(get_session().head, constants.ENDPOINT, timeout=_ANSWER_TIMEOUT_S)
        try:
            # In a thread, because the timeout argument does not cover name resolution.
            in_daemon(request, "hub-answer").result(_ANSWER_TIMEOUT_S)
            reason = ""  # any status is an answer
        except TimeoutError:
            reason = f"nothing in {_ANSWER_TIMEOUT_S:.0f} s"
        except Exception as error:  # from the HTTP library of the Hub's client
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # Only silence is remembered: a request that is answered costs little.
        _silence = (constants.ENDPOINT if reason else "", time.monotonic(), reason)
    if reason:
        raise DataError(f"{what} is not on this machine, and {constants.ENDPOINT} does not answer ({reason}); {advice}")


def require_model(path: str, key: str) -> None:
    """Raise DataError if the model that `key` names is not on this machine and the Hub is not reachable."""
    if local_model(path) == path:
        require_hub(
            f"{key}: {path!r}",
            f"pass a local copy (run hf download {path} --local-dir DIR on a machine with a network)",
        )


@contextmanager
def without_hub() -> Iterator[None]:
    """Restrict the `datasets` library to its local cache, in this process and for this block."""
    import datasets  # late: 0.6 s

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def has_weights(folder: Path) -> bool:
    """Return True if all weight files of a model folder exist."""
    # An index names several files; a single one has a fixed name.
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / name).is_file() for name in names)


def has_tokenizer(folder: Path) -> bool:
    """Return True if a vocabulary exists, or the tokenizer needs none: it works on bytes, or is code of the model."""
    settings = folder / "tokenizer_config.json"
    needs_none = settings.is_file() and re.search(rb"auto_map|ByT5|Canine|Perceiver", settings.read_bytes())
    return bool(needs_none) or any(path.is_file() for name in _VOCABULARIES for path in folder.glob(name))
