"""Parameters that an optimizer steps on at zero=0 beside those of wrapped modules, and that no wrapper averages.

A loss may have parameters (class centres, a temperature), which its optimizer gets with the wrapped module's. Without an
average they drift apart in silence. So their first gradients that are not zero are compared between ranks: equal bits
mean that torch's wrapper, or the program itself, averages them.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..._engine import Error
from ...torch_compat.dtensor import is_dtensor

__all__ = ["UnaveragedCheck"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_PRIME = 8191


class UnaveragedCheck:
    """The check of one module's optimizers.

    Parameters
    ----------
    label : str
        The wrapped module's class.
    is_known : callable
        Tells whether a parameter is one of a wrapped module.

    Attributes
    ----------
    checked : WeakKeyDictionary
        By optimizer, the number of groups that need no more checks.
    """

    def __init__(self, label: str, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._label, self._is_known = label, is_known
        self.checked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer, gather: Callable[[bytes, str], list[bytes]]) -> None:
        """Raise Error, the same on all ranks, for a gradient that differs between ranks.

        Collective until each such parameter has had a gradient; the groups then count as checked.
        """
        suspects = {
            f"group {position}, parameter {number}": p
            for position, group in enumerate(optimizer.param_groups)
            for number, p in enumerate(group["params"])
            if p.requires_grad and not is_dtensor(p) and not self._is_known(p)
        }
        if not suspects:
            self.checked[optimizer] = len(optimizer.param_groups)
            return
        mine = [_digest(p.grad) for p in suspects.values()]
        said = [json.loads(each) for each in gather(json.dumps(mine).encode(), "gradients that no wrapper averages")]
        for (place, parameter), values in zip(suspects.items(), zip(*said)):
            if any(value != values[0] for value in values):
                raise Error(
                    f"optimizer: {_name_of(parameter)!r} of shape {tuple(parameter.shape)} ({place}) is not a parameter of the "
                    f"wrapped {self._label}, and its gradients differ between ranks, so they are not averaged and ranks would "
                    "drift apart: wrap one ModuleList of both modules, sw.wrap the other module too, average its gradients "
                    "before each step, or give it an optimizer of its own if each rank trains its own"
                )
        if all(any(values) for values in zip(*said)):
            self.checked[optimizer] = len(optimizer.param_groups)


def _digest(gradient: torch.Tensor | None) -> int:
    """Return a number that is 0 for no gradient or zeros, and else differs if bits differ. Exact in any order of sums."""
    if gradient is None:
        return 0
    dense = gradient.detach().to_dense().contiguous()
    words = dense.reshape(-1).view(_WORDS[dense.element_size()]).to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device).remainder_(_PRIME).add_(1)
    return int((words * weights).sum())


def _name_of(parameter: torch.Tensor) -> str:
    """Return "Class.name" from the module that holds a parameter, for a message; the tensor's class if none does."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            for name, held in each.__dict__.get("_parameters", {}).items():
                if held is parameter:
                    return f"{type(each).__name__}.{name}"
    return type(parameter).__name__
