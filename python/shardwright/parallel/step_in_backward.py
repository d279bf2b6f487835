"""Optimizer steps at the end of a backward, for torch's _apply_optimizer_in_backward, at zero=0.

torch's hooks step on a local gradient as soon as it exists. This module removes them at the first forward, as torch's
wrapper does. Each optimizer then steps after the round's means are complete, and its gradients become None. A backward
that does not synchronise steps nothing. Ignored parameters keep torch's hooks.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from .._engine import Error
from ..torch_compat.in_backward import optimizers_of, take_hooks

__all__ = ["adopt"]


def adopt(replica: Any) -> None:
    """Take over the steps of the module's optimizers of this kind. At zero >= 1, where steps are on slices, raise Error."""
    stepped = [(name, p) for name, p in zip(replica.table.names, replica.table.module_parameters) if optimizers_of(p)]
    if not stepped:
        return
    if replica.zero:
        raise Error(
            f"parameter {stepped[0][0]!r} has an optimizer that steps inside the backward (_apply_optimizer_in_backward), on the whole "
            f"parameter: zero={replica.zero} steps on slices after the backward; give sw.wrap(module, optimizer, zero={replica.zero}) an "
            "ordinary optimizer, or wrap with zero=0"
        )
    parameters = [parameter for _, parameter in stepped]
    take_hooks(parameters)
    replica.gradients.after_round.append(functools.partial(_step, list(map(weakref.ref, parameters))))


def _step(parameters: list[weakref.ref[torch.nn.Parameter]]) -> None:
    """Step the optimizers of parameters with a gradient, then set the gradient to None."""
    for reference in parameters:
        parameter = reference()
        if parameter is None or parameter.grad is None:
            continue
        for optimizer in optimizers_of(parameter):
            optimizer.step()
        parameter.grad = None
