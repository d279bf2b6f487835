"""Source: the files of a step in one memory image of this host. Other hosts' carriers send missing parts that ranks
read.

Ranges are (begin, bytes) in an image. Block n of the plans is at n MiB on all hosts, so a range names the same bytes
everywhere. A carrier receives ranges in place and needs no other memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder
from ...comm.wire import Wire
from ..peers import Peers
from .budget import in_gib, memory_left
from .image import Image, Table
from .ranges import BLOCK_BYTES, Range, common, connect_carriers, cut, gaps, in_blocks, merged, on_hosts

#: name of the image that a host without one makes for a restore
WHOLE = "whole"
Parcel = tuple[int, int, int]  # rank, begin, bytes
#: bytes that a carrier sends and receives between two exchanges, which bounds the wait of each exchange
_TURN_BYTES = 1 << 30
_LEAST_BYTES = 1 << 20  # of a turn, to one host
_TAG = 4  # of a separate wire


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A step that the hosts have whole in `tier`, whose words are `where`. `data`: bytes before an image's tables.

    `parts`: per host, image -> its ranks."""

    step: int
    nonce: str
    world_size: int
    data: int
    parts: tuple[Mapping[str, Sequence[int]], ...]
    tier: Any = None
    where: str = "in memory"

    @property
    def label(self) -> str:
        return f"step {self.step} {self.where}"

    @property
    def is_whole(self) -> bool:
        """Return True if best() of each host has the whole step."""
        return not any(self.lacks(host, rank) for host in range(len(self.parts)) for rank in range(self.world_size))

    def best(self, host: int) -> str | None:
        """Return the image of `host` with the most ranks' bytes."""
        return min(self.parts[host], key=lambda name: (-len(self.parts[host][name]), name), default=None)

    def lacks(self, host: int, rank: int) -> bool:
        """Return True if best(host) lacks the bytes that `rank` wrote."""
        return rank not in self.parts[host].get(self.best(host) or "", ())

    def holder(self, host: int, rank: int) -> str | None:
        """Return the name of an image of `host` with the bytes that `rank` wrote."""
        return next((name for name, ranks in self.parts[host].items() if rank in ranks), None)

    def sender(self, host: int, rank: int) -> int:
        """Return the host that sends `rank`'s bytes to `host`: `host` itself, or one of the holders in turn."""
        if self.holder(host, rank):
            return host
        holders = [each for each in range(len(self.parts)) if self.holder(each, rank)]
        return holders[(host + rank) % len(holders)]


class Source:
    """The files of a candidate on this host: first meet(), then bring(), then open() and reads.

    It owns `image`, this host's best image of the candidate or an empty one. open_image() opens another one by its name. left()
    returns the bytes that images may still take, and the name of the limit.
    `is_whole`, equal on all ranks: bring() has no work. `moved_bytes` came from other hosts.
    """

    def __init__(
        self,
        candidate: Candidate,
        image: Image,
        peers: Peers,
        open_image: Callable[[str], Image],
        timeout_s: float,
        left: Callable[[], tuple[int, str]] = memory_left,
    ) -> None:
        self._candidate, self._image, self._peers = candidate, image, peers
        self._open, self._timeout_s, self._left = open_image, timeout_s, left
        self._host, self._is_first = peers.host, peers.index == 0
        self._tables: dict[int, Table] = {}
        self._brought: list[list[Range]] = [[] for _ in range(peers.host_count)]
        self._wire: Wire | None = None
        self._turn_bytes = max(_LEAST_BYTES, _TURN_BYTES // peers.host_count)
        self.is_whole, self.moved_bytes = candidate.is_whole, 0
        everywhere = itertools.product(range(peers.host_count), range(candidate.world_size))
        self._is_remote = not all(candidate.holder(host, rank) for host, rank in everywhere)

    def meet(self) -> None:
        """Exchange which rank wrote what; connect carriers if hosts lack bytes. An error is equal on all ranks. Collective."""
        label, encoded = "tables of a step in memory", [b""]

        def take(tables: Iterable[Table]) -> None:
            self._tables |= {table.head["rank"]: table for table in tables}
            for rank in range(self._candidate.world_size):
                if rank not in self._tables:
                    step = self._candidate.label
                    raise CheckpointError(f"the table of rank {rank} of {step} cannot be read any more")

        if self.is_whole:
            on_hosts(self._peers, lambda: take(self._tables_in(self._image)), label)
            return
        on_hosts(self._peers, lambda: encoded.append(self._own_tables()), label)
        answers = self._peers.all_gather(encoded[-1], label)
        on_hosts(self._peers, lambda: take(table for each in answers for table in Table.each_of(each)), label)
        if self._is_remote:
            self._wire = connect_carriers(self._peers, "restore", self._timeout_s)

    def _tables_in(self, image: Image) -> Iterator[Table]:
        return (table for table in image.each_table() if table.head["nonce"] == self._candidate.nonce)

    def _own_tables(self) -> bytes:
        """Return the tables that this carrier sends: those of ranks without an image on a lower host."""
        chosen, hosts = self._candidate, range(self._peers.host_count)
        first = [next(host for host in hosts if chosen.holder(host, rank)) for rank in range(chosen.world_size)]
        encoded = []
        with self._own_images() as images:
            for rank in (rank for rank, host in enumerate(first) if self._is_first and host == self._host):
                tables = self._tables_in(images(rank))
                encoded += [table.encode() for table in tables if table.head["rank"] == rank]
        return b"".join(encoded)

    def open(self) -> CheckpointFolder:
        """Open the files on rank 0."""
        chosen = self._candidate
        tallies = [self._tables[rank].tallies for rank in range(chosen.world_size)]
        of_step = chosen.label, chosen.step, chosen.world_size, chosen.nonce
        return self.attach(CheckpointFolder.merged(*of_step, self._files, tallies))

    @property
    def _files(self) -> list[tuple[str, int]]:
        return [(path, nbytes) for path, nbytes, _ in self._tables[0].head["files"]]

    def _begins(self) -> dict[str, int]:
        """Return the first byte of each file in an image."""
        ends = itertools.accumulate((in_blocks(nbytes) for _, nbytes in self._files), initial=0)
        return {path: at for (path, _), at in zip(self._files, ends)}

    def attach(self, folder: CheckpointFolder) -> CheckpointFolder:
        """Make a folder read from this host's image."""
        folder.lies_in(self._image.fd, self._begins())
        return folder

    def lists(self) -> list[tuple[str, int, int]]:
        """Return (path, begin, bytes) of the headers and files of values, which list the tensors."""
        return [(path, 0, head) for path, _, head in self._tables[0].head["files"]]

    def close(self) -> None:
        """Close the image after the last read. Call it on each rank, also after a failed restore."""
        self._image.close()
        self._hang_up()

    def bring(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Fetch the blocks of ranges (path, begin, bytes) to this host's image, once for all its ranks. Errors are equal. Collective."""
        if self.is_whole:
            return
        begins = self._begins()
        places = ((begins[path] + begin, nbytes) for path, begin, nbytes in ranges)
        blocks = ((at - at % BLOCK_BYTES, in_blocks(at % BLOCK_BYTES + nbytes)) for at, nbytes in places)
        answers = self._peers.exchange(merged(blocks), "blocks of a step in memory")
        asked = []
        for host, before in enumerate(self._brought):
            here = (each for each, at in zip(answers, self._peers.host_of) if at == host)
            mine = merged((begin, nbytes) for each in here for begin, nbytes in each)
            asked.append(common(mine, gaps(before, self._candidate.data)))
            self._brought[host] = merged([*before, *mine])
        on_hosts(self._peers, lambda: self._take_own(asked[self._host]), "room to restore")
        if self._is_remote:
            self._move(asked)

    def share(self) -> list[tuple[str, int, int]]:
        """Return (path, first, end) of this rank's share of the blocks that ranks of its host read."""
        blocks = sorted(
            (path, (at - begin) // BLOCK_BYTES)
            for (path, nbytes), begin in zip(self._files, self._begins().values())
            for first, n in common(self._brought[self._host], [(begin, in_blocks(nbytes))])
            for at in range(first, first + n, BLOCK_BYTES)
        )
        index, count, ranks = self._peers.index, len(blocks), len(self._peers.here)
        mine = blocks[count * index // ranks : count * (index + 1) // ranks]
        return [(path, block, block + 1) for path, block in mine]

    def _parcels(self, host: int, sender: int, asked: Sequence[Range]) -> list[Parcel]:
        """Return the parts of `asked` that the best image of `host` lacks and `sender` sends."""
        chosen = self._candidate
        return [
            (rank, begin, nbytes)
            for rank in range(chosen.world_size)
            if chosen.lacks(host, rank) and chosen.sender(host, rank) == sender
            for begin, nbytes in common(merged(self._tables[rank].each_run()), asked)
        ]

    def _take_own(self, asked: Sequence[Range]) -> None:
        """Check that missing bytes fit in this host's memory, and copy those that its other images have."""
        if not self._is_first:
            return
        chosen = self._candidate
        lacking = {sender: self._parcels(self._host, sender, asked) for sender in range(len(chosen.parts))}
        missing = sum(nbytes for parcels in lacking.values() for _, _, nbytes in parcels)
        left, limit = self._left()
        if missing > left:
            raise CheckpointError(f"{in_gib(missing)} of {chosen.label} do not fit: {in_gib(left)} are left ({limit})")
        for _, begin, nbytes in itertools.chain.from_iterable(lacking.values()):
            self._image.reserve(begin, nbytes)
        with self._own_images() as images:
            for rank, begin, nbytes in lacking[self._host]:
                self._image.view[begin : begin + nbytes] = images(rank).view[begin : begin + nbytes]

    @contextlib.contextmanager
    def _own_images(self) -> Iterator[Callable[[int], Image]]:
        """Return a context with a function from a rank to this host's image with its bytes."""
        with contextlib.ExitStack() as opened:

            @functools.cache
            def by_name(name: str) -> Image:
                return opened.enter_context(contextlib.closing(self._open(name)))

            yield lambda rank: by_name(str(self._candidate.holder(self._host, rank)))

    def _move(self, asked: Sequence[Sequence[Range]]) -> None:
        """Send other hosts the bytes that they lack, and receive this host's. Collective.

        In round k of a turn each carrier sends to the k-th host after it and receives from the k-th host before it.
        Both sides of a pair cut the same list at the same bytes, and all carriers use the same order of turns and
        rounds, so they cannot deadlock. An exchange ends each turn."""
        count, carriers = len(asked), self._peers.carriers
        rounds = []
        for k in range(1, count) if self._is_first else ():
            to, by = (self._host + k) % count, (self._host - k) % count
            sends = cut(self._parcels(to, self._host, asked[to]), self._turn_bytes)
            receives = cut(self._parcels(self._host, by, asked[self._host]), self._turn_bytes)
            rounds.append((carriers[to], sends, carriers[by], receives))
        left = max((len(each) for _, sends, _, receives in rounds for each in (sends, receives)), default=0)

        def move(turn: int, images: Callable[[int], Image]) -> bool:
            """Exchange one turn's messages with all hosts, two at a time. Return True if more are left."""
            try:
                for to, sends, by, receives in rounds:
                    self._round(to, sends[turn : turn + 1], by, receives[turn : turn + 1], images)
            except BaseException:
                self._hang_up()  # peers that wait for this host fail now
                raise
            return left > turn + 1

        with self._own_images() as images:
            for turn in itertools.count():
                step = functools.partial(move, turn, images)
                if not any(on_hosts(self._peers, step, "bytes of a step in memory")):
                    return

    def _round(
        self, to: int, sends: list[list[Parcel]], by: int, receives: list[list[Parcel]], images: Callable[[int], Image]
    ) -> None:
        wire = self._wire
        assert wire is not None
        works = []
        for _, begin, nbytes in itertools.chain.from_iterable(receives):
            works.append(wire.receive(by, _TAG, self._image.address + begin, nbytes))
            self.moved_bytes += nbytes
        for rank, begin, nbytes in itertools.chain.from_iterable(sends):
            works.append(wire.send(to, _TAG, images(rank).address + begin, nbytes))
        for work in works:
            wire.wait(work, self._timeout_s)

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close(gently=False)
            self._wire = None
