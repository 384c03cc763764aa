"""Every file, key, command and heading that the documentation names exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from rftdask.cli.app import app
from rftdask.config import Config
from rftdask.config.base import Section, child_of
from rftdask.driver.init_config import json_schema

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.rglob("docs/**/*.md"), *ROOT.glob("*.md")])


def parts_of(schema: Any) -> Any:
    """The schema of parts of a configuration, in which nothing is required."""
    if isinstance(schema, dict):
        return {key: parts_of(value) for key, value in schema.items() if key != "required"}
    return [parts_of(item) for item in schema] if isinstance(schema, list) else schema


_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|ipynb|toml|sh)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]*)(#[^)\s]*)?\)")
_EXAMPLE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_KEY = re.compile(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_][\w.\[\]]*)[`:=]")
_NO_KEYS = {"model.generate"}
"""Methods of transformers that look like keys."""
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMAND: Any = get_command(app)
SCHEMA = jsonschema.Draft202012Validator(parts_of(json_schema()))


def named_paths(text: str) -> list[str]:
    """Files of this project in code spans: `rftdask/x/y.py`, `x/y.py` below the package, `tests/unit/test_x.py`.

    A bare name such as `run.yaml` is a reader's own file, but a bare module name must be one of ours.
    """
    spans = [span.split()[-1] if " " in span else span for span in _CODE.findall(_EXAMPLE.sub("", text))]
    paths = [span.split("::")[0] for span in spans if _PATH.fullmatch(span.split("::")[0])]
    return [path for path in paths if ("/" in path or path.endswith(".py")) and "NAME" not in path]


def exists(path: str) -> bool:
    if (ROOT / path).exists() or (ROOT / "rftdask" / path).exists() or (ROOT / "docs" / path).exists():
        return True
    return "/" not in path and any((*ROOT.glob(f"rftdask/**/{path}"), *ROOT.glob(f"examples/**/{path}")))


def anchors(file: Path) -> set[str]:
    """The anchors that the headings of a page get on the web."""
    headings = _HEADING.findall(_EXAMPLE.sub("", file.read_text()))
    return {"#" + re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [path for path in named_paths(page.read_text()) if not exists(path)] == []


def is_key(key: str, section: type[Section] = Config) -> bool:
    """True if a section has `key`, such as "explorer.rollout_model.dtype"."""
    name, _, rest = key.partition(".")
    info = section.model_fields.get(name.partition("[")[0])
    if info is None:
        return not rest and isinstance(getattr(section, name, None), property)
    child = child_of(info)
    if child is None or not rest:
        return True  # a free-form dict, or the key itself
    return is_key(rest.partition(".")[2] if child[0] == "dict" else rest, child[1])


# Pages on other systems also name keys of those systems, and the changelog names removed keys.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.name.startswith(("from-", "trinity-")) and page.name != "CHANGELOG.md"],
    ids=lambda page: page.name,
)
def test_every_key_that_a_page_names_exists(page: Path) -> None:
    named = {key.rstrip(".") for key in _KEY.findall(page.read_text())} - _NO_KEYS
    assert [key for key in sorted(named) if not is_key(key)] == []
    assert not is_key("trainer.no_such_key")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target, fragment in _LINK.findall(_EXAMPLE.sub("", page.read_text())):
        file = page.parent / target if target else page
        if not file.exists():
            broken.append(target)
        elif fragment and file.suffix == ".md" and fragment not in anchors(file):
            broken.append(target + fragment)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_one(page: Path) -> None:
    """Its name, its options and the number of its arguments; what it does is for the tests that type it."""
    for block in _EXAMPLE.findall(page.read_text()):
        # A quoted text may have several lines.
        for shown in re.findall(
            r'^\s*(?:\$ )?rftdask ((?:[^"\n]|"[^"]*")*)', re.sub(r"\\\n\s*", " ", block), re.MULTILINE
        ):
            # The command ends at a pipe or before a comment in the next column.
            command = re.split(r"\s[|>&]|\s{3,}", shown)[0] if '"' not in shown else shown
            if "[" not in command.partition("  #")[0]:  # [KEY=VALUE] is how a usage is written
                parse(COMMAND, shlex.split(_filled(command), comments=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_within_a_sentence_is_one(page: Path) -> None:
    """Its name and its options; a sentence need not give its arguments."""
    for span in _CODE.findall(_EXAMPLE.sub("", page.read_text())):
        # [KEY=VALUE] and A | B are how a usage is written.
        if span.startswith("rftdask ") and not re.search(r"\[|\||--help|--install-completion", span):
            try:
                parse(COMMAND, shlex.split(_filled(span))[1:])
            except Exception as error:
                assert re.search("Missing|requires an argument", str(error)), (span, error)


def _filled(command: str) -> str:
    """Replace the placeholder STEP by a number."""
    return re.sub(r"\bSTEP\b", "7", command)


def parse(command: Any, words: list[str]) -> None:
    """Parse the words of a command or a command group as the command line does, without running it."""
    with command.make_context("rftdask", list(words)) as context:
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if hasattr(command, "resolve_command") and rest:
            _, found, rest = command.resolve_command(context, rest)
            parse(found, rest)


def test_a_command_that_is_none_is_seen() -> None:
    for wrong in (["runs", "run.yaml"], ["run"], ["status", "RUN", "--no-such-option"]):
        with pytest.raises(Exception, match=r"No such|Missing"):
            parse(COMMAND, wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configurations_on_pages_match_the_schema(page: Path) -> None:
    for kind, text in re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if kind == "yaml" and set(tree := yaml.safe_load(text)) <= Config.model_fields.keys():
            SCHEMA.validate(tree)


def test_every_picture_is_shown_on_a_page() -> None:
    shown = {Path(target).name for page in PAGES for target, _ in _LINK.findall(page.read_text())}
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} - shown == set()


def test_the_readme_counts_the_recipes() -> None:
    [told] = re.findall(r"\[examples/recipes\]\(examples/recipes\): (\d+) complete", (ROOT / "README.md").read_text())
    assert int(told) == len(list((ROOT / "examples" / "recipes").glob("*.yaml")))


def test_the_design_lists_every_folder_of_the_package() -> None:
    listed = re.findall(r"^  (\w+)/ ", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in (ROOT / "rftdask").glob("*/__init__.py"))


def test_a_file_that_is_not_there_is_seen() -> None:
    text = "see `rftdask/no_such.py`, `memory_estimate.py`, `trainer/trainer.py` and `my.yaml`\n```\n`gone/x.py`\n```\n"
    assert named_paths(text) == ["rftdask/no_such.py", "memory_estimate.py", "trainer/trainer.py"]
    assert [path for path in named_paths(text) if not exists(path)] == ["rftdask/no_such.py"]
