"""Reader of DeepSpeed's JSON: converts it to arguments of sw.wrap, an optimizer and a schedule.

Every key is looked up in the table of deepspeed_keys. An unknown or refused key, a contradiction and a left-over "auto"
are errors before anything is made. docs/deepspeed.md describes the meaning of each key.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ... import optim
from ...options.checks import among
from ...options.compressors import Int8, compressor_named
from ...options.mapping_files import read_mapping
from ...options.options import Options
from ...options.precision import Precision
from .keys import KEYS, is_harmless, key_of, nearest
from .schedules import SCHEDULES

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LONG_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_REFUSED_OPTIMIZERS = {
    **dict.fromkeys(("onebitadam", "zerooneadam"), 'use AdamW with "shardwright": {"compress": "int4"}'),
    "onebitlamb": 'use AdamW with "shardwright": {"compress": "powersgd"}',
    "lamb": 'pass a LAMB optimizer to initialize, and "shardwright": {"partition": "tensor"}',
    "lion": 'pass a Lion optimizer to initialize, and "zero_allow_untested_optimizer": true',
    "muon": 'pass torch.optim.Muon to initialize, and "shardwright": {"partition": "tensor"}',
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "pass the optimizer of mup to initialize"),
}
#: key -> fields of TrainingArguments that fill its "auto"; see fill_auto
TRAINER_FIELDS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "bfloat16.enabled": "bf16",
}
#: keys with an "auto" that the Trainer fills from the model's width; without a width the default applies
_FREE = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


@dataclasses.dataclass
class Reading:
    """The report row of one given key: its value, its state and its effect here."""

    key: str
    value: Any
    state: str
    text: str


@dataclasses.dataclass
class Plan:
    """The settings that a JSON configuration converts to."""

    micro_batch_size: int = 0  # rows per rank and backward
    accumulation_steps: int = 0  # backwards per step
    train_batch_size: int = 0  # rows per step over all ranks
    #: arguments of sw.wrap other than module, optimizer and clip_grad_norm
    wrap: dict[str, Any] = dataclasses.field(default_factory=lambda: {"zero": 0})
    optimizer: tuple[str, dict[str, Any]] | None = None  # a name and its arguments
    scheduler: tuple[str, dict[str, Any]] | None = None
    clip_grad_norm: float = 0.0  # 0.0: off
    loss_scale: dict[str, Any] | None = None  # arguments of LossScale, under fp16
    autocast: torch.dtype | None = None  # the dtype of torch.autocast around each forward
    shard_size: int | None = None  # ranks in a row of the mesh
    offloads_parameters: bool = False  # to the host's memory
    drop_last: bool = False
    rows: list[Reading] = dataclasses.field(default_factory=list)


def load_config(config: Any) -> dict[str, Any]:
    """Return a copy of a configuration, a dict or a path. Raise ValueError for no JSON object, or a repeated key."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config must be a dict or the path of a JSON file, got {type(config).__name__}")
    return read_mapping(config)


def fill_auto(
    config: Any,
    args: Any,
    *,
    world_size: int = 1,
    num_training_steps: int | None = None,
    hidden_size: int | None = None,
) -> dict[str, Any]:
    """Return a configuration with each "auto" filled as transformers' Trainer and accelerate fill it.

    `args` has the fields of TrainingArguments that the "auto" keys need. `num_training_steps` is for the schedule,
    `hidden_size`, the model's width, for sizes of buckets. Raises ValueError if given values contradict `args`; one
    message lists all contradictions.
    """
    filled = load_config(config)
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    values: dict[str, Any] = {
        name: getattr(args, field) for name, field in TRAINER_FIELDS.items() if hasattr(args, field)
    }
    values["train_batch_size"] = world_size * micro * steps
    if hasattr(args, "adam_beta1"):
        values["optimizer.params.betas"] = [args.adam_beta1, args.adam_beta2]
    checked = dict(values)
    values["scheduler.params.warmup_min_lr"] = 0
    if num_training_steps is not None:
        warmup = getattr(args, "warmup_steps", 0) or 0
        warmup = args.get_warmup_steps(num_training_steps) if hasattr(args, "get_warmup_steps") else warmup
        values["scheduler.params.total_num_steps"] = num_training_steps
        values["scheduler.params.warmup_num_steps"] = warmup
    if hidden_size is not None:
        sizes = (hidden_size * hidden_size, int(0.9 * hidden_size * hidden_size), 10 * hidden_size)
        values.update(zip(_FREE, sizes))
    wrong = []
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        place: Any = filled
        for part in section.split(".") if section else ():
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            continue
        if place[last] == "auto":
            place[last] = value
        elif name in checked and place[last] != value:
            wrong.append(f"{name}={place[last]!r} against {value!r} ({TRAINER_FIELDS.get(name, 'TrainingArguments')})")
    if wrong:
        raise ValueError(f"the DeepSpeed configuration contradicts the arguments: {'; '.join(wrong)}: write 'auto'")
    return filled


def plan(config: Any, world_size: int) -> Plan:
    """Convert a configuration for this number of ranks.

    Raises ValueError for an unknown key, a contradiction, an "auto" that nothing filled, or a value out of range;
    NotImplementedError for a feature that shardwright lacks.
    """
    return _Reader(load_config(config)).read(world_size)


class _Reader:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._plan = Plan()
        self._became: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._check("", config)

    def _check(self, section: str, values: dict[str, Any]) -> None:
        """Raise for keys that are unknown or refused; record all others."""
        for last, value in values.items():
            name = f"{section}{last}"
            key = key_of(name)
            if key is None:
                near = nearest(name)
                raise ValueError(f"unknown key {name!r} of DeepSpeed" + (f": did you mean {near!r}?" if near else ""))
            if key.state == "refused" and not is_harmless(value):
                raise NotImplementedError(f"{name}={_short(value)} of DeepSpeed does not exist here: {key.text}")
            is_section = any(each.startswith(f"{name.replace('bfloat16', 'bf16')}.") for each in KEYS)
            if is_section and isinstance(value, dict):
                self._check(f"{name}.", value)
            elif key.state == "mapped" and isinstance(value, dict) and name != "shardwright":
                self._values.update({f"{name}.{each}": one for each, one in value.items()})
            self._values[name] = value

    def _get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def _number(self, name: str, default: Any = None, *, low: float = 0, whole: bool = True) -> Any:
        """Return a number of at least `low`."""
        value = self._get(name, default)
        if value is default:
            return value
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= low
        if not good or (whole and value != int(value)) or not value < float("inf"):
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{name} must be {kind} of at least {low}, got {value!r}")
        return int(value) if whole else float(value)

    def _switch(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value

    def read(self, world_size: int) -> Plan:
        left = [name for name, value in self._values.items() if value == "auto" and name not in _FREE]
        left = [name for name in left if (key := key_of(name)) is not None and key.state == "mapped"]
        if left:
            raise ValueError(
                f"{', '.join(left)}: 'auto' is filled by the Trainer and by accelerate; give numbers, or call "
                "sw.deepspeed.fill_auto(config, args)"
            )
        self._values = {name: None if value == "auto" else value for name, value in self._values.items()}
        self._read_batch(world_size)
        self._read_zero(world_size)
        self._read_precision()
        self._read_rest()
        self._plan.optimizer = self._read_optimizer()
        self._plan.scheduler = self._read_scheduler()
        self._read_own()
        for name, value in self._values.items():
            key = key_of(name)
            assert key is not None
            if not isinstance(value, dict) or not any(each.startswith(f"{name}.") for each in self._values):
                text = self._became.get(name, key.text if key.state == "no meaning" else "off")
                given = "auto" if value is None and name in _FREE else value
                self._plan.rows.append(Reading(name, given, key.state, text))
        return self._plan

    def _read_batch(self, world_size: int) -> None:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        train, micro, steps = (self._number(name, low=1) for name in names)
        if train is None and micro is None:
            raise ValueError(
                "the configuration must have train_batch_size or train_micro_batch_size_per_gpu, got neither"
            )
        if micro is None:
            steps = steps or 1
            micro = train // (steps * world_size)
        elif steps is None:
            steps = train // (micro * world_size) if train is not None else 1
        train = micro * steps * world_size if train is None else train
        if train != micro * steps * world_size or not micro:
            given = ", ".join(f"{name}={self._get(name)}" for name in names if self._get(name) is not None)
            raise ValueError(
                "train_batch_size must be train_micro_batch_size_per_gpu * gradient_accumulation_steps * the number of "
                f"ranks, got {given} with {world_size} rank{'s' * (world_size != 1)}"
            )
        made = self._plan
        made.train_batch_size, made.micro_batch_size, made.accumulation_steps = train, micro, steps
        texts = (f"{train} rows a step", f"{micro} rows a backward", f"{steps} backwards a step")
        self._became.update(zip(names, texts))

    def _read_zero(self, world_size: int) -> None:
        zero, wrap = "zero_optimization", self._plan.wrap
        whole = self._get(zero)
        if isinstance(whole, bool):
            stage, name = int(whole), zero
        elif isinstance(whole, dict) or whole is None:
            stage, name = self._number(f"{zero}.stage", 0), f"{zero}.stage"
        else:
            raise ValueError(f"{zero} must be a section, got {whole!r}")
        among(0, 1, 2, 3)(name, stage)
        self._set(name, zero=stage)
        elements = self._number(f"{zero}.reduce_bucket_size")
        if elements:
            self._set(f"{zero}.reduce_bucket_size", bucket_cap_mb=min(elements * 4 / 2**20, 25.0))
        place = self._place(f"{zero}.offload_optimizer", f"{zero}.cpu_offload")
        if place is not None:
            self._set(f"{zero}.offload_optimizer.device", offload=place)
            self._became[f"{zero}.cpu_offload"] = f"offload={place!r}"
        place = self._place(f"{zero}.offload_param", f"{zero}.cpu_offload_param")
        self._plan.offloads_parameters = place == "cpu"
        if place == "cpu":
            for name in ("offload_param.device", "cpu_offload_param"):
                self._became[f"{zero}.{name}"] = "parameters of a model on the CPU lie there already"
        elif place is not None:
            if stage != 3:
                raise ValueError(f"{zero}.offload_param needs zero_optimization.stage 3, got stage {stage}")
            places = {"parameters": place, "optimizer": wrap.get("offload")}
            self._set(f"{zero}.offload_param.device", share_parameters=False, offload=places)
        for name in ("zero_quantized_weights", "mics_shard_size"):
            if stage != 3 and self._get(f"{zero}.{name}", False) not in (False, -1):
                raise ValueError(f"{zero}.{name} needs zero_optimization.stage 3, got stage {stage}")
        if self._switch(f"{zero}.zero_quantized_weights"):
            self._set(f"{zero}.zero_quantized_weights", gather="int8", share_parameters=False)
        if self._switch(f"{zero}.zero_quantized_gradients"):
            self._set(f"{zero}.zero_quantized_gradients", compress=Int8())
        size = self._get(f"{zero}.mics_shard_size", -1)
        if size != -1:
            size = self._number(f"{zero}.mics_shard_size", low=1)
            if world_size % size:
                raise ValueError(f"{zero}.mics_shard_size must divide the {world_size} ranks, got {size}")
            self._plan.shard_size = size
            self._became[f"{zero}.mics_shard_size"] = f"device_mesh of ({world_size // size}, {size})"
        if self._switch("zero_allow_untested_optimizer") and wrap["zero"]:
            self._set("zero_allow_untested_optimizer", partition="flat")

    def _place(self, section: str, old: str) -> str | None:
        """Return the place of an offload section, or of its old name, as offload= takes it."""
        device = self._get(f"{section}.device", "cpu" if self._switch(old) else "none")
        among("none", "cpu", "nvme")(f"{section}.device", device)
        if device != "nvme":
            return "cpu" if device == "cpu" else None
        folder = self._get(f"{section}.nvme_path")
        if not isinstance(folder, str):
            raise ValueError(f"{section}.nvme_path must be a folder for 'nvme', got {folder!r}")
        self._became[f"{section}.nvme_path"] = "see device"
        return f"nvme:{folder}"

    def _set(self, name: str, **options: Any) -> None:
        self._plan.wrap.update(options)
        self._became[name] = ", ".join(f"{option}={value!r}" for option, value in options.items())

    def _read_precision(self) -> None:
        on = [name for name in ("fp16", "bf16", "bfloat16", "torch_autocast") if self._switch(f"{name}.enabled")]
        if len(on) > 1:
            raise ValueError(f"{' and '.join(on)} are both enabled: one precision at a time")
        travels = self._get("communication_data_type")
        if travels is not None:
            among(*_DTYPES)("communication_data_type", travels)
        if on == ["torch_autocast"]:
            given = str(self._get("torch_autocast.dtype", "bf16")).removeprefix("torch.")
            given = _LONG_DTYPES.get(given, given)
            among("bf16", "fp16")("torch_autocast.dtype", given)
            self._plan.autocast = _DTYPES[given]
            self._became["torch_autocast.enabled"] = f"torch.autocast with {_DTYPES[given]}"
            self._became["torch_autocast.dtype"] = "see enabled"
        elif on:
            short = "fp16" if on == ["fp16"] else "bf16"
            self._set(f"{on[0]}.enabled", precision=short)
        if travels not in (None, "fp32"):
            precision = self._plan.wrap.get("precision")
            compute = _DTYPES[precision] if precision else None
            mixed = Precision(param_dtype=compute, reduce_dtype=_DTYPES[travels])
            self._set("communication_data_type", precision=mixed)
        elif travels:
            self._became["communication_data_type"] = "gradients travel in float32 anyway"
        if on == ["fp16"] or self._plan.autocast is torch.float16:
            self._plan.loss_scale = self._read_loss_scale()

    def _read_loss_scale(self) -> dict[str, Any]:
        found = {
            "loss_scale": self._number("fp16.loss_scale", 0.0, whole=False),
            "initial_scale_power": self._number("fp16.initial_scale_power", 16),
            "loss_scale_window": self._number("fp16.loss_scale_window", 1000, low=1),
            "hysteresis": self._number("fp16.hysteresis", 2, low=1),
            "consecutive_hysteresis": self._switch("fp16.consecutive_hysteresis"),
            "min_loss_scale": self._number("fp16.min_loss_scale", 1.0, whole=False),
        }
        for name, value in found.items():
            self._became[f"fp16.{name}"] = f"{name}={value!r} of the loss scale"
        if not found["loss_scale"]:
            self._became["fp16.loss_scale"] = "a dynamic loss scale"
        return found

    def _read_rest(self) -> None:
        clip = self._number("gradient_clipping", 0.0, whole=False)
        self._plan.clip_grad_norm = clip
        self._became["gradient_clipping"] = f"clip_grad_norm={clip}" if clip else "off"
        reduction = str(self._get("gradient_allreduce_op", "avg")).lower()
        if reduction not in ("avg", "mean", "sum"):
            raise ValueError(f"gradient_allreduce_op must be 'avg' or 'sum', got {reduction!r}")
        if reduction == "sum":
            self._set("gradient_allreduce_op", reduce="sum")
        if self._get("managed_gradient_accumulation", True) is not True:
            raise NotImplementedError(
                "managed_gradient_accumulation=false of DeepSpeed does not exist here: call "
                "engine.set_gradient_accumulation_boundary before each backward"
            )
        self._plan.drop_last = self._switch("dataloader_drop_last")
        if self._plan.drop_last:
            self._became["dataloader_drop_last"] = "drop_last=True of the loader"

    def _section(self, name: str) -> tuple[str, dict[str, Any]] | None:
        if self._get(name) is None or self._get(f"{name}.type") is None:
            return None
        params = self._get(f"{name}.params", {})
        if not isinstance(params, dict):
            raise ValueError(f"{name}.params must be a section, got {params!r}")
        return str(self._get(f"{name}.type")), {n: v for n, v in params.items() if v != "auto"}

    def _read_optimizer(self) -> tuple[str, dict[str, Any]] | None:
        found = self._section("optimizer")
        if found is None:
            return None
        (given, params), kind = found, found[0].lower()
        if kind in _REFUSED_OPTIMIZERS:
            raise NotImplementedError(f"optimizer.type={given!r} does not exist here: {_REFUSED_OPTIMIZERS[kind]}")
        is_torch = bool(params.pop("torch_adam", False))
        decoupled = bool(params.pop("adam_w_mode", True)) or kind == "adamw"
        for ignored in ("max_grad_norm", "legacy_fusion", "fused", "fp32_optimizer_states"):
            params.pop(ignored, None)
        if kind in ("adam", "adamw"):
            if not params.pop("bias_correction", True):
                raise NotImplementedError(
                    "optimizer.params.bias_correction=false does not exist here: a warm-up of the learning rate is nearest"
                )
            params["betas"] = tuple(params.get("betas", (0.9, 0.999)))
            if not is_torch:  # DeepSpeed's own classes have no weight decay by default, torch.optim.AdamW has
                params.setdefault("weight_decay", 0.0)
            name = "sw.optim.AdamW" if decoupled else "sw.optim.Adam"
        elif kind == "sgd":
            name = "sw.optim.SGD"
        else:
            names = {each.lower(): each for each in dir(torch.optim) if isinstance(getattr(torch.optim, each), type)}
            if kind not in names or kind == "optimizer":
                raise ValueError(f"optimizer.type must be Adam, AdamW, SGD or a class of torch.optim, got {given!r}")
            name = f"torch.optim.{names[kind]}"
        for each in ("lr", "eps", "weight_decay", "momentum"):
            if isinstance(params.get(each), (str, list, dict)):
                raise ValueError(f"optimizer.params.{each} must be a number, got {params[each]!r}")
        self._check_arguments("optimizer.params", optimizer_class(name), params, ("self", "params"))
        self._became["optimizer.type"] = name
        for each, value in (self._get("optimizer.params") or {}).items():
            self._became[f"optimizer.params.{each}"] = f"{each}={params[each]!r}" if each in params else "see type"
        return name, params

    def _read_scheduler(self) -> tuple[str, dict[str, Any]] | None:
        found = self._section("scheduler")
        if found is None:
            return None
        name, params = found
        kind = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
        if not isinstance(kind, type):
            raise ValueError(
                f"scheduler.type must be {', '.join(SCHEDULES)} or of torch.optim.lr_scheduler, got {name!r}"
            )
        params.pop("last_batch_iteration", None)
        self._check_arguments("scheduler.params", kind, params, ("self", "optimizer"))
        self._became["scheduler.type"] = f"{'sw.deepspeed' if name in SCHEDULES else 'torch.optim.lr_scheduler'}.{name}"
        for each, value in (self._get("scheduler.params") or {}).items():
            self._became[f"scheduler.params.{each}"] = f"{each}={params.get(each)!r}" if each in params else "0"
        return name, params

    def _check_arguments(self, section: str, kind: type, params: dict[str, Any], besides: tuple[str, ...]) -> None:
        known = [name for name in inspect.signature(kind).parameters if name not in besides]
        for name in params:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1) or [f"one of {', '.join(known)}"]
                raise ValueError(f"unknown key '{section}.{name}' for {kind.__name__}: did you mean {near[0]}?")

    def _read_own(self) -> None:
        own = self._get("shardwright", {})
        if not isinstance(own, dict):
            raise ValueError(f"shardwright must be a section of arguments of sw.wrap, got {own!r}")
        own = dict(own)
        if "compress" in own:
            own["compress"] = compressor_named("shardwright.compress", own["compress"])
        if own:
            self._set("shardwright", **own)
        Options.from_keywords(self._plan.wrap)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of "sw.optim.<name>" or "torch.optim.<name>"."""
    home: Any = optim if name.startswith("sw.") else torch.optim
    return getattr(home, name.rpartition(".")[2])


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
