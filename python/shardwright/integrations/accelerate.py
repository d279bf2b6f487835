"""Hugging Face accelerate over our engine: an Accelerator of ours, and our compressors behind the stock one.

    from shardwright.integrations.accelerate import Accelerator
    accelerator = Accelerator(zero=2)                      # the rest of the program stays as it is

`Accelerator` is a subclass that wraps with shardwright where accelerate would build torch's DistributedDataParallel, and that
slices each optimizer as soon as both it and its model were prepared. What save_state() writes does not depend on the stage, and
is what the stock class writes. CPU processes of one host; with GPUs it refuses.

The optional extra: pip install shardwright[accelerate].
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, DynamoBackend
from torch.distributed.algorithms.join import Join

from ..clip import clip_grad_norm_
from ..compress import Compressor, check_compressor
from ..data_parallel import DistributedDataParallel
from ..exchange import group_exchange
from ..masters import MasterOptimizer
from ..memory import address_of
from ..sharded_optimizer import ShardedOptimizer
from ..wrap import full_parameters, keep_optimizer, shard_optimizer, unwrap

__all__ = ["Accelerator", "CompressionHandler"]


@dataclasses.dataclass
class CompressionHandler(DistributedDataParallelKwargs):
    """Compressed gradients for an Accelerator that wraps with torch's DistributedDataParallel (or with ours).

    The stock Accelerator takes handlers by their exact class only, so this one is assigned::

        accelerator = accelerate.Accelerator()
        accelerator.ddp_handler = CompressionHandler(compress=sw.PowerSGD(rank=4))     # before prepare()

    Parameters
    ----------
    compress : Fp16, Bf16, Int8, Int4 or PowerSGD
    **fields
        Of accelerate's DistributedDataParallelKwargs, which it is.

    Notes
    -----
    Over torch's wrapper the bytes travel through its process group; see shardwright.hooks.
    """

    compress: Compressor | None = None

    def __post_init__(self) -> None:
        check_compressor(self.compress, "mean")

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        return super().to_dict(ignore_keys=(*ignore_keys, "compress"))

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Called by accelerate with the wrapped model. At most one of `compress` and accelerate's comm_hook."""
        if self.compress is None:
            super().register_comm_hook(model)
        elif isinstance(model, DistributedDataParallel):
            model.compress_gradients(self.compress)
        else:
            model.register_comm_hook(*self.compress.hook(group_exchange(model.process_group)))


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, whose models and optimizers are wrapped by shardwright.

    Parameters
    ----------
    *args, **kwargs
        accelerate's. `kwargs_handlers` may hold a CompressionHandler.
    zero : {0, 1, 2, 3}
        What is sliced over ranks; see wrap.
    compress : Fp16, Bf16, Int8, Int4 or PowerSGD, optional
        See wrap.
    partition : {"auto", "flat", "tensor"}
        How optimizers are sliced; see wrap.
    wrap_options : mapping, optional
        Fields of Options. Where a DistributedDataParallelKwargs says the same, this one holds.

    Raises
    ------
    NotImplementedError
        The launch is neither one process nor several on the CPU, or accelerate would train each rank of several by itself, as it does
        under torchrun on a machine without GPUs: set ACCELERATE_USE_CPU=1, or pass cpu=True.

    Notes
    -----
    Models, optimizers, loaders and schedulers may be prepared in any order and in several calls. With mixed_precision="fp16"
    on the CPU this class makes a torch.amp.GradScaler, where the stock one trains in float32 and says nothing. save_state(),
    load_state() and get_state_dict() are called on every rank. A launch of one process wraps nothing.

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

    def __init__(
        self,
        *args: Any,
        zero: int = 0,
        compress: Compressor | None = None,
        partition: str = "auto",
        wrap_options: Mapping[str, Any] | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_stage(zero, partition)
        handlers = list(kwargs_handlers or ())
        compressing = [handler for handler in handlers if isinstance(handler, CompressionHandler)]
        if len(compressing) + (compress is not None) > 1:
            raise ValueError(
                "compress was given more than once: as an argument and as a CompressionHandler, or by two of them"
            )
        others = [handler for handler in handlers if not isinstance(handler, CompressionHandler)]
        super().__init__(*args, kwargs_handlers=others, **kwargs)
        _check_launch(self)
        self._begin(zero, compress, partition, wrap_options, compressing)

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
        """An accelerator of the stock class, made by a program that cannot be told which class to take, becomes one of this.

        The object stays the same. ValueError if it has prepared a model or an optimizer already; else as Accelerator().
        """
        _check_stage(zero, partition)
        if accelerator._models or accelerator._optimizers:
            raise ValueError("of_stock needs an accelerator that has prepared no model and no optimizer yet")
        _check_launch(accelerator)
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._begin(zero, compress, partition, wrap_options, [])
        return accelerator

    def _begin(
        self,
        zero: int,
        compress: Compressor | None,
        partition: str,
        wrap_options: Mapping[str, Any] | None,
        compressing: Sequence[CompressionHandler],
    ) -> None:
        if compressing and self.ddp_handler is not None:
            raise ValueError("kwargs_handlers: a CompressionHandler is a DistributedDataParallelKwargs, pass it alone")
        self.ddp_handler = compressing[0] if compressing else self.ddp_handler
        self.zero = zero
        self.partition = partition
        self.compress = compress
        self.wrap_options = dict(wrap_options or {})
        check_compressor(self._compressor(), self.wrap_options.get("reduce", "mean"))
        self._references: list[weakref.ref[DistributedDataParallel]] = []
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            self.native_amp = True
            self.scaler = torch.amp.GradScaler(
                "cpu", **(self.scaler_handler.to_kwargs() if self.scaler_handler else {})
            )

    def _compressor(self) -> Compressor | None:
        return self.compress or getattr(self.ddp_handler, "compress", None)

    # preparing ----------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As accelerate's. Collective unless `evaluation_mode`, or nothing in the model is trained."""
        prepared = evaluation_mode or getattr(model, "_is_accelerate_prepared", False)
        if prepared and self._wrapper_of(model) is not None:
            return (
                model  # accelerate would note it twice, and move the parameters of what is wrapped to another "cpu:0"
            )
        if evaluation_mode or not self._wraps(model):
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        plugin = self.state.dynamo_plugin
        backend, whole = plugin.backend, not plugin.use_regional_compilation
        if whole:
            plugin.backend = DynamoBackend.NO  # the wrapper is compiled, as accelerate compiles torch's
        try:
            module = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            plugin.backend = backend
        module.__dict__.pop("_is_accelerate_prepared", None)  # what unwrap_model gives is not prepared
        wrapper = self._wrap(module)
        self._references.append(weakref.ref(wrapper))
        for optimizer in self._optimizers:
            self._slice(optimizer)
        result: torch.nn.Module = wrapper
        if whole and backend != DynamoBackend.NO:
            result = torch.compile(wrapper, **plugin.to_kwargs())
        result._is_accelerate_prepared = True  # type: ignore[assignment]
        return result

    def _wraps(self, model: torch.nn.Module) -> bool:
        return self.distributed_type == DistributedType.MULTI_CPU and any(p.requires_grad for p in model.parameters())

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        options = dict(self.ddp_handler.to_kwargs()) if self.ddp_handler is not None else {}
        wrapper = DistributedDataParallel(model, zero=self.zero, **{**options, **self.wrap_options})
        if self.compress is not None:
            wrapper.compress_gradients(self.compress)
        elif self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapper)
        return wrapper

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As accelerate's. At zero >= 1 it is sliced now, or when its model is prepared."""
        prepared = super().prepare_optimizer(optimizer, device_placement=False if self.zero else device_placement)
        self._slice(prepared)
        return prepared

    def _slice(self, optimizer: AcceleratedOptimizer) -> None:
        """Replaces what accelerate steps, once the model of its parameters is wrapped."""
        inner = optimizer.optimizer
        if isinstance(inner, (ShardedOptimizer, MasterOptimizer)):
            return
        members = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        wrapper = next((each for each in self._wrappers if any(id(p) in members for p in each.parameters())), None)
        if wrapper is None:
            return
        if self.zero:
            optimizer.optimizer = shard_optimizer(wrapper, inner, partition=self.partition)
        else:
            optimizer.optimizer = keep_optimizer(wrapper, inner)
        if optimizer.optimizer is inner:
            return
        optimizer.__setstate__(optimizer.__getstate__())  # what it patches of the optimizer's step, anew

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """As accelerate's. A scheduler keeps the user's optimizer, whose groups are those of the sliced one."""
        prepared = super().prepare_scheduler(scheduler)
        driven = getattr(scheduler, "optimizer", None)
        for optimizer in self._optimizers if isinstance(prepared, AcceleratedScheduler) else ():
            inner = optimizer.optimizer
            if driven is not None and driven in (optimizer, inner, getattr(inner, "_inner", inner)):
                prepared.optimizers = [optimizer]
        return prepared

    @property
    def _wrappers(self) -> list[DistributedDataParallel]:
        """Those alive, in the order in which they were prepared: the same on every rank."""
        return [wrapper for reference in self._references if (wrapper := reference()) is not None]

    def _wrapper_of(self, model: torch.nn.Module) -> DistributedDataParallel | None:
        """The wrapper around `model`, which may be the wrapper itself, compiled or bare."""
        bare = unwrap(model)
        return next((wrapper for wrapper in self._wrappers if unwrap(wrapper) is bare), None)

    # training -----------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """As accelerate's. All parameters of one model and the 2-norm: with the same bits at every stage."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        members = {id(parameter) for parameter in parameters}
        for wrapper in self._wrappers if float(norm_type) == 2.0 else ():
            if members == {id(parameter) for parameter in wrapper.parameters()}:
                self.unscale_gradients()
                return clip_grad_norm_(wrapper, float(max_norm))
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """As accelerate's, which has no effect on the CPU; here ranks may run out of inputs."""
        if self.distributed_type != DistributedType.MULTI_CPU:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        samplers = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        samplers = [each for each in samplers if even_batches is not None and hasattr(each, "even_batches")]
        before = [sampler.even_batches for sampler in samplers]
        for sampler in samplers:
            sampler.even_batches = even_batches
        enable = not (self.even_batches if even_batches is None else even_batches)
        try:
            with Join([getattr(each, "_orig_mod", each) for each in joinables], enable=enable):
                yield
        finally:
            for sampler, value in zip(samplers, before):
                sampler.even_batches = value

    # state --------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """As accelerate's. At zero=3 collective, and the tensors are copies: the host's one memory goes on changing."""
        wrapper = self._wrapper_of(model)
        if wrapper is None or self.zero < 3:
            return super().get_state_dict(model, unwrap)
        with full_parameters(wrapper):
            state = super().get_state_dict(model, unwrap)
            copies: dict[int, Any] = {}  # by what is shared: tied entries stay tied
            return {name: _copied(value, copies) for name, value in state.items()}

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's, with whole optimizer states in torch's ordinary format. Collective."""
        with self.whole_optimizer_states():
            return super().save_state(*args, **kwargs)

    @contextlib.contextmanager
    def whole_optimizer_states(self) -> Iterator[None]:
        """Inside, state_dict() of prepared optimizers is the whole state of this moment, in torch's ordinary format. Collective."""
        held = []
        try:
            for optimizer in self._optimizers:
                if isinstance(optimizer.optimizer, ShardedOptimizer):
                    sliced, optimizer.optimizer = optimizer.optimizer, _Whole(optimizer.optimizer)
                    held.append((optimizer, sliced))
            yield
        finally:
            for optimizer, sliced in held:
                optimizer.optimizer = sliced

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As accelerate's, from any stage and number of processes, the stock class's too. Collective."""
        with contextlib.ExitStack() as stack:
            for wrapper in self._wrappers if self.zero == 3 else ():
                stack.enter_context(full_parameters(wrapper, writable=True))
            super().load_state(*args, **kwargs)


def _check_launch(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise NotImplementedError(
            f"distributed_type={kind.value} is not there yet: shardwright trains CPU processes, pass cpu=True or set ACCELERATE_USE_CPU=1"
        )
    launched = int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1
    if accelerator.num_processes == 1 and launched > 1:
        raise NotImplementedError(
            f"{launched} ranks were launched (RANK, WORLD_SIZE), and accelerate, which sees no GPU or no LOCAL_RANK, would train each by "
            "itself: set ACCELERATE_USE_CPU=1 or pass cpu=True to train them together, or unset RANK"
        )


def _check_stage(zero: Any, partition: Any) -> None:
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    if partition not in ("auto", "flat", "tensor"):
        raise ValueError(f"partition must be 'auto', 'flat' or 'tensor', got {partition!r}")


class _Whole:
    """Stands for a sliced optimizer while accelerate writes it: on every rank its whole state."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._state = optimizer.full_state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    place = address_of(value) or id(value)
    if place not in copies or copies[place].shape != value.shape:
        copies[place] = value.clone()
    return copies[place]
