"""Promise: the table of docs/weights.md for sizes that were not measured is what its script prints, and more of a rate
never takes longer.
"""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import weight_arithmetic

PAGE = Path(__file__).parents[3] / "docs" / "weights.md"


def test_the_table_on_the_page_is_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    weight_arithmetic.print_table()
    assert capsys.readouterr().out in PAGE.read_text(), "python benchmarks/weight_arithmetic.py"


@pytest.mark.parametrize("rate", [field.name for field in fields(weight_arithmetic.Rates)])
def test_a_higher_rate_takes_no_longer(rate: str) -> None:
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
