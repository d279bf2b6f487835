"""Optimizer state outside of memory: offload="nvme:<folder>".

The state of sw.optim's optimizers, masters among it, then lies in a file a rank, without a name, and a step moves it through three
buffers (csrc/optim/offload.h). To everybody else it is ordinary tensors: the file is mapped, and state dicts, collectives
and checkpoints read and write its pages, which the system may drop again.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from ._engine import StateFile
from .gradients import dense_strides
from .process_group import HostGroup

if TYPE_CHECKING:
    from .device_offload import DeviceRoute

__all__ = ["StateStore", "make_store", "offload_folder", "offload_kind"]

_PAGE_BYTES = 4096
_GROWTH_BYTES = 16 << 20
#: one of three; 8 MiB a read for AdamW's two arrays
BUFFER_BYTES = 16 << 20
_serials = itertools.count()


def offload_kind(offload: Any) -> str | None:
    """None, "cpu" or "nvme". ValueError of anything else."""
    if offload is None or offload == "cpu":
        return None if offload is None else "cpu"
    if isinstance(offload, str) and offload.startswith("nvme:") and len(offload) > len("nvme:"):
        return "nvme"
    raise ValueError(f"offload must be None, 'cpu' or 'nvme:<folder>', got {offload!r}")


def offload_folder(offload: Any) -> str | None:
    """The folder of "nvme:<folder>"."""
    return os.path.expanduser(offload.removeprefix("nvme:")) if offload_kind(offload) == "nvme" else None


def rounded_bytes(numel: int, dtype: torch.dtype) -> int:
    """What a tensor takes of the file: whole pages."""
    return -(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES


class _Region:
    """A piece of the file, for as long as its tensor lives."""

    __slots__ = ("store", "address", "size")

    def __init__(self, store: StateStore, address: int, size: int) -> None:
        self.store, self.address, self.size = store, address, size

    def __del__(self) -> None:
        self.store._take_back(self)


class StateStore:
    """One rank's file.

    Parameters
    ----------
    folder : str
        On the disk; it must exist.
    label : str
        In messages.
    nbytes : int
        Given their disk space now. More is taken when it is needed.

    Raises
    ------
    OSError
        The folder is not there, cannot be written to, or has no space for `nbytes`.
    """

    def __init__(self, folder: str, label: str, nbytes: int = 0) -> None:
        self.folder = folder
        self.route: DeviceRoute | None = None  # where parameters are on a GPU
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
        """(address, whether it holds zeros) of `size` bytes."""
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
        """In the file, of a tensor's shape and strides; holds anything."""
        return self._new(like, dtype)[0]

    def zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same, zeroed."""
        made, is_zero = self._new(like, dtype)
        return made if is_zero else made.zero_()

    def adopt(self, state: dict[str, Any]) -> None:
        """Moves what a state has in memory (it was loaded, or is older than the offload) into the file; scalars stay."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step" and value.numel():
                if value.data_ptr() not in self._used:
                    state[key] = self.empty(value, value.dtype).copy_(value)

    def place(self) -> Any:
        """What a step of parameters on a GPU goes through, and its stream; else None."""
        return None if self.route is None else self.route.place()

    @property
    def planned_nbytes(self) -> int:
        """Of the memory where parameters are: the buffers, if that is the host's."""
        return self.file.buffer_nbytes if self.route is None else 0

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.file.nbytes

    def describe(self) -> dict[str, Any]:
        """For describe()."""
        file = self.file
        path = "past the page cache" if file.direct else "through the page cache: the file system refuses O_DIRECT"
        route = {} if self.route is None else self.route.describe()
        return {"offload": f"nvme:{self.folder}", "offload_io": path, **route}


def make_store(group: HostGroup, folder: str, label: str, nbytes: int) -> StateStore:
    """A store on every rank, or the same error on every rank. Collective."""
    store, verdict = None, (0, "")
    try:
        store = StateStore(folder, f"shardwright-{label}-rank{group.rank}", nbytes)
    except (OSError, MemoryError) as error:
        verdict = (getattr(error, "errno", None) or 12, getattr(error, "strerror", None) or str(error))
    verdicts = group.comm.all_gather_bytes(json.dumps(verdict).encode(), f"offload of {label}")
    for rank, (number, text) in enumerate(map(json.loads, verdicts)):
        if text:
            raise OSError(number, f"offload to '{folder}' on rank {rank}: {text}")
    assert store is not None
    return store
