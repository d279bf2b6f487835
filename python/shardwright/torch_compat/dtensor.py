"""DTensors: the private names of torch that read and replace a DTensor's local tensor.

`_local_tensor` and `_spec` are attributes of torch.distributed.tensor.DTensor since torch 2.0. Without
`_op_dispatcher._custom_op_handlers` fused steps over DTensors take longer, with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without importing torch's module of DTensors."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


@functools.cache
def _dtensor_class() -> Any:
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import DTensor  # type: ignore[no-redef, unused-ignore]
    return DTensor


def held_tensor(dtensor: Any) -> torch.Tensor:
    """Return the object that a DTensor keeps as its local tensor."""
    return dtensor._local_tensor


def set_held_tensor(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor by another of its shape."""
    dtensor._local_tensor = local


def set_dtype(dtensor: Any, like: Any) -> None:
    """Give a DTensor the local tensor of `like`, of another dtype; `dtensor.data = like` does not replace it."""
    dtensor._local_tensor, dtensor._spec = like._local_tensor, like._spec


def like_dtensor(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor with the placements and shape of `like`, whose local tensor is the object `local`."""
    return _dtensor_class()(local, like._spec, requires_grad=False)


def made_dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a DTensor over the memory of `local`. Not collective."""
    with torch.no_grad():
        whole = {"shape": torch.Size(shape), "stride": tuple(stride)}
        return _dtensor_class().from_local(local, mesh, placements, run_check=False, **whole)


@functools.cache
def step_on_local_tensors(mark: str) -> None:
    """Let fused Adam steps over DTensors with the attribute `mark`, if all are placed alike, run on local tensors."""
    handlers = getattr(getattr(_dtensor_class(), "_op_dispatcher", None), "_custom_op_handlers", {})
    for name in ("_fused_adam_", "_fused_adamw_"):
        for overload in ("default", "tensor_lr"):
            handlers.setdefault(getattr(getattr(torch.ops.aten, name), overload), functools.partial(_step, mark))


def _step(mark: str, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    parameters, *others, _ = args  # the last are numbers of steps
    if all([hasattr(p, mark) for p in parameters]) and all([_are_alike(parameters, each) for each in others]):
        held = [[getattr(each, "_local_tensor", each) for each in values] for values in args]
        operation(*held, **{name: getattr(each, "_local_tensor", each) for name, each in kwargs.items()})
        return
    handlers = _dtensor_class()._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation, None)  # None: another thread has it
    try:
        operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler


def _are_alike(parameters: Sequence[Any], others: Sequence[Any]) -> bool:
    for parameter, other in zip(parameters, others):
        spec, found = parameter._spec, getattr(other, "_spec", None)
        if found is None or found.mesh is not spec.mesh or found.placements != spec.placements:
            return False
    return True


def replicate() -> Any:
    """Return the placement of whole copies."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def shard(dim: int, parts: int = 1) -> Any:
    """Return the placement of rows of `dim`; of `parts` > 1 that a later dimension of the mesh has made."""
    if parts > 1:
        from torch.distributed.tensor.placement_types import _StridedShard

        return _StridedShard(dim, split_factor=parts)
    from torch.distributed.tensor import Shard

    return Shard(dim)


def mesh_of_both(mesh: Any, model_mesh: Any) -> Any:
    """Return the mesh of the dimensions of both, which one mesh has."""
    from torch.distributed import device_mesh

    concatenate = getattr(device_mesh.DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        return concatenate([mesh, model_mesh])
    resources = device_mesh._mesh_resources
    root_of = getattr(resources, "get_root_mesh", None) or resources.get_parent_mesh  # the latter in torch 2.4
    root = root_of(mesh)
    if root is None or root_of(model_mesh) != root:
        raise ValueError(
            f"fully_shard: its mesh {mesh} and that of the module's DTensors, {model_mesh}, must be parts of one mesh"
        )
    names = (*mesh.mesh_dim_names, *model_mesh.mesh_dim_names)
    return root[names]


@functools.lru_cache(maxsize=None)
def mesh_of_group(group: Any, device: str) -> Any:
    """Return a mesh of one dimension over the ranks of a process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device)


def placed_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor of any dtype over the memory of `local`, with the placements and shape of `like`."""
    return made_dtensor(local, like.device_mesh, like.placements, like.shape, like.stride())


def placed_parameter(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor parameter over the memory of `local`, placed like the DTensor `like`."""
    return torch.nn.Parameter(placed_like(local, like), requires_grad=like.requires_grad)


def placed_as(dtensor: Any, like: Any) -> Any:
    """Return the DTensor with the placements of `like`, redistributed if they differ (then collective over its mesh)."""
    if tuple(dtensor.placements) == tuple(like.placements):
        return dtensor
    with torch.no_grad():
        return dtensor.redistribute(placements=like.placements)


def redistributed(dtensor: Any, placements: Sequence[Any]) -> Any:
    """Return a DTensor with these placements (collective over the dimensions where they differ)."""
    return dtensor if list(dtensor.placements) == list(placements) else dtensor.redistribute(placements=placements)


def waited(local: Any) -> torch.Tensor:
    """Wait for the collective that fills a local tensor, and return the tensor."""
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local


def full_tensor(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the whole tensor, of any dtype, whose parts are placed like the DTensor `like`. Collective over its mesh."""
    with torch.no_grad():
        return waited(placed_like(local, like).full_tensor())  # type: ignore[attr-defined]


def local_part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor, cut like the DTensor `like`. No copy."""
    shape, offsets = local_box(like)
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape))]


def local_box(dtensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offsets of this rank's box of a DTensor."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor._utils import (  # type: ignore[import-not-found, no-redef, unused-ignore]
            compute_local_shape_and_global_offset,
        )
    shape, offsets = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return tuple(shape), tuple(offsets)


def flattened(mesh: Any, dimensions: Sequence[Sequence[str]]) -> Any:
    """Return a submesh with one dimension for each of `dimensions`, whose names are flattened into it."""
    if all(len(names) == 1 for names in dimensions):
        return mesh[tuple(name for names in dimensions for name in names)]
    # a mesh that is part of another does not know its flattened dimensions by name
    found = [mesh[tuple(names)]._flatten("_".join(names)) if len(names) > 1 else mesh[names[0]] for names in dimensions]
    return found[0] if len(found) == 1 else mesh_of_both(*found)
