"""The message of PowerSGD: factors of a bucket's matrices, in float32 or half, and whole small parameters beside them.

Each of the W slices of a half message has a part of the factors in the wire's dtype, then a part of the small
parameters in float32, which have no error feedback. Factors have it: see settle().
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .device_exchange import DeviceExchange, slice_numel


class FactorExchange:
    """An exchange of factors: begin() returns memory for this rank's, average() the ranks' mean. It is reused."""

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self.wire_dtype, self._name = wire_dtype, str(wire_dtype).removeprefix("torch.")
        self.rounds = wire_dtype != torch.float32  # True if the wire rounds the factors
        self._head = 0
        self._small: Sequence[torch.Tensor] = ()
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        self._message = self._scratch
        self._own = self._whole = self._sum = self._term = self._flat = self._scratch
        self._share = self._small_share = self._slice_bytes = 0

    def begin(self, exchange: DeviceExchange, head: int, small: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return the float32 memory for this rank's `head` elements of factors. `small` will be averaged in place.

        The memory is valid until the next begin(). With a 16-bit wire it is private, and settle() corrects it.
        """
        self._head, self._small = head, small
        world, total = exchange.world_size, sum(part.numel() for part in small)
        if not self.rounds:
            self._message = exchange.begin(4 * slice_numel(head + total, world)).view(torch.float32)
            return self._message[:head]
        self._share, self._small_share = slice_numel(head, world), slice_numel(total, world) if total else 0
        self._slice_bytes = 2 * self._share + 4 * self._small_share
        self._message = exchange.begin(self._slice_bytes)
        self._reserve(exchange)
        return self._own[:head]

    def _reserve(self, exchange: DeviceExchange) -> None:
        world = exchange.world_size
        whole, small = world * self._share, world * self._small_share
        sizes = [whole, whole, self._share, self._share, small]
        if self._scratch.numel() < sum(sizes):
            self._scratch = exchange.floats(sum(sizes))
        *parts, _ = self._scratch.split([*sizes, self._scratch.numel() - sum(sizes)])
        self._own, self._whole, self._sum, self._term, self._flat = parts

    def average(self, exchange: DeviceExchange) -> torch.Tensor:
        """Return the mean of the ranks' factors, with the same bits on every rank, and average `small`."""
        if self.rounds:
            return self._average_half(exchange)
        pack(exchange, self._message[self._head :], self._small)
        whole = exchange.fold_message(self._message, "mean")
        unpack(exchange, whole[self._head :], self._small)
        return whole[: self._head]

    def _average_half(self, exchange: DeviceExchange) -> torch.Tensor:
        world, at = exchange.world_size, self._message.data_ptr()
        pack(exchange, self._flat, self._small)
        for rank, (part, small) in enumerate(self._slices(world)):
            place = at + rank * self._slice_bytes
            exchange.encode_half(self._name, place, part.data_ptr(), part.numel(), 1.0 / world)
            rest = self._message[rank * self._slice_bytes :][: self._slice_bytes]
            rest[2 * part.numel() : 2 * self._share].zero_()
            rest[2 * self._share :].view(torch.float32).copy_(small)
        received = self._message
        if world > 1:
            self._fold(exchange)
            received = exchange.gather()
        for rank in range(world):
            place = received.data_ptr() + rank * self._slice_bytes
            exchange.decode_half(self._name, self._whole.data_ptr() + 4 * rank * self._share, place, self._share)
            begin = rank * self._slice_bytes + 2 * self._share
            small = received[begin : begin + 4 * self._small_share].view(torch.float32)
            self._flat[rank * self._small_share :][: self._small_share].copy_(small)
        unpack(exchange, self._flat, self._small)
        return self._whole[: self._head]

    def _slices(self, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's factors and small parameters by slice; the last slices may have fewer factors, or none."""
        own = self._own[: self._head]
        parts = [own[rank * self._share : (rank + 1) * self._share] for rank in range(world)]
        small = [self._flat[rank * self._small_share :][: self._small_share] for rank in range(world)]
        return list(zip(parts, small))

    def _fold(self, exchange: DeviceExchange) -> None:
        """Fold halves as an owner: sum in float32 and rank order, round once, and keep the sum before rounding."""
        pieces = [piece.data_ptr() for piece in exchange.scatter()]
        result = exchange.result().data_ptr()
        self._sum.zero_()
        for piece in pieces:
            exchange.decode_half(self._name, self._term.data_ptr(), piece, self._share)
            self._sum.add_(self._term)
        exchange.encode_half(self._name, result, self._sum.data_ptr(), self._share, 1.0)
        if self._small_share:
            skip = 2 * self._share
            exchange.fold(result + skip, [piece + skip for piece in pieces], self._small_share, "float32", "mean")

    def settle(self, exchange: DeviceExchange) -> torch.Tensor:
        """Return this rank's factors as a 16-bit wire has counted them: encoded, times W.

        Their mean is what average() returned: the owner of a slice adds W times the rounding error of the mean.
        """
        world, own = exchange.world_size, self._own
        for rank in range(world):
            place = self._message.data_ptr() + rank * self._slice_bytes
            exchange.decode_half(self._name, own.data_ptr() + 4 * rank * self._share, place, self._share)
        if world == 1:
            return own[: self._head]
        own.mul_(world)
        mine = slice(exchange.rank * self._share, (exchange.rank + 1) * self._share)
        own[mine].add_(self._whole[mine], alpha=world).sub_(self._sum, alpha=world)
        return own[: self._head]


def pack(exchange: DeviceExchange, message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy the parts one after the other and append zeros."""
    exchange.copy(_places(message, parts))
    message[sum(part.numel() for part in parts) :].zero_()


def unpack(exchange: DeviceExchange, message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    exchange.copy([(part, place) for place, part in _places(message, parts)])


def _places(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = [part.numel() for part in parts]
    return list(zip(message[: sum(sizes)].split(sizes), parts))
