"""DistributedDataParallel: torch's wrapper over our engine.

It *is a* torch.nn.parallel.DistributedDataParallel, so isinstance() tests for one succeed, but it runs neither torch's
constructor nor torch's reducer. forward() counts forwards, hooks its outputs and calls the module; the engine runs the
rounds (docs/design/reduce.md).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from typing_extensions import Unpack  # torch needs it

from .._engine import Error
from ..layout.memory import copied
from ..options.compress import Compressor
from ..options.keywords import DDPOptions
from ..options.options import FIELDS, Options, describes_options, refuse_options
from ..parameters.building import Values
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
    """Make an attribute of the engine an attribute of the face."""
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
    **options
        The other fields of Options, but for partition, clip_grad_norm and step_in_backward, which are wrap's.

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

    @describes_options(DDPOptions)
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
        _options: Options | None = None,
        _values: Values | None = None,
        **options: Unpack[DDPOptions],
    ) -> None:
        given = dict(locals())
        torch.nn.Module.__init__(self)
        if _options is None:
            check_arguments(given)
            refuse_options(
                options,
                ("clip_grad_norm", "partition", "step_in_backward"),
                "DistributedDataParallel",
                "give it to sw.wrap",
            )
            known = [name for name in given if name not in ("self", "options", "module") and name[0] != "_"]
            taken: dict[str, Any] = {**options, **{name: given[name] for name in known if name in FIELDS}}
            taken["bucket_cap_mb"] = bucket_cap(bucket_cap_mb, bucket_cap_mb_list)
            taken["broadcast_buffers"] = broadcast_buffers is None or broadcast_buffers
            if mixed_precision is not None:
                taken["precision"] = precision_of(mixed_precision)
            _options = Options.from_keywords(taken, also_known=known)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"DistributedDataParallel needs a torch.nn.Module, got {type(module).__name__}")
        first = next(module.parameters(), None)
        self.device = torch.device("cpu") if first is None or first.is_meta else first.device
        check_device_ids(device_ids, output_device, self.device)
        self.module = module

        def prepare(engine: Engine) -> None:
            if mixed_precision is not None:
                ignored, keeps_places = engine.parameters_to_ignore, not engine.options.zero
                apply_mixed_precision(module, mixed_precision, ignored, keeps_places=keeps_places)

        self._engine = Engine(
            module, _options, forward_sync_buffers=forward_sync_buffers, prepare=prepare, values=_values
        )
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.bucket_bytes_cap = _options.bucket_cap_bytes
        self.bucket_bytes_cap_list = [int(cap * 1024 * 1024) for cap in bucket_cap_mb_list or ()]
        self.static_graph = _options.static_graph
        self.find_unused_parameters = _options.find_unused_parameters
        self.gradient_as_bucket_view = _options.gradient_as_bucket_view
        if _options.device_mesh is not None:
            self.device_mesh = _options.device_mesh
        self.mixed_precision = mixed_precision
        self._inputs_to = self.device if device_ids else None
        self._begin()

    def _begin(self) -> None:
        """Set what a copy has of its own, and refuse other wrappers of the module."""
        self._join_config = JoinConfig.construct_disabled_join_config()
        register_face(self, lambda wrapper, make: wrapper._engine)
        guard_from_wrappers(self._engine, self)

    # attributes of torch's class, which its inherited methods and other libraries read
    device_type = property(lambda self: self.device.type)
    device_ids = output_device = None
    dim, use_side_stream_for_tensor_copies = 0, False
    broadcast_bucket_size = 250 * 1024 * 1024

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
    _assign_modules_buffers = _of_engine("note_buffers")
    _post_forward = _of_engine("end_forward")
    _sync_buffers = _of_engine("sync_buffers")

    reducer = functools.cached_property(ReducerFacade)  # type: ignore[assignment]
    logger = functools.cached_property(DDPLogger)  # type: ignore[assignment]
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

    # copies and state dicts ---------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's state dict; at zero=3, for torch's functions, of copies of whole parameters, collectively."""
        if self._engine.options.zero < 3 or not asked_by_torchs_functions():
            return super().state_dict(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for replica in self._engine.replicas:
                stack.enter_context(replica.access.whole())
            return copied(super().state_dict(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        own = ("device_mesh", "logger", "reducer", "_join_config", "__weakref__")
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

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._inputs_to is not None:
            inputs, kwargs = to_device((inputs, kwargs), self._inputs_to)
        return self._engine.run(self.module, inputs, kwargs)

    # when gradients are averaged ----------------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Return a context in which backwards, and those of its forwards, add to `.grad` locally; the next averages the sum."""
        return self._engine.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards from now on average gradients. `recurse` is accepted for compatibility with FSDP2."""
        self._engine.set_requires_gradient_sync(requires_gradient_sync)

    # uneven inputs ------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Return a context in which ranks may run out of inputs at different times. See torch's join().

        At zero >= 1 a joined rank goes on to update its slices, with the hyperparameters of the lowest training rank. Other
        collectives inside (full_gradients, checkpoints) would wait for joined ranks until the deadline.
        """
        engine = self._engine
        engine.check_not_stepping("join()")
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
            members, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for torch's Join, whose only argument is `divide_by_initial_world_size`."""
        return ShadowHook(self, self._engine, kwargs.get("divide_by_initial_world_size", True))

    # communication hooks ------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` average each bucket instead of the engine, in torch's GradBucket protocol.

        With groups=, `state` is a dict: one state for each key of groups=, and under None that of the rest. At zero >= 2 a
        bucket (of 8 MiB at most; on a GPU at zero=3 one unit) holds whole contributions, and this rank keeps its slice of the
        result, to which an accumulated mean is added.

        Raises
        ------
        Error
            If a hook is already registered.
        TypeError, ValueError
            If torch's checks reject the function as a communication hook.
        NotImplementedError
            For torch's post-local SGD at zero >= 1.
        """
        self._check_comm_hook(hook)
        if getattr(hook, "__module__", "").endswith(".ddp_zero_hook"):
            raise NotImplementedError(
                f"{getattr(hook, '__qualname__', hook)} steps on torch's buckets, which this wrapper does not have: use sw.wrap(zero=1)"
            )
        self._register(
            self._engine.states_of_parts(state), hook, getattr(hook, "__qualname__", type(hook).__qualname__)
        )

    def _register(self, states: Sequence[object], hook: Callable[..., Any], name: str) -> None:
        try:
            self._engine.register_hook(states, hook)
        except Error as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise
        self.logger._set_comm_hook_name(name)

    def compress_gradients(self, compress: Compressor) -> None:
        """Compress gradients like wrap(..., compress=compress). Collective.

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

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return torch's logging data and the engine's counts; times from the first call on, or once a sample rate is set."""
        return self.logger.data()

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
