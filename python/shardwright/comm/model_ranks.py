"""The ranks of a model mesh: agreements and exact sums over the ranks that share one model."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._engine import Error, norm_sum, norm_value
from ..layout.memory import bytes_of
from ..layout.model_mesh import ModelMesh, first_mesh
from ..layout.param_table import ParameterTable
from ..torch_compat.dtensor import is_dtensor
from .agreement import NORM_SUM_BYTES, added_sums, gather_answers, gather_values, verify
from .process_group import HostGroup, group_over, group_ranks, host_group, resolve_group

_DIGEST_BYTES = 8
#: relative difference of norms of equal gradients that ranks added in different orders
_ROUNDING = 1e-3


class ModelRanks:
    """The ranks that hold the shards of one model, over one communicator. Making it is collective."""

    def __init__(self, mesh: ModelMesh, timeout_s: float) -> None:
        group = resolve_group(None, mesh.mesh)
        self._comm = host_group(group, timeout_s).comm
        self._dimensions = mesh.dimensions
        #: by rank of the communicator: its global number and its coordinate
        self._ranks = group_ranks(group)
        self._places = [tuple((mesh.mesh.mesh == rank).nonzero()[0].tolist()) for rank in self._ranks]
        self._together: tuple[int, ...] | None = None

    @classmethod
    def beside(cls, parameters: Iterable[torch.Tensor], group: HostGroup, stored: int = 0) -> ModelRanks | None:
        """Return the ranks of the mesh of the DTensors that `group` averages, or None. Collective; all raise the same error.

        Call it before any check, so that one rank's failure can reach all. `stored`: how many tensors are still in files.
        """
        ranks, held = group_ranks(group.torch_group), list(parameters)
        mesh = first_mesh(held, ranks)
        first: Any = next(filter(is_dtensor, held), None)
        mine = "no DTensor" if first is None else f"DTensors on {tuple(first.device_mesh.mesh.shape)} ranks"

        mine += f", and {stored} tensors that sw.meta_loading() left in their files" if stored else ""

        def differing(gathered: Sequence[bytes]) -> str:
            other = next(at for at, each in enumerate(gathered) if each != gathered[0])
            if any(b"sw.meta_loading()" in each for each in gathered):
                return (
                    f"ranks disagree about where a module's values are: rank {ranks[0]} has {gathered[0].decode()}, rank {ranks[other]} has "
                    f"{gathered[other].decode()}; load the model alike on every rank, by the same from_pretrained, or on none of them inside "
                    "sw.meta_loading()"
                )
            return (
                f"ranks disagree about the mesh of a module's DTensors: rank {ranks[0]} has {gathered[0].decode()}, "
                f"rank {ranks[other]} has {gathered[other].decode()}; parallelize the module on every rank"
            )

        # otherwise a rank waits forever for ranks of its mesh without DTensors
        gather_answers(group.comm, mine.encode, "meshes of DTensors", compare=differing)
        return None if mesh is None else cls(mesh, group.comm.timeout_s)

    def agree(self, description: list[list[str]], label: str, failure: Exception | None) -> None:
        """Raise on all ranks if one has a `failure` or a different description. Collective."""

        def describe() -> list[list[str]]:
            if failure is not None:
                raise failure
            return description

        several = "s" if len(self._dimensions) > 1 else ""
        along = f"along mesh dimension{several} {', '.join(map(repr, self._dimensions))}"
        try:
            verify(self._comm, describe, f"the wrapped {label} {along}")
        finally:
            failure = None  # its traceback holds this frame

    def with_group(self, group: HostGroup) -> Any:
        """Return torch's group over the ranks of `group` and those of the mesh. Collective at first use."""
        if self._together is None:
            mine = group_ranks(group.torch_group)
            ranks = set().union(*gather_values(self._comm, lambda: list(mine), "ranks of a model"))
            self._together = tuple(sorted(ranks))
        return group_over(self._together)

    def check_replicated(self, table: ParameterTable, group: HostGroup, label: str) -> None:
        """Raise Error on all ranks if a parameter differs along a dimension that does not shard it. Collective: 8 bytes each."""
        digests = b"".join(map(_digest, table.parameters)) if group.rank == 0 else b""
        digests = group.comm.all_gather_bytes(digests, f"values of {label}")[0]

        def compare() -> bytes:
            gathered = gather_answers(self._comm, lambda: digests, f"values of {label}")
            for index, (name, sharded) in enumerate(zip(table.names, table.sharded_kinds)):
                at = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
                if (pair := self._unlike([each[at] for each in gathered], sharded, operator.eq)) is not None:
                    raise Error(
                        f"parameter {name!r} is not sharded over {self._between(*pair)} have other values of it: make it on equal seeds, "
                        "load equal values, or shard it"
                    )
            return b""

        gather_answers(group.comm, compare, f"values of {label}", alike=True)

    def add_squares(self, squares: bytes, kinds: Sequence[tuple[bool, ...]], label: str) -> bytes:
        """Return the exact sum of squares over the mesh, from this rank's for each of the sorted, distinct `kinds`. Collective.

        All raise Error if gradients that are not sharded over a dimension differ along it by more than rounding.
        """
        rows = list(map(_cut, gather_answers(self._comm, lambda: squares, f"norm of the gradients of {label}")))
        sums = []
        for position, kind in enumerate(sorted(set(kinds))):
            column = [row[position] for row in rows]
            norms = [norm_value([each]) for each in column]
            if (pair := self._unlike(norms, kind, _is_near)) is not None:
                raise Error(
                    f"the gradients of {label} that are not sharded over {self._between(*pair)} have other gradients, of norm "
                    f"{norms[pair[0]]!r} and {norms[pair[1]]!r}: these ranks no longer train one model"
                )
            # all ranks skip a step with an overflow
            chosen = next((rank for rank, each in enumerate(norms) if not math.isfinite(each)), 0)
            copies = [_cut_out(place, kind, keep=False) for place in self._places]
            sums.append(added_sums(each for copy, each in zip(copies, column) if copy == copies[chosen]))
        return added_sums(sums) if sums else norm_sum([])

    def any_rank(self, answer: Callable[[], bytes], label: str) -> bool:
        """Return True if the answer of some rank of the mesh is b"\\1". All raise an exception of `answer`. Collective."""
        return b"\1" in gather_answers(self._comm, answer, label)

    def _unlike(
        self, values: Sequence[Any], sharded: tuple[bool, ...], are_alike: Callable[[Any, Any], bool]
    ) -> tuple[int, int] | None:
        """Return the first two ranks that hold the same shard and values that are not alike."""
        firsts: dict[tuple[int, ...], int] = {}
        for rank, place in enumerate(self._places):
            first = firsts.setdefault(_cut_out(place, sharded, keep=True), rank)
            if not are_alike(values[rank], values[first]):
                return first, rank
        return None

    def _between(self, first: int, other: int) -> str:
        pairs = zip(self._dimensions, self._places[first], self._places[other])
        dimension = next(name for name, one, two in pairs if one != two)
        return f"mesh dimension {dimension!r}, and ranks {self._ranks[first]} and {self._ranks[other]}"


def together(
    ranks: ModelRanks | None, work: Callable[[], Any], label: str, describe: Callable[[], list[list[str]]] = list
) -> Any:
    """Return work(). All `ranks` raise if it fails on one, or describe() differs between them. Collective over them."""
    if ranks is None:
        return work()
    found, lines, failure = None, list[list[str]](), None
    try:
        found, lines = work(), describe()
    except Exception as error:
        failure = error
    try:
        ranks.agree(lines, label, failure)
        return found
    finally:
        failure = None  # its traceback holds this frame


def _is_near(norm: float, other: float) -> bool:
    """Return True if two norms differ at most by rounding, or if one of them is not finite."""
    return not (math.isfinite(norm) and math.isfinite(other)) or math.isclose(norm, other, rel_tol=_ROUNDING)


def _cut_out(place: tuple[int, ...], sharded: tuple[bool, ...], *, keep: bool) -> tuple[int, ...]:
    """Return a rank's coordinate in the dimensions that shard a parameter, or with keep=False in the others."""
    return tuple(at for at, is_sharded in zip(place, sharded) if is_sharded == keep)


def _cut(sums: bytes) -> list[bytes]:
    return [sums[at : at + NORM_SUM_BYTES] for at in range(0, len(sums), NORM_SUM_BYTES)]


def _digest(parameter: torch.Tensor) -> bytes:
    return hashlib.sha256(bytes_of(parameter)).digest()[:_DIGEST_BYTES]
