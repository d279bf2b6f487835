"""DeepSpeed's names over sw.wrap: a program keeps its JSON and its loop, and changes its import.

    from shardwright import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")

DeepSpeed need not be installed. The engine reads the JSON (deepspeed_config), wraps the model, and adds what sw.wrap
leaves to the program: it counts micro-batches, clips, scales losses and steps the schedule. docs/deepspeed.md lists
what each key becomes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..._engine import Error
from ...checkpoint import load, save
from ...comm.agreement import gather_values
from ...comm.process_group import host_group, resolve_group
from ...layout.local_parameters import end_local_parameters
from ...layout.memory import address_of
from ...optim.clip_grad import clip_grad_norm_
from ...options.checks import offload_place
from ...wrapping import full_state_dict, wrap
from . import zero
from .config import Plan, fill_auto, load_config, optimizer_class, plan
from .schedules import SCHEDULES, LossScale, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "DeepSpeedEngine",
    "LRRangeTest",
    "LossScale",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_config_arguments",
    "fill_auto",
    "init_distributed",
    "initialize",
    "plan",
    "zero",
]

_logger = logging.getLogger("shardwright")


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Make torch's default process group, as sw.wrap would. Accepts DeepSpeed's arguments without effect."""
    resolve_group(None, None, trains=True)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's command line arguments --deepspeed and --deepspeed_config to a parser."""
    group = parser.add_argument_group("DeepSpeed", "names of DeepSpeed, read by shardwright")
    group.add_argument("--deepspeed", action="store_true", help="train with an engine (a program may ask)")
    group.add_argument("--deepspeed_config", help="path of the JSON")
    return parser


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """Wrap a model according to DeepSpeed's `config` (or `args.deepspeed_config`), a dict or a path. Collective.

    Parameters
    ----------
    model : Module
        A model. If GPUs are visible it is moved to this rank's GPU, as DeepSpeed does.
    optimizer, lr_scheduler : optional
        Used instead of the configuration's: an optimizer or a callable of parameters to one; a scheduler or a callable
        of an optimizer to one.
    model_parameters : iterable of Parameter or of groups, optional
        Parameters of the configuration's optimizer. Default: all parameters that train.
    training_data : Dataset, optional
        A data set. Each rank reads its part in micro-batches, joined by `collate_fn`.
    distributed_port, dist_init_required
        Without effect: sw.wrap reads the launcher's variables.

    Returns
    -------
    (DeepSpeedEngine, Optimizer or None, DataLoader or None, scheduler or None)

    Raises
    ------
    ValueError, NotImplementedError
        For a key of the configuration that is unknown, contradicts another, or names a feature that does not exist
        here; `shardwright config` shows each.
    """
    for name, given in (("mpu", mpu), ("mesh_param", mesh_param)):
        if given is not None:
            raise NotImplementedError(f"initialize: {name} does not exist here: call sw.wrap with device_mesh=")
    if model is None:
        raise TypeError("initialize needs a model, got None")
    given = (config, config_params, getattr(args, "deepspeed_config", None))
    config = next((each for each in given if each is not None), None)
    if config is None:
        raise ValueError("initialize needs a configuration: config=, or args.deepspeed_config")
    config = load_config(config)
    init_distributed()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    made = plan(config, world_size)
    options = dict(made.wrap)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if made.offloads_parameters:
            places = {"parameters": "cpu", "optimizer": offload_place(options.get("offload"), "optimizer")}
            options |= {"offload": places, "device": device}
        else:
            model.to(device)
    if made.shard_size:
        shape, names = (world_size // made.shard_size, made.shard_size), ("replicate", "shard")
        options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    chosen = _make_optimizer(made, model, optimizer, model_parameters)
    if chosen is None:
        place = offload_place(options.pop("offload", None), "parameters")
        options |= {"offload": {"parameters": place}} if place else {}
        wrapped, stepped = wrap(model, **options), None
    else:
        wrapped, stepped = wrap(model, chosen, **options)
    scheduler = _make_scheduler(made, stepped, lr_scheduler)
    loader = _make_loader(made, wrapped.process_group, training_data, collate_fn)
    engine = DeepSpeedEngine(model, wrapped, made, config, stepped, scheduler, loader)
    return engine, stepped, loader, scheduler


def _make_optimizer(made: Plan, model: torch.nn.Module, given: Any, parameters: Any) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        return given(parameters)
    if made.optimizer is None:
        return None
    name, arguments = made.optimizer
    return optimizer_class(name)(parameters, **arguments)


def _make_scheduler(made: Plan, optimizer: torch.optim.Optimizer | None, given: Any) -> Any:
    if given is not None:
        return given if hasattr(given, "step") else given(optimizer)
    if made.scheduler is None or optimizer is None:
        return None
    name, arguments = made.scheduler
    kind: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name)
    return kind(optimizer, **arguments)


def _make_loader(made: Plan, group: Any, data: Any, collate_fn: Any) -> DataLoader[Any] | None:
    if data is None:
        return None
    kept = {"batch_size": made.micro_batch_size, "collate_fn": collate_fn, "drop_last": made.drop_last}
    if isinstance(data, torch.utils.data.IterableDataset):
        if dist.get_world_size(group) > 1:  # as in DeepSpeed, whose sampler needs a data set with a length
            raise ValueError(
                "initialize: training_data is an IterableDataset, which cannot be divided among ranks: divide it by rank, "
                "and pass it to a torch.utils.data.DataLoader of your own"
            )
        return DataLoader(data, **kept)
    ranks = dist.get_world_size(group), dist.get_rank(group)
    sampler: DistributedSampler[Any] = DistributedSampler(data, *ranks, drop_last=made.drop_last)
    return DataLoader(data, sampler=sampler, **kept)


class DeepSpeedEngine(torch.nn.Module):
    """A wrapped model with DeepSpeed's training loop: forward, backward, step.

    `module` is the user's model; `optimizer`, `lr_scheduler` and `training_dataloader` are the results of initialize.
    `micro_steps` counts calls of step(), `global_steps` steps of the optimizer with the `skipped_steps` of overflows,
    `global_samples` rows.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        wrapped: Any,
        made: Plan,
        config: dict[str, Any],
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        loader: DataLoader[Any] | None,
    ) -> None:
        super().__init__()
        self.module = model
        self.__dict__["wrapped"] = wrapped  # not a submodule, so that parameters keep the single prefix "module."
        self.plan, self.config = made, config
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, scheduler, loader
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.loss_scaler = None if made.loss_scale is None else LossScale(**made.loss_scale)
        self._boundary: bool | None = None
        self._is_local = self._warned_of_scheduler = False
        self._norm: torch.Tensor | float | None = None
        group = wrapped.process_group
        self.global_rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, inside torch.autocast if the configuration enables it."""
        if self.plan.autocast is None:
            return self.wrapped(*args, **kwargs)
        with torch.autocast(self.device.type, self.plan.autocast):
            return self.wrapped(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward of a micro-batch; the last one of a step averages gradients.

        `loss` is a scalar; with `scale_wrt_gas` it is divided by the number of micro-batches of a step. Returns the
        quotient.
        """
        if scale_wrt_gas and self.plan.accumulation_steps > 1:
            loss = loss / self.plan.accumulation_steps
        scaled = loss if self.loss_scaler is None else loss.float() * self.loss_scaler.scale
        averages = self.is_gradient_accumulation_boundary() and not self._is_local
        with contextlib.nullcontext() if averages else self.wrapped.no_sync():
            scaled.backward(retain_graph=retain_graph)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; after the last one of a step clip, step the optimizer and the schedule, zero gradients.

        Under fp16 a step with an infinite or NaN norm is skipped on all ranks.
        """
        if self._is_local:
            raise Error("engine.step() was called inside engine.no_sync(): leave it first")
        if self.optimizer is None:
            raise Error("engine.step() needs an optimizer: pass one to initialize, or a section 'optimizer'")
        if self.is_gradient_accumulation_boundary():
            self._take_step(lr_kwargs or {})
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        limit = self.plan.clip_grad_norm * scale or math.inf
        self._norm = clip_grad_norm_(self.wrapped, limit) / scale
        overflow = self.loss_scaler is not None and not math.isfinite(self._norm)
        if overflow:
            self.skipped_steps += 1
        else:
            if scale != 1.0:
                torch._foreach_mul_([p.grad for p in self.module.parameters() if p.grad is not None], 1.0 / scale)
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        self.optimizer.zero_grad()
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow)
        self._was_applied = not overflow
        self.global_steps += 1
        self.global_samples += self.plan.train_batch_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        (self.module if self.optimizer is None else self.optimizer).zero_grad(set_to_none=set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backwards do not synchronise, at any stage."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.plan.accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the last one of a step. From now on this replaces counting."""
        self._boundary = bool(is_boundary)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the mode of the model and of its wrapper."""
        super().train(mode)
        if "wrapped" in self.__dict__:
            self.wrapped.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model's forward with torch.compile."""
        self.module.compile(*args, **kwargs)

    def destroy(self) -> None:
        """Remove the wrapper. Afterwards every rank has its own whole model. Collective."""
        for replica in self.wrapped._engine.replicas:
            replica.retire(together=True)
        end_local_parameters(self.module)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.module.parameters()).device

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's averaged gradients before clipping; None before the first step."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def was_step_applied(self) -> bool:
        """Return True if the last step was not skipped for an overflow."""
        return getattr(self, "_was_applied", False)

    def train_batch_size(self) -> int:
        """Return the number of rows in a step over all ranks."""
        return self.plan.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of rows in one backward of one rank."""
        return self.plan.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backwards in a step."""
        return self.plan.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of rows in a step. The micro-batch stays; the number of backwards changes."""
        rows = self.plan.micro_batch_size * self.world_size
        if train_batch_size < rows or train_batch_size % rows:
            raise ValueError(f"train_batch_size must be a multiple of {rows}, got {train_batch_size!r}")
        self.plan.train_batch_size, self.plan.accumulation_steps = train_batch_size, train_batch_size // rows

    def gradient_clipping(self) -> float:
        """Return the norm to which gradients are clipped; 0.0 for no clipping."""
        return self.plan.clip_grad_norm

    def zero_optimization_stage(self) -> int:
        """Return the stage."""
        return int(self.plan.wrap["zero"])

    def zero_optimization(self) -> bool:
        """Return True if the stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: whole weights can always be saved."""
        return True

    def fp16_enabled(self) -> bool:
        """Return True under fp16."""
        return self._low_dtype() is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return True under bf16."""
        return self._low_dtype() is torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Return True if the loss scale changes."""
        return self.loss_scaler is not None and self.loss_scaler.is_dynamic

    def _low_dtype(self) -> torch.dtype | None:
        precision = self.plan.wrap.get("precision")
        known = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return known.get(precision) if isinstance(precision, str) else getattr(precision, "param_dtype", None)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write model, optimizer, schedule, loss scale and counters to save_dir/tag, which all ranks share. Collective.

        `tag` defaults to global_step<N>; `save_latest` writes it to save_dir/latest. `client_state`, rank 0's plain
        values and tensors, is what load_checkpoint returns. `exclude_frozen_parameters` must be False.
        """
        if exclude_frozen_parameters:
            raise NotImplementedError(
                "exclude_frozen_parameters does not exist here: a checkpoint holds the whole model"
            )
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        steps = {name: getattr(self, name) for name in _COUNTERS}
        extra = {"steps": steps, "client_state": client_state or {}}
        if self.loss_scaler is not None:
            extra["loss_scale"] = self.loss_scaler.state_dict()
        if hasattr(self.lr_scheduler, "state_dict"):
            extra["scheduler"] = self._plain_scheduler_state()
        path = os.path.join(save_dir, tag)
        save(path, self.wrapped, self.optimizer, step=self.global_steps, extra=extra, overwrite=True)
        latest = os.path.join(save_dir, "latest")

        def write_latest() -> None:
            with open(f"{latest}.new", "w", encoding="utf-8") as file:
                file.write(tag)
            os.replace(f"{latest}.new", latest)

        if save_latest:
            self._on_rank_0(write_latest, f"writing {latest}")
        return True

    def _plain_scheduler_state(self) -> dict[str, Any]:
        """Return the entries of the schedule's state that a checkpoint can hold; log the names of the others once."""
        state = self.lr_scheduler.state_dict()
        plain = (int, float, str, bool, list, tuple, type(None))
        kept = {name: value for name, value in state.items() if isinstance(value, plain)}
        left = [name for name in state if name not in kept]
        if left and self.global_rank == 0 and not self._warned_of_scheduler:
            self._warned_of_scheduler = True
            text = "save_checkpoint leaves out %s of the %s: load_checkpoint keeps what the new schedule has there"
            _logger.warning(text, ", ".join(map(repr, left)), type(self.lr_scheduler).__name__)
        return kept

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from a folder of save_checkpoint(), at any stage and number of ranks. Collective.

        `tag` defaults to that in load_dir/latest; all ranks load rank 0's. `load_optimizer_states=False`,
        `load_lr_scheduler_states=False` and `load_module_only` leave the optimizer, the schedule, or all but the model
        unchanged. Returns the folder and the client state; (None, {}) with a warning if there is no file `latest`.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise NotImplementedError(
                "load_checkpoint: load_module_strict=False and custom_load_fn do not exist here: call sw.load_full_state_dict"
            )
        latest = os.path.join(load_dir, "latest")

        def chosen() -> str | None:
            if tag is not None or not os.path.isfile(latest):
                return None if tag is None else str(tag)
            with open(latest, encoding="utf-8") as file:
                return file.read().strip()

        tag = self._on_rank_0(chosen, f"reading {latest}")
        if tag is None:
            _logger.warning("%s does not exist: pass tag=, or nothing is loaded", latest)
            return None, {}
        path = os.path.join(load_dir, tag)
        takes_optimizer = load_optimizer_states and not load_module_only
        extra = load(path, self.wrapped, self.optimizer if takes_optimizer else None)
        if not load_module_only:
            self.__dict__.update(extra["steps"])
            if self.loss_scaler is not None and "loss_scale" in extra:
                self.loss_scaler.load_state_dict(extra["loss_scale"])
            if load_lr_scheduler_states and self.lr_scheduler is not None and "scheduler" in extra:
                state = self.lr_scheduler.state_dict()
                self.lr_scheduler.load_state_dict({**state, **extra["scheduler"]})
        return path, extra["client_state"]

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights in the precision of the forward with torch.save, on rank 0. Collective."""
        state = full_state_dict(self.wrapped)
        if exclude_frozen_parameters:
            frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        low = self._low_dtype()
        made: dict[Any, torch.Tensor] = {}  # tied weights stay tied
        for name, value in state.items():
            if low is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
                key = address_of(value) or id(value), value.shape, value.stride()
                state[name] = made.setdefault(key, value.to(low))

        def write() -> None:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))

        self._on_rank_0(write, f"writing {save_filename}")
        return True

    save_fp16_model = save_16bit_model

    def _on_rank_0(self, work: Callable[[], str | None], label: str) -> str | None:
        """Return the result of work() on rank 0, on every rank. An error of rank 0 raises on all ranks. Collective."""
        comm = host_group(self.wrapped.process_group, self.wrapped._engine.options.timeout_s).comm
        work_here = work if self.global_rank == 0 else lambda: None
        return gather_values(comm, work_here, label, refusals=(Exception,))[0]


_COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
