"""Rows of a benchmark: printed as they are measured, written as JSON at the end.

    parser = make_parser(__doc__)             # --quick (--tiny for GPU benchmarks) and --json FILE
    report = Report(parser.parse_args())
    report.add("durable writes", 53_200, "experiences/s", against="pyarrow alone", other=67_000, goal=40_000)
    report.write()

FILE holds one object: benchmark, quick (true: fewer repeats, the numbers are not meaningful), and rows. A row:

    work      what was measured
    ours      the number, in `unit`
    against   name of the peer or floor that `other` belongs to; empty if none
    other     its number in the same unit, or null
    ratio     how many times better ours is: above 1 ours is better, whether more or less is better; or null
    goal      the goal of `goal_of` ("ours" or "ratio"), or null; a ratio must be at least as high, ours at least as
              high or, with `less_is_better`, at most as high
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
    """A row of the file."""

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
    text = "smoke test: little work, meaningless numbers"
    parser.add_argument(quick, action="store_true", dest="quick", help=text)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the rows to FILE")
    return parser


class Report:
    """Rows of one run of a benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """arguments: from a parser of `make_parser`."""
        self.rows: list[Row] = []
        self.quick: bool = arguments.quick
        """True with fewer repeats, whose numbers are not meaningful."""
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
        """Print a row and keep it. ratio: None: the ratio of the two numbers; pass it if it was measured in pairs."""
        if ratio is None and other is not None:
            ratio = other / ours if less_is_better else ours / other
        row = Row(work, ours, unit, less_is_better, against, other, ratio, goal, goal_of)
        self.rows.append(row)
        print(row.render(), flush=True)

    def write(self) -> None:
        """Write the file if one was requested. Raises: OSError."""
        if self._file is not None:
            rows = [asdict(row) for row in self.rows]
            content = {"benchmark": Path(sys.argv[0]).stem, "quick": self.quick, "rows": rows}
            self._file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
