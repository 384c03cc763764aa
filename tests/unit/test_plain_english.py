"""The prose of the package, its tests and its pages is plain English. It is a smoke alarm: a mark is a place to look
at. CONTRIBUTING.md, "English", explains how to rewrite the sentence.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
MARKS = {
    "who + verb": (r"\bwho(?:ever)? (?!are you\b)[a-z]+", 0.18),
    "tell of data": (r"\b(?:tell|tells|told|telling)\b", 0.12),
    "say of data": (r"\b(?:says|said)\b", 0.18),
    "too at the end": (r", too\b", 0.04),
    "is no X": (r"\b(?:is|are|was|were) no (?!longer\b|more\b)[a-z]+", 0.44),
    "is to + verb": (r"\b(?:is|are) to (?!be\b)[a-z]+\b|\b(?:is|are) to be [a-z]+ed\b", 0.62),
    "alone for only": (r"\balone\b", 0.44),
    "beside": (r"\bbeside\b", 0.05),
    "of what": (r"\bof (?:what|who|those|whom)\b", 0.22),
    "What is X": (r"(?-i:(?:^|[.;:] )What (?:is|was|has|a|an|the)\b)", 0.06),
    "is there": (r"\b(?:is|are|was|were) (?:there|here)[.,;:)]", 0.06),
    "by itself": (r"\bby (?:itself|themselves)\b", 0.05),
}
"""Mark -> (pattern, times per 1,000 words at most): about twice the highest rate in httpx, torchtitan's RL experiment,
prime-rl and nanochat, whose documentation reads well."""
FRAGMENT = re.compile(
    r"(?:Of|What|Whether|Who|Whom|Whose|As|By|Where|Those|From|In|On|At|For|To|With|So|How many|How long|Since|Beside"
    r"|Among)\b"
)
MAX_FRAGMENTS = 0.02
"""Share of docstrings that may begin with a fragment."""


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def docstrings_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and the strings that document a constant or a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, item in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            may_be_first = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            follows = isinstance(before, ast.Assign | ast.AnnAssign) or (before is None and may_be_first)
            if follows and isinstance(item, ast.Expr) and is_text(item.value):
                yield item.value


def prose_of(source: str) -> Iterator[tuple[bool, str]]:
    """(is a docstring, text) of every docstring, comment, and string of four words or more."""
    tree = ast.parse(source)
    docstrings = {id(node): node.value for node in docstrings_of(tree)}
    yield from ((True, text) for text in docstrings.values())
    strings = (node.value for node in ast.walk(tree) if is_text(node) and id(node) not in docstrings)
    yield from ((False, text) for text in strings if text.count(" ") >= 3)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from ((False, token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT)


def prose_problems(texts: list[tuple[bool, str]]) -> list[str]:
    """One line for every bound that the texts exceed, with an example."""
    num_words = sum(len(text.split()) for _, text in texts) or 1
    problems = []
    for mark, (pattern, most) in MARKS.items():
        places = [m for _, text in texts for m in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE)]
        if (rate := 1000 * len(places) / num_words) > most:
            shown = "; ".join(m.string[max(0, m.start() - 30) : m.end() + 30].replace("\n", " ") for m in places[:5])
            problems.append(f"{mark}: {rate:.2f} per 1,000 words, at most {most}: {shown}")
    docstrings = [text.strip() for is_docstring, text in texts if is_docstring]
    fragments = [text.splitlines()[0] for text in docstrings if FRAGMENT.match(text)]
    if len(fragments) > MAX_FRAGMENTS * len(docstrings):
        problems.append(f"{len(fragments)} of {len(docstrings)} docstrings begin with a fragment: {fragments[:5]}")
    return problems


@pytest.mark.parametrize("folder", ["rftdask", "tests", "docs"])
def test_the_prose_is_plain_english(folder: str) -> None:
    texts = [text for path in sorted((ROOT / folder).rglob("*.py")) for text in prose_of(path.read_text())]
    if folder == "docs":
        texts = [(False, path.read_text()) for path in (*ROOT.glob("*.md"), *sorted(ROOT.rglob("docs/**/*.md")))]
    assert prose_problems([*texts]) == []


def test_a_mark_and_a_fragment_are_reported() -> None:
    source = '"""Whether it is over."""\nX = 1\n"""A limit."""\nY = "who waits is told what is beside it"  # as said\n'
    texts = list(prose_of(source))
    assert [is_docstring for is_docstring, _ in texts] == [True, True, False, False]
    marks = [problem.partition(":")[0] for problem in prose_problems(texts)]
    assert marks == ["who + verb", "tell of data", "say of data", "beside", "1 of 2 docstrings begin with a fragment"]
