"""The documentation says of every name what the code says."""

from pathlib import Path

from rftdask.algorithm.describe import PARTS, describe

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_the_documentation_holds_the_reference_as_the_code_prints_it() -> None:
    # To mend: replace everything from "## Algorithm types" on by the output of python -m rftdask.algorithm.describe.
    text = DOCS.read_text()
    assert text[text.index("## Algorithm types") :] == describe()


def test_every_part_names_what_it_computes() -> None:
    for table in PARTS.values():
        for name, cls in table.items():
            assert len(cls.__doc__ or "") > 15, name
