"""Tensors over the engine's memory, which torch must not move.

`share_memory_()`, and torch.multiprocessing, which calls it for a tensor in a queue, move a storage into new shared
memory. The engine and the other ranks of the host would keep the old memory. So the storage of such a tensor is of a
class of ours, which torch keeps for as long as the storage lives. A queue or a pipe then gets a copy of the bytes, and
an explicit move raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Error


class EngineStorage(torch.UntypedStorage):
    """A storage over the engine's memory. A copy of it is a plain storage."""

    __slots__ = ()

    def clone(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy; torch.multiprocessing then moves that into shared memory."""
        return _same, (self.clone(),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            "share_memory_() or an IPC handle was asked of memory of a wrapped module's parameters, which the engine uses at its address, so that "
            "it cannot move: share a copy, tensor.clone().share_memory_(), or of the whole module sw.full_state_dict(model)"
        )

    share_memory_ = _share_fd_cpu_ = _share_filename_cpu_ = _share_cuda_ = _refuse


# torch.is_storage() and torch.save() know a storage by its class in this set; a file holds the name, of a class in torch
EngineStorage.__name__ = "ByteStorage"
torch._storage_classes.add(EngineStorage)


def _same(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def engine_tensor(capsule: Any) -> torch.Tensor:
    """Return a tensor over the engine's memory from a DLPack capsule; the tensor keeps the memory alive."""
    tensor = from_dlpack(capsule)
    tensor.untyped_storage().__class__ = EngineStorage
    return tensor
