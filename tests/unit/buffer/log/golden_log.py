"""Writes the golden log: a small run as this version stores it, for later versions to read.

    python tests/unit/buffer/log/golden_log.py tests/unit/buffer/log/golden/<schema version>

One folder per schema version, never changed after its release. It has a unit as one shard, one in two parts, a shard
that was removed by retention, and the ledger of five training steps.
"""

import sys

import numpy as np

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.retention import ResumePoint, apply_retention
from rftdask.buffer.log.schema import SCHEMA_VERSION, Experience, Status, Turn
from rftdask.buffer.log.shard import Part
from rftdask.config.schema.buffer import RetentionConfig
from rftdask.storage import open_storage
from tests.unit.buffer.buffer_cases import make_source, take


def rows(step: int, task: int, version: str = SCHEMA_VERSION) -> list[Experience]:
    """Two rollouts with every field set, the second one failed in task 5; the first is two turns in task 7, which 1.1
    has no column for, as 1.2 has none for the experts of task 7, 1.3 none for its images, and 1.4 none for the
    versions of its tokens and its session.
    """
    turns = (Turn(0, 0, 1, 0, 4, "user", 7, step - 1, step), Turn(1, 3, 4, 4, 8, "tool", 8, step, step, "attic", 0.5))
    starts = ((0, step - 1), (3, step))
    experts, fails = np.array([[0, 127], [3, 4], [5, 0], [299, 1], [7, 9]], np.int16), task == 5
    return [
        Experience(
            taskset="golden",
            epoch=0,
            task_index=task,
            rollout=rollout,
            explore_step=step,
            turn=0,
            attempt=rollout,
            status=Status.FAILED if fails and rollout else Status.TRUNCATED if rollout else Status.OK,
            tokens=() if fails and rollout else (1, 2, 151_935, task, rollout, 9),
            prompt_length=0 if fails and rollout else 2,
            rollout_logprobs=() if fails and rollout else (-0.5, -0.25, -17.125, 0.0),
            loss_mask=None if rollout else (True, False, False, True),
            reward=None if fails and rollout else task + rollout / 2,
            min_policy_version=step - 1,
            max_policy_version=step,
            weights_hash="9f3a61c2b07d4e55",
            temperature=0.5,
            top_p=0.75,
            top_k=20,
            seed=2**62 + task,
            prompt_text="Wie viel ist 1+1?",
            response_text="zwei \u00e9 \U0001f600",
            truth="2",
            error="RuntimeError: no reward" if fails and rollout else "",
            metrics={"accuracy": 1.0, "format": 0.125},
            env_state=f"room {task}" if rollout else None,
            turn_reward=0.5 if rollout else None,
            turns=turns if task == 7 and not rollout and version != "1.1" else None,
            routed_experts=experts if task == 7 and version not in ("1.1", "1.2") else None,
            images=("9f3a61c2",) if task == 7 and version not in ("1.1", "1.2", "1.3") else None,
            version_starts=starts if task == 7 and version not in ("1.1", "1.2", "1.3", "1.4") else None,
            session="ticket-4711" if task == 7 and version not in ("1.1", "1.2", "1.3", "1.4") else None,
        )
        for rollout in (0, 1)
    ]


def write(folder: str) -> None:
    """Explore steps of two tasks in one batch: 1 is removed again, 2 is whole, 3 is in two parts, of which 3 waits."""
    storage = open_storage(folder)
    log = ParquetLog(storage, run="golden")
    for step in (1, 2):
        log.commit([*rows(step, 2 * step), *rows(step, 2 * step + 1)], explore_step=step, unit=0)
    for slot in (1, 0):
        log.commit(rows(3, 6 + slot), explore_step=3, unit=0, part=Part((slot,), num_tasks=2))
    source = make_source(storage, groups_per_batch=1, tasks_per_step=2, tasks_per_batch=2)
    take(source, range(1, 6))
    apply_retention(storage, log, Ledger(storage), RetentionConfig(keep="none"), ResumePoint(2, 2))


if __name__ == "__main__":
    write(sys.argv[1])
