"""Names, forms and configurations under which transformers stores a model, by attributes of the model. Imports none of it."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..torch_compat.internals import (
    TorchDispatchMode,
    conversions_of_transformers,
    tied_by_transformers,
    tree_leaves,
)

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{u}{kind}": base**n for n, u in enumerate("KMGT", 1) for kind, base in (("B", 1000), ("IB", 1024))}


def bytes_of_size(size: int | str) -> int:
    """Return the bytes of a number or of a text such as "5GB". Raise ValueError for another."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip()) if isinstance(size, str) else None
    found = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if match and match[2].upper() in _UNITS:
        found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found < 1:
        raise ValueError(f'max_shard_size must be a number of bytes, or a text such as "5GB", got {size!r}')
    return found


def kept_name(bare: torch.nn.Module, names: Sequence[str]) -> str:
    """Return the name of several tied ones under which from_pretrained() finds the tensor."""
    keys = tied_by_transformers(bare)
    return next((name for name in names if not any(re.search(key, name) for key in keys)), names[0])


class Reversed(NamedTuple):
    """A stored tensor: its dtype and shape; the module's tensors that it is made of; whether it is the one of them itself."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    is_same: bool


class _Lineage(TorchDispatchMode):
    """Notes of which tensors each result is made."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._kept: list[Any] = [*named.values()]  # an id must not come back
        self.of: dict[int, tuple[str, ...]] = {id(each): (name,) for name, each in named.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = tree_leaves([args, kwargs or {}])
        sources = tuple(dict.fromkeys(name for each in leaves for name in self.of.get(id(each), ())))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and not any(each is given for given in leaves):
                self.of[id(each)] = sources
                self._kept.append(each)
        return made


def reverse(bare: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo what from_pretrained() did to names and tensors as it loaded them."""
    core = sys.modules.get("transformers.core_model_loading")
    if core is not None and hasattr(bare, "save_pretrained"):
        return core.revert_weight_conversion(bare, dict(named))
    rules = conversions_of_transformers(bare)
    return {_renamed(name, rules): each for name, each in named.items()}


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    """Return the stored name, by transformers' rules before version 5, which map stored names to the module's."""
    for stored, ours in rules.items():
        new, count = re.subn(ours, re.sub(r"\(.*\)|\\", "", stored.lstrip("^")), name)
        if count:
            return new
    return name


def reversed_names(bare: torch.nn.Module, like: Mapping[str, torch.Tensor]) -> dict[str, Reversed]:
    """Return what reverse() makes of tensors of these shapes and dtypes, by stored name, without a value."""
    named = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in like.items()}
    lineage = _Lineage(named)
    try:
        with lineage:
            made = reverse(bare, named)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise NotImplementedError(f"save_pretrained: transformers cannot reverse its conversion: {what}") from error
    found = {}
    for name in [n for n in made if id(made[n]) in lineage.of]:
        sources = lineage.of[id(made[name])]
        is_same = len(sources) == 1 and made[name] is named[sources[0]]
        found[name] = Reversed(made[name].dtype, tuple(made[name].shape), sources, is_same)
    order = {name: number for number, name in enumerate(named)}
    return dict(sorted(found.items(), key=lambda pair: min((order[name] for name in pair[1].sources), default=-1)))


def write_config(bare: Any, dtype: torch.dtype | None, folder: str) -> list[str]:
    """Write config.json and generation_config.json of a module that has them. Return their names."""
    before = set(os.listdir(folder))
    config: Any = getattr(bare, "config", None)
    base = getattr(bare, "get_base_model", None)
    model: Any = base() if callable(base) else bare
    if callable(getattr(config, "save_pretrained", None)):
        if hasattr(model, "save_pretrained"):
            config = copy.copy(config)  # the live one goes on
            config.dtype = str(dtype or getattr(model, "dtype", torch.float32)).removeprefix("torch.")
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)
        can_generate = getattr(model, "can_generate", None)
        if callable(can_generate) and can_generate() and getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    return sorted({*os.listdir(folder)} - before)
