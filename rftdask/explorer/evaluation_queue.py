"""EvalAgenda: which versions are to be evaluated on which tasksets, which have been, and the batches that wait.

It does not know workers: the explorer takes batches from it and says what has ended. Invariant: an evaluation is
recorded once all of its batches are on storage, from what is there, so that one resumed half-way counts whole.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from rftdask.buffer.log import open_log
from rftdask.config import Config
from rftdask.data.task_schedule import TaskRef
from rftdask.explorer.evaluation import EvalTaskset, evaluation_metrics
from rftdask.explorer.worker_task import RolloutSpec
from rftdask.storage import Storage
from rftdask.synchronizer.styles import Admission, make_sync_rules
from rftdask.weights.published import published_versions

MakeSpec = Callable[[str, int, int, list[TaskRef], int, Admission], RolloutSpec]
"""Of (folder, version, batch, tasks, repeat_times, admission)."""
Record = Callable[[str, int, Mapping[str, float]], None]
"""Of (taskset, version, metrics)."""


class EvalAgenda:
    """Example: agenda.add_due(newest=8, ended_at=None); spec = agenda.take(); ...; agenda.finished(spec)"""

    def __init__(
        self,
        storage: Storage,
        config: Config,
        tasksets: Sequence[EvalTaskset],
        versions: Sequence[int],
        make_spec: MakeSpec,
        record: Record,
    ) -> None:
        """versions: those to evaluate whatever is published (bench); none: by `explorer.eval_interval`."""
        self._storage = storage
        self._config = config
        self._tasksets = tasksets
        self._versions = versions
        self._make_spec = make_spec
        self._record = record
        self._step = math.lcm(config.explorer.eval_interval, make_sync_rules(config).trainer_sync_interval)
        # As many rollouts as a training batch has, so that evaluating needs no more memory.
        self._num_rollouts = config.tasks_per_unit * config.algorithm.repeat_times
        self._done: set[tuple[int, int]] = set()
        self._to_go: dict[tuple[int, int], int] = {}
        """Batches under way or waiting, by version and number of the taskset."""
        self._waiting: deque[RolloutSpec] = deque()
        self._oldest = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def read(self) -> None:
        """Find what was evaluated before; older versions whose weights are gone stay as they are."""
        self._oldest = min(published_versions(self._storage), default=0)
        for taskset in self._tasksets:
            batches = -(-taskset.size // self._per_batch(taskset))
            found: dict[int, set[int]] = {}
            for name in open_log(self._storage, self._config, f"eval/{taskset.name}").shards(0):
                found.setdefault(name.explore_step, set()).add(name.batch)
            whole = sorted(version for version, parts in found.items() if len(parts) == batches)
            self._done.update((version, taskset.number) for version in whole)
            for version in whole:
                if version in self._versions:
                    self._read_back(taskset, version)  # bench reports also what was evaluated before

    def add_due(self, newest: int, ended_at: int | None) -> None:
        """Let the batches of the evaluations wait that can run now and have not.

        Args: newest: version that is published; ended_at: the last there will be, if that is known.
        """
        for version, taskset in list(self._due(newest, ended_at)):
            refs = [TaskRef(taskset.number, 0, index) for index in range(taskset.size)]
            size = self._per_batch(taskset)
            batches = -(-taskset.size // size)
            self._to_go[version, taskset.number] = batches
            for batch in range(batches):
                part = refs[batch * size : (batch + 1) * size]
                admission = Admission(version, exact=True)
                spec = self._make_spec(f"eval/{taskset.name}", version, batch, part, taskset.repeat_times, admission)
                self._waiting.append(spec)

    def take(self) -> RolloutSpec:
        """The first of the waiting. Raises: IndexError: none waits."""
        return self._waiting.popleft()

    def finished(self, spec: RolloutSpec) -> bool:
        """A batch is on storage; whether it was the last of its evaluation, which is recorded then."""
        taskset = next(t for t in self._tasksets if f"eval/{t.name}" == spec.folder)
        key = (spec.explore_step, taskset.number)
        self._to_go[key] -= 1
        if self._to_go[key]:
            return False
        del self._to_go[key]
        self._done.add(key)
        self._read_back(taskset, spec.explore_step)
        return True

    def is_empty(self, newest: int, ended_at: int | None) -> bool:
        """Whether nothing waits or is due."""
        return not self._waiting and next(self._due(newest, ended_at), None) is None

    def versions_in_use(self, newest: int, ended_at: int | None) -> list[int]:
        """Whose weights batches that are not under way will need."""
        return [spec.version for spec in self._waiting] + [version for version, _ in self._due(newest, ended_at)]

    def _due(self, newest: int, ended_at: int | None) -> Iterator[tuple[int, EvalTaskset]]:
        for version in self._known_versions(newest, ended_at):
            for taskset in self._tasksets:
                key = (version, taskset.number)
                if key not in self._done and key not in self._to_go:
                    yield version, taskset

    def _known_versions(self, newest: int, ended_at: int | None) -> Sequence[int]:
        if self._versions:
            return self._versions
        versions = [0] if self._config.explorer.eval_on_startup else []
        if self._config.mode != "both":
            return versions
        versions.extend(range(-(-self._oldest // self._step) * self._step or self._step, newest + 1, self._step))
        if ended_at and ended_at not in versions:
            versions.append(ended_at)
        return versions

    def _per_batch(self, taskset: EvalTaskset) -> int:
        return max(1, self._num_rollouts // taskset.repeat_times)

    def _read_back(self, taskset: EvalTaskset, version: int) -> None:
        log = open_log(self._storage, self._config, f"eval/{taskset.name}")
        self._record(taskset.name, version, evaluation_metrics(log, version))
