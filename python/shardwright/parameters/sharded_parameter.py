"""A parameter of fully_shard, which is two objects: a DTensor over this rank's rows, and the whole one.

The DTensor is what parameters(), optimizers and state dicts see. The whole parameter is the engine's, and stands in the
module while its unit is whole (docs/design/fully_shard.md).
"""

from __future__ import annotations

import math
import sys
import types
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .._engine import Error, HostComm
from ..formats.stored import Stored, attributes_of, waits
from ..layout.local_parameters import SHARDED, local_of, module_parameter
from ..layout.memory import address_of, reserved, without_memory
from ..layout.param_groups import UnitPlan
from ..layout.param_table import ParameterTable
from ..torch_compat import cuda
from ..torch_compat.autograd import graph_task_id
from ..torch_compat.dtensor import (
    held_tensor,
    is_dtensor,
    like_dtensor,
    made_dtensor,
    mesh_of_both,
    placed_like,
    replicate,
    set_held_tensor,
    shard,
)
from ..torch_compat.internals import has_weights_beside, refresh_weights
from .gather_extensions import Extension, inner_name
from .leaves import Leaf, PlacedLeaf


def sharded_of(parameter: torch.Tensor) -> ShardedParameter | None:
    """Return the ShardedParameter of either of its two objects, or of an entry of a table; else None."""
    found: ShardedParameter | None = getattr(module_parameter(parameter), SHARDED, None)
    return found


def leaf_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf that stands in the place of a table's entry, if there is one."""
    cut = sharded_of(parameter)
    return None if cut is None or cut.leaf is None else cut.leaf.whole


def leaf_entry(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the table's entry for a leaf that stands in its place with its values; None for any other parameter."""
    cut = sharded_of(parameter)
    if cut is None or cut.leaf is None or cut.leaf.whole is not parameter or cut.whole is None or cut.is_extended:
        return None
    return local_of(cut.whole)


def is_extended(parameter: torch.Tensor) -> bool:
    """Return True for either object of a parameter with an all-gather extension."""
    cut = sharded_of(parameter)
    return cut is not None and cut.is_extended


def plain_part(dtensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor; of one whose subclass has its values in a plain tensor, that tensor."""
    part: torch.Tensor = dtensor.to_local()
    if not hasattr(part, "__tensor_flatten__"):
        return part
    cut = sharded_of(dtensor)
    name = inner_name(part) if cut is None else cut._inner
    return getattr(part, name) if name else part


class ShardedParameter:
    """One parameter, cut by rows over the last dimension of `mesh`.

    `sharded` is the DTensor, whose local tensor lies in `piece` once there is an engine; `whole` the engine's parameter.
    `holders`: the modules and names of its slots. `dim` is cut as torch.chunk cuts it. `mean`: the DTensor over this
    rank's slice of the averaged gradient; `zeroes_unused`: it is zero after a round in which no rank used the parameter. `leaf`: what stands in the slots in the place of
    `whole`, if there is one. `policy`: FSDP2's of the call, for an extension. `data`: names of the dimensions of `given_mesh`,
    which the call was given, over which ranks average.
    """

    def __init__(
        self,
        holders: list[tuple[torch.nn.Module, str]],
        parameter: torch.nn.Parameter,
        mesh: Any,
        dim: int,
        data: Collection[str] = (),
        given_mesh: Any = None,
    ) -> None:
        self.dim, self._mesh = dim, mesh
        self.name = holders[0][1]
        self._holders: list[tuple[weakref.ref[torch.nn.Module], str]] = []  # weak: hooks of parameters hold this object
        self._has_recurrent = False
        for module, name in holders:
            self.add_holder(module, name)
        self.whole: torch.nn.Parameter | None = None
        self.piece: torch.Tensor | None = None
        self._piece_address = 0
        self.mean: torch.Tensor | None = None
        self.mean_address = 0
        self.zeroes_unused = False
        self.leaf: Leaf | None = None
        self.policy: Any = None
        self._inner: str | None = ""  # the attribute of the local tensor with its memory; None: it has no one memory
        part = held_tensor(parameter) if is_dtensor(parameter) else parameter.detach()
        self._shape, self.dtype = part.shape, part.dtype
        self._of_model: tuple[Any, Sequence[Any]] | None = None
        self._global = parameter.shape, parameter.stride()
        #: of a DTensor on a mesh with the data dimensions too: (mesh, placements, these dimensions)
        self._of_all: tuple[Any, Sequence[Any], list[int]] | None = None
        if is_dtensor(parameter):
            self._of_model = parameter.device_mesh, parameter.placements
            self._split_mesh(parameter, data, given_mesh)
        #: the parameter that was there, if it has no values: init=, weights= or its file may give them to the engine
        self._waiting = parameter if waits(parameter) else None
        rows = self._own_rows(part)
        self.sharded = torch.nn.Parameter(self._dtensor(rows, *self._place()), requires_grad=parameter.requires_grad)
        vars(self.sharded).update(attributes_of(parameter))
        setattr(parameter, SHARDED, self)
        setattr(self.sharded, SHARDED, self)
        self.show(self.sharded)

    def _split_mesh(self, parameter: Any, data: Collection[str], given_mesh: Any) -> None:
        """Leave to the engine's parameter the dimensions of its mesh that are the model's. Raise ValueError as FSDP2 does."""
        mesh, placements = parameter.device_mesh, parameter.placements
        names = mesh.mesh_dim_names or ()
        found = [at for at, name in enumerate(names) if name in data]
        if not found:
            return
        if mesh != given_mesh:
            raise ValueError(
                f"Expected param's DTensor mesh to be the same mesh passed to fully_shard: parameter {self.name!r} lies on {mesh}, and fully_shard "
                f"got {given_mesh}"
            )
        cut = next((at for at in found if not placements[at].is_replicate()), None)
        if cut is not None:
            raise ValueError(
                f"Expected Replicate() on DP dim {names[cut]!r} (index {cut}) but got {placements[cut]}: parameter {self.name!r}"
            )
        self._of_all = mesh, placements, found
        rest = [at for at in range(mesh.ndim) if at not in found]
        self._of_model = (mesh[tuple(names[at] for at in rest)], [placements[at] for at in rest]) if rest else None

    def add_holder(self, module: torch.nn.Module, name: str) -> None:
        """Add a slot, such as one that is tied."""
        self._holders.append((weakref.ref(module), name))
        self._has_recurrent |= has_weights_beside(module)

    def _own_rows(self, part: torch.Tensor) -> torch.Tensor:
        rank, ranks = self._mesh.get_local_rank(self._mesh.ndim - 1), self._mesh.size(self._mesh.ndim - 1)
        if self._waiting is not None and not hasattr(part, "__tensor_flatten__"):
            part = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
        chunks = torch.chunk(part, ranks, self.dim)
        if hasattr(part, "__tensor_flatten__"):  # with the operations that FSDP2 asks of subclasses
            held, size = part.new_zeros(chunks[0].shape), chunks[rank].shape[self.dim] if rank < len(chunks) else 0
            if size:
                held.narrow(self.dim, 0, size).copy_(chunks[rank])
            return held.narrow(self.dim, 0, size)
        if rank < len(chunks):
            return chunks[rank].clone(memory_format=torch.contiguous_format)
        return part.new_empty([0 if at == self.dim else size for at, size in enumerate(self._shape)])

    def _place(self) -> tuple[Any, list[Any]]:
        """Return the DTensor's mesh and placements: with tensor parallelism those of both meshes."""
        mesh = self._mesh
        replicas = [replicate()] * (mesh.ndim - 1)
        if self._of_all is not None and len(self._of_all[2]) == mesh.ndim:  # no dimension is flattened
            (whole, given, _), placed = self._of_all, list(self._of_all[1])
            cut = whole.mesh_dim_names.index(mesh.mesh_dim_names[-1])
            later = [whole.size(at) for at, each in enumerate(given) if at > cut and each.is_shard(self.dim)]
            placed[cut] = shard(self.dim, math.prod(later))
            return whole, placed
        if self._of_model is None:
            return mesh, [*replicas, shard(self.dim)]
        model_mesh, placements = self._of_model
        parts = 1
        for at, each in enumerate(placements):
            parts *= model_mesh.size(at) if each.is_shard(self.dim) else 1
        return mesh_of_both(mesh, model_mesh), [*replicas, shard(self.dim, parts), *placements]

    def _dtensor(self, local: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
        if type(local) is torch.Tensor:
            return made_dtensor(local, mesh, placements, *self._global)
        plain = torch.empty(local.shape, dtype=local.dtype, device="meta" if local.is_meta else local.device)
        return like_dtensor(local, made_dtensor(plain, mesh, placements, *self._global))

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
            shape = self._find_leaf(local)
            numel = shape.numel()
            if shared is not None:
                flat = shared[: numel * self.dtype.itemsize].view(self.dtype)
            else:
                is_host = numel and local.device.type == "cpu"
                flat = (
                    reserved(numel, self.dtype)[0]
                    if is_host
                    else torch.empty(numel, dtype=self.dtype, device=local.device)
                )
            data = self.placed(self.in_shape(flat, shape))
            self.whole = torch.nn.Parameter(data, requires_grad=self.sharded.requires_grad)
            vars(self.whole).update(attributes_of(self.sharded))
        setattr(self.whole, SHARDED, self)
        self.show(self.whole)

    def _find_leaf(self, local: torch.Tensor) -> torch.Size:
        """Find the leaf: the local tensor's extension, or a DTensor of more dimensions. Return the shape of the engine's parameter."""
        self.leaf = Extension.of(self, self._shape)
        if self._of_all is not None:
            if self.leaf is not None:
                raise NotImplementedError(f"parameter {self.name!r} has an all-gather extension and dp_mesh_dims")
            self.leaf = PlacedLeaf(self, *self._of_all, self._global)
        self._inner = inner_name(local)
        if not self.is_extended and self._inner != "":
            raise Error(
                f"parameter {self.name!r} is {without_memory(local)}, and defines no fsdp_pre_all_gather. Name it in ignored_params, which leaves "
                "it as it is on each rank"
            )
        # one that is frozen, and whose values are not the engine's, needs no memory of it
        is_absent = self._inner is None and not self.sharded.requires_grad and self._of_model is None
        return torch.Size([0]) if is_absent else self._shape

    @property
    def is_extended(self) -> bool:
        """Return True if its local tensor has an all-gather extension, so that no unit has memory for it."""
        return self.leaf is not None and self.leaf.is_extension

    @property
    def is_opaque(self) -> bool:
        """Return True if its values are in no slice, but in several tensors of a subclass."""
        return self._inner is None

    def check_values(self, what: str) -> None:
        """Raise Error, which says `what` needs them, for a parameter whose values no slice has."""
        if self.is_opaque:
            raise Error(
                f"{what}: parameter {self.name!r} is a {type(held_tensor(self.sharded)).__name__}, which has its values in several tensors, not in "
                "slices: use state_dict() with torch.distributed.checkpoint, and an optimizer over module.parameters()"
            )

    @property
    def holder(self) -> torch.nn.Module | None:
        """Return the module of the first slot."""
        return self._holders[0][0]()

    @property
    def mesh(self) -> Any:
        """Return the mesh over which the parameter is cut, and averaged."""
        return self._mesh

    @property
    def shard_mesh(self) -> Any:
        """Return the mesh of one dimension over which the parameter is cut."""
        return self._mesh if self._mesh.ndim == 1 else self._mesh[self._mesh.mesh_dim_names[-1]]

    def placed(self, data: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor as tensor parallelism has placed the parameter."""
        return data if self._of_model is None else self._dtensor(data, *self._of_model)

    def note_leaf(self, leaf: torch.Tensor) -> None:
        """Let sharded_of() find this by what stands in the slots."""
        setattr(leaf, SHARDED, self)

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

    def check_buildable(self) -> None:
        """Raise NotImplementedError for a subclass without values, of which init= and weights= know no parts."""
        local = held_tensor(self.sharded)
        if local.is_meta and hasattr(local, "__tensor_flatten__"):
            raise NotImplementedError(
                f"parameter {self.name!r} is a {type(local).__name__} on the meta device: call to_empty(device=...) and give it values"
            )

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
                if self._has_recurrent:
                    refresh_weights(module)

    def follow(self) -> None:
        """Let the whole parameter train if the sharded one does."""
        assert self.whole is not None
        trains = self.sharded.requires_grad
        if self.whole.requires_grad is not trains:
            if trains and self.whole.numel() != self._shape.numel():
                raise Error(
                    f"parameter {self.name!r} was frozen in its first run, so no memory was made for its gradient: let it train before that run"
                )
            self.whole.requires_grad_(trains)
        if self.leaf is not None:
            self.leaf.follow(trains)

    def has_changed(self) -> bool:
        """Return False if adopt() has nothing to do, without a read guard."""
        holder, name = self._holders[0]
        module, sharded = holder(), self.sharded
        return (
            (module is not None and module._parameters.get(name) is not sharded)
            or self.whole is None
            or self.whole.requires_grad is not sharded.requires_grad
            or self.leaf is not None
            or self._inner != ""
            or held_tensor(sharded).data_ptr() != self._piece_address
        )

    def adopt(self) -> bool:
        """Take the DTensor that a program put into a slot, and the values that it gave the local tensor. True for a new one.

        to_empty(), load_state_dict(assign=True) and a conversion put other objects there, or other data under the same.
        """
        module, name = self._holders[0][0](), self._holders[0][1]
        now, is_new = self.sharded if module is None else module._parameters.get(name), False
        leaf = None if self.leaf is None else self.leaf.whole
        if now is not self.sharded and now is not self.whole and now is not leaf:
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
            self.follow()
        return is_new

    def lie_in(self, piece: torch.Tensor) -> None:
        """Move the local tensor's values into this rank's slice, where it lies from now on."""
        self.piece, self._piece_address = piece, address_of(piece)
        if self._inner is None:
            return
        local = held_tensor(self.sharded)
        local = getattr(local, self._inner) if self._inner else local
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


def show_whole(rows: Sequence[ShardedParameter]) -> None:
    """Put the whole parameters, or their leaves, into the slots; outside of a backward each trains if the sharded one does."""
    follows = graph_task_id() < 0
    for each in rows:
        whole: Any = each.whole
        if (follows and whole.requires_grad is not each.sharded.requires_grad) or each.leaf is not None:
            each.follow()
        each.show(whole if each.leaf is None else each.leaf.show())


def show_sharded(rows: Sequence[ShardedParameter]) -> None:
    """Put the sharded parameters into the slots."""
    for each in rows:
        each.show(each.sharded)
        if each.leaf is not None:
            each.leaf.close()


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
    """Return a GPU's memory for whole parameters that nothing reads yet, of the largest one's size. None on the host."""
    made = [(each.nbytes, held_tensor(each.sharded)) for each in rows if not each.waits]
    most = max((nbytes for nbytes, local in made if cuda.runtime.holds(local)), default=0)
    return made[0][1].new_empty(most, dtype=torch.uint8) if most else None


def take_rows(store: Any, table: ParameterTable, indices: Sequence[int]) -> None:
    """Let the sharded parameters of a table lie in this rank's slices."""
    for index in indices:
        sharded = sharded_of(table.parameters[index])
        assert sharded is not None
        sharded.lie_in(store.own_slice(index))
