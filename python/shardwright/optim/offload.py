"""Optimizer state off the device of its parameters: offload="nvme:<folder>" and "cpu".

In a file: state lies in one unnamed file for each rank. A step moves it through three buffers (csrc/optim/offload.h);
other code sees tensors over the mapped file. For parameters on a GPU a step copies gradients to the host and new
parameters back, batch by batch through pinned memory; the host's threads compute it (csrc/zero/device_offload.h).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import DeviceOffload, Error, StateFile
from ..backend.device_link import DeviceLink
from ..comm.agreement import gather_answers
from ..comm.process_group import HostGroup
from ..layout.views import dense_strides, dtype_name
from ..parallel.moved_tensors import Pages, in_pages
from ..torch_compat import cuda
from ..torch_compat.dtensor import held_tensor, is_dtensor, like_dtensor

_GROWTH_BYTES = 16 << 20
#: bytes of one of a file's three buffers; 8 MiB a read for AdamW's two arrays
BUFFER_BYTES = 16 << 20
#: bytes of each of a GPU's three slots; 2 Mi elements
SLOT_BYTES = 16 << 20
_THREADS_MAX = 16
_serials = itertools.count()


class DeviceRoute:
    """The path of a step with parameters on the GPU of `link`, whose host's ranks, `group`, share its cores."""

    def __init__(self, group: HostGroup, link: DeviceLink) -> None:
        here = sum(host == group.host_of[group.rank] for host in group.host_of)
        threads = max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // here))
        self._ordinal = link.ordinal
        self._offload = DeviceOffload(link.comm, SLOT_BYTES, threads)
        #: counts of batches and of bytes in both directions
        self.stats = self._offload.stats

    def place(self) -> tuple[DeviceOffload, int]:
        """Return the engine's route and the stream that orders a step."""
        return self._offload, cuda.runtime.current_stream(self._ordinal)

    def describe(self) -> dict[str, Any]:
        return {"offload_pinned_bytes": self._offload.buffer_nbytes, "offload_threads": self._offload.thread_count}


class _Region:
    """A range of the file that belongs to one tensor while the tensor lives."""

    __slots__ = ("store", "address", "size")

    def __init__(self, store: StateStore, address: int, size: int) -> None:
        self.store, self.address, self.size = store, address, size

    def __del__(self) -> None:
        self.store._take_back(self)


class StateStore:
    """The place of one rank's optimizer state: a file in `folder` of at first `nbytes`, or host memory for None."""

    def __init__(self, folder: str | None, label: str, nbytes: int = 0) -> None:
        self.folder, self._owner, self._nbytes = folder, os.getpid(), nbytes
        self.route: DeviceRoute | None = None  # set if parameters are on a GPU
        name = f"{label}-{os.getpid()}-{next(_serials)}.state"
        self.file = None if folder is None else StateFile(folder, name, BUFFER_BYTES)
        self._used: set[int] = set()
        if self.file is not None:
            self._pages = Pages(self.file, _GROWTH_BYTES)
            if nbytes:
                self._pages.grow(nbytes)

    def _take_back(self, region: _Region) -> None:
        self._used.discard(region.address)
        self._pages.give_back(region.address, region.size)

    def empty(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of the store with the shape and strides of `like` and undefined contents."""
        return self.new(like, dtype)[0]

    def zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros of the store with the shape and strides of `like`."""
        made, is_new = self.new(like, dtype)
        return made if is_new else made.zero_()

    def new(self, like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """Return a tensor of the store with the shape and strides of `like`, and True if it lies in new pages of the file, which hold zeros."""
        if is_dtensor(like):
            local, is_new = self.new(held_tensor(like), dtype)
            return like_dtensor(local, like if like.dtype is dtype else torch.empty_like(like, dtype=dtype)), is_new
        file = self.file
        if file is None or like.numel() == 0:
            return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False), False
        size = in_pages(like.numel() * dtype.itemsize)
        address, is_new = self._pages.take(size)
        name, strides = dtype_name(dtype), dense_strides(like)
        region = _Region(self, address, size)
        self._used.add(address)
        capsule = file.tensor(address, name, list(like.shape), None if strides is None else list(strides), region)
        return from_dlpack(capsule), is_new

    def adopt(self, state: dict[str, Any]) -> None:
        """Move tensors of loaded or older state into the store; scalars stay in memory."""
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            held = held_tensor(value) if is_dtensor(value) else value
            if self.file is None:
                state[key] = value if held.device.type == "cpu" else value.cpu()  # which a GPU's queue waits for
            elif key != "step" and held.numel() and held.data_ptr() not in self._used:
                state[key] = self.empty(value, value.dtype).copy_(value)

    def place(self) -> Any:
        """Return (route, stream) for a step of parameters on a GPU; None on the host."""
        if self.file is not None and os.getpid() != self._owner:
            raise Error(
                f"optimizer: its state lies in a file of process {self._owner}, and process {os.getpid()}, a forked child, would overwrite "
                "it: step in that process, or make an optimizer without offload= in the child"
            )
        return None if self.route is None else self.route.place()

    @property
    def planned_nbytes(self) -> int:
        """Return the bytes of parameter memory that offloading takes: a file's buffers, unless parameters are on a GPU."""
        return self.file.buffer_nbytes if self.file is not None and self.route is None else 0

    @property
    def nbytes(self) -> int:
        return self._nbytes if self.file is None else self.file.nbytes

    def describe(self) -> dict[str, Any]:
        route = {} if self.route is None else self.route.describe()
        if self.file is None:
            return {"offload": "cpu", **route}
        direct = self.file.direct
        path = "bypasses the page cache" if direct else "through the page cache: the file system refuses O_DIRECT"
        return {"offload": f"nvme:{self.folder}", "offload_io": path, **route}


_Made = TypeVar("_Made", DeviceRoute, StateStore)


def _made_together(group: HostGroup, make: Callable[[], _Made], label: str, **options: Any) -> _Made:
    """Return what this rank makes, or raise an error on every rank. Collective."""
    made: list[_Made] = []

    def answer() -> bytes:
        made.append(make())
        return b""

    refusals = (OSError, MemoryError, ValueError, Error)
    gather_answers(group.comm, answer, f"offload of {label}", refusals=refusals, **options)
    return made[0]


def make_route(group: HostGroup, link: DeviceLink, label: str) -> DeviceRoute:
    """Create a route on every rank, or raise an error on every rank. Collective."""

    def retell(rank: int, sentence: str) -> Exception:
        return Error(f"offload of {label} on rank {rank}: {sentence}")

    return _made_together(group, lambda: DeviceRoute(group, link), label, retell=retell)


def make_store(group: HostGroup, folder: str | None, label: str, nbytes: int) -> StateStore:
    """Create a file on every rank, or raise OSError with the same sentence on every rank, collectively; None: in memory."""
    if folder is None:
        return StateStore(None, label, nbytes)

    def make() -> StateStore:
        try:
            return StateStore(folder, f"shardwright-{label}-rank{group.rank}", nbytes)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or str(error)
            number = getattr(error, "errno", None) or 12
            raise OSError(number, f"offload to '{folder}' on rank {group.rank}: {why}") from None

    def retell(rank: int, sentence: str) -> Exception:
        number, _, text = sentence.partition("[Errno ")[2].partition("] ")
        return OSError(int(number), text) if number else Error(sentence)

    return _made_together(group, make, label, retell=retell, alike=True)
