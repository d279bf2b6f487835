"""A parameter of fully_shard, which is two objects: a DTensor over this rank's rows, and the whole one.

The DTensor is what parameters(), optimizers and state dicts see. The whole parameter is the engine's, and stands in the
module while its unit is whole (docs/design/fully_shard.md).
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .._engine import Error, HostComm
from ..formats.stored import Stored, attributes_of, waits
from ..layout.local_parameters import SHARDED, module_parameter
from ..layout.memory import address_of, reserved
from ..layout.param_groups import UnitPlan
from ..layout.param_table import ParameterTable
from ..torch_compat import cuda
from ..torch_compat.dtensor import (
    held_tensor,
    is_dtensor,
    made_dtensor,
    mesh_of_both,
    placed_like,
    replicate,
    set_held_tensor,
    shard,
)
from ..torch_compat.internals import refresh_weights

__all__ = ["RowsTaken", "ShardedParameter", "shared_memory", "sharded_of"]


def sharded_of(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the ShardedParameter of either of its two objects, or of an entry of a table; else None."""
    found: ShardedParameter | None = getattr(module_parameter(parameter), SHARDED, None)
    return found


class ShardedParameter:
    """One parameter, cut by rows over the last dimension of `mesh`.

    `sharded` is the DTensor, whose local tensor lies in `piece` once there is an engine; `whole` the engine's parameter.
    `holders`: the modules and names of its slots. `dim` is cut as torch.chunk cuts it. `mean`: the DTensor over this
    rank's slice of the averaged gradient.
    """

    def __init__(
        self, holders: list[tuple[torch.nn.Module, str]], parameter: torch.nn.Parameter, mesh: Any, dim: int
    ) -> None:
        self.dim, self._mesh = dim, mesh
        self.name = holders[0][1]
        self._holders: list[tuple[weakref.ref[torch.nn.Module], str]] = []  # weak: hooks of parameters hold this object
        for module, name in holders:
            self.add_holder(module, name)
        self.whole: torch.nn.Parameter | None = None
        self.piece: torch.Tensor | None = None
        self.mean: torch.Tensor | None = None
        self.mean_address = 0
        part = held_tensor(parameter) if is_dtensor(parameter) else parameter.detach()
        self._shape, self.dtype, self._of_model = part.shape, part.dtype, None
        self._global = parameter.shape, parameter.stride()
        if is_dtensor(parameter):
            self._of_model = parameter.device_mesh, parameter.placements
        #: the parameter that was there, if it has no values: init=, weights= or its file may give them to the engine
        self._waiting = parameter if waits(parameter) else None
        rows = self._own_rows(part)
        self.sharded = torch.nn.Parameter(self._dtensor(rows, *self._place()), requires_grad=parameter.requires_grad)
        vars(self.sharded).update(attributes_of(parameter))
        setattr(parameter, SHARDED, self)
        setattr(self.sharded, SHARDED, self)
        self.show(self.sharded)

    def add_holder(self, module: torch.nn.Module, name: str) -> None:
        """Add a slot, such as one that is tied."""
        self._holders.append((weakref.ref(module), name))

    def _own_rows(self, part: torch.Tensor) -> torch.Tensor:
        rank, ranks = self._mesh.get_local_rank(self._mesh.ndim - 1), self._mesh.size(self._mesh.ndim - 1)
        if self._waiting is not None:
            part = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
        chunks = torch.chunk(part, ranks, self.dim)
        if rank < len(chunks):
            return chunks[rank].clone(memory_format=torch.contiguous_format)
        return part.new_empty([0 if at == self.dim else size for at, size in enumerate(self._shape)])

    def _place(self) -> tuple[Any, list[Any]]:
        """Return the DTensor's mesh and placements: with tensor parallelism those of both meshes."""
        mesh = self._mesh
        replicas = [replicate()] * (mesh.ndim - 1)
        if self._of_model is None:
            return mesh, [*replicas, shard(self.dim)]
        model_mesh, placements = self._of_model
        parts = 1
        for at, each in enumerate(placements):
            parts *= model_mesh.size(at) if each.is_shard(self.dim) else 1
        return mesh_of_both(mesh, model_mesh), [*replicas, shard(self.dim, parts), *placements]

    def _dtensor(self, local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
        return made_dtensor(local, mesh, placements, *self._global)

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor over `local`, placed as the sharded parameter."""
        return placed_like(local, self.sharded)

    def like_rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a DTensor over this rank's rows in memory order, placed as the sharded parameter."""
        return self.like(self.in_shape(flat, held_tensor(self.sharded).shape))

    def leave_mean(self) -> None:
        """Leave the mean of an earlier round to the program if it has kept it, in memory of its own."""
        if self.mean is not None and _references(self) > _OWN_REFERENCES:
            with torch.no_grad():
                set_held_tensor(self.mean, held_tensor(self.mean).clone())
            self.mean = None

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copied tensor is no parameter of the engine."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def check_gradient(self, gradient: Any, name: str) -> None:
        """Raise Error for a gradient that is not placed as its parameter."""
        placed = self.sharded.placements  # type: ignore[attr-defined]
        if not is_dtensor(gradient) or gradient.placements != placed:
            raise Error(
                f"the gradient of {name!r} must be a DTensor placed as its parameter, {placed}, got "
                f"{getattr(gradient, 'placements', type(gradient).__name__)}"
            )

    @property
    def row_numel(self) -> int:
        """Return the elements of a row, of which the slices have whole numbers."""
        numel = self._shape.numel()
        return max(numel // self._shape[self.dim], 1) if numel else 1

    @property
    def chunk_numel(self) -> int:
        """Return the elements of the largest chunk, to which FSDP2 pads every rank's."""
        return -(-self._shape[self.dim] // self._mesh.size(self._mesh.ndim - 1)) * self.row_numel

    def make_whole(self, shared: torch.Tensor | None) -> None:
        """Put the whole parameter into the slots, over addresses without pages, or over what shared_memory() returned."""
        local = held_tensor(self.sharded)
        if local.is_meta:
            self.whole = self._waiting
        else:
            self.dtype = local.dtype  # of .to() since the call
            numel = self._shape.numel()
            if shared is not None:
                flat = shared[: numel * self.dtype.itemsize].view(self.dtype)
            else:
                flat = reserved(numel, self.dtype)[0] if numel and local.is_cpu else local.new_empty(numel)
            data = self.in_shape(flat, self._shape)
            if self._of_model is not None:
                data = self._dtensor(data, *self._of_model)
            self.whole = torch.nn.Parameter(data, requires_grad=self.sharded.requires_grad)
            vars(self.whole).update(attributes_of(self.sharded))
        setattr(self.whole, SHARDED, self)
        self.show(self.whole)

    def in_shape(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return rows in memory order as a tensor of `shape`, the dimension that is cut first in memory."""
        first = [shape[self.dim], *(size for at, size in enumerate(shape) if at != self.dim)]
        return flat.view(first).movedim(0, self.dim)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole parameter."""
        return self._shape.numel() * held_tensor(self.sharded).element_size()

    @property
    def waits(self) -> bool:
        """Return True while it has no values: init=, weights= or its file give them."""
        return held_tensor(self.sharded).is_meta

    @property
    def is_stored(self) -> bool:
        """Return True if its values are in a file."""
        return isinstance(self._waiting, Stored)

    def show(self, parameter: torch.Tensor | None) -> None:
        """Put one of the two objects into the slots."""
        for holder, name in self._holders:
            module = holder()
            if module is not None:
                module._parameters[name] = parameter  # type: ignore[assignment]
                refresh_weights(module)

    def show_whole(self) -> None:
        """Put the whole parameter into the slots; it trains if the sharded one does."""
        self._follow()
        self.show(self.whole)

    def _follow(self) -> None:
        assert self.whole is not None
        if self.whole.requires_grad is not self.sharded.requires_grad:
            self.whole.requires_grad_(self.sharded.requires_grad)

    def adopt(self) -> bool:
        """Take the DTensor that a program put into a slot, and the values that it gave the local tensor. True for a new one.

        to_empty(), load_state_dict(assign=True) and a conversion put other objects there, or other data under the same.
        """
        module, name = self._holders[0][0](), self._holders[0][1]
        now, is_new = self.sharded if module is None else module._parameters.get(name), False
        if now is not self.sharded and now is not self.whole:
            if not is_dtensor(now) or now.shape != self.sharded.shape:
                raise Error(
                    f"parameter {name!r} was replaced by a {type(now).__name__} of shape "
                    f"{tuple(getattr(now, 'shape', ()))} after sw.fully_shard: a DTensor of shape {tuple(self.sharded.shape)} is needed"
                )
            self.sharded, is_new = now, True  # type: ignore[assignment]
            setattr(now, SHARDED, self)
            self.show(self.sharded)
        if self.piece is not None:
            assert self.whole is not None
            self.lie_in(self.piece)
            self._follow()
        return is_new

    def lie_in(self, piece: torch.Tensor) -> None:
        """Move the local tensor's values into this rank's slice, where it lies from now on."""
        self.piece = piece
        local = held_tensor(self.sharded)
        if local.numel() == 0 or address_of(local) == address_of(piece):
            return
        with torch.no_grad():
            rows = self.in_shape(piece, local.shape)
            if local.is_meta:  # the engine gave it its values
                self._become(torch.nn.Parameter(self.like(rows), requires_grad=self.sharded.requires_grad))
                return
            if local.dtype is not piece.dtype:
                raise Error(
                    f"parameter {self.name!r} became {local.dtype} after its first run as {piece.dtype}: convert the module before"
                )
            rows.copy_(local)
            local.data = rows

    def _become(self, held: torch.nn.Parameter) -> None:
        """Give the sharded parameter memory and keep its identity, which an optimizer may hold."""
        attributes = dict(vars(self.sharded))
        torch.utils.swap_tensors(self.sharded, held)
        vars(self.sharded).update(attributes)


def _references(holder: Any) -> int:
    """Return the references to holder.mean, those of this question included, whose number depends on Python."""
    mean = holder.mean
    return sys.getrefcount(mean)


#: of a mean that no program keeps
_OWN_REFERENCES = _references(types.SimpleNamespace(mean=object()))


class RowsTaken:
    """What an engine takes the values of its slices from: the local tensors of DTensors, which move there. See Building."""

    in_units = gave = True
    stored: dict[str, Any] = {}

    def __init__(self, rows: Sequence[ShardedParameter]) -> None:
        self._rows = rows

    def fill(self, store: Any, table: ParameterTable, plans: Sequence[UnitPlan], comm: HostComm) -> None:
        """Move the local tensors into the slices."""
        self.fill_real(store, table)

    def fill_real(self, store: Any, table: ParameterTable, group: Any = None) -> None:
        take_rows(store, table, range(len(table.parameters)))

    def undo(self) -> None:
        """Do nothing: the local tensors keep their values."""

    keep = undo


def shared_memory(rows: Sequence[ShardedParameter]) -> torch.Tensor | None:
    """Return memory of a GPU, on which addresses without pages cannot be had, for whole parameters that nothing reads yet.

    They share it until the engine has memory for them: it has the size of the largest one. None on the host.
    """
    made = [(each.nbytes, held_tensor(each.sharded)) for each in rows if not each.waits]
    most = max((nbytes for nbytes, local in made if cuda.runtime.holds(local)), default=0)
    return made[0][1].new_empty(most, dtype=torch.uint8) if most else None


def take_rows(store: Any, table: ParameterTable, indices: Sequence[int]) -> None:
    """Let the sharded parameters of a table lie in this rank's slices."""
    for index in indices:
        sharded = sharded_of(table.parameters[index])
        assert sharded is not None
        sharded.lie_in(store.own_slice(index))
