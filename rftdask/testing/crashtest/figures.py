"""Figures: counts of each part of the crash test, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rftdask.testing.crashtest.ending import Ending
from rftdask.testing.crashtest.workload import Witness

_MAX_PROBLEMS_SHOWN = 5
_MAX_EXAMPLE = 100
_COUNTS = {
    "num_tried": "tried",
    "num_kills": "kills",
    "num_operations": "operations",
    "num_lost": "lost",
    "num_twice": "twice",
    "num_trained_again": "again",
}


@dataclass
class Figures:
    """Counts of one part. `problems` is empty if every promise held every time."""

    part: str
    what: str
    """Unit of `num_tried`, in words."""
    num_tried: int = 0
    num_kills: int = 0
    num_operations: int = 0
    """Storage operations or system calls of the undisturbed run at which crashes were placed."""
    num_lost: int = 0
    num_twice: int = 0
    num_trained_again: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def add(self, where: str, ending: Ending, witness: Witness | None = None) -> None:
        """Count one try. witness: witness of the run, for the number of batches trained again."""
        self.num_tried += 1
        self.num_lost += ending.num_lost
        self.num_twice += ending.num_twice
        self.num_trained_again += witness.num_trained_again() if witness else 0
        if ending.problems:
            more = len(ending.problems) - 1
            self.problems.append(f"{where}: {ending.problems[0]}" + (f" (and {more} more)" if more else ""))


@dataclass(frozen=True)
class ProtectionFigures:
    """Findings of the same test without one protection. There must be some."""

    protection: str
    num_tried: int
    num_broken: int
    example: str


@dataclass(frozen=True)
class CrashReport:
    """Figures of all parts, as text (`render`) and as data (`to_json`)."""

    seed: int
    parts: Sequence[Figures]
    protections: Sequence[ProtectionFigures]

    @property
    def failures(self) -> list[str]:
        """One line per broken promise, and per test that found nothing without its protection."""
        lines = [f"{part.part}: {problem}" for part in self.parts for problem in part.problems]
        return lines + [
            f"without {p.protection} nothing broke in {p.num_tried} tries: this test proves nothing of it"
            for p in self.protections
            if not p.num_broken
        ]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "failures": self.failures}

    def render(self) -> str:
        lines = [f"crash test, seed {self.seed}"]
        if self.parts:
            rows = [["part", *_COUNTS.values(), "s", "what was tried"]]
            for name, what, parts in (*((p.part, p.what, [p]) for p in self.parts), ("total", "", self.parts)):
                counts = [f"{sum(getattr(part, count) for part in parts):,}" for count in _COUNTS]
                rows.append([name, *counts, f"{sum(part.duration_s for part in parts):.0f}", what])
            for name, *cells, what in rows:
                lines.append(f"  {name:<12}{''.join(f'{cell:>11}' for cell in cells)}   {what}".rstrip())
            lines += [f"  {part.part}: {note}" for part in self.parts for note in part.notes]
        if self.protections:
            lines.append("with one protection disabled, the same test finds:")
        for p in self.protections:
            example = p.example if len(p.example) <= _MAX_EXAMPLE else f"{p.example[: _MAX_EXAMPLE - 3]}..."
            lines.append(f"  without {p.protection:<32} broken in {p.num_broken:>4} of {p.num_tried:>4}   {example}")
        failures = self.failures
        if not failures:
            return "\n".join([*lines, "every promise held"])
        lines += [f"BROKEN: {len(failures)}", *(f"  {line}" for line in failures[:_MAX_PROBLEMS_SHOWN])]
        if len(failures) > _MAX_PROBLEMS_SHOWN:
            lines.append(f"  ... and {len(failures) - _MAX_PROBLEMS_SHOWN} more")
        return "\n".join(lines)
