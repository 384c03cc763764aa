"""Figures: what a part of the crash test counted, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rftdask.testing.crashtest.ending import Ending

_MAX_PROBLEMS_SHOWN = 5
_MAX_EXAMPLE = 100


@dataclass
class Figures:
    """One part. `problems` is empty if every promise held every time."""

    part: str
    what: str
    """The unit of `num_tried`, in words."""
    num_tried: int = 0
    num_kills: int = 0
    num_operations: int = 0
    """Storage operations, or system calls, of the undisturbed run that crashes were placed around."""
    num_lost: int = 0
    num_twice: int = 0
    num_trained_again: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def add(self, where: str, ending: Ending) -> None:
        self.num_lost += ending.num_lost
        self.num_twice += ending.num_twice
        if ending.problems:
            more = len(ending.problems) - 1
            self.problems.append(f"{where}: {ending.problems[0]}" + (f" (and {more} more)" if more else ""))


@dataclass(frozen=True)
class ProtectionFigures:
    """Findings of the same test with one protection taken away; there must be some."""

    protection: str
    num_tried: int
    num_broken: int
    example: str


@dataclass(frozen=True)
class CrashReport:
    seed: int
    parts: Sequence[Figures]
    protections: Sequence[ProtectionFigures]

    @property
    def failures(self) -> list[str]:
        """One line for every promise that was broken, and for every test that could not have found it."""
        lines = [f"{part.part}: {problem}" for part in self.parts for problem in part.problems]
        return lines + [
            f"without {p.protection} nothing broke in {p.num_tried} tries: this test proves nothing of it"
            for p in self.protections
            if not p.num_broken
        ]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "failures": self.failures}

    def render(self) -> str:
        total = Figures("total", "")
        for part in self.parts:
            for name in (*_COUNTS, "duration_s"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        lines = [f"crash test, seed {self.seed}"]
        if self.parts:
            lines.append(_line("part", *(_COUNTS.values()), "s", "what was tried"))
            lines += [
                _line(p.part, *(f"{getattr(p, n):,}" for n in _COUNTS), f"{p.duration_s:.0f}", p.what)
                for p in (*self.parts, total)
            ]
            lines += [f"  {part.part}: {note}" for part in self.parts for note in part.notes]
        if self.protections:
            lines.append("with one protection taken away, the same test finds:")
            lines += [
                f"  without {p.protection:<32} broken in {p.num_broken:>4} of {p.num_tried:>4}   {_cut(p.example)}"
                for p in self.protections
            ]
        failures = self.failures
        if not failures:
            return "\n".join([*lines, "every promise held"])
        lines += [f"BROKEN: {len(failures)}", *(f"  {line}" for line in failures[:_MAX_PROBLEMS_SHOWN])]
        if len(failures) > _MAX_PROBLEMS_SHOWN:
            lines.append(f"  ... and {len(failures) - _MAX_PROBLEMS_SHOWN} more")
        return "\n".join(lines)


_COUNTS = {
    "num_tried": "tried",
    "num_kills": "kills",
    "num_operations": "operations",
    "num_lost": "lost",
    "num_twice": "twice",
    "num_trained_again": "again",
}


def _line(part: str, *cells: str) -> str:
    *counts, what = cells
    return f"  {part:<12}" + "".join(f"{cell:>11}" for cell in counts) + f"   {what}".rstrip()


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_EXAMPLE else text[: _MAX_EXAMPLE - 3] + "..."
