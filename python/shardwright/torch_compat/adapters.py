"""peft's adapters by the attributes of their modules: which tensors make which weight of the base model. Imports no peft."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["Made", "has_adapters", "merged_names"]

#: what peft puts before the names of the base model
_PREFIX = "base_model.model."
_LOW = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Made:
    """A weight of the base model: its tensor's name, and (A, B, scale, is transposed) of each adapter to add, by name."""

    base: str
    adapters: tuple[tuple[str, str, float, bool], ...] = ()

    @property
    def sources(self) -> list[str]:
        return [self.base, *(name for a, b, *_ in self.adapters for name in (a, b))]

    def add(self, weight: torch.Tensor, factors: Sequence[torch.Tensor]) -> None:
        """Add the adapters' products to the weight, with the bits of peft's merge. `factors`: A and B of each."""
        for (_, _, scale, is_transposed), low, high in zip(self.adapters, factors[::2], factors[1::2]):
            dtype = high.dtype
            casts = dtype in _LOW and high.device.type == "cpu"  # as peft multiplies there
            product = high.float() @ low.float() if casts else high @ low
            product = (product.t() if is_transposed else product) * scale
            weight += product.to(dtype) if casts else product


def has_adapters(module: torch.nn.Module) -> bool:
    """Return True for a module of peft, or one with peft's layers."""
    return any(hasattr(each, "lora_A") and hasattr(each, "base_layer") for each in module.modules())


def merged_names(module: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, Made]:
    """Return the weights of the base model by its names, each once. Raise NotImplementedError for other adapters than LoRA's."""
    adapters: dict[str, Made] = {}
    dropped: list[str] = []
    renamed: list[tuple[str, str]] = []
    for kind in {str(getattr(each, "peft_type", "LORA")) for each in getattr(module, "peft_config", {}).values()}:
        if kind.rpartition(".")[2] != "LORA":
            raise NotImplementedError(f"merge_lora: adapters of the type {kind} are not LoRA: merge them with peft")
    for place, each in module.named_modules():
        if hasattr(each, "modules_to_save") and hasattr(each, "original_module"):
            used = _active(each)
            dropped += [f"{place}.original_module."] if used else []
            dropped += [f"{place}.modules_to_save.{name}." for name in each.modules_to_save if name not in used]
            renamed += [(f"{place}.modules_to_save.{name}.", f"{place}.") for name in used]
            renamed += [] if used else [(f"{place}.original_module.", f"{place}.")]
        if not (hasattr(each, "base_layer") and hasattr(each, "lora_A")):
            continue
        adapters[f"{place}.base_layer.weight"] = Made(f"{place}.base_layer.weight", _factors(place, each))
        renamed.append((f"{place}.base_layer.", f"{place}."))
        dropped += [f"{place}.{n}" for n, _ in each.named_children() if n != "base_layer"]
        dropped += [f"{place}.{n}" for n in each._parameters]
    found = {}
    for name in named:
        if any(name == each or name.startswith(each if each.endswith(".") else f"{each}.") for each in dropped):
            continue
        new = next((f"{ours}{name[len(theirs) :]}" for theirs, ours in renamed if name.startswith(theirs)), name)
        found[new.removeprefix(_PREFIX)] = adapters.get(name, Made(name))
    return found


def _active(each: Any) -> list[str]:
    names = getattr(each, "active_adapters", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name in each.modules_to_save]


def _factors(place: str, each: Any) -> tuple[tuple[str, str, float, bool], ...]:
    """Return the active adapters of a layer of LoRA that are not in its weight yet."""
    found: list[tuple[str, str, float, bool]] = []
    for name in () if getattr(each, "disable_adapters", False) else each.active_adapters:
        low, high = (getattr(each, key)[name] if name in getattr(each, key) else None for key in ("lora_A", "lora_B"))
        odd = next((key for key in ("lora_embedding_A", "lora_magnitude_vector") if name in getattr(each, key, ())), "")
        variant = getattr(each, "lora_variant", {})
        odd = odd or ("a variant of LoRA" if name in variant else "")
        odd = odd or ("a bias" if getattr(high, "bias", None) is not None else "")
        if low is not None and low.weight.dim() != 2:
            odd = f"factors of {low.weight.dim()} dimensions"
        if odd:
            raise NotImplementedError(
                f"merge_lora: {place!r} has {odd}, and LoRA of linear layers alone is added up: merge with peft"
            )
        if low is not None and name not in getattr(each, "merged_adapters", ()):
            names = f"{place}.lora_A.{name}.weight", f"{place}.lora_B.{name}.weight"
            found.append((*names, float(each.scaling[name]), bool(getattr(each, "fan_in_fan_out", False))))
    return tuple(found)
