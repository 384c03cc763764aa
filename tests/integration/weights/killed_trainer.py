"""A trainer that is killed with signal 9 at each of its durable writes, and its successor: a program of
`test_weight_methods.py` that imports everything once and forks the lives.

    python -m tests.integration.weights.killed_trainer CONFIG FOLDER ADDRESS FIRST EVERY

Each place has its own run, FOLDER/0, FOLDER/1 and so on. The first run is undisturbed and yields the list of places;
every EVERY-th place from FIRST on is tested. Machines follow the runs (`weight_parties.follow`) meanwhile. Followers
request versions beyond the pointer, so a resumed trainer must know on its own which versions were lost.
FOLDER/problems.json has the places and the problems at them.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.config import Config, load_config
from rftdask.errors import WaitTimeout
from rftdask.storage import open_storage
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.manifest import read_manifest
from rftdask.synchronizer.published import (
    WEIGHTS_POINTER,
    WHOLE_FILE,
    is_loadable,
    published_versions,
    read_pointer,
    read_requested_version,
)
from rftdask.testing.crashtest.kills import Life
from rftdask.testing.storage_faults import FaultyStorage, PlaceCounter, Stage
from rftdask.trainer.checkpoint import checkpoint_folder, checkpoint_steps
from rftdask.trainer.engines.fake import FakeTrainEngine
from rftdask.trainer.rank import build_holder
from tests.integration.weights.weight_parties import FOLLOWERS, NUM_VERSIONS, served_by
from tests.unit.trainer.trainer_cases import fill_log, make_trainer

SAVE_INTERVAL = 2
DEADLINE_S = 60.0


class FingerprintEngine(FakeTrainEngine):
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint, made from the content of the weights."""
        return Fingerprint(sequences=((3, 1, 4),), logprobs=((-self._digest[0] / 8, -1.0),), dtype="float32")


class FollowedEngine(FingerprintEngine):
    """Engine that waits for its machines before it trains on, so that each of them serves every version."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def train_step(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        deadline = time.monotonic() + DEADLINE_S
        for machine, first in FOLLOWERS.items():
            while step > first and served_by(self._folder, machine) < step - 1:
                if time.monotonic() > deadline:
                    raise WaitTimeout(f"{machine} did not serve version {step - 1}")
                time.sleep(0.005)
        return super().train_step(batch, step)


def train(config: Config, folder: Path, address: str, places: PlaceCounter) -> None:
    """Run one life of the trainer, from its newest checkpoint to the end of its log."""

    def pass_place(verb: str, path: str, stage: Stage) -> None:
        # The state before a write equals that after the previous one, except for the manifest of weights, before which
        # they are held in memory.
        if verb in ("put", "put_new") and (stage == "after" or re.fullmatch("weights/.*/MANIFEST.json", path)):
            places.at_verb(verb, path.replace(f"ledger/{folder.name}/", "ledger/"), stage)

    storage, answered = FaultyStorage(open_storage(folder), pass_place), 0

    def is_asked(version: int) -> int:
        nonlocal answered
        asked, before = read_requested_version(storage, WHOLE_FILE), answered
        answered = asked
        return asked if asked != before else 0

    make_trainer(
        storage,
        lineage=folder.name,
        engine=FollowedEngine(folder),
        save_interval=SAVE_INTERVAL,
        publish_due=lambda step, published: step > (read_pointer(storage, WEIGHTS_POINTER) or 0),
        whole_requested=is_asked,
        holder=None if config.sync_method == "checkpoint" else build_holder(config, storage, address),
    ).run()


def lost_versions(folder: Path) -> list[int]:
    """Return the versions that cannot be loaded or computed again after the death of their trainer."""
    storage = open_storage(folder)
    steps = checkpoint_steps(storage)
    saved = max((step for step in steps if read_manifest(storage, checkpoint_folder(step)) is not None), default=0)
    newest = read_pointer(storage, WEIGHTS_POINTER) or 0
    return [v for v in published_versions(storage) if v <= min(saved, newest) and not is_loadable(storage, v)]


def main(config_file: str, where: str, address: str, first: str, every: str) -> None:
    config, folder = load_config(config_file), Path(where)
    problems_by_place: dict[str, list[str]] = {}

    def live(number: int, place: str = "") -> Life:
        run = folder / str(number)

        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal is being delivered

        def work() -> None:
            places = PlaceCounter(place=place, act=die)
            train(config, run, address, places)
            (folder / f"places-{number}.json").write_text(json.dumps(places.places))

        return Life(work, folder)

    def begin(number: int) -> None:
        # At once, because the followers wait for the folder.
        made = folder / f"new-{number}"
        fill_log(open_storage(made), NUM_VERSIONS)
        made.rename(folder / str(number))

    def finish(number: int) -> list[str]:
        life = live(number)
        problems = [f"the trainer ended with {life.error()}"] if life.wait() else []
        storage = open_storage(folder / str(number))
        missing = [v for v in range(1, NUM_VERSIONS + 1) if not is_loadable(storage, v)]
        return problems + ([f"versions {missing} are not files at the end"] if missing else [])

    begin(0)
    problems_by_place["undisturbed"] = finish(0)
    places = json.loads((folder / "places-0.json").read_text())
    for number, place in enumerate(places[int(first) :: int(every)], 1):
        begin(number)
        life = live(number, place)
        problems = [] if life.wait() == -signal.SIGKILL else [f"it was not killed, and ended with {life.error()}"]
        if lost := lost_versions(folder / str(number)):
            problems.append(f"versions {lost} are lost")
        problems_by_place[place] = problems + finish(number)
    (folder / "problems.json").write_text(json.dumps(problems_by_place))


if __name__ == "__main__":
    main(*sys.argv[1:])
