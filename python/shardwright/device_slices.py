"""Rounds on a GPU in which this rank keeps its slices of the means alone (zero 2 and 3).

As sliced_gradients.c on the host: `.grad` is None, a tensor of autograd's own, or the parameter's ShardedGradient, which may
hold what backwards have added since the last round. When a bucket is complete its contributions are copied into one of
two places that all buckets share (the second need not hold the largest); the slice of the mean is folded out of it into memory that stays, on top of what stood
there where `.grad` was not cleared.

On the host ranks tell one another whether theirs was; here that would be a wait. Every rank takes it that the others did as it did, and
a digest of what it did travels with the round's tag: where they differ, all are told before a later forward.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import device
from .device_rounds import NUMBERS, Bucket, DeviceRounds, _State, fill_with_nothing, lies_alike, nbytes_of
from .gradients import copy_gradient, dense_strides
from .sharded_gradient import GradientBoard, ShardedGradient


class SlicedDeviceRounds(DeviceRounds):
    """DeviceRounds whose means are slices.

    Attributes
    ----------
    board : GradientBoard
        What the gradients answer together; made by attach().
    """

    _sliced = True
    board: GradientBoard

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ring: list[torch.Tensor] = []  # bytes: of the largest bucket that takes part, and of the next
        self._turn = 0
        self._standing = bytearray(len(self._names))
        #: digest of the units that were gathered so far
        self.order: Callable[[], int] = int
        #: inside a join: what tells ranks that have joined what stands, as a round opens
        self.announce_round: Callable[[bytes], None] | None = None

    @property
    def planned_bytes(self) -> int:
        sizes = [nbytes_of(bucket) for bucket in self._buckets if bucket.shape[3] or bucket.flat is not None]
        return sum(sizes) // self._slicing.count + sum(sorted(sizes)[-self._places_wanted() :])

    # tensors --------------------------------------------------------------------------------------------------------

    def _attach_views(self) -> None:
        self.board = GradientBoard(self._link.host, self, self._label, speaks=self._slicing.speaks)
        super()._attach_views()

    def _adopt(self, bucket: Bucket) -> None:
        _, numel, dtype, _ = bucket.shape
        like = self._parameters[bucket.members[0]]
        bucket.flat = self._adopted(bucket, numel // self._slicing.count, getattr(torch, dtype), like)
        self._make_ring(like)
        for index in bucket.members:
            low, high = self._run(bucket, index)
            self.views[index] = ShardedGradient(index, _dense(self._layouts[index]), bucket.flat[low:high], self.board)

    def _travelling_sizes(self, adopted: Sequence[Bucket]) -> list[int]:
        return sorted(map(nbytes_of, adopted), reverse=True)[: self._places_wanted()]

    def _registered_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None  # slices do not travel

    def _make_ring(self, like: torch.Tensor) -> None:
        if self._registered:
            if self._registration is not None and self._registration.nbytes:
                self._ring = self._registered
                return
            self._registered = []
        sizes = sorted(nbytes_of(bucket) for bucket in self._buckets if bucket.flat is not None)
        sizes = sizes[-self._places_wanted() :][::-1]
        if [place.numel() for place in self._ring] == sizes:
            return
        if self._ring:  # torch may give it to others once its stream is behind ours
            self._link.comm.follow(self._link.current_stream(), self._link.comm.stream)
        self._ring = [device.runtime.zeros(size, torch.uint8, like) for size in sizes]

    def _places_wanted(self) -> int:
        """Where a hook averages, buckets follow one another on torch's stream."""
        return 2 if self._callback is None else 1

    def _run(self, bucket: Bucket, index: int) -> tuple[int, int]:
        """[begin, end) of a parameter in this rank's slice of its bucket; an empty one where it has none."""
        width = bucket.shape[1] // self._slicing.count
        _, begin, numel = self._places[index]
        low = max(begin - self._slicing.own * width, 0)
        return low, max(low, min(begin + numel - self._slicing.own * width, width))

    # a round --------------------------------------------------------------------------------------------------------

    def _open(self, task: int) -> None:
        super()._open(task)
        if self.announce_round is not None and self._state is _State.OPEN:
            self.announce_round(bytes(self._stands(index) for index in range(len(self.views))))

    def _stands(self, index: int) -> bool:
        """Whether the contribution is on top of the mean that stands in the slice."""
        view = self.views[index]
        return isinstance(view, ShardedGradient) and self._parameters[index].grad is view and not view._cleared

    def _holds_contribution(self, index: int, gradient: torch.Tensor | None) -> bool:
        return gradient is not None and (gradient is not self.views[index] or gradient._pending is not None)  # type: ignore[attr-defined]

    def _enqueue(self, bucket: Bucket, stream: int) -> None:
        flat = self._take_place(bucket, stream)
        copies: list[tuple[int, int, int]] = []
        copied: list[torch.Tensor] = []  # until the copy is enqueued
        with torch.no_grad():
            for index in bucket.members:
                self._place(flat, index, copies, copied)
            if copies:
                self._link.comm.pack(copies, stream)
        if self._callback is None:
            self._engine.post_slice(bucket.index, flat.data_ptr(), self._standing_runs(bucket), stream)

    def _travelling(self, bucket: Bucket) -> torch.Tensor:
        """The whole bucket, in the place whose turn it is."""
        return self._ring[self._turn][: nbytes_of(bucket)].view(getattr(torch, bucket.shape[2]))

    # Where a hook averages, a bucket is filled just before: until then gradients are autograd's.

    def set_bucket_callback(self, callback: Callable[[int, bool], None]) -> None:
        super().set_bucket_callback(callback)
        adopted = next((bucket for bucket in self._buckets if bucket.flat is not None), None)
        if adopted is not None:
            self._make_ring(self._parameters[adopted.members[0]])
            self._turn = 0

    def bucket(self, bucket: int) -> torch.Tensor:
        return self._travelling(self._buckets[bucket])

    def standing_ranks(self, index: int) -> int:
        return self._active if self._standing[index] else 0

    def _send_rest(self) -> None:
        if self._callback is None:
            super()._send_rest()
            return
        for index in range(len(self.views)):  # what the round's tag tells the others
            self._standing[index] = self._stands(index)

    def _call_back(self, callback: Callable[[int, bool], None]) -> None:
        def average(index: int, is_last: bool) -> None:
            self._send(self._buckets[index])
            callback(index, is_last)

        super()._call_back(average)

    def _take_place(self, bucket: Bucket, stream: int) -> torch.Tensor:
        """Where the bucket travels; what is given to the stream next may write there."""
        self._turn = (self._turn + 1) % len(self._ring)
        if self._ring[self._turn].numel() < nbytes_of(bucket):
            self._turn = 0
        if self._callback is None:
            self._engine.reserve(self._turn, stream)
        return self._travelling(bucket)

    def shadow(self, standing: Sequence[int] = ()) -> None:
        """A whole round without contributing, in which this rank has no say; it goes on averaging its slices.

        `standing`: a number a parameter, whether contributions are on top of the mean that stands."""
        self._link.check()
        self.pending_forward = False
        self._standing[:] = bytes(standing)
        for index, view in enumerate(self.views):
            if self._standing[index]:
                assert isinstance(view, ShardedGradient)
                self._kept[index] = view.piece.clone()
        stream = self._link.current_stream()
        self._streams.clear()
        self._arrive(stream)
        for bucket in self._buckets if self._callback is None else ():
            if bucket.flat is not None:
                flat = self._take_place(bucket, stream)
                fill_with_nothing(flat)
                self._engine.post_slice(bucket.index, flat.data_ptr(), self._standing_runs(bucket), stream)
        self._end(bytearray(len(self._used)), None)
        self._used_by_any = self._engine.used_by_any()
        if self._callback is not None:
            self._shadow_hook(self._callback)
        self._restore_unused()
        self._counts["rounds"] += 1  # what slices were scaled by is forgotten, and norms of them

    def _shadow_hook(self, callback: Callable[[int, bool], None]) -> None:
        def average(index: int, is_last: bool) -> None:
            self._take_place(self._buckets[index], self._link.current_stream()).zero_()
            callback(index, is_last)

        super()._call_back(average)

    def _restore_unused(self) -> None:
        """What no rank used stays as it was."""
        with torch.no_grad():
            for index, piece in self._kept.items():
                view = self.views[index]
                assert isinstance(view, ShardedGradient)
                if not self._used_by_any[index]:
                    view.piece.copy_(piece)
        self._kept.clear()

    def _place(
        self, flat: torch.Tensor, index: int, copies: list[tuple[int, int, int]], copied: list[torch.Tensor]
    ) -> None:
        """This rank's contribution comes to lie in `flat`, out of `.grad`."""
        parameter, view = self._parameters[index], self.views[index]
        assert isinstance(view, ShardedGradient)
        gradient = parameter.grad
        source = view._pending if gradient is view else gradient
        stands = self._standing[index] = self._stands(index)
        if stands and not self._used[index]:  # if no rank used it, it stays as it is
            self._kept[index] = view.piece.clone()
        _, begin, numel = self._places[index]
        memory = flat[begin : begin + numel].as_strided(view.shape, view.stride())
        if source is None:
            if stands and self.wire is None and self._callback is None:
                fill_with_nothing(memory)
            else:
                memory.zero_()
            return
        self._counts["copies"] += 1
        if lies_alike(source, memory):
            copies.append((memory.data_ptr(), source.data_ptr(), memory.numel() * memory.element_size()))
            copied.append(source)
        else:
            copy_gradient(memory, source)
        if gradient is view:
            view._pending = None
        elif self._used[index]:
            parameter.grad = None

    def _standing_runs(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Of this rank's slice, what contributions are on top of; what is between two such parameters counts as theirs."""
        runs: list[tuple[int, int]] = []
        before = -1
        for position, index in enumerate(bucket.members):
            low, high = self._run(bucket, index)
            if not self._standing[index] or low == high:
                continue
            if runs and before == position - 1:
                runs[-1] = (runs[-1][0], high)
            else:
                runs.append((low, high))
            before = position
        return runs

    def _tag(self) -> int:
        return super()._tag() | zlib.crc32(self._standing, self.order()) << 32

    def _explain(self, tag: int, unlike: int) -> str:
        if unlike & NUMBERS:
            return super()._explain(tag, unlike)
        return (
            f"ranks cleared different gradients of {self._label} (zero_grad, or .grad = None, on some ranks only), or at zero=3 ran different "
            f"units or the same in another order: on GPUs all do the same; the average of backward {tag & 0xFFFF} after step {tag >> 16 & 0xFFFF}, and what was stepped on since, is "
            "wrong: begin again from a checkpoint"
        )

    def _publish(self) -> None:
        for bucket in self._buckets:
            for index in bucket.members if bucket.flat is not None else ():
                view = self.views[index]
                assert isinstance(view, ShardedGradient)
                if self._used_by_any[index]:
                    view._cleared, view._pending = False, None
                    self._parameters[index].grad = view
                self._used[index] = 0
        self._restore_unused()


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides that a gradient of `parameter` has. Not to be read."""
    return parameter if dense_strides(parameter) is not None else parameter.detach().contiguous()
