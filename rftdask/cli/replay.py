"""Replay: train the batches of a run again, from its ledger, into a lineage of their own.

    rftdask replay RUN --from 20                                  # the same again: the weights must be the same bits
    rftdask replay RUN --from 20 --lineage half-lr algorithm.optimizer.lr=5e-7

A lineage is a run folder in the run, `RUN/lineages/<name>/`: status, report and experiences take it like any other.
Its explorers are the ones of the run, which ended; it only trains. Invariant: nothing of the run is changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.lineage import LINEAGES, Parent, lineage_of, parent_storage, read_parent, record_parent
from rftdask.buffer.log import open_log
from rftdask.cluster.base import plan_cluster
from rftdask.cluster.layout import TRAINER_RESOURCE
from rftdask.config import Config, load_config
from rftdask.config.plan import plan_work
from rftdask.driver.experiment import Experiment
from rftdask.driver.preflight import check_inputs
from rftdask.errors import DataError, FencedError, RoleError, UserError
from rftdask.monitor.progress import ViewKind
from rftdask.run.run_folder import read_run_config
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.manifest import is_valid, read_file, read_manifest, write_folder
from rftdask.trainer.checkpoint import HF_FOLDER, STATE_FILE, checkpoint_folder, checkpoint_steps

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAY_CHANGE = ("algorithm", "model", "trainer", "seed", "deterministic", "cluster", "monitor", "log")
"""Sections of the config that say how a batch is trained, and where; the others say which batches there are."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of two lineages at the newest step of which both have a checkpoint."""

    lineage: str
    """The other one."""
    step: int | None
    """None: there is no such step."""
    differing: tuple[str, ...] = ()
    """Files of weights and optimizer state that are not the same."""

    @property
    def is_equal(self) -> bool:
        """Whether every file of weights and optimizer state has the same bytes."""
        return self.step is not None and not self.differing

    def render(self) -> str:
        """One line for a terminal."""
        if self.step is None:
            return f"no checkpoint to compare with lineage {self.lineage}"
        if self.is_equal:
            return f"bit-equal with lineage {self.lineage} at step {self.step}"
        return f"not equal to lineage {self.lineage} at step {self.step}: {', '.join(self.differing)}"


def replay(
    url: str, step: int, name: str = "", overrides: Sequence[str] = (), progress: ViewKind = "auto"
) -> tuple[str, Comparison]:
    """Train again what the run at `url` trained after `step`, or go on with it; the new folder, and how it compares.

    Args:
        name: of the lineage; by default `from-<step>`, which is for training the same again.
        overrides: "key=value", of the sections that say how batches are trained.
    Raises: UserError: before anything starts; RoleError: nothing was changed, and the weights are not the same; others
        as `Experiment.run`.
    """
    config, storage = prepare(url, step, name, overrides)
    summary = Experiment(config).run(progress)
    if summary.status != "finished":
        raise RoleError(f"the replay was stopped; the same command continues it in {storage.url}")
    found = compare(parent_storage(storage), storage)
    if not overrides and found.step is not None and not found.is_equal:
        raise RoleError(found.render() + "; the machine, its number of cores or the versions in run.json may differ")
    return storage.url, found


def prepare(url: str, step: int, name: str = "", overrides: Sequence[str] = ()) -> tuple[Config, Storage]:
    """The config and the folder of a lineage that begins at the checkpoint of `step`, made unless it is there."""
    storage = open_storage(url)
    parent_config = read_run_config(storage)
    if parent_config.stages:
        names = ", ".join(stage.name.rpartition("/")[2] for stage in parent_config.stage_configs())
        raise UserError(f"{storage.url} has stages; replay one of them: {storage.url}/<stage>, of {names}")
    if overrides and not name:
        raise UserError("a replay with other settings needs a name of its own: --lineage NAME")
    # A name that follows from the step: the same command continues the same replay.
    name = name or f"from-{step}"
    ledger = Ledger(storage, lineage_of(storage))
    if not _NAME.fullmatch(name) or name == ledger.lineage:
        raise UserError(f"--lineage {name!r}: take a new name of letters, digits, '.', '_' and '-'")
    last = ledger.last_step()
    if not 0 <= step < last:
        raise UserError(f"--from {step}: {storage.url} has trained steps 1 to {last}; begin before one of them")
    if step and not is_valid(storage, checkpoint_folder(step)):
        there = ", ".join(map(str, [0, *(s for s in checkpoint_steps(storage) if s < last)]))
        raise DataError(f"--from {step}: {storage.url} has no checkpoint of that step; there are {there}")
    removed = {shard.text for shard in open_log(storage, parent_config).removed()}  # by retention
    for needed in range(step + 1, last + 1) if removed else ():
        entry = ledger.read(needed)
        gone = [rows.source for rows in entry.use if rows.source in removed] if entry is not None else []
        if gone:
            raise DataError(
                f"--from: the experiences of step {needed} were removed ({gone[0]}; experience_buffer.retention); "
                "begin at a later step"
            )
    target = open_storage(f"{storage.url.rstrip('/')}/{LINEAGES}/{name}")
    config = _config_of(parent_config, storage, name, last, overrides)
    # The steps that the parent's learning rate was planned with, if it depends on them.
    optimizer, steps = parent_config.algorithm.optimizer, None
    warms_up = optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0
    if optimizer.lr_scheduler_type != "constant" or warms_up:
        planned = plan_work(parent_config, check_inputs([parent_config])[0].sizes).train_steps
        steps = parent_config.train_step_limit(planned) or planned
    _begin(storage, target, Parent(name, ledger.lineage, step, steps))
    return config, target


def compare(theirs: Storage, ours: Storage) -> Comparison:
    """Compare weights and optimizer state of the newest step of which both have a checkpoint."""
    parent = read_parent(ours)
    begin = 0 if parent is None else parent.step
    common = {step for step in checkpoint_steps(theirs) if step > begin}.intersection(checkpoint_steps(ours))
    # The newest first: if the last step is the same, all before it were.
    for step in sorted(common, reverse=True):
        folder = checkpoint_folder(step)
        if is_valid(theirs, folder) and is_valid(ours, folder):
            files = set[tuple[str, tuple[str, ...]]]()
            for storage in (theirs, ours):
                manifest = read_manifest(storage, folder)
                assert manifest is not None
                # By the blocks, which mean the same in manifests of all versions. What stays is in one alone.
                files ^= {(name, entry.blocks or (entry.sha256,)) for name, entry in manifest.files.items()}
            skip = (STATE_FILE, f"{HF_FOLDER}/")
            differing = {name for name, _ in files if not name.startswith(skip)}
            return Comparison(lineage_of(theirs), step, tuple(sorted(differing)))
    return Comparison(lineage_of(theirs), None)


def _config_of(parent: Config, storage: Storage, name: str, last: int, overrides: Sequence[str]) -> Config:
    """The parent's config as a trainer's that ends where the parent did, in the folder of the lineage."""
    for override in overrides:
        section = override.partition("=")[0].split(".")[0]
        if section not in _MAY_CHANGE:
            raise UserError(
                f"{override}: a replay trains the batches that the ledger has; keys of {', '.join(_MAY_CHANGE)} may "
                "be changed"
            )
    tree: dict[str, Any] = parent.to_dict()
    tree.update(mode="train", checkpoint_root_dir=storage.url, project=LINEAGES, group="", name=name)
    # The parent's ledger ends there, and so does what can be trained again.
    tree["trainer"]["total_steps"] = last
    # Nobody explores beside it, so nobody would evaluate.
    tree["buffer"]["explorer_input"]["eval_tasksets"] = []
    # The ranks and threads that the trainer had beside the explorers: sums in another order would give other bits.
    layout = plan_cluster(parent, [parent])
    threads = [worker.threads for worker in layout.workers if TRAINER_RESOURCE in worker.resources]
    tree["trainer"]["num_ranks"] = len(threads)
    tree["cluster"]["num_cpus"] = sum(threads)
    config = load_config(tree, overrides)
    if config.algorithm.schema_type != parent.algorithm.schema_type:
        raise UserError(
            f"algorithm.algorithm_type: {config.algorithm.algorithm_type} learns from other rows than "
            f"{parent.algorithm.algorithm_type}, whose batches these are"
        )
    return config


def _begin(storage: Storage, target: Storage, parent: Parent) -> None:
    """Make the folder of the lineage; every step of it can be done again."""
    if not record_parent(target, parent):
        found = read_parent(target)
        if found is None or (found.lineage, found.step) != (parent.lineage, parent.step):
            raise DataError(f"{target.url} is another lineage ({found}); take another name")
    theirs, ours = Ledger(storage, parent.lineage), Ledger(target, parent.name)
    # From where an earlier start of the same replay was killed.
    for step in range(ours.last_step() + 1, parent.step + 1):
        entry = theirs.read(step)
        if entry is None:
            raise DataError(f"{storage.url}: the ledger of lineage {parent.lineage} lacks step {step}")
        # A copy of what came before, so that the lineage's own ledger has no gap.
        ours.write(replace(entry, lineage=parent.name))
    # Last: a lineage that was begun half has no checkpoint, and this is done again.
    if parent.step and not checkpoint_steps(target):
        folder = checkpoint_folder(parent.step)
        manifest = read_manifest(storage, folder)
        if manifest is None:
            raise FencedError(f"{storage.url}/{folder} was removed meanwhile: is the run still at work?")
        # Each file against its hash: a lineage must not begin with a damaged checkpoint.
        files = {name: read_file(storage, folder, manifest, name) for name in manifest.files}
        write_folder(target, folder, files, lineage=parent.name, version=parent.step, extra=manifest.extra)
