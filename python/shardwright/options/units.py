"""The option units=: how a module is cut into units at zero=3."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

__all__ = ["check_units", "comparable", "unit_types"]


def check_units(units: Any) -> None:
    """Raise TypeError or ValueError unless `units` is a legal value of the option."""
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


def comparable(units: Any) -> Any:
    """Return the option in a form that ranks compare: types by sorted names."""
    types = unit_types(units)
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in types) if types else units
