"""accelerate's own FSDP and DeepSpeed settings, read as ours.

`accelerate config` writes them to a file, `accelerate launch` passes them on in variables, and programs pass plugins.
Our Accelerator takes the settings over, says in one line what they became, and launches as without a plugin.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ..options.names import near
from .deepspeed.config import load_config, plan

#: the variable with the plugin of the launch, once its own is taken away
_TAKEN = "SHARDWRIGHT_TAKEN_PLUGIN"

#: FSDP1's strategies, and torch's numbers of them -> (stage, True if rows of ranks replicate)
_STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "_HYBRID_SHARD_ZERO2": (2, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
_NUMBERS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
#: settings that change nothing here -> why
_NO_EFFECT = {
    "backward_prefetch": "units are gathered ahead by prefetch=",
    "forward_prefetch": "units are gathered ahead by prefetch=",
    "limit_all_gathers": "the places of units bound it",
    "use_orig_params": "parameters always keep their identity",
    "sync_module_states": "wrapping always takes rank 0's values",
    "state_dict_type": "save_state() writes the stock class's files; sw.save writes slices",
    "cpu_ram_efficient_loading": "sw.meta_loading() and weights= read slices",
    "version": "",
}
_KNOWN = {
    *_NO_EFFECT,
    *("sharding_strategy", "reshard_after_forward", "offload_params", "auto_wrap_policy", "min_num_params"),
    *("transformer_cls_to_wrap", "activation_checkpointing", "activation_checkpointing_offload", "ignored_modules"),
}


@dataclasses.dataclass
class Settings:
    """What a plugin became. `units`: names of the classes that are units at zero=3; `rows`: (setting, value, here).

    `checkpoints`: arguments of sw.checkpoint_units, or None. `accumulation_steps`, `mixed_precision`: arguments of the
    Accelerator that a DeepSpeed file gives, if the program gives none.
    """

    source: str
    zero: int = 0
    wrap_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    units: tuple[str, ...] = ()
    clip_grad_norm: float = 0.0
    checkpoints: dict[str, Any] | None = None
    accumulation_steps: int | None = None
    mixed_precision: str | None = None
    rows: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)

    def sentence(self) -> str:
        """Return the line for the log."""
        given = {"zero": self.zero, **self.wrap_options}
        if self.clip_grad_norm:
            given["clip_grad_norm"] = self.clip_grad_norm
        for name in ("accumulation_steps", "mixed_precision"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{self.source} is taken over as sw.wrap(..., {said}); `shardwright config FILE` shows each setting"

    def options_for(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the options of wrap for a module. Raise ValueError if it has none of the classes named as units."""
        if not self.units:
            return self.wrap_options
        kinds = {type(each) for each in module.modules() if type(each).__name__ in self.units}
        missing = sorted(set(self.units) - {kind.__name__ for kind in kinds})
        if missing:
            raise ValueError(
                f"{self.source} names the class {missing[0]!r}, and {type(module).__name__} has no module of it"
            )
        return {**self.wrap_options, "units": tuple(sorted(kinds, key=lambda kind: kind.__name__))}


def take_over(arguments: MutableMapping[str, Any]) -> Settings | None:
    """Take accelerate's plugins out of its Accelerator's arguments and the environment; None if there are none."""
    plugin, deepspeed = arguments.pop("fsdp_plugin", None), arguments.pop("deepspeed_plugin", None)
    deepspeed = deepspeed or arguments.pop("deepspeed_plugins", None)
    by_launch = {name: _is_launched(name) for name in ("FSDP", "DEEPSPEED")}
    if (plugin is not None or by_launch["FSDP"]) and (deepspeed is not None or by_launch["DEEPSPEED"]):
        raise ValueError("accelerate's FSDP and DeepSpeed settings were both given: pass one of them")
    for name, is_on in by_launch.items():
        if is_on:  # accelerate's own code then launches as for several plain processes
            os.environ.pop(f"ACCELERATE_USE_{name}", None)
            os.environ[_TAKEN] = name  # for the next Accelerator of this process
    if any(by_launch.values()) and not torch.cuda.is_available():  # which accelerate takes for granted with these
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    if plugin is not None:
        return of_fsdp(_of_plugin(plugin))
    if by_launch["FSDP"]:
        return of_fsdp(_of_variables("FSDP_"))
    if deepspeed is None and not by_launch["DEEPSPEED"]:
        return None
    if isinstance(deepspeed, Mapping):
        raise NotImplementedError("several DeepSpeed plugins are not supported: pass one deepspeed_plugin")
    if deepspeed is not None:
        return of_deepspeed(deepspeed.deepspeed_config)
    given = _of_variables("ACCELERATE_DEEPSPEED_")
    clip = os.environ.get("ACCELERATE_GRADIENT_CLIPPING")
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    return of_deepspeed({**given, "gradient_clipping": clip, "gradient_accumulation_steps": steps}, by_names=True)


def _is_launched(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" or os.environ.get(_TAKEN) == name


def of_fsdp(given: Mapping[str, Any], source: str = "accelerate's FSDP configuration") -> Settings:
    """Convert settings by accelerate's names without `fsdp_`; values may be text."""
    made = Settings(source)
    for name in given:
        if name not in _KNOWN:
            raise ValueError(f"unknown FSDP setting {name!r}{near(name, sorted(_KNOWN))}")
    if int(given.get("version") or 1) == 2:
        made.zero = 3 if _truth(given.get("reshard_after_forward", True)) else 2
        made.rows.append(("reshard_after_forward", str(given.get("reshard_after_forward", True)), f"zero={made.zero}"))
    else:
        strategy = str(given.get("sharding_strategy") or "FULL_SHARD").upper()
        strategy = _NUMBERS[int(strategy) - 1] if strategy in "12345" else strategy
        if strategy not in _STRATEGIES:
            raise ValueError(f"sharding_strategy must be one of {', '.join(_NUMBERS)}, got {strategy!r}")
        made.zero, in_rows = _STRATEGIES[strategy]
        hosts = int(os.environ.get("WORLD_SIZE") or 1) // max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
        if in_rows and hosts > 1:
            raise NotImplementedError(
                f"sharding_strategy={strategy} over {hosts} hosts: pass wrap_options={{'device_mesh': mesh}} with a mesh of "
                "(hosts, ranks per host), and sharding_strategy FULL_SHARD"
            )
        made.rows.append(("sharding_strategy", strategy, f"zero={made.zero}"))
    _units_of(given, made)
    if _truth(given.get("offload_params", False)):
        if made.zero:
            made.wrap_options["offload"] = "cpu"
        made.rows.append(
            ("offload_params", "true", "offload='cpu': the optimizer's state; parameters stay on their device")
        )
    if _truth(given.get("activation_checkpointing", False)):
        offloads = _truth(given.get("activation_checkpointing_offload", False))
        made.checkpoints = {"offload": "cpu" if offloads else None}
        here = "sw.checkpoint_units(model" + (", offload='cpu')" if offloads else ")")
        made.rows.append(("activation_checkpointing", "true", here))
    if given.get("ignored_modules") not in (None, "", "None"):
        raise NotImplementedError(
            "ignored_modules of accelerate's FSDP configuration: pass wrap_options={'ignored_params': names}"
        )
    for name, why in _NO_EFFECT.items():
        if name in given and why:
            made.rows.append((name, str(given[name]), f"no effect: {why}"))
    return made


def _units_of(given: Mapping[str, Any], made: Settings) -> None:
    policy = str(given.get("auto_wrap_policy") or "NO_WRAP").upper()
    below = "no effect below zero=3"
    if policy == "TRANSFORMER_BASED_WRAP":
        named = given.get("transformer_cls_to_wrap") or ()
        names = tuple(each.strip() for each in (named.split(",") if isinstance(named, str) else named))
        here = "units='auto': repeated blocks" if not names else f"units: {', '.join(names)}"
        made.units = names if made.zero == 3 else ()
        made.rows.append(("transformer_cls_to_wrap", ", ".join(names) or "None", here if made.zero == 3 else below))
    elif policy == "SIZE_BASED_WRAP":
        numel = int(given.get("min_num_params") or 0)
        if made.zero == 3 and numel:
            made.wrap_options["units"] = max(numel * 4 / 2**20, 2**-10)
        here = "units: their least size in MiB, of float32"
        made.rows.append(("min_num_params", str(numel), here if made.zero == 3 else below))
    elif policy != "NO_WRAP":
        raise ValueError(f"auto_wrap_policy must be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP, got {policy!r}")


def of_deepspeed(
    given: Any, *, by_names: bool = False, source: str = "accelerate's DeepSpeed configuration"
) -> Settings:
    """Convert a DeepSpeed JSON, or with `by_names` accelerate's own names of its keys (zero_stage, ...)."""
    config = _of_names(given) if by_names else load_config(given)
    config = _without_auto({key: value for key, value in config.items() if key != "train_batch_size"})
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise NotImplementedError(
                f"the {name} section of {source}: make the {name} in the program; accelerate's Dummy{name.title()[:5]} has none"
            )
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    found = plan(config, int(os.environ.get("WORLD_SIZE") or 1))
    wrap = {name: value for name, value in found.wrap.items() if name not in ("zero", "precision")}
    made = Settings(source, zero=found.wrap["zero"], wrap_options=wrap, clip_grad_norm=found.clip_grad_norm)
    made.accumulation_steps = found.accumulation_steps if "gradient_accumulation_steps" in config else None
    made.mixed_precision = next((n for n in ("bf16", "fp16") if (config.get(n) or {}).get("enabled") is True), None)
    made.rows += [(row.key, str(row.value), row.text) for row in found.rows]
    return made


def _of_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON of accelerate's short names."""
    file = given.get("config_file")
    if file not in (None, "", "None"):
        return load_config(file)
    zero: dict[str, Any] = {"stage": int(given.get("zero_stage") or 2)}
    for name in ("offload_optimizer", "offload_param"):
        device = given.get(f"{name}_device")
        if device not in (None, "", "none", "None"):
            zero[name] = {"device": device, **({"nvme_path": path} if (path := given.get(f"{name}_nvme_path")) else {})}
    config: dict[str, Any] = {"zero_optimization": zero}
    clip, steps = given.get("gradient_clipping"), given.get("gradient_accumulation_steps")
    if clip not in (None, "", "none", "None"):
        config["gradient_clipping"] = float(clip)
    if steps not in (None, "", "auto"):
        config["gradient_accumulation_steps"] = int(steps)
    return config


def _without_auto(value: Any) -> Any:
    """Return a configuration without the values that are "auto": accelerate fills them from the program."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_auto(each) for key, each in value.items() if each != "auto"}


def of_file(config: Mapping[str, Any], source: str) -> Settings:
    """Convert a file of `accelerate config`. Raise ValueError if it names neither plugin."""
    kind = config.get("distributed_type")
    if kind == "FSDP":
        section = config.get("fsdp_config") or {}
        given = {name.removeprefix("fsdp_"): value for name, value in section.items()}
        given["transformer_cls_to_wrap"] = given.pop("transformer_layer_cls_to_wrap", None)
        return of_fsdp({name: value for name, value in given.items() if value is not None}, source)
    if kind == "DEEPSPEED":
        section = dict(config.get("deepspeed_config") or {})
        renamed = {name.removeprefix("deepspeed_"): value for name, value in section.items()}
        return of_deepspeed(renamed, by_names=True, source=source)
    raise ValueError(f"{source}: distributed_type is {kind!r}, and only FSDP and DEEPSPEED have settings to convert")


def _of_variables(prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}


def _of_plugin(plugin: Any) -> dict[str, Any]:
    """Return the settings of a FullyShardedDataParallelPlugin by their names in variables."""
    names = {
        "fsdp_version": "version",
        "cpu_offload": "offload_params",
        "transformer_cls_names_to_wrap": "transformer_cls_to_wrap",
    }
    found = {}
    for field in dataclasses.fields(plugin):
        name, value = names.get(field.name, field.name), getattr(plugin, field.name)
        if name in _KNOWN and value is not None:
            found[name] = value.name if isinstance(value, enum.Enum) else value
    policy = found.get("auto_wrap_policy")
    if callable(policy) and not isinstance(policy, str):  # accelerate has made a function of the name
        kind = getattr(getattr(policy, "func", policy), "__name__", "")
        if kind not in ("transformer_auto_wrap_policy", "size_based_auto_wrap_policy"):
            raise NotImplementedError("auto_wrap_policy as a function: pass wrap_options={'units': ...} instead")
        found["auto_wrap_policy"] = "SIZE_BASED_WRAP" if kind.startswith("size") else "TRANSFORMER_BASED_WRAP"
    # FSDP1's CPUOffload, or FSDP2's OffloadPolicy, of which CPUOffloadPolicy offloads
    offload = found.get("offload_params")
    kinds = [kind.__name__ for kind in type(offload).__mro__]
    found["offload_params"] = getattr(offload, "offload_params", "CPUOffloadPolicy" in kinds or offload is True)
    return found


def _truth(value: Any) -> bool:
    return str(value).strip().lower() in ("1", "true", "yes", "on")
