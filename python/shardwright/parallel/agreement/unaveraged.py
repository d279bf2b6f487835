"""Parameters that an optimizer steps on at zero=0 beside those of wrapped modules, and that no wrapper averages.

A loss may have parameters (class centres, a temperature), which its optimizer gets with the wrapped module's. Without an
average they drift apart in silence. So ranks compare the first gradient of each that is not zero: equal bits mean that
torch's wrapper, or the program itself, averages them. The digest travels with the next round (sw_reducer_note_step),
which every rank runs anyway: a rank that skips a step alone misses no exchange.
"""

from __future__ import annotations

import gc
import json
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ..._engine import Error
from ...torch_compat.dtensor import is_dtensor
from .replica_check import digest_of

__all__ = ["UnaveragedCheck"]


class UnaveragedCheck:
    """The check of one module's optimizers. is_known(parameter): it is one of a wrapped module."""

    def __init__(self, label: str, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._label, self._is_known = label, is_known
        #: by optimizer: the number of its groups, and the parameters without a gradient so far: both make note() due
        self.waiting: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, torch.Tensor]]] = weakref.WeakKeyDictionary()
        #: by optimizer: the parameters that had their first gradient when it was last noted, and its digest
        self._last: weakref.WeakKeyDictionary[Any, dict[str, tuple[torch.Tensor, int]]] = weakref.WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the digest of the first gradients in the step that begins, 32 bits; 0 if there are none."""
        groups, waiting = self.waiting.get(optimizer, (0, {}))
        if groups != len(optimizer.param_groups):
            waiting = self._suspects(optimizer)
            self.waiting[optimizer] = len(optimizer.param_groups), waiting
        last = {place: (p, found) for place, p in waiting.items() if (found := _digest(p.grad))}
        self._last[optimizer] = last
        for place in last:
            del waiting[place]
        return zlib.crc32(repr([(place, found) for place, (_, found) in last.items()]).encode()) if last else 0

    def forget(self) -> None:
        """Begin again, on all ranks, after a join in which not all ranks stepped."""
        self.waiting.clear()
        self._last.clear()

    def explain(self, gather: Callable[[bytes, str], list[bytes]], contributes: bool = True) -> None:
        """Raise Error if a gradient of the last step differs between ranks. Collective; called after digests differed.

        `contributes`: False for a joined rank, which did not take the last step.
        """
        mine = {
            f"{number}:{place}": (found, _name_of(p), tuple(p.shape))
            for number, last in enumerate(self._last.values())
            for place, (p, found) in last.items()
        }
        told = gather(json.dumps(mine).encode() if contributes else b"", "gradients that no wrapper averages")
        said = [json.loads(each) for each in told if each]
        for place in sorted({place for each in said for place in each}):
            values = [each.get(place, [0])[0] for each in said]
            if any(value != values[0] for value in values):
                name, shape = next(each[place][1:] for each in said if place in each)
                raise Error(
                    f"optimizer: {name!r} of shape {tuple(shape)} ({place.partition(':')[2]}) is not a parameter of the wrapped {self._label}, "
                    "and its gradients of the last step differed between ranks, so they are not averaged and ranks drift apart: "
                    "wrap one ModuleList of both modules, sw.wrap the other module too, average its gradients before each "
                    "step, or give it an optimizer of its own if each rank trains its own"
                )

    def _suspects(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return parameters by place, the same places on all ranks: a rank alone may have frozen one."""
        return {
            f"group {position}, parameter {number}": p
            for position, group in enumerate(optimizer.param_groups)
            for number, p in enumerate(group["params"])
            if not is_dtensor(p) and not self._is_known(p)
        }


def _digest(gradient: torch.Tensor | None) -> int:
    """Return a number that is 0 for no gradient or zeros, and else differs if bits differ."""
    if gradient is None:
        return 0
    dense = gradient.detach().to_dense()
    return int(digest_of(dense)) or 1 if dense.any() else 0


def _name_of(parameter: torch.Tensor) -> str:
    """Return "Class.name" from the module that holds a parameter, for a message; the tensor's class if none does."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            for name, held in each.__dict__.get("_parameters", {}).items():
                if held is parameter:
                    return f"{type(each).__name__}.{name}"
    return type(parameter).__name__
