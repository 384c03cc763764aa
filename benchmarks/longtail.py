"""How full an engine's slots are when a few responses are ten times as long as the others.

    OMP_NUM_THREADS=1 python benchmarks/longtail.py [--in-flight 32,512] [--engines 1,4,16] [--refills 20]
                                                    [--staleness 16] [--no-model] [--quick] [--json FILE]

Whole runs on a local Dask cluster, with a trainer that takes no time and publishes a version after each step. Lengths
are lognormal (median 800, sigma 1, cut off at 16,384), lengths and time scaled down; a step has as many rollouts as are
in flight, slots of an engine = in flight / engines. Measured, from the first response to the moment at which the last
one enters an engine: tokens generated / (slots x time x tokens/s of a slot), which is 1 where no slot is ever empty.

- the simulated engine, which decodes as fast however many are under way, against the bare engine, which is given the
  next request as soon as a slot is free: style fully_async, with weights that load in flight and with weights that
  load when the bound of staleness asks for newer ones; and style fixed, whose units do not overlap;
- a small model in the transformers engine, without a trainer: the share of the slots' time with a response, which is
  the same where all slots are equally quick, and tokens/s, against the bare engine with such lengths.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import longtail_parts
from longtail_parts import TRACE, TracedSimulation, TracedTransformers, lengths
from report import Report, make_parser
from simulated import STEP_S

from rftdask import Experiment
from rftdask.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from rftdask.models.toy import build_toy_model

MEDIAN, SIGMA, LONGEST = 800, 1.0, 16_384
"""Parameters of the lengths of responses, as those of a reasoning model."""
SCALE = 10
"""Lengths are divided by it."""
MODEL_SCALE = 50
"""Divisor of the lengths for the real model, which computes each token."""
REPEAT_TIMES = 8
"""Rollouts per task, limited to the slots of an engine."""
IN_FLIGHT, ASYNC, FIXED = "fully_async (load_in_flight)", "fully_async", "fixed"
"""Measured variants; the first word is the style."""
ROLLOUTS_PER_S, ENGINES_PER_S = 200, 5
"""Upper limits for all simulated engines together that two cores can roll out and commit: rollouts, and engines whose
slots are all refilled once.
"""


def shape(scale: int) -> dict[str, float]:
    return {"median": MEDIAN / scale, "sigma": SIGMA, "longest": LONGEST // scale}


def mean_length(scale: int) -> float:
    return sum(lengths((0,), 100_000, **shape(scale))) / 100_000


def roll_out(root: Path, engine: str, in_flight: int, engines: int, style: str, refills: int, staleness: int,
             scale: int, step_s: float) -> tuple[float, float, float]:  # fmt: skip
    """Run once. Returns tokens per second of a slot while slots were refilled, the share of the slots' time with a
    response, and the occupancy reported by the run.
    """
    trace = root / f"trace-{time.time_ns()}"
    trace.mkdir()
    tasks = root / f"tasks-{scale}.jsonl"
    tasks.write_text(
        "".join(json.dumps({"prompt": f"{i}=", "response": "1", **shape(scale)}) + "\n" for i in range(64))
    )
    model = root / "model"
    if engine == "TracedTransformers" and not model.exists():
        build_toy_model(model, hidden_size=64, intermediate_size=128, num_heads=2)
    slots = in_flight // engines
    repeat_times = min(REPEAT_TIMES, slots)
    tree: dict[str, Any] = {
        "name": f"longtail-{time.time_ns()}",
        # The trainer that takes no time publishes data that is not the weights of a model.
        "mode": "both" if engine == "TracedSimulation" else "explore",
        "checkpoint_root_dir": str(root / "runs"),
        "model": {"model_path": str(model), "max_prompt_tokens": 16, "max_response_tokens": LONGEST // scale},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": repeat_times, "kl_loss_fn": "none"},
        "buffer": {
            "batch_size": in_flight // repeat_times,
            "total_steps": refills,
            "explorer_input": {
                "taskset": {"path": str(tasks), "format": {"prompt_type": "raw"}},
                "default_workflow_type": "longtail",
            },
        },
        "explorer": {
            "tasks_per_batch": slots // repeat_times,
            "slots_per_engine": slots,
            "rollout_model": {"engine_type": f"longtail_parts.{engine}", "engine_num": engines},
            "plugin_dirs": [str(Path(longtail_parts.__file__).parent)],
            "env_vars": {TRACE: str(trace), STEP_S: repr(step_s)},
        },
        "cluster": {"num_cpus": engines + 1},
        "trainer": {"trainer_type": "fake", "save_interval": 10 * refills},
        "synchronizer": {
            "sync_style": style.partition(" ")[0],
            **({} if style == FIXED else {"max_staleness": staleness, "load_in_flight": style == IN_FLIGHT}),
        },
        "monitor": {"monitor_type": "none"},
        "log": {"level": "WARNING"},
    }  # fmt: skip
    experiment = Experiment(**tree)
    experiment.run("none")
    metrics = experiment.metrics("explorer")
    occupancy = float(metrics["occupancy"].iloc[: max(1, refills // 2)].mean())
    return *read_trace(trace, in_flight, refills), occupancy


def read_trace(trace: Path, in_flight: int, refills: int) -> tuple[float, float]:
    """Return (tokens per second of a slot, share of the slots' time with a response) until the last response
    entered.
    """
    rows = [tuple(map(float, line.split())) for file in trace.glob("*.txt") for line in file.read_text().splitlines()]
    # Engines answer a few short requests at their start; the last rows are those of the run.
    rows = sorted(rows)[-in_flight * refills :]
    first, last = rows[0][0], max(entered for entered, _, _ in rows)
    # A response that ends later counts for the part that was generated by then.
    tokens = sum(num * (min(left, last) - entered) / max(1e-9, left - entered) for entered, left, num in rows)
    busy_s = sum(min(left, last) - entered for entered, left, _ in rows)
    time_s = in_flight * (last - first)
    return tokens / time_s, busy_s / time_s


def bare(root: Path, engine: Engine, slots: int, count: int, scale: int) -> float:
    """Return the tokens per second of one engine that gets the next request as soon as a slot is free."""
    trace = root / f"trace-bare-{time.time_ns()}"
    trace.mkdir()
    os.environ[TRACE] = str(trace)
    waiting = deque(enumerate(lengths((1,), count, **shape(scale))))
    free = slots

    def take() -> list[tuple[int, GenerateRequest | None]]:
        nonlocal free
        taken: list[tuple[int, GenerateRequest | None]] = []
        while free and waiting:
            number, length = waiting.popleft()
            sampling = SamplingParams(max_tokens=length, min_tokens=length)
            taken.append((number, GenerateRequest((1, 2, 3), sampling, seed=number)))
            free -= 1
        return taken

    def give(number: int, generation: Generation) -> None:
        nonlocal free
        free += 1

    engine.serve(take, give)
    return read_trace(trace, slots, count // slots)[0]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--in-flight", default="32,512", help="rollouts under way, over all engines")
    parser.add_argument("--engines", default="1,4,16")
    parser.add_argument("--refills", type=int, default=20, help="rollouts of a run, as a multiple of those in flight")
    parser.add_argument("--staleness", type=int, default=16, help="synchronizer.max_staleness of style fully_async")
    parser.add_argument("--no-model", action="store_true", help="only the simulated engine")
    args = parser.parse_args()
    report = Report(args)
    cases = [(n, e) for n in map(int, args.in_flight.split(",")) for e in map(int, args.engines.split(","))]
    refills = args.refills
    if args.quick:
        cases, refills = [(16, 2)], 2
    with tempfile.TemporaryDirectory(prefix="rftdask-longtail-") as folder:
        root = Path(folder)
        for in_flight, engines in cases:
            # On average a rollout takes one second, or as long as the machine needs for this many.
            bare_step_s = (0.2 if args.quick else 1.0) / mean_length(SCALE)
            refill_s = max(in_flight / ROLLOUTS_PER_S, engines / ENGINES_PER_S)
            step_s = max(bare_step_s, refill_s / mean_length(SCALE))
            os.environ[STEP_S] = repr(bare_step_s)
            slots = in_flight // engines
            floor = bare(root, TracedSimulation(), slots, slots * refills, SCALE) * bare_step_s
            what = f"{in_flight} in flight, {engines} engines x {slots} slots"
            # Each case is a whole run; with --quick most of its time is the start.
            for style, goal in ((IN_FLIGHT, 0.85), *(() if args.quick else ((ASYNC, 0.85), (FIXED, None)))):
                # Lock-step wastes most of its time, so a few steps are enough.
                steps = refills if goal else max(2, refills // 10)
                rate, _, occupancy = roll_out(
                    root, "TracedSimulation", in_flight, engines, style, steps, args.staleness, SCALE, step_s
                )
                report.add(
                    f"{what}, {style}", rate * step_s, "occupancy", against="the bare engine", other=floor, goal=goal
                )
                print(f"    according to its metrics: {occupancy:.2f}")
        if not args.no_model:
            in_flight, count, scale = (8, 16, LONGEST // 16) if args.quick else (32, 32 * refills, MODEL_SCALE)
            build_toy_model(root / "model", hidden_size=64, intermediate_size=128, num_heads=2)
            engine = TracedTransformers(str(root / "model"))
            floor = in_flight * bare(root, engine, in_flight, count, scale)
            for style, goal in ((ASYNC, 0.85), *(() if args.quick else ((FIXED, None),))):
                rate, busy, occupancy = roll_out(
                    root, "TracedTransformers", in_flight, 1, style, count // in_flight, args.staleness, scale, 0
                )
                what = f"a small model, {in_flight} in flight, {style}"
                report.add(what, busy, "occupancy", goal=goal)
                report.add(what, in_flight * rate, "tokens/s", against="the bare engine", other=floor)
                print(f"    according to its metrics: {occupancy:.2f}")
    report.write()


if __name__ == "__main__":
    main()
