"""What fully_shard cuts: the parameters of its modules that no inner call has cut, and the dimension of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from .._engine import Error
from ..comm.process_group import in_rank_order
from ..formats.stored import waits
from ..layout.local_parameters import SHARDED
from ..layout.memory import has_memory, without_memory
from ..layout.param_groups import mark_of
from ..torch_compat.dtensor import held_tensor, is_dtensor

_Slot = tuple[torch.nn.Module, str]


def find_rows(
    modules: Sequence[torch.nn.Module], mesh: Any, placement_of: Callable[..., Any] | None, ignored: Collection[int]
) -> list[tuple[list[_Slot], torch.nn.Parameter, Any, int]]:
    """Return (slots, parameter, mesh, dimension) of each parameter to cut. Changes nothing but slots that are tied to cut ones.

    Raises what FSDP2 raises for a mesh or a parameter that cannot be cut, on all ranks alike.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(f"Please init the 2D mesh for HSDP with mesh_dim_names specified, got {mesh}")
    found: dict[int, tuple[torch.nn.Parameter, list[_Slot]]] = {}
    names = {id(p): name for each in modules for name, p in each.named_parameters()}
    for slot in _slots_of(modules):
        module, name = slot
        parameter = module._parameters[name]
        if parameter is None or id(parameter) in ignored:
            continue
        cut = getattr(parameter, SHARDED, None)
        if cut is None:
            slots = found.setdefault(id(parameter), (parameter, []))[1]
            if slot not in slots:
                slots.append(slot)
        elif parameter is not cut.sharded:  # tied to one that an inner call has cut
            cut.add_holder(*slot)
            cut.show(cut.sharded)
    return [(slots, p, *_placed(p, names[id(p)], mesh, placement_of)) for p, slots in found.values()]


def _slots_of(modules: Sequence[torch.nn.Module]) -> Iterator[_Slot]:
    """Yield the slots of parameters outside of inner modules that fully_shard was called on."""
    seen: set[int] = set()
    waiting = list(reversed(modules))
    outer = set(map(id, modules))
    while waiting:
        module = waiting.pop()
        if id(module) in seen or (id(module) not in outer and mark_of(module) is not None):
            continue
        seen.add(id(module))
        yield from ((module, name) for name in module._parameters)
        waiting.extend(reversed(list(module.children())))


def _placed(p: torch.nn.Parameter, name: str, mesh: Any, placement_of: Callable[..., Any] | None) -> tuple[Any, int]:
    """Return the mesh and the dimension over which a parameter is cut."""
    if p.dim() == 0:
        raise ValueError(
            f"fully_shard does not support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
        )
    result = placement_of(p) if placement_of is not None else None
    own = getattr(getattr(result, "mesh_info", None), "mesh", None)
    placement = getattr(result, "placement", result)
    if placement is not None and not hasattr(placement, "dim"):
        raise TypeError(
            f"shard_placement_fn must return None, a Shard or a ShardPlacementResult, got {result!r} for parameter {name!r}"
        )
    dim, chosen = 0 if placement is None else placement.dim, mesh if own is None else in_rank_order(own)
    if not -p.dim() <= dim < p.dim():
        raise AssertionError(f"Shard dim {dim} is invalid for {p.dim()}D tensor: {name!r} of shape {tuple(p.shape)}")
    if chosen.mesh.tolist() != mesh.mesh.tolist() and not is_dtensor(p):
        raise NotImplementedError(
            f"shard_placement_fn puts parameter {name!r} on the mesh {chosen.mesh.tolist()} and the module is on {mesh.mesh.tolist()}: only a DTensor on "
            "the ranks between both (experts) may lie on another mesh"
        )
    dim %= p.dim()
    slices = chosen.size(chosen.ndim - 1)
    if dim and p.shape[dim] % slices:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {name!r} has size {p.shape[dim]} and is cut for {slices} ranks"
        )
    held = held_tensor(p) if is_dtensor(p) else p
    if not waits(p) and not has_memory(held) and not hasattr(held, "__tensor_flatten__"):
        raise Error(
            f"parameter {name!r} is {without_memory(p)}. Name it in ignored_params, which leaves it as it is on each rank"
        )
    if not p.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {name!r} has strides {p.stride()}"
        )
    return chosen, dim
