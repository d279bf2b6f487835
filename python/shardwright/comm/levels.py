"""The levels of a compressed exchange: between ranks of one host, or between hosts if there are several.

With several hosts the fold inside each host is not compressed: float32 in shared memory, in rank order. The carrier of
each host, its lowest rank, compresses that partial sum, exchanges it with the other hosts and publishes the result on
its host. A host with any number of ranks therefore sends the bytes of one rank, and only the carrier keeps the
compressor's error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..layout.bucket import Bucket, places_of, real_bucket
from .agreement import gather_answers
from .exchange import Exchange, GlooExchange, HostExchange, done
from .process_group import comm_error

if TYPE_CHECKING:
    from .._engine import HostComm
    from .process_group import HostGroup

_Hook = Callable[[Any, Any], Any]


class Levels:
    """The single level of one host. `exchange` is a compressor's; it counts hosts if there are several."""

    def __init__(self, exchange: Exchange, roads: Roads | None = None) -> None:
        self.exchange, self._roads = exchange, roads

    def average(self, flat: torch.Tensor, compressed: Callable[[], None], label: str) -> None:
        """Average `flat` over all ranks in place. `compressed` averages it over `exchange`. Collective."""
        with contextlib.nullcontext() if self._roads is None else self._roads.watched():
            self._average(flat, compressed, label)

    def _average(self, flat: torch.Tensor, compressed: Callable[[], None], label: str) -> None:
        compressed()

    def hook(self, hook: _Hook) -> _Hook:
        """Make a hook for contributions of every rank from `hook`, whose state is over `exchange`."""
        return hook


class HostLevels(Levels):
    """Several hosts. `flat` is float32."""

    def __init__(self, group: HostGroup, roads: Roads) -> None:
        host = group.host_of[group.rank]
        self._inside = roads.inside
        self._is_carrier = roads.between is not None
        self._carrier = group.host_of.index(host)
        self._host_name = group.hosts[self._carrier]
        self._share = group.host_count / group.world_size
        firsts = group.carriers
        super().__init__(
            GlooExchange(roads.between, [(first, group.hosts[first]) for first in firsts])
            if self._is_carrier
            else Exchange(host, group.host_count, takes_part=False),
            roads,
        )

    def _average(self, flat: torch.Tensor, compressed: Callable[[], None], label: str) -> None:
        if self._inside is not None:
            self._inside.all_reduce(flat.data_ptr(), flat.numel(), "float32", "sum", label)

        def between() -> bytes:
            if self._is_carrier:
                if self._share != 1:  # turns the mean over hosts into the mean over ranks
                    flat.mul_(self._share)
                compressed()
            return b""

        def failed(_: int, sentence: str) -> Exception:
            text = f"{label}: rank {self._carrier}, which exchanges for host {self._host_name}, failed: {sentence}"
            return comm_error(text, self._carrier, self._host_name)

        if self._inside is None:
            between()
            return
        gather_answers(self._inside, between, label, refusals=(Exception,), retell=failed)
        self._inside.broadcast([(flat.data_ptr(), 4 * flat.numel())], 0, label)

    def hook(self, hook: _Hook) -> _Hook:
        def run(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            real = real_bucket(bucket)
            buffer: torch.Tensor = real.buffer()
            flat = buffer if buffer.dtype == torch.float32 else buffer.float()
            view = Bucket.over(flat, real, places_of(real.gradients(), buffer))
            self.average(flat, lambda: hook(state, view).wait(), "compressed gradients")
            if not self._is_carrier and getattr(state, "follows_rounds", False):
                state.end_bucket(bucket.is_last())
            if flat is not buffer:
                buffer.copy_(flat)
            return done(bucket.buffer())

        return run


class Lease:
    """One thread's use of communicators. They become free when the lease is collected."""


@dataclasses.dataclass(eq=False, repr=False)
class Roads:
    """The extra communicators of a group over several hosts: of this host's ranks, and on carriers of the hosts."""

    inside: HostComm | None
    between: Any
    lease: weakref.ref[Lease] | None = None
    has_failed: bool = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Never lease these communicators again after a failure."""
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise

    @property
    def is_free(self) -> bool:
        return self.lease is not None and self.lease() is None and not self.has_failed


#: roads by group. All exchanges on the caller's thread share the first ones
_joined: weakref.WeakKeyDictionary[HostGroup, list[Roads]] = weakref.WeakKeyDictionary()


def levels_of(group: HostGroup) -> Levels:
    """Return the levels of `group` for its calling thread. Collective at first use across hosts."""
    if group.host_count == 1:
        return Levels(HostExchange(group.comm))
    roads = _joined.setdefault(group, [])
    return _levels(group, roads[0] if roads else _join(group, roads))


def leased_levels(group: HostGroup) -> tuple[Levels, Lease]:
    """Return levels for another thread, valid while the lease is held. Collective."""
    roads, lease = _joined.setdefault(group, []), Lease()
    if not roads and group.host_count > 1:
        _join(group, roads)
    gathered = group.comm.all_gather_bytes(bytes(each.is_free for each in roads), "communicators that are free")
    free = [
        k for k in range(len(roads)) if all(each[k] for each in gathered)
    ]  # the lists are equally long on all ranks, which create them together
    found = roads[free[0]] if free else _join(group, roads)
    found.lease = weakref.ref(lease)
    return _levels(group, found), lease


def _join(group: HostGroup, roads: list[Roads]) -> Roads:
    timeout_s = group.comm.timeout_s
    firsts = group.carriers
    inside = group.join_inside(timeout_s)
    crosses = group.host_count > 1 and group.rank in firsts
    between = group.gloo_group(f"between/{len(roads)}", firsts, timeout_s) if crosses else None
    roads.append(Roads(inside, between))
    return roads[-1]


def _levels(group: HostGroup, roads: Roads) -> Levels:
    if roads.inside is not None:
        roads.inside.timeout_s = group.comm.timeout_s
    if group.host_count == 1:
        return Levels(HostExchange(roads.inside or group.comm), roads)
    return HostLevels(group, roads)
