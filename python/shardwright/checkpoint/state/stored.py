"""Descriptions of a folder's tensors, from the headers of its safetensors files."""

from __future__ import annotations

import dataclasses

import torch

from ..._engine import CheckpointError, CheckpointFolder, prefer_huge_pages
from ...formats.lazy import TORCH_DTYPES, complex_dtype, is_complex_mark

_OWN_MAPPING_BYTES = 32 << 20
"""size from which malloc always makes a separate mapping: new pages, shared with no other allocation"""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file. `complex_dtype` is set if the file stores a complex tensor's real view."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    complex_dtype: torch.dtype | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.complex_dtype or TORCH_DTYPES[self.dtype]

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.shape if self.complex_dtype is None else self.shape[:-1]

    def empty(self) -> torch.Tensor:
        """Return a new tensor of this dtype and shape."""
        made = torch.empty(self.torch_shape, dtype=self.torch_dtype, device="cpu")
        if self.nbytes >= _OWN_MAPPING_BYTES:
            prefer_huge_pages(made.data_ptr(), self.nbytes)
        return made


def stored_tensors(folder: CheckpointFolder, prefix: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of files `prefix`*.safetensors, and the names tied to them."""
    tensors: dict[str, Stored] = {}
    tied: dict[str, str] = {}
    for path in folder.files:
        if not (path.startswith(prefix) and path.endswith(".safetensors")):
            continue
        metadata, entries = folder.tensors(path)
        for name, dtype, shape, begin, nbytes in entries:
            of_complex = complex_dtype(f"{folder.path}/{path}", metadata, name, dtype, shape)
            if name in tensors:
                raise CheckpointError(f"'{folder.path}' holds the tensor '{name}' twice")
            tensors[name] = Stored(path, dtype, tuple(shape), begin, nbytes, of_complex)
        tied |= {n: kept for n, kept in metadata.items() if n != "format" and not is_complex_mark(n, kept)}
    return tensors, tied
