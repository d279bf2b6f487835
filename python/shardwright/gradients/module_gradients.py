"""The gradients of one module: the rounds that average them, each parameter's `.grad`, and the checks before a step."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Error, Reducer
from ..backend.base import Backend
from ..comm.agreement import gather_answers, sums_over_ranks
from ..layout.local_parameters import LocalParameter, local_of, whole_of
from ..layout.memory import address_of, bytes_of
from ..layout.param_table import ParameterTable
from ..layout.shard_mesh import Slicing
from ..layout.shard_runs import Storage, memory_order
from ..layout.views import copy_gradient, gradient_view
from ..torch_compat import autograd as _hooks
from ..torch_compat.dtensor import held_tensor
from ..torch_compat.weak import weakly
from .sharded_gradient import ShardedGradient, SteppedGradient
from .sparse_gradients import SparseGradients

_NOT_AVERAGED = (
    "a parameter has a gradient of this rank that is not averaged yet: run a backward outside of no_sync() before "
    "stepping, clipping or reading gradients"
)
_BY_HAND = (
    "parameter {name!r} has a gradient that no backward of the module brought, so it is not averaged: keep and call the module that sw.wrap returned; "
    "for gradients made in another way (torch.autograd.grad, weight.grad += ...) call sw.average_gradients(module) before the step"
)
_FAILED_ROUND = (
    "parameter {name!r} has a gradient of a round that failed (a rank left a backward unfinished, or the communicator ended), which is not "
    "averaged: clear the gradients and run the step again, on every rank"
)
_BY_HAND_AT_0 = ", or run such forwards inside no_sync() if each rank steps separately"


#: the state of a gradient on a training rank
NO_GRADIENT, ZEROED, A_GRADIENT = range(3)


def states_of(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return NO_GRADIENT, ZEROED (known only for sliced gradients) or A_GRADIENT for each parameter's `.grad`."""
    found, gradients = [], []
    with _hooks.unguarded():
        for each in parameters:
            gradients.append(each.grad if isinstance(each, LocalParameter) else _hooks.read_gradient(each))
    for gradient in gradients:
        is_zeroed = isinstance(gradient, ShardedGradient) and gradient._cleared
        found.append(NO_GRADIENT if gradient is None else ZEROED if is_zeroed else A_GRADIENT)
    return found


class ModuleGradients:
    """The gradients of a module's parameters, and the rounds that average them.

    The reducer calls back through weak references, since this object holds it. `views` has the tensor that becomes each
    parameter's `.grad`: a view of its bucket, or at zero >= 2 a ShardedGradient; None if it has no memory. `last_step_on`
    returns the number of rounds when a parameter was stepped on last. `warns_of_sparse`: warn when a sparse gradient is
    made dense.

    `after_round` is called after each round to which this rank contributes, usually inside a backward; `runs_callbacks`
    is True meanwhile. `watcher` gets the seconds of each end of a round by its after_round(). `begin_iteration` gets the
    number of synchronised forwards so far and returns an object that records the next one's times, or None.
    """

    def __init__(
        self,
        table: ParameterTable,
        storage: Storage,
        backend: Backend,
        reducer: Reducer,
        slicing: Slicing,
        zero: int,
        label: str,
        last_step_on: Callable[[torch.Tensor], int],
        *,
        sparse: SparseGradients | None = None,
        warns_of_sparse: bool = True,
        steps: bool = False,
    ) -> None:
        #: writes a gradient into a view
        self.copy: Callable[..., None] = (
            copy_gradient if warns_of_sparse else functools.partial(copy_gradient, warns=False)
        )
        self._table, self._storage, self._backend, self._reducer = table, storage, backend, reducer
        self._slicing, self._zero, self._label, self._comm = slicing, zero, label, backend.group.comm
        self._last_step_on = last_step_on
        #: True if each backward is a step (BackwardOptimizer); returns the optimizer of step_by(), or None
        self.steps = steps
        self._stepper: Callable[[], Any] = lambda: None
        if steps:
            reducer.send_first(True)
        #: exchanged after each round
        self.sparse = sparse
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
        #: announces the next collective to joined ranks; see parallel/join.py
        self.announce: Callable[..., None] = lambda *_: None
        self._factors: list[list[Any]] = []
        self._factors_of = -1
        self._scalings = 0  # factors on which all ranks agreed
        self._norms: dict[float, dict[int, float]] = {}
        self._norms_of: tuple[int, int] = (-1, -1)
        self._factor: tuple[torch.Tensor, int, float] | None = None
        self.views = [self._make_view(i) if reducer.has_memory(i) else None for i in range(len(table.parameters))]
        #: of fully_shard, whose `.grad` are DTensors
        self._rows = storage.rows
        #: True if a round's mean is added to one that stands, as FSDP2 does: gradients are summed, or scaled by unit
        self.adds_apart = False
        self._standing: dict[int, torch.Tensor] = {}
        #: of fully_shard: functions that change the new means of a unit's parameters, and the order of their calls
        self.reduce_hooks: list[tuple[Callable[[torch.Tensor], None], Sequence[Any], Callable[[], Any]]] = []
        self._accepted: dict[int, weakref.ref[torch.Tensor]] = {}
        self._slices: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    # rounds ---------------------------------------------------------------------------------------------------------

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
        """Return the callback that opens a round, after `opens_first`. It returns True if the round synchronises."""
        reference = weakref.ref(self)

        def open_round() -> bool:
            rounds = reference()
            if rounds is None:
                return False
            if opens_first is not None:
                opens_first()
            if rounds._rows:
                rounds._take_rows(opens=True)
            reducer, sparse, times = rounds._reducer, rounds.sparse, rounds._times
            owner = engine()
            synchronises = owner is not None and owner.require_backward_grad_sync
            local = not synchronises or (rounds._opens_locally and not reducer.pending_forward)
            if rounds._rows:  # as in FSDP2 the backward decides
                local = not synchronises
                if synchronises and not reducer.pending_forward:
                    reducer.forward(True)
                if owner is not None and synchronises and not owner.all_reduces():
                    reducer.keep_in_rows(True)
            if sparse is not None:
                sparse.is_local = local
            if rounds.steps:
                rounds._begin_step(local or not (reducer.pending_forward or rounds._has_stepped()))
            close, fail = reducer.close, rounds._fail if rounds.steps else reducer.fail
            is_traced = _hooks.profiler_enabled()
            if is_traced is not rounds._is_traced:
                rounds._trace(is_traced)
            if rounds.after_round or sparse is not None or times is not None or is_traced or rounds._rows:
                close = functools.partial(rounds._close, local)
                if times is not None:
                    times.backward_start = time.perf_counter_ns()
            elif rounds.watcher is not None:
                close = rounds._close
            _hooks.queue_at_end(close, fail)
            return not local

        return open_round

    # an optimizer inside the backward ------------------------------------------------------------------------------

    def step_by(self, optimizer: Any) -> None:
        """Let `optimizer`, held weakly, step on each bucket as its mean is complete."""
        self._stepper = weakref.ref(optimizer)
        self._reducer.set_mean_callback(weakly(optimizer.step_on))
        self.after_round[:] = [weakly(optimizer.finish)]

    def search(self, output: Any) -> None:
        """Learn from the graph of a forward if the first round can be sent before its end."""
        if self._reducer.rounds == 0 and _hooks.search_graph(_hooks.find_tensors(output))[1]:
            self._reducer.send_first(False)

    def _begin_step(self, local: bool = False) -> None:
        if local:
            raise Error(self.refuses("a backward that does not synchronise (no_sync), or of no forward of the module,"))
        stepper = self._stepper()
        if stepper is None:
            raise Error("the optimizer of step_in_backward=True is gone: keep what sw.wrap returned")
        stepper.begin()

    def refuses(self, what: str) -> str:
        """Return the sentence that refuses what does not go together with an optimizer inside the backward."""
        return f"{what} of {self._label} does not go together with step_in_backward=True, which steps on each mean as soon as it is complete"

    def _has_stepped(self) -> bool:
        return bool(getattr(self._stepper(), "has_stepped", False))

    def _cancel_step(self) -> None:
        stepper = self._stepper()
        if stepper is not None:
            stepper.cancel()

    def _fail(self) -> None:
        try:
            self._reducer.fail()
        finally:
            self._cancel_step()

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
        self._take_rows(opens=True)  # a mean that zero_grad() has dropped is none of this round
        if self.steps:
            if self._has_stepped():  # a forward since then is not of this step
                self._reducer.drop_pending()
                return
            self._begin_step()
        self._end(self._reducer.close_pending)
        self.closed_without_backward = True

    def average(self) -> None:
        """Average the current `.grad` in a round. Collective."""
        if self.steps:
            raise Error(self.refuses("sw.average_gradients()"))
        if self.sparse is not None:
            self.sparse.use_all()
        self._take_rows(opens=True)
        self._end(self._reducer.average)

    def shadow(self, accumulated: Sequence[int] | None = None) -> None:
        """Run a round on a rank that has run out of inputs. `accumulated`: see Announcer.announce_round."""
        end = self._reducer.shadow if accumulated is None else functools.partial(self._reducer.shadow, accumulated)
        self._end(end, contributes=False)

    def _end(self, end: Callable[[], None], *, contributes: bool = True) -> None:
        is_traced = _hooks.profiler_enabled()
        has_followers = self.sparse is not None or bool(self.after_round) or bool(self._rows)
        if is_traced is not self._is_traced:
            self._trace(is_traced)
        begin_s, before = time.perf_counter(), self._reducer.rounds if has_followers else 0
        opened = self._reducer.is_open  # else `stays_in_rows` tells of an earlier round
        with _hooks.named_range("end_of_round", self._label) if is_traced else contextlib.nullcontext():
            try:
                end()
            except BaseException:
                if self.steps:  # peers wait for what this rank has not taken
                    with contextlib.suppress(Error):
                        self._fail()
                raise
        if has_followers and (not contributes or self._reducer.rounds != before):
            self._follow(contributes)
        elif self._rows and not (
            opened and self._reducer.stays_in_rows
        ):  # no round: the ranks still read one another's rows until here
            self._backend.fence(f"reads of the parameters of {self._label}")
        elif self.steps:  # of torch.autograd.grad(), which brings no parameter a gradient
            self._cancel_step()
        if self.watcher is not None:
            self.watcher.after_round(time.perf_counter() - begin_s)

    def _follow(self, contributes: bool) -> None:
        """Exchange sparse gradients and call `after_round`, after a round that averaged."""
        if self.sparse is not None:
            self.sparse.exchange(contributes=contributes)
        self.runs_callbacks = True
        try:
            self._give_rows()
            for call in self.after_round if contributes else ():
                call()
        finally:
            self.runs_callbacks = False

    def _trace(self, is_traced: bool) -> None:
        """Start or stop the reducer's reports of each bucket to a profiler."""
        self._is_traced = is_traced
        op = "reduce_scatter" if self._zero >= 2 else "all_reduce"
        self._reducer.set_tracer(_tracer(self._reducer, self._table.names, op, self._label) if is_traced else None)

    # DTensors of fully_shard ----------------------------------------------------------------------------------------

    def _give_rows(self) -> None:
        """Give the DTensors the means of a round, and run the hooks that wait for their gradients."""
        if self.reduce_hooks:
            self._call_reduce_hooks()
        for index, (entry, each) in enumerate(zip(self._table.parameters, self._rows)):
            gradient, standing = entry.grad, self._standing.pop(index, None)
            has_mean = isinstance(gradient, ShardedGradient) and gradient._pending is None and not gradient._cleared
            if standing is not None:
                held_tensor(self._mean_of(index)).copy_(standing) if not has_mean else held_tensor(
                    self._mean_of(index)
                ).add_(standing)
            elif not has_mean:
                if not (
                    each.zeroes_unused and each.sharded.requires_grad and isinstance(self.views[index], ShardedGradient)
                ):
                    continue
                held_tensor(self._mean_of(index)).zero_()
            parameter = each.sharded
            if parameter.grad is not each.mean or each.mean is None:
                parameter.grad = self._mean_of(index)
            for hook in list((_hooks.gradient_hooks(parameter) or {}).values()):
                hook(parameter)

    def _call_reduce_hooks(self) -> None:
        """Let each unit's hook change the means of its parameters, in the order that they ask for now."""
        new = [isinstance(v, ShardedGradient) and self._reducer.used_by_any(i) for i, v in enumerate(self.views)]
        for hook, members, _ in sorted(self.reduce_hooks, key=lambda each: each[2]()):
            found = [index for index, each in enumerate(self._rows) if new[index] and any(each is m for m in members)]
            pieces = [from_dlpack(self._reducer.result(index)) for index in found]
            if pieces:
                sizes = [self._rows[index].chunk_numel for index in found]
                flat = pieces[0].new_zeros(sum(sizes))
                places = [place[: len(each)] for place, each in zip(flat.split(sizes), pieces)]
                torch._foreach_copy_(places, pieces)
                hook(flat)
                torch._foreach_copy_(pieces, places)

    def _mean_of(self, index: int) -> torch.Tensor:
        each = self._rows[index]
        if each.mean is None or address_of(held_tensor(each.mean)) != each.mean_address:
            each.mean = each.like_rows(from_dlpack(self._reducer.result(index)))
            each.mean_address = address_of(held_tensor(each.mean))
        return each.mean

    def _take_rows(self, *, opens: bool = False) -> None:
        """Bring what the program did to the DTensors' `.grad` since the last round to the engine's own, as a round `opens`."""
        if opens and self._rows:  # of an opening that led to no round, or of a round that stayed in rows
            self._standing.clear()
            self._reducer.keep_in_rows(False)
        for index, (entry, each) in enumerate(zip(self._table.parameters, self._rows)):
            view, given = self.views[index], each.sharded.grad
            if not isinstance(view, ShardedGradient):  # frozen
                continue
            if given is None:
                if opens:
                    each.leave_mean()
                if entry.grad is view and view._pending is None:
                    entry.grad = None
                view._cleared = True  # no_sync() may have added to a mean that zero_grad() dropped
                continue
            each.check_gradient(given, self._table.names[index])
            mean = self._mean_of(index)
            if given is not mean:
                with torch.no_grad():
                    held_tensor(mean).copy_(held_tensor(given))
                each.sharded.grad = mean
            if opens and self.adds_apart:
                self._standing[index] = held_tensor(mean).clone()
                if entry.grad is view and view._pending is None:
                    entry.grad = None
                view._cleared = True
                continue
            if entry.grad is None:
                entry.grad = view
            view._cleared = False
        if self._rows:
            self.forget_norms()

    # views ----------------------------------------------------------------------------------------------------------

    def _make_view(self, index: int) -> torch.Tensor:
        like = self._storage.like(index)
        if self._zero < 2:
            return gradient_view(like, self._reducer, index)
        held = gradient_view(like, self._reducer, index) if self._reducer.transport == "staged" else None
        kind = SteppedGradient if self.steps else ShardedGradient
        return kind(index, like, from_dlpack(self._reducer.result(index)), self, held)

    def renew_view(self, index: int) -> None:
        """Make the view of a gradient. An old view that the user kept is moved to separate memory."""
        kept = self.views[index]
        if kept is not None:
            kept.data = kept.detach().clone(memory_format=torch.preserve_format)
        self.views[index] = self._make_view(index)

    def write_contribution(self, index: int, gradient: torch.Tensor, add: bool) -> torch.Tensor | None:
        """Write a gradient that the engine cannot read (other strides, sparse), at zero >= 2.

        By rows it has no one range of memory: return one that the engine can read.
        """
        if self._rows:
            like = self._storage.like(index)
            readable = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            self.copy(readable, gradient)
            return readable
        memory = gradient_view(self._storage.like(index), self._reducer, index)
        if add:
            whole = torch.empty_like(memory)
            self.copy(whole, gradient)
            memory.add_(whole)
        else:
            self.copy(memory, gradient)
        return None

    def drop(self) -> None:
        """Set every sliced `.grad` to None."""
        for parameter in self._table.parameters:
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None

    # for a step -------------------------------------------------------------------------------------------------------

    def slices(self) -> list[torch.Tensor | None]:
        """Return slice_of() for every parameter."""
        self._take_rows()
        return [self.slice_of(index) for index in range(len(self._table.parameters))]

    def slice_of(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter's `.grad`, flat; None without one. Error if not averaged, or frozen."""
        parameter = self._table.parameters[index]
        gradient = parameter.grad if isinstance(parameter, LocalParameter) else _hooks.read_gradient(parameter)
        if isinstance(gradient, ShardedGradient):
            plain = gradient._pending is None and not gradient._cleared
            return gradient.piece if plain else gradient.averaged_piece()
        if gradient is None:
            return None
        if self._reducer.is_used(index):
            raise Error(_NOT_AVERAGED)
        if not self._storage.is_stepped(index):
            raise Error(
                f"parameter {self._table.names[index]!r} is frozen and has a gradient from before the module was wrapped, so a step would change it only on this rank: call zero_grad() before the step"
            )
        if self._zero >= 2 or not self._is_averaged(index, gradient, self._last_step_on(parameter)):
            raise Error(_BY_HAND.format(name=self._table.names[index]))
        low, high = self._storage.own_run(index)
        if gradient is self.views[index]:
            kept, address = self._slices.get(index), gradient.data_ptr()
            if kept is None or kept[0]() is not gradient or kept[1] != address:
                own = memory_order(gradient.detach(), parameter)[low:high]
                # weak, since a view with another reference counts as kept by the user
                kept = self._slices[index] = (weakref.ref(gradient), address, own)
            return kept[2]
        return memory_order(gradient.detach(), parameter)[low:high]

    def _is_averaged(self, index: int, gradient: torch.Tensor, since: int) -> bool:
        """Return True if a whole gradient is a round's result or the user's change of it, as far as can be known.

        A round leaves our view, whose values may be changed in place. Another tensor counts if a round after `since` averaged
        the parameter, if it was stepped on before, or is zero. After a forward without a backward our view is judged so too.
        """
        if self._backend.group.world_size == 1:
            return True
        averaged = self._reducer.averaged_in(index) > since
        if gradient is self.views[index] and not self.closed_without_backward:
            return True
        if averaged:
            self._accepted[index] = weakref.ref(gradient)
        kept = self._accepted.get(index)
        return (kept is not None and kept() is gradient) or not bool(gradient.any())

    def check_averaged(self, optimizer: torch.optim.Optimizer, since: int) -> None:
        """Raise Error at zero=0, on all ranks, for a gradient not averaged since the round of the optimizer's last step."""
        suspects = range(len(self.views)) if self.closed_without_backward else self._reducer.foreign()
        if not suspects:
            return
        for index, gradient in self._stepped_on(optimizer, suspects):
            # a sparse mean is never a view
            if index not in self._table.sparse and not self._is_averaged(index, gradient, since):
                message = _BY_HAND.format(name=self._table.names[index]) + _BY_HAND_AT_0
                self._backend.abort(message)
                raise Error(message)

    def refuse_failed_round(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise Error at zero=0 for a gradient of the last round, which averaged nothing."""
        for index, gradient in self._stepped_on(optimizer, range(len(self.views))):
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if self._reducer.is_used(index) and bool(values.any()):
                raise Error(_FAILED_ROUND.format(name=self._table.names[index]))

    def _stepped_on(
        self, optimizer: torch.optim.Optimizer, indices: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield those of the parameters, with their gradients, that `optimizer` steps on."""
        members = {id(local_of(p)) for group in optimizer.param_groups for p in group["params"]}
        for index in indices:
            parameter = self._table.parameters[index]
            if id(parameter) in members and parameter.requires_grad and parameter.grad is not None:
                yield index, parameter.grad

    # values over all ranks -----------------------------------------------------------------------------------------

    def squares_of(self, slices: Callable[[], Sequence[torch.Tensor | None]], *, over_ranks: bool = True) -> bytes:
        """Return the exact sums of squares of all ranks' gradients, if `over_ranks` collectively; `slices` returns ours.

        There is one sum for each set of dimensions of the model mesh over which parameters are sharded.
        """
        kinds = self._table.sharded_kinds

        def sums() -> bytes:
            found = slices()
            speaks = self._slicing.speaks or not over_ranks
            held = [(kind, each) for kind, each in zip(kinds, found, strict=True) if each is not None and speaks]
            kept = sorted(set(kinds))
            return b"".join(self._backend.norm_sums([each for of, each in held if of == kind]) for kind in kept)

        return sums_over_ranks(self._comm, sums, self._label) if over_ranks else sums()

    def agree_on_clipping(self, max_norm: float) -> tuple[float, list[torch.Tensor]]:
        """Return rank 0's `max_norm`, and the gradients that this rank clips to it. Collective between hosts."""
        found: list[torch.Tensor | None] = []

        def answer() -> bytes:
            found.extend(self.slices())
            return struct.pack("d", max_norm)

        gathered = gather_answers(self._comm, answer, f"clipping the gradients of {self._label}")
        norms = [struct.unpack("d", each)[0] for each in gathered]
        other = next((rank for rank, each in enumerate(norms) if not math.isclose(each, norms[0], rel_tol=1e-3)), None)
        if other is not None:
            raise Error(
                f"clip_grad_norm_: max_norm must be equal on all ranks; of {self._label} it is {norms[0]!r} on rank 0 and {norms[other]!r} on rank "
                f"{other}"
            )
        return norms[0], [each for each in found if each is not None] if self._slicing.speaks else []

    def follow_factors(self, factors: list[list[Any]]) -> None:
        """Scale this rank's part of the gradients by the factors of the training ranks."""
        done = self.factors()
        for index, name, factor in factors[len(done) :]:
            view = self.views[index]
            assert isinstance(view, ShardedGradient)
            getattr(view._held, name)(factor)
            done.append([index, name, factor])

    def whole(self) -> dict[str, torch.Tensor | None]:
        """Return whole averaged gradients by bare name, collectively at zero >= 2; below it `.grad` unchanged."""
        if self._zero >= 2:
            self._agree()
        found: dict[str, torch.Tensor | None] = {}
        for index, (name, parameter) in enumerate(zip(self._table.names, self._table.parameters)):
            gradient = parameter.grad
            if gradient is not None and self._reducer.is_used(index):
                raise Error(_NOT_AVERAGED)
            if not isinstance(gradient, ShardedGradient):
                found[name] = None if gradient is None else whole_of(parameter, gradient)
                continue
            found[name] = whole_of(parameter, self.gathered(index, gradient.averaged_piece()))
        return found

    def gathered(self, index: int, piece: torch.Tensor) -> torch.Tensor:
        """Return a whole gradient from all ranks' slices. Collective."""
        parameter, name = self._table.parameters[index], self._table.names[index]
        data = bytes_of(piece) if self._slicing.speaks else b""
        flat = parameter.new_empty(parameter.numel(), dtype=piece.dtype)
        label = f"the whole gradient of {name} of {self._label}"
        for rank, each in enumerate(self._comm.all_gather_bytes(data, label)):
            low, high = self._storage.run(index, rank)
            if low < high and each:
                flat[low:high] = torch.frombuffer(bytearray(each), dtype=flat.dtype)
        return flat.as_strided(parameter.shape, self._storage.like(index).stride())

    def rewrite(self, index: int, flat: torch.Tensor) -> None:
        """Write a whole gradient in memory order, equal on all ranks, in place of an averaged one."""
        gradient, like = self._table.parameters[index].grad, self._storage.like(index)
        whole = flat.as_strided(like.shape, like.stride())
        if isinstance(gradient, ShardedGradient):
            gradient.rewrite(whole, flat[slice(*self._storage.own_run(index))])
        elif gradient is not None:
            gradient.copy_(whole)

    def _agree(self) -> None:
        """Raise Error on all ranks if one has gradients that are not averaged, or if ranks scaled by different factors."""

        def answer() -> bytes:
            self._take_rows()
            for index, parameter in enumerate(self._table.parameters):
                if isinstance(parameter.grad, ShardedGradient):
                    parameter.grad.averaged_piece()
                elif parameter.grad is not None and self._reducer.is_used(index):
                    raise Error(_NOT_AVERAGED)
            return json.dumps(self.factors()).encode()

        def compare(answers: Sequence[bytes]) -> str:
            other = next(rank for rank, each in enumerate(answers) if each != answers[0])
            ours, theirs = (self._describe(json.loads(answers[rank])) for rank in (0, other))
            return (
                f"ranks disagree about what the averaged gradients of {self._label} were scaled by: rank 0 by {ours}, rank {other} by "
                f"{theirs}; each rank keeps slices of them: scale them equally on all ranks"
            )

        gather_answers(self._comm, answer, f"factors of the gradients of {self._label}", compare=compare)
        self.accept_factors()

    def _describe(self, factors: list[list[Any]]) -> str:
        names = self._table.names
        return ", ".join(f"{name}({factor:g}) of {names[i]!r}" for i, name, factor in factors[:3]) or "nothing"

    # scalings and norms of slices ------------------------------------------------------------------------------------

    def scaled(self, index: int, name: str, factor: float) -> None:
        """Note that a gradient was scaled: cached norms are stale, and all ranks must have scaled it equally."""
        self.factors().append([index, name, factor])

    def number(self, factor: Any) -> float:
        """Return a factor's value, cached since one tensor usually scales all gradients. On a GPU the host waits for it."""
        if not isinstance(factor, torch.Tensor):
            return float(factor)
        version = -1 if factor.is_inference() else factor._version
        if self._factor is None or self._factor[0] is not factor or self._factor[1] != version or version < 0:
            self._factor = factor, version, float(factor)
        return self._factor[2]

    def factors(self) -> list[list[Any]]:
        """Return [index, "mul_" or "div_", factor] of each scaling that ranks have not compared yet.

        A round keeps the scalings of gradients to which some rank contributed on top.
        """
        rounds = self._reducer.rounds
        if rounds != self._factors_of:
            self._factors = [each for each in self._factors if self._reducer.accumulated_ranks(each[0])]
            self._factors_of = rounds
        return self._factors

    def accept_factors(self) -> None:
        """Clear the factors after all ranks have agreed on them."""
        self._scalings += len(self._factors)
        self._factors = []

    def norm(self, index: int, order: float, averaged: Callable[[], object]) -> float:
        """Return the norm of one gradient. The first call after a round computes all, collectively; `averaged` may raise."""
        state = (self._reducer.rounds, self._scalings + len(self.factors()))
        if state != self._norms_of:
            self._norms, self._norms_of = {}, state
        if order not in self._norms:
            self.announce("norms", order)
            self._norms[order] = self.gather_norms(order, averaged)
        averaged()
        return self._norms[order][index]

    def forget_norms(self) -> None:
        """Compute norms anew: gradients have been written to, on all ranks."""
        self._norms_of = (-1, -1)

    def gather_norms(self, order: float, averaged: Callable[[], object] = lambda: None) -> dict[int, float]:
        """Return the norm of every gradient, by index. Collective."""
        pieces = {index: view.piece for index, view in enumerate(self.views) if isinstance(view, ShardedGradient)}
        count = len(pieces)

        def answer() -> bytes:
            averaged()
            parts = [_partial(each if self._slicing.speaks else each[:0], order) for each in pieces.values()]
            mine = torch.stack(parts).tolist()  # on a GPU the host waits once
            return struct.pack(f"{count}d", *mine)

        gathered = gather_answers(self._comm, answer, f"norms of the gradients of {self._label}")
        rows = [struct.unpack(f"{count}d", each) for each in gathered]
        return {index: _whole(column, order) for index, column in zip(pieces, zip(*rows))}

    def any_rank(self, overflowed: Callable[[], bool]) -> bool:
        """Return True if a gradient overflowed on some rank. Collective; all raise if `overflowed` raises Error."""
        gathered = gather_answers(self._comm, lambda: bytes([overflowed()]), "overflow of a gradient")
        return b"\1" in gathered


def _tracer(reducer: Any, names: Sequence[str], op: str, label: str) -> Callable[[int, str], None]:
    """Return a tracer: a range of a profiler for each bucket as it is posted, and as the end of a round waits for it.

    The thread that posts a bucket also folds it. Buckets are described at once: a tracer does not keep its reducer.
    """
    described: list[tuple[str, list[tuple[int, str]]]] = []
    for bucket in range(reducer.bucket_count):
        _, numel, dtype, _ = reducer.bucket_shape(bucket)
        inside = [names[index] for index in reducer.bucket_parameters(bucket)]
        span = inside[0] if len(inside) == 1 else f"{inside[0]} to {inside[-1]}"
        described.append((f"bucket {bucket} of {label}, {span}", [(numel, dtype)]))
    is_open = contextlib.ExitStack()

    def trace(bucket: int, what: str) -> None:
        if what == "end":
            is_open.close()
        else:
            is_open.enter_context(_hooks.collective_range(op if what == "begin" else "wait", *described[bucket]))

    return trace


def _partial(piece: torch.Tensor, order: float) -> torch.Tensor:
    """Return a rank's part of a norm, a float64 scalar: a sum of powers, or the extreme."""
    wide = piece.abs().double()
    if piece.numel() == 0:
        return wide.new_full((), float("inf") if order == float("-inf") else 0.0)
    if order == float("inf"):
        return wide.max()
    if order == float("-inf"):
        return wide.min()
    if order == 0:
        return (wide != 0).sum().double()
    return wide.pow(order).sum()


def _whole(parts: Sequence[float], order: float) -> float:
    if order in (float("inf"), float("-inf")):
        extreme = max if order > 0 else min
        return float("nan") if any(part != part for part in parts) else extreme(parts)
    total = 0.0
    for part in parts:  # sum() would compensate
        total += part
    return total if order == 0 else float(torch.tensor(total, dtype=torch.float64, device="cpu").pow(1 / order))
