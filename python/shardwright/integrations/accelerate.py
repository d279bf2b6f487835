"""Hugging Face accelerate with shardwright: an Accelerator subclass, and our compressors for the stock one.

    from shardwright.integrations.accelerate import Accelerator
    accelerator = Accelerator(zero=2)                      # the rest of the program stays unchanged

`Accelerator` wraps models with shardwright instead of torch's DistributedDataParallel. It slices each optimizer once
both the optimizer and its model are prepared. save_state() writes the files of the stock class, at every stage.

Needs the optional extra: pip install shardwright[accelerate].
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, DynamoBackend
from torch.distributed.algorithms.join import Join

from ..comm.exchange import group_exchange
from ..compress.hooks import state_hook
from ..compress.make import make_state
from ..formats.stored import Stored
from ..layout.memory import copied
from ..observe.metrics import Recent
from ..optim.clip_grad import clip_grad_norm_
from ..optim.master_weights import MasterOptimizer
from ..optim.sharded import ShardedOptimizer
from ..options.compress import Compressor, check_compressor
from ..options.options import FIELDS
from ..parallel.activations import checkpoint_units
from ..parallel.ddp import DistributedDataParallel
from ..parameters.materialize import materialize
from ..torch_compat.internals import original_of
from ..wrapping import clip_before_steps, full_parameters
from .meta_loading import keep_loading
from .plugins import Settings, take_over
from .settings import chosen, of_variable
from .wrappers import Wrappers, stepping, whole_parameters

__all__ = ["Accelerator", "CompressionHandler"]

_logger = logging.getLogger("shardwright")
#: launches of several processes that average gradients
_TOGETHER = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclasses.dataclass
class CompressionHandler(DistributedDataParallelKwargs):
    """Compressed gradients for an Accelerator that wraps with torch's DistributedDataParallel or with shardwright.

    The stock Accelerator accepts handlers by their exact class only, so assign this one::

        accelerator = accelerate.Accelerator()
        accelerator.ddp_handler = CompressionHandler(compress=sw.PowerSGD(rank=4))     # before prepare()

    Its other fields are those of accelerate's DistributedDataParallelKwargs, the base class. With torch's wrapper,
    compressed gradients travel through its process group; see shardwright.hooks.
    """

    compress: Compressor | None = None

    def __post_init__(self) -> None:
        check_compressor(self.compress, "mean")

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        return super().to_dict(ignore_keys=(*ignore_keys, "compress"))

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register the hook of `compress` or accelerate's comm_hook; accelerate calls this with the wrapped model."""
        if self.compress is None:
            super().register_comm_hook(model)
        elif isinstance(model, DistributedDataParallel):
            model.compress_gradients(self.compress)
        else:
            model.register_comm_hook(make_state(self.compress, group_exchange(model.process_group)), state_hook)


class Accelerator(accelerate.Accelerator):
    """An accelerate.Accelerator that wraps models and optimizers with shardwright.

    Parameters
    ----------
    *args, **kwargs
        Arguments of accelerate's Accelerator. `kwargs_handlers` may hold a CompressionHandler.
    zero : {0, 1, 2, 3}, optional
        The stage; see wrap. None: this and the options that are not given are read from the variable
        SHARDWRIGHT_OPTIONS (see settings.py); without it the stage is 0. If no stage is given, a launch or a plugin with
        accelerate's FSDP or DeepSpeed settings gives it, with a line in the log (see plugins.py).
    compress, partition : optional
        See wrap.
    wrap_options : mapping, optional
        Fields of Options. They override the same fields of a DistributedDataParallelKwargs.

    Raises
    ------
    NotImplementedError
        If the launch is neither one process nor several on CPUs or on CUDA GPUs. Also if accelerate would train each of
        several ranks by itself, as it does under torchrun on a host without GPUs: then set ACCELERATE_USE_CPU=1, or
        pass cpu=True.

    Notes
    -----
    Models, optimizers, loaders and schedulers may be prepared in any order and in several calls. With
    mixed_precision="fp16" on the CPU this class creates a torch.amp.GradScaler; the stock class trains in float32
    without a warning. Call save_state(), load_state() and get_state_dict() on every rank. A launch of one process wraps
    nothing.

    Examples
    --------
    >>> import torch
    >>> from shardwright.integrations.accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True, zero=1)
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    >>> accelerator.backward(model(torch.ones(2, 4)).sum())
    >>> optimizer.step()
    """

    ddp_handler: Any
    #: what accelerate's own FSDP or DeepSpeed settings became
    plugin: Settings | None = None

    def __init__(
        self,
        *args: Any,
        zero: int | None = None,
        compress: Compressor | None = None,
        partition: str = "auto",
        wrap_options: Mapping[str, Any] | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        plugin, run = take_over(kwargs), of_variable() if zero is None else {}
        if zero is not None or "zero" in run:  # which wins over that of a launch
            plugin = None
        if plugin is not None:
            zero, compress = plugin.zero, compress or run.get("compress")
            partition = run.get("partition", partition) if partition == "auto" else partition
            wrap_options = {**plugin.wrap_options, **run.get("wrap_options", {}), **(wrap_options or {})}
            if plugin.accumulation_steps is not None:
                kwargs.setdefault("gradient_accumulation_steps", plugin.accumulation_steps)
            if plugin.mixed_precision is not None and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no":
                kwargs.setdefault("mixed_precision", plugin.mixed_precision)
            if int(os.environ.get("RANK") or 0) == 0:
                _logger.warning(plugin.sentence())
        stage = chosen("", zero, compress=compress, partition=partition, wrap_options=wrap_options)
        _check_stage(zero=stage["zero"], partition=stage["partition"])
        handlers = list(kwargs_handlers or ())
        compressing = [handler for handler in handlers if isinstance(handler, CompressionHandler)]
        if len(compressing) + (stage["compress"] is not None) > 1:
            twice = "as an argument and by a CompressionHandler, or by two handlers"
            raise ValueError(f"compress was given more than once: {twice}")
        others = [handler for handler in handlers if not isinstance(handler, CompressionHandler)]
        super().__init__(*args, kwargs_handlers=others, **kwargs)
        _check_launch(self)
        self.plugin = plugin
        self._begin(stage, compressing)

    @classmethod
    def of_stock(
        cls,
        accelerator: accelerate.Accelerator,
        *,
        zero: int = 0,
        compress: Compressor | None = None,
        partition: str = "auto",
        wrap_options: Mapping[str, Any] | None = None,
    ) -> Accelerator:
        """Turn an accelerator of the stock class, made by a program itself, into one of this class, in place.

        Raises ValueError if it has already prepared a model or an optimizer, and else the errors of Accelerator().
        """
        _check_stage(zero=zero, partition=partition)
        if accelerator._models or accelerator._optimizers:
            raise ValueError("of_stock needs an accelerator that has prepared no model and no optimizer yet")
        _check_launch(accelerator)
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        stage = {"zero": zero, "compress": compress, "partition": partition, "wrap_options": wrap_options}
        accelerator._begin(stage, [])
        return accelerator

    def _begin(self, stage: Mapping[str, Any], compressing: Sequence[CompressionHandler]) -> None:
        if compressing and self.ddp_handler is not None:
            both = "a CompressionHandler is a DistributedDataParallelKwargs; pass only one of both"
            raise ValueError(f"kwargs_handlers: {both}")
        self.ddp_handler = compressing[0] if compressing else self.ddp_handler
        self.zero, self.partition, self.compress = stage["zero"], stage["partition"], stage["compress"]
        self.wrap_options = dict(stage["wrap_options"] or {})
        compress = self.compress or getattr(self.ddp_handler, "compress", None)
        check_compressor(compress, self.wrap_options.get("reduce", "mean"))
        self._wrappers, self._recent = Wrappers(), Recent()
        if self.zero == 3 and self.distributed_type in _TOGETHER and self.device.type == "cpu":
            keep_loading(self)
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            self.native_amp = True
            options = self.scaler_handler.to_kwargs() if self.scaler_handler else {}
            self.scaler = torch.amp.GradScaler("cpu", **options)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out models, optimizers and schedulers: a copy for another process has the settings only."""
        prepared: dict[str, list[Any]] = {name: [] for name in ("_models", "_optimizers", "_schedulers")}
        return {**self.__dict__, **prepared, "_wrappers": Wrappers()}

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model like accelerate. Collective, unless `evaluation_mode` is set or no parameter is trained."""
        prepared = evaluation_mode or getattr(model, "_is_accelerate_prepared", False)
        if prepared and self._wrappers.of(model) is not None:
            return model  # accelerate would register it twice, and move the wrapped parameters to another "cpu:0"
        trains = self.distributed_type in _TOGETHER and any(p.requires_grad for p in model.parameters())
        if evaluation_mode or not trains:
            if any(isinstance(each, Stored) for each in (*model.parameters(), *model.buffers())):
                materialize(model)
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        plugin = self.state.dynamo_plugin
        backend, whole = plugin.backend, not plugin.use_regional_compilation
        if whole:
            plugin.backend = DynamoBackend.NO  # compile the wrapper, as accelerate does with torch's wrapper
        try:
            module = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            plugin.backend = backend
        module.__dict__.pop("_is_accelerate_prepared", None)  # unwrap_model must return a module that is not prepared
        wrapper = self._wrap(module)
        for optimizer in self._optimizers:
            self._slice(optimizer)
        result: torch.nn.Module = wrapper
        if whole and backend != DynamoBackend.NO:
            result = cast(torch.nn.Module, torch.compile(wrapper, **plugin.to_kwargs()))
        result._is_accelerate_prepared = True  # type: ignore[assignment]
        return result

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        options = dict(self.ddp_handler.to_kwargs()) if self.ddp_handler is not None else {}
        device = next(model.parameters()).device
        device_ids = [device] if device.type == "cuda" else None
        options.update({} if self.plugin is None else self.plugin.options_for(model))
        wrapper = self._wrappers.make(model, device_ids, zero=self.zero, **{**options, **self.wrap_options})
        if self.plugin is not None and self.plugin.checkpoints is not None:
            checkpoint_units(wrapper, **self.plugin.checkpoints)
        if self.compress is not None:
            wrapper.compress_gradients(self.compress)
        elif self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapper)
        return wrapper

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer like accelerate. At zero >= 1 slice it now, or once its model is prepared."""
        prepared = super().prepare_optimizer(optimizer, device_placement=False if self.zero else device_placement)
        self._slice(prepared)
        return prepared

    def _slice(self, optimizer: AcceleratedOptimizer) -> None:
        """Replace the optimizer that accelerate steps, if the model with its parameters is wrapped."""
        inner = optimizer.optimizer
        if isinstance(inner, (ShardedOptimizer, MasterOptimizer)):
            return
        wrapper = self._wrappers.with_members_of(inner)
        if wrapper is None:
            return
        optimizer.optimizer = stepping(wrapper, inner, self.partition)
        if self.plugin is not None and self.plugin.clip_grad_norm:  # which DeepSpeed does in its step
            clip_before_steps(optimizer.optimizer, wrapper, self.plugin.clip_grad_norm)
        if optimizer.optimizer is not inner:
            optimizer.__setstate__(optimizer.__getstate__())  # patches the new optimizer's step

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler like accelerate. It keeps the user's optimizer, whose groups the sliced one shares."""
        prepared = super().prepare_scheduler(scheduler)
        driven = getattr(scheduler, "optimizer", None)
        for optimizer in self._optimizers if isinstance(prepared, AcceleratedScheduler) else ():
            inner = optimizer.optimizer
            if driven is not None and driven in (optimizer, inner, getattr(inner, "_inner", inner)):
                prepared.optimizers = [optimizer]
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip like accelerate. All parameters of one model and the 2-norm: every stage gives the same bits."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wrapper = self._wrappers.clipped_by(parameters) if float(norm_type) == 2.0 else None
        if wrapper is not None:
            self.unscale_gradients()
            return clip_grad_norm_(wrapper, float(max_norm))
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Allow ranks to run out of inputs. Also works on CPUs, where accelerate's method has no effect."""
        if self.distributed_type != DistributedType.MULTI_CPU:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        found: list[Any] = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        samplers = [each for each in found if even_batches is not None and hasattr(each, "even_batches")]
        before = [sampler.even_batches for sampler in samplers]
        if even_batches is not None and len(samplers) < len(self._dataloaders):
            text = "Overriding even_batches is only supported for map-style datasets"
            # as accelerate does on GPUs
            warnings.warn(f"{text}, yet some dataloaders given were iterable", stacklevel=3)
        for sampler in samplers:
            sampler.even_batches = even_batches
        enable = not (self.even_batches if even_batches is None else even_batches)
        try:
            with Join([original_of(each) for each in joinables], enable=enable):
                yield
        finally:
            for sampler, value in zip(samplers, before):
                sampler.even_batches = value

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict like accelerate; at zero=3 copies of the shared memory, collectively."""
        wrapper = self._wrappers.of(model)
        if wrapper is None or self.zero < 3:
            return super().get_state_dict(model, unwrap)
        with full_parameters(wrapper):
            return copied(super().get_state_dict(model, unwrap))

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log like accelerate, with what sw.metrics gives of the steps since the last call."""
        super().log({**values, **self._recent()}, *args, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save like accelerate, with full optimizer states in torch's format. Collective."""
        with self.whole_optimizer_states():
            return super().save_state(*args, **kwargs)

    @contextlib.contextmanager
    def whole_optimizer_states(self) -> Iterator[None]:
        """Make state_dict() of prepared optimizers return the current full state in torch's format. Collective."""
        held = []
        try:
            for optimizer in self._optimizers:
                if isinstance(sliced := optimizer.optimizer, ShardedOptimizer):
                    state = sliced.full_state_dict()
                    optimizer.optimizer = types.SimpleNamespace(state_dict=lambda state=state: state)
                    held.append((optimizer, sliced))
            yield
        finally:
            for optimizer, sliced in held:
                optimizer.optimizer = sliced

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a state of any stage and number of processes, also one of the stock class. Collective."""
        with contextlib.ExitStack() as stack:
            for wrapper in self._wrappers:
                stack.enter_context(whole_parameters(wrapper, writable=True))
            super().load_state(*args, **kwargs)


def _check_launch(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, *_TOGETHER):
        raise NotImplementedError(
            f"distributed_type={kind.value} is not supported: shardwright trains processes on CPUs (pass cpu=True or set "
            "ACCELERATE_USE_CPU=1) or on CUDA GPUs (accelerate launch --multi_gpu), without accelerate's FSDP, DeepSpeed or Megatron plugin"
        )
    launched = int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1
    if accelerator.num_processes == 1 and launched > 1:
        raise NotImplementedError(
            f"{launched} ranks were launched (RANK, WORLD_SIZE), but accelerate sees no GPU or no LOCAL_RANK and would train each by "
            "itself: set ACCELERATE_USE_CPU=1 or pass cpu=True to train them together, or unset RANK"
        )
    if accelerator.num_processes == 1 and "RANK" not in os.environ:  # `accelerate launch --cpu --num_processes 2` does
        _logger.warning(
            "accelerate has started one process, which trains as one rank; on CPUs `ACCELERATE_USE_CPU=1 accelerate launch "
            "--multi_gpu --num_processes N PROGRAM` starts N ranks, on GPUs the same without the variable"
        )


def _check_stage(**given: Any) -> None:
    for name, value in given.items():
        FIELDS[name]["check"](name, value)
