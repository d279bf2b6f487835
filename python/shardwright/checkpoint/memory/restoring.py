"""Source: the files of a step in one memory image of this host. Other hosts' carriers send missing parts that ranks
read.

Ranges are (begin, bytes) in an image. Block n of the plans is at n MiB on all hosts, so a range names the same bytes
everywhere. A carrier receives ranges in place and needs no other memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder
from ...comm.wire import Wire
from ..peers import Peers
from .budget import in_gib, memory_left
from .image import BLOCK_BYTES, Image, Table, pieces

#: name of the image that a host without one makes for a restore
WHOLE = "whole"
Range = tuple[int, int]
Parcel = tuple[int, int, int]  # rank, begin, bytes
#: bytes that a carrier sends and receives between two exchanges, which bounds the wait of each exchange
_TURN_BYTES = 1 << 30
_LEAST_BYTES = 1 << 20  # of a turn, to one host
_TAG = 4  # of a separate wire
_MEET_S = 60.0


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A step that is complete in the memory of these hosts.

    Attributes
    ----------
    data : bytes of an image before its tables
    parts : for each host, (image, rank -> (bytes of its table, bytes of its runs))
    """

    step: int
    nonce: str
    world_size: int
    data: int
    parts: tuple[tuple[tuple[str, dict[int, tuple[int, int]]], ...], ...]

    @property
    def label(self) -> str:
        return f"step {self.step} in memory"

    @property
    def is_whole(self) -> bool:
        """Return True if best() of each host has the whole step."""
        return not any(self.lacks(host, rank) for host in range(len(self.parts)) for rank in range(self.world_size))

    def best(self, host: int) -> str | None:
        """Return the image of `host` with the most bytes of the step."""
        found = sorted(self.parts[host], key=lambda each: (-len(each[1]), each[0]))
        return found[0][0] if found else None

    def lacks(self, host: int, rank: int) -> bool:
        """Return True if best(host) lacks the bytes that `rank` wrote."""
        name = self.best(host)
        return name is None or rank not in dict(self.parts[host])[name]

    def holder(self, host: int, rank: int) -> str | None:
        """Return the name of an image of `host` with the bytes that `rank` wrote."""
        return next((name for name, ranks in self.parts[host] if rank in ranks), None)

    def sender(self, host: int, rank: int) -> int:
        """Return the host that sends `rank`'s bytes to `host`: `host` itself, or one of the holders in turn."""
        if self.holder(host, rank):
            return host
        holders = [each for each in range(len(self.parts)) if self.holder(each, rank)]
        return holders[(host + rank) % len(holders)]


class Source:
    """The files of a candidate on this host. After meet(), bring() and open() read them.

    Parameters
    ----------
    image : Image
        Owned: this host's best image of the candidate, or an empty one.
    open_image : callable
        Opens an image of this host's guardian by name.
    closed : callable
        Called by close() with the number of bytes received from other hosts.

    Attributes
    ----------
    is_whole : bool
        True if every host's image has the whole step, so bring() has no work. Equal on all ranks.
    moved_bytes : int
        Bytes received from other hosts. On carriers.
    """

    def __init__(
        self,
        candidate: Candidate,
        image: Image,
        peers: Peers,
        open_image: Callable[[str], Image],
        closed: Callable[[int], None],
        timeout_s: float,
    ) -> None:
        self._candidate, self._image, self._peers = candidate, image, peers
        self._open, self._closed, self._timeout_s = open_image, closed, timeout_s
        self._hosts = peers.host_of
        self._host = self._hosts[peers.rank]
        self._is_first = peers.rank == self._hosts.index(self._host)
        self._tables: dict[int, Table] = {}
        self._brought: list[list[Range]] = [[] for _ in range(peers.host_count)]
        self._wire: Wire | None = None
        self._turn_bytes = max(_LEAST_BYTES, _TURN_BYTES // peers.host_count)
        self.is_whole, self.moved_bytes = candidate.is_whole, 0
        everywhere = range(peers.host_count), range(candidate.world_size)
        self._is_remote = not all(candidate.holder(host, rank) for host, rank in itertools.product(*everywhere))

    # the files --------------------------------------------------------------------------------------------------------

    def meet(self) -> str:
        """Exchange which rank wrote what; connect carriers if hosts lack bytes. Return "" or a reason. Collective."""
        label, of_host = "tables of a step in memory", [b""]
        if self.is_whole:
            self._tables = {table.head["rank"]: table for table in self._tables_in(self._image)}
            return first_reason(self._peers, self._check_tables, label)
        reason = first_reason(self._peers, lambda: of_host.append(self._own_tables()), label)
        if reason:
            return reason
        for encoded in self._peers.all_gather(of_host[-1], label):
            self._tables |= {table.head["rank"]: table for table in _decoded(encoded)}
        reason = first_reason(self._peers, self._check_tables, label)
        if reason or not self._is_remote:
            return reason
        told = self._peers.exchange(secrets.token_hex(32) if self._peers.rank == 0 else "", "wire of a restore")
        return first_reason(self._peers, lambda: self._connect(bytes.fromhex(told[0])), "wire of a restore")

    def _connect(self, secret: bytes) -> None:
        if self._is_first:
            name = f"restore/{hashlib.sha256(secret).hexdigest()[:16]}"
            self._wire = self._peers.make_wire(name, secret, min(_MEET_S, self._timeout_s))

    def _check_tables(self) -> None:
        for rank in range(self._candidate.world_size):
            if rank not in self._tables:
                raise CheckpointError(f"the table of rank {rank} of {self._candidate.label} cannot be read any more")

    def _tables_in(self, image: Image) -> Iterator[Table]:
        return (table for table in image.each_table() if table.head["nonce"] == self._candidate.nonce)

    def _own_tables(self) -> bytes:
        """Return the tables that this carrier sends: those of ranks without an image on a lower host."""
        if not self._is_first:
            return b""
        chosen, hosts = self._candidate, range(self._peers.host_count)
        first = [next(host for host in hosts if chosen.holder(host, rank)) for rank in range(chosen.world_size)]
        encoded = []
        with contextlib.ExitStack() as opened:
            images = self._opener(opened)
            for rank in (rank for rank, host in enumerate(first) if host == self._host):
                tables = self._tables_in(images(rank))
                encoded += [table.encode() for table in tables if table.head["rank"] == rank]
        return b"".join(encoded)

    def open(self) -> CheckpointFolder:
        """Open the files on rank 0."""
        chosen = self._candidate
        tallies = [self._tables[rank].tallies for rank in range(chosen.world_size)]
        folder = CheckpointFolder.merged(
            chosen.label, chosen.step, chosen.world_size, chosen.nonce, self._files, tallies
        )
        return self.attach(folder)

    @property
    def _files(self) -> list[tuple[str, int]]:
        return [(path, nbytes) for path, nbytes, _ in self._tables[0].head["files"]]

    def _begins(self) -> dict[str, int]:
        """Return the first byte of each file in an image."""
        ends = itertools.accumulate((in_blocks(nbytes) for _, nbytes in self._files), initial=0)
        return {path: at for (path, _), at in zip(self._files, ends)}

    def attach(self, folder: CheckpointFolder) -> CheckpointFolder:
        folder.lies_in(self._image.fd, self._begins())
        return folder

    def lists(self) -> list[tuple[str, int, int]]:
        """Return (path, begin, bytes) of the headers and files of values, which list the tensors."""
        return [(path, 0, head) for path, _, head in self._tables[0].head["files"]]

    def close(self) -> None:
        """Close the image after the last read. Call it on each rank, also after a failed restore."""
        self._image.close()
        self._closed(self.moved_bytes)
        self._hang_up()

    # bytes of other hosts ---------------------------------------------------------------------------------------------

    def bring(self, ranges: Iterable[tuple[str, int, int]]) -> str:
        """Fetch the blocks of ranges (path, begin, bytes) to this host's image. Return "" or a reason. Collective.

        Each rank passes the ranges that it reads. A host fetches each block once, however many ranks read it."""
        if self.is_whole:
            return ""
        begins = self._begins()
        blocks = merged(_block_range(begins[path] + begin, nbytes) for path, begin, nbytes in ranges)
        told = self._peers.exchange(blocks, "blocks of a step in memory")
        asked = []
        for host, before in enumerate(self._brought):
            here = (each for rank, each in enumerate(told) if self._hosts[rank] == host)
            mine = merged((begin, nbytes) for each in here for begin, nbytes in each)
            asked.append(common(mine, gaps(before, self._candidate.data)))
            self._brought[host] = merged([*before, *mine])
        reason = first_reason(self._peers, lambda: self._take_own(asked[self._host]), "room to restore")
        return reason or self._move(asked)

    def share(self) -> list[tuple[str, int, int]]:
        """Return (path, first, end) of this rank's share of the blocks that ranks of its host read."""
        blocks = sorted(
            (path, (at - begin) // BLOCK_BYTES)
            for (path, nbytes), begin in zip(self._files, self._begins().values())
            for first, n in common(self._brought[self._host], [(begin, in_blocks(nbytes))])
            for at in range(first, first + n, BLOCK_BYTES)
        )
        here = [rank for rank, host in enumerate(self._hosts) if host == self._host]
        index, count = here.index(self._peers.rank), len(blocks)
        mine = blocks[count * index // len(here) : count * (index + 1) // len(here)]
        return [(path, block, block + 1) for path, block in mine]

    def _parcels(self, host: int, sender: int, asked: Sequence[Range]) -> list[Parcel]:
        """Return the parts of `asked` that the best image of `host` lacks and `sender` sends, cut into messages."""
        chosen = self._candidate
        found = []
        for rank in range(chosen.world_size):
            if chosen.lacks(host, rank) and chosen.sender(host, rank) == sender:
                runs = common(merged(self._tables[rank].each_run()), asked)
                found += [(rank, *run) for window in pieces(runs, self._turn_bytes) for run in window]
        return found

    def _take_own(self, asked: Sequence[Range]) -> None:
        """Check that missing bytes fit in this host's memory, and copy those that its other images have."""
        if not self._is_first:
            return
        chosen = self._candidate
        lacking = {sender: self._parcels(self._host, sender, asked) for sender in range(len(chosen.parts))}
        missing = sum(nbytes for parcels in lacking.values() for _, _, nbytes in parcels)
        left, limit = memory_left()
        if missing > left:
            raise CheckpointError(f"{in_gib(missing)} of {chosen.label} do not fit: {in_gib(left)} are left ({limit})")
        with contextlib.ExitStack() as opened:
            images = self._opener(opened)
            for rank, begin, nbytes in lacking[self._host]:
                self._image.copy([(begin, nbytes)], images(rank))

    def _opener(self, opened: contextlib.ExitStack) -> Callable[[int], Image]:
        """Return a function from a rank to this host's image with its bytes, open until `opened` ends."""

        @functools.cache
        def by_name(name: str) -> Image:
            return opened.enter_context(contextlib.closing(self._open(name)))

        return lambda rank: by_name(str(self._candidate.holder(self._host, rank)))

    def _move(self, asked: Sequence[Sequence[Range]]) -> str:
        """Send other hosts the bytes that they lack, and receive this host's. Return "" or a reason. Collective.

        In round k of a turn each carrier sends to the k-th host after it and receives from the k-th host before it.
        Both sides of a pair cut the same list at the same bytes, and all carriers use the same order of turns and
        rounds, so they cannot deadlock. An exchange ends each turn."""
        if not self._is_remote:
            return ""
        count = len(asked)
        sends, receives = {}, {}
        with contextlib.ExitStack() as opened:
            images = self._opener(opened)
            if self._is_first:
                for k in range(1, count):
                    to, by = (self._host + k) % count, (self._host - k) % count
                    sends[k] = _turns(self._parcels(to, self._host, asked[to]), self._turn_bytes)
                    receives[k] = _turns(self._parcels(self._host, by, asked[self._host]), self._turn_bytes)
            left = max((len(each) for each in (*sends.values(), *receives.values())), default=0)
            turn = 0
            while True:
                failure = ""
                try:
                    for k in range(1, count) if turn < left else ():
                        self._round(k, sends[k][turn : turn + 1], receives[k][turn : turn + 1], images)
                except (CheckpointError, OSError, MemoryError, RuntimeError) as error:
                    failure = f"host {socket.gethostname()}: {error or type(error).__name__}"
                    self._hang_up()  # peers that wait for this host fail now
                turn += 1
                told = self._peers.exchange([failure, left > turn], "bytes of a step in memory")
                failure = next((why for why, _ in told if why), "")
                if failure or not any(more for _, more in told):
                    return failure

    def _round(self, k: int, sends: list[list[Parcel]], receives: list[list[Parcel]], images: Any) -> None:
        """Exchange one turn's messages with two hosts."""
        assert self._wire is not None
        carriers, works = self._peers.carriers, []
        count = len(carriers)
        for _, begin, nbytes in itertools.chain.from_iterable(receives):
            by = carriers[(self._host - k) % count]
            works.append(self._wire.receive(by, _TAG, self._image.address + begin, nbytes))
            self.moved_bytes += nbytes
        for rank, begin, nbytes in itertools.chain.from_iterable(sends):
            to = carriers[(self._host + k) % count]
            works.append(self._wire.send(to, _TAG, images(rank).address + begin, nbytes))
        for work in works:
            self._wire.wait(work, self._timeout_s)

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close(gently=False)
            self._wire = None


def first_reason(peers: Peers, call: Callable[[], None], label: str) -> str:
    """Call call() on all ranks. Return the first rank's reason of failure, or "". Collective; call() may be collective
    only up to its first error."""
    reason = ""
    try:
        call()
    except (CheckpointError, OSError, MemoryError, RuntimeError) as error:
        reason = f"host {socket.gethostname()}: {error or type(error).__name__}"
    return next(filter(None, peers.exchange(reason, f"memory tier: {label}")), "")


def in_blocks(nbytes: int) -> int:
    """Round up to blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order; merge those that touch or overlap.

    >>> merged([(8, 2), (0, 4), (3, 2), (5, 1)])
    [(0, 6), (8, 2)]
    """
    found: list[Range] = []
    for begin, nbytes in sorted(ranges):
        if found and begin <= sum(found[-1]):
            found[-1] = found[-1][0], max(sum(found[-1]), begin + nbytes) - found[-1][0]
        elif nbytes:
            found.append((begin, nbytes))
    return found


def common(ours: Sequence[Range], theirs: Sequence[Range]) -> list[Range]:
    """Return the ranges that two merged lists both have.

    >>> common([(0, 6), (8, 2)], [(4, 5)])
    [(4, 2), (8, 1)]
    """
    found, at = [], 0
    for begin, nbytes in ours:
        while at < len(theirs) and sum(theirs[at]) <= begin:
            at += 1
        while at < len(theirs) and theirs[at][0] < begin + nbytes:
            low, high = max(begin, theirs[at][0]), min(begin + nbytes, sum(theirs[at]))
            found.append((low, high - low))
            if high == begin + nbytes:
                break
            at += 1
    return found


def gaps(ranges: Sequence[Range], end: int) -> list[Range]:
    """Return the ranges of [0, end) that a merged list lacks.

    >>> gaps([(2, 3), (8, 2)], 10)
    [(0, 2), (5, 3)]
    """
    begins = [0, *map(sum, ranges)]
    ends = [*(begin for begin, _ in ranges), end]
    return [(begin, at - begin) for begin, at in zip(begins, ends) if at > begin]


def _block_range(begin: int, nbytes: int) -> Range:
    first = begin // BLOCK_BYTES * BLOCK_BYTES
    return first, in_blocks(begin + nbytes - first)


def _turns(parcels: Sequence[Parcel], most: int) -> list[list[Parcel]]:
    """Group messages of at most `most` bytes each into turns of at most `most` bytes."""
    found: list[list[Parcel]] = []
    room = 0
    for parcel in parcels:
        if parcel[2] > room:
            found.append([])
            room = most
        found[-1].append(parcel)
        room -= parcel[2]
    return found


def _decoded(encoded: bytes) -> Iterator[Table]:
    """Yield the tables in a concatenation of tables."""
    at = 0
    while at < len(encoded):
        table = Table.decode(memoryview(encoded)[at:])
        if table is None:
            return
        yield table
        at += len(table.encode())
