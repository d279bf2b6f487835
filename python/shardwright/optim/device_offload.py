"""Optimizer state in host memory or in a file, for parameters on a GPU: offload="cpu" and "nvme:<folder>".

A step copies gradients to the host and new parameters to the GPU, batch by batch through pinned memory; the host's
threads compute it (csrc/zero/device_offload.h). Other code sees the state as ordinary CPU tensors.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from .._engine import DeviceOffload, Error
from ..backend.device_link import DeviceLink
from ..comm.agreement import gather_answers
from ..comm.process_group import HostGroup
from ..torch_compat import cuda

__all__ = ["DeviceRoute", "HostStateStore", "make_route"]

#: bytes of each of the three slots; 2 Mi elements
SLOT_BYTES = 16 << 20
_THREADS_MAX = 16


class DeviceRoute:
    """The path of a step with parameters on a GPU and state on the host.

    Parameters
    ----------
    group : HostGroup
        The ranks of this host, which share its cores.
    link : DeviceLink
        The link of the parameters' GPU.
    """

    def __init__(self, group: HostGroup, link: DeviceLink) -> None:
        self._ordinal = link.ordinal
        self._offload = DeviceOffload(link.comm, SLOT_BYTES, _thread_count(group))

    def place(self) -> tuple[DeviceOffload, int]:
        """Return the engine's route and the stream that orders a step."""
        return self._offload, cuda.runtime.current_stream(self._ordinal)

    def stats(self) -> dict[str, int]:
        """Return counts of batches and of bytes in both directions."""
        return self._offload.stats()

    def describe(self) -> dict[str, Any]:
        """Return the entry of describe()."""
        return {"offload_pinned_bytes": self._offload.buffer_nbytes, "offload_threads": self._offload.thread_count}


class HostStateStore:
    """The host memory in which an optimizer of sw.optim keeps its state.

    Parameters
    ----------
    route : DeviceRoute
    nbytes : int
        Bytes of the state once every parameter has been stepped on, for describe().
    """

    file = None

    def __init__(self, route: DeviceRoute, nbytes: int) -> None:
        self.route, self.nbytes = route, nbytes

    def empty(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a CPU tensor with the shape and strides of `like` and undefined contents."""
        return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False)

    def zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a CPU tensor of zeros with the shape and strides of `like`."""
        return torch.zeros_like(like, dtype=dtype, device="cpu", requires_grad=False)

    def adopt(self, state: dict[str, Any]) -> None:
        """Move tensors of a state from the GPU to the host (loaded or older state)."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                state[key] = value.cpu()

    def place(self) -> tuple[DeviceOffload, int]:
        """Return the route of a step, and the stream that orders it."""
        return self.route.place()

    @property
    def planned_nbytes(self) -> int:
        """Return the bytes of GPU memory that offloading takes."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the entry of describe()."""
        return {"offload": "cpu", **self.route.describe()}


def make_route(group: HostGroup, link: DeviceLink, label: str) -> DeviceRoute:
    """Create a route on every rank, or raise an error on every rank. Collective."""
    made: list[DeviceRoute] = []

    def make() -> bytes:
        made.append(DeviceRoute(group, link))
        return b""

    gather_answers(
        *(group.comm, make, f"offload of {label}"),
        refusals=(OSError, MemoryError, ValueError, Error),
        retell=lambda rank, sentence: Error(f"offload of {label} on rank {rank}: {sentence}"),
    )
    return made[0]


def _thread_count(group: HostGroup) -> int:
    """Return the number of the host's cores for one rank."""
    here = sum(host == group.host_of[group.rank] for host in group.host_of)
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // here))
