"""Rules for every command on invalid input, and the tables of mistakes that tests/robustness tries.

A mistake that the user can fix gives exit code 2 and one message that begins with "error: ", names the key, file or
option, and contains no traceback and no raw control character. Nothing is explored or trained, and no file changes.
"""

import re
from pathlib import Path

from tests.integration.run_cases import Ended, call_cli, num_shards, num_steps, run_folder

LONGEST_MESSAGE = 6_000
"""Maximum characters of a readable message. A message must not repeat a value of megabytes."""


def assert_mendable(ended: Ended, *words: str) -> str:
    """Return the message of a command that had to refuse; it must contain each of `words`."""
    assert ended.code == 2, ended
    text = ended.err
    assert re.search(r"(?mi)^error: |^[│╭] ?Error|^Usage: ", text), text
    assert "Traceback" not in text and 'File "' not in text, text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", text), repr(text)
    assert len(text) <= LONGEST_MESSAGE, f"{len(text)} characters: {text[:1000]}"
    for word in words:
        assert word in " ".join(text.split()), f"{word!r} is not in {text}"
    return text


def refused_run(config: Path, *overrides: str, words: tuple[str, ...] = ()) -> str:
    """Return the message of `rftdask run`, which must refuse before anything starts."""
    before = {path: path.read_bytes() for path in config.parent.iterdir() if path.is_file()}
    text = assert_mendable(call_cli("run", str(config), *overrides), *words)
    assert num_shards(run_folder(config)) == num_steps(run_folder(config)) == 0
    assert {path: path.read_bytes() for path in config.parent.iterdir() if path.is_file()} == before
    return text
