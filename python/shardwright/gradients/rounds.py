"""The rounds of one wrapped module: their beginning and end, and the callbacks after them."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._engine import Reducer
from ..layout.param_table import ParameterTable
from ..torch_compat import autograd as _hooks
from ..torch_compat.weak import weakly
from .bucket_ranges import BucketRanges
from .sparse_gradients import SparseGradients

__all__ = ["Rounds"]


class Rounds:
    """The rounds of a module on this rank.

    The reducer calls back through weak references, since this object holds the reducer. `after_round` is called after
    each round to which this rank contributes, usually inside a backward; `runs_callbacks` is True meanwhile. `watcher`
    gets the seconds of each end of a round by its after_round(). `begin_iteration` gets the number of synchronised
    forwards so far and returns an object that records the next one's times, or None.
    """

    def __init__(self, table: ParameterTable, reducer: Reducer, label: str, zero: int) -> None:
        self._table, self._reducer, self._label, self._zero = table, reducer, label, zero
        #: exchanged after each round
        self.sparse: SparseGradients | None = None
        self.after_round: list[Callable[[], None]] = []
        self.runs_callbacks = False
        #: True if the last round belonged to a forward without a backward
        self.closed_without_backward = False
        self.watcher: Any = None
        self.begin_iteration: Callable[[int], Any] | None = None
        self._iterations = 0
        self._times: Any = None
        self._is_traced = False  # True while the reducer reports each bucket to a profiler
        self._opens_locally = False  # True if the outputs of a forward inside no_sync() open a round
        open_round = reducer.open_round
        self.on_output_gradient: Callable[[torch.Tensor], None] = lambda _: open_round()
        #: hook for outputs of a forward inside no_sync()
        self.on_local_output_gradient = weakly(self._open_locally)

    def forward(self, synchronises: bool) -> None:
        """Count a forward with gradients, before it."""
        self.closed_without_backward = False
        if synchronises:
            self._iterations += 1
            if self.begin_iteration is not None:
                self._times = self.begin_iteration(self._iterations - 1)
        self._reducer.forward(synchronises)

    def _open_locally(self, _: torch.Tensor) -> None:
        """Open a round for a local backward. It synchronises if a forward outside no_sync() waits for a backward, too."""
        self._opens_locally = True
        try:
            self._reducer.open_round()
        finally:
            self._opens_locally = False

    def opener(self, engine: weakref.ref[Any], opens_first: Callable[[], None] | None = None) -> Callable[[], bool]:
        """Return the callback that opens a round after it calls `opens_first`. It returns True if the round
        synchronises, by the engine's require_backward_grad_sync.
        """
        reference = weakref.ref(self)

        def open_round() -> bool:
            rounds = reference()
            if rounds is None:
                return False
            if opens_first is not None:
                opens_first()
            reducer, sparse, times = rounds._reducer, rounds.sparse, rounds._times
            owner = engine()
            synchronises = owner is not None and owner.require_backward_grad_sync
            local = not synchronises or (rounds._opens_locally and not reducer.pending_forward)
            if sparse is not None:
                sparse.is_local = local
            close = reducer.close
            is_traced = _hooks.profiler_enabled()
            if is_traced is not rounds._is_traced:
                rounds._trace(is_traced)
            if rounds.after_round or sparse is not None or times is not None or is_traced:
                close = functools.partial(rounds._close, local)
                if times is not None:
                    times.backward_start = time.perf_counter_ns()
            elif rounds.watcher is not None:
                close = rounds._close
            _hooks.queue_at_end(close, reducer.fail)
            return not local

        return open_round

    def _close(self, local: bool = False) -> None:
        """Close the round at the end of a backward."""
        times = None if local else self._times
        if times is not None:
            times.backward_end = time.perf_counter_ns()
        self._end(self._reducer.close)
        if times is not None:
            times.close_end = time.perf_counter_ns()

    def close_pending(self) -> None:
        """Close a synchronised forward without a backward, before gradients are used."""
        if not self._reducer.pending_forward:  # at most there is a round to abandon
            self._reducer.close_pending()
            return
        self._end(self._reducer.close_pending)
        self.closed_without_backward = True

    def average(self) -> None:
        """Average the current `.grad` in a round. Collective."""
        if self.sparse is not None:
            self.sparse.use_all()
        self._end(self._reducer.average)

    def shadow(self, standing: Sequence[int] | None = None) -> None:
        """Run a round on a rank that has run out of inputs. `standing`: see Announcer.announce_round."""
        end = self._reducer.shadow if standing is None else functools.partial(self._reducer.shadow, standing)
        self._end(end, contributes=False)

    def _end(self, end: Callable[[], None], *, contributes: bool = True) -> None:
        is_traced, has_followers = _hooks.profiler_enabled(), self.sparse is not None or bool(self.after_round)
        if is_traced is not self._is_traced:
            self._trace(is_traced)
        begin_s, before = time.perf_counter(), self._reducer.rounds if has_followers else 0
        with _hooks.named_range("end_of_round", self._label) if is_traced else contextlib.nullcontext():
            end()
        if has_followers and (not contributes or self._reducer.rounds != before):
            self._follow(contributes)
        if self.watcher is not None:
            self.watcher.after_round(time.perf_counter() - begin_s)

    def _follow(self, contributes: bool) -> None:
        """Exchange sparse gradients and call `after_round`, after a round that averaged."""
        if self.sparse is not None:
            self.sparse.exchange(contributes=contributes)
        self.runs_callbacks = True
        try:
            for call in self.after_round if contributes else ():
                call()
        finally:
            self.runs_callbacks = False

    def _trace(self, is_traced: bool) -> None:
        """Start or stop the reducer's reports of each bucket to a profiler."""
        self._is_traced = is_traced
        op = "reduce_scatter" if self._zero >= 2 else "all_reduce"
        self._reducer.set_tracer(BucketRanges(self._reducer, self._table.names, op, self._label) if is_traced else None)
