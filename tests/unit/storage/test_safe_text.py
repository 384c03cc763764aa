"""Untrusted text when it is shown: secrets are masked, other text is unchanged, and control characters are gone."""

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.storage.safe_text import find_secret, is_left_to_environment, is_secret_name, mask, printable, safe

SECRETS = {
    "postgresql://me:hunter2@host/db": "hunter2",
    "https://me:p@ss:w0rd@host:8443/path": "p@ss:w0rd",
    "s3://key:hunter2@bucket/x?y=1": "hunter2",
    "https://h/x?X-Amz-Date=1&X-Amz-Signature=0a1b2c": "0a1b2c",
    "https://h/x?se=2026&sig=aB%2Fc%3D": "aB%2Fc%3D",
    "https://h/x?token=abc123": "abc123",
    "postgresql://host/db?user=me&password=hunter2": "hunter2",
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH": "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "key sk-proj-abc123DEF456ghi789jkl": "sk-proj-abc123DEF456ghi789jkl",
    "https://ghp_abcdefghijklmnopqrstuvwxyz0123456789@github.com/x": "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "export DB_PASSWORD=hunter2": "hunter2",
    "export WANDB_API_KEY='hunter2 and more'; python x": "hunter2 and more",
    "export GITHUB_TOKEN=hunter2": "hunter2",
    "python -m judge --api-key=hunter2": "hunter2",
    "{'password': 'hunter2'}": "hunter2",
    "Authorization: Bearer abcdefghijklmnop0123": "abcdefghijklmnop0123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----": "MIIB",
}

HARMLESS = [
    "postgresql://me@host:5432/db",
    "https://host:8080/a:b@c",
    "postgresql://me:${oc.env:PASSWORD}@host/db",
    "https://h/x?token=${oc.env:TOKEN}",
    "export HF_TOKEN=$(cat ~/.hf_token)",
    'export HF_TOKEN="$HF_TOKEN"',
    "export AWS_SHARED_CREDENTIALS_FILE=/home/me/.aws/credentials",
    "max_tokens=4096 eos_token=<|im_end|> total_tokens=12",
    "set monitor.monitor_args.password: a secret does not belong here",
    "the task-classification-model-2024-v12345 and risk-adjusted1234567890 ones",
    "hf_model and sk-learn-pipelines-are-long",
    "module=my_rewards.secret_sauce",
    "org/hf_llama2chat7bfinetuned sk-model-2024-baseline-x",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS.items())
def test_secrets_are_found_and_masked(text: str, secret: str) -> None:
    what = find_secret(text, {})
    assert what and secret not in what
    assert secret not in mask(text, {}) and "***" in mask(text, {})


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_not_masked(text: str) -> None:
    assert (find_secret(text, {}), mask(text, {})) == ("", text)


def test_values_of_secret_variables_are_secrets() -> None:
    environment = {
        "WANDB_API_KEY": "0123456789abcdef",
        "MY_TOKEN": "correct horse",
        "HF_TOKEN": "short",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "PWD": "/home/me/project",
    }
    assert find_secret("use 0123456789abcdef", environment) == "the value of the environment variable WANDB_API_KEY"
    assert mask("say correct horse!", environment) == "say ***!"
    for text in ("short", "/home/me/key.json", "/home/me/project", "x0123456789abcdefx"):
        assert mask(text, environment) == text


def test_only_references_are_left_to_the_environment() -> None:
    assert is_left_to_environment("${oc.env:KEY}") and is_left_to_environment("Bearer ${oc.env:KEY,EMPTY}")
    assert not is_left_to_environment("${oc.env:KEY,hunter2}") and not is_left_to_environment("hunter2")
    assert is_secret_name("api_key") and is_secret_name("api-key") and not is_secret_name("api_key_env")


PIECES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(list(SECRETS)),
    st.sampled_from([*"'\"=:/@?&;, \n\t\x1b\x9b\u202e", "://", "password=", "***", "${oc.env:X}", "\x1b[2J"]),
    st.text(string.ascii_letters + string.digits, min_size=24, max_size=28).map("hf_".__add__),
)
ENVIRONMENT = {"MY_SECRET": "a value of mine", "API_KEY": "0123456789abcdef"}


@settings(deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_masking_and_escaping_are_idempotent(text: str) -> None:
    assert find_secret(mask(text, ENVIRONMENT), ENVIRONMENT) == ""
    shown = safe(text)
    assert safe(shown) == shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)


@pytest.mark.parametrize("char", ["\x00", "\x07", "\x08", "\r", "\x1b", "\x7f", "\x85", "\x9b", "\u202e", "\u2066"])
def test_control_characters_are_escaped(char: str) -> None:
    assert safe(f"a{char}b\tc\nd") == f"a{char.encode('unicode_escape').decode()}b\tc\nd"
    assert printable(f"{char}\n") == char.encode("unicode_escape").decode() + "\\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["a", "sk-", "hf_", "-eyJ", "://a:", "?a", 'a="', "'a': '", "-----BEGIN ", "\x1b", "AKIA"]
)
def test_a_long_line_takes_a_moment(piece: str) -> None:
    """Quadratic time would take hours."""
    assert len(safe(piece * 100_000)) >= len(piece) * 100_000
