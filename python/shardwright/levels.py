"""Where compressed bytes travel: between ranks on one host, and between hosts where there are several.

Across hosts the fold inside each host is plain, in memory: float32, in rank order. One rank a host, its lowest, compresses
that partial sum, exchanges it with the other hosts' and hands the result to its host. So a host sends what one rank would,
whatever the number of ranks on it, and what a compressor owes is the host's: kept by that rank alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .compression_state import CompressionState
from .exchange import Exchange, GlooExchange, HostExchange, real_bucket
from .process_group import comm_error

if TYPE_CHECKING:
    from ._engine import HostComm
    from .process_group import HostGroup

_Hook = Callable[[Any, Any], Any]


class Levels:
    """On one host there is one level.

    Attributes
    ----------
    exchange : Exchange
        What a compressor exchanges over. Its rank and world_size are a host's where there are several.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def average(self, flat: torch.Tensor, compressed: Callable[[], None], label: str) -> None:
        """The mean over all ranks in place of `flat`, by `compressed`, which averages it over `exchange`. Collective."""
        compressed()

    def hook(self, hook: _Hook) -> _Hook:
        """`hook`, of a state over `exchange`, as a hook of contributions of every rank."""
        return hook


class HostLevels(Levels):
    """Of several hosts. `flat` is float32.

    Parameters
    ----------
    group : HostGroup
    inside : HostComm or None
        The ranks of this host; None for one alone.
    between : Backend or None
        Of every host's lowest rank; None on the others.
    """

    def __init__(self, group: HostGroup, inside: HostComm | None, between: Any) -> None:
        host = group.host_of[group.rank]
        self._inside = inside
        self._is_first = between is not None
        self._first = group.host_of.index(host)
        self._host_name = group.hosts[self._first]
        self._share = group.host_count / group.world_size
        super().__init__(
            GlooExchange(between) if self._is_first else Exchange(host, group.host_count, takes_part=False)
        )

    def average(self, flat: torch.Tensor, compressed: Callable[[], None], label: str) -> None:
        if self._inside is not None:
            self._inside.all_reduce(flat.data_ptr(), flat.numel(), "float32", "sum", label)
        failure: Exception | None = None
        if self._is_first:
            try:
                if self._share != 1:  # the mean over hosts is then that over ranks
                    flat.mul_(self._share)
                compressed()
            except Exception as error:  # raised once its host knows
                failure = error
        if self._inside is not None:
            self._hear(failure, label)
        if failure is not None:
            raise failure
        if self._inside is not None:
            self._inside.broadcast([(flat.data_ptr(), 4 * flat.numel())], 0, label)

    def _hear(self, failure: Exception | None, label: str) -> None:
        """What the lowest rank of this host has to say of its exchange. Collective inside the host."""
        assert self._inside is not None
        mine = "" if failure is None else f"{type(failure).__name__}: {failure}"
        said = self._inside.all_gather_bytes(mine.encode(), label)[0].decode()
        if said and failure is None:
            raise comm_error(
                f"{label}: rank {self._first}, which exchanges for host {self._host_name}, failed: {said}",
                self._first,
                self._host_name,
            )

    def hook(self, hook: _Hook) -> _Hook:
        def run(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            real = real_bucket(bucket)
            buffer: torch.Tensor = real.buffer()
            flat = buffer if buffer.dtype == torch.float32 else buffer.float()
            view = _HostBucket(real, flat)
            self.average(flat, lambda: hook(state, view).wait(), "compressed gradients")
            if not self._is_first and isinstance(state, CompressionState):
                state.end_bucket(bucket.is_last())
            if flat is not buffer:
                buffer.copy_(flat)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        return run


class _HostBucket:
    """A bucket as a host's contribution: float32, and nothing said about slices, which are ranks'."""

    def __init__(self, bucket: Any, flat: torch.Tensor) -> None:
        self._bucket, self._flat = bucket, flat

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        shift = self._flat.storage_offset() - self._bucket.buffer().storage_offset()
        return [
            self._flat.as_strided(g.shape, g.stride(), g.storage_offset() + shift) for g in self._bucket.gradients()
        ]

    def parameters(self) -> list[torch.Tensor]:
        return list(self._bucket.parameters())

    def used(self) -> list[bool]:
        return list(self._bucket.used())

    def index(self) -> int:
        return int(self._bucket.index())

    def is_last(self) -> bool:
        return bool(self._bucket.is_last())


#: (inside, between) of a communicator over several hosts: wrappers share them
_joined: weakref.WeakKeyDictionary[HostGroup, tuple[HostComm | None, Any]] = weakref.WeakKeyDictionary()


def levels_of(group: HostGroup) -> Levels:
    """Between the ranks of `group`. Collective at first use across hosts."""
    if group.host_count == 1:
        return Levels(HostExchange(group.comm))
    if group not in _joined:
        timeout_s = group.comm.timeout_s
        firsts = [group.host_of.index(host) for host in range(group.host_count)]
        inside = group.join_inside(timeout_s)
        between = group.gloo_group("between", firsts, timeout_s) if group.rank in firsts else None
        _joined[group] = inside, between
    inside, between = _joined[group]
    if inside is not None:
        inside.timeout_s = group.comm.timeout_s
    return HostLevels(group, inside, between)
