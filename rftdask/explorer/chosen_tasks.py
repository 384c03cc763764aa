"""Choices: which tasks an explore step runs, where that is learned and no function of its number; one file a step.

`schedule/<step>.json` is created only once, before the step is run. If it exists, that is the choice for ever: a
resumed explorer replays it. Knows nothing of how the tasks were chosen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rftdask.data.task_schedule import TaskRef
from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage


class Choices:
    """The choices of one run.

    Example: tasks = choices.read(7) or choices.settle(7, chosen, learned_from=5)
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def path(self, step: int) -> str:
        return f"schedule/{step:08d}.json"

    def read(self, step: int) -> list[TaskRef] | None:
        """The tasks of `step`, or None if they are not chosen yet. Raises: DamagedError: the file cannot be read; it is
        never guessed, for some of its tasks may have been run.
        """
        try:
            data = self._storage.get(self.path(step))
        except NotFoundError:
            return None
        try:
            tree = json.loads(data)
            tasks = [TaskRef(int(taskset), int(epoch), int(index)) for taskset, epoch, index in tree["tasks"]]
            written_for = int(tree["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{self.path(step)} is damaged ({error}); restore it from a backup") from error
        if written_for != step:
            raise DamagedError(f"{self.path(step)} is of step {written_for}: files were moved")
        return tasks

    def settle(self, step: int, tasks: Sequence[TaskRef], *, learned_from: int) -> list[TaskRef]:
        """Write the choice down; the tasks of the step, which are others if it was settled before.

        Args: learned_from: last explore step whose results had a part in the choice.
        """
        rows = [(task.taskset_number, task.epoch, task.index) for task in tasks]
        tree = {"step": step, "learned_from": learned_from, "tasks": rows}
        self._storage.put_new(self.path(step), json.dumps(tree).encode())
        settled = self.read(step)
        if settled is None:
            raise DamagedError(f"{self.path(step)} was removed while the run was at work; start it again")
        return settled
