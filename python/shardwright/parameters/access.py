"""Reads and writes of a module's parameters by the program, optimizers, checkpoints and forked children.

*Forked children* see the values of the fork, or an error. Parameters that lie in memory of the ranks show a child what
its parent and the peers write after the fork. So this rank counts the changes of the values in a page that its children
share. A child compares the count with that of the fork when it first reads, makes the pages its own, and compares again
(docs/design/store.md).

*load_state_dict() at zero=3* copies into parameters in place, which are shared with other ranks, or released. So the
outermost module that loads opens a context like full_parameters(writable=True), and closes it behind its last child:
all ranks call load_state_dict(), as at the other stages, and rank 0's values hold.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._engine import Error, HostComm, own_pages
from ..comm.process_group import HostGroup
from ..comm.waits import calling
from ..layout.param_table import ParameterTable
from ..layout.shard_mesh import Slicing
from ..torch_compat.autograd import increment_versions
from ..torch_compat.state_dicts import hook_loading
from ..torch_compat.weak import weakly
from .drift import DriftCheck
from .read_guard import Inherited, change_classes, gradient_of, guarded_classes
from .storage import ParameterMemory
from .unshard_schedule import ModuleHook
from .write_guard import SampledParameters

_VALUES, _GRADIENTS = 0, 1
_shown_to_children: weakref.WeakSet[ParameterAccess] = weakref.WeakSet()


class ParameterAccess:
    """The rules by which one module's parameters are read and written.

    `guard` is None, or its check(moment) raises Error if shared parameters were written outside of writing(). As a
    context it encloses a change of values, for forked children: two stores a step, and at a fork the class of each
    parameter. A child that reads none copies nothing, and one that reads copies all of them once.
    """

    def __init__(
        self, storage: Any, table: ParameterTable, group: HostGroup, slicing: Slicing, guard: str | None, label: str
    ) -> None:
        self._storage, self._table, self._label, self._rank = storage, table, label, group.rank
        self.guard: SampledParameters | None = None
        is_watched = guard is not None and (guard != "auto" or len(group.sharers(slicing)) > 1)
        if isinstance(storage, ParameterMemory) and storage.shared and is_watched:
            self.guard = SampledParameters(storage, table.names, group.comm)
        #: returns the drift check of the module, if there is one
        self.drift: Callable[[], DriftCheck | None] = lambda: None
        self._before_writes: dict[int, Callable[[], object]] = collections.OrderedDict()
        #: open contexts in which every rank writes whole parameters, and modules in a load_state_dict() at zero=3
        self.is_writing = self.load_depth = 0
        self._loading = contextlib.ExitStack()
        #: True if a forked child sees later writes
        self.shows_writes = storage.is_mapped and (group.world_size > 1 or storage.releases)
        #: counts of the changes of values and of gradients; odd while values change
        self._shared: Any = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q") if self.shows_writes else [0, 0]
        self._own = [0, 0]  # the same counts in private memory, which a child inherits as of the fork
        self._depth = 0
        self._is_refused = False  # True while a change ends that no rank has begun
        self._is_child = self._is_pending = False  # pending: a child that has not read yet
        self._lock = threading.RLock()
        if self.shows_writes:
            _shown_to_children.add(self)

    @property
    def write_guard(self) -> str | None:
        """Return the kind of the write guard, for describe()."""
        return None if self.guard is None else self.guard.kind

    def watch(self, module: torch.nn.Module, ignored: frozenset[str], *, pinned: bool) -> DriftCheck:
        """Check the module for drift as long as the caller keeps the result; a reference to it would keep the wrapper alive."""
        storage = self._storage
        drift = DriftCheck(module, self._table, ignored, pinned=pinned, shared=storage.shared, places=storage.places())
        self.drift = weakref.ref(drift)
        return drift

    # writes ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Begin a change of values. Enter it before the collective behind which peers may write."""
        self._depth += 1
        if self._depth == 1 and not self._is_child:
            self._own[_VALUES] += 1
            self._shared[_VALUES] = self._own[_VALUES]

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and not self._is_child:
            self._own[_VALUES] += -1 if self._is_refused else 1
            self._shared[_VALUES] = self._own[_VALUES]
            self._is_refused = False

    def refuse_change(self, comm: HostComm) -> None:
        """Note, inside a change, that ranks agreed to write nothing; if the exchange failed, peers may, and the change counts."""
        self._is_refused = comm.is_alive

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Allow writes to parameters inside. All ranks are past a barrier as it ends."""
        self._storage.settle()
        return self.guard.writing() if self.guard is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Return a context in which each rank can write to whole parameters at zero >= 1. See full_parameters."""
        if self._storage.rows:
            self.before_reads()
        self.before_writes()
        self.is_writing += 1
        try:
            with self, self.writing(), self._storage.writable():
                yield
        finally:
            self.is_writing -= 1
            self.count_writes(self._table.module_parameters)

    def register_before_writes(self, hook: Callable[[], object]) -> RemovableHandle:
        """Call `hook()` before writes that call no hooks of optimizers: full_parameters(writable=True), a joined rank's steps."""
        handle = RemovableHandle(self._before_writes)
        self._before_writes[handle.id] = hook
        return handle

    def before_writes(self) -> None:
        """Call the registered hooks."""
        for hook in list(self._before_writes.values()):
            hook()

    def count_writes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bump the version counters of parameters that were written through other tensors, for autograd and other readers."""
        increment_versions([*parameters])
        drift = self.drift()
        if drift is not None:
            drift.accept_writes()
        self._storage.accept_writes()

    # load_state_dict() at zero=3 ------------------------------------------------------------------------------------

    def hook_loading(self, module: torch.nn.Module) -> list[Any]:
        """Hook the loads of state dicts into the module and its children. Return handles that remove the hooks."""
        if self._storage.rows:  # of which each rank loads its own rows
            show = ModuleHook(self, ParameterAccess._show_states)
            return [each.register_load_state_dict_pre_hook(show) for each in module.modules()]
        begin, end = (ModuleHook(self, method) for method in (ParameterAccess._begin_load, ParameterAccess._end_load))
        return [handle for each in module.modules() for handle in hook_loading(each, begin, end)]

    def _show_states(self, *_: Any) -> None:
        self._storage.schedule.show_states()

    def _begin_load(self, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Open the context before the first module loads. Collective."""
        if not self.load_depth and self.is_writing:
            return
        if metadata.get("assign_to_params_buffers"):
            raise Error(
                f"load_state_dict(assign=True) would replace parameters of a {self._label} wrapped with zero=3, of which ranks keep slices: "
                "leave assign out, or load before wrapping"
            )
        if not self.load_depth:
            with calling("load_state_dict() at zero=3"):
                self._loading.enter_context(self.writable())
        self.load_depth += 1

    def _end_load(self, *_: Any) -> None:
        """Close the context behind the module that opened it. Collective."""
        if self.load_depth:
            self.load_depth -= 1
            if not self.load_depth:
                with calling("load_state_dict() at zero=3"):
                    self._loading.close()

    def abandon_load(self) -> None:
        """Close the context of a load that ended in an exception. Collective if there is one."""
        self.load_depth = 0
        self._loading.close()

    # reads ----------------------------------------------------------------------------------------------------------

    def settle(self, *_: torch.Tensor) -> None:
        """Make values readable: they may still arrive; in a forked child, take those of the fork, or raise if it is too late."""
        if self._is_pending:
            self._inherit_values()
        self._storage.settle()

    def before_forward(self) -> None:
        """Note, for forked children, that gradients will change; in a child, settle()."""
        if self._is_child:
            self.settle()
        else:
            self._own[_GRADIENTS] += 1
            self._shared[_GRADIENTS] = self._own[_GRADIENTS]

    def before_evaluation(self) -> None:
        """Prepare for a forward without gradients."""
        self.settle()
        if self.guard is not None:
            self.guard.check("before a forward")

    def before_the_end(self) -> None:
        """Raise Error if a rank wrote to parameters that its host shares: the next wrapper would take them for the values."""
        if (drift := self.drift()) is not None:
            drift.check_writes()
        if self.guard is not None:  # the caller tells the other ranks
            self.guard.check("before the module is wrapped again", aborts=False)

    def retire(self) -> None:
        """Leave forked children to the next wrapper."""
        _shown_to_children.discard(self)

    def before_reads(self) -> None:
        """Prepare for reads of all parameters."""
        self.settle()
        if self._storage.rows:
            self._storage.schedule.release_idle()
            self._storage.meet()
        if self.guard is not None:
            self.guard.check("before all parameters are read")

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are whole. See full_parameters."""
        self.before_reads()
        made: contextlib.AbstractContextManager[None] = self._storage.whole()
        return made

    # forks ----------------------------------------------------------------------------------------------------------

    def note_fork(self) -> None:
        """Count the next release of a unit: its pages, which a child has just inherited, will have other contents."""
        if self._storage.releases and self._storage.mapped():
            self._storage.schedule.before_reuse = self._count_release

    def _count_release(self) -> None:
        self._storage.schedule.before_reuse = None
        with self:
            pass

    def become_child(self) -> None:
        """Guard the parameters, in a forked child. Its own children inherit what it made its own."""
        self._lock = threading.RLock()
        if not self._is_child:
            parameters = self._table.module_parameters
            guarded, self._unguarded = guarded_classes(Inherited, self._table.names, parameters, weakly(self.settle))
            self._is_child = self._is_pending = True
            change_classes(parameters, guarded)

    def _inherit_values(self) -> None:
        with self._lock:
            self._check_unchanged()
            gradients = self._copy_gradients()
            for address, nbytes in self._storage.mapped():
                own_pages(address, nbytes)
            self._check_unchanged()
            self._is_pending = False
            change_classes(self._table.module_parameters, self._unguarded)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _copy_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return a copy of each gradient; None in place of one that a later backward of the parent has changed."""
        held = [(p, gradient_of(p)) for p in self._table.module_parameters]
        plain = [(p, g) for p, g in held if type(g) is torch.Tensor]
        copies = [(p, g.detach().clone(memory_format=torch.preserve_format)) for p, g in plain if g is not None]
        if self._shared[_GRADIENTS] == self._own[_GRADIENTS]:
            return list(copies)
        return [(p, None) for p, _ in copies]

    def _check_unchanged(self) -> None:
        before, now = self._own[_VALUES], self._shared[_VALUES]
        if now != before or before % 2:
            raise Error(
                f"parameters of {self._label} are read in process {os.getpid()}, a forked child of rank {self._rank}, after that rank "
                "began to change them (a step, a load, full_parameters(writable=True), or a release at zero=3), and the values of the fork "
                "are lost: read them in the child before the parent's next step, or copy them before the fork, by "
                "copy.deepcopy(sw.unwrap(model)) or sw.full_state_dict(model)"
            )


def _note_all() -> None:
    for access in list(_shown_to_children):
        access.note_fork()


def _become_children() -> None:
    for access in list(_shown_to_children):
        access.become_child()


os.register_at_fork(after_in_parent=_note_all, after_in_child=_become_children)
