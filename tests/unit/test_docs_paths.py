"""Promises of the documentation: every file and every key of a configuration that it names exists, and so does every
heading that it links to.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rftdask.config import Config
from rftdask.config.base import Section, child_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|ipynb|toml|sh)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]*)(#[^)\s]*)?\)")
_EXAMPLE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_KEY = re.compile(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_][\w.\[\]]*)[`:=]")
_NO_KEYS = {"model.generate"}
"""What reads like a key, and is a method of transformers."""
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def named_paths(text: str) -> list[str]:
    """Files of this project in code spans: `rftdask/x/y.py`, `x/y.py` below the package, `tests/unit/test_x.py`.

    A bare name such as `run.yaml` is a reader's own file, but a bare module name must be one of ours.
    """
    spans = [span.split()[-1] if " " in span else span for span in _CODE.findall(_EXAMPLE.sub("", text))]
    paths = [span.split("::")[0] for span in spans if _PATH.fullmatch(span.split("::")[0])]
    return [path for path in paths if "/" in path or path.endswith(".py")]


def exists(path: str) -> bool:
    if (ROOT / path).exists() or (ROOT / "rftdask" / path).exists() or (ROOT / "docs" / path).exists():
        return True
    return "/" not in path and any(ROOT.glob(f"rftdask/**/{path}"))


def anchors(file: Path) -> set[str]:
    """The anchors that the headings of a page get on the web."""
    headings = _HEADING.findall(_EXAMPLE.sub("", file.read_text()))
    return {"#" + re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [path for path in named_paths(page.read_text()) if not exists(path)] == []


def is_key(key: str, section: type[Section] = Config) -> bool:
    """Whether `key`, such as "explorer.rollout_model.dtype", is one of a section."""
    name, _, rest = key.partition(".")
    info = section.model_fields.get(name.partition("[")[0])
    if info is None:
        return not rest and isinstance(getattr(section, name, None), property)
    child = child_of(info)
    if child is None or not rest:
        return True  # a dict of somebody's own, or the key itself
    return is_key(rest.partition(".")[2] if child[0] == "dict" else rest, child[1])


# Pages on the reference system name its keys, too, and the changelog those that are gone.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "trinity" not in page.name and page.name != "CHANGELOG.md"],
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


def test_a_file_that_is_not_there_is_seen() -> None:
    text = "see `rftdask/no_such_module.py`, `cli.py`, `trainer/trainer.py` and `my.yaml`\n```\n`gone/x.py`\n```\n"
    assert named_paths(text) == ["rftdask/no_such_module.py", "cli.py", "trainer/trainer.py"]
    assert [path for path in named_paths(text) if not exists(path)] == ["rftdask/no_such_module.py"]
