"""Skip: the way out of a batch that is written down and cannot be trained, such as one whose shard is lost.

    rftdask skip RUN 7 --because "its shard was on the disk that died"

Its step is made without training: later steps keep their numbers and their batches. Invariant: what a checkpoint has
trained stays trained, and what is skipped was trained by no weights that are left.
"""

from __future__ import annotations

from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.buffer.batches.lineage import read_parent
from rftdask.config import load_config
from rftdask.errors import UserError
from rftdask.reports.run_reader import StageReader
from rftdask.run.lease import Lease
from rftdask.run.run_folder import read_run
from rftdask.storage import open_storage
from rftdask.synchronizer.manifest import NAME, remove_folder
from rftdask.synchronizer.published import published_versions, weights_folder
from rftdask.trainer.checkpoint import checkpoint_folder, checkpoint_steps

_LONGEST = 200
"""Characters of a reason: it is shown in one line, with each row."""


def skip(url: str, step: int, because: str) -> LedgerEntry:
    """Settle that nobody trains the batch of `step`, and why; the entry as it is read from now on.

    Raises: UserError: the step has no batch, was trained or is skipped already; FencedError: the run is at work;
    DamagedError: its entry.
    """
    storage = open_storage(url)
    config = load_config(read_run(storage)["config"])
    if config.stages:
        names = ", ".join(stage.stage_name for stage in config.stages)
        raise UserError(f"{storage.url} has stages; skip a step of one of them: {storage.url}/<stage>, of {names}")
    if read_parent(storage) is not None:
        raise UserError(f"{storage.url} trains what its parent did; skip the step there, and replay under a new name")
    # One line: it becomes the reason of every row of the batch.
    because = " ".join(because.split())
    if not because.isprintable() or not 0 < len(because) <= _LONGEST:
        raise UserError(f"--because: say why in 1 to {_LONGEST} printable characters")
    with Lease(storage, "trainer"):  # nobody trains it meanwhile
        ledger = StageReader(config, storage).ledger
        entry = ledger.read(step)
        if entry is None:
            raise UserError(f"{storage.url} has no batch of step {step}: its ledger goes to {ledger.last_step()}")
        if step in ledger.skips:
            raise UserError(f"step {step} is skipped already: {ledger.skips[step]}")
        # Also later ones: their weights have learned from the batch.
        folders = [checkpoint_folder(number) for number in checkpoint_steps(storage) if number >= step]
        if trained := [folder for folder in folders if storage.exists(f"{folder}/{NAME}")]:
            raise UserError(f"step {step} is trained: {storage.url}/{trained[0]} has it, damaged or not")
        # Weights that have trained the step would stay what they are when it is made again. First: a kill after it
        # leaves a run that publishes them again.
        # The newest first: it may be made of those before it.
        for version in reversed(published_versions(storage)):
            if version >= step:
                remove_folder(storage, weights_folder(version))
        ledger.skip(step, because)
    return entry.skipped(because)
