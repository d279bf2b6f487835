"""Clipping by the global norm, with the same bits at every stage: the sum of squares is exact (docs/design/optim.md), so it
does not depend on how gradients are cut, and every element is scaled by the same number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _engine
from .fully_shard import wrapper_of
from .gradients import as_real
from .replica import Replica
from .sharded_gradient import ShardedGradient


def clip_grad_norm_(
    module_or_parameters: torch.nn.Module | Iterable[torch.Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales averaged gradients so that their 2-norm is at most `max_norm`; collective at zero >= 1.

    Parameters
    ----------
    module_or_parameters : Module or iterable of Tensor
        A wrapped module at any stage; or a bare one, or parameters, whose gradients are whole.
    max_norm : float
        At least 0.
    error_if_nonfinite : bool
        Raise, on every rank alike, instead of scaling by a norm that is infinite or NaN.

    Returns
    -------
    Tensor
        The norm before, a float32 scalar: the same number at every stage, bucket size and world size for equal gradients.

    Raises
    ------
    ValueError
        max_norm is negative or NaN.
    RuntimeError
        The norm is not finite, and that was to be an error.

    Notes
    -----
    Scale: max_norm / (norm + 1e-6) where that is below 1, as torch.nn.utils.clip_grad_norm_. Cost: one pass over the
    gradients (at zero >= 1 over this rank's slices), 1,112 bytes a rank, and a second pass where the scale is below 1. On a GPU
    the host waits for the norm.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be at least 0, got {max_norm!r}")
    replica = _replica_of(module_or_parameters)
    if replica is not None:
        replica.close_pending()
    if replica is not None and replica.zero:
        norm = _norm_of_slices(replica)
        gradients = [p.grad for p in replica.table.parameters if p.grad is not None]
    else:
        parameters: Iterable[torch.Tensor]
        if replica is not None:
            parameters = replica.table.parameters
        elif isinstance(module_or_parameters, torch.nn.Module):
            parameters = module_or_parameters.parameters()
        else:
            parameters = module_or_parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        if replica is not None and replica.link is not None:
            norm = replica.link.norm(gradients)
        else:
            norm = _engine.norm_value([_engine.norm_sum([_real(g) for g in gradients])])
    if error_if_nonfinite and not abs(norm) < float("inf"):
        raise RuntimeError(f"the gradients' norm is {norm}: they cannot be clipped")
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return torch.tensor(norm, dtype=torch.float32, device="cpu")


def local_norms(module: torch.nn.Module) -> dict[str, float]:
    """2-norms of what this rank holds of each averaged gradient, by the bare module's names: whole ones at zero=0, else those of its
    slices, 0.0 where it owns none. Parameters without a gradient are left out. Not collective.
    """
    replica = _replica_of(module)
    if replica is None:
        raise _engine.Error("local_norms needs a wrapped module, or the outermost one that was fully sharded")
    found = {}
    for index, (name, parameter) in enumerate(zip(replica.table.names, replica.table.parameters)):
        held = replica.gradient_slice(index) if replica.zero else parameter.grad
        if held is not None:
            found[name] = float(torch.linalg.vector_norm(held.detach().double() if held.is_floating_point() else held))
    return found


def _replica_of(module: Any) -> Replica | None:
    wrapped = wrapper_of(module)
    return None if wrapped is None else wrapped._engine()


def _norm_of_slices(replica: Replica) -> float:
    slices = [replica.gradient_slice(index) for index in range(len(replica.table.parameters))]
    if replica.zero == 1 and replica.is_joining:  # who has joined keeps no gradients; here they are whole
        gradients = [parameter.grad for parameter in replica.table.parameters if parameter.grad is not None]
        if replica.link is not None:
            return replica.link.norm(gradients)
        return _engine.norm_value([_engine.norm_sum([_real(gradient) for gradient in gradients])])
    replica.announce("norm")
    return replica.norm_of(slices)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, ShardedGradient):
        raise _engine.Error("clip_grad_norm_ needs the wrapped module, not its parameters, at zero >= 2")
    return as_real(gradient)
