"""Rows of a benchmark: printed as they are measured, written as JSON at the end. What is measured is not known here.

    parser = make_parser(__doc__)             # --quick (--tiny of those for GPUs) and --json FILE, and what it adds
    report = Report(parser.parse_args())
    report.add("durable writes", 53_200, "experiences/s", against="pyarrow alone", other=67_000, goal=40_000)
    report.write()

FILE holds one object: benchmark, quick (whether with fewer repeats, so that the numbers say nothing), and rows. A row:

    work      what was measured
    ours      the number, in `unit`
    against   the peer or the floor that `other` is of; empty where there is none
    other     its number in the same unit, or null
    ratio     how many times as good ours is: above 1 ours is better, whether more or less is better; or null
    goal      what `goal_of`, "ours" or "ratio", is to reach, or null; a ratio is to be as high, ours as high or, where
              `less_is_better`, as low
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One number; the fields are those of the file."""

    work: str
    ours: float
    unit: str
    less_is_better: bool
    against: str
    other: float | None
    ratio: float | None
    goal: float | None
    goal_of: Literal["ours", "ratio"]

    def render(self) -> str:
        texts = [f"{self.work:60} {_short(self.ours):>10} {self.unit}"]
        if self.ratio is not None:
            of = "" if self.other is None else f" {_short(self.other)}"
            texts.append(f"{self.ratio:.2f} x {self.against}{of}")
        if self.goal is not None:
            sign = "<=" if self.less_is_better and self.goal_of == "ours" else ">="
            texts.append(f"goal {sign} {_short(self.goal)}{' x' if self.goal_of == 'ratio' else ''}")
        return "   ".join(texts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def make_parser(doc: str | None, quick: str = "--quick") -> argparse.ArgumentParser:
    """Return a parser with the two options of every benchmark and its docstring as help. quick: name of the first."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "see that it works: little work, numbers that say nothing"
    parser.add_argument(quick, action="store_true", dest="quick", help=told)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows there, too")
    return parser


class Report:
    """The rows of one run of a benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """arguments: of a parser that `make_parser` made."""
        self.rows: list[Row] = []
        self.quick: bool = arguments.quick
        """Whether with fewer repeats, so that the numbers say nothing."""
        self._file: Path | None = arguments.json

    def add(
        self,
        work: str,
        ours: float,
        unit: str,
        *,
        less_is_better: bool = False,
        against: str = "",
        other: float | None = None,
        ratio: float | None = None,
        goal: float | None = None,
        goal_of: Literal["ours", "ratio"] = "ours",
    ) -> None:
        """Print a row and keep it. ratio: None, that of the two numbers; given where it was measured in pairs."""
        if ratio is None and other is not None:
            ratio = other / ours if less_is_better else ours / other
        row = Row(work, ours, unit, less_is_better, against, other, ratio, goal, goal_of)
        self.rows.append(row)
        print(row.render(), flush=True)

    def write(self) -> None:
        """Write the file, where one was asked for. Raises: OSError."""
        if self._file is not None:
            rows = [asdict(row) for row in self.rows]
            content = {"benchmark": Path(sys.argv[0]).stem, "quick": self.quick, "rows": rows}
            self._file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
