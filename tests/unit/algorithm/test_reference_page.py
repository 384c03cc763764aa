"""The reference page equals the text generated from the code."""

from rftdask.config.schema.algorithm import registered_parts
from tests.unit.algorithm.reference_page import PAGE, SECTIONS, START, render


def test_the_page_holds_the_generated_reference() -> None:
    # To mend: python -m tests.unit.algorithm.reference_page, and look at what changed.
    text = PAGE.read_text()
    assert text[text.index(START) :] == render()


def test_every_type_has_a_row_and_every_part_a_section() -> None:
    text = PAGE.read_text()
    assert all(f"\n| `{name}` |" in text for name in registered_parts("algorithm_type"))
    assert all(f"\n### `{name}`\n" in text for key in SECTIONS.values() for name in registered_parts(key))


def test_every_part_and_type_has_a_docstring() -> None:
    for key in (*SECTIONS.values(), "algorithm_type"):
        for name, part in registered_parts(key).items():
            assert len(part.load().__doc__ or "") > 15, name
