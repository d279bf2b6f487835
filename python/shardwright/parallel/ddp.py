"""DistributedDataParallel: torch's wrapper over our engine.

It *is a* torch.nn.parallel.DistributedDataParallel, so isinstance() tests for one succeed, but it runs neither torch's
constructor nor torch's reducer. forward() counts forwards, hooks its outputs and calls the module; the engine runs the
rounds (docs/design/reduce.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import Error
from ..comm.agreement import verify
from ..comm.exchange import Exchange
from ..comm.levels import Lease
from ..comm.process_group import HostGroup, host_group, mesh_rows, resolve_group
from ..layout.param_groups import check_marks, comparable
from ..layout.shard_mesh import Slicing
from ..options.checks import offload_kind
from ..options.compress import Compressor, check_compressor
from ..options.options import Options, refuse_options
from ..parameters.drift import DriftCheck
from ..parameters.mixed_precision import PrecisionPlan, remove_plan
from ..torch_compat import autograd as _hooks
from ..torch_compat.foreign_wrappers import guard_from_wrappers, refuse_wrapper
from ..torch_compat.internals import JoinConfig, ignored_by_torchs_ddp
from ..torch_compat.weak import weakly
from .composition import loss_scaling
from .composition.nested import find_inner, give_back
from .composition.parts import Part, by_name, find_parts, states_of_parts
from .ddp_compat import (
    ReducerFacade,
    apply_mixed_precision,
    bucket_cap,
    check_arguments,
    check_device_ids,
    precision_of,
    to_device,
)
from .ddp_logging import DDPLogger
from .join import ShadowHook
from .portable import PortableWrapper
from .replica import Replica, live_replicas

if TYPE_CHECKING:
    from ..compress.state import CompressionState, StatesOfParts


class DistributedDataParallel(PortableWrapper, TorchDDP):
    """A wrapper that averages the gradients of `module` over ranks, like torch's DistributedDataParallel, on CPU or
    CUDA tensors.

    Parameters
    ----------
    module : Module
        A module on the CPU or on one GPU. Its parameters keep their identity; after a synchronised backward, `.grad` is
        a view of a bucket.
    process_group, device_mesh, bucket_cap_mb, init_sync, broadcast_buffers, forward_sync_buffers
        Like torch's; see Options.
    find_unused_parameters, static_graph, gradient_as_bucket_view
        Accepted; see Options.
    device_ids, output_device
        None, or the GPU of a module on a GPU; forward() then moves its inputs there.
    mixed_precision : optional
        torch's policy of param_dtype, reduce_dtype and buffer_dtype; the first two become `precision`.
    bucket_cap_mb_list : list of float, optional
        Like torch's. All buckets have the largest of these caps.
    delay_all_reduce_named_params, param_to_hook_all_reduce
        Not supported; the error names the replacement.
    check_reduction, skip_all_reduce_unused_params, batched_grad_copy
        Accepted without effect: the engine always does this.
    zero, precision, offload, compress, **options
        Fields of Options, but for partition and clip_grad_norm, which are wrap's.

    Raises
    ------
    Error
        If ranks disagree about the module. Every rank raises the same message, which names both sides.
    CommError, CommTimeoutError
        If a rank died, left or did not arrive.
    NotImplementedError
        For a feature that the engine lacks, or an unusable driver or NCCL.

    Notes
    -----
    Collective. Costs one digest exchange of 32 bytes a rank, one broadcast of parameters and buffers, and gradient
    memory of the parameters' size (rounded up to 128 bytes each).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        zero: int = 0,
        precision: Any = None,
        offload: Any = None,
        compress: Any = None,
        _broadcast_buffers: bool | None = None,
        **options: Any,
    ) -> None:
        given = dict(locals())
        torch.nn.Module.__init__(self)
        check_arguments(given)
        refuse_options(options, ("clip_grad_norm", "partition"), "DistributedDataParallel", "give them to sw.wrap")
        self._options = Options.from_keywords(
            dict(
                options,
                process_group=process_group,
                device_mesh=device_mesh,
                init_sync=init_sync,
                static_graph=static_graph,
                bucket_cap_mb=bucket_cap(bucket_cap_mb, bucket_cap_mb_list),
                broadcast_buffers=next(
                    (each for each in (_broadcast_buffers, broadcast_buffers) if each is not None), True
                ),
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=gradient_as_bucket_view,
                zero=zero,
                precision=precision,
                offload=offload,
                compress=compress,
            ),
            also_known=[name for name in given if name not in ("self", "options", "module")],
        )
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedDataParallel needs a torch.nn.Module, got {type(module).__name__}")
        self.module = module
        self._options = dataclasses.replace(self._options, groups=by_name(module, self._options.groups))
        self._zero = zero
        self._inner: list[Any] = []
        self._inner, taken = find_inner(self, self._zero)
        self._precision: PrecisionPlan | None = None
        try:
            check_marks(module, zero, self._options.share_parameters)
            if mixed_precision is not None:
                precision = precision_of(mixed_precision)
            self._precision = self._plan_precision(precision)
            travels_in = compress if self._precision is None else compress or self._precision.compressor()
            self._compress = compress
            self._compressor = travels_in if isinstance(travels_in, Compressor) else None
            self._set_attributes(forward_sync_buffers, skip_all_reduce_unused_params, batched_grad_copy)
            # inner wrappers average all gradients: this one has no work
            self._is_around = bool(self._inner) and not any(p.requires_grad for p in self._module_parameters)
            self.bucket_bytes_cap_list = [int(cap * 1024 * 1024) for cap in bucket_cap_mb_list or ()]
            if device_mesh is not None:
                self.device_mesh = device_mesh
            if mixed_precision is not None:
                self.mixed_precision = mixed_precision
                apply_mixed_precision(module, mixed_precision, self.parameters_to_ignore, keeps_places=zero == 0)
            check_device_ids(device_ids, output_device, self.device)
            self._inputs_to = self.device if device_ids else None
            self._build(
                init_sync=init_sync,
                sync_buffers=forward_sync_buffers is not None or self._options.broadcast_buffers,
            )
        except BaseException:
            if self._precision is not None:
                self._precision.undo()
            give_back(taken)
            raise
        self._taken = [name for name, each in module.named_modules() if any(each is one for one in taken)]
        if self._precision is not None:
            self._precision.keep()
        guard_from_wrappers(self, self.parameters_to_ignore)

    @property
    def is_in_force(self) -> bool:
        """Return False if a later wrapper has taken over the module."""
        return self._replica is None or not self._replica.retired

    def _set_attributes(self, forward_sync_buffers: bool | None, skip_unused: bool, batched_copy: bool) -> None:
        """Set every attribute of torch's class that other code reads."""
        options, parameters = self._options, list(self.module.parameters())
        self._join_config = JoinConfig.construct_disabled_join_config()
        self.parameters_to_ignore = self._ignored_names()
        self._module_parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.device_type = self.device.type
        self.device_ids = self.output_device = self.mixed_precision = None
        self.is_multi_device_module = False
        self.dim = 0
        self.static_graph = options.static_graph
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_unused
        self.batched_grad_copy = batched_copy
        self.forward_sync_buffers = options.broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self.bucket_bytes_cap = options.bucket_cap_bytes
        self.bucket_bytes_cap_list: list[int] = []
        self.bucket_bytes_cap_default = False
        self.use_side_stream_for_tensor_copies = False
        self._use_python_reducer = False
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = True
        self._ddp_sink_clone = False
        self._static_graph_delay_allreduce_enqueued = True
        self._delay_all_reduce_params: list[Any] = []
        self._delay_all_reduce_all_params = False
        self._delay_grad_buffer = None
        self._delay_grad_views: list[Any] = []
        self._accum_grad_hooks: list[Any] = []
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self.compression_state: CompressionState | StatesOfParts | None = None
        self._divide_by_initial_world_size = True
        self._reset_engine()

    _is_taken = False  # True inside a wrapper that took the parameters over
    _outer: Callable[[], Any] | None = None  # returns that wrapper while it exists
    _taken: Sequence[str] = ()  # names of the wrappers that this one took over

    def _reset_engine(self) -> None:
        self._replica: Replica | None = None
        #: further engines, each for the parameters of one of `groups`
        self._parts: tuple[Replica, ...] = ()
        self._drift: list[DriftCheck] = []
        self.process_group = self._options.process_group
        self.reducer = ReducerFacade(self)  # type: ignore[assignment]
        self.logger = DDPLogger(self)  # type: ignore[assignment]
        self._assign_modules_buffers()

    def _plan_precision(self, precision: Any) -> PrecisionPlan | None:
        """Make masters, before the parameters are read."""
        if precision is None:
            remove_plan(self.module)
            return None
        plan = PrecisionPlan(self.module, precision, self._ignored_names())
        check_compressor(plan.compressor(), self._options.reduce)
        for replica in live_replicas():  # make parameters whole that an earlier wrapper released
            if replica.wraps(self.module) and replica.releases_parameters:
                replica.retire(together=True)
        plan.install()
        if plan.adds_in_float32():  # our fold adds in float32, NCCL's own mean does not
            self._options = dataclasses.replace(self._options, deterministic=True)
        return plan

    def _ignored_names(self) -> set[str]:
        ignored = set(ignored_by_torchs_ddp(self.module))
        ignored.update(self._options.ignored_names(self.module))
        identities = {id(item) for item in self._options.ignored_params}
        identities.update(id(p) for each in self._inner for p in each.module.parameters())
        ignored.update(name for name, p in self.module.named_parameters(remove_duplicate=False) if id(p) in identities)
        return ignored

    def _build(self, *, init_sync: bool, sync_buffers: bool) -> None:
        """Make the engine. Collective."""
        if self._is_around:
            self.process_group = self._inner[0].process_group
            return
        options = self._options
        self.process_group = resolve_group(options.process_group, options.device_mesh, trains=True)
        group = host_group(self.process_group, options.timeout_s, options.warn_after_s)
        group.end_silence_after(options.silent_s)
        ignored = frozenset(self.parameters_to_ignore)
        parts = find_parts(self.module, options, ignored, group)
        slicing = self._slice_over(group)
        settings = {
            **options.compared(),
            "transport": options.chosen_transport,
            "zero": self._zero,
            "device_mesh": slicing.rows(),
            "units": comparable(options.units),
            "compress": self._compress,
            "init_sync": init_sync,
            "forward_sync_buffers": self.forward_sync_buffers,
            "precision": repr(self._precision),
            "offload": offload_kind(options.offload),
        }
        own = ignored.union(*(part.names for part in parts))
        self._replica = Replica(
            self.module,
            group,
            options,
            own,
            weakref.ref(self),
            settings,
            self._zero,
            slicing,
            compress=self._compressor,
            precision=self._precision,
        )
        self._drift = [self._replica.access.watch(self.module, own, pinned=bool(self._zero))]
        try:
            for part in parts:
                self._add_part(part, settings)
        except BaseException:
            for replica in self._engines():
                replica.retire(together=True)
            raise
        if self._precision is not None:
            for replica in self._engines():
                replica.give_copies_to(self._precision)
        if any(replica.model_ranks is not None for replica in self._engines()):
            loss_scaling.install()
        self._retire = weakref.finalize(self, _retire_all, self._engines())
        self._retire.atexit = False
        if init_sync:
            self._assign_modules_buffers()
            self._replica.broadcast_state(0, self.modules_buffers if sync_buffers else ())
            for replica in self._parts:
                replica.broadcast_state(0, ())
        if self._compressor is not None:
            self.compress_gradients(self._compressor)
        elif self._compress is not None:
            from .auto_compression import begin_auto  # imported late: torch counts such wrappers

            begin_auto(self)

    def _add_part(self, part: Part, settings: dict[str, Any]) -> None:
        """Make the engine of one of `groups`. Collective over its ranks."""
        assert self._replica is not None
        named = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers())
        others = frozenset(name for name, _ in named) - part.names
        group = part.group()
        world_size = self._replica.group.world_size
        replica = Replica(
            *(self.module, group, part.options, others, weakref.ref(self)),
            {**settings, "device_mesh": part.title},
            self._zero,
            compress=self._compressor,
            precision=self._precision,
            before=self._engines()[-1],
            gradient_factor=1.0 if part.options.reduce == "sum" else group.world_size / world_size,
        )
        self._parts += (replica,)
        self._drift.append(replica.access.watch(self.module, others, pinned=bool(self._zero)))

    def _engines(self) -> list[Replica]:
        """Return all engines, made if needed: first that of the module's group, then those of `groups`."""
        return [self._engine(), *self._parts]

    def _slice_over(self, group: HostGroup) -> Slicing:
        """Return the owners of slices."""
        mesh = self._options.device_mesh
        if mesh is None or getattr(mesh, "ndim", 1) == 1:
            return Slicing.one_a_rank(group.rank, group.world_size)
        rows = mesh_rows(mesh, self.process_group)
        return Slicing.of_rows(group.rank, rows)

    def _engine(self) -> Replica:
        """Return the engine. A copy without an engine makes it now, collectively."""
        if self._is_around:
            self._check_not_taken()
            return self._inner[0]._engine()
        if self._replica is None:
            self._build(init_sync=False, sync_buffers=False)
            assert self._replica is not None
        if self._replica.retired:
            raise Error("this wrapper is no longer in force: its module was wrapped again; use the newer wrapper")
        return self._replica

    def _check_not_taken(self) -> None:
        if self._is_taken:
            raise Error(
                "this wrapper lies inside another one, which averages its parameters: use the outermost wrapper"
            )

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, is_compiling: bool = False) -> None:
        training = torch.is_grad_enabled()
        if self._replica is None and (
            self._is_around or not (training and any(p.requires_grad for p in self.module.parameters()))
        ):
            if self._is_taken and training and not is_compiling and (self._outer is None or self._outer() is None):
                raise Error(
                    "the wrapper around this one, which averaged its parameters, has ended: wrap the module again"
                )
            return  # inner wrappers do this, or this is a copy that is not trained and needs no peers
        replica = self._engine()
        engines = replica, *self._parts
        for each in engines:
            if each.arrange_hooks is not None:
                each.arrange_hooks(is_compiling)
        announcer = replica.join_link.announcer
        if announcer is not None and announcer.is_on:
            announcer.announce("forward", 0, None)
        elif self._join_config.enable:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._agree_on_sync(training and self.require_backward_grad_sync)
        try:
            for each in engines:
                if training:
                    each.before_forward(self.require_backward_grad_sync)
                else:
                    each.access.before_evaluation()
        except Error as error:
            self.logger.set_error_and_log(str(error))  # type: ignore[union-attr]
            raise

    def _after_forward(self, output: Any) -> Any:
        if self._replica is None and self._is_around:
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        training = torch.is_grad_enabled()
        synchronises = training and self.require_backward_grad_sync
        if self.require_forward_param_sync is not synchronises:
            self.require_forward_param_sync = synchronises
        if not training or self._replica is None:
            return output
        for replica in (self._replica, *self._parts):  # the hooks of the outputs open rounds in this order
            replica.forwards.end()
            if replica.access.guard is not None:
                replica.access.guard.check("after a forward")
            rounds = replica.rounds
            _hooks.hook_outputs(output, rounds.on_output_gradient if synchronises else rounds.on_local_output_gradient)
        return output

    _begin_forward = _hooks.disable_compile(_before_forward)
    _post_forward = _hooks.disable_compile(_after_forward)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare for a forward, and return its inputs on the module's device, like torch's own method."""
        self._begin_forward(torch.compiler.is_compiling())
        if self._inputs_to is not None:
            inputs, kwargs = to_device((inputs, kwargs), self._inputs_to)
        return inputs, kwargs

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._begin_forward(torch.compiler.is_compiling())  # _pre_forward() without another call
        if self._inputs_to is not None:
            inputs, kwargs = to_device((inputs, kwargs), self._inputs_to)
        if self._precision is None:
            return self._post_forward(self.module(*inputs, **kwargs))
        inputs, kwargs = self._precision.enter(inputs, kwargs)
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            self._precision.leave()
        return self._post_forward(self._precision.cast_output(output))

    # buffers ------------------------------------------------------------------------------------------------------

    def _sync_buffers(self, candidate: bool = True) -> None:
        """Broadcast buffers of rank 0; inside join, of the highest rank that still trains. Collective."""
        replica = self._engine()
        root = 0
        if self._join_config.enable:
            root = replica.group.highest_rank_where(candidate, "rank that has buffers")
        self._assign_modules_buffers()
        if hasattr(self, "buffer_hook"):
            futures = self.buffer_hook.buffer_comm_hook(
                self.buffer_hook.buffer_comm_hook_state, self.named_module_buffers
            )
            for future in futures or ():
                future.wait()
            return
        replica.broadcast(self.modules_buffers, root, f"buffers of {replica.label}")

    # when gradients are averaged ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backwards add to `.grad` locally; so do later backwards of forwards run inside it.
        The next synchronised backward averages the sum."""
        self._check_not_taken()
        before = [(each, each.require_backward_grad_sync) for each in (self, *self._inner)]
        for each, _ in before:
            each.require_backward_grad_sync = False
        try:
            yield
        finally:
            for each, synchronised in before:
                each.require_backward_grad_sync = synchronised

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards from now on average gradients. `recurse` is accepted for compatibility with FSDP2."""
        self._check_not_taken()
        for each in (self, *self._inner):
            each.require_backward_grad_sync = bool(requires_gradient_sync)

    # uneven inputs ------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Return a context in which ranks may run out of inputs at different times. See torch's join().

        At zero >= 1 a joined rank continues to update the slices that it owns, with the hyperparameters of the lowest
        training rank. Do not call other collectives inside (full_gradients, full_parameters, checkpoints): they would
        wait for joined ranks until the deadline.
        """
        if self._options.groups is not None:
            raise NotImplementedError(
                "join() is not supported for a module with groups=: give all ranks equally many inputs"
            )
        if self.process_group is None and self._engine().group.world_size == 1:
            return contextlib.nullcontext(self)
        if self._inner:
            if self._is_around and len(self._inner) == 1:
                return self._inner[0].join(divide_by_initial_world_size, enable, throw_on_early_termination)
            raise NotImplementedError(
                "join() of a module that holds wrappers beside other parameters: their backwards cross; wrap all of it once, without them"
            )
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for torch's Join. It reads only the argument `divide_by_initial_world_size`."""
        divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self, divide_by_initial_world_size)

    def _agree_on_sync(self, required: bool, *, trains: bool = True) -> bool:
        """Return True if some rank that still trains synchronises in its next backward. Collective."""
        replica = self._engine()
        mine = bytes([trains, required])
        said = replica.group.comm.all_gather_bytes(mine, "synchronisation of this backward")
        # otherwise the round itself carries the set of contributing ranks
        if not replica.backend.capabilities.tells_standing:
            replica.reducer.set_active(b"".join(each[:1] for each in said))
        return any(each[1] for each in said)

    # communication hooks ------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` average each bucket instead of the engine, in torch's GradBucket protocol.

        Raises
        ------
        Error
            If a hook is already registered.
        TypeError, ValueError
            If torch's checks reject the function as a communication hook.
        NotImplementedError
            For torch's post-local SGD at zero >= 1.

        Notes
        -----
        The hook gets the buckets at the end of the backward, in order. Its own collectives determine cost and bits.

        With groups=, `state` is a dict of states: one for each key of groups=, and under None that of the rest. The hook
        averages each bucket over the ranks of its group.

        At zero >= 2, too, a bucket (of 8 MiB at most) holds this rank's whole contributions. The hook averages the
        whole bucket, and this rank keeps its slice of the result. Bits and bytes on the wire therefore equal those of
        zero=0 with the same buckets. A standing mean, which exists only in slices, is not in the bucket but added to
        the result. On a GPU at zero=3 a bucket holds one unit.
        """
        self._check_comm_hook(hook)
        states = states_of_parts(state, self._options.groups, self.module, self._engines())
        self._register(states, hook, hook.__qualname__ if hasattr(hook, "__qualname__") else type(hook).__qualname__)

    def _register(self, states: Sequence[object], hook: Callable[..., Any], name: str) -> None:
        """Set a user's hook, with a state for each engine. `name`: its name in the logging data."""
        if self._zero and "PostLocalSGDState" in (type(each).__name__ for each in states):
            raise NotImplementedError(
                f"a communication hook with a PostLocalSGDState averages over a part of the ranks: at zero={self._zero} state is sliced "
                "over all of them, so that replicas cannot drift apart; it needs zero=0"
            )
        if self._comm_hooks or self._engine().compression is not None:
            self._log_and_throw(
                Error,
                "register_comm_hook or register_builtin_comm_hook can only be called once. This wrapper has a communication hook or a "
                "compressor already",
            )
        for replica, state in zip(self._engines(), states, strict=True):
            self._run_buckets_by(replica, state, hook, is_ours=False)
        self.logger._set_comm_hook_name(name)  # type: ignore[union-attr]

    def _run_buckets_by(
        self, replica: Replica, state: object, hook: Callable[..., Any], lease: Lease | None = None, *, is_ours: bool
    ) -> None:
        """Set the hook of an engine. `lease` holds the communicators of a hook that runs in its own thread during the
        backward. `is_ours`: see Replica.hook_runner.
        """
        runner = replica.hook_runner(state, hook, is_ours=is_ours)
        if lease is None:
            replica.reducer.set_bucket_callback(runner)
        else:
            from ..compress.state import CompressionState
            from ..gradients.comm_thread import BucketThread

            thread = BucketThread(runner, replica.group.comm, replica.label, lease)
            replica.reducer.set_bucket_callback(thread, thread.wait)
            if isinstance(state, CompressionState):
                state.watch(weakly(thread.is_under_way, False))
        if replica.rounds.sparse is not None and not is_ours:
            replica.rounds.sparse.user_hook = state, hook
        self._comm_hooks.append((hook, state))

    def compress_gradients(self, compress: Compressor) -> None:
        """Compress gradients like wrap(..., compress=compress): its hook runs over the engine's communicator.
        Collective.

        Raises
        ------
        Error
            If a hook or compressor is already registered, or ranks disagree about it.
        NotImplementedError
            If the options ask for a sum instead of a mean.
        """
        from ..compress.state import joined_states

        check_compressor(compress, self._options.reduce)
        if self._comm_hooks:
            raise Error("compress_gradients can only be called once: a communication hook is registered already")
        replica = self._engine()
        verify(replica.group.comm, lambda: [["compress", repr(compress)]], f"compression of {replica.label}")
        states = [self._compress_engine(each, compress) for each in self._engines()]
        self.compression_state = joined_states([each for each in states if each is not None])

    def _compress_engine(self, replica: Replica, compress: Compressor) -> CompressionState | None:
        """Compress an engine's buckets. Return the state that the compressor keeps between rounds. Collective."""
        if getattr(replica.reducer, "wire", None) is not None:  # the reducer compresses by itself
            replica.compression = (repr(compress), None)
            return None
        from ..compress.make import make_hook
        from ..compress.state import CompressionState

        levels, lease = replica.levels(compress)
        state, hook = make_hook(compress, levels.exchange)
        kept = state if isinstance(state, CompressionState) else None
        if kept is not None:
            kept.set_names(zip(replica.table.names, replica.table.parameters))
            kept.split = replica.split()
        self._run_buckets_by(replica, state, _metered(levels.hook(hook), levels.exchange), lease, is_ours=True)
        replica.compression = (repr(compress), levels.exchange)
        return kept

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = default_hooks.fp16_compress_hook if "FP16" in str(comm_hook_type) else default_hooks.allreduce_hook
        self._register([each.group.torch_group for each in self._engines()], hook, str(comm_hook_type))

    def _replicate_for_data_parallel(self) -> Any:
        refuse_wrapper("torch.nn.parallel.replicate()", type(self.module).__name__)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        self.logger.set_error_and_log(f"{err_type}: {err_msg}")  # type: ignore[union-attr]
        raise err_type(err_msg)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return torch's logging data, under torch's names, and the engine's counts. Times are measured from the first
        call on, or once a sample rate is set."""
        return self.logger.data()  # type: ignore[union-attr]

    def _update_process_group(self, new_process_group: Any) -> None:
        raise NotImplementedError(
            "the process group cannot be changed: wrap again, sw.wrap(sw.unwrap(model), process_group=group)"
        )

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        raise NotImplementedError(
            "indices of sparse gradients are exchanged in each round: there is no sparse metadata to set"
        )

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an optimizer inside the backward is not supported: call optimizer.step() after it")


def _retire_all(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.retire()


def _metered(hook: Callable[..., Any], exchange: Exchange) -> Callable[..., Any]:
    """Wrap the hook to count the bytes of each bucket."""

    @functools.wraps(hook)
    def run(state: Any, bucket: Any) -> Any:
        if bucket.index() == 0:
            exchange.begin_round()
        result = hook(state, bucket)
        exchange.end_bucket(bucket.is_last())
        return result

    return run
