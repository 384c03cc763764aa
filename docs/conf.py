"""The documentation as a site: `make site` writes it to build/site, without a network.

The pages are the Markdown files of this folder, which are read as well where they lie. Whatever the code knows is not
written down a second time: a line "<!-- generated: NAME -->" of a page stands for what a function of GENERATED gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from typer.cli import get_docs_for_click

from rftdask import __version__
from rftdask.cli.app import LazyGroup, app
from rftdask.compat import trl, verl
from rftdask.compat.imported import Key
from rftdask.driver.init_config import bundled, describe, json_schema
from rftdask.reports.metric_table import METRICS

DOCS = Path(__file__).resolve().parent

project = "rftdask"
author = "the authors of rftdask"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py", "images"]
html_theme = "furo"
html_title = f"rftdask {release}"
html_show_sphinx = html_show_copyright = False
# The anchors that these headings have where the files are read as they lie.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
# Docstrings write code in single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False

_UPWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+(?!CHANGELOG)[^)#]*)[^)]*\)")
"""Links that leave the folder of a page: their text and their path."""


def config_reference() -> Iterator[str]:
    """Every key of a configuration, section by section, as the schema has it."""
    schema = json_schema()
    definitions = schema["$defs"]

    def kind(node: dict[str, Any]) -> str:
        if "$ref" in node:
            return f"[{(name := node['$ref'].rpartition('/')[2])}](#{name.lower()})"
        if "anyOf" in node:
            # Any number, truth value or choice may be an interpolation, too, which is not worth a word at each key.
            written = [option for option in node["anyOf"] if not str(option.get("pattern", "")).startswith(r"^\$")]
            options = [kind(option) for option in written]
            return " or ".join(dict.fromkeys(options))
        if "enum" in node or "const" in node:
            return " or ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
        if node.get("type") == "array":
            return f"list of {kind(node.get('items') or {})}"
        return str(node.get("type", "any"))

    for name, section in {"Config": schema, **definitions}.items():
        if "properties" not in section:
            continue
        yield f"## {name}\n\n{section.get('description', '').strip()}\n"
        yield "| key | type | default | |\n|---|---|---|---|"
        for key, node in section["properties"].items():
            default = "" if "$ref" in node or "default" not in node else f"`{node['default']}`"
            yield "| " + " | ".join(map(cell, (f"`{key}`", kind(node), default, node.get("description", "")))) + " |"
        yield ""


def cell(text: str) -> str:
    """Text in one line of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def metrics_reference() -> Iterator[str]:
    """Rows for all metrics of the package."""
    yield "| metric | | formula | unit | better | an odd value | source |\n|---|---|---|---|---|---|---|"
    better = {"up": "more", "down": "less", "watch": ""}
    for name, metric in METRICS.items():
        texts = (metric.label, metric.formula, metric.unit, better[metric.direction], metric.advice, metric.source)
        yield "| " + " | ".join(map(cell, (f"`{name}`", *texts))) + " |"


def commands_reference() -> Iterator[str]:
    """Help of each command, formatted by Typer."""
    group = loaded_group(typer.main.get_command(app))
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="rftdask")
    yield re.sub(r"^# `rftdask`\n", "", text)


def loaded_group(group: LazyGroup) -> LazyGroup:
    """Return a group after importing its commands and those of its subgroups."""
    group.commands = {name: group.load(name) for name in group.table if not group.commands[name].hidden}
    for command in group.commands.values():
        if isinstance(command, LazyGroup):
            loaded_group(command)
    return group


def examples_reference() -> Iterator[str]:
    """Bundled files, each with its first sentence."""
    yield "| file | |\n|---|---|"
    for name, path in bundled().items():
        yield f"| `{name}` | {cell(describe(path))} |"


def imported_keys(tables: Mapping[str, Mapping[str, Key]]) -> Iterator[str]:
    """Tables of the keys of another system, as `rftdask import` translates them."""
    for title, keys in tables.items():
        yield f"### {title}\n\n| there | here |\n|---|---|"
        for theirs, key in keys.items():
            default = f" (there by default `{key.default}`)" if key.default is not None else ""
            yield f"| `{theirs}` | {f'`{key.ours}`' if key.ours else cell(key.why)}{default} |"
        yield ""


GENERATED: dict[str, Callable[[], Iterator[str]]] = {
    "trl": lambda: imported_keys({"Of every trainer": trl.KEYS, "Of GRPO and RLOO": trl.ROLLOUT_KEYS}),
    "verl": lambda: imported_keys({"By key": verl.KEYS}),
    "config": config_reference,
    "metrics": metrics_reference,
    "commands": commands_reference,
    "examples": examples_reference,
}


def read_page(_: Sphinx, page: str, source: list[str]) -> None:
    """Fill in the generated tables of a page, and resolve links to files outside docs/."""

    def resolve(link: re.Match[str]) -> str:
        is_page = (DOCS / page).parent.joinpath(link[2]).resolve().is_relative_to(DOCS)
        return link[0] if is_page else link[1]

    text = re.sub(r"<!-- generated: (\w+) -->", lambda found: "\n".join(GENERATED[found[1]]()), source[0])
    # The site has no pages for files of the code, so their links become plain names.
    source[0] = _UPWARD.sub(resolve, text)


def read_docstring(_: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText: literal blocks for examples and trees, blank lines around lists."""
    converted: list[str] = []
    for line in lines:
        last = next((earlier for earlier in reversed(converted) if earlier), "")
        if line.startswith("    ") and not last.startswith("    ") and (last == "Example:" or not converted[-1]):
            converted += ["", "::", ""]
        elif line.startswith("- ") and not last.startswith(("- ", "  ")):
            converted.append("")
        converted.append(line)
    lines[:] = converted


def setup(app: Sphinx) -> None:
    """Entry point of Sphinx."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon takes sections apart
    app.add_lexer("mermaid", TextLexer)  # the script that draws diagrams is not bundled
