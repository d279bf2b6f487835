"""The elements of a parameter that a rank owns, and where they lie: common to all forms of parameter memory.

A bucket of parameters has the layout of its gradients, so an optimizer steps on a slice of parameters with the same
slice of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .param_table import ParameterTable
from .shard_mesh import Slicing
from .views import dense_strides

if TYPE_CHECKING:
    from .._engine import Reducer


class Copies(Protocol):
    """Low-precision copies of parameters (PrecisionPlan)."""

    def follow(
        self, source: Callable[[torch.Tensor], torch.Tensor | None], in_units: Collection[torch.Tensor] | None = None
    ) -> None:
        """Read parameters from memory that `source` returns: in another dtype; the parameter, to be cast; None while released.

        `in_units`: the parameters that are gathered in units; modules fetch these when they are called.
        """

    def is_in_force(self) -> bool:
        """Return True if a module that is called now computes in its policy's dtype."""

    def forget(self, parameters: Collection[torch.Tensor]) -> None:
        """Put released parameters back in their slots."""


class Storage:
    """Where each parameter of a module lies, and the elements of it that a rank owns, in any form of memory.

    At zero=0 this class itself is used: each rank has whole parameters. `reason`: why slices are broadcast instead of
    gathered. `shared`: a host's ranks share one copy. `releases`: a schedule gathers units and releases them after use.
    """

    reason = ""
    shared = releases = one_copy = False
    #: True if parameters lie in memory that a forked child shares with this rank
    is_mapped = False
    #: what relates the two objects of each parameter that fully_shard has cut (ShardedParameter)
    rows: Sequence[Any] = ()
    on_adoption: Any = None

    def __init__(self, reducer: Reducer, table: ParameterTable, slicing: Slicing, label: str) -> None:
        self._reducer, self._table, self._slicing, self._label = reducer, table, slicing, label
        self._runs: dict[int, tuple[int, int]] = {}
        self._stepped: set[int] = set()  # buckets with parameters that train, or have trained

    # the elements that a rank owns ----------------------------------------------------------------------------------

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """Return [begin, end), in memory order, of the elements of a parameter that `rank` owns; (0, 0) if none."""
        return self._reducer.run(index, self._slicing.of_rank[rank], self._slicing.count)

    def run_in_slice(self, index: int, rank: int) -> tuple[int, int, int]:
        """Return (bucket, first element in the rank's slice of it, count) of `rank`'s elements of a parameter."""
        return self._reducer.run_in_slice(index, self._slicing.of_rank[rank], self._slicing.count)

    def own_run(self, index: int) -> tuple[int, int]:
        """Return run(index, this rank), cached."""
        if index not in self._runs:
            self._runs[index] = self.run(index, self._slicing.rank)
        return self._runs[index]

    # memory ---------------------------------------------------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Return the bytes that this storage allocated for parameters; 0 if they stay in their original memory."""
        return 0

    def like(self, index: int) -> torch.Tensor:
        """Return a tensor with a parameter's original shape, strides and dtype. Its values must not be read."""
        return self._table.parameters[index]

    def layouts(self) -> list[torch.Tensor] | None:
        """Return like() of every parameter if parameters lose their shape while released; else None."""
        return None

    def places(self) -> Callable[[], list[int]] | None:
        """Return a function that returns the expected data address of every parameter; None if none moves."""
        return None

    def adopt(self, index: int) -> None:
        """Record that a parameter trains from now on."""

    def is_stepped(self, index: int) -> bool:
        """Return True if a parameter trains or has trained: a step includes a frozen one that has a gradient."""
        return self._reducer.place(index)[0] in self._stepped

    def mapped(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the memory of whole parameters that other processes write to as well."""
        return []

    def plan(self) -> dict[str, Any]:
        """Return facts for describe()."""
        return {}

    def give_back(self, together: bool = False) -> None:
        """Move the parameters back to private memory. `together`: all ranks call this."""

    # reads and writes -----------------------------------------------------------------------------------------------

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all parameters are whole."""
        return contextlib.nullcontext()

    def pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return (low, high, memory) of the elements, in memory order, of which this rank writes new values in filling().

        The ranks that share memory cut it into equal parts; memory of its own a rank writes alone.
        """
        data = self._table.parameters[index].data
        return [(0, data.numel(), memory_order(data, data))] if dense_strides(data) is not None else []

    def note_written(self, index: int) -> None:
        """Note that this rank has filled its pieces of a parameter, whose memory a disk may take."""

    #: bytes of slices that a GPU has in pinned host memory
    home_bytes = 0
    #: True if parameters lie on a disk
    is_in_file = False

    def filling(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all ranks write new values to their pieces(). Collective as it begins and ends."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Make the current stream wait for parameters that are still being gathered after the last step."""

    def accept_writes(self) -> None:
        """Record that parameters were written by the engine, or where writes are allowed."""

    def take_writes(self) -> None:
        """Update slices in separate memory from values that the program wrote to the parameters."""

    def publish(self, *, failed: bool | None = None) -> list[int] | None:
        """Make slices that every rank has updated visible; return which ranks passed `failed`, or None. Collective."""
        return None

    def publish_all(self) -> None:
        """Publish after writes to slices of frozen parameters, and to whole, unreleased ones. Collective."""
        self.take_writes()
        self.publish()

    def is_published(self, index: int) -> bool:
        """Return whether publish() copies this rank's slice of a parameter to where the program sees it whole."""
        return False

    # units ----------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counts of gathers."""
        return {}

    def hook_arranger(self) -> Callable[[bool], None] | None:
        """Return what keeps parameters whole in all of the user's hooks, called at each forward (is_compiling); or None."""
        return None

    def follow(self, copies: Copies) -> None:
        """Make low-precision copies while parameters are whole."""

    def announce_units(self, announce: Callable[[int], None] | None) -> None:
        """Inside a join, call `announce` with each unit before it is gathered, if joined ranks must also gather it."""

    def gather_anew(self) -> None:
        """Gather units as after a step, at the end of a join, whatever each rank has. Collective with units."""


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return getattr(torch, dtype).itemsize


def make_dense(parameter: torch.Tensor) -> None:
    """Make a parameter contiguous if its strides overlap or leave gaps."""
    if dense_strides(parameter) is None:
        parameter.data = parameter.data.contiguous()


def memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return elements in the memory order of `like`, of the same shape; an alias where the strides agree."""
    is_alias = tensor.is_contiguous() and like.is_contiguous()
    strides = None if is_alias else dense_strides(like)
    is_alias = is_alias or (strides is not None and tensor.stride() == strides)
    if not is_alias or tensor.is_conj() or tensor.is_neg():
        same = torch.empty_strided(
            like.shape, strides or like.contiguous().stride(), dtype=tensor.dtype, device=tensor.device
        )
        same.copy_(tensor)
        tensor = same
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
