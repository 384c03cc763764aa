"""Promises: the table of computed sizes in docs/weights.md is the output of its script, and a higher rate is never
slower.
"""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import weight_arithmetic

PAGE = Path(__file__).parents[3] / "docs" / "weights.md"


def test_the_table_on_the_page_matches_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    weight_arithmetic.print_table()
    assert capsys.readouterr().out in PAGE.read_text(), "python benchmarks/weight_arithmetic.py"


@pytest.mark.parametrize("rate", [field.name for field in fields(weight_arithmetic.Rates)])
def test_a_higher_rate_is_not_slower(rate: str) -> None:
    rates = weight_arithmetic.RATES
    faster = replace(rates, **{rate: 2 * getattr(rates, rate)})
    changed = []
    for num_gpus in weight_arithmetic.NUM_GPUS:
        for way, share in weight_arithmetic.WAYS:
            method = way.partition(",")[0]
            before = weight_arithmetic.costs(70, num_gpus, method, share, rates).served_s
            after = weight_arithmetic.costs(70, num_gpus, method, share, faster).served_s
            assert after <= before
            changed.append(after < before)
    assert any(changed), "the rate is used"
