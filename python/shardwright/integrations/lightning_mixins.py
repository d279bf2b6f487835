"""Strategies for Lightning's Trainer and Fabric, as mixins: each of Lightning's two packages has its own base classes.

A strategy wraps the module with shardwright instead of torch's DistributedDataParallel and slices each optimizer.
Lightning saves, loads and averages whole parameters and full optimizer states, so its files equal those of DDPStrategy
at every stage. With state_dict_type="sharded", checkpoints are folders (lightning_folders).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from .._engine import CheckpointError, Error
from ..layout.local_parameters import end_local_parameters
from ..layout.memory import copied
from ..observe.metrics import Recent
from ..optim.clip_grad import clip_grad_norm_
from ..options.checks import among
from ..options.options import Options, refuse_options
from ..parallel.ddp import DistributedDataParallel
from ..parameters.mixed_precision import PrecisionPlan, remove_plan
from .lightning_folders import Folders, folder_at, load_folder, load_state, save_state
from .meta_loading import automatic_loading
from .wrappers import Wrappers, stepping, whole_parameters

_logger = logging.getLogger("shardwright")
#: hooks in which weight-averaging callbacks read parameters, and hooks in which they write them
_READING = ("on_train_batch_end", "on_train_epoch_end")
_WRITING = (
    *("on_train_epoch_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_train_end", "on_load_checkpoint"),
)
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
_Base: Any = object  # a strategy of Lightning


class _Wraps(_Base):
    """The options of a strategy, its wrapped modules, and its optimizers."""

    _clips_by: str

    def __init__(
        self,
        *,
        zero: int = 0,
        precision: Any = None,
        compress: Any = None,
        state_dict_type: str = "full",
        **options: Any,
    ) -> None:
        among("full", "sharded")("state_dict_type", state_dict_type)
        known = inspect.signature(super().__init__).parameters.values()
        names = {each.name for each in known if each.kind is not each.VAR_KEYWORD} - {"precision"}
        theirs = {name: options.pop(name) for name in names & options.keys()}
        refuse_options(options, ("clip_grad_norm",), type(self).__name__, self._clips_by)
        given = dict(options)
        options |= {"zero": zero, "precision": precision, "compress": compress}
        Options.from_keywords(options, also_known=names)
        super().__init__(**theirs)
        self._ddp_kwargs = given  # programs read this attribute of DDPStrategy
        self._partition = options.pop("partition", "auto")
        self._wrap_options = options
        self._wrappers = Wrappers()
        self._is_sharded = state_dict_type == "sharded"

    def _wrap(self, module: torch.nn.Module) -> DistributedDataParallel:
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        return self._wrappers.make(module, device_ids, **self._wrap_options)

    def _slice(self, optimizer: Any) -> torch.optim.Optimizer:
        """Return the optimizer that steps in place of the user's. Collective."""
        if hasattr(optimizer, "toggle_model"):  # a module may return a LightningOptimizer
            optimizer = optimizer.optimizer
        if type(optimizer).__name__ == "_MockOptimizer":  # Lightning's placeholder for no optimizer
            return cast(torch.optim.Optimizer, optimizer)
        wrapper = self._wrappers.with_members_of(optimizer) or next(reversed(list(self._wrappers)), None)
        if wrapper is None:
            raise Error(f"{type(self).__name__}: an optimizer was set up before its module: set up its module first")
        return stepping(wrapper, optimizer, self._partition)


def _state_of(wrapper: DistributedDataParallel | None, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the state dict of read() with whole parameters. Those that are released afterwards are copied."""
    with whole_parameters(wrapper):
        state = read()
        releases = wrapper is not None and any(each.releases_parameters for each in wrapper._engine.replicas)
        return copied(state) if releases else state


class TrainerMixin(_Wraps):
    """A strategy of the Trainer. Name this mixin before Lightning's DDPStrategy.

    Parameters
    ----------
    zero : {0, 1, 2, 3}
        The stage; see wrap.
    state_dict_type : {"full", "sharded"}
        "full": checkpoints are DDPStrategy's files, which rank 0 writes. "sharded": checkpoints of a fit are
        shardwright folders. Each rank writes its slices in the background. A folder appears when it is complete, at the
        latest when the next save begins or the fit ends; removals by ModelCheckpoint wait for that. With either value a
        fit resumes from both forms, at any stage and number of ranks.
    precision, compress, partition, offload, **options
        Further options of wrap, and arguments of DDPStrategy. `clip_grad_norm` raises: Lightning clips.

    Notes
    -----
    The module is wrapped during a fit. Afterwards every rank has its own whole parameters.
    """

    model: Any
    optimizers: list[Any]
    _ddp_comm_state: Any
    _ddp_comm_hook: Any
    _ddp_comm_wrapper: Any
    _clips_by = "pass gradient_clip_val to the Trainer"
    _folders: Folders | None = None
    _loaded: tuple[str, bool] | None = None  # (folder that was loaded, True if the optimizer is not yet filled)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return self._wrap(model)

    def _register_ddp_hooks(self) -> None:
        """Register ddp_comm_hook, which DDPStrategy ignores on CPUs."""
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, hook if wrapper is None else wrapper(hook))

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """In configure_model() of a fit at zero=3, let from_pretrained leave tensors in their files."""
        fits = self.lightning_module.trainer.state.fn == "fit" and self._wrap_options["zero"] == 3
        fits = fits and self.root_device.type == "cpu"
        with automatic_loading() if fits else contextlib.nullcontext(), super().model_sharded_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Set up like DDPStrategy. Collective."""
        self._failed, self._replaced = False, list[tuple[Any, str]]()
        super().setup(trainer)
        for logger in trainer.loggers:
            self._replace(logger, "log_metrics", functools.partial(_log_more, trainer, Recent()))
        wrapper = self._wrappers.of(self.model)
        if wrapper is None:
            if self._wrap_options["precision"] is not None:
                self.model = _InPrecision(self.model, self._wrap_options["precision"])
            return
        clips = type(self.precision_plugin).clip_grad_by_norm
        if clips.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):  # no plugin overrides clipping
            self._replace(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm)
        for callback in trainer.callbacks if self._is_sharded else ():
            self._replace(callback, "file_exists", self._is_there)
        for callback in trainer.callbacks if wrapper._engine.options.zero == 3 else ():
            if {each.__name__ for each in type(callback).__mro__} & set(_AVERAGING):
                for name in _READING + _WRITING:
                    self._replace(callback, name, functools.partial(_run_whole, wrapper, name in _WRITING))

    def _replace(self, owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
        """Replace a method by stand_in(method, ...) until teardown."""
        if hasattr(owner, name):
            setattr(owner, name, functools.partial(stand_in, getattr(owner, name)))
            self._replaced.append((owner, name))

    def setup_optimizers(self, trainer: Any) -> None:
        """Create optimizers like DDPStrategy, and slice them. Collective."""
        super().setup_optimizers(trainer)
        self.optimizers = [self._slice(optimizer) for optimizer in self.optimizers]
        count = len(self.optimizers)
        if self._is_sharded and count > 1:
            raise ValueError(f"state_dict_type='sharded' takes one optimizer, got {count}: give the strategy 'full'")

    def _clip_by_norm(self, method: Callable[..., None], optimizer: Any, clip_val: float) -> None:
        wrapper = self._wrappers.clipped_by(self.precision_plugin.main_params(optimizer))
        if wrapper is not None:
            clip_grad_norm_(wrapper, float(clip_val))
        else:
            method(optimizer, clip_val)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Do nothing: with static_graph the first backward delays no work here."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True for folders, which fill wrapped modules, and if wrapping may convert the parameters' dtype."""
        return self._wrap_options["precision"] is not None or self._is_sharded

    @property
    def _writes_folders(self) -> bool:
        return self._is_sharded and self._wrappers.of(self.model) is not None

    def _is_there(self, method: Callable[..., bool], filepath: Any, trainer: Any) -> bool:
        """Return True also for the folder that is being written, so that ModelCheckpoint does not reuse its name."""
        writing = "" if self._folders is None else self._folders.writing
        return bool(method(filepath, trainer)) or os.path.abspath(filepath) == writing

    @property
    def _only_optimizer(self) -> torch.optim.Optimizer | None:
        real = [each for each in self.optimizers if type(each).__name__ != "_MockOptimizer"]
        return real[0] if real else None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save like DDPStrategy, or begin to write a folder. Collective.

        Raises CheckpointError on every rank if the previous save failed, or this one cannot begin.
        """
        if not self._writes_folders:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options has no meaning with state_dict_type='sharded', which uses no CheckpointIO")
        if self._folders is None:
            wrapper = self._wrappers.of(self.model)
            assert wrapper is not None
            self._folders = Folders(wrapper, super().remove_checkpoint)
        path = str(super().broadcast(filepath))
        self._folders.begin(path, checkpoint, self._only_optimizer)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after a running save is durable."""
        (super().remove_checkpoint if self._folders is None else self._folders.remove)(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file like DDPStrategy, or fill module and optimizer from a folder. Collective for a folder."""
        if self._folders is not None:
            self._folders.wait()  # it may be writing the requested folder
        folder = super().broadcast(folder_at(checkpoint_path) if self.is_global_zero else None)
        self._loaded = None
        if folder is None:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        wrapper, module = self._wrappers.of(self.model), self.lightning_module
        fits = module.trainer.state.fn == "fit"
        optimizer = self._only_optimizer if fits and wrapper is not None else None
        found = load_folder(folder, wrapper or module, optimizer, strict=module.strict_loading)
        self._loaded = folder, fits and wrapper is None
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state dict; {} while checkpoints are folders, which hold slices."""
        return {} if self._writes_folders else super().optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; {} while checkpoints are folders. Collective at zero=3."""
        if self._writes_folders:
            return {}
        return _state_of(self._wrappers.of(self.model), super().lightning_module_state_dict)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a module's state dict of any stage. Collective at zero=3."""
        if self._loaded is not None:
            return  # load_checkpoint() has filled the module
        with whole_parameters(self._wrappers.of(self.model), writable=True):
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of any stage and number of ranks; each optimizer takes its own part."""
        if self._loaded is not None:
            folder, waits = self._loaded
            if waits and self._only_optimizer is not None:  # the folder was loaded before the module was wrapped
                module = self._wrappers.of(self.model) or self.lightning_module
                load_folder(folder, module, self._only_optimizer, strict=self.lightning_module.strict_loading)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)

    def on_train_end(self) -> None:
        """Wait for the last save. Collective."""
        super().on_train_end()
        if self._folders is not None:
            self._folders.wait()

    def on_exception(self, exception: BaseException) -> None:
        """Record that ranks may no longer make the same collective calls."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give every rank whole parameters, and tear down like DDPStrategy."""
        wrapper = self._wrappers.of(self.model)
        folders, self._folders = self._folders, None
        if folders is not None:
            try:
                folders.close(together=not self._failed)
            except CheckpointError as error:  # on_train_end() raises it if the fit ended in order
                _logger.warning("the last save failed: %s", error)
        if wrapper is not None:
            for owner, name in self._replaced:
                delattr(owner, name)
            self.model = self.lightning_module
            for replica in wrapper._engine.replicas:
                replica.retire(together=not self._failed)
            end_local_parameters(self.model)
        elif isinstance(self.model, _InPrecision):
            self.model = self.lightning_module
            remove_plan(self.model)
        super().teardown()


class _InPrecision(torch.nn.Module):
    """An unwrapped module that is evaluated under a precision policy. Its parameters keep their dtypes."""

    def __init__(self, module: torch.nn.Module, precision: Any) -> None:
        super().__init__()
        self.module = module
        self._plan = PrecisionPlan(module, precision)
        self._plan.install(masters=False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._plan.enter(inputs, kwargs)
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            self._plan.leave()
        return self._plan.cast_output(output)


def _log_more(
    trainer: Any, recent: Recent, method: Callable[..., None], metrics: Any, *args: Any, **kwargs: Any
) -> None:
    """Log to one of Lightning's loggers, in training with what sw.metrics gives of the steps since the last call."""
    method({**metrics, **recent()} if metrics and trainer.training else metrics, *args, **kwargs)


def _run_whole(
    wrapper: DistributedDataParallel, writable: bool, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with whole_parameters(wrapper, writable=writable):
        return method(*args, **kwargs)


class FabricMixin(_Wraps):
    """A strategy of Fabric. Name this mixin before Lightning's DDPStrategy for Fabric. Options: see TrainerMixin.

    With state_dict_type="full", fabric.save() writes DDPStrategy's files. With "sharded" it writes shardwright folders:
    each rank writes its slices, and the folder is complete when the call returns. fabric.load() always reads both
    forms, at any stage and number of ranks.
    """

    _clips_by = "call fabric.clip_gradients"

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module. Collective."""
        return self._wrap(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Slice an optimizer after the setup of its module. Collective."""
        return self._slice(optimizer)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip like Fabric. The 2-norm over all parameters of a module has the same bits at every stage."""
        wrapper = self._wrappers.clipped_by(self.precision.main_params(optimizer)) if float(norm_type) == 2.0 else None
        if wrapper is not None:
            self.precision.unscale_gradients(optimizer)
            return clip_grad_norm_(wrapper, float(max_norm), error_if_nonfinite=error_if_nonfinite)
        arguments = module, optimizer, max_norm, norm_type, error_if_nonfinite
        return super().clip_gradients_norm(*arguments)

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the bare module's state dict. Collective at zero=3."""
        read = functools.partial(super().get_module_state_dict, module)
        return _state_of(self._wrappers.of(module), read)

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a bare module's state dict of any stage. Collective at zero=3."""
        with whole_parameters(self._wrappers.of(module), writable=True):
            super().load_module_state_dict(module, state_dict, strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save like DDPStrategy, or write a folder. Collective. Raise CheckpointError on every rank if it cannot."""
        if not self._is_sharded:
            super().save_checkpoint(path, state, storage_options, filter)
        elif storage_options is not None or filter:
            raise TypeError("storage_options and filter have no meaning with state_dict_type='sharded'")
        else:
            save_state(str(super().broadcast(path)), state, self._wrappers.of)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file like DDPStrategy, or fill module and optimizer from a folder. Collective for a folder."""
        folder = super().broadcast(folder_at(path) if self.is_global_zero else None)
        if folder is None:
            return super().load_checkpoint(path, state, *args, **kwargs)
        strict = bool(args[0] if args else kwargs.get("strict", True))
        return load_state(folder, state, self._wrappers.of, strict=strict)


def register(registry: Any, strategy: type) -> None:
    """Register "shardwright_zero0" to "shardwright_zero3", also with Lightning's "_spawn", "_fork" and "_notebook"."""
    for zero in range(4):
        for ending, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            about = f"shardwright at zero={zero}, start_method={start_method!r}"
            options = {"override": True, "zero": zero, "start_method": start_method}
            registry.register(f"shardwright_zero{zero}{ending}", strategy, about, **options)
