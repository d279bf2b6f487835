"""The model mesh: the dimensions over which a module's DTensors are sharded or replicated.

These are torch's dimensions of tensor parallelism, orthogonal to the ranks that train together. Arithmetic and checks
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._engine import Error
from ..torch_compat.dtensor import is_dtensor


class ModelMesh(NamedTuple):
    """The mesh of a module's DTensors: names of its dimensions ("0", "1", ... if it has none), and this rank's coordinate."""

    mesh: Any
    dimensions: tuple[str, ...]
    coordinate: tuple[int, ...]

    def sharded(self, parameter: torch.Tensor) -> tuple[bool, ...]:
        """Return True for each dimension that shards a module's parameter; over the others ranks have equal values."""
        if not is_dtensor(parameter):
            return (False,) * len(self.dimensions)
        return tuple(_is_shard(placement) for placement in parameter.placements)

    def speaks(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank writes its part of a module's parameter: the first of the ranks with equal parts."""
        return all(sharded or place == 0 for sharded, place in zip(self.sharded(parameter), self.coordinate))


def first_mesh(parameters: Iterable[torch.Tensor], ranks: Sequence[int]) -> ModelMesh | None:
    """Return the first mesh of a DTensor with only this rank in common with `ranks`, which average gradients."""
    for parameter in parameters:
        mesh = parameter.device_mesh if is_dtensor(parameter) else None
        if mesh is not None and mesh.get_coordinate() is not None:
            if len(set(mesh.mesh.flatten().tolist()) & set(ranks)) == 1:
                return _model_mesh(mesh)
    return None


def _model_mesh(mesh: Any) -> ModelMesh:
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return ModelMesh(mesh, tuple(names), tuple(mesh.get_coordinate()))


def find_model_mesh(parameters: Sequence[tuple[str, torch.Tensor]], ranks: Sequence[int]) -> ModelMesh | None:
    """Return the mesh of the DTensors among `parameters`, or None. Raise for one that `ranks`, which average, cannot train."""
    found: Any = None
    first = ""
    for name, parameter in parameters:
        if not is_dtensor(parameter):
            continue
        mesh = parameter.device_mesh
        if found is None:
            found, first = mesh, name
            _check_apart(name, mesh, ranks)
        elif mesh != found:
            raise NotImplementedError(
                f"parameter {first!r} is a DTensor on {mesh_text(found)} and {name!r} on {mesh_text(mesh)}: the DTensors of a wrapped "
                "module must lie on one mesh; name those of the other mesh in ignored_params and wrap their module separately"
            )
        other = [each for each in parameter.placements if not (_is_shard(each) or each.is_replicate())]
        if other:
            raise NotImplementedError(
                f"parameter {name!r} is a DTensor on {mesh_text(mesh)} placed as {other[0]!r}: a parameter must be placed as Shard or "
                "Replicate on each dimension"
            )
    return None if found is None else _model_mesh(found)


def _check_apart(name: str, mesh: Any, ranks: Sequence[int]) -> None:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise Error(
            f"parameter {name!r} is a DTensor on {mesh_text(mesh)}, of which this rank is none: wrap the module on ranks of that mesh"
        )
    mine = int(mesh.mesh[tuple(coordinate)])
    shared = sorted(set(mesh.mesh.flatten().tolist()) & set(ranks) - {mine})
    if ranks and (shared or mine not in ranks):
        raise Error(
            f"parameter {name!r} is a DTensor on {mesh_text(mesh)}, and gradients are averaged over ranks {numbers_of(ranks)}: the two must share "
            f"one rank, and share {numbers_of(sorted([*shared, *{mine} & set(ranks)]))}; pass only the data-parallel dimension, "
            'device_mesh=mesh["dp"]'
        )


def mesh_text(mesh: Any) -> str:
    """Describe a mesh for messages: its dimensions and ranks."""
    names = mesh.mesh_dim_names
    sizes = tuple(mesh.mesh.shape)
    dimensions = ", ".join(f"{name!r}" for name in names) if names else f"{len(sizes)} without names"
    return f"a mesh of dimension {dimensions} with ranks {numbers_of(mesh.mesh.flatten().tolist())}"


def placed(parameter: torch.Tensor) -> str:
    """Return the placements of a DTensor for messages; empty for a plain tensor."""
    if not is_dtensor(parameter):
        return ""
    names = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
    pairs = zip(names, parameter.placements)
    return " on " + ", ".join(f"{name}: {placement}" for name, placement in pairs)


def _is_shard(placement: Any) -> bool:
    return type(placement).__name__ == "Shard"


def numbers_of(ranks: Iterable[int]) -> str:
    """Return ranks for a message: "0, 2, 5"."""
    return ", ".join(map(str, ranks))
