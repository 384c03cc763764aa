"""Makes untrusted text safe to store and show: secrets are masked, and control characters are escaped.

Invariants: `find_secret(mask(text))` is empty, `safe(safe(text)) == safe(text)`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


# ---- secrets

_MASK = "***"
_MIN_VALUE_CHARS = 8
"""Shortest value of a variable that is searched for: shorter ones occur in other words by chance."""

_NAME = re.compile(r"api_?key|passw|secret|credential|(^|_)(auth|access|bearer|api|hf)_?token$", re.IGNORECASE)
_VARIABLE = re.compile(r"(^|_)(token|pass|passphrase|pat|private_key|access_key|access_key_id)$", re.IGNORECASE)
"""Further names of secrets, only for environment variables: arguments such as `eos_token` or `pass` are not secret."""
_PARAMETER = re.compile(
    r"^(sig|token|pwd|x-(amz|goog)-(signature|credential|security-token)|.*signature)$", re.IGNORECASE
)
"""Further names of secrets, only in the query of a URL."""
_NO_SECRET = re.compile(r"(empty|null|none|true|false|\**|[/~.].*|[0-9]{1,3})$", re.IGNORECASE | re.DOTALL)
"""Values that are not secret under any name: nothing, a switch, a count, a file path."""

_REFERENCE = re.compile(r"\$\{oc\.env: *\w+ *(, *(null|EMPTY|''|\"\")? *)?\}")
"""An environment variable in a configuration, with no default or an empty one."""
_SHELL = re.compile(r"^[\"']?\$.*|^[\"']?`.*", re.DOTALL)
"""A value that the shell expands: $NAME, $(command)."""

# Each pattern matches in linear time: logs have lines of megabytes.
_IN_URL = re.compile(r"(?<=\w)://[^\s/@:\"']*:([^\s/\"'<>]+)@")
_IN_QUERY = re.compile(r"[?&;]([\w.-]+)=([^&;\s\"'#<>]+)")
_ASSIGNED = re.compile(r"(?<![?&;\w.-])(?:-{1,2})?([A-Za-z_][\w-]*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|,)\"']+)")
_ITEM = re.compile(r"[\"']([A-Za-z_][\w-]*)[\"']: ?(\"[^\"\n]*\"|'[^'\n]*')")
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{24,}"  # Hugging Face
    r"|sk-(?=[\w-]{0,80}[0-9])(?:[A-Za-z0-9]+-){0,3}[A-Za-z0-9]{16}[\w-]*"  # OpenAI and others
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])|AIza[\w-]{30,}"  # Amazon, Google
    r"|xox[abeprs]-[\w-]{10,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{10,500}\.[\w-]{10,}\.[\w-]{5,}"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]*-----END [A-Z ]*PRIVATE KEY-----)?"
    r")"
)
_BEARER = re.compile(r"\bbearer +([\w.~+/=-]{16,})", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return True if an argument of this name is a secret. `api_key_env` names a variable, and is not."""
    return bool(_NAME.search(name.replace("-", "_"))) and not name.endswith(("_env", "_ENV"))


def is_left_to_environment(text: str) -> bool:
    """Return True if a secret is only referenced by ${oc.env:NAME}, without a default."""
    return bool(_REFERENCE.search(text)) and "${" not in _REFERENCE.sub("", text)


def find_secret(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Describe the first secret in `text` without its value, such as "a password in a URL"; "": there is none.

    environment: variables with the names of secrets, whose values are searched for. None: those of this process.
    """
    return min(_secrets(text, environment), default=(0, 0, ""))[2]


def mask(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with *** in place of every secret."""
    reached, parts = 0, []
    for start, end, _ in sorted(_secrets(text, environment)):
        # Secrets may overlap, such as a token in a URL; each character is masked once.
        if end > reached:
            parts += [text[reached : max(start, reached)], _MASK if start >= reached else ""]
            reached = end
    masked = "".join([*parts, text[reached:]])
    # Masking may reveal the beginning of another secret.
    return text if masked == text else mask(masked, environment)


def _secrets(text: str, environment: Mapping[str, str] | None) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, description) of every secret."""

    def secret(match: re.Match[str], group: int, what: str) -> Iterator[tuple[int, int, str]]:
        (start, end), quotes = match.span(group), match[group][0] in "\"'" and group > 1
        # A reference to a variable is not secret, and *** was put there by `mask`.
        if _REFERENCE.sub("", match[group].strip("\"'")).strip("*"):
            yield start + quotes, end - quotes, what

    for match in _IN_URL.finditer(text):
        yield from secret(match, 1, "a password in a URL")
    for match in _SHAPES.finditer(text):
        yield from secret(match, 1, f"what looks like a token ({match[1][:4]}...)")
    for match in _BEARER.finditer(text):
        yield from secret(match, 1, "what looks like a bearer token")
    for match in _IN_QUERY.finditer(text):
        if is_secret_name(match[1]) or _PARAMETER.search(match[1]):
            yield from secret(match, 2, f"the secret {match[1]} of a URL")
    for pattern in (_ASSIGNED, _ITEM):
        for match in pattern.finditer(text):
            value = match[2].strip("\"'")
            # TOKEN=... is an environment variable; in lower case it may be an argument that is not secret.
            is_named = is_secret_name(match[1]) or (match[1].isupper() and _VARIABLE.search(match[1]))
            if is_named and not _SHELL.match(value) and not _NO_SECRET.match(value):
                yield from secret(match, 2, f"a value for {match[1]}")
    if len(text) < _MIN_VALUE_CHARS:
        return
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) < _MIN_VALUE_CHARS or value not in text or _NO_SECRET.match(value):
            continue
        if is_secret_name(name) or _VARIABLE.search(name):
            for match in re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text):
                yield *match.span(), f"the value of the environment variable {name}"


# ---- characters that UTF-8 or a terminal cannot show

_MAX_CELL_CHARS, _MAX_CELL_ITEMS = 80, 6


def encodable(text: str) -> str:
    """Return `text` with each lone surrogate, which UTF-8 cannot encode, as an escape. JSON and YAML may contain one as
    an escape as well."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str, keep: str = "") -> str:
    """Return `text` with every character that is not printable as an escape, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def safe(text: str) -> str:
    """Return `text` for a terminal, a log or a page: secrets masked, all but line ends and tabs `printable`."""
    return mask(printable(text, keep="\n\t"))


class SafeFormatter(logging.Formatter):
    """Formats log records as `safe` text, including tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Mask message and traceback together: a secret may be in either."""
        return safe(super().format(record))


def safe_console() -> Console:
    """Return a rich console that escapes all control characters in the texts that it draws."""
    from rich.console import Console  # late: 50 ms that `import rftdask` does not need

    class SafeConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # Control segments, such as cursor movements, are made by rich and never from untrusted text.
                is_plain = segment.control or segment.text.isprintable()
                yield segment if is_plain else segment._replace(text=printable(segment.text, keep="\n"))

    return SafeConsole()


def cell(value: Any) -> str:
    """Format a value as one line of a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        # Four significant digits, but large numbers as integers: 1.234e+06 reads badly in a column.
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        items = ", ".join(cell(item) for item in value[:_MAX_CELL_ITEMS])
        return f"[{items}{', ...' if len(value) > _MAX_CELL_ITEMS else ''}]"
    text = printable(str(value))
    return text if len(text) <= _MAX_CELL_CHARS else f"{text[: _MAX_CELL_CHARS - 3]}..."
