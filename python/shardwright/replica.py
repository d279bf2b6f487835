"""The engine's side of one wrapped module: table, reducer, gradient views and hooks, made and taken down together."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from . import _hooks
from ._engine import Error, Reducer
from .drift import DriftCheck
from .exchange import Exchange
from .gradients import copy_gradient, gradient_view
from .options import Options
from .parameter_memory import ParameterMemory, memory_order
from .process_group import HostGroup
from .sharded_gradient import GradientBoard, ShardedGradient
from .table import ParameterTable, verify

_serials = itertools.count()
#: at zero >= 2 gradients share a ring that holds the largest bucket and one more: large ones would keep much memory
_SLICED_CAP_BYTES = 8 << 20
#: between hosts the wire is what takes time: it starts with the first bucket, and a message is smaller than this anyway
_HOSTS_CAP_BYTES = 4 << 20
_NOT_AVERAGED = (
    "a parameter has a gradient of this rank alone, which is not averaged yet: run a backward outside of no_sync() before "
    "stepping, clipping or reading gradients"
)
_live: weakref.WeakSet[Replica] = weakref.WeakSet()


class Replica:
    """One rank's copy of a module, ready for rounds. Making it is collective.

    Holds its owner, the wrapper, weakly: the parameters' hooks lead here, and would keep the wrapper alive for ever.

    Attributes
    ----------
    group : HostGroup
    table : ParameterTable
    reducer : Reducer
    views : list of Tensor
        Gradient memory, one a parameter.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: HostGroup,
        options: Options,
        ignored: frozenset[str],
        synchronises: Callable[[], bool],
        settings: dict[str, Any],
        zero: int = 0,
    ) -> None:
        self.serial = next(_serials)
        self.label = type(module).__name__
        self.zero = zero
        self.group = group
        self._module = weakref.ref(module)
        refusal = None
        try:
            self.table = ParameterTable.of(module, ignored)
            self._supersede(module)
            description = self.table.description(settings)
        except (Error, NotImplementedError) as error:  # the others are told, before they wait for this rank
            refusal, description = error, [["failure", str(error)]]
        verify(description, group.comm.all_gather_bytes, f"the wrapped {self.label}", refusal)
        self.reducer = Reducer(
            group.comm,
            self.table.rows(),
            bucket_cap_bytes=_cap_bytes(options.bucket_cap_bytes, group, zero),
            transport=options.chosen_transport,
            reduce=options.reduce,
            sliced=zero >= 2,
            label=self.label,
        )
        self._parameters = None
        self._board: GradientBoard | None = None
        if zero:
            self._parameters = ParameterMemory(group, self.reducer, self.table, self.label, shared=zero == 3)
        try:
            self._attach(synchronises)
        except BaseException as error:  # of this rank alone: the others must not wait for it
            if group.comm.is_alive:
                group.comm.abort(f"wrapping {self.label} failed: {error}")
            raise
        self._drift = DriftCheck(module, self.table, ignored, pinned=bool(zero), shared=zero == 3)
        self._identities = frozenset(map(id, self.table.parameters))
        self.on_output_gradient = _output_hook(self.reducer)
        self.compression: tuple[str, Exchange] | None = None
        _live.add(self)
        _hooks.watch_steps(self)

    def _attach(self, synchronises: Callable[[], bool]) -> None:
        self.views = self._make_views()
        self.reducer.attach(
            self.table.parameters,
            self.views,
            copy=copy_gradient if self.zero < 2 else _writer(weakref.ref(self)),
            open=_opener(weakref.ref(self), synchronises),
            renew=_renewer(weakref.ref(self)),
            task_id=_hooks.graph_task_id,
        )
        self._handles: list[Any] = []
        self._gradient_slices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, parameter in enumerate(self.table.parameters):
            if parameter.requires_grad:
                self._hook(index)

    def _make_views(self) -> list[torch.Tensor]:
        if self.zero < 2:
            return [gradient_view(p, self.reducer, i) for i, p in enumerate(self.table.parameters)]
        board = self._board = GradientBoard(self.group.comm, self.reducer, self.label)
        staged = self.reducer.transport == "staged"
        return [
            ShardedGradient(
                p, from_dlpack(self.reducer.result(i)), board, gradient_view(p, self.reducer, i) if staged else None
            )
            for i, p in enumerate(self.table.parameters)
        ]

    def _supersede(self, module: torch.nn.Module) -> None:
        """An older replica of this very module gives way; one of another module that shares a parameter is an error."""
        for other in live_replicas():
            shared = next((n for n, p in zip(self.table.names, self.table.parameters) if other.holds(p)), None)
            if shared is None:
                continue
            if other._module() is not module:
                raise Error(
                    f"parameter {shared!r} belongs to a wrapped {other.label} already: "
                    "wrap one module that contains both"
                )
            other.retire()

    @property
    def retired(self) -> bool:
        """Whether a later wrapper has taken over the module."""
        return self not in _live

    def _hook(self, index: int) -> None:
        parameter = self.table.parameters[index]
        self._handles.append(parameter.register_post_accumulate_grad_hook(self.reducer.hook(index)))
        hooks = _hooks.gradient_hooks(parameter)
        if hooks is not None:
            self.reducer.watch_hooks(index, hooks)

    def _unfreeze(self, index: int) -> None:
        self.reducer.mark_unfrozen(index)
        if self._parameters is not None:
            self._parameters.adopt(index)
            self._drift.forget_address(index)
        self._hook(index)

    def before_forward(self, synchronises: bool) -> None:
        """Called before each forward with gradients. Raises Error if the module is not the one that was wrapped."""
        module = self._module()
        if module is not None:
            self._drift.check(module)
            for index in self._drift.take_unfrozen():
                self._unfreeze(index)
        self.reducer.forward(synchronises)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is in the table."""
        return id(parameter) in self._identities

    def parameters(self) -> ParameterMemory:
        """Where the parameters lie; at zero >= 1 only."""
        assert self._parameters is not None
        return self._parameters

    def parameter_plan(self) -> dict[str, Any]:
        """For describe()."""
        if self._parameters is None:
            return {}
        held = "shared_parameter_bytes" if self._parameters.shared else "parameter_bytes"
        plan: dict[str, Any] = {held: self._parameters.bytes_held}
        return {**plan, "parameters_reason": self._parameters.reason} if self._parameters.reason else plan

    def stats(self) -> dict[str, Any]:
        """The reducer's counts, and what a compressor has sent to other ranks."""
        if self.compression is None:
            return self.reducer.stats()
        name, exchange = self.compression
        return {**self.reducer.stats(), "compress": name, "wire_bytes": exchange.wire_bytes}

    def gradient_slice(self, index: int) -> torch.Tensor | None:
        """This rank's elements of a parameter's `.grad`, one-dimensional; None if there is no gradient."""
        parameter = self.table.parameters[index]
        gradient = parameter.grad
        if isinstance(gradient, ShardedGradient):
            return gradient.averaged_piece()
        if gradient is None:
            return None
        if self.zero >= 2 or self.reducer.is_used(index):
            raise Error(_NOT_AVERAGED)
        low, high = self.parameters().own_run(index)
        if gradient is self.views[index]:
            kept = self._gradient_slices.get(index)
            if kept is None or kept[0] is not gradient:
                kept = self._gradient_slices[index] = (gradient, memory_order(gradient.detach(), parameter)[low:high])
            return kept[1]
        return memory_order(gradient.detach(), parameter)[low:high]

    @contextlib.contextmanager
    def writable_parameters(self) -> Iterator[None]:
        """See full_parameters."""
        if self._parameters is None:
            try:
                yield
            finally:
                self.broadcast_state(0, ())
            return
        try:
            with self._parameters.writable():
                yield
        finally:
            self.count_writes(self.table.parameters)

    def gradient_factors(self) -> list[float]:
        """What sliced gradients were scaled by since the last round."""
        return self._board.factors() if self._board is not None else []

    def count_writes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Parameters were written through other tensors: autograd and others that watch versions are told."""
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
        self._drift.accept_writes()

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole averaged gradients by bare name. Collective at zero >= 2, else the gradients as they are."""
        self.reducer.close_pending()
        found: dict[str, torch.Tensor | None] = {}
        for index, (name, parameter) in enumerate(zip(self.table.names, self.table.parameters)):
            gradient = parameter.grad
            if gradient is not None and self.reducer.is_used(index):
                raise Error(_NOT_AVERAGED)
            if not isinstance(gradient, ShardedGradient):
                found[name] = gradient
                continue
            data = gradient.averaged_piece().view(torch.uint8).numpy().tobytes()
            flat = parameter.new_empty(parameter.numel(), dtype=gradient.dtype)
            for rank, each in enumerate(self.group.comm.all_gather_bytes(data, f"gradient of {name}")):
                low, high = self.parameters().run(index, rank)
                if low < high:
                    flat[low:high] = torch.frombuffer(bytearray(each), dtype=flat.dtype)
            found[name] = flat.as_strided(parameter.shape, parameter.stride())
        return found

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the step of an optimizer that holds one of our parameters."""
        owner = getattr(optimizer, "replica", None)
        if self.zero and isinstance(owner, Replica) and owner is not self:
            raise Error(
                f"this optimizer was sliced for an earlier wrapper of the {self.label}: give sw.wrap(module, optimizer, zero=...) "
                "the optimizer too when wrapping again"
            )
        if self.zero and owner is None:
            raise Error(
                f"{type(optimizer).__name__} steps on whole parameters of a {self.label} wrapped with zero={self.zero}, which "
                "would update them on this rank alone: use the optimizer that sw.wrap(module, optimizer, zero=...) returned"
            )
        module = self._module()
        if module is not None:
            self._drift.check(module)
        self.reducer.close_pending()
        self.reducer.count_step()

    def renew_view(self, index: int) -> None:
        """The old view of a gradient, which somebody kept, moves to memory of its own; a new one takes its place."""
        kept = self.views[index]
        kept.data = kept.detach().clone(memory_format=torch.preserve_format)
        self.views[index] = gradient_view(self.table.parameters[index], self.reducer, index)

    def broadcast_state(self, root: int, buffers: Iterable[torch.Tensor]) -> None:
        """Parameters and `buffers` of rank `root` to all. Collective."""
        parameters = () if self.zero == 3 else self.table.parameters  # the host's one copy has rank 0's values already
        self.group.broadcast([*parameters, *buffers], root, f"state of {self.label}")

    def retire(self) -> None:
        """Takes the hooks off the parameters. Gradients stay where they are."""
        _live.discard(self)
        _hooks.ignore_steps(self)
        for parameter in self.table.parameters if self.zero >= 2 else ():
            if isinstance(parameter.grad, ShardedGradient):
                parameter.grad = None
        if self._parameters is not None:
            self._parameters.give_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _cap_bytes(asked: int, group: HostGroup, zero: int) -> int:
    """Of a bucket. The bits of a gradient do not depend on it."""
    limits = [_SLICED_CAP_BYTES] * (zero >= 2) + [_HOSTS_CAP_BYTES] * (group.host_count > 1)
    return min(asked, *limits) if limits else asked


def live_replicas() -> list[Replica]:
    """Every wrapped module of this process that has an engine, in order of wrapping."""
    return sorted(_live, key=lambda replica: replica.serial)


def _opener(replica: weakref.ref[Replica], synchronises: Callable[[], bool]) -> Callable[[], bool]:
    """What the reducer calls when a round opens. Weak: the reducer holds it, and the replica holds the reducer."""

    def open_round() -> bool:
        alive = replica()
        if alive is None:
            return False
        _hooks.queue_at_end(alive.reducer.close)
        return synchronises()

    return open_round


def _writer(replica: weakref.ref[Replica]) -> Callable[[int, torch.Tensor, bool], None]:
    """What the reducer calls at zero >= 2 with a gradient that it cannot read by itself: of other strides, sparse, ..."""

    def write(index: int, gradient: torch.Tensor, add: bool) -> None:
        alive = replica()
        if alive is None:
            return
        memory = gradient_view(alive.table.parameters[index], alive.reducer, index)
        if add:
            whole = torch.empty_like(memory)
            copy_gradient(whole, gradient)
            memory.add_(whole)
        else:
            copy_gradient(memory, gradient)

    return write


def _renewer(replica: weakref.ref[Replica]) -> Callable[[int], None]:
    """What the reducer calls before it overwrites a view that is in other hands."""

    def renew(index: int) -> None:
        alive = replica()
        if alive is not None:
            alive.renew_view(index)

    return renew


def _output_hook(reducer: Reducer) -> Callable[[torch.Tensor], None]:
    open_round = reducer.open_round

    def on_output_gradient(_: torch.Tensor) -> None:
        open_round()

    return on_output_gradient
