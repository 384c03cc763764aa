"""Claims: which work units the explorers of one run are at, so that those of different names share them.

    control/claims/<explore step>-<unit>-<n>.json    the lease of the explorer that works on the unit

A claim is taken before a unit is sent to a worker, by a create-only put, and goes after the unit is committed. It holds
as long as the lease that it names: of an explorer that died or ended, the next one takes it over with the next number.
So a claim never says that anything is done; the log alone does, and a claim that is lost, or held by two, costs a unit
that is rolled out twice. It knows neither workers nor tasks.

An explorer without a name of its own expects no other: while it sees none it claims in its memory alone, which costs
storage nothing, and it writes what it is at as soon as it sees one. What that one takes until then is rolled out twice.

Invariant: but for that, a unit without a claim was not begun, or its shards are durable. So who takes a claim looks
into the log then, and never repeats what another one has ended.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from rftdask.errors import NotFoundError
from rftdask.run.lease import Lease, LeaseWatch
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_object

Unit = tuple[int, int]
"""(explore step, unit_index) of a work unit of training."""
EVALUATIONS: Unit = (0, 0)
"""What the one explorer of a run claims that makes its evaluations, until it ends; explore steps begin at 1."""
_FOLDER = "control/claims"
_NAME = re.compile(r"([0-9]{8,15})-([0-9]{4,15})-([0-9]{1,15})\.json")
_LOOK_S = 1.0
"""Between two looks at the claims of others."""


@dataclass(frozen=True)
class _Claim:
    number: int
    role: str
    lease: int
    """Number of the lease of that role; 0 where the file cannot be read."""
    seen_s: float
    """When it was seen first, by the clock of who looks."""


class Claims:
    """The claims of a run, as one of its explorers sees them.

    Example:
        claims = Claims(storage, lease, held_s=3600.0)
        claims.look(done={(1, 0)})
        if not claims.is_others((1, 1)) and claims.take((1, 1)):
            ...                                        # roll it out, unless the log has it by now; commit it
            claims.give_back((1, 1))
    """

    def __init__(
        self, storage: Storage, lease: Lease, held_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            lease: of this explorer.
            held_s: after which a claim is nobody's although its owner lives, so that nobody waits for ever for a unit
                that hangs elsewhere.
        """
        self._storage = storage
        self._lease = lease
        self._held_s = held_s
        self._clock = clock
        self._watch = LeaseWatch(storage, clock)
        self._claims: dict[Unit, _Claim] = {}
        """The newest claim of each unit that has one, as of the last look."""
        self._others: set[Unit] = set()
        """Those of them that another explorer holds."""
        self.alone = False
        """Whether nobody else was there at the last look, and nobody is expected, so that nothing need be written."""
        self._unwritten: set[Unit] = set()
        """What was taken alone."""
        self._looked_s = -_LOOK_S

    @property
    def is_due(self) -> bool:
        """True if the last look was long enough ago."""
        return self._clock() - self._looked_s >= _LOOK_S

    def look(self, done: Container[Unit]) -> None:
        """Learn who is at what. done: units that are committed, whose claims go if nobody holds them."""
        self._looked_s = self._clock()
        self.alone = self._lease.role == "explorer" and not self._watch.sees_another(self._lease.role)
        found: dict[Unit, int] = {}
        for match in filter(None, map(_NAME.fullmatch, self._storage.list(_FOLDER))):
            step, unit_index, number = map(int, match.groups())
            found[step, unit_index] = max(found.get((step, unit_index), 0), number)
        self._claims = {unit: self._read(unit, number) for unit, number in found.items()}
        owners = {(claim.role, claim.lease) for claim in self._claims.values()}
        held = {owner for owner in owners if owner[0] != self._lease.role and self._watch.is_held(*owner)}
        self._others = {
            unit
            for unit, claim in self._claims.items()
            if (claim.role, claim.lease) in held and self._looked_s - claim.seen_s < self._held_s
        }
        for unit in [unit for unit in self._claims if unit in done and unit not in self._others]:
            self.give_back(unit)
        while self._unwritten and not self.alone:
            unit = self._unwritten.pop()
            if unit not in self._others:
                self.take(unit)

    def is_others(self, unit: Unit) -> bool:
        """True if another explorer held the unit at the last look."""
        return unit in self._others

    def take(self, unit: Unit) -> bool:
        """Claim a unit that nobody held at the last look; False: another explorer was first. Raises: StorageError."""
        if self.alone and unit != EVALUATIONS:
            self._unwritten.add(unit)
            return True
        number = self._claims[unit].number + 1 if unit in self._claims else 1
        owner = {"role": self._lease.role, "lease": self._lease.number}
        if self._storage.put_new(_path(unit, number), json.dumps(owner).encode()):
            self._claims[unit] = _Claim(number, self._lease.role, self._lease.number, self._clock())
            return True
        self._others.add(unit)  # until the next look
        return False

    def give_back(self, unit: Unit) -> None:
        """Remove the claims of a unit that is committed; nothing happens if there are none. Raises: StorageError."""
        self._unwritten.discard(unit)
        claim = self._claims.pop(unit, None)
        # Those of owners that died, too. Who takes the unit over meanwhile finds it in the log.
        for number in range(1, claim.number + 1 if claim is not None else 1):
            self._storage.remove(_path(unit, number))

    def _read(self, unit: Unit, number: int) -> _Claim:
        known = self._claims.get(unit)
        if known is not None and known.number == number:
            return known
        role, lease = "", 0
        try:
            owner = parse_object(self._storage.get(_path(unit, number)))
            role, lease = str(owner["role"]), int(owner["lease"])
        except (NotFoundError, ValueError, KeyError, TypeError):
            pass  # it went meanwhile, or is none of ours: nobody's
        return _Claim(number, role, lease, self._clock())


def _path(unit: Unit, number: int) -> str:
    return f"{_FOLDER}/{unit[0]:08d}-{unit[1]:04d}-{number}.json"
