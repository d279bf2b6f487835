"""Engine: what a wrapped module has on this rank. DistributedDataParallel and fully_shard are two faces of it.

An engine is made without communication. Its replicas are made on all ranks together: by a face, or when they are first
needed, as in a copy of a wrapper.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import Error
from ..comm.agreement import verify
from ..comm.process_group import HostGroup, host_group, is_default_group, mesh_rows, resolve_group
from ..layout.param_groups import check_marks, comparable
from ..layout.shard_mesh import Slicing
from ..options.checks import offload_kinds
from ..options.compress import Compressor, check_compressor
from ..options.options import Options
from ..parameters.building import Building, PartOfBuilding, Values, begin_building
from ..parameters.drift import DriftCheck
from ..parameters.mixed_precision import PrecisionPlan, remove_plan
from ..parameters.sharded_parameter import RowsTaken, is_extended
from ..torch_compat import autograd as _hooks
from ..torch_compat.foreign_wrappers import find_wrapper, is_ours
from ..torch_compat.internals import ignored_by_torchs_ddp, original_of
from ..torch_compat.weak import weakly
from .composition import loss_scaling
from .composition.parts import by_name, find_parts, states_of_parts
from .loading import fill_module, place_of
from .out_of_memory import explain, explain_all
from .replica import Replica, live_replicas

if TYPE_CHECKING:
    from ..compress.state import CompressionState, StatesOfParts

_logger = logging.getLogger("shardwright")
_UNENDED_FORWARD = (
    "rank %d: a forward of %s ended in an exception, and the next one begins without a step of the optimizer between them. Ranks match "
    "their backwards by count. Skip this batch on all ranks, or repeat it on this one; otherwise all later averages mix different "
    "batches"
)
#: face -> function (face, make) that returns its engine; with `make` it makes that of an outermost module of fully_shard
_faces: weakref.WeakKeyDictionary[torch.nn.Module, Callable[[Any, bool], Engine | None]] = weakref.WeakKeyDictionary()


def no_member() -> None:
    """Return None: no face is in a Join."""


def register_face(module: torch.nn.Module, find: Callable[[Any, bool], Engine | None]) -> None:
    """Let engine_of(module) return find(module, make)."""
    _faces[module] = find


def engine_of(module: Any, *, make: bool = True) -> Engine | None:
    """Return the engine of a wrapped module, or of an outermost one of fully_shard (with `make`: made, collectively), or None."""
    module = original_of(module)
    find = _faces.get(module) if isinstance(module, torch.nn.Module) else None
    return None if find is None else find(module, make)


def needed_engine(operation: str, module: Any) -> Engine:
    """Return engine_of(module). Raise Error, which names `operation`, if there is none."""
    engine = engine_of(module)
    if engine is None:
        raise Error(
            f"{operation} needs a wrapped module, or the outermost one that was fully sharded, got {type(module).__name__}: "
            "call sw.wrap first, and pass the module that it returns"
        )
    return engine


class Engine:
    """The replicas of one module on this rank, its options and its precision.

    `made`: the replicas that exist, that of the module's group first, then those of `groups`; none until they are needed.
    `inner`: engines of wrappers inside the module that average their own gradients; `is_around` if those average all, and
    this engine has no replicas. `is_taken`: an outer engine took the parameters over. `join_member` returns the face that
    is in a Join, or None. `comm_hooks` has (hook, state).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: Options,
        *,
        forward_sync_buffers: bool | None = None,
        prepare: Callable[[Engine], None] | None = None,
        values: Values | None = None,
    ) -> None:
        self.module = module
        self.options = dataclasses.replace(options, groups=by_name(module, options.groups))
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.forward_sync_buffers = options.broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.inner: list[Engine] = []
        self.is_around = self.is_taken = False
        self.buffer_hook: Any = None
        self.comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self.compression_state: CompressionState | StatesOfParts | None = None
        self.precision: PrecisionPlan | None = None
        self._taken_names: list[str] = []
        #: True while its forward or that of one of its units runs; open no_sync() contexts
        self.runs, self.is_held = False, 0
        self._has_met = False  # True from the meeting before a forward on DTensors to the one after it
        self._reset()
        self._building = begin_building(module, self.options, values or Values())
        try:
            self.inner, self._taken = self._find_inner()
            if values is None or not values.rows:
                check_marks(module)
            self._plan_precision()
            self.parameters_to_ignore = self._ignored_names()
            # inner wrappers average all gradients: this one has no work
            self.is_around = bool(self.inner) and not any(p.requires_grad for p in self.own_parameters())
            if prepare is not None:
                prepare(self)
            self._build(
                init_sync=options.init_sync,
                sync_buffers=forward_sync_buffers is not None or options.broadcast_buffers,
            )
            if self._building is not None:
                self._load(self._building, None if values is None else values.weights)
        except BaseException:
            self.abandon()
            raise
        self._taken_names = [n for n, each in module.named_modules() if engine_of(each, make=False) in self._taken]
        if values is None:
            self.keep()

    def show_rows(self) -> None:
        """Show the parameters that fully_shard has cut as DTensors from now on."""
        for replica in self.made:
            replica.parameters().show_rows()

    @property
    def is_building(self) -> bool:
        """True until keep() or abandon() for a module that got its memory or values here."""
        return self._building is not None

    def _load(self, building: Building | RowsTaken, weights: Any) -> None:
        """Load values that no initialisation gave. Collective."""
        if weights is not None:
            place, options = place_of(weights)
            missing = fill_module(self.module, self.made, place, **options).missing_keys
            if building.gave and missing:
                raise Error(
                    f"wrap: what weights= names lacks {', '.join(map(repr, missing[:3]))}, which would get no values"
                )
        elif building.stored:
            fill_module(self.module, self.made, building.stored, strict=False, own=True)

    def keep(self) -> None:
        """Forget what abandon() needs. The constructor calls it; with `values` its caller does, once nothing can fail."""
        self._taken.clear()
        if self.precision is not None:
            self.precision.keep()
        if self._building is not None:
            self._building.keep()
            self._building = None

    def abandon(self) -> None:
        """Undo what the constructor did to the module. Parameters that had no values stay released. Collective."""
        building, self._building = self._building, None
        for replica in self.made:
            replica.retire(together=True) if building is None or not building.gave else replica.forsake()
        if self.precision is not None:
            self.precision.undo()
        for each in self._taken:  # each makes new replicas
            (each.inner, each.is_around), each.is_taken = each._given_back, False
        self._taken.clear()
        if building is not None:
            building.undo()

    def _reset(self) -> None:
        self.made: list[Replica] = []
        self._taken = list[Engine]()
        self._building = None
        # held here, since hooks of the parameters refer to the replicas and would keep the module alive
        self._drift: list[DriftCheck] = []
        self._retire: Any = None
        self._outer: Callable[[], Engine | None] = lambda: None
        self._given_back: tuple[list[Engine], bool] = ([], False)
        self.process_group: Any = self.options.process_group
        self.buffers: dict[str, torch.Tensor] = {}
        self.join_member: Callable[[], Any] = no_member
        #: of fully_shard: False if the sums of a mesh's rows are not averaged over its columns yet
        self.all_reduces: Callable[[], bool] = lambda: True
        #: the text of the last error of a forward
        self.error = ""
        #: from the start of a forward with gradients to its end, the next step, or a round without a backward
        self.is_inside_forward = False
        self._warns_of_unended = True
        self._range: torch.profiler.record_function | None = None

    @property
    def is_in_force(self) -> bool:
        """Return False if a later wrapper has taken over the module."""
        return not self.made or not self.made[0].retired

    @property
    def replicas(self) -> Sequence[Replica]:
        """Return the replicas. Collective if it makes them."""
        if self.is_around:
            self.check_not_taken()
            return [self.inner[0].replica]
        if not self.made:
            self._build(init_sync=False, sync_buffers=False)
        if self.made[0].retired:
            raise Error("this wrapper is no longer in force: its module was wrapped again; use the newer wrapper")
        return self.made

    @property
    def replica(self) -> Replica:
        """Return the first replica."""
        return self.replicas[0]

    def check_not_taken(self) -> None:
        """Raise Error if an outer engine has the parameters."""
        if self.is_taken:
            raise Error(
                "this wrapper lies inside another one, which averages its parameters: use the outermost wrapper"
            )

    def own_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are not ignored."""
        return [p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]

    def note_buffers(self) -> dict[str, torch.Tensor]:
        """Find the module's buffers again, and return them: a program may replace them."""
        named = self.module.named_buffers()
        self.buffers = {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}
        return self.buffers

    # making -------------------------------------------------------------------------------------------------------

    def _find_inner(self) -> tuple[list[Engine], list[Engine]]:
        """Return (inner engines that average their own gradients, those that this one takes over). May be collective.

        Wrappers of zero=0 nest as torch's do. Otherwise one engine slices, clips and saves all, and inner ones only call.
        """
        foreign = find_wrapper(self.module, self._ignored_names())
        if foreign is not None:
            raise Error(
                f"this module holds a {foreign}, beside which no other wrapper averages: put its module in its place"
            )
        faces = [each for each in self.module.modules() if isinstance(each, TorchDDP) and is_ours(each)]
        inner = [each for face in faces if (each := engine_of(face)) is not None and not each.is_taken]
        if not self.options.stage and not any(each.options.stage for each in inner):
            return inner, []
        for each in inner:
            each._check_takeable(is_whole=engine_of(self.module, make=False) is each)
        for each in inner:
            for replica in each.made:
                if not replica.retired:
                    replica.retire(together=True)
            if each._retire is not None:
                each._retire.detach()  # the finalizer would keep the replicas alive with the engine
            each._reset()
            each._given_back = each.inner, each.is_around
        self._take(inner)
        return [], inner

    def _check_takeable(self, *, is_whole: bool) -> None:
        """Raise Error if an outer engine cannot take the parameters over. `is_whole`: there is no outer module."""
        if is_whole:
            raise Error("this module is wrapped already: pass sw.unwrap(module)")
        options = self.options
        given: dict[str, Any] = {"precision=": self.precision, "compress=": options.compress, "groups=": options.groups}
        given["a communication hook"] = self.comm_hooks
        for name, value in given.items():
            if value:
                raise Error(
                    f"this module holds a wrapper with {name}, which a wrapper around it at zero >= 1 cannot take over: put sw.unwrap "
                    "of it in its place"
                )

    def _take(self, inner: Sequence[Engine]) -> None:
        """Take over engines: their faces then only call their modules."""
        for each in inner:
            each.inner, each.is_taken, each.is_around = [], True, True
            each._outer = weakref.ref(self)

    def _plan_precision(self) -> None:
        """Make masters, before the parameters are read."""
        if self.options.precision is None:
            remove_plan(self.module)
            return
        named = self.module.named_parameters(remove_duplicate=False)
        apart = {name for name, p in named if is_extended(p)}
        plan = PrecisionPlan(self.module, self.options.precision, {*self._ignored_names(), *apart})
        check_compressor(plan.compressor(), self.options.reduce)
        for replica in live_replicas():  # make parameters whole that an earlier wrapper released
            if replica.wraps(self.module) and replica.releases_parameters:
                replica.retire(together=True)
        plan.install()
        self.precision = plan
        if plan.adds_in_float32():  # our fold adds in float32, NCCL's own mean does not
            self.options = dataclasses.replace(self.options, deterministic=True)

    def _ignored_names(self) -> set[str]:
        ignored = set(ignored_by_torchs_ddp(self.module))
        ignored.update(self.options.ignored_names(self.module))
        identities = {id(item) for item in self.options.ignored_params}
        identities.update(id(p) for each in self.inner for p in each.module.parameters())
        ignored.update(name for name, p in self.module.named_parameters(remove_duplicate=False) if id(p) in identities)
        return ignored

    @property
    def _compressor(self) -> Compressor | None:
        chosen = self.options.compress or (self.precision.compressor() if self.precision is not None else None)
        return chosen if isinstance(chosen, Compressor) else None

    def _build(self, *, init_sync: bool, sync_buffers: bool) -> None:
        if self.is_around:
            self.process_group = self.inner[0].process_group
            self.note_buffers()
            return
        options, module = self.options, self.module
        self.process_group = resolve_group(options.process_group, options.device_mesh, trains=True)
        group = host_group(self.process_group, options.timeout_s, options.warn_after_s)
        group.end_silence_after(options.silent_s)
        ignored = frozenset(self.parameters_to_ignore)
        parts = find_parts(module, options, ignored, group)
        slicing = self._slicing(group)
        beside = {
            **options.compared(),
            "device_mesh": slicing.rows(),
            "transport": options.chosen_transport,
            "zero": options.zero,
            "units": comparable(options.units),
            "compress": options.compress,
            "offload": offload_kinds(options.offload),
            "init_sync": init_sync,
            "forward_sync_buffers": self.forward_sync_buffers,
            "precision": repr(self.precision),
        }
        of_parts = ignored.union(*(part.names for part in parts))
        fills = self._building if self._building is not None and self._building.in_units else None
        self._make(group, options, of_parts, slicing, beside, building=fills)
        try:
            named = {name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
            for part in parts:
                of_part = part.group()
                factor = 1.0 if part.options.reduce == "sum" else of_part.world_size / group.world_size
                slicing = Slicing.one_a_rank(of_part.rank, of_part.world_size)
                beside["device_mesh"] = part.title
                filled = None if fills is None else PartOfBuilding(fills, of_part)
                self._make(of_part, part.options, frozenset(named) - part.names, slicing, beside, factor, filled)
        except BaseException:
            _retire_all(self.made, together=True)
            raise
        if self.precision is not None:
            for replica in self.made:
                replica.parameters().follow(self.precision)
        if any(replica.model_ranks is not None for replica in self.made):
            loss_scaling.install()
        explain_all()
        self._retire = weakref.finalize(self, _retire_all, list(self.made))
        self._retire.atexit = False
        self.note_buffers()
        if init_sync:
            for replica in self.made:
                buffers = self.buffers.values() if sync_buffers and replica is self.made[0] else ()
                replica.broadcast_state(0, buffers)
        if self._compressor is not None:
            self.compress_gradients(self._compressor)
        elif options.compress is not None:
            from .auto_compression import begin_auto  # imported late: torch counts such wrappers

            begin_auto(self.made[0], options, weakly(self._choose))

    def _make(
        self,
        group: HostGroup,
        options: Options,
        ignored: frozenset[str],
        slicing: Slicing,
        beside: dict[str, Any],
        gradient_factor: float = 1.0,
        building: Any = None,
    ) -> None:
        replica = Replica(
            *(self.module, group, options, ignored, slicing, weakref.ref(self)),
            dict(beside),
            compress=self._compressor,
            precision=self.precision,
            before=self.made[-1] if self.made else None,
            gradient_factor=gradient_factor,
            building=building,
        )
        self.made.append(replica)
        self._drift.append(replica.access.watch(self.module, ignored, pinned=bool(options.stage)))

    def _slicing(self, group: HostGroup) -> Slicing:
        mesh = self.options.device_mesh
        if self.options.step_in_backward and not self.options.zero:  # every rank owns the one slice
            return Slicing.of_rows(group.rank, [[rank] for rank in range(group.world_size)])
        if mesh is None or getattr(mesh, "ndim", 1) == 1:
            return Slicing.one_a_rank(group.rank, group.world_size)
        return Slicing.of_rows(group.rank, mesh_rows(mesh, self.process_group))

    def leave(self) -> None:
        """Retire the replicas without communication, since ranks were lost; the next use makes new ones, as for a copy."""
        for replica in self.made:
            replica.retire()
        if self._retire is not None:
            self._retire.detach()  # the finalizer would keep the replicas
        for parameter in self.own_parameters():
            parameter.grad = None  # it may be a view of a bucket
        if self.precision is not None:
            self.precision.unfollow()
        self._reset()
        self.comm_hooks, self.compression_state = [], None
        self.runs, self.is_held, self._has_met = False, 0, False
        self.require_backward_grad_sync = self.require_forward_param_sync = True

    # copies: weights and options; the first forward with gradients makes replicas, collectively ---------------------

    def __getstate__(self) -> dict[str, Any]:
        if not is_default_group(self.process_group) or self.options.groups is not None:
            raise Error(
                "a wrapper over a group of its own cannot be pickled, since the group cannot: pickle sw.unwrap(model)"
            )
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        if self.comm_hooks:
            raise Error(
                "a wrapper with a communication hook cannot be copied, the hook's state belongs to its group: "
                "copy sw.unwrap(model)"
            )
        names = "module precision inner is_around parameters_to_ignore _taken_names buffer_hook forward_sync_buffers"
        names += " require_backward_grad_sync require_forward_param_sync"
        state = {name: getattr(self, name) for name in names.split()}
        if self.is_taken:  # a separate copy averages by itself; a copy of the outer wrapper takes it over again
            state["is_around"] = False
        return {**state, "options": self.options.without_group()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            state, is_taken=False, comm_hooks=[], compression_state=None, runs=False, is_held=0, _has_met=False
        )
        self._reset()
        taken = (engine_of(self.module.get_submodule(name)) for name in self._taken_names)
        self._take([each for each in taken if each is not None])
        self.note_buffers()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        made = memo[id(self)] = Engine.__new__(Engine)
        made.__setstate__({**copy.deepcopy(self._portable_state(), memo), "options": self.options})
        return made

    # forward ------------------------------------------------------------------------------------------------------

    def run(self, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward, `call`."""
        self.begin_forward(torch.compiler.is_compiling())
        self.runs = True
        try:
            if self.precision is None:
                return self.end_forward(call(*inputs, **kwargs))
            inputs, kwargs = self.precision.enter(inputs, kwargs)
            try:
                output = call(*inputs, **kwargs)
            finally:
                self.precision.leave()
            return self.end_forward(self.precision.cast_output(output))
        except Exception as error:
            explain(error)
            with contextlib.suppress(Exception):  # the peers meet in the end of this forward
                for replica in self.made:
                    if replica.has_rows and self._has_met:
                        replica.part()
            raise
        finally:
            self.runs = self._has_met = False

    def _before_forward(self, is_compiling: bool = False) -> None:
        training, replicas = torch.is_grad_enabled(), self.made
        if not replicas or replicas[0].retired:
            if self._needs_no_replicas(training, is_compiling):
                return
            replicas = list(self.replicas)
        for each in replicas:
            if each.has_rows:
                each.meet()
                self._has_met = True
            if each.arrange_hooks is not None:
                each.arrange_hooks(is_compiling)
        is_joining = self.join_member is not no_member and self._announce_forward()
        if self.require_forward_param_sync and self.buffers and self.syncs_buffers(before=True):
            self.sync_buffers()
        if is_joining:
            self.agree_on_sync(training and self.require_backward_grad_sync)
        try:
            if not training:
                for each in replicas:
                    each.access.before_evaluation()
                return
            # a recomputation inside a backward may stop as soon as it has its values
            if _hooks.graph_task_id() < 0:
                if self.is_inside_forward and self._warns_of_unended and replicas[0].group.world_size > 1:
                    self._warns_of_unended = False
                    _logger.warning(_UNENDED_FORWARD, replicas[0].group.rank, replicas[0].label)
                self.is_inside_forward = True
            if self._range is not None or _hooks.profiler_enabled():
                self._begin_range()
            for each in replicas:
                each.before_forward(self.require_backward_grad_sync)
        except Error as error:
            self.error = str(error)
            raise

    def _needs_no_replicas(self, training: bool, is_compiling: bool) -> bool:
        """Return True if inner wrappers do the work, or this is a copy that is not trained and needs no peers."""
        if self.made or (training and not self.is_around and any(p.requires_grad for p in self.module.parameters())):
            return False
        if self.is_taken and training and not is_compiling and self._outer() is None:
            raise Error("the wrapper around this one, which averaged its parameters, has ended: wrap the module again")
        return True

    def _after_forward(self, output: Any) -> Any:
        if not self.made and self.is_around:
            return output
        if self.require_forward_param_sync and self.buffers and self.syncs_buffers(before=False):
            self.sync_buffers()
        training = torch.is_grad_enabled()
        for replica in self.made:
            if replica.has_rows:
                self._has_met = False
                replica.part()
        self.require_forward_param_sync = synchronises = training and self.require_backward_grad_sync
        if not training or not self.made:
            return output
        self.is_inside_forward = False
        if self._range is not None:
            self._end_range()
        for replica in self.made:  # the hooks of the outputs open rounds in this order
            if replica.access.guard is not None:
                replica.access.guard.check("after a forward")
            own = replica.gradients
            if own.steps:
                own.search(output)
            _hooks.hook_outputs(output, own.on_output_gradient if synchronises else own.on_local_output_gradient)
        return output

    begin_forward = _hooks.disable_compile(_before_forward)
    end_forward = _hooks.disable_compile(_after_forward)

    def _begin_range(self) -> None:
        if self._range is not None:  # an exception ended that forward
            self._end_range()
        if _hooks.profiler_enabled():
            self._range = torch.profiler.record_function("DistributedDataParallel.forward")
            self._range.__enter__()

    def _end_range(self) -> None:
        assert self._range is not None
        self._range.__exit__(None, None, None)
        self._range = None

    # buffers ------------------------------------------------------------------------------------------------------

    def syncs_buffers(self, *, before: bool) -> bool:
        """Return True if buffers are broadcast before, or after, a forward."""
        if not (self.require_forward_param_sync and self.forward_sync_buffers and self.buffers):
            return False
        where = "PRE_FORWARD" if self.buffer_hook is None else self.buffer_hook.buffer_comm_hook_location.name
        return before is (where == "PRE_FORWARD")

    def sync_buffers(self, candidate: bool = True) -> None:
        """Broadcast buffers of rank 0; inside join, of the highest rank that still trains. Collective."""
        replica = self.replica
        root = replica.group.highest_rank_where(candidate, "rank that has buffers") if self.is_joining else 0
        buffers = self.note_buffers()
        if self.buffer_hook is None:
            replica.broadcast(list(buffers.values()), root, f"buffers of {replica.label}")
            return
        for future in self.buffer_hook.buffer_comm_hook(self.buffer_hook.buffer_comm_hook_state, buffers) or ():
            future.wait()

    # when gradients are averaged ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backwards add to `.grad` locally; so do later backwards of forwards run inside it."""
        self.check_not_taken()
        before = [(each, each.require_backward_grad_sync) for each in (self, *self.inner)]
        self.set_requires_gradient_sync(False)
        self.is_held += 1
        try:
            yield
        finally:
            self.is_held -= 1
            for each, synchronised in before:
                each.require_backward_grad_sync = synchronised

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether backwards from now on average gradients."""
        self.check_not_taken()
        if not requires_gradient_sync:
            self.check_not_stepping("no_sync()")
        for each in (self, *self.inner):
            each.require_backward_grad_sync = bool(requires_gradient_sync)

    def check_not_stepping(self, what: str) -> None:
        """Raise Error if an optimizer steps inside the backward."""
        if self.options.step_in_backward:
            raise Error(self.replica.gradients.refuses(what))

    # uneven inputs ------------------------------------------------------------------------------------------------

    @property
    def is_joining(self) -> bool:
        """Return True inside a join, unless it has enable=False."""
        member = self.join_member()
        return member is not None and bool(member._join_config.enable)

    def _announce_forward(self) -> bool:
        """Tell ranks that have joined of a forward. Return is_joining."""
        announcer, is_joining = self.replica.announcer, self.is_joining
        if announcer is not None and announcer.is_on:
            announcer.announce("forward", 0, None)
        elif is_joining:
            work = Join.notify_join_context(self.join_member())
            if work is not None:
                work.wait()
        return is_joining

    def agree_on_sync(self, required: bool, *, trains: bool = True) -> bool:
        """Return True if some rank that still trains synchronises in its next backward. Collective."""
        replica = self.replica
        mine = bytes([trains, required])
        gathered = replica.group.comm.all_gather_bytes(mine, "synchronisation of this backward")
        # otherwise the round itself carries the set of contributing ranks
        if not replica.backend.capabilities.tells_accumulated:
            replica.reducer.set_active(b"".join(each[:1] for each in gathered))
        return any(each[1] for each in gathered)

    # what averages buckets ----------------------------------------------------------------------------------------

    def run_buckets_by(self, replica: Replica, state: object, hook: Callable[..., Any], *, is_ours: bool) -> None:
        """Let a hook average a replica's buckets."""
        replica.reducer.set_bucket_callback(replica.hook_runner(state, hook, is_ours=is_ours))
        if replica.gradients.sparse is not None and not is_ours:
            replica.gradients.sparse.user_hook = state, hook
        self.comm_hooks.append((hook, state))

    def states_of_parts(self, state: Any) -> list[Any]:
        """Return a hook's state for each replica: with `groups`, one of a dict."""
        return states_of_parts(state, self.options.groups, self.module, self.replicas)

    def register_hook(self, states: Sequence[object], hook: Callable[..., Any]) -> None:
        """Let a user's hook average all buckets, with a state for each replica."""
        self.check_not_stepping("a communication hook")
        zero = self.options.zero
        if zero and "PostLocalSGDState" in (type(each).__name__ for each in states):
            raise NotImplementedError(
                f"a communication hook with a PostLocalSGDState averages over a part of the ranks: at zero={zero} state is sliced "
                "over all of them, so that replicas cannot drift apart; it needs zero=0"
            )
        if self.comm_hooks or self.replica.compression is not None:
            raise Error(
                "register_comm_hook or register_builtin_comm_hook can only be called once. This wrapper has a communication hook or a "
                "compressor already"
            )
        for replica, state in zip(self.replicas, states, strict=True):
            self.run_buckets_by(replica, state, hook, is_ours=False)

    def compress_gradients(self, compress: Compressor) -> None:
        """Compress gradients over the replicas' communicators. Collective."""
        from ..compress.state import joined_states

        check_compressor(compress, self.options.reduce)
        self.check_not_stepping("a compressor (compress=, or a reduce_dtype)")
        if self.comm_hooks:
            raise Error("compress_gradients can only be called once: a communication hook is registered already")
        replica = self.replica
        verify(replica.group.comm, lambda: [["compress", repr(compress)]], f"compression of {replica.label}")
        states = [self._compress(each, compress) for each in self.replicas]
        self.compression_state = joined_states([each for each in states if each is not None])

    def _choose(self, compress: Compressor | None) -> bool:
        """Compress from now on. None only asks: return whether buckets are free for a compressor."""
        if compress is not None:
            self.compress_gradients(compress)
        return not self.comm_hooks

    def _compress(self, replica: Replica, compress: Compressor) -> CompressionState | None:
        """Compress a replica's buckets. Return the state that the compressor keeps between rounds. Collective."""
        if getattr(replica.reducer, "wire", None) is not None:  # the reducer compresses by itself
            replica.compression = (repr(compress), None)
            return None
        from ..compress.hooks import state_hook
        from ..compress.make import CodecTraffic, make_state
        from ..compress.state import CompressionState

        exchange = replica.backend.exchange(compress, replica.layout_of(0))
        state = make_state(compress, replica.compressing_ranks(), exchange)
        likes = [replica.layout_of(index) for index in range(len(replica.table.parameters))]
        state.register(zip(replica.table.names, replica.table.parameters, likes))
        if exchange is None:
            replica.reducer.set_codec(state.codec)
            self.comm_hooks.append((state_hook, state))
            replica.compression = (repr(compress), CodecTraffic(state.codec, replica.reducer))
        else:
            self.run_buckets_by(replica, state, _metered(state_hook, exchange), is_ours=True)
            replica.compression = (repr(compress), exchange)
        if not isinstance(state, CompressionState):
            return None
        state.split = replica.split()
        state.watch(weakly(replica.is_compressing, False))
        return state


def _retire_all(replicas: Sequence[Replica], together: bool = False) -> None:
    for replica in replicas:
        replica.retire(together=together)


def _metered(hook: Callable[..., Any], exchange: Any) -> Callable[..., Any]:

    @functools.wraps(hook)
    def run(state: Any, bucket: Any) -> Any:
        if bucket.index() == 0:
            exchange.begin_round()
        result = hook(state, bucket)
        exchange.end_bucket(bucket.is_last())
        return result

    return run
