"""Promise: the reference of all names in docs/algorithms.md equals the code, for each name its class's docstring, its
defaults and its file. `python -m tests.unit.algorithm.test_reference_page` writes it.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.correction import Correction
from rftdask.config.schema.algorithm import old_names, registered_parts

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
START = "## Algorithm types"
SECTIONS = {
    "Advantage functions": "advantage_fn",
    "Policy losses": "policy_loss_fn",
    "KL": "kl_loss_fn",
    "Entropy": "entropy_loss_fn",
    "Experience operators": "operator",
}


def render() -> str:
    """Markdown: the table of algorithm types, then every part with its docstring and its arguments."""
    sections = [START, "", *_types(), ""]
    for title, key in SECTIONS.items():
        sections += [f"## {title}", ""]
        for name, part in sorted(registered_parts(key).items()):
            sections += _part(name, part.load())
    sections += ["## Rollout correction", "", *_part("rollout_correction", Correction)]
    return "\n".join(sections).rstrip() + "\n"


def _types() -> list[str]:
    columns = "type, advantage, policy loss, KL loss, entropy, aggregation, repeat_times, critic, reference, file"
    head = columns.split(", ")
    rows = [head, ["---"] * len(head)]
    for name, part in sorted(registered_parts("algorithm_type").items()):
        algorithm, traits = make_algorithm(name), part.traits
        file = part.module.replace(".", "/") + ".py"
        rows.append(
            [
                f"`{name}`",
                _with_args(traits["advantage_fn"], traits["advantage_fn_args"]),
                _with_args(traits["policy_loss_fn"], traits["policy_loss_fn_args"]),
                traits["kl_loss_fn"],
                traits["entropy_loss_fn"],
                algorithm.loss_agg_mode,
                str(algorithm.repeat_times),
                "yes" if algorithm.use_critic else "",
                "yes" if algorithm.use_reference else "",
                f"[{file.removeprefix('rftdask/algorithm/')}](../{file})",
            ]
        )
    twins = {**old_names("advantage_fn"), **old_names("algorithm_type")}
    old = ", ".join(f"`{old}` is `{new}`" for old, new in sorted(twins.items()))
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return [*table, "", f"Old names, each with one warning: {old}; the sample strategy `warmup` is `default`."]


def _part(name: str, cls: Any) -> list[str]:
    fields = ", ".join(f"`{name}={each.default!r}`" for name, each in inspect.signature(cls).parameters.items())
    return [f"### `{name}`", "", inspect.cleandoc(cls.__doc__ or ""), "", f"Arguments: {fields or 'none'}.", ""]


def _with_args(name: str | None, args: Mapping[str, object]) -> str:
    given = ", ".join(f"{key} {value}" for key, value in args.items())
    return (name or "") + (f" ({given})" if given else "")


def test_the_page_holds_the_generated_reference() -> None:
    # To mend: run this module, and look at what changed.
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


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START)] + render())
