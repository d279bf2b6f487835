"""torch's groups as the ranks between which a codec compresses, and helpers of communication hooks."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from .._engine import Exchange


class Ranks(NamedTuple):
    """The ranks between which a model's gradients are compressed: of several hosts, one each."""

    rank: int
    world_size: int
    takes_part: bool = True  # False: another rank of the host has its state


class GroupTransport:
    """A group of torch.distributed. `group` None: the default group; without one, one rank."""

    def __init__(self, group: Any) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if joined else 0
        self.world_size = dist.get_world_size(group) if joined else 1
        self._group = group

    def all_to_all(self, received: Any, message: Any) -> None:
        """Send slice r of `message` to rank r, and receive each rank's slice of this rank, in DLPack capsules."""
        dist.all_to_all_single(from_dlpack(received), from_dlpack(message), group=self._group)

    def all_gather(self, whole: Any, mine: Any) -> None:
        """Gather every rank's `mine` into `whole`."""
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        single(from_dlpack(whole), from_dlpack(mine), group=self._group)


_exchanges: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()
_single: dict[None, Exchange] = {}


def group_exchange(group: Any) -> Exchange:
    """Return the exchange over a torch group, one for each group; None is the default group."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    table: Any = _single if group is None else _exchanges
    if group not in table:
        table[group] = Exchange(GroupTransport(group))
    return table[group]


def done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return the completed future of a hook that has communicated already."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(result)
    return future
