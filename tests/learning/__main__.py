"""Measure what algorithms learn: python -m tests.learning [NAME...] [--seeds 0,1,2] [--json FILE] [--markdown]."""

import argparse
import json
import statistics
from pathlib import Path

from tests.learning.cases import CASES, LONG, crossed, learn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; all of them if none is named")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/algorithms.md")
    parser.add_argument("--all", action="store_true", help="every metric, also those without a bound")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    named = set(args.names) or {case.name for case in CASES}
    cases = [case for case in (*CASES, LONG) if case.name in named]
    problems, numbers = [], []
    for case in cases:
        results = [learn(case, seed) for seed in seeds]
        problems += [
            f"seed {s}: {line}" for s, r in zip(seeds, results, strict=True) for line in crossed(case, r.after)
        ]
        for metric in results[0].after if args.all else case.bounds:
            before = [r.before[metric] for r in results if metric in r.before]
            after = [r.after[metric] for r in results]
            seconds = statistics.median(r.seconds for r in results)
            row = {"case": case.name, "metric": metric, "before": before, "after": after, "steps": case.steps}
            numbers.append(row | {"seeds": seeds, "seconds": seconds, "bound": case.bounds.get(metric)})
            cells = [case.name, metric, _span(before), _span(after), str(case.steps), f"{seconds:.1f}"]
            print(f"| {' | '.join(cells)} |" if args.markdown else "  ".join(cells), flush=True)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    print(*problems, sep="\n")
    return bool(problems)


def _span(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
