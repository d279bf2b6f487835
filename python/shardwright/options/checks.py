"""Checks of one value of an option: each is a function of the option's name and its value, and raises a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from .places import expanded

Check = Callable[[str, Any], object]


def among(*known: Any) -> Check:
    """Return a check that a value is one of `known`; a switch raises TypeError, others ValueError."""
    *most, last = map(repr, known)
    kind = TypeError if known == (True, False) else ValueError

    def check(name: str, value: Any) -> None:
        alike = (k for k in known if isinstance(value, type(k)) and isinstance(value, bool) == isinstance(k, bool))
        if value not in alike:
            raise kind(f"{name} must be {', '.join(most)} or {last}, got {value!r}")

    return check


switch = among(True, False)


def number(unit: str = "", largest: float = math.inf, also: str = "", never: tuple[Any, ...] = ()) -> Check:
    """Return a check that a value is above 0 and at most `largest`, or one of `never`, which `also` describes."""
    what = f"{also}a number{unit and f' of {unit}'} above 0{'' if largest == math.inf else f' and at most {largest:g}'}"

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool) and value in never:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be {what}, got {value!r}")
        if not 0 < value <= largest:
            raise ValueError(f"{name} must be {what}, got {value!r}")

    return check


def count(smallest: int, largest: float, what: str) -> Check:
    """Return a check that a value is an integer in a range, which `what` describes."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
            raise ValueError(f"{name} must be {what}, got {value!r}")

    return check


def check_units(name: str, units: Any) -> None:
    """Check units=, the cut of a module into units at zero=3."""
    if isinstance(units, bool) or not (
        units in ("auto", "size") if isinstance(units, str) else isinstance(units, (int, float)) or unit_types(units)
    ):
        raise TypeError(
            f"units must be 'auto', 'size', a number of MiB, a subclass of torch.nn.Module or a collection of them, got {units!r}"
        )
    if isinstance(units, (int, float)) and not units > 0:
        raise ValueError(f"units, as a number of MiB, must be above 0, got {units!r}")


def unit_types(units: Any) -> tuple[type, ...]:
    """Return the module classes that `units` names; empty if it names none."""
    found = (units,) if isinstance(units, type) else tuple(units) if isinstance(units, Collection) else ()
    return found if all(isinstance(each, type) and issubclass(each, torch.nn.Module) for each in found) else ()


def offload_place(offload: Any, part: str) -> Any:
    """Return where `part` lies, "parameters" or "optimizer", of a wrapper's offload=. A string alone is the optimizer's."""
    if not isinstance(offload, Mapping):
        return offload if part == "optimizer" else None
    for key in offload:
        if key not in ("parameters", "optimizer"):
            raise ValueError(f"offload, as a mapping, may have the keys 'parameters' and 'optimizer', got {key!r}")
    return offload.get(part)


def offload_kind(offload: Any, name: str = "offload") -> str | None:
    """Return None, "cpu" or "nvme" of one place. Raise ValueError for any other value."""
    if offload is None or (isinstance(offload, str) and offload == "cpu"):
        return offload
    if isinstance(offload, str) and offload.startswith("nvme:") and len(offload) > len("nvme:"):
        return "nvme"
    raise ValueError(f"{name} must be None, 'cpu' or 'nvme:<folder>', got {offload!r}")


def offload_kinds(offload: Any) -> tuple[str | None, str | None]:
    """Return offload_kind() of parameters and of the optimizer."""
    if not isinstance(offload, Mapping):
        return None, offload_kind(offload)
    parameters, optimizer = (
        offload_kind(offload_place(offload, part), f"offload[{part!r}]") for part in ("parameters", "optimizer")
    )
    return parameters, optimizer


def offload_folder(offload: Any) -> str | None:
    """Return the folder of "nvme:<folder>"."""
    return expanded("offload", offload.removeprefix("nvme:")) if offload_kind(offload) == "nvme" else None
