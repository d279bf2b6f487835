"""peft's adapters by the attributes of their modules: which tensors make which weight of the base model. Imports no peft."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

#: what peft puts before the names of the base model
_PREFIX = "base_model.model."
#: what peft calls the parts of its modules; no name of a base model has them
_OURS = re.compile(r"(^|\.)(lora_\w+|base_layer|original_module|modules_to_save|token_adapter)(\.|$)")
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
    """Return the weights of the base model by its names, each once. Raise NotImplementedError for adapters that it cannot add."""
    adapters: dict[str, Made] = {}
    dropped: list[str] = []
    renamed: list[tuple[str, str]] = []
    for kind in {str(getattr(each, "peft_type", "LORA")) for each in getattr(module, "peft_config", {}).values()}:
        if kind.rpartition(".")[2] != "LORA":
            raise NotImplementedError(f"merge_lora: adapters of the type {kind} are not LoRA: merge them with peft")
    for place, each in module.named_modules():
        if hasattr(each, "token_adapter"):
            raise _refusal(place, "a token_adapter")
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

    def is_dropped(name: str) -> bool:
        return any(name == each or name.startswith(each if each.endswith(".") else f"{each}.") for each in dropped)

    _check_unshared(module, adapters.values(), is_dropped)
    found = {}
    for name in filter(lambda each: not is_dropped(each), named):
        new = next((f"{ours}{name[len(theirs) :]}" for theirs, ours in renamed if name.startswith(theirs)), name)
        if _OURS.search(new):
            raise _refusal(name, "no place in the base model")
        found[new.removeprefix(_PREFIX)] = adapters.get(name, Made(name))
    return found


def _refusal(place: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"merge_lora: {place!r} has {what}, and LoRA of linear layers alone is added up: merge with peft"
    )


def _check_unshared(module: torch.nn.Module, made: Iterable[Made], is_dropped: Callable[[str], bool]) -> None:
    """Raise for a weight that adapters change, or that a copy replaces, under one of its names only."""
    names_of: dict[int, list[str]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(each), []).append(name)
    sharers = {name: names for names in names_of.values() for name in names}
    for name in (name for each in made if each.adapters for name in each.sources):
        if name not in sharers:
            raise _refusal(name.rpartition(".")[0], "no weight")
        if len(sharers[name]) > 1:
            raise _refusal(name, f"the memory of {next(each for each in sharers[name] if each != name)!r}")
    for names in names_of.values():
        lost, kept = ([each for each in names if is_dropped(each) is so] for so in (True, False))
        if lost and kept:
            raise _refusal(lost[0], f"the memory of {kept[0]!r}")


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
        odd = odd or ("adapters of a parameter" if hasattr(each, "parameter_name") else "")
        names = f"{place}.lora_A.{name}.weight", f"{place}.lora_B.{name}.weight"
        own = [n for n, _ in each.named_parameters() if not n.startswith("base_layer.") and n.split(".")[1:2] == [name]]
        odd = odd or next((n for n in own if f"{place}.{n}" not in names), "")
        if odd:
            raise _refusal(place, odd)
        if low is not None and name not in getattr(each, "merged_adapters", ()):
            found.append((*names, float(each.scaling[name]), bool(getattr(each, "fan_in_fan_out", False))))
    return tuple(found)
