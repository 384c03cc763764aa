"""Promise: settings have the problems and warnings of load_messages.yaml, word for word, and no others."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from config_cases import config, grpo, problems, sft

MESSAGES = yaml.safe_load(Path(__file__).with_name("load_messages.yaml").read_text())
CASES = [pytest.param(case, id=f"{promise} {n}") for promise, cases in MESSAGES.items() for n, case in enumerate(cases)]


def listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("case", CASES)
def test_a_setting_has_these_problems_or_warnings(case: dict[str, Any]) -> None:
    tree, overrides = (grpo(), case["grpo"]) if "grpo" in case else (sft(), case["sft"])
    if "problems" in case:
        assert problems(tree, *listed(overrides)) == listed(case["problems"])
    else:
        assert config(tree, *listed(overrides)).warnings == tuple(listed(case["warnings"]))
