"""Reads and writes of a module's parameters by the program, optimizers and checkpoints."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from .._engine import HostComm
from ..comm.process_group import HostGroup
from ..layout.param_table import ParameterTable
from ..layout.shard_mesh import Slicing
from ..layout.shard_runs import Storage
from .drift import DriftCheck
from .forked import ForkWatch
from .storage import ParameterMemory
from .write_guard import SampledParameters

__all__ = ["ParameterAccess"]


class ParameterAccess:
    """The rules by which one module's parameters are read and written.

    `guard` is None, or its check(moment) raises Error if shared parameters were written outside of writing(). `forks`
    is None if a forked child sees no later writes.
    """

    def __init__(
        self, storage: Storage, table: ParameterTable, group: HostGroup, slicing: Slicing, guard: str | None, label: str
    ) -> None:
        self._storage, self._table = storage, table
        self.guard: SampledParameters | None = None
        is_watched = guard is not None and (guard != "auto" or len(group.sharers(slicing)) > 1)
        if isinstance(storage, ParameterMemory) and storage.shared and is_watched:
            self.guard = SampledParameters(storage, table.names, group.comm)
        shows_later_writes = storage.is_mapped and (group.world_size > 1 or storage.releases)
        self.forks = ForkWatch(table, storage, label, group.rank) if shows_later_writes else None
        #: returns the drift check of the module, if there is one
        self.drift: Callable[[], DriftCheck | None] = lambda: None
        self._before_writes: dict[int, Callable[[], object]] = collections.OrderedDict()

    @property
    def write_guard(self) -> str | None:
        """Return the kind of the write guard, for describe()."""
        return None if self.guard is None else self.guard.kind

    # drift ----------------------------------------------------------------------------------------------------------

    def watch(self, module: torch.nn.Module, ignored: frozenset[str], *, pinned: bool) -> DriftCheck:
        """Check the module for drift from now on, as long as the caller keeps the result.

        A reference from here to the module would keep the hooks of its submodules, which may keep the wrapper alive.
        """
        storage = self._storage
        drift = DriftCheck(module, self._table, ignored, pinned=pinned, shared=storage.shared, places=storage.places())
        self.drift = weakref.ref(drift)
        return drift

    # writes ---------------------------------------------------------------------------------------------------------

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which values change, for forked children (ForkWatch)."""
        return contextlib.nullcontext() if self.forks is None else self.forks

    def refuse_change(self, comm: HostComm) -> None:
        """Note, inside changing(), that the ranks of `comm` have agreed to write nothing: forked children may still read.

        If the exchange itself failed, peers may be writing, and the change counts.
        """
        if self.forks is not None and comm.is_alive:
            self.forks.is_refused = True

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Allow writes to parameters inside. All ranks are past a barrier as it ends."""
        self._storage.settle()
        return self.guard.writing() if self.guard is not None else contextlib.nullcontext()

    def register_before_writes(self, hook: Callable[[], object]) -> RemovableHandle:
        """Call `hook()` before parameters are written other than by a step of this rank.

        Those writes are full_parameters(writable=True) and, on joined ranks, shadowed steps, which call no hooks of
        optimizers.
        """
        handle = RemovableHandle(self._before_writes)
        self._before_writes[handle.id] = hook
        return handle

    def before_writes(self) -> None:
        """Call the registered hooks."""
        for hook in list(self._before_writes.values()):
            hook()

    def count_writes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bump the version counters of parameters that were written through other tensors, for autograd and other
        readers.
        """
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
        drift = self.drift()
        if drift is not None:
            drift.accept_writes()
        self._storage.accept_writes()

    # reads ----------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make values readable: they may still arrive, or belong to the process that this one was forked from."""
        if self.forks is not None:
            self.forks.settle()
        self._storage.settle()

    def before_evaluation(self) -> None:
        """Prepare for a forward without gradients."""
        self.settle()
        if self.guard is not None:
            self.guard.check("before a forward")

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are whole. See full_parameters."""
        self.settle()
        if self.guard is not None:
            self.guard.check("before all parameters are read")
        return self._storage.whole()
