"""Optimizer state in a file: offload="nvme:<folder>".

The state of sw.optim's optimizers, masters included, lies in one unnamed file for each rank. A step moves it through
three buffers (csrc/optim/offload.h). Other code sees ordinary tensors over the mapped file, whose pages the kernel may
drop after use.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Error, StateFile
from ..comm.process_group import HostGroup
from ..layout.views import dense_strides

if TYPE_CHECKING:
    from .device_offload import DeviceRoute

__all__ = ["StateStore", "make_store"]

_PAGE_BYTES = 4096
_GROWTH_BYTES = 16 << 20
#: bytes of one of the three buffers; 8 MiB a read for AdamW's two arrays
BUFFER_BYTES = 16 << 20
_serials = itertools.count()


def rounded_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in the file, rounded up to whole pages."""
    return -(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES


class _Region:
    """A range of the file that belongs to one tensor while the tensor lives."""

    __slots__ = ("store", "address", "size")

    def __init__(self, store: StateStore, address: int, size: int) -> None:
        self.store, self.address, self.size = store, address, size

    def __del__(self) -> None:
        self.store._take_back(self)


class StateStore:
    """The state file of one rank.

    Parameters
    ----------
    folder : str
        A folder on the disk; it must exist.
    label : str
        The file's name in messages.
    nbytes : int
        Bytes to allocate on the disk now. The file grows if needed.

    Raises
    ------
    OSError
        If the folder does not exist, is not writable, or has no space for `nbytes`.
    """

    def __init__(self, folder: str, label: str, nbytes: int = 0) -> None:
        self.folder, self._owner = folder, os.getpid()
        self.route: DeviceRoute | None = None  # set if parameters are on a GPU
        self.file = StateFile(folder, f"{label}-{os.getpid()}-{next(_serials)}.state", BUFFER_BYTES)
        self._next = self._end = 0
        self._free: dict[int, list[int]] = {}
        self._used: set[int] = set()
        if nbytes:
            self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self._next = self.file.grow(nbytes)
        self._end = self._next + nbytes

    def _take(self, size: int) -> tuple[int, bool]:
        """Return (address, True if it holds zeros) of `size` free bytes."""
        free = self._free.get(size)
        if free:
            return free.pop(), False
        if self._end - self._next < size:
            self._grow(max(size, _GROWTH_BYTES))
        address = self._next
        self._next += size
        return address, True

    def _take_back(self, region: _Region) -> None:
        self._used.discard(region.address)
        self._free.setdefault(region.size, []).append(region.address)

    def _new(self, like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        if like.numel() == 0:
            return torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False), True
        size = rounded_bytes(like.numel(), dtype)
        address, is_zero = self._take(size)
        name, strides = str(dtype).removeprefix("torch."), dense_strides(like)
        region = _Region(self, address, size)
        self._used.add(address)
        capsule = self.file.tensor(address, name, list(like.shape), None if strides is None else list(strides), region)
        return from_dlpack(capsule), is_zero

    def empty(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor in the file with the shape and strides of `like` and undefined contents."""
        return self._new(like, dtype)[0]

    def zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros in the file with the shape and strides of `like`."""
        made, is_zero = self._new(like, dtype)
        return made if is_zero else made.zero_()

    def adopt(self, state: dict[str, Any]) -> None:
        """Move tensors of a state from memory into the file (loaded or older state); scalars stay in memory."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step" and value.numel():
                if value.data_ptr() not in self._used:
                    state[key] = self.empty(value, value.dtype).copy_(value)

    def place(self) -> Any:
        """Return (route, stream) for a step of parameters on a GPU; None on the host."""
        if os.getpid() != self._owner:
            raise Error(
                f"optimizer: its state lies in a file of process {self._owner}, and process {os.getpid()}, a forked child, would overwrite "
                "it: step in that process, or make an optimizer without offload= in the child"
            )
        return None if self.route is None else self.route.place()

    @property
    def planned_nbytes(self) -> int:
        """Return the bytes of parameter memory that offloading takes: the buffers, if parameters are in host memory."""
        return self.file.buffer_nbytes if self.route is None else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the file."""
        return self.file.nbytes

    def describe(self) -> dict[str, Any]:
        """Return the entry of describe()."""
        file = self.file
        path = "bypasses the page cache" if file.direct else "through the page cache: the file system refuses O_DIRECT"
        route = {} if self.route is None else self.route.describe()
        return {"offload": f"nvme:{self.folder}", "offload_io": path, **route}


def make_store(group: HostGroup, folder: str, label: str, nbytes: int) -> StateStore:
    """Create a store on every rank, or raise the same error on every rank. Collective."""
    store, verdict = None, (0, "")
    try:
        store = StateStore(folder, f"shardwright-{label}-rank{group.rank}", nbytes)
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or str(error)
        verdict = (getattr(error, "errno", None) or 12, f"offload to '{folder}' on rank {group.rank}: {why}")
    verdicts = group.comm.all_gather_bytes(json.dumps(verdict).encode(), f"offload of {label}")
    for number, text in map(json.loads, verdicts):
        if text:
            raise OSError(number, text)
    assert store is not None
    return store
