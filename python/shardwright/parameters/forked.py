"""Parameters in a forked child: the values of the fork, or an error.

Parameters that lie in memory of the ranks show a child what its parent and the peers write after the fork. So this rank
counts the changes of the values in a page that its children share. A child compares the count with that of the fork
when it first reads, makes the pages its own, and compares again (docs/design/zero_shared.md).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import torch

from .._engine import Error, own_pages
from ..layout.param_table import ParameterTable
from ..torch_compat.weak import weakly
from .read_guard import ChildGuard

_VALUES, _GRADIENTS = 0, 1
_watches: weakref.WeakSet[ForkWatch] = weakref.WeakSet()


class ForkWatch:
    """The changes of one module's parameters on this rank, and in a forked child whether it may read them.

    Cost: two stores a step; at a fork the class of each parameter. A child that reads none copies nothing, and one that
    reads copies all of them once.
    """

    def __init__(self, table: ParameterTable, storage: Any, label: str, rank: int) -> None:
        self._table, self._storage, self._label, self._rank = table, storage, label, rank
        self._guard = ChildGuard(table.names, table.module_parameters, weakly(self.settle))
        #: counts of the changes of values and of gradients; odd while values change
        self._shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._own = [0, 0]  # the same counts in private memory, which a child inherits as of the fork
        self._depth = 0
        self.is_refused = False  # True while a change ends that no rank has begun
        self._is_pending = False  # True in a child that has not read yet
        self._is_child = False
        self._lock = threading.RLock()
        _watches.add(self)

    # in the rank ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Begin a change of values. Enter it before the collective behind which peers may write."""
        self._depth += 1
        if self._depth == 1 and not self._is_child:  # a call less in each step
            self._own[_VALUES] += 1
            self._shared[_VALUES] = self._own[_VALUES]

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and not self._is_child:
            self._own[_VALUES] += -1 if self.is_refused else 1
            self._shared[_VALUES] = self._own[_VALUES]
            self.is_refused = False

    def note_fork(self) -> None:
        """Count the next release of a unit: its pages, which a child has just inherited, will have other contents."""
        if self._storage.releases and self._storage.mapped():
            self._storage.schedule.before_reuse = self._count_release

    def _count_release(self) -> None:
        self._storage.schedule.before_reuse = None
        with self:
            pass

    def before_forward(self) -> None:
        """Note that gradients will change; in a forked child, settle()."""
        if self._is_child:
            self.settle()
        else:
            self._own[_GRADIENTS] += 1
            self._shared[_GRADIENTS] = self._own[_GRADIENTS]

    # in a child -----------------------------------------------------------------------------------------------------

    def inherit(self) -> None:
        """Guard the parameters, in a forked child. Its own children inherit what it made its own."""
        self._lock = threading.RLock()
        if not self._is_child:
            self._is_child = self._is_pending = True
            self._guard.raise_(self._table.module_parameters)

    def settle(self, *_: torch.Tensor) -> None:
        """In a forked child, make the values of the fork its own before they are read. Raise Error if a step, a load or
        full_parameters(writable=True) has changed them since.
        """
        if not self._is_pending:
            return
        with self._lock:
            self._check()
            gradients = self._copy_gradients()
            for address, nbytes in self._storage.mapped():
                own_pages(address, nbytes)
            self._check()
            self._is_pending = False
            self._guard.lower(self._table.module_parameters)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _copy_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return a copy of each gradient; None in place of one that a later backward of the parent has changed."""
        held = [(p, ChildGuard.gradient_of(p)) for p in self._table.module_parameters]
        plain = [(p, g) for p, g in held if type(g) is torch.Tensor]
        copies = [(p, g.detach().clone(memory_format=torch.preserve_format)) for p, g in plain if g is not None]
        if self._shared[_GRADIENTS] == self._own[_GRADIENTS]:
            return list(copies)
        return [(p, None) for p, _ in copies]

    def _check(self) -> None:
        before, now = self._own[_VALUES], self._shared[_VALUES]
        if now != before or before % 2:
            raise Error(
                f"parameters of {self._label} are read in process {os.getpid()}, a forked child of rank {self._rank}, after that rank "
                "began to change them (a step, a load, full_parameters(writable=True), or a release at zero=3), and the values of the fork "
                "are lost: read them in the child before the parent's next step, or copy them before the fork, by "
                "copy.deepcopy(sw.unwrap(model)) or sw.full_state_dict(model)"
            )


def _note_all() -> None:
    for watch in list(_watches):
        watch.note_fork()


def _inherit_all() -> None:
    for watch in list(_watches):
        watch.inherit()


os.register_at_fork(after_in_parent=_note_all, after_in_child=_inherit_all)
