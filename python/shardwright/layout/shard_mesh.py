"""The owners of the slices of a bucket. Each rank owns one slice; on a two-dimensional mesh each column owns one.

    mesh (replicate, shard)      slices        replicas
        0 1 2                    0 1 2         0 0 0
        3 4 5                    0 1 2         1 1 1

Arithmetic only. A row is a *replica*: its ranks together own every slice once. Owners of one slice fold the same
contributions and step on it with the same state, so their bits stay equal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The slices of one group of ranks, from the view of one rank: the slice that each rank owns, and its replica."""

    rank: int
    of_rank: tuple[int, ...]
    replica_of_rank: tuple[int, ...]

    @classmethod
    def one_a_rank(cls, rank: int, world_size: int) -> Slicing:
        return cls(rank, tuple(range(world_size)), (0,) * world_size)

    @classmethod
    def of_rows(cls, rank: int, rows: Sequence[Sequence[int]]) -> Slicing:
        """Make the slicing of `rows`: the ranks of each replica in the order of their slices, each rank once."""
        if len(rows) == 1:
            return cls.one_a_rank(rank, len(rows[0]))
        place = {member: (column, row) for row, members in enumerate(rows) for column, member in enumerate(members)}
        ranks = sorted(place)
        return cls(rank, tuple(place[r][0] for r in ranks), tuple(place[r][1] for r in ranks))

    @functools.cached_property
    def count(self) -> int:
        """Return the number of slices of a bucket."""
        return max(self.of_rank) + 1

    @property
    def is_replicated(self) -> bool:
        """Return True if a slice has several owners."""
        return self.count < len(self.of_rank)

    @property
    def own(self) -> int:
        """Return the number of this rank's slice."""
        return self.of_rank[self.rank]

    @property
    def speaks(self) -> bool:
        """Return True if a sum over all ranks counts this rank's slices: it counts one owner of each slice."""
        return self.replica_of_rank[self.rank] == 0

    def crosses(self, host_of: Sequence[int]) -> bool:
        """Return True if there are several replicas and the ranks of one are on different hosts."""
        return self.is_replicated and any(len({host_of[rank] for rank in row}) > 1 for row in self.rows())

    def first_owner(self, index: int) -> int:
        """Return the first owner of slice `index`, whose copy counts in sums."""
        return next(r for r, of in enumerate(self.of_rank) if of == index and self.replica_of_rank[r] == 0)

    def replica(self, rank: int | None = None) -> list[int]:
        """Return the ranks of the replica of `rank` (default: this rank), in order."""
        mine = self.replica_of_rank[self.rank if rank is None else rank]
        return [each for each, replica in enumerate(self.replica_of_rank) if replica == mine]

    def rows(self) -> list[list[int]]:
        """Return the ranks of each replica, in the order of their slices."""
        found: list[list[int]] = [[0] * self.count for _ in range(max(self.replica_of_rank) + 1)]
        for rank, (column, row) in enumerate(zip(self.of_rank, self.replica_of_rank)):
            found[row][column] = rank
        return found

    def for_engine(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the slicing in the form that Reducer and HostComm.all_gather take."""
        return (self.of_rank, self.replica_of_rank) if self.is_replicated else None
