"""The tensors that a folder holds, by the headers of its safetensors files."""

from __future__ import annotations

import dataclasses

import torch

from .._engine import CheckpointError, CheckpointFolder
from .names import TORCH_DTYPES


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file. `complex_dtype` of one that is stored as its real view."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    complex_dtype: torch.dtype | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.complex_dtype or TORCH_DTYPES[self.dtype]

    def empty(self) -> torch.Tensor:
        """A new tensor of this dtype and shape."""
        if self.complex_dtype is not None:
            return torch.empty(self.shape[:-1], dtype=self.complex_dtype)
        return torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype])


def stored_tensors(folder: CheckpointFolder, prefix: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of files `prefix`*.safetensors, and the names tied to them."""
    tensors: dict[str, Stored] = {}
    tied: dict[str, str] = {}
    for path in folder.files:
        if not (path.startswith(prefix) and path.endswith(".safetensors")):
            continue
        metadata, entries = folder.tensors(path)
        for name, dtype, shape, begin, nbytes in entries:
            of_complex = metadata.get(f"complex.{name}")
            complex_dtype = getattr(torch, of_complex) if of_complex in ("complex64", "complex128") else None
            if name in tensors:
                raise CheckpointError(f"'{folder.path}' holds the tensor '{name}' twice")
            tensors[name] = Stored(path, dtype, tuple(shape), begin, nbytes, complex_dtype)
        tied |= {n: kept for n, kept in metadata.items() if n != "format" and not n.startswith("complex.")}
    return tensors, tied
