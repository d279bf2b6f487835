"""What a `.grad` is, and when a round begins and ends, on a GPU.

The same promises as on the host (docs/design/reduce.md), and the same methods as Reducer has there: a round opens at the
outermost graph task, buckets are sent in index order once all of their gradients exist, `.grad` becomes a view of its
bucket. What differs: the copies into a bucket are enqueued together when it is complete, nothing waits on the host unless
this rank left a parameter unused, and a backward that fails ends the communicator, since peers wait on their GPUs.
"""

from __future__ import annotations

import enum
import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import device
from ._engine import DeviceReducer, Error
from .device import DeviceLink
from .device_registration import Registration
from .gradients import copy_gradient, dense_strides
from .memory import address_of
from .slicing import Slicing


#: bits of a round's tag that count steps and backwards; the rest is a digest
NUMBERS = 0xFFFFFFFF


class _State(enum.Enum):
    CLOSED = enum.auto()
    LOCAL = enum.auto()  # a backward that does not synchronise: gradients are only marked as used
    OPEN = enum.auto()


class Bucket:
    """One bucket of a round."""

    __slots__ = ("index", "shape", "members", "flat", "pending", "pinned", "sent", "streams")

    def __init__(self, engine: DeviceReducer, index: int) -> None:
        self.index = index
        self.shape = engine.bucket_shape(index)
        self.members = engine.bucket_parameters(index)
        self.flat: torch.Tensor | None = None  # None: frozen, takes no part
        self.pinned = False  # always sent at the end of the backward
        self.streams: set[int] = set()  # that its gradients were written on
        self.reset()

    def reset(self) -> None:
        self.pending = len(self.members)
        self.sent = False
        self.streams.clear()


class DeviceRounds:
    """Buckets of gradients on a GPU and their mean, round by round.

    Parameters
    ----------
    link : DeviceLink
    rows : list of (name, numel, dtype, requires_grad)
        One a parameter, in registration order.
    bucket_cap_bytes : int
    reduce : {"mean", "sum"}
    deterministic : bool
        The fold in rank order, with the host's bits, instead of the transport's own mean.
    label : str
        Of the model, in messages.
    wire : {"float16", "bfloat16"}, optional
        In what the mean travels.
    slicing : Slicing, optional
        Who owns what, where slices are kept. Default: each rank one.
    registers : bool
        What travels lies in memory that is registered with NCCL, where all ranks can.
    """

    #: whether the engine keeps slices of the means
    _sliced = False

    def __init__(
        self,
        link: DeviceLink,
        rows: list[tuple[str, int, str, bool]],
        *,
        bucket_cap_bytes: int,
        reduce: str,
        deterministic: bool,
        label: str,
        wire: str | None = None,
        slicing: Slicing | None = None,
        registers: bool = False,
    ) -> None:
        self._link = link
        self._slicing = slicing or Slicing.one_a_rank(link.rank, link.world_size)
        self._label = label
        self._table = rows, bucket_cap_bytes, reduce
        lent = registers and (deterministic or self._sliced or wire is not None)
        self._engine = DeviceReducer(
            link.comm,
            rows,
            bucket_cap_bytes,
            reduce=reduce,
            deterministic=deterministic,
            sliced=self._sliced,
            wire=wire,
            slices=self._slicing.for_engine() if self._sliced else None,
            lent=lent,
        )
        self.wire = wire
        self._registers, self._lent = registers, lent
        self._registration: Registration | None = None
        self._registered: list[torch.Tensor] = []  # memory of the buckets that travel, in order
        self._callback: Callable[[int, bool], None] | None = None
        self._divides_by_active = False
        self._active = self._divisor = link.world_size
        self._names = [row[0] for row in rows]
        self._places = [self._engine.place(index) for index in range(len(rows))]
        self._buckets = [Bucket(self._engine, index) for index in range(self._engine.bucket_count)]
        self._used = bytearray(len(rows))
        self._used_by_any = bytes(len(rows))
        self._ready = bytearray(len(rows))
        self._kept: dict[int, torch.Tensor] = {}
        self._state = _State.CLOSED
        self._next = 0
        self._task = -1
        self._announced: int | None = None
        self._announced_sync = False
        self._finished = False
        self._consumer = 0
        self._step = self._round = 0
        self._stepped = self._noted = 0  # digest of what optimizers have stepped with; and since the last round, a sum
        self._averaged_in = [0] * len(rows)
        self._streams: set[int] = set()
        self._counts = dict.fromkeys(
            ("rounds", "local_rounds", "abandoned", "buckets_sent", "buckets_early", "copies", "bytes"), 0
        )
        self.pending_forward = False
        #: what this rank's optimizer stepped with last, in words
        self.describe_step: Callable[[], str] = str

    # what was chosen ------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """What carries the bytes: "nccl", or "shm" or "ipc", slots in memory of the host or of the GPUs."""
        carrier: str = self._link.comm.describe()["transport"]
        return carrier

    @property
    def transport_reason(self) -> str:
        found = self._link.comm.describe()
        places = {"shm": "slots in the host's memory", "ipc": "slots in the GPUs' memory"}
        whose = ", torch's communicator" if self._link.borrows else ""
        way = places.get(found["transport"], f"NCCL {'.'.join(map(str, found['nccl']))}{whose}")
        why = f" ({self._link.transport_reason})" if self._link.transport_reason else ""
        return f"GPU {found['ordinal']}, {found['name']}; {way}{why}{self._registration_text()}; kernels {found['kernels']}"

    def _registration_text(self) -> str:
        if self._registration is None:
            return ""
        if self._registration.nbytes:
            return f", {self._registration.nbytes} bytes registered"
        return f", nothing registered: {self._registration.reason}"

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    @property
    def planned_bytes(self) -> int:
        return sum(nbytes_of(bucket) for bucket in self._buckets if bucket.shape[3] or bucket.flat is not None)

    def bucket_shape(self, bucket: int) -> tuple[int, int, str, bool]:
        """(offset_bytes, numel, dtype, trainable)."""
        return self._buckets[bucket].shape

    def bucket_parameters(self, bucket: int) -> list[int]:
        """Parameter indices of a bucket, in memory order."""
        return self._buckets[bucket].members

    def bucket(self, bucket: int) -> torch.Tensor:
        """All of its memory, one-dimensional; it takes part."""
        flat = self._buckets[bucket].flat
        assert flat is not None
        return flat

    def standing_ranks(self, index: int) -> int:
        """Ranks whose contribution came without the mean that stands in a slice."""
        return 0

    def place(self, index: int) -> tuple[int, int, int]:
        """(bucket, begin, numel) of a parameter; begin in elements of its bucket."""
        return self._places[index]

    def stats(self) -> dict[str, int]:
        """Counts since creation; `host_waits` and the others of the driver are of the whole GPU."""
        return {**self._counts, **self._link.comm.stats()}

    # tensors --------------------------------------------------------------------------------------------------------

    def attach(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        open: Callable[[], bool],
        task_id: Callable[[], int],
        layouts: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor | None]:
        """Binds the parameters; returns what their `.grad` will be, None where frozen. The list must hold the only references.

        `layouts`: tensors with their shapes and strides, where they themselves are released.
        """
        self._parameters = parameters
        self._layouts = parameters if layouts is None else layouts
        self._open_callback, self._task_id = open, task_id
        self._hook_tables: list[tuple[dict[int, Any], int] | None] = [None] * len(parameters)
        self.views: list[torch.Tensor | None] = [None] * len(parameters)
        if self._registers:
            self._register([bucket for bucket in self._buckets if bucket.shape[3]])
        self._attach_views()
        return self.views

    def _register(self, adopted: Sequence[Bucket]) -> None:
        """All that the engine passes to NCCL in a round, but use bytes, comes to lie in one region. Collective."""
        like = self._parameters[0]
        lent = self._lent_sizes()
        travelling = self._travelling_sizes(adopted) if self.wire is None else []
        self._registration = Registration(self._link, lent + travelling, like, f"buckets of {self._label}")
        buffers = self._registration.buffers
        self._borrowed = buffers[: len(lent)] or [device.runtime.zeros(size, torch.uint8, like) for size in lent]
        self._registered = buffers[len(lent) :]
        if lent:
            self._engine.lend(self._borrowed[0].data_ptr(), self._borrowed[1].data_ptr() if len(lent) > 1 else 0)

    def _lent_sizes(self) -> list[int]:
        """Of what others send, where the fold is the engine's or may become so, and of what `wire` makes of a bucket."""
        if not self._lent:
            return []
        sizes = [max(map(nbytes_of, self._buckets), default=1)]
        if self.wire is not None:
            itemsize: int = getattr(torch, self.wire).itemsize
            sizes.append(max((bucket.shape[1] for bucket in self._buckets), default=1) * itemsize)
        return [max(size, 1) for size in sizes]

    def _travelling_sizes(self, adopted: Sequence[Bucket]) -> list[int]:
        return [nbytes_of(bucket) for bucket in adopted]

    def _end_registration(self, reason: str) -> None:
        """What travels from now on is not all in the region. On all ranks, between two rounds."""
        if self._registration is None or not self._registration.nbytes:
            return
        try:
            self._registration.end(reason)
        except Error as error:
            self._link.fail(f"rank {self._link.rank}: {error}")
            raise

    def _attach_views(self) -> None:
        for bucket in self._buckets:
            if bucket.shape[3]:
                self._adopt(bucket)

    def _adopt(self, bucket: Bucket) -> None:
        _, numel, dtype, _ = bucket.shape
        first = self._parameters[bucket.members[0]]
        bucket.flat = self._adopted(bucket, numel, getattr(torch, dtype), first)
        for index in bucket.members:
            self.views[index] = self._view(bucket, index)

    def _adopted(self, bucket: Bucket, numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Memory for a bucket that takes part from now on; one without elements has an address too."""
        flat = self._registered_memory(numel, dtype)
        if flat is None:
            flat = device.runtime.zeros(max(numel, 1), dtype, like)
        if self._callback is None:
            self._engine.adopt(bucket.index, flat.data_ptr())
        return flat[:numel]

    def _registered_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Of the bucket that is adopted next."""
        return self._registered.pop(0).view(dtype) if self._registered else None

    def _view(self, bucket: Bucket, index: int) -> torch.Tensor:
        assert bucket.flat is not None
        parameter = self._parameters[index]
        _, begin, numel = self._places[index]
        strides = dense_strides(parameter)
        if strides is None:
            return bucket.flat[begin : begin + numel].view(parameter.shape)
        return bucket.flat.as_strided(parameter.shape, strides, begin)

    def _writable_view(self, index: int) -> torch.Tensor:
        """The view, about to be overwritten while `.grad` is something else: who kept it keeps its values."""
        if sys.getrefcount(self.views[index]) > 2 or not self._is_in_place(index):
            kept = self.views[index]
            assert kept is not None
            kept.data = kept.detach().clone(memory_format=torch.preserve_format)
            self.views[index] = self._view(self._bucket_of(index), index)
        view = self.views[index]
        assert view is not None
        return view

    def _is_in_place(self, index: int) -> bool:
        """Whether a view lies in its bucket still: `p.grad.data = x` gives the same object other memory."""
        view, flat = self.views[index], self._bucket_of(index).flat
        _, begin, numel = self._places[index]
        assert view is not None and flat is not None
        return not numel or view.data_ptr() == flat.data_ptr() + begin * flat.element_size()

    def _bucket_of(self, index: int) -> Bucket:
        return self._buckets[self._places[index][0]]

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The post-accumulate-grad hook of parameter `index`. It does not keep the rounds alive."""
        return functools.partial(_run_hook, weakref.ref(self), index)

    def watch_hooks(self, index: int, table: dict[int, Any]) -> None:
        """`table` is where torch keeps the gradient hooks of a parameter, ours the last of them."""
        self._hook_tables[index] = table, len(table)

    def mark_unfrozen(self, index: int) -> None:
        """Its bucket takes part from the next round on."""
        bucket = self._bucket_of(index)
        if bucket.flat is None:
            self._end_registration(f"bucket {bucket.index} was frozen at first")
            self._adopt(bucket)

    # a round --------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._state is not _State.CLOSED

    def is_used(self, index: int) -> bool:
        """Whether a backward of this rank touched a parameter since the last synchronised one."""
        return bool(self._used[index])

    def averaged_in(self, index: int) -> int:
        """The number, from 1, of the last round in which some rank used the parameter; 0: none."""
        return self._averaged_in[index]

    def foreign(self) -> list[int]:
        """Indices of the parameters whose `.grad` is a tensor other than our view."""
        pairs = zip(self._parameters, self.views)
        return [i for i, (p, view) in enumerate(pairs) if p.grad is not None and p.grad is not view]

    def used_by_any(self, index: int) -> bool:
        """After a round: whether some rank used the parameter in it."""
        return bool(self._used_by_any[index])

    def forward(self, synchronised: bool) -> None:
        """Counts a forward with gradients."""
        if self._task_id() >= 0:
            return  # recomputed inside a backward: not a forward of its own
        self._link.check()
        self._link.refuse_capture(f"a forward of {self._label}")
        self._compare_steps()
        self._announced = None
        self._abandon()
        if synchronised:
            self.pending_forward = True

    def open_round(self) -> None:
        """Announces a round to the first gradient."""
        task = self._task_id()
        if self._announced != task:
            self._abandon()
            self._announce(task)

    def _announce(self, task: int) -> None:
        self._announced_sync = self._open_callback()
        self._announced = task
        self._streams.clear()
        self._arrive(self._link.current_stream())

    def _arrive(self, stream: int) -> None:
        """What is written on `stream` from now on is written after the optimizer has read the means that lie there."""
        if self._finished:
            self._engine.release(self._consumer)
            self._finished = False
        self._engine.begin(stream)
        self._streams.add(stream)

    def _open(self, task: int) -> None:
        """At the first gradient: in the announced graph task, or in one nested in it."""
        if self._announced is None:
            self._announce(task)
        assert self._announced is not None
        self._task = self._announced
        self._state = _State.OPEN if self._announced_sync else _State.LOCAL
        if not self._announced_sync:
            return
        self.pending_forward = False
        self._ready = bytearray(len(self._ready))
        self._kept.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.reset()

    def _take(self, index: int) -> None:
        """Parameter `index` has its gradient."""
        task = self._task_id()
        if self._state is _State.CLOSED:
            self._open(task)
        self._used[index] = 1
        if self._state is _State.LOCAL:
            return
        bucket = self._bucket_of(index)
        if bucket.sent:
            bucket.pinned = True
            raise Error(
                f"parameter {self._names[index]!r} got a second gradient in one backward after bucket {bucket.index} of "
                f"{self._label} was sent, so the graph is not that of the backwards before; wrap again"
            )
        watched = self._hook_tables[index]
        hooked_later = watched is not None and len(watched[0]) > watched[1]
        if hooked_later or self._ready[index] or task != self._task:
            bucket.pinned = True  # others may still change it
        if not self._ready[index]:
            self._ready[index] = 1
            bucket.pending -= 1
        stream = self._link.current_stream()
        if stream not in self._streams:
            self._arrive(stream)
        bucket.streams.add(stream)
        if bucket.pending == 0 and bucket.index == self._next:
            self._advance()

    def _advance(self) -> None:
        """Sends, in index order, what is complete. In the first round nothing: it shows who is hooked twice."""
        while self._callback is None and self._counts["rounds"] and self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.flat is not None:
                if bucket.pending or bucket.pinned:
                    return
                self._counts["buckets_early"] += 1
                self._send(bucket)
            self._next = bucket.index + 1

    def _send(self, bucket: Bucket) -> None:
        comm, stream = self._link.comm, self._link.current_stream()
        others = bucket.streams - {stream}
        for other in others:
            comm.follow(stream, other)
        self._enqueue(bucket, stream)
        for other in others:  # gradients that were copied go back to the allocator of the stream they come from
            comm.follow(other, stream)
        bucket.sent = True
        self._counts["buckets_sent"] += 1
        self._counts["bytes"] += nbytes_of(bucket)

    def _enqueue(self, bucket: Bucket, stream: int) -> None:
        self._fill(bucket, stream)
        if self._callback is None:
            self._engine.post(bucket.index, stream)

    def _fill(self, bucket: Bucket, stream: int) -> None:
        """Each gradient of the bucket comes to lie in it."""
        copies: list[tuple[int, int, int]] = []
        copied: list[torch.Tensor] = []  # until the copy is enqueued
        with torch.no_grad():
            for index in bucket.members:
                parameter = self._parameters[index]
                gradient = parameter.grad
                if gradient is not None and gradient is self.views[index] and self._is_in_place(index):
                    if not self._used[index]:  # if no rank used it, it stays as it is
                        self._kept[index] = gradient.clone(memory_format=torch.preserve_format)
                    continue
                view = self._writable_view(index)
                if gradient is None:
                    view.zero_()
                    continue
                self._counts["copies"] += 1
                if lies_alike(gradient, view):
                    copies.append((view.data_ptr(), gradient.data_ptr(), view.numel() * view.element_size()))
                    copied.append(gradient)
                else:
                    copy_gradient(view, gradient)
                if self._used[index]:
                    parameter.grad = view
            if copies:
                self._link.comm.pack(copies, stream)

    def close(self) -> None:
        """Ends the round."""
        self._announced = None
        if self._state is _State.LOCAL:
            self._state = _State.CLOSED
            self._counts["local_rounds"] += 1
        elif self._state is _State.OPEN:
            self._finish()

    def _finish(self) -> None:
        self._send_rest()
        used = bytearray(self._used)
        for bucket in self._buckets:
            if bucket.flat is None:
                for index in bucket.members:
                    used[index] = 1  # nobody asks
        self._round += 1
        if self._noted:
            self._stepped = zlib.crc32(self._noted.to_bytes(16, "little"), self._stepped)
            self._noted = 0
        self._end(used, self._tag())
        self._used_by_any = self._engine.used_by_any()
        if self._callback is not None:
            self._call_back(self._callback)
        self._publish()
        self._state = _State.CLOSED
        self._counts["rounds"] += 1
        for index, used_by_any in enumerate(self._used_by_any):
            if used_by_any:
                self._averaged_in[index] = self._counts["rounds"]

    def _send_rest(self) -> None:
        for bucket in self._buckets[self._next :]:
            if bucket.flat is not None:
                self._send(bucket)

    def _end(self, used: bytearray, tag: int | None) -> None:
        """The engine's share of a round is enqueued, and what torch's stream is given next sees it."""
        stream = self._link.current_stream()
        self._engine.finish(used, tag)
        self._engine.take(stream)
        self._link.comm.give_back(stream)
        self._finished, self._consumer = True, stream

    def _call_back(self, callback: Callable[[int, bool], None]) -> None:
        """A communication hook averages bucket after bucket. Its exception ends the round here, and no communicator."""
        due = [bucket.index for bucket in self._buckets if bucket.flat is not None]
        try:
            for index in due:
                callback(index, index == due[-1])
        except BaseException:
            self._state = _State.CLOSED
            self._counts["abandoned"] += 1
            raise

    def _tag(self) -> int:
        """What must be equal on all ranks in a round."""
        return self._stepped << 32 | (self._step & 0xFFFF) << 16 | self._round & 0xFFFF

    def _publish(self) -> None:
        for bucket in self._buckets:
            for index in bucket.members if bucket.flat is not None else ():
                view = self.views[index]
                assert view is not None
                if self._used_by_any[index]:
                    parameter = self._parameters[index]
                    if parameter.grad is not view:
                        parameter.grad = view
                elif index in self._kept:
                    with torch.no_grad():
                        view.copy_(self._kept[index])
                self._used[index] = 0
        self._kept.clear()

    def close_pending(self) -> None:
        """A whole round, if a forward has none."""
        if self._task_id() >= 0:
            raise Error(
                "optimizer.step() was called inside a backward, before its gradients were averaged: call it after backward() "
                "has returned"
            )
        if self._announced is not None:  # an exception left the backward open, and the caller steps all the same
            self._announced = None
            self._abandon()
        if self.pending_forward and self._state is _State.CLOSED:
            self._run_outside()

    def average(self) -> None:
        """A whole round outside a backward: what stands in `.grad` are the contributions, and every parameter that has one is used."""
        if self._task_id() >= 0 or self._state is not _State.CLOSED:
            raise Error("gradients are averaged by an explicit call outside of a backward only")
        for index, parameter in enumerate(self._parameters):
            if self._bucket_of(index).flat is not None and self._holds_contribution(index, parameter.grad):
                self._used[index] = 1
        self._run_outside()

    def _holds_contribution(self, index: int, gradient: torch.Tensor | None) -> bool:
        return gradient is not None

    def _run_outside(self) -> None:
        """A round that no backward announced."""
        self._announced, self._announced_sync = -1, True
        self._streams.clear()
        self._arrive(self._link.current_stream())
        self._open(-1)
        self.close()

    # what goes wrong ------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """The backward of an open round has failed: tells the peers, who wait for this rank's buckets on their GPUs."""
        if self._state is _State.OPEN:
            self._counts["abandoned"] += 1
            self._link.fail(
                f"a backward of {self._label} failed on rank {self._link.rank} in the middle of a round: on GPUs that ends "
                "the communicator; wrap again, on every rank"
            )
        self._state = _State.CLOSED

    def _abandon(self) -> None:
        """A round that an exception left open."""
        if self._state is _State.OPEN:
            self.fail()
            self._link.check()
        self._state = _State.CLOSED

    def count_step(self) -> None:
        """A step of the optimizer, on torch's current stream."""
        self._consumer = self._link.current_stream()
        self._step, self._round = self._step + 1, 0

    def note_step(self, digest: int) -> None:
        """Adds what the next step uses to what ranks compare in each round: it travels with the round's tag."""
        self._noted += digest  # several optimizers may step in any order between two rounds

    def forget_steps(self) -> None:
        """Counts from 0 again; on all ranks."""
        self._step = self._round = self._stepped = self._noted = 0

    def _compare_steps(self) -> None:
        """Raises if, in a round before, ranks were at different steps or backwards. Known a step later, on all ranks."""
        found = self._engine.check()
        if found is not None:
            self._link.fail(self._explain(*found))
            self._link.check()

    def _explain(self, tag: int, unlike: int) -> str:
        step, number = tag >> 16 & 0xFFFF, tag & 0xFFFF
        if not unlike & NUMBERS:
            return (
                f"ranks disagree about the optimizer of {self._label}: before backward {number} after step {step} they have stepped with different "
                f"hyperparameters, so that their parameters differ{self.describe_step()}: begin again from a checkpoint, with the same on every rank"
            )
        return (
            f"ranks ran different numbers of backwards or optimizer steps of {self._label}: their gradients were averaged while "
            f"rank {self._link.rank} was in backward {number} after step {step}, and others were not; the average, and what was "
            "stepped on since, is wrong: begin again from a checkpoint, with the same number on every rank"
        )

    # others than the engine, and ranks that contribute nothing ---------------------------------------------------------

    def set_bucket_callback(self, callback: Callable[[int, bool], None]) -> None:
        """From now on `callback(bucket, is_last)` averages the buckets, at the end of a backward, on torch's current stream.

        The engine keeps what is left: who used what, whether ranks are at the same step, and no bucket.
        """
        rows, cap_bytes, reduce = self._table
        if self._finished:
            self._engine.release(self._consumer)
            self._finished = False
        self._end_registration("buckets are averaged by a communication hook")
        self._callback = callback
        self._engine = DeviceReducer(self._link.comm, rows, cap_bytes, reduce=reduce)

    def set_divide_by(self, active_only: bool) -> None:
        """Whether means divide by the ranks that still train, of which set_active() tells."""
        self._divides_by_active = active_only
        self.set_active([True] * self._link.world_size)

    def set_active(self, trains: Sequence[bool]) -> None:
        """Which ranks still train, as all know it before a round."""
        self._active = sum(trains)
        self._divisor = self._active if self._divides_by_active else self._link.world_size
        self._engine.leave_out(bytes(trains))
        self._engine.divide_by(self._divisor)

    def divisor(self) -> int:
        """Ranks that a communication hook's mean is to be over."""
        return self._divisor

    def shadow(self) -> None:
        """A whole round without contributing, in which this rank has no say."""
        self._link.check()
        self.pending_forward = False
        stream = self._link.current_stream()
        self._streams.clear()
        self._arrive(stream)
        for bucket in self._buckets:
            if bucket.flat is None:
                continue
            for index in bucket.members:
                if self._parameters[index].grad is not self.views[index]:
                    self._writable_view(index)
            if self._callback is not None:
                bucket.flat.zero_()
            else:
                fill_with_nothing(bucket.flat)
                self._engine.post(bucket.index, stream)
        self._end(bytearray(len(self._used)), None)
        if self._callback is not None:
            self._used_by_any = self._engine.used_by_any()
            self._call_back(self._callback)


def fill_with_nothing(memory: torch.Tensor) -> None:
    """What a sum does not see: of -0.0 and x it is x, for every x."""
    real = torch.view_as_real(memory) if memory.is_complex() else memory
    real.fill_(-0.0 if real.is_floating_point() else 0)


def nbytes_of(bucket: Bucket) -> int:
    """Of its gradients."""
    _, numel, dtype, _ = bucket.shape
    itemsize: int = getattr(torch, dtype).itemsize
    return numel * itemsize


def _run_hook(rounds: weakref.ref[DeviceRounds], index: int, parameter: torch.Tensor) -> None:
    alive = rounds()
    if alive is not None:
        alive._take(index)


def lies_alike(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether the bytes of a gradient are those of its view, to be copied as they are."""
    return (
        address_of(gradient) != 0
        and gradient.dtype is view.dtype
        and gradient.device == view.device
        and gradient.stride() == view.stride()
        and not gradient.is_conj()
        and not gradient.is_neg()
    )
