"""`rftdask replay` trains the batches of a run again; `rftdask skip` leaves out a batch that cannot be trained.

    rftdask replay RUN --from 20                                  # unchanged: the weights must be bit-equal
    rftdask replay RUN --from 20 --lineage half-lr algorithm.optimizer.lr=5e-7
    rftdask skip RUN 7 --because "its shard was on the disk that died"

A replay writes a new lineage, the run folder `RUN/lineages/<name>/`, which status, report and experiences accept like
any other. It trains on the experiences of the parent run and does not explore. Invariant: it does not change the run.

A skip records a step without training, so later steps keep their numbers and batches. Invariant: steps in a checkpoint
stay trained, and no remaining weights were trained on a skipped batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from rftdask.buffer.batches.ledger import (
    LINEAGES,
    Ledger,
    LedgerEntry,
    Parent,
    lineage_of,
    parent_storage,
    read_parent,
    record_parent,
)
from rftdask.buffer.log import open_log
from rftdask.cli.common import Progress, Run, say
from rftdask.cluster.base import plan_cluster
from rftdask.cluster.layout import TRAINER_RESOURCE
from rftdask.config import Config, load_config
from rftdask.config.plan import plan_work
from rftdask.driver.experiment import Experiment
from rftdask.driver.preflight import check_inputs
from rftdask.errors import DataError, FencedError, RoleError, UserError
from rftdask.monitor.progress import ViewKind
from rftdask.reports.run_reader import StageReader
from rftdask.run.lease import Lease
from rftdask.run.run_folder import read_run, read_run_config
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.manifest import NAME, is_valid, read_file, read_manifest, remove_folder, write_folder
from rftdask.synchronizer.published import published_versions, weights_folder
from rftdask.trainer.checkpoint import HF_FOLDER, STATE_FILE, checkpoint_folder, checkpoint_steps

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAY_CHANGE = ("algorithm", "model", "trainer", "seed", "deterministic", "cluster", "monitor", "log")
"""Config sections that control how and where a batch is trained; the others control which batches exist."""
_MAX_REASON_CHARS = 200
"""Limit of a skip's reason, which is shown in one line with each row."""


def replay(
    run: Run,
    step: Annotated[
        int, typer.Option("--from", metavar="STEP", help="Checkpoint step to start from (0: initial model)")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changed training settings: algorithm.optimizer.lr=5e-7"),
    ] = None,
    lineage: Annotated[str, typer.Option(metavar="NAME", help="Name of the new lineage; required with KEY=VALUE")] = "",
    progress: Progress = "auto",
) -> None:
    """Train the recorded batches of a run again.

    It trains the steps after STEP from the ledger, into RUN/lineages/NAME. Without changed settings, the weights must
    be bit-equal at the end (exit code 1 if not).
    """
    folder, comparison = replay_run(run, step, lineage, overrides or [], progress)  # type: ignore[arg-type]
    say(folder)
    say(comparison.render())


def skip(
    run: Run,
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="Step whose batch cannot be trained")],
    because: Annotated[str, typer.Option(metavar="WHY", help="Reason, for later readers of the run")],
) -> None:
    """Skip a recorded batch that cannot be trained.

    The run records the skip with its reason, and continues after the batch.
    """
    entry = skip_step(run, step, because)
    # Only the rows of the skipped batch: the entry also has rows that were dropped when the batch was formed.
    num_rows = sum(len(rows.rows) for rows in entry.drop if rows.reason.startswith("skipped"))
    say(f"skipped step {step} with {num_rows} rows; run the same command again to continue the run")


@dataclass(frozen=True)
class Comparison:
    """Comparison of two lineages at the newest step with a checkpoint in both."""

    lineage: str
    """Name of the other lineage."""
    step: int | None
    """None: no such step exists."""
    differing: tuple[str, ...] = ()
    """Files of weights and optimizer state that differ."""

    @property
    def is_equal(self) -> bool:
        """True if every file of weights and optimizer state has the same bytes."""
        return self.step is not None and not self.differing

    def render(self) -> str:
        """Return one line for a terminal."""
        if self.step is None:
            return f"no checkpoint to compare with lineage {self.lineage}"
        if self.is_equal:
            return f"bit-equal with lineage {self.lineage} at step {self.step}"
        return f"not equal to lineage {self.lineage} at step {self.step}: {', '.join(self.differing)}"


def replay_run(
    url: str, step: int, name: str = "", overrides: Sequence[str] = (), progress: ViewKind = "auto"
) -> tuple[str, Comparison]:
    """Train again what the run at `url` trained after `step`, or continue such a replay.

    Args:
        name: name of the lineage. "": `from-<step>`, for a replay without changed settings.
        overrides: "key=value" settings of the sections that control how batches are trained.
    Returns: the folder of the lineage, and its comparison with the run.
    Raises: UserError: before anything starts; RoleError: no setting was changed, and the weights differ; others as
        `Experiment.run`.
    """
    config, storage = prepare(url, step, name, overrides)
    summary = Experiment(config).run(progress)
    if summary.status != "finished":
        raise RoleError(f"the replay was stopped; the same command continues it in {storage.url}")
    comparison = compare(parent_storage(storage), storage)
    if not overrides and comparison.step is not None and not comparison.is_equal:
        raise RoleError(f"{comparison.render()}; compare the machine, its number of cores and the versions in run.json")
    return storage.url, comparison


def prepare(url: str, step: int, name: str = "", overrides: Sequence[str] = ()) -> tuple[Config, Storage]:
    """Return config and folder of a lineage that begins at the checkpoint of `step`, creating it if necessary."""
    storage = open_storage(url)
    parent_config = read_run_config(storage)
    if parent_config.stages:
        names = ", ".join(stage.name.rpartition("/")[2] for stage in parent_config.stage_configs())
        raise UserError(f"{storage.url} has stages; replay one of them: {storage.url}/<stage>, of {names}")
    if overrides and not name:
        raise UserError("a replay with changed settings needs its own name; add --lineage NAME")
    # The default name depends only on the step, so the same command continues the same replay.
    name = name or f"from-{step}"
    ledger = Ledger(storage, lineage_of(storage))
    if not _NAME.fullmatch(name) or name == ledger.lineage:
        raise UserError(f"--lineage {name!r}: take a new name of letters, digits, '.', '_' and '-'")
    last = ledger.last_step()
    if not 0 <= step < last:
        raise UserError(f"--from {step}: {storage.url} has trained steps 1 to {last}; start below {last}")
    if step and not is_valid(storage, checkpoint_folder(step)):
        steps = ", ".join(map(str, [0, *(s for s in checkpoint_steps(storage) if s < last)]))
        raise DataError(f"--from {step}: {storage.url} has no checkpoint of that step; use one of {steps}")
    removed = {shard.text for shard in open_log(storage, parent_config).removed()}  # by retention
    for needed in range(step + 1, last + 1) if removed else ():
        entry = ledger.read(needed)
        gone = [rows.source for rows in entry.use if rows.source in removed] if entry is not None else []
        if gone:
            raise DataError(
                f"--from: the experiences of step {needed} were removed ({gone[0]}; experience_buffer.retention); "
                "start at a later step"
            )
    target = open_storage(f"{storage.url.rstrip('/')}/{LINEAGES}/{name}")
    config = _config_of(parent_config, storage, name, last, overrides)
    # Number of steps that the parent's learning rate schedule was planned with, if it depends on them.
    optimizer, planned_steps = parent_config.algorithm.optimizer, None
    warms_up = optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0
    if optimizer.lr_scheduler_type != "constant" or warms_up:
        planned = plan_work(parent_config, check_inputs([parent_config])[0].sizes).train_steps
        planned_steps = parent_config.train_step_limit(planned) or planned
    _begin(storage, target, Parent(name, ledger.lineage, step, planned_steps))
    return config, target


def compare(theirs: Storage, ours: Storage) -> Comparison:
    """Compare weights and optimizer state of the newest step with a checkpoint in both storages."""
    parent = read_parent(ours)
    begin = 0 if parent is None else parent.step
    common = {step for step in checkpoint_steps(theirs) if step > begin}.intersection(checkpoint_steps(ours))
    # The newest first: if it is equal, all steps before it are equal.
    for step in sorted(common, reverse=True):
        folder = checkpoint_folder(step)
        if is_valid(theirs, folder) and is_valid(ours, folder):
            files = set[tuple[str, tuple[str, ...]]]()
            for storage in (theirs, ours):
                manifest = read_manifest(storage, folder)
                assert manifest is not None
                # Block hashes have the same meaning in all manifest versions. Equal entries cancel out.
                files ^= {(name, entry.blocks or (entry.sha256,)) for name, entry in manifest.files.items()}
            skip = (STATE_FILE, f"{HF_FOLDER}/")
            differing = {name for name, _ in files if not name.startswith(skip)}
            return Comparison(lineage_of(theirs), step, tuple(sorted(differing)))
    return Comparison(lineage_of(theirs), None)


def _config_of(parent: Config, storage: Storage, name: str, last: int, overrides: Sequence[str]) -> Config:
    """Return the parent's config changed to mode train, to the folder of the lineage, and to the parent's last step."""
    for override in overrides:
        section = override.partition("=")[0].split(".")[0]
        if section not in _MAY_CHANGE:
            raise UserError(
                f"{override}: a replay trains the recorded batches; change only keys of {', '.join(_MAY_CHANGE)}"
            )
    tree: dict[str, Any] = parent.to_dict()
    tree.update(mode="train", checkpoint_root_dir=storage.url, project=LINEAGES, group="", name=name)
    tree["trainer"]["total_steps"] = last  # the end of the parent's ledger
    # Explorers evaluate, and a replay has none.
    tree["buffer"]["explorer_input"]["eval_tasksets"] = []
    # The same ranks and threads as in the parent: sums in another order would give other bits.
    layout = plan_cluster(parent, [parent])
    threads = [worker.threads for worker in layout.workers if TRAINER_RESOURCE in worker.resources]
    tree["trainer"]["num_ranks"] = len(threads)
    tree["cluster"]["num_cpus"] = sum(threads)
    config = load_config(tree, overrides)
    if config.algorithm.schema_type != parent.algorithm.schema_type:
        raise UserError(
            f"algorithm.algorithm_type {config.algorithm.algorithm_type} cannot train on the rows of the parent's "
            f"{parent.algorithm.algorithm_type}; choose an algorithm with the same kind of rows"
        )
    return config


def _begin(storage: Storage, target: Storage, parent: Parent) -> None:
    """Create the folder of the lineage. Idempotent: a start that was killed is completed by the next."""
    if not record_parent(target, parent):
        recorded = read_parent(target)
        if recorded is None or (recorded.lineage, recorded.step) != (parent.lineage, parent.step):
            raise DataError(f"{target.url} is another lineage ({recorded}); choose another name")
    theirs, ours = Ledger(storage, parent.lineage), Ledger(target, parent.name)
    # Continues where an earlier start of the same replay was killed.
    for step in range(ours.last_step() + 1, parent.step + 1):
        entry = theirs.read(step)
        if entry is None:
            raise DataError(f"{storage.url}: the ledger of lineage {parent.lineage} lacks step {step}")
        # Copies earlier entries, so that the ledger of the lineage has no gap.
        ours.write(replace(entry, lineage=parent.name))
    # Last, so that an incomplete lineage has no checkpoint and the next start repeats this.
    if parent.step and not checkpoint_steps(target):
        folder = checkpoint_folder(parent.step)
        manifest = read_manifest(storage, folder)
        if manifest is None:
            raise FencedError(f"{storage.url}/{folder} was removed meanwhile; end the run before a replay")
        # read_file checks each hash: a lineage must not begin with a damaged checkpoint.
        files = {name: read_file(storage, folder, manifest, name) for name in manifest.files}
        write_folder(target, folder, replace(manifest, lineage=parent.name, version=parent.step, files={}), files)


def skip_step(url: str, step: int, because: str) -> LedgerEntry:
    """Record that the batch of `step` is never trained, and why. Returns: the entry as it is read from now on.

    Raises: UserError: the step has no batch, or is already trained or skipped; FencedError: the run is at work;
        DamagedError: the entry is damaged.
    """
    storage = open_storage(url)
    config = load_config(read_run(storage)["config"])
    if config.stages:
        names = ", ".join(stage.stage_name for stage in config.stages)
        raise UserError(f"{storage.url} has stages; skip a step of one of them: {storage.url}/<stage>, of {names}")
    if read_parent(storage) is not None:
        raise UserError(f"{storage.url} is a replay; skip the step in its parent, and replay under a new name")
    # One line, because it becomes the reason of every row of the batch.
    because = " ".join(because.split())
    if not because.isprintable() or not 0 < len(because) <= _MAX_REASON_CHARS:
        raise UserError(f"--because: give a reason of 1 to {_MAX_REASON_CHARS} printable characters")
    with Lease(storage, "trainer"):  # no trainer works on the run meanwhile
        ledger = StageReader(config, storage).ledger
        entry = ledger.read(step)
        if entry is None:
            raise UserError(f"{storage.url} has no batch of step {step}; its ledger ends at step {ledger.last_step()}")
        if step in ledger.skips:
            raise UserError(f"step {step} is already skipped: {ledger.skips[step]}")
        # Later checkpoints count too: their weights have learned from the batch.
        folders = [checkpoint_folder(number) for number in checkpoint_steps(storage) if number >= step]
        if trained := [folder for folder in folders if storage.exists(f"{folder}/{NAME}")]:
            raise UserError(f"step {step} is already trained: {storage.url}/{trained[0]} includes it, damaged or not")
        # Published weights that include the step would not be replaced when the step is repeated. They are removed
        # before the skip is recorded, so a kill in between leaves a run that publishes them again. The newest goes
        # first, because it may be a delta to older ones.
        for version in reversed(published_versions(storage)):
            if version >= step:
                remove_folder(storage, weights_folder(version))
        ledger.skip(step, because)
    return entry.skipped(because)
