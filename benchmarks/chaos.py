"""Chaos: a run whose processes are killed at random moments, and what it comes to.

    python benchmarks/chaos.py [--kills 20] [--explorers 2] [--steps 300] [--every SECONDS] [--seed 1] [--folder DIR]

A run with a fake model and real processes, in style fixed, is made twice: undisturbed, and while something is killed
with signal 9 again and again: an explorer worker, an engine, the trainer's rank, its worker (with the synchronizer), or
the driver, which is also the scheduler; this script then starts the same command again, as a batch system would. A kill
comes each time that a share of the steps is done, so it does as much harm on a busy machine as on a quiet one; or, with
`--every`, after about so many seconds.

It must end with the same steps, the same ledger and the same bits of weights, the audit must find nothing lost and
nothing twice, and after each death of the driver its orphans must end by themselves. Goodput is the wall time of the
undisturbed run divided by that of the disturbed one. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import yaml

from rftdask.buffer.ledger import Ledger
from rftdask.buffer.shard import ShardName
from rftdask.storage import open_storage

MARK = "RFTDASK_CHAOS_RUN"
ENGINE, RANK = "rftdask.explorer.engines.host:serve", "rftdask.trainer.rank:serve"
VICTIMS = ("explorer worker", "engine", "trainer", "trainer worker", "driver")
ORPHANS_S = 120.0
"""In which the processes that a killed driver left behind must have ended."""
SILENCE_S = 300.0
"""A run that does nothing for so long has failed."""

WORKFLOW = """
import asyncio

async def long_tailed(task, model):
    answer = await model.generate(task.prompt)
    await asyncio.sleep(0.02 if task.index % 8 else 0.2)
    return float(len(answer.tokens) % 3)
"""


def write_config(folder: Path, name: str, steps: int, explorers: int) -> Path:
    (folder / "chaos_workflow.py").write_text(WORKFLOW)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(64)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt_type": "plaintext", "prompt_key": "question", "response_key": "answer"}
    tree = {
        "name": name,
        "project": "chaos",
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": "none", "max_prompt_tokens": 16, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "kl_loss_fn": "none"},
        "cluster": {"num_cpus": 1 + explorers},
        "buffer": {
            "batch_size": 4 * explorers,
            "total_epochs": 100_000,
            "explorer_input": {
                "taskset": {"path": str(folder / "tasks.jsonl"), "format": columns},
                "default_workflow_type": "chaos_workflow.long_tailed",
                "default_reward_fn_type": "exact_reward",
            },
        },
        "explorer": {"tasks_per_batch": 4, "rollout_model": {"engine_type": "fake", "engine_num": explorers}},
        "trainer": {"trainer_type": "fake", "total_steps": steps, "save_interval": 5, "max_restarts": 100_000},
        "synchronizer": {"sync_offset": 1},
        "monitor": {"monitor_type": "none"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Run:
    """`rftdask run CONFIG` and every process that comes of it."""

    def __init__(self, config: Path) -> None:
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(config.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._log = (config.parent / f"{config.stem}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rftdask.cli", "run", str(config), "--progress", "plain"],
            env={**os.environ, "PYTHONPATH": path, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def is_gone(self) -> bool:
        return not self.living()

    def victim(self, kind: str, rng: random.Random) -> psutil.Process | None:
        """A living process of the kind; None if there is none this moment."""
        if kind == "driver":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        target = RANK if kind.startswith("trainer") else ENGINE
        found = [process for process in self.living() if target in _command_line(process)]
        if not found:
            return None
        chosen = rng.choice(sorted(found, key=lambda process: process.pid))
        try:
            return chosen.parent() if kind.endswith("worker") else chosen
        except psutil.Error:
            return None

    def close(self) -> None:
        for process in self.living():
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait()
        self._log.close()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> float:
    """Seconds it took. Raises: SystemExit: it did not happen."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > deadline_s:
            raise SystemExit(f"{what} did not happen in {deadline_s:.0f} s")
        time.sleep(0.02)
    return time.monotonic() - began


def run_undisturbed(config: Path) -> float:
    began = time.monotonic()
    run = Run(config)
    try:
        wait_until(lambda: run.process.poll() is not None, 10 * SILENCE_S, "the end of the undisturbed run")
    finally:
        run.close()
    if run.process.returncode != 0:
        raise SystemExit(f"the undisturbed run failed: see {config.with_suffix('.log')}")
    return time.monotonic() - began


def run_disturbed(
    config: Path, steps: int, kills: int, every_s: float | None, seed: int
) -> tuple[float, Counter[str], float]:
    """(wall seconds, kills by victim, longest life of orphans)."""
    rng, killed, orphans_s = random.Random(seed), Counter[str](), 0.0
    began = time.monotonic()
    kinds = [kind for _ in range(kills) for kind in rng.sample(VICTIMS, len(VICTIMS))][:kills]
    folder = config.parent / "runs" / "chaos" / config.stem
    run = Run(config)
    try:
        for number, kind in enumerate(kinds, start=1):
            if every_s is None:
                due = number * steps // (kills + 1)
                wait_until(partial(_has_done, run, folder, due), 10 * SILENCE_S, f"step {due}")
            time.sleep(rng.uniform(0.5, 1.5) * every_s if every_s is not None else rng.uniform(0.0, 0.1))
            wait_until(partial(_kill, run, kind, rng), SILENCE_S, f"a living {kind}")
            killed[kind] += 1
            if kind == "driver":
                run.process.wait()
                orphans_s = max(orphans_s, wait_until(run.is_gone, ORPHANS_S, "the end of the orphans"))
                run.close()
                run = Run(config)
        wait_until(lambda: run.process.poll() is not None, 10 * SILENCE_S, "the end of the disturbed run")
        if run.process.returncode != 0:
            raise SystemExit(f"the disturbed run ended with {run.process.returncode}: see {config.with_suffix('.log')}")
        return time.monotonic() - began, killed, orphans_s
    finally:
        run.close()


def _has_done(run: Run, folder: Path, step: int) -> bool:
    _check_runs(run)
    return (folder / "ledger" / "main" / f"{step:08d}.json").exists()


def _check_runs(run: Run) -> None:
    if run.process.poll() is not None:
        raise SystemExit("the run ended before all kills; give it more --steps, or kill more often (--every)")


def _kill(run: Run, kind: str, rng: random.Random) -> bool:
    _check_runs(run)
    victim = run.victim(kind, rng)
    if victim is None:
        return False
    try:
        victim.kill()
    except psutil.Error:
        return False
    return True


# ---- what a run came to


def ledger_of(folder: Path) -> list[list[tuple[int, int, int, str]]]:
    """Of each step, (explore step, rollout batch, row of the batch, reason) of every row, sorted."""
    ledger, steps = Ledger(open_storage(folder)), []
    for step in range(1, ledger.last_step() + 1):
        entry, rows = ledger.read(step), []
        for part in (*entry.use, *entry.drop) if entry is not None else ():
            name = ShardName.try_parse(part.source)
            assert name is not None
            size = name.num_rows // len(name.part.slots) if name.part is not None else 0
            for row in part.rows:
                place = row if name.part is None else name.part.slots[row // size] * size + row % size
                rows.append((name.explore_step, name.batch, place, part.reason))
        steps.append(sorted(rows))
    return steps


def weights_of(folder: Path) -> bytes:
    step = int((folder / "latest_checkpointed_iteration.txt").read_text())
    return (folder / f"global_step_{step}" / "actor" / "model.safetensors").read_bytes()


def check(folder: Path, undisturbed: Path, steps: int) -> list[str]:
    """What is not as it should be."""
    done = subprocess.run(
        [sys.executable, "-m", "rftdask.cli", "status", str(folder), "--json"], capture_output=True, text=True
    )
    (status,) = json.loads(done.stdout)
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
        problems.append("the ledger is another one")
    if weights_of(folder) != weights_of(undisturbed):
        problems.append("the final weights are other ones")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=None, help="seconds between kills, on average")
    parser.add_argument("--explorers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rftdask-chaos-") as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        plain, chaos = (write_config(folder, name, args.steps, args.explorers) for name in ("undisturbed", "chaos"))
        plain_s = run_undisturbed(plain)
        chaos_s, killed, orphans_s = run_disturbed(chaos, args.steps, args.kills, args.every, args.seed)
        runs = folder / "runs" / "chaos"
        problems = check(runs / "chaos", runs / "undisturbed", args.steps)
    told = ", ".join(f"{count} x {kind}" for kind, count in sorted(killed.items()))
    print(f"seed {args.seed}: {sum(killed.values())} kills ({told}), one per {chaos_s / max(1, args.kills):.1f} s")
    print(f"undisturbed {plain_s:.1f} s, disturbed {chaos_s:.1f} s: goodput {plain_s / chaos_s:.0%}")
    print(f"orphans of a killed driver ended within {orphans_s:.1f} s")
    print("\n".join(problems) or f"{args.steps} steps, 0 lost, 0 twice, the same ledger, the same bits of weights")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
