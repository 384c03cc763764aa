"""Blame: which task of a rollout batch kills its worker. A pure rule of losses; knows neither workers nor Dask.

A worker is lost for many reasons, most of which say nothing of what it ran: preemption, walltime, a node that died. So
a loss is no more than a suspicion, and a batch simply runs again. One that was running at `STRIKES` losses in a row is
taken apart: its halves run one after the other, and whichever is running at a loss is halved again, until a single task
runs alone. That one is poisonous when it alone was running at `STRIKES` losses in a row.

Invariants: a task is blamed only for losses while nothing ran beside it; every other task of the batch ends well; each
suspicion costs a bounded number of losses: about STRIKES + log2(tasks) + STRIKES for one poisonous task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STRIKES = 3
"""Losses in a row with the same rollouts under way. Workers that are preempted every ten minutes lose a batch of a
minute so often by chance in one of a thousand cases, and then a task of it alone in one of a million."""


@dataclass(frozen=True)
class Trial:
    """One rollout batch after a loss: what of it is still to run, and what is known.

    Example: tasks 0 to 3, of which 2 is poisonous, at STRIKES = 3
        trial = Trial.of(4)                      # pieces ((0, 1, 2, 3),)
        trial = trial.lost().lost().lost()       # pieces ((0, 1), (2, 3))
        trial = trial.finished()                 # pieces ((2, 3),)
        trial = trial.lost()                     # pieces ((2,), (3,))
        trial = trial.lost().lost().lost()       # pieces ((3,),), poisonous (2,)
    """

    pieces: tuple[tuple[int, ...], ...]
    """Places of tasks in the batch; those of a piece run together, the pieces one after another, the first is next."""
    num_tasks: int
    strikes: int = 0
    """Losses in a row of the first piece."""
    poisonous: tuple[int, ...] = ()

    @classmethod
    def of(cls, num_tasks: int) -> Trial:
        return cls((tuple(range(num_tasks)),), num_tasks)

    @property
    def next_piece(self) -> tuple[int, ...]:
        """What to run next; empty when nothing is left to run."""
        return self.pieces[0] if self.pieces else ()

    @property
    def is_whole(self) -> bool:
        """Whether the batch still runs as if nothing had happened."""
        return self.pieces == (tuple(range(self.num_tasks)),)

    def lost(self) -> Trial:
        """A worker was lost on which the first piece was running."""
        piece, *rest = self.pieces
        strikes = self.strikes + 1
        # Half a batch is suspected already, so one loss is enough to look closer; what that costs is a smaller piece.
        if strikes < STRIKES and (self.is_whole or len(piece) == 1):
            return replace(self, strikes=strikes)
        if len(piece) == 1:
            return replace(self, pieces=tuple(rest), strikes=0, poisonous=tuple(sorted((*self.poisonous, *piece))))
        middle = len(piece) // 2
        return replace(self, pieces=(piece[:middle], piece[middle:], *rest), strikes=0)

    def finished(self) -> Trial:
        """The first piece is committed."""
        return replace(self, pieces=self.pieces[1:], strikes=0)
