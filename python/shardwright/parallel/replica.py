"""The engine's side of one wrapped module: table, reducer, gradient views and hooks, made and taken down together."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .._engine import Error, Reducer
from ..backend.base import Backend, Capabilities, Request
from ..comm.exchange import Exchange
from ..comm.levels import Lease, Levels
from ..comm.process_group import HostGroup, group_ranks
from ..gradients.comm_hook import HookRunner, SlicedHookRunner, Wanted
from ..gradients.module_gradients import ModuleGradients
from ..gradients.sharded_gradient import ShardedGradient
from ..gradients.sparse_gradients import SparseGradients, find_sparse
from ..layout.param_groups import check_inner, cut
from ..layout.param_table import ParameterTable, verify
from ..layout.shard_mesh import Slicing
from ..layout.shard_runs import Storage
from ..layout.views import dtype_name
from ..options.compressors import Compressor
from ..options.options import Options
from ..options.precision import LOW_DTYPES
from ..parameters.drift import DriftCheck
from ..parameters.storage import ParameterMemory
from ..parameters.write_guard import ReadOnlyParameters, SampledParameters
from ..torch_compat import autograd as _hooks
from .backends import choose_backend
from .step_in_backward import adopt as adopt_steps_in_backward
from .steppers import Steppers

if TYPE_CHECKING:
    from ..backend.device_link import DeviceLink
    from ..parameters.mixed_precision import PrecisionPlan
    from .ddp_logging import IterationTimes

_logger = logging.getLogger("shardwright")
_serials = itertools.count()
_UNENDED_FORWARD = (
    "rank %d: a forward of %s ended in an exception, and the next one begins without a step of the optimizer between them. Ranks pair "
    "their backwards by counting them: unless the other ranks leave this batch out too, or it is repeated here, they average it with "
    "the next one of this rank from now on"
)
_live: weakref.WeakSet[Replica] = weakref.WeakSet()


class Replica:
    """One rank's replica of a module, ready for rounds. Making it is collective.

    It holds its owner, the wrapper, weakly: the parameters' hooks lead here, and would keep the wrapper alive for ever.

    Attributes
    ----------
    group : HostGroup
    slicing : Slicing
        The owners of slices at zero >= 1.
    table : ParameterTable
    reducer : Reducer
    gradients : ModuleGradients
    steppers : Steppers
        The optimizers of the module.
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
        slicing: Slicing | None = None,
        *,
        compress: Compressor | None = None,
        precision: PrecisionPlan | None = None,
    ) -> None:
        self.serial = next(_serials)
        self.label = type(module).__name__
        self.zero = zero
        self.group = group
        self.slicing = slicing or Slicing.one_a_rank(group.rank, group.world_size)
        self.settings = settings
        self._module = weakref.ref(module)
        refusal = None
        try:
            self.table = self._table_of(module, ignored, options)
            self._request = Request(self.table, options, zero, self.slicing, self.label, compress=compress)
            choose_backend(self.table).check_request(module, self._request, group)
            self._supersede(module)
            if zero:
                self.table.check_apart()
            check_inner(module, _ranks_of(options, group), ignored)
            sparse = [self.table.names[index] for index in sorted(self.table.sparse)]
            description = self.table.description({**settings, "sparse gradients": sparse})
        except (Error, NotImplementedError) as error:  # the peers get the error before they wait for this rank
            refusal, description = error, [["failure", str(error)]]
        try:
            verify(description, group.comm.all_gather_bytes, f"the wrapped {self.label}", refusal)
        finally:
            refusal = None  # its traceback holds this frame, and so the module
        make_backend = choose_backend(self.table)
        plans = None
        if zero == 3 and not (make_backend.capabilities.one_copy and options.share_parameters is not False):
            plans = cut(module, self.table, options.units, options.reshard_after_forward)
        behind = make_backend.capabilities.publishes_behind and zero in (1, 2) and options.prefetch > 0
        sends_early = compress is None or self._overlaps_compression(make_backend.capabilities)
        request = dataclasses.replace(
            self._request,
            plans=plans,
            sends_early=sends_early,
            compute_dtypes=self._compute_dtypes(precision),
            forwards=cut(module, self.table) if behind else (),
        )
        self.backend: Backend = make_backend(group, request)
        self.deterministic = options.deterministic or self.backend.capabilities.rank_order_only
        try:
            self.reducer: Any = self.backend.reducer(request)
            self._storage = self._make_storage(request)
        except BaseException as error:  # on a GPU of this rank alone; on hosts all ranks agree about memory
            if self.link is not None:
                self._abort(f"rank {group.rank}: wrapping {self.label} failed: {error}")
            raise
        #: before each forward: parameters are whole in all hooks of the user's modules, whenever they were registered
        self.arrange_hooks: Callable[[bool], None] = self._storage.arrange_hooks
        self._guard = self._make_guard(options.write_guard)
        self.steppers = Steppers(group)
        try:
            self._attach(synchronises)
        except BaseException as error:  # an error of this rank alone: the peers must not wait for it
            if group.comm.is_alive:
                group.comm.abort(f"wrapping {self.label} failed: {error}")
            raise
        self._drift: weakref.ref[DriftCheck] | None = None
        self._identities = frozenset(map(id, self.table.parameters))
        self.on_output_gradient = _output_hook(self.reducer)
        self.on_local_output_gradient = _local_output_hook(weakref.ref(self))
        #: True while the outputs of a forward inside no_sync() open a round
        self.opens_locally = False
        self._has_begun = self._ends_backward = False
        self.iterations = 0  # forwards that synchronise
        self.begin_iteration: Callable[[int], IterationTimes | None] | None = None
        self.times: IterationTimes | None = None
        self._forward_range: torch.profiler.record_function | None = None
        self._in_forward = self._warned_of_forward = False
        self.compression: tuple[str, Exchange | None] | None = None  # None inside: the reducer's own
        self.announcer: Any = None
        self.watcher: Any = None
        #: called after each round to which this rank contributes, in a backward as a rule
        self.after_round: list[Callable[[], None]] = []
        self._before_writes: dict[int, Callable[[], object]] = collections.OrderedDict()
        self.stores: weakref.WeakSet[Any] = weakref.WeakSet()
        _live.add(self)
        _hooks.watch_steps(self)

    def _compute_dtypes(self, precision: PrecisionPlan | None) -> dict[int, torch.dtype]:
        """Return the 16-bit dtypes in which modules compute with wider parameters."""
        given = {} if precision is None else precision.compute_dtypes()
        dtypes = {index: given.get(id(p), p.dtype) for index, p in enumerate(self.table.parameters)}
        wide = {index: p.element_size() > 2 for index, p in enumerate(self.table.parameters)}
        return {index: dtype for index, dtype in dtypes.items() if dtype in LOW_DTYPES and wide[index]}

    def _table_of(self, module: torch.nn.Module, ignored: frozenset[str], options: Options) -> ParameterTable:
        table = ParameterTable.of(module, ignored)
        is_cast = self.settings.get("precision") not in (None, "None")
        if self.zero or table.is_on_gpu or is_cast or options.sparse_gradients == "dense":
            return table
        return dataclasses.replace(table, sparse=find_sparse(module, table))

    def _make_storage(self, request: Request) -> Any:
        if not self.zero:
            return Storage(self.table)
        if request.plans is not None:
            return self.backend.unshard_store(self.reducer, request)
        return ParameterMemory(self.backend, self.reducer, request, shared=self.zero == 3)

    @property
    def link(self) -> DeviceLink | None:
        """Return the link of a GPU."""
        return self.backend.link

    def _make_guard(self, kind: str | None) -> SampledParameters | ReadOnlyParameters | None:
        memory = self._storage
        if kind is None or not memory.shared:
            return None
        if kind == "auto" and len(self.group.sharers(self.slicing)) == 1:
            return None  # no rank shares the parameters
        if kind != "read-only":
            return SampledParameters(memory, self.table.names, self.group.comm)
        return ReadOnlyParameters(memory)

    @property
    def write_guard(self) -> str | None:
        """Return facts for describe()."""
        return None if self._guard is None else self._guard.kind

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Allow writes to parameters inside. All ranks are past a barrier as it ends."""
        self._storage.settle()
        return self._guard.writing() if self._guard is not None else contextlib.nullcontext()

    def layout_of(self, index: int) -> torch.Tensor:
        """Return a tensor with the strides of a parameter, which itself may be released. It must not be read."""
        like: torch.Tensor = self._storage.like(index)
        return like

    def _attach(self, synchronises: Callable[[], bool]) -> None:
        steppers = self.steppers
        gradients = self.gradients = ModuleGradients(
            *(self.table, self._storage, self.backend, self.reducer, self.slicing, self.zero, self.label),
            last_step_on=steppers.last_step_on,
            warns_of_sparse=self._request.options.sparse_gradients == "auto",
        )
        self.reducer.attach(
            self.table.parameters,
            gradients.views,
            copy=gradients.copy if self.zero < 2 else _weakly(gradients.write_contribution),
            open=_opener(weakref.ref(self), synchronises),
            renew=_weakly(gradients.renew_view),
            task_id=_hooks.graph_task_id,
            layouts=self._storage.layouts(),
            unlike=_weakly(steppers.explain),
            describe=_weakly(steppers.describe, ""),
        )
        self._handles: list[Any] = []
        self.sparse: SparseGradients | None = None
        if self.table.sparse:
            self.sparse = SparseGradients(
                self.table, self.group.comm, self.reducer, self._request.options.reduce, self.label
            )
        for index, parameter in enumerate(self.table.parameters):
            if self.sparse is not None and index in self.table.sparse:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self.sparse.hook(index)))
            elif parameter.requires_grad:
                self._hook(index)

    def _overlaps_compression(self, capabilities: Capabilities) -> bool:
        """Return True if compressed buckets cross while the backward goes on.

        They do between hosts, where the network is the bottleneck, not a core. At zero >= 2 buckets share slots, and
        leave at its end.
        """
        return capabilities.sends_beside_backward and self.group.host_count > 1 and self.zero < 2

    @property
    def overlaps_compression(self) -> bool:
        return self._overlaps_compression(self.backend.capabilities)

    def levels(self, compress: Compressor) -> tuple[Levels, Lease | None]:
        """Return the levels of a compressor's exchange, with a lease where a thread has its own. Collective at first
        use across hosts.
        """
        return self.backend.exchange(compress, self._request, self.layout_of(0))

    def hook_runner(self, state: object, hook: Callable[[Any, Any], Any], *, is_ours: bool) -> HookRunner:
        """Return the runner of a communication hook. Our hooks give the mean over all ranks, and may fill this rank's
        slice alone.

        A user's hook decides both by itself.
        """
        parameters = self.table.parameters
        like = [self.layout_of(index) for index in range(len(parameters))]
        if self.zero >= 2 and self.reducer.transport != "staged":
            pieces = [view.piece for view in self.gradients.views if isinstance(view, ShardedGradient)]
            wanted = Wanted(in_slots=True, slice_alone=is_ours and not self.slicing.is_replicated)
            return SlicedHookRunner(
                self.reducer, parameters, like, self.slicing, pieces, state, hook, wanted, over_all=is_ours
            )
        return HookRunner(self.reducer, parameters, like, self.group.world_size, state, hook, over_all=is_ours)

    def _supersede(self, module: torch.nn.Module) -> None:
        """Retire an older replica of this very module; raise for one of another module that shares a parameter."""
        for other in live_replicas():
            shared = next((n for n, p in zip(self.table.names, self.table.parameters) if other.holds(p)), None)
            if shared is None:
                continue
            if not other.wraps(module):
                raise Error(
                    f"parameter {shared!r} belongs to a wrapped {other.label} already: "
                    "wrap one module that contains both"
                )
            other.retire(together=True)

    def wraps(self, module: torch.nn.Module) -> bool:
        """Return True if it is the replica of this very module."""
        return self._module() is module

    @property
    def retired(self) -> bool:
        """Return True if a later wrapper has taken over the module."""
        return self not in _live

    def _hook(self, index: int) -> None:
        parameter = self.table.parameters[index]
        self._handles.append(parameter.register_post_accumulate_grad_hook(self.reducer.hook(index)))
        hooks = _hooks.gradient_hooks(parameter)
        if hooks is not None:
            self.reducer.watch_hooks(index, hooks)

    def watch(self, module: torch.nn.Module, ignored: frozenset[str]) -> DriftCheck:
        """Check the module from now on, for as long as the caller keeps the result.

        The wrapper keeps it. The end of the wrapper calls retire(). A reference from here to the module would hold the
        hooks of its submodules, which may hold the wrapper, and nothing would end.
        """
        storage = self._storage
        drift = DriftCheck(
            module, self.table, ignored, pinned=bool(self.zero), shared=storage.shared, places=storage.places()
        )
        self._drift = weakref.ref(drift)
        return drift

    def _drift_check(self) -> DriftCheck | None:
        return self._drift() if self._drift is not None else None

    def _unfreeze(self, index: int) -> None:
        self.reducer.mark_unfrozen(index)
        self._storage.adopt(index)
        drift = self._drift_check()
        if self.zero and drift is not None:
            drift.forget_address(index)
        self._hook(index)

    def before_forward(self, synchronises: bool) -> None:
        """Prepare a forward with gradients, before it. Raise Error if the module is not the one that was wrapped."""
        self._notice_unended_forward()
        if _hooks.profiler_enabled() or self._forward_range is not None:
            self._begin_forward_range()
        self.gradients.closed_without_backward = False
        drift = self._check_drift()
        if self._guard is not None:
            self._guard.check("before a forward")
        self.backend.check()
        if drift is not None and drift.is_stateless and drift.none_in_place():
            return  # no gradient will come to a parameter
        if not self._has_begun:
            self._has_begun = True
            adopt_steps_in_backward(self)
        if synchronises:
            self.iterations += 1
            if self.begin_iteration is not None:
                self.times = self.begin_iteration(self.iterations - 1)
        self.reducer.forward(synchronises)
        # behind the end of a round that a failed backward left open: peers sent no bucket for these parameters in it
        for index in drift.take_unfrozen() if drift is not None else ():
            self._unfreeze(index)

    def before_evaluation(self) -> None:
        """Prepare a forward without gradients, before it."""
        self._storage.settle()
        if self._guard is not None:
            self._guard.check("before a forward")

    def after_forward(self) -> None:
        """Count a forward with gradients that ended without an exception."""
        self._in_forward = False
        if self._forward_range is not None:
            self._forward_range.__exit__(None, None, None)
            self._forward_range = None
        if self._guard is not None:
            self._guard.check("after a forward")

    def _begin_forward_range(self) -> None:
        """Begin torch's range of a profile for a forward, and end that of a forward that an exception ended."""
        if self._forward_range is not None:
            self._forward_range.__exit__(None, None, None)
        self._forward_range = torch.profiler.record_function("DistributedDataParallel.forward")
        self._forward_range.__enter__()

    def _notice_unended_forward(self) -> None:
        # recomputed inside a backward, which may break off once it has the values it needs
        if _hooks.graph_task_id() >= 0:
            return
        if self._in_forward and not self._warned_of_forward and self.group.world_size > 1:
            self._warned_of_forward = True
            _logger.warning(_UNENDED_FORWARD, self.group.rank, self.label)
        self._in_forward = True

    def _check_drift(self) -> DriftCheck | None:
        module, drift = self._module(), self._drift_check()
        if module is None or drift is None:
            return None
        try:
            drift.check(module)
        except Error as error:
            if self.releases_parameters:  # an error of this rank alone, perhaps
                self._abort(str(error))
            raise
        return drift

    def _abort(self, reason: str) -> None:
        """Abort the communicators, so that ranks that would wait for this one get the same sentence."""
        self.backend.abort(reason)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return True if `parameter` is in the table."""
        return id(parameter) in self._identities

    def parameters(self) -> Any:
        """Return the storage of the parameters."""
        return self._storage

    def parameter_plan(self) -> dict[str, Any]:
        """Return facts for describe()."""
        storage = self._storage
        if not self.zero:
            return {}
        key = "shared_parameter_bytes" if storage.shared or storage.one_copy else "parameter_bytes"
        plan: dict[str, Any] = {key: storage.bytes_held, **storage.plan()}
        return {**plan, "parameters_reason": storage.reason} if storage.reason else plan

    def stats(self) -> dict[str, Any]:
        """Return the reducer's counts, those of units, and the bytes sent to peers: in all, a step, and a bucket of the
        last round.

        A compressor's bytes are counted where they are handed over. Plain buckets fold in place: a rank reads W - 1
        slices (and at zero 0 and 1 writes as many).
        """
        counts = {**self.reducer.stats(), **self._storage.stats()}
        name, exchange = self.compression or ("", None)
        if exchange is None:
            halves = self.compression is not None  # between GPUs: replaces the wider types
            world, shots = self.group.world_size, 1 if self.zero >= 2 else 2
            slices = self.slicing.count if self.zero >= 2 else world
            shapes = [self.reducer.bucket_shape(bucket) for bucket in range(self.reducer.bucket_count)]
            sizes = [
                numel * (2 if halves else getattr(torch, dtype).itemsize)
                for _, numel, dtype, trains in shapes
                if trains
            ]
            buckets = tuple(shots * (world - 1) * (size // slices) for size in sizes)
            total = sum(buckets) * counts["rounds"] if halves else shots * (world - 1) * (counts["bytes"] // slices)
            wire = {"wire_bytes": total, "step_wire_bytes": sum(buckets), "bucket_wire_bytes": buckets}
            return {**counts, **({"compress": name} if halves else {}), **wire}
        buckets = exchange.bucket_wire_bytes
        wire = {"wire_bytes": exchange.wire_bytes, "step_wire_bytes": sum(buckets), "bucket_wire_bytes": buckets}
        return {**counts, "compress": name, **wire}

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return whole averaged gradients by bare name. Collective at zero >= 2."""
        self.close_pending()
        return self.gradients.whole()

    def average_gradients(self) -> None:
        """Average the current `.grad` in a round. Collective."""
        self._check_drift()
        if self.sparse is not None:
            self.sparse.use_all()
        self._end_round(self.reducer.average)
        self._in_forward = False

    def register_before_writes(self, hook: Callable[[], object]) -> RemovableHandle:
        """Have `hook()` called before parameters are written in another way than by a step of this rank.

        That is full_parameters(writable=True), and shadowed steps of training ranks, in which their hooks are not
        called.
        """
        handle = RemovableHandle(self._before_writes)
        self._before_writes[handle.id] = hook
        return handle

    def before_writes(self) -> None:
        for hook in list(self._before_writes.values()):
            hook()

    @contextlib.contextmanager
    def writable_parameters(self) -> Iterator[None]:
        """Return a context in which each rank writes to whole parameters. See full_parameters."""
        self.before_writes()
        if not self.zero:
            try:
                yield
            finally:
                self.broadcast_state(0, ())
            return
        try:
            with self.writing(), self._storage.writable():
                yield
        finally:
            self.count_writes(self.table.parameters)

    def give_copies_to(self, precision: PrecisionPlan) -> None:
        """Have modules compute with the memory that has parameters in their compute dtypes, where there is such."""
        self._storage.follow(precision)

    @property
    def releases_parameters(self) -> bool:
        """Return True if parameters are whole only while they are used."""
        releases: bool = self._storage.releases
        return releases

    def whole_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are whole. See full_parameters."""
        self._storage.settle()
        if self._guard is not None:
            self._guard.check("before all parameters are read")
        whole: contextlib.AbstractContextManager[None] = self._storage.whole()
        return whole

    # uneven inputs, see parallel/join.py -------------------------------------------------------------------------------------

    def join_through(self, announcer: Any) -> None:
        """Announce collectives of training ranks to joined ranks, inside join at zero >= 1."""
        self.announcer = announcer
        board = self.gradients.sliced_board
        if board is not None:
            board.announce = self.announce if announcer is not None else lambda *_: None
        if self.announces_rounds:
            self.reducer.set_announcer(announcer.announce_round if announcer is not None else None)
        if not self.backend.capabilities.free_unit_order:
            self._storage.announce_units(announcer.announce_unit if announcer is not None else None)

    @property
    def announces_rounds(self) -> bool:
        """Return True if opening a round must be announced to joined ranks."""
        return self.zero >= 2 and not self.backend.capabilities.tells_standing

    def gather_beside(self, unit: int) -> None:
        """Take part, as a joined rank on GPUs, in a gather of the training ranks."""
        self.parameters().gather_beside(unit)

    def gather_anew(self) -> None:
        """Gather units as after a step at the end of a join. Collective on GPUs at zero=3."""
        self._storage.gather_anew()

    @property
    def is_joining(self) -> bool:
        return self.announcer is not None and self.announcer.is_on

    def announce(self, kind: str, number: float = 0, groups: Any = None) -> None:
        """Announce an operation to joined ranks inside join; do nothing outside."""
        if self.announcer is not None and self.announcer.is_on:
            self.announcer.announce(kind, number, groups)

    def count_writes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bump the versions of parameters that were written through other tensors, for autograd and other readers of
        versions.
        """
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
        drift = self._drift_check()
        if drift is not None:
            drift.accept_writes()
        self._storage.accept_writes()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the step of an optimizer that holds one of our parameters, before it."""
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
        self._check_drift()
        if self._guard is not None:
            self._guard.check("before a step")
        if not self._ends_backward:
            self.close_pending()
        if not self.zero:
            self._check_gradients(optimizer)
        if not self.zero and self.group.world_size > 1:
            self.reducer.note_step(self.steppers.note(optimizer))
        self.reducer.count_step()
        self._in_forward = False  # a step has its round, with or without a forward's

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise Error at zero=0 for a gradient that was not averaged, if a forward of this step was to synchronise.

        Inside no_sync() alone each rank steps on its own, as it was asked to. Gradients of a round that a rank
        abandoned are refused as well.
        """
        if self.reducer.last_round_failed and self.group.world_size > 1:
            self.gradients.refuse_failed_round(optimizer)
        rounds = self.reducer.stats()["rounds"]
        since = self.steppers.count_step(optimizer, rounds)
        if rounds != since and self.group.world_size > 1:
            self.gradients.check_averaged(optimizer, since)

    # rounds, by whatever way they end --------------------------------------------------------------------------------

    def close(self, local: bool = False) -> None:
        """Close the round at the end of a backward."""
        times = None if local else self.times
        if times is not None:
            times.backward_end = time.perf_counter_ns()
        self._end_round(self.reducer.close)
        if times is not None:
            times.close_end = time.perf_counter_ns()

    def close_pending(self) -> None:
        """Close a synchronised forward that no backward followed, before gradients are used."""
        was_pending = self.reducer.pending_forward
        self._end_round(self.reducer.close_pending)
        if was_pending:
            self.gradients.closed_without_backward = True

    def shadow(self, standing: Sequence[int] | None = None) -> None:
        """Run a round of a rank that has run out of inputs. `standing`: see Announcer.announce_round."""
        end = self.reducer.shadow if standing is None else functools.partial(self.reducer.shadow, standing)
        self._end_round(end, contributes=False)

    def _end_round(self, end: Callable[[], None], *, contributes: bool = True) -> None:
        begin_s = time.perf_counter()
        looks = self.sparse is not None or bool(self.after_round)
        before = self.reducer.stats()["rounds"] if looks else 0
        if _hooks.profiler_enabled():
            with self._range():
                end()
        else:
            end()
        if looks and (not contributes or self.reducer.stats()["rounds"] != before):
            self._follow_round(contributes)
        if self.watcher is not None:
            self.watcher.after_round(time.perf_counter() - begin_s)

    def _follow_round(self, contributes: bool) -> None:
        """Do what follows a round that averaged: sparse gradients, and optimizers that step in the backward."""
        if self.sparse is not None:
            self.sparse.exchange(contributes=contributes)
        self._ends_backward = True
        try:
            for call in self.after_round if contributes else ():
                call()
        finally:
            self._ends_backward = False

    def _range(self) -> contextlib.AbstractContextManager[Any]:
        """Return a profiler's range for the end of a round, which waits for the averages."""
        numel = sum(p.numel() for p in self.table.parameters if p.requires_grad)
        dtypes = {dtype_name(p.dtype): None for p in self.table.parameters if p.requires_grad}
        kind = "reduce_scatter" if self.zero >= 2 else "all_reduce"
        return torch.profiler.record_function(
            f"shardwright:{kind}", f"{self.label} numel={numel} dtype={','.join(dtypes)}"
        )

    def broadcast_state(self, root: int, buffers: Iterable[torch.Tensor]) -> None:
        """Broadcast parameters and `buffers` of rank `root`. Collective."""
        parameters = (
            () if self.zero == 3 else self.table.parameters
        )  # sliced or shared parameters have rank 0's values already
        self.broadcast([*parameters, *buffers], root, f"state of {self.label}")

    def broadcast(self, tensors: list[torch.Tensor], root: int, label: str) -> None:
        """Broadcast values of rank `root`. Collective."""
        if not _hooks.profiler_enabled():
            self.backend.broadcast(tensors, root, label)
            return
        numel = sum(each.numel() for each in tensors)
        dtypes = ",".join({dtype_name(each.dtype): None for each in tensors})
        with torch.profiler.record_function("shardwright:broadcast", f"{label} numel={numel} dtype={dtypes}"):
            self.backend.broadcast(tensors, root, label)

    def retire(self, together: bool = False) -> None:
        """Take the hooks off the parameters. Gradients stay in place.

        `together`: all ranks do so at once, so that a GPU's released parameters can be gathered.
        """
        _live.discard(self)
        _hooks.ignore_steps(self)
        if self.zero >= 2:
            self.gradients.drop()
        self._storage.give_back(together)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _ranks_of(options: Options, group: HostGroup) -> list[Any]:
    """Return the global numbers of the ranks that slice the module: one list, or a list of rows."""
    if options.device_mesh is not None:
        ranks: list[Any] = options.device_mesh.mesh.tolist()
        return ranks
    return group_ranks(group.torch_group)


def live_replicas() -> list[Replica]:
    """Return every wrapped module of this process that has an engine, in order of wrapping."""
    return sorted(_live, key=lambda replica: replica.serial)


def _opener(replica: weakref.ref[Replica], synchronises: Callable[[], bool]) -> Callable[[], bool]:
    """Return the callback for the opening of a round. It is weak: the reducer holds it, and the replica holds the
    reducer."""

    def open_round() -> bool:
        alive = replica()
        if alive is None:
            return False
        local = not synchronises() or (alive.opens_locally and not alive.reducer.pending_forward)
        if alive.sparse is not None:
            alive.sparse.is_local = local
        close = alive.reducer.close
        if alive.after_round or alive.sparse is not None or alive.times is not None or _hooks.profiler_enabled():
            close = functools.partial(alive.close, local)
            if alive.times is not None:
                alive.times.backward_start = time.perf_counter_ns()
        elif alive.watcher is not None:
            close = alive.close
        _hooks.queue_at_end(close, alive.reducer.fail)
        return not local

    return open_round


def _weakly(method: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """Return `method` without its object, which the reducer must not hold; it becomes `otherwise` once the object is
    gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return otherwise if alive is None else alive(*arguments)

    return call


def _local_output_hook(replica: weakref.ref[Replica]) -> Callable[[torch.Tensor], None]:
    """Return the hook for outputs of a forward inside no_sync(): their backward is local, unless a forward outside of it
    waits for a backward, too."""

    def on_output_gradient(_: torch.Tensor) -> None:
        alive = replica()
        if alive is None:
            return
        alive.opens_locally = True
        try:
            alive.reducer.open_round()
        finally:
            alive.opens_locally = False

    return on_output_gradient


def _output_hook(reducer: Reducer) -> Callable[[torch.Tensor], None]:
    open_round = reducer.open_round

    def on_output_gradient(_: torch.Tensor) -> None:
        open_round()

    return on_output_gradient
