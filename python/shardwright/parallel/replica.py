"""The engine's state for one wrapped module: table, reducer, gradient views and hooks, made and removed together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .._engine import Error
from ..backend.base import Backend, Request
from ..comm.agreement import verify
from ..comm.exchange import Ranks
from ..comm.model_ranks import ModelRanks, together
from ..comm.process_group import HostGroup, group_ranks
from ..comm.signals import StopRequest
from ..gradients.comm_hook import HookRunner
from ..gradients.module_gradients import ModuleGradients
from ..gradients.sharded_gradient import ShardedGradient
from ..gradients.sparse_gradients import SparseGradients, find_sparse
from ..layout.model_mesh import placed
from ..layout.param_groups import check_hookable, check_inner, cut, mark_of
from ..layout.param_table import ParameterTable
from ..layout.shard_mesh import Slicing
from ..layout.shard_runs import Storage, itemsize_of
from ..observe import ended, trace, watch
from ..options.compress import Compressor
from ..options.options import Options
from ..options.precision import LOW_DTYPES
from ..parameters.access import ParameterAccess
from ..parameters.drift import DriftCheck
from ..parameters.storage import ParameterMemory
from ..torch_compat import autograd as _hooks
from ..torch_compat.dtensor import held_tensor, is_dtensor
from ..torch_compat.weak import weakly
from .agreement.replica_check import ReplicaCheck
from .agreement.steppers import Steppers, adopt_steps_in_backward
from .backends import choose_backend

if TYPE_CHECKING:
    from ..backend.device_link import DeviceLink
    from ..parameters.mixed_precision import PrecisionPlan

_serials = itertools.count()
_live: weakref.WeakSet[Replica] = weakref.WeakSet()


class Replica:
    """One rank's replica of a module, ready for rounds. Construction is collective.

    It refers to its engine weakly: hooks of the parameters refer to it and would keep the module alive. With groups= an
    engine has several: the rounds of one end after those of the replica `before` it, and each gradient from autograd is
    multiplied by `gradient_factor` (parallel/composition/parts.py), but under fully_shard, as FSDP2 has it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: HostGroup,
        options: Options,
        ignored: frozenset[str],
        slicing: Slicing,
        engine: weakref.ref[Any],
        settings: dict[str, Any],
        *,
        compress: Compressor | None = None,
        precision: PrecisionPlan | None = None,
        before: Replica | None = None,
        gradient_factor: float = 1.0,
        building: Any = None,
    ) -> None:
        self.serial = next(_serials)
        self.label = type(module).__name__
        self.options, self.settings, self.engine = options, settings, engine
        self.zero = zero = options.stage
        self.group = group
        self.slicing = slicing
        #: True once the hooks are gone, as a later wrapper has taken over the module
        self.retired = False
        self._gradient_factor = gradient_factor
        self._module = weakref.ref(module)
        #: the ranks of the mesh of the module's DTensors, made first, before anything can fail on one rank only
        self.model_ranks = ModelRanks.beside(_taking_part(module, ignored), group)

        made: list[Request] = []

        def describe() -> list[list[str]]:
            self.table = self._table_of(module, ignored, options)
            request = self._make_request(module, compress, precision, building)
            choose_backend(self.table).check_request(module, request, group)
            if request.plans is not None:
                check_hookable(module)
            made.append(request)
            self._supersede(module)
            if zero:
                self.table.check_apart()
            if before is None:
                check_inner(module, _ranks_of(options, group), ignored)
            sparse = [self.table.names[index] for index in sorted(self.table.sparse)]
            return self.table.description({**settings, "sparse gradients": sparse})

        begin = functools.partial(verify, group.comm, describe, f"the wrapped {self.label}")
        together(self.model_ranks, begin, self.label, self._facts_over_mesh)
        if self.model_ranks is not None and settings["init_sync"] and building is None:
            self.model_ranks.check_replicated(self.table, group, self.label)
        request = made.pop()  # it holds modules, and hooks hold this object
        self.backend: Backend = choose_backend(self.table)(group, request)
        #: None on the host
        self.link: DeviceLink | None = self.backend.link
        self.deterministic = options.deterministic or self.backend.capabilities.rank_order_only
        try:
            self.reducer: Any = self.backend.reducer(request)
            self._storage = self._make_storage(request)
        except BaseException as error:  # a GPU may fail on one rank only; on hosts all ranks agree about memory
            if self.link is not None:
                self._abort(f"rank {group.rank}: wrapping {self.label} failed: {error}")
            raise
        if self.link is not None:  # otherwise a rank could return although its peer failed
            group.comm.barrier(f"the memory of the wrapped {self.label}")
        #: True for a module that fully_shard was called on
        self.has_rows = bool(self._storage.rows)
        #: called before each forward: keeps parameters whole in all of the user's hooks, including later ones
        self.arrange_hooks = self._storage.hook_arranger()
        self.access = ParameterAccess(self._storage, self.table, group, self.slicing, options.write_guard, self.label)
        self.steppers = Steppers(group, self.label, _is_of_a_wrapped_module)
        try:
            self._attach(before)
        except BaseException as error:  # an error of this rank only: the peers must not wait for it
            if group.comm.is_alive:
                group.comm.abort(f"wrapping {self.label} failed: {error}")
            raise
        self._handles += self.access.hook_loading(module) if zero == 3 else []
        #: tells ranks that ran out of inputs of collectives; None outside join (parallel/join.py)
        self.announcer: Any = None
        #: see stop_request()
        self.stop: StopRequest | None = None
        #: compares replicas every few steps; None without check_every=
        self.check = None if options.check_every is None else ReplicaCheck(self, options.check_every)
        if self.check is not None:
            self.steppers.explain_replicas = weakly(self.check.explain)
            self._handles += self.check.handles
        self.note_identities()
        self._storage.on_adoption = weakref.WeakMethod(self.note_identities)
        self._has_begun = False
        #: the compressor, and what counts its bytes; None if the reducer does
        self.compression: tuple[str, Any] | None = None
        self.stores: weakref.WeakSet[Any] = weakref.WeakSet()
        _live.add(self)
        _hooks.watch_steps(self)
        watch.begin()
        trace.begin_if_asked()
        ended.keep()

    def _make_request(
        self, module: torch.nn.Module, compress: Compressor | None, precision: PrecisionPlan | None, building: Any
    ) -> Request:
        options, zero, able = self.options, self.zero, choose_backend(self.table).capabilities
        in_units = zero == 3 and not (able.one_copy and options.share_parameters is not False)
        behind = able.publishes_behind and zero in (1, 2) and options.prefetch > 0
        #: compressed buckets travel to other hosts while the backward runs
        self.overlaps_compression = able.sends_beside_backward and self.group.host_count > 1
        return Request(
            *(self.table, options, zero, self.slicing, self.label),
            plans=cut(module, self.table, options.units, options.reshard_after_forward) if in_units else None,
            compress=compress,
            sends_early=compress is None or self.overlaps_compression,
            compute_dtypes=self._compute_dtypes(precision),
            forwards=cut(module, self.table) if behind else (),
            building=building,
        )

    def _facts_over_mesh(self) -> list[list[str]]:
        place = [["option zero", str(self.zero)], ["ranks that average", str(self.group.world_size)]]
        place += [["rank among them", str(self.group.rank)]]
        named = zip(self.table.names, self.table.module_parameters)
        return place + [[name, f"{tuple(p.shape)}{placed(p)}"] for name, p in named]

    def _compute_dtypes(self, precision: PrecisionPlan | None) -> dict[int, torch.dtype]:
        """Return the 16-bit dtypes in which modules compute with wider parameters."""
        given = {} if precision is None else precision.compute_dtypes()
        dtypes = {index: given.get(id(p), p.dtype) for index, p in enumerate(self.table.module_parameters)}
        wide = {index: p.element_size() > 2 for index, p in enumerate(self.table.parameters)}
        return {index: dtype for index, dtype in dtypes.items() if dtype in LOW_DTYPES and wide[index]}

    def _table_of(self, module: torch.nn.Module, ignored: frozenset[str], options: Options) -> ParameterTable:
        is_marked = mark_of(module) is not None  # by fully_shard, which gathers for inference too
        table = ParameterTable.of(module, ignored, group_ranks(self.group.torch_group), may_be_frozen=is_marked)
        if options.device is not None and table.parameters[0].is_cpu:
            table = dataclasses.replace(table, device=torch.device(options.device))
        is_cast = self.settings.get("precision") not in (None, "None")
        if self.zero or table.is_on_gpu or is_cast or options.sparse_gradients == "dense":
            return table
        return dataclasses.replace(table, sparse=find_sparse(module, table))

    def _make_storage(self, request: Request) -> Any:
        if not self.zero:
            return Storage(self.reducer, self.table, self.slicing, self.label)
        if request.plans is not None:
            return self.backend.unshard_store(self.reducer, request)
        return ParameterMemory(self.backend, self.reducer, request, shared=self.zero == 3)

    def layout_of(self, index: int) -> torch.Tensor:
        """Return a tensor with the strides of a parameter, released or not. Its values must not be read."""
        like: torch.Tensor = self._storage.like(index)
        return like

    def _attach(self, before: Replica | None) -> None:
        steppers = self.steppers
        opens_first = None if before is None else weakly(before.open_round)
        sparse: SparseGradients | None = None
        if self.table.sparse:
            sparse = SparseGradients(self.table, self.group.comm, self.reducer, self.options.reduce, self.label)
        gradients = self.gradients = ModuleGradients(
            *(self.table, self._storage, self.backend, self.reducer, self.slicing, self.zero, self.label),
            last_step_on=steppers.last_step_on,
            sparse=sparse,
            warns_of_sparse=self.options.sparse_gradients == "auto",
            steps=self.options.step_in_backward,
        )
        self.reducer.attach(
            self.table.parameters,
            gradients.views,
            copy=gradients.copy if self.zero < 2 else weakly(gradients.write_contribution),
            open=gradients.opener(self.engine, opens_first),
            renew=weakly(gradients.renew_view),
            task_id=_hooks.graph_task_id,
            layouts=self._storage.layouts(),
            unlike=weakly(steppers.compare),
            describe=weakly(steppers.describe, ""),
        )
        self._handles: list[Any] = []
        for index, parameter in enumerate(self.table.parameters):
            if sparse is not None and index in self.table.sparse:
                self._handles.append(parameter.register_post_accumulate_grad_hook(sparse.hook(index)))
            elif parameter.requires_grad:
                self._hook(index)

    def compressing_ranks(self) -> Ranks:
        """Return the ranks between which gradients are compressed: of several hosts, one each."""
        group = self.group
        if group.host_count == 1:
            return Ranks(group.rank, group.world_size)
        return Ranks(group.host_of[group.rank], group.host_count, group.rank in group.carriers)

    def is_compressing(self) -> bool:
        """Return True if buckets of an open round are on their way through a compressor."""
        return self.reducer.is_compressing

    def split(self) -> str:
        """Return this rank's position in the mesh of the module's DTensors; "" without a mesh."""
        mesh = self.table.model_mesh
        if mesh is None:
            return ""
        places = zip(mesh.dimensions, mesh.coordinate, mesh.mesh.mesh.shape)
        return ", ".join(f"{name} {place} of {size}" for name, place, size in places)

    def hook_runner(self, state: object, hook: Callable[[Any, Any], Any], *, is_ours: bool) -> HookRunner:
        """Return the runner of a hook, ours or a user's."""
        parameters = self.table.parameters
        like = [self.layout_of(index) for index in range(len(parameters))]
        pieces = None
        if self.zero >= 2 and self.reducer.transport != "staged":
            pieces = [view.piece for view in self.gradients.views if isinstance(view, ShardedGradient)]
        return HookRunner(
            *(self.reducer, parameters, like, self.slicing, state, hook),
            pieces=pieces,
            is_ours=is_ours,
            by_rows=self.has_rows,
        )

    def _supersede(self, module: torch.nn.Module) -> None:
        """Retire an older replica of the same module; raise if another module's replica shares a parameter."""
        for other in live_replicas():
            shared = next((n for n, p in zip(self.table.names, self.table.module_parameters) if other.holds(p)), None)
            if shared is None:
                continue
            if not other.wraps(module):
                raise Error(
                    f"parameter {shared!r} belongs to a wrapped {other.label} already: "
                    "wrap one module that contains both"
                )
            other.access.before_the_end()
            other.retire(together=True)

    def wraps(self, module: torch.nn.Module) -> bool:
        """Return True if this is the replica of `module`."""
        return self._module() is module

    def note_identities(self) -> None:
        """Note the ids of the parameters that an optimizer may hold."""
        shown = [each.sharded for each in self._storage.rows]
        self.identities = frozenset(map(id, [*self.table.module_parameters, *shown]))

    def meet(self) -> None:
        """Begin a forward on DTensors of fully_shard: make what each rank wrote to its rows visible. Collective."""
        if _hooks.graph_task_id() < 0:  # a recomputation reads what its forward read
            self._storage.schedule.release_idle()
            self._storage.meet()

    def part(self) -> None:
        """End such a forward: no rank reads the others' rows any longer, also if no backward follows. Collective."""
        if _hooks.graph_task_id() >= 0:
            return
        self._storage.schedule.show_slots()
        self.backend.fence(f"reads of the parameters of {self.label}")

    def open_round(self) -> None:
        """Open the round of the running backward, unless it is open."""
        self.reducer.open_round()

    def _hook(self, index: int) -> None:
        parameter = self.table.parameters[index]
        if self._gradient_factor != 1.0 and not self.has_rows:
            factor = self._gradient_factor
            self._handles.append(self.table.module_parameters[index].register_hook(lambda gradient: gradient * factor))
        self._handles.append(parameter.register_post_accumulate_grad_hook(self.reducer.hook(index)))
        hooks = _hooks.gradient_hooks(parameter)
        if hooks is not None:
            self.reducer.watch_hooks(index, hooks)

    def _unfreeze(self, index: int) -> None:
        self.reducer.mark_unfrozen(index)
        self._storage.adopt(index)
        drift = self.access.drift()
        if self.zero and drift is not None:
            drift.forget_address(index)
        self._hook(index)

    def before_forward(self, synchronises: bool) -> None:
        """Prepare for a forward with gradients. Raise Error if the module is no longer the one that was wrapped."""
        if self.access.load_depth:  # a load that ended in an exception
            self.access.abandon_load()
        if self.access.shows_writes:
            self.access.before_forward()
        drift = self._check_drift()
        if self.access.guard is not None:
            self.access.guard.check("before a forward")
        if self.link is not None:
            self.link.check()
        if drift is not None and drift.is_stateless and drift.none_in_place():
            return  # no parameter will get a gradient
        if not self._has_begun:
            self._has_begun = True
            adopt_steps_in_backward(self)
        self.gradients.forward(synchronises)
        if synchronises and self.check is not None:
            self.check.note()
        if synchronises and self.stop is not None:
            self.stop.note(self.reducer)
        # only after forward() ended the round of a failed backward, in which peers sent no bucket for these parameters
        for index in drift.take_unfrozen() if drift is not None and drift.frozen else ():
            self._unfreeze(index)

    def _check_drift(self) -> DriftCheck | None:
        module, drift = self._module(), self.access.drift()
        if module is None or drift is None:
            return None
        try:
            drift.check(module)
        except Error as error:
            if self.group.world_size > 1:  # it may be this rank's alone, and peers would wait
                self._abort(str(error))
            raise
        return drift

    def _abort(self, reason: str) -> None:
        self.backend.abort(reason)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return True if `parameter` is in the table."""
        return id(parameter) in self.identities

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
        """Return the counts of the reducer and of units, and the bytes sent to peers."""
        counts = self.reducer.stats()
        return {**counts, **self._storage.stats(), **self._bytes_sent(counts)}

    def _bytes_sent(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the bytes that this rank sends: in all, in a step, and of each bucket of the last round.

        A compressor's exchange, if there is one, counts its own. Plain buckets fold in place: a rank reads W - 1 slices,
        and at zero 0 and 1 writes as many. Between GPUs wider dtypes may travel in 16 bits.
        """
        name, exchange = self.compression or ("", None)
        if exchange is not None:
            buckets, total = exchange.bucket_wire_bytes, exchange.wire_bytes
        else:
            world_size, is_sliced = self.group.world_size, self.zero >= 2
            factor = (world_size - 1) * (1 if is_sliced else 2)
            slices = self.slicing.count if is_sliced else world_size
            shapes = [self.reducer.bucket_shape(bucket) for bucket in range(self.reducer.bucket_count)]
            sizes = [n * (2 if self.compression else itemsize_of(dtype)) for _, n, dtype, is_on in shapes if is_on]
            buckets = tuple(factor * (size // slices) for size in sizes)
            kept = counts["row_bytes"]  # of rounds that stayed in rows
            total = (
                sum(buckets) * counts["rounds"] if self.compression else factor * ((counts["bytes"] - kept) // slices)
            )
            total += (self.slicing.count - 1) * (kept // slices)
        row = {"wire_bytes": total, "step_wire_bytes": sum(buckets), "bucket_wire_bytes": buckets}
        return {"compress": name, **row} if self.compression else row

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return whole averaged gradients by bare name. Collective at zero >= 2."""
        if self.zero >= 2 and self.in_sliced_join:
            raise Error(
                f"full_gradients is collective, and inside join a rank of {self.label} that ran out of inputs takes no part in it: read "
                "p.grad.clone() of each parameter on every rank that trains, or call it after the join"
            )
        self.gradients.close_pending()
        return self.gradients.whole()

    @property
    def in_sliced_join(self) -> bool:
        """Return True inside join at zero >= 1."""
        return self.announcer is not None and self.announcer.is_on

    @property
    def in_join(self) -> bool:
        """Return True inside join. Some rank may then be shadowing, and make no other collective call."""
        return self.announcer is not None and self.announcer.is_joining

    def announce(self, kind: str, number: float = 0, groups: Any = None) -> None:
        """Announce an operation to joined ranks inside join; do nothing outside."""
        if self.in_sliced_join:
            self.announcer.announce(kind, number, groups)

    def average_gradients(self) -> None:
        """Average the current `.grad` in a round. Collective."""
        self._check_drift()
        self.gradients.average()
        engine = self.engine()
        if engine is not None:
            engine.is_inside_forward = False

    @contextlib.contextmanager
    def writable_parameters(self) -> Iterator[None]:
        """Return a context in which each rank can write to whole parameters. See full_parameters."""
        if self.zero:
            with self.access.writable():
                yield
            return
        self.access.before_writes()
        self.access.is_writing += 1
        try:
            yield
        finally:
            self.access.is_writing -= 1
            self.broadcast_state(0, ())

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Return a context in which each rank writes new values to the pieces() of the parameters. Collective."""
        try:
            self.access.before_writes()
            with self.access, self.access.writing(), self._storage.filling():
                yield
        except BaseException as error:  # of this rank only: the peers must not wait for it
            self._abort(f"rank {self.group.rank}: loading {self.label} failed: {error!r}")
            raise
        finally:
            self.access.count_writes(self.table.module_parameters)

    @property
    def releases_parameters(self) -> bool:
        """Return True if parameters are released while they are not in use."""
        releases: bool = self._storage.releases
        return releases

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for the step of an optimizer that holds one of our parameters."""
        owners = getattr(optimizer, "replicas", None)
        if owners is not None and self not in owners:
            raise Error(
                f"this optimizer was sliced for an earlier wrapper of the {self.label}: give sw.wrap(module, optimizer, zero=...) "
                "the optimizer too when wrapping again"
            )
        if self.has_rows:
            self._before_step_of_rows()
            return
        if self.zero and owners is None:
            raise Error(
                f"{type(optimizer).__name__} steps on whole parameters of a {self.label} wrapped with zero={self.zero}, which would update them only on this rank: use the optimizer that sw.wrap(module, optimizer, zero=...) or sw.shard_optimizer(module, optimizer) returned"
            )
        if self.access.load_depth:  # a load that ended in an exception
            self.access.abandon_load()
        self._check_drift()
        if self.access.guard is not None:
            self.access.guard.check("before a step")
        if not self.gradients.runs_callbacks:
            self.gradients.close_pending()
        if not self.zero:
            self._check_gradients(optimizer)
            if self.check is not None:
                self._check_finite(self.check, optimizer)
        if not self.zero and self.group.world_size > 1:
            self.reducer.note_step(self.steppers.note(optimizer))
        if self.check is not None and not self.zero:
            self.check.count_step(optimizer)
        self.reducer.count_step()
        engine = self.engine()
        if engine is not None:
            engine.is_inside_forward = False  # every step belongs to a round, with or without a forward

    def _before_step_of_rows(self) -> None:
        """Prepare for a step of any optimizer on the DTensors of fully_shard."""
        if not self.gradients.runs_callbacks:
            self.gradients.close_pending()
        self._storage.schedule.release_all()
        self.reducer.count_step()
        engine = self.engine()
        if engine is not None:
            engine.is_inside_forward = False

    def stop_request(self) -> StopRequest | None:
        """Return a stop request that travels with rounds; None on GPUs, whose tags have no room, and where a backward steps."""
        if self.stop is None and self.link is None and not self.gradients.steps:
            self.stop = self.steppers.stop = StopRequest(self.group.rank, self.group.world_size)
        return self.stop

    def _check_finite(self, check: ReplicaCheck, optimizer: torch.optim.Optimizer) -> None:
        """Raise Error on all ranks before a checked step at zero=0 if an averaged gradient is not finite."""
        try:
            check.refuse(optimizer, (each.grad for each in self.table.parameters), [self.model_ranks])
        except Error as error:  # the mean is the same on all ranks
            check.explain_not_finite(error)

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise Error at zero=0 for a gradient that was not averaged, unless all forwards were inside no_sync()."""
        if self.reducer.last_round_failed and self.group.world_size > 1:
            self.gradients.refuse_failed_round(optimizer)
        rounds = self.reducer.rounds
        since = self.steppers.rounds_at_step.get(optimizer, 0)
        self.steppers.rounds_at_step[optimizer] = rounds
        if rounds != since and self.group.world_size > 1:
            self.gradients.check_averaged(optimizer, since)
            waiting = self.steppers.waiting.get(optimizer)
            if waiting is None or waiting[1] or waiting[0] != len(optimizer.param_groups):
                unaveraged = self.steppers.note_gradients(optimizer)
                if unaveraged:
                    self.reducer.note_step(unaveraged)

    def broadcast_state(self, root: int, buffers: Iterable[torch.Tensor]) -> None:
        """Broadcast parameters and `buffers` of rank `root`. Collective."""
        parameters = (
            () if self.zero == 3 else self.table.parameters
        )  # sliced or shared parameters have rank 0's values already
        self.broadcast([*parameters, *buffers], root, f"state of {self.label}")

    def broadcast(self, tensors: list[torch.Tensor], root: int, label: str) -> None:
        """Broadcast values of rank `root`. Collective."""
        tensors = [held_tensor(each) if is_dtensor(each) else each for each in tensors]
        if not _hooks.profiler_enabled():
            self.backend.broadcast(tensors, root, label)
            return
        with _hooks.collective_range("broadcast", label, [(each.numel(), each.dtype) for each in tensors]):
            self.backend.broadcast(tensors, root, label)

    def retire(self, together: bool = False) -> None:
        """Remove the hooks, once; gradients stay. `together`: all ranks call this, so a GPU's parameters can be gathered."""
        if self.retired:
            return
        self.retired = True
        _live.discard(self)
        self.access.retire()
        _hooks.ignore_steps(self)
        if self.zero >= 2:
            self.gradients.drop()
        self._storage.give_back(together)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forsake(self) -> None:
        """Retire, and leave released parameters released: they have no values to keep."""
        if self.releases_parameters:
            self._storage.schedule.surrender(whole=False)
        self.retire(together=True)


def _taking_part(module: torch.nn.Module, ignored: frozenset[str]) -> list[torch.Tensor]:
    return [parameter for name, parameter in module.named_parameters() if name not in ignored]


def _ranks_of(options: Options, group: HostGroup) -> list[Any]:
    """Return the global numbers of the ranks that slice the module: one list, or a list of rows."""
    if options.device_mesh is not None:
        ranks: list[Any] = options.device_mesh.mesh.tolist()
        return ranks
    return group_ranks(group.torch_group)


def live_replicas() -> list[Replica]:
    """Return the replicas of all wrapped modules of this process, in order of wrapping."""
    return sorted(_live, key=lambda replica: replica.serial)


def _is_of_a_wrapped_module(parameter: torch.Tensor) -> bool:
    """Return True for a parameter of a wrapped module; an ignored one is the program's own business."""
    if any(replica.holds(parameter) for replica in _live):
        return True
    modules = [module for replica in _live if (module := replica._module()) is not None]
    return any(parameter is each for module in modules for each in module.parameters())
