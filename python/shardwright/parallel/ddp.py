"""DistributedDataParallel: torch's wrapper over our engine.

It *is a* torch.nn.parallel.DistributedDataParallel, so isinstance() tests for one succeed, but it runs neither torch's
constructor nor torch's reducer. forward() counts forwards, hooks its outputs and calls the module; the engine runs the
rounds (docs/design/reduce.md).
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import Error
from ..layout.memory import copied
from ..options.compress import Compressor
from ..options.options import Options, refuse_options
from ..torch_compat.foreign_wrappers import guard_from_wrappers, refuse_wrapper
from ..torch_compat.internals import JoinConfig
from ..torch_compat.state_dicts import asked_by_torchs_functions
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
from .engine import Engine, register_face
from .join import ShadowHook

if TYPE_CHECKING:
    from ..compress.state import CompressionState, StatesOfParts


def _of_engine(name: str) -> Any:
    """Return a property that reads and writes an attribute of the engine."""
    read = operator.attrgetter(f"_engine.{name}")
    return property(read, lambda self, value: setattr(self._engine, name, value))


class DistributedDataParallel(TorchDDP):
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
        _options: Options | None = None,
        _building: Any = None,
        **options: Any,
    ) -> None:
        given = dict(locals())
        torch.nn.Module.__init__(self)
        if _options is None:
            check_arguments(given)
            refuse_options(options, ("clip_grad_norm", "partition"), "DistributedDataParallel", "give them to sw.wrap")
            _options = Options.from_keywords(
                dict(
                    options,
                    process_group=process_group,
                    device_mesh=device_mesh,
                    init_sync=init_sync,
                    static_graph=static_graph,
                    bucket_cap_mb=bucket_cap(bucket_cap_mb, bucket_cap_mb_list),
                    broadcast_buffers=True if broadcast_buffers is None else broadcast_buffers,
                    find_unused_parameters=find_unused_parameters,
                    gradient_as_bucket_view=gradient_as_bucket_view,
                    zero=zero,
                    precision=precision if mixed_precision is None else precision_of(mixed_precision),
                    offload=offload,
                    compress=compress,
                ),
                also_known=[name for name in given if name not in ("self", "options", "module") and name[0] != "_"],
            )
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedDataParallel needs a torch.nn.Module, got {type(module).__name__}")
        first = next(module.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        check_device_ids(device_ids, output_device, self.device)
        self.module = module

        def prepare(engine: Engine) -> None:
            if mixed_precision is not None:
                ignored, keeps_places = engine.parameters_to_ignore, not engine.options.zero
                apply_mixed_precision(module, mixed_precision, ignored, keeps_places=keeps_places)

        self._engine = Engine(
            module, _options, forward_sync_buffers=forward_sync_buffers, prepare=prepare, building=_building
        )
        self._set_attributes(_options)
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.bucket_bytes_cap_list = [int(cap * 1024 * 1024) for cap in bucket_cap_mb_list or ()]
        if _options.device_mesh is not None:
            self.device_mesh = _options.device_mesh
        if mixed_precision is not None:
            self.mixed_precision = mixed_precision
        self._inputs_to = self.device if device_ids else None
        self._begin()

    def _set_attributes(self, options: Options) -> None:
        """Set the attributes of torch's class that other code reads."""
        self.device_type = self.device.type
        self.device_ids = self.output_device = self.mixed_precision = None
        self.is_multi_device_module = False
        self.dim = 0
        self.static_graph = options.static_graph
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self.bucket_bytes_cap = options.bucket_cap_bytes
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
        self._divide_by_initial_world_size = True

    def _begin(self) -> None:
        """Set what a copy has of its own, and refuse other wrappers of the module."""
        self._join_config = JoinConfig.construct_disabled_join_config()
        self._module_parameters = self._engine.own_parameters()
        self.reducer = ReducerFacade(self)  # type: ignore[assignment]
        self.logger = DDPLogger(self)  # type: ignore[assignment]
        register_face(self, lambda wrapper, make: wrapper._engine)
        guard_from_wrappers(self._engine, self)

    is_in_force: bool = _of_engine("is_in_force")
    parameters_to_ignore = _of_engine("parameters_to_ignore")
    process_group = _of_engine("process_group")
    require_backward_grad_sync = _of_engine("require_backward_grad_sync")
    require_forward_param_sync = _of_engine("require_forward_param_sync")
    broadcast_buffers = _of_engine("forward_sync_buffers")
    forward_sync_buffers = _of_engine("forward_sync_buffers")
    named_module_buffers = _of_engine("buffers")
    compression_state: CompressionState | StatesOfParts | None = _of_engine("compression_state")
    _comm_hooks = _of_engine("comm_hooks")

    modules_buffers = property(lambda self: list(self._engine.buffers.values()))

    @property
    def buffer_hook(self) -> Any:
        """torch's hook of buffers, which its register_buffer_comm_hook sets."""
        if self._engine.buffer_hook is None:
            raise AttributeError("buffer_hook")
        return self._engine.buffer_hook

    @buffer_hook.setter
    def buffer_hook(self, value: Any) -> None:
        self._engine.buffer_hook = value

    def _assign_modules_buffers(self) -> None:
        self._engine.note_buffers()

    # copies and state dicts ---------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's state dict. At zero=3 torch.distributed.checkpoint.state_dict's functions get copies of whole
        parameters, collectively."""
        if self._engine.options.zero < 3 or not asked_by_torchs_functions():
            return super().state_dict(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for replica in self._engine.replicas:
                stack.enter_context(replica.access.whole())
            return copied(super().state_dict(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        own = ("device_mesh", "reducer", "logger", "_module_parameters", "_join_config", "__weakref__")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    # forward ------------------------------------------------------------------------------------------------------

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare for a forward, and return its inputs on the module's device, like torch's own method."""
        self._engine.begin_forward(torch.compiler.is_compiling())
        if self._inputs_to is not None:
            inputs, kwargs = to_device((inputs, kwargs), self._inputs_to)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        return self._engine.end_forward(output)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._inputs_to is not None:
            inputs, kwargs = to_device((inputs, kwargs), self._inputs_to)
        return self._engine.run(self.module, inputs, kwargs)

    def _sync_buffers(self) -> None:
        self._engine.sync_buffers()

    # when gradients are averaged ----------------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Return a context in which backwards add to `.grad` locally; so do later backwards of forwards run inside it.
        The next synchronised backward averages the sum."""
        return self._engine.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards from now on average gradients. `recurse` is accepted for compatibility with FSDP2."""
        self._engine.set_requires_gradient_sync(requires_gradient_sync)

    # uneven inputs ------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Return a context in which ranks may run out of inputs at different times. See torch's join().

        At zero >= 1 a joined rank continues to update the slices that it owns, with the hyperparameters of the lowest
        training rank. Do not call other collectives inside (full_gradients, full_parameters, checkpoints): they would
        wait for joined ranks until the deadline.
        """
        engine = self._engine
        if any(each.options.groups is not None for each in (engine, *engine.inner)):
            raise NotImplementedError(
                "join() is not supported for a module with groups=: give all ranks equally many inputs"
            )
        if self.process_group is None and engine.replica.group.world_size == 1:
            return contextlib.nullcontext(self)
        members: list[Any] = [self]
        if engine.inner:
            faces = [each for each in self.module.modules() if isinstance(each, TorchDDP)]
            members = [each for each in faces if getattr(each, "_engine", None) in engine.inner]
        if engine.inner and not (engine.is_around and len(members) == 1):
            raise NotImplementedError(
                "join() of a module that holds wrappers beside other parameters: their backwards cross; wrap all of it once, without them"
            )
        return Join(
            members,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for torch's Join. It reads only the argument `divide_by_initial_world_size`."""
        divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self, self._engine, divide_by_initial_world_size)

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
        self._register(
            self._engine.states_of_parts(state), hook, getattr(hook, "__qualname__", type(hook).__qualname__)
        )

    def _register(self, states: Sequence[object], hook: Callable[..., Any], name: str) -> None:
        try:
            self._engine.register_hook(states, hook)
        except Error as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")  # type: ignore[union-attr]
            raise
        self.logger._set_comm_hook_name(name)  # type: ignore[union-attr]

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
        self._engine.compress_gradients(compress)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = default_hooks.fp16_compress_hook if "FP16" in str(comm_hook_type) else default_hooks.allreduce_hook
        self._register([each.group.torch_group for each in self._engine.replicas], hook, str(comm_hook_type))

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
