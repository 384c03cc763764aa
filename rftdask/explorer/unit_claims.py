"""Claims of work units, by which explorers of one run with different names divide the units among them.

    control/claims/<explore step>-<unit>-<n>.json    names the lease of the explorer that works on the unit

An explorer takes a claim before it sends a unit to a worker, by a create-only put, and removes it after the unit is
committed. A claim holds as long as the lease that it names. If an explorer died or ended, the next one takes its claim
over with the next number. Only the log records that a unit is done. A claim that is lost or held twice costs one unit
that is rolled out twice.

An explorer without a name expects no other explorer. While it sees none it keeps its claims in memory, without cost on
storage, and writes them as soon as it sees one. Units that the other explorer takes before that run twice.

Invariant: except for that case, a unit without a claim was not begun, or its shards are durable.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass

from rftdask.errors import NotFoundError
from rftdask.run.lease import Lease, LeaseWatch
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_object

Unit = tuple[int, int]
"""(explore step, unit_index) of a work unit of training."""
EVALUATIONS: Unit = (0, 0)
"""Claim of the explorer that makes the evaluations of the run, until it ends. Explore steps begin at 1."""
_FOLDER = "control/claims"
_NAME = re.compile(r"([0-9]{8,15})-([0-9]{4,15})-([0-9]{1,15})\.json")
_POLL_INTERVAL_S = 1.0
"""Seconds between reads of the claims of other explorers."""


@dataclass(frozen=True)
class _Claim:
    number: int
    role: str
    lease: int
    """Number of the lease of that role. 0: the file cannot be read."""
    seen_s: float
    """Time at which this explorer first read it."""


class Claims:
    """Claims of a run, as read by one of its explorers."""

    def __init__(
        self, storage: Storage, lease: Lease, held_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """lease: of this explorer; held_s: seconds after which a claim expires although its owner lives, so that a unit
        that hangs in another explorer does not block the run.
        """
        self._storage, self._lease, self._held_s, self._clock = storage, lease, held_s, clock
        self._watch = LeaseWatch(storage, clock)
        self._claims: dict[Unit, _Claim] = {}
        """Newest claim by unit, as of the last `look`."""
        self.others: set[Unit] = set()
        """Units that another explorer held at the last `look`."""
        self.is_sole = False
        """True if claims need not be written: this explorer has no name, and saw no other at the last `look`."""
        self._unwritten: set[Unit] = set()
        """Units that were claimed in memory only."""
        self._looked_s = -_POLL_INTERVAL_S

    @property
    def is_due(self) -> bool:
        return self._clock() - self._looked_s >= _POLL_INTERVAL_S

    def look(self, done: Container[Unit]) -> None:
        """Read the claims of all explorers. done: committed units, whose claims are removed if no other explorer holds
        them."""
        self._looked_s = self._clock()
        self.is_sole = self._lease.role == "explorer" and not self._watch.sees_another(self._lease.role)
        numbers: dict[Unit, int] = {}
        for match in filter(None, map(_NAME.fullmatch, self._storage.list(_FOLDER))):
            step, unit_index, number = map(int, match.groups())
            numbers[step, unit_index] = max(numbers.get((step, unit_index), 0), number)
        self._claims = {unit: self._read(unit, number) for unit, number in numbers.items()}
        owners = {(claim.role, claim.lease) for claim in self._claims.values()}
        held = {owner for owner in owners if owner[0] != self._lease.role and self._watch.is_held(*owner)}
        self.others = {
            unit
            for unit, claim in self._claims.items()
            if (claim.role, claim.lease) in held and self._looked_s - claim.seen_s < self._held_s
        }
        for unit in [unit for unit in self._claims if unit in done and unit not in self.others]:
            self.give_back(unit)
        while self._unwritten and not self.is_sole:
            unit = self._unwritten.pop()
            if unit not in self.others:
                self.take(unit)

    def take(self, unit: Unit) -> bool:
        """Claim a unit that was free at the last `look`. False: another explorer was first. Raises: StorageError."""
        if self.is_sole and unit != EVALUATIONS:
            self._unwritten.add(unit)
            return True
        number = self._claims[unit].number + 1 if unit in self._claims else 1
        owner = {"role": self._lease.role, "lease": self._lease.number}
        if self._storage.put_new(_path(unit, number), json.dumps(owner).encode()):
            self._claims[unit] = _Claim(number, self._lease.role, self._lease.number, self._clock())
            return True
        self.others.add(unit)  # until the next `look`
        return False

    def give_back(self, unit: Unit) -> None:
        """Remove all claims of a committed unit, if any. Raises: StorageError."""
        self._unwritten.discard(unit)
        claim = self._claims.pop(unit, None)
        # Also those of dead owners. An explorer that takes the unit over meanwhile finds it in the log.
        for number in range(1, claim.number + 1 if claim is not None else 1):
            self._storage.remove(_path(unit, number))

    def _read(self, unit: Unit, number: int) -> _Claim:
        known = self._claims.get(unit)
        if known is not None and known.number == number:
            return known
        role, lease = "", 0  # removed meanwhile or unreadable: held by no explorer
        with suppress(NotFoundError, ValueError, KeyError, TypeError):
            owner = parse_object(self._storage.get(_path(unit, number)))
            role, lease = str(owner["role"]), int(owner["lease"])
        return _Claim(number, role, lease, self._clock())


def _path(unit: Unit, number: int) -> str:
    return f"{_FOLDER}/{unit[0]:08d}-{unit[1]:04d}-{number}.json"
