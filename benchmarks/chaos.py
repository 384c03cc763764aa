"""Chaos: kill processes of a run at random moments and check the result.

    python benchmarks/chaos.py [--slurm] [--kills 20] [--explorers 2] [--steps 300] [--every SECONDS] [--rollout-s 0.02]
                               [--ahead 1] [--seed 1] [--folder DIR] [--kinds KIND,...] [--model quickstart]
                               [--quick] [--json FILE]
    python benchmarks/chaos.py --until 10000 --folder DIR [--kills 20] [--steps 80] [--set KEY=VALUE ...] [...]

A run with a fake model and real processes, in style fixed, is executed twice: undisturbed, and while processes are
killed repeatedly with signal 9. Victims are an explorer worker, an engine, the trainer's rank, its worker (with the
synchronizer), and the driver, which is also the scheduler; this script restarts the driver with the same command, as a
batch system would. With `--slurm`, both runs are submitted to the SLURM of this machine with explorers on its partition
`spot`; explorer jobs are also preempted, requeued and cancelled, as are the jobs of trainer and controller, and this
script restarts nothing. With `--model quickstart` nothing is fake: the run is the GRPO stage of config/quickstart.yaml,
from the model of its first stage; steps take seconds, so use few of them (--steps 8 --kills 4). Kills happen after
fixed shares of the steps, so they do the same harm on a busy machine, or, with `--every`, after about that many
seconds.

The disturbed run must end with the same steps, the same ledger and the same bits of weights; the audit must find no
lost and no duplicated row; and the orphans of a killed local driver must end without help. Goodput is the wall time of
the undisturbed run divided by that of the disturbed run; with `--every`, also the number of steps until the last kill
divided by the steps of the undisturbed run in the same time. The exit code is 1 if anything differs.

With `--until`, runs with successive seeds are killed `--kills` times each, until there were that many kills in all.
Each kill waits until the run's files show a random phase. DIR/kills.jsonl has a line for each run; the same command
continues from it, and DIR keeps the folders of runs with a problem.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from chaos_configs import Tree, apply_settings, fake_tree, quickstart_tree, write_config
from chaos_runs import PHASES, SILENCE_S, LocalRun, Run, SlurmRun, phase_of, read_recoveries, render, wait_until
from report import Report, make_parser

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.shard import ShardName
from rftdask.storage import open_storage
from rftdask.storage.base import numbers_in


def draw(kinds: Sequence[str], kills: int, seed: int) -> list[str]:
    """Yield the kinds to kill, equally often, in a new random order each round."""
    rng = random.Random(seed)
    return [kind for _ in range(kills) for kind in rng.sample(kinds, len(kinds))][:kills]


def run_undisturbed(start: type[Run], config: Path) -> tuple[float, Run]:
    began = time.monotonic()
    run = start(config)
    try:
        wait_until(lambda: run.ended() is not None, 10 * SILENCE_S, "the end of the undisturbed run", run.look_s)
        if problem := run.ended():
            raise SystemExit(f"the undisturbed run failed: {problem}")
        return time.monotonic() - began, run
    finally:
        run.close()


def run_disturbed(
    start: type[Run], config: Path, steps: int, kinds: list[str], every_s: float | None, seed: int
) -> tuple[float, Run]:
    """Return (wall seconds, the run with its strikes)."""
    rng = random.Random(seed)
    began = time.monotonic()
    run = start(config)
    try:
        for number, kind in enumerate(kinds, start=1):
            if every_s is None:
                # The steps after the last kill take longer than finding its victim on a busy machine.
                due = number * steps // (len(kinds) + 2)
                wait_until(partial(_has_done, run, due), 10 * SILENCE_S, f"step {due}", run.look_s)
            time.sleep(rng.uniform(0.5, 1.5) * every_s if every_s is not None else rng.uniform(0.0, 0.1))
            wait_until(partial(_strike, run, kind, rng), SILENCE_S, f"a living victim for {kind}", run.look_s)
            print(f"{time.monotonic() - began:6.1f} s  {kind} {run.strikes[-1].job_id}", flush=True)
            run.recover(kind)
        wait_until(lambda: run.ended() is not None, 10 * SILENCE_S, "the end of the disturbed run", run.look_s)
        if problem := run.ended():
            raise SystemExit(f"the disturbed run failed: {problem}")
        return time.monotonic() - began, run
    finally:
        run.close()


def _has_done(run: Run, step: int) -> bool:
    _check_lives(run)
    return (run.folder / "ledger" / "main" / f"{step:08d}.json").exists()


def _check_lives(run: Run) -> None:
    problem = run.ended()
    if problem:
        raise SystemExit(f"the disturbed run failed: {problem}\n{run.last_words()}")
    if problem is not None:
        raise SystemExit("the run ended before all kills; give it more --steps, or kill more often (--every)")


def _strike(run: Run, kind: str, rng: random.Random) -> bool:
    _check_lives(run)
    return run.strike(kind, rng)


# ---- many runs


PHASE_S = 2.0
"""Longest wait for a phase, which a killed process may delay."""
START_S = 3.0
"""Kills of a starting run come within this time."""


def kill_runs(folder: Path, tree: Tree, kinds: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Kill runs until there were `args.until` kills, with those of earlier calls. Returns: all problems."""
    results = folder / "kills.jsonl"
    records = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    undisturbed: Path | None = None
    before = file.read_text() if (file := folder / "undisturbed.yaml").exists() else ""
    plain = write_config(folder, "undisturbed", tree, args.steps, args.explorers, args.ahead, False)
    if before not in ("", plain.read_text()):
        plain.write_text(before)
        raise SystemExit(f"{folder} was begun with other options; repeat them, or name another --folder")
    while sum(len(record["kills"]) for record in records) < args.until:
        undisturbed = undisturbed or run_undisturbed(LocalRun, plain)[1].folder  # ends at once if it has ended before
        seed = 1 + max(numbers_in((path.name for path in folder.iterdir()), "seed-", ".yaml"), default=0)
        config = write_config(folder, f"seed-{seed}", tree, args.steps, args.explorers, args.ahead, False)
        began, run = time.monotonic(), LocalRun(config)
        try:
            kill_in_phases(run, draw(kinds, args.kills, seed), random.Random(seed))
            problems = [problem] if (problem := run.ended()) else check(run.folder, undisturbed, args.steps)
        except SystemExit as error:  # a deadline has passed
            problems = [str(error)]
        finally:
            run.close()
        kills, wall_s = [(strike.kind, strike.phase) for strike in run.strikes], time.monotonic() - began
        records.append({"seed": seed, "kills": kills, "problems": problems, "wall_s": wall_s})
        with results.open("a") as lines:
            lines.write(json.dumps(records[-1]) + "\n")
        if not problems:
            shutil.rmtree(run.folder)
            config.with_suffix(".log").unlink()
        print(f"seed {seed}: {len(kills)} kills in {wall_s:.0f} s; {problems or 'the same bits'}", flush=True)
    counts = Counter((name, phase) for record in records for kind, phase in record["kills"] for name in (kind, "total"))
    print(f"{'killed while':16}" + "".join(f"{phase:>12}" for phase in (*PHASES, "total")))
    for name in (*LocalRun.victims, "total"):
        row = [counts[name, phase] for phase in PHASES]
        print(f"{name:16}" + "".join(f"{number:12,}" for number in (*row, sum(row))))
    return [f"seed {record['seed']}: {problem}" for record in records for problem in record["problems"]]


def kill_in_phases(run: LocalRun, kinds: Sequence[str], rng: random.Random) -> None:
    """Kill one of each of `kinds` in turn, each in a random phase, and wait for the end of the run."""

    def has_started() -> bool:
        return phase_of(run.folder) != "starting" or run.ended() is not None

    for kind in kinds:
        # A run starts only after its driver was killed.
        if phase_of(run.folder) == "starting" and rng.random() < 0.5:
            phase = "starting"
            time.sleep(rng.uniform(0.0, START_S))
        else:
            phase = rng.choice(PHASES[1:])
            wait_until(has_started, SILENCE_S, "the end of the start", run.look_s)
        wait = partial(_wait_for_phase, run, phase)
        before = len(run.strikes)
        wait_until(partial(_has_struck_or_ended, run, kind, rng, wait), SILENCE_S, f"a living {kind}", run.look_s)
        if len(run.strikes) > before:  # a killed driver has ended, and is started again
            run.recover(kind)
    wait_until(lambda: run.ended() is not None, 10 * SILENCE_S, "the end of the run", run.look_s)


def _has_struck_or_ended(run: Run, kind: str, rng: random.Random, wait: Callable[[], object]) -> bool:
    return run.ended() is not None or run.strike(kind, rng, wait)


def _wait_for_phase(run: Run, phase: str) -> None:
    deadline = time.monotonic() + PHASE_S
    while phase_of(run.folder) != phase and run.ended() is None and time.monotonic() < deadline:
        time.sleep(0.003)


# ---- results of a run


def ledger_of(folder: Path) -> list[list[tuple[int, int, int, str]]]:
    """Return (explore step, work unit, row of the batch, reason) of every row of each step, sorted."""
    ledger, steps = Ledger(open_storage(folder)), []
    for step in range(1, ledger.last_step() + 1):
        entry, rows = ledger.read(step), []
        for part in (*entry.use, *entry.drop) if entry is not None else ():
            name = ShardName.try_parse(part.source)
            assert name is not None
            size = name.num_rows // len(name.part.slots) if name.part is not None else 0
            for row in part.rows:
                place = row if name.part is None else name.part.slots[row // size] * size + row % size
                rows.append((name.explore_step, name.unit, place, part.reason))
        steps.append(sorted(rows))
    return steps


def weights_of(folder: Path) -> bytes:
    step = int((folder / "latest_checkpointed_iteration.txt").read_text())
    return (folder / f"global_step_{step}" / "actor" / "model.safetensors").read_bytes()


def check(folder: Path, undisturbed: Path, steps: int) -> list[str]:
    """Return the problems of the disturbed run."""
    done = subprocess.run(
        [sys.executable, "-m", "rftdask", "status", str(folder), "--json"], capture_output=True, text=True
    )
    (status,) = json.loads(done.stdout)["stages"]
    counts = dict(status["experiences"])
    committed = counts.pop("committed")
    problems = [f"the audit says: {problem}" for problem in status["problems"]]
    if committed != sum(counts.values()):
        problems.append(f"{committed} experiences are committed, and {counts} accounted for")
    if status["step"] != steps:
        problems.append(f"{status['step']} steps were trained, not {steps}")
    mine, others = ledger_of(folder), ledger_of(undisturbed)
    used = Counter(row for step in mine for row in step if not row[3])
    if twice := [row for row, count in used.items() if count > 1]:
        problems.append(f"trained twice: {twice[:5]}")
    if lost := {row for step in others for row in step} - {row for step in mine for row in step}:
        problems.append(f"lost: {sorted(lost)[:5]}")
    if mine != others:
        problems.append("the ledger differs")
    if weights_of(folder) != weights_of(undisturbed):
        problems.append("the final weights differ")
    return problems


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--slurm", action="store_true", help="as jobs of the SLURM of this machine")
    parser.add_argument("--model", choices=("fake", "quickstart"), default="fake")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--until", type=int, default=None, help="kills in all, of many runs of --kills each; local")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of all runs")
    parser.add_argument("--kinds", default="", help="what to kill, separated by commas; without it, everything")
    parser.add_argument("--every", type=float, default=None, help="seconds between kills, on average")
    parser.add_argument("--explorers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--rollout-s", type=float, default=0.02, help="seconds of most rollouts; some take ten times as long"
    )
    parser.add_argument("--ahead", type=int, default=1, help="steps that explorers may be ahead of the trainer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument(
        "--local-reference", action="store_true", help="the undisturbed run is not on SLURM: no goodput"
    )
    args = parser.parse_args()
    report = Report(args)
    if args.quick:  # one kill of each kind that a local run has
        args.kills, args.steps, args.explorers = 5, 60, 1
    start: type[Run] = SlurmRun if args.slurm else LocalRun
    kinds = args.kinds.split(",") if args.kinds else start.victims
    if unknown := set(kinds) - set(start.victims):
        parser.error(f"--kinds {', '.join(sorted(unknown))}: there are {', '.join(start.victims)}")
    if args.until is not None and (args.slurm or args.folder is None):
        parser.error("--until needs --folder, where it continues, and runs without --slurm")
    reference = LocalRun if args.local_reference else start
    with tempfile.TemporaryDirectory(prefix="rftdask-chaos-") as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        real = args.model == "quickstart"
        tree = quickstart_tree(folder, args.explorers) if real else fake_tree(folder, args.explorers, args.rollout_s)
        apply_settings(tree, args.set)
        if args.until is not None:
            problems = kill_runs(folder, tree, kinds, args)
            report.add(f"problems after {args.until} kills", len(problems), "problems", less_is_better=True, goal=0)
            report.write()
            print("\n".join(problems))
            sys.exit(1 if problems else 0)
        plain, chaos = (
            write_config(folder, name, tree, args.steps, args.explorers, args.ahead, kind is SlurmRun)
            for name, kind in (("undisturbed", reference), ("chaos", start))
        )
        plain_s, other = run_undisturbed(reference, plain)
        chaos_s, run = run_disturbed(
            start, chaos, args.steps, draw(kinds, args.kills, args.seed), args.every, args.seed
        )
        problems = check(run.folder, folder / "runs" / "chaos" / "undisturbed", args.steps)
        killed = Counter(strike.kind for strike in run.strikes)
        counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(killed.items()))
        print(
            f"seed {args.seed}: {sum(killed.values())} kills ({counts}), one per {chaos_s / max(1, args.kills):.1f} s"
        )
        if reference is start:
            goal = 0.85 if args.every and not args.quick else None
            report.add(
                f"a run of {args.steps} steps with {args.kills} kills", chaos_s, "s", less_is_better=True,
                against="undisturbed", other=plain_s, goal=goal, goal_of="ratio",
            )  # fmt: skip
            window_s = run.strikes[-1].at - run.began_s
            # The undisturbed run may have ended before this time.
            share = min(1.0, plain_s / window_s)
            report.add(
                f"steps until the last kill, in {window_s:.0f} s", run.steps_within(window_s), "steps",
                against="undisturbed", other=max(1, round(other.steps_within(window_s) / share)),
            )  # fmt: skip
        if isinstance(run, LocalRun):
            report.add("orphans of a killed driver end within", run.orphans_s, "s", less_is_better=True)
        else:
            print(render(read_recoveries(run)))
    what = "lost, done twice or different in the end"
    report.add(what, len(problems), "problems", less_is_better=True, goal=0)
    report.write()
    print("\n".join(problems) or f"{args.steps} steps, 0 lost, 0 twice, the same ledger, the same bits of weights")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
