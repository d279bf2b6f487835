"""The two-step exchange of encoded slices, over torch.distributed's group or over the engine's communicator.

A message has world_size equal slices. In the first step every rank gets its own slice of all messages. It folds them,
in rank order, into the result of its slice. In the second step all ranks get all results. Each element is folded once,
on one rank, so all ranks end with the same bytes. A rank sends 2 (W - 1) / W of its message in total.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from .._engine import HostComm, fold, half_decode, half_encode
from ..torch_compat import cuda
from .process_group import comm_error

_ALIGNMENT = 64


class Exchange:
    """An exchange: begin() returns the message to fill, scatter() the W pieces to fold, result() the memory for the fold,
    gather() the whole result. Memory stays valid until the next begin(), or gather(). Every rank makes the same calls.

    `wire_bytes` counts what this rank has sent to peers, `bucket_wire_bytes` by bucket of the last round. Without
    `takes_part` another rank exchanges this rank's contributions. `on_device`: messages are in GPU memory.
    """

    on_device = False
    #: what a transport implements: the memory of a message and of a result, the two steps, and agree()
    _message: Any
    _scatter: Any
    _result: Any
    _gather: Any
    _agree: Any

    def __init__(self, rank: int, world_size: int, *, takes_part: bool = True) -> None:
        self.takes_part = takes_part
        self.rank = rank
        self.world_size = world_size
        self.wire_bytes = 0
        self.bucket_wire_bytes: tuple[int, ...] = ()
        self._before_bucket = 0
        self._buckets: list[int] = []
        self._slice_bytes = 0
        self._whole = torch.empty(0, dtype=torch.uint8, device="cpu")

    def begin_round(self) -> None:
        """Forget the buckets of an unfinished round."""
        self._before_bucket, self._buckets = self.wire_bytes, []

    def end_bucket(self, is_last: bool) -> None:
        """Attribute bytes sent since the last call to this bucket."""
        self._buckets.append(self.wire_bytes - self._before_bucket)
        self._before_bucket = self.wire_bytes
        if is_last:
            self.bucket_wire_bytes, self._buckets = tuple(self._buckets), []

    def begin(self, slice_bytes: int) -> torch.Tensor:
        """Return the message: uint8, world_size slices of slice_bytes. Its contents are undefined."""
        self._slice_bytes = slice_bytes
        if self._whole.numel() < slice_bytes * self.world_size:
            self._whole = self._memory(slice_bytes * self.world_size)
        return self._message(slice_bytes)

    def _memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def scatter(self) -> list[torch.Tensor]:
        """Return this rank's slice of every rank's message, in rank order."""
        self.wire_bytes += (self.world_size - 1) * self._slice_bytes
        return self._scatter(self._slice_bytes)

    def result(self) -> torch.Tensor:
        """Return the memory for the fold of scatter()'s pieces, uint8."""
        return self._result(self._slice_bytes)

    def gather(self) -> torch.Tensor:
        """Return all ranks' results in rank order, contiguous uint8."""
        self.wire_bytes += (self.world_size - 1) * self._slice_bytes
        whole = self.whole()
        self._gather(whole, self._slice_bytes)
        return whole

    def swap(self) -> list[torch.Tensor] | None:
        """Return all whole messages, to fold into whole(), if that costs no more bytes; else None on all ranks."""
        return None

    def whole(self) -> torch.Tensor:
        """Return the memory into which gather() puts the result, uint8."""
        return self._whole[: self._slice_bytes * self.world_size]

    def agree(self, ok: bool) -> bool:
        """Return True if all ranks pass `ok`; it replaces gather() if each rank needs only its own result."""
        self.wire_bytes += self.world_size - 1
        return self._agree(ok)

    # arithmetic on messages in place; arguments are addresses

    def floats(self, numel: int) -> torch.Tensor:
        """Return float32 scratch memory with undefined contents."""
        return torch.empty(numel, dtype=torch.float32, device="cpu")

    def fold(self, result: int, pieces: list[int], numel: int, dtype: str, op: str) -> None:
        """Fold `pieces` in rank order into `result`: addresses from scatter(), or equal offsets into its pieces."""
        fold(result, pieces, numel, dtype, op)

    def encode_half(self, dtype: str, wire: int, source: int, numel: int, scale: float) -> None:
        """Scale and round float32 values."""
        half_encode(dtype, wire, source, numel, scale)

    def decode_half(self, dtype: str, out: int, wire: int, numel: int) -> None:
        """Widen values to float32."""
        half_decode(dtype, out, wire, numel)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the first tensor of each pair to the second. Both are one-dimensional, dense and of one dtype."""
        for to, source in pairs:
            to.copy_(source)


class TorchExchange(Exchange):
    """A two-step exchange over torch; a subclass provides all_to_all and all_gather."""

    _all_to_all: Any
    _all_gather: Any

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(3)]

    def _buffer(self, which: int, size_bytes: int) -> torch.Tensor:
        if self._buffers[which].numel() < size_bytes:
            self._buffers[which] = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return self._buffers[which][:size_bytes]

    def _message(self, slice_bytes: int) -> torch.Tensor:
        return self._buffer(0, slice_bytes * self.world_size)

    def _scatter(self, slice_bytes: int) -> list[torch.Tensor]:
        message = self._buffer(0, slice_bytes * self.world_size)
        if self.world_size == 1:
            return [message]
        received = self._buffer(1, slice_bytes * self.world_size)
        self._all_to_all(received, message)
        return list(received.split(slice_bytes))

    def _result(self, slice_bytes: int) -> torch.Tensor:
        return self._buffer(2, slice_bytes)

    def _gather(self, whole: torch.Tensor, slice_bytes: int) -> None:
        mine = self._buffer(2, slice_bytes)
        if self.world_size == 1:
            whole.copy_(mine)
            return
        self._all_gather(whole, mine)


class GroupExchange(TorchExchange):
    """An exchange over a group of torch.distributed. `group` None: the default group; without one, one rank."""

    def __init__(self, group: Any) -> None:
        joined = dist.is_available() and dist.is_initialized()
        super().__init__(dist.get_rank(group) if joined else 0, dist.get_world_size(group) if joined else 1)
        self._group = group

    def _all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        dist.all_to_all_single(received, message, group=self._group)

    def _all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        single(whole, mine, group=self._group)

    def _agree(self, ok: bool) -> bool:
        if self.world_size == 1:
            return ok
        flag = torch.tensor([ok], dtype=torch.uint8, device="cpu")
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)


#: bytes of a block between hosts, and the number of blocks sent ahead of those received. Messages of megabytes in both
#: directions would fill the link's queues: acknowledgements would wait behind data, and half of the link idle
_BLOCK_BYTES = 256 * 1024
_BLOCKS_AHEAD = 6


class GlooExchange(TorchExchange):
    """An exchange over our own Gloo backend in blocks. `members`: each rank's number and host, for errors."""

    def __init__(self, gloo: Any, members: Sequence[tuple[int, str]]) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo, self._members = gloo, members
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def swap(self) -> list[torch.Tensor] | None:
        """Exchange messages of one block between two ranks: their cost depends only on their number."""
        size = self._slice_bytes * self.world_size
        if self.world_size != 2 or size > _BLOCK_BYTES:
            return None
        mine, received = self._buffer(0, size), self._buffer(1, size)
        self.wire_bytes += size
        self._swap([mine] * 2, [received] * 2, size)
        return [mine, received] if self.rank == 0 else [received, mine]

    def _all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        size = message.numel() // self.world_size
        to, into = list(message.split(size)), list(received.split(size))
        into[self.rank].copy_(to[self.rank])
        self._swap(to, into, size)

    def _all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        size = mine.numel()
        into = list(whole.split(size))
        into[self.rank].copy_(mine)
        self._swap([mine] * self.world_size, into, size)

    def _swap(self, to: list[torch.Tensor], into: list[torch.Tensor], size: int) -> None:
        """Send `to[peer]` and receive `into[peer]`: after a few blocks, send one for each one received."""
        blocks = [slice(begin, begin + _BLOCK_BYTES) for begin in range(0, size, _BLOCK_BYTES)]
        receives = [[self._gloo.recv([into[peer][block]], peer, 0) for peer in self._peers] for block in blocks]
        sends = []
        for number, block in enumerate(blocks):
            if number >= _BLOCKS_AHEAD:
                self._wait(receives[number - _BLOCKS_AHEAD])
            sends.append([self._gloo.send([to[peer][block]], peer, 0) for peer in self._peers])
        for each in (*sends, *receives[max(len(blocks) - _BLOCKS_AHEAD, 0) :]):
            self._wait(each)

    def _wait(self, works: list[Any]) -> None:
        """Wait for one operation a peer."""
        for peer, work in zip(self._peers, works):  # wait once: a second wait for the same operation never ends
            try:
                work.wait()
            except RuntimeError as error:
                rank, host = self._members[peer]
                mine, _ = self._members[self.rank]
                raise comm_error(
                    f"compressed bytes between hosts: rank {mine} lost rank {rank} on host {host}, or got no answer: {error}",
                    rank,
                    host,
                ) from error


class HostExchange(Exchange):
    """An exchange over shared memory: a rank reads its pieces where the peers wrote them. It takes two barriers.

    A rank's memory holds its result, then its message. After the second barrier no rank reads messages, and after the next
    exchange's first one no rank reads results, so neither is overwritten while a slower rank reads it.
    """

    def __init__(self, comm: HostComm) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._comm = comm
        self._capacity = 0
        self._parts: list[torch.Tensor] = []

    def _reserve(self, slice_bytes: int) -> None:
        """Make memory for a slice. Collective when it grows; all ranks grow it at the same call."""
        if slice_bytes <= self._capacity:
            return
        size = slice_bytes * (self.world_size + 1)
        arena = self._comm.arena(size, "compressed gradients")
        self._parts = [from_dlpack(arena.tensor(0, "uint8", (size,), None, rank)) for rank in range(self.world_size)]
        self._capacity = slice_bytes

    def _message(self, slice_bytes: int) -> torch.Tensor:
        self._reserve(slice_bytes)
        return self._parts[self.rank][self._capacity : self._capacity + slice_bytes * self.world_size]

    def _scatter(self, slice_bytes: int) -> list[torch.Tensor]:
        self._comm.barrier("compressed gradients")
        begin = self._capacity + self.rank * slice_bytes
        return [part[begin : begin + slice_bytes] for part in self._parts]

    def _result(self, slice_bytes: int) -> torch.Tensor:
        return self._parts[self.rank][:slice_bytes]

    def _gather(self, whole: torch.Tensor, slice_bytes: int) -> None:
        self._comm.barrier("compressed gradients")
        for rank, part in enumerate(self._parts):
            whole[rank * slice_bytes : (rank + 1) * slice_bytes].copy_(part[:slice_bytes])

    def _agree(self, ok: bool) -> bool:
        return b"\0" not in self._comm.all_gather_bytes(b"\1" if ok else b"\0", "compressed gradients")


_exchanges: weakref.WeakKeyDictionary[Any, GroupExchange] = weakref.WeakKeyDictionary()
_single: dict[None, GroupExchange] = {}


def group_exchange(group: Any) -> GroupExchange:
    """Return the exchange over a torch group, one for each group; None is the default group."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    table: Any = _single if group is None else _exchanges
    if group not in table:
        table[group] = GroupExchange(group)
    return table[group]


def slice_numel(numel: int, world_size: int) -> int:
    """Return the elements of a slice that holds this fraction of `numel`, a multiple of the alignment of slices."""
    share = -(-numel // world_size)
    return max(_ALIGNMENT, -(-share // _ALIGNMENT) * _ALIGNMENT)


def check_place(exchange: Exchange, buffer: torch.Tensor) -> None:
    """Raise NotImplementedError for a bucket in memory where an exchange does not work."""
    if cuda.runtime.holds(buffer) and not exchange.on_device:
        raise NotImplementedError(
            "hooks of shardwright.hooks support buckets on the CPU only: on GPUs use sw.wrap(..., compress=...) or torch's own hooks"
        )


def done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return the completed future of a hook that has communicated already."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def fold_slice(exchange: Exchange, message: torch.Tensor, op: str) -> torch.Tensor:
    """Return this rank's slice of begin()'s message in its dtype, averaged or summed over ranks in rank order."""
    if exchange.world_size == 1:
        return message
    pieces = exchange.scatter()
    return _fold(exchange, exchange.result().view(message.dtype), pieces, op)


def fold_message(exchange: Exchange, message: torch.Tensor, op: str) -> torch.Tensor:
    """Return the whole message of begin(), averaged or summed over ranks in rank order."""
    if exchange.world_size == 1:
        return message
    messages = exchange.swap()
    if messages is not None:
        return _fold(exchange, exchange.whole().view(message.dtype), messages, op)
    own = fold_slice(exchange, message, op)
    return exchange.gather().view(own.dtype)


def _fold(exchange: Exchange, result: torch.Tensor, pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    name = str(result.dtype).removeprefix("torch.")
    exchange.fold(result.data_ptr(), [piece.data_ptr() for piece in pieces], result.numel(), name, op)
    return result


def average_plain(exchange: Exchange, flat: torch.Tensor, share: int | None = None, keeps_slice: bool = False) -> None:
    """Average flat memory over ranks in place, without compression; with `keeps_slice` only this rank's `share` elements."""
    if exchange.world_size == 1:
        return
    share = share or slice_numel(flat.numel(), exchange.world_size)
    message = exchange.begin(share * flat.element_size()).view(flat.dtype)
    message[: flat.numel()].copy_(flat)
    message[flat.numel() :].zero_()
    if not keeps_slice:
        flat.copy_(fold_message(exchange, message, "mean")[: flat.numel()])
        return
    flat[exchange.rank * share : (exchange.rank + 1) * share].copy_(fold_slice(exchange, message, "mean"))
    exchange.agree(True)
