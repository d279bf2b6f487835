"""Optimizer state in the host's memory, or in a file, while parameters are on a GPU: offload="cpu" and "nvme:<folder>".

A step takes gradients down and new parameters up, batch by batch through pinned memory, and is computed by the host's threads
(csrc/zero/device_offload.h). To everybody else state is ordinary tensors on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from . import device
from ._engine import DeviceOffload, Error
from .device import DeviceLink
from .process_group import HostGroup

__all__ = ["DeviceRoute", "HostStateStore", "make_route"]

#: of each of three slots; 2 Mi elements
SLOT_BYTES = 16 << 20
_THREADS_MAX = 16


class DeviceRoute:
    """What a step goes through whose parameters are on a GPU and whose state is not.

    Parameters
    ----------
    group : HostGroup
        Its ranks on this host share the cores.
    link : DeviceLink
        Of the parameters' GPU.
    """

    def __init__(self, group: HostGroup, link: DeviceLink) -> None:
        self._ordinal = link.ordinal
        self._offload = DeviceOffload(link.comm, SLOT_BYTES, _thread_count(group))

    def place(self) -> tuple[DeviceOffload, int]:
        """The engine's way, and the stream in whose order a step is."""
        return self._offload, device.runtime.current_stream(self._ordinal)

    def stats(self) -> dict[str, int]:
        """Batches, and bytes of both ways."""
        return self._offload.stats()

    def describe(self) -> dict[str, Any]:
        """For describe()."""
        return {"offload_pinned_bytes": self._offload.buffer_nbytes, "offload_threads": self._offload.thread_count}


class HostStateStore:
    """Where an optimizer of sw.optim keeps its state: the host's memory.

    Parameters
    ----------
    route : DeviceRoute
    nbytes : int
        Of the state, once every parameter was stepped on. For describe().
    """

    file = None

    def __init__(self, route: DeviceRoute, nbytes: int) -> None:
        self.route, self.nbytes = route, nbytes

    def empty(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Of a tensor's shape and strides, on the CPU; holds anything."""
        return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)

    def zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same, zeroed."""
        return torch.zeros_like(like, dtype=dtype, device="cpu", requires_grad=False)

    def adopt(self, state: dict[str, Any]) -> None:
        """Moves what a state has on the GPU (it was loaded, or is older than the offload) to the host."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                state[key] = value.cpu()

    def place(self) -> tuple[DeviceOffload, int]:
        """What a step goes through, and the stream in whose order it is."""
        return self.route.place()

    @property
    def planned_nbytes(self) -> int:
        """Of the GPU's memory."""
        return 0

    def describe(self) -> dict[str, Any]:
        """For describe()."""
        return {"offload": "cpu", **self.route.describe()}


def make_route(group: HostGroup, link: DeviceLink, label: str) -> DeviceRoute:
    """A route on every rank, or an error on every rank. Collective."""
    route, failure = None, None
    try:
        route = DeviceRoute(group, link)
    except (OSError, MemoryError, ValueError, Error) as error:
        failure = error
    said = group.comm.all_gather_bytes(str(failure or "").encode(), f"offload of {label}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text:
            raise Error(f"offload of {label} on rank {rank}: {text.decode()}")
    assert route is not None
    return route


def _thread_count(group: HostGroup) -> int:
    """A rank's share of the host's cores."""
    here = sum(host == group.host_of[group.rank] for host in group.host_of)
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // here))
