"""Clipping by the global norm, with the same bits at every stage: the sum of squares is exact (docs/design/optim.md), so it
does not depend on how gradients are cut, and every element is scaled by the same number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _engine, device
from .device import DeviceLink
from .fully_shard import wrapper_of
from .gradients import as_real
from .optim import global_norm
from .replica import Replica, live_replicas
from .sharded_gradient import ShardedGradient


def clip_grad_norm_(
    module_or_parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales averaged gradients so that their 2-norm is at most `max_norm`; collective at zero >= 1.

    Parameters
    ----------
    module_or_parameters : Module, Tensor or iterable of Tensor
        A wrapped module at any stage; or a bare one, a parameter, or several, whose gradients are whole.
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
    the host waits for the norm; gradients of parameters on a GPU for which no wrapped module of this process works come down to the host.
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
        elif isinstance(module_or_parameters, torch.Tensor):  # iterable, too: of rows, which have no gradients
            parameters = [module_or_parameters]
        else:
            parameters = module_or_parameters
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = _norm_of_whole(gradients, replica)
    if error_if_nonfinite and not abs(norm) < float("inf"):
        raise RuntimeError(f"the gradients' norm is {norm}: they cannot be clipped")
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1:
        _scale(gradients, scale)
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
    if replica.zero == 1 and replica.is_joining:  # who has joined keeps no gradients; here they are whole
        replica.gradient_slices()  # or why they are not averaged
        return _norm_of_whole([p.grad for p in replica.table.parameters if p.grad is not None], replica)
    replica.announce("norm")
    return replica.norm_of(replica.gradient_slices)


def _norm_of_whole(gradients: list[torch.Tensor], replica: Replica | None) -> float:
    """On a GPU its kernels add up, where some wrapped module of this process has opened it; else the gradients come down."""
    real = [_real(gradient) for gradient in gradients]
    link = replica.link if replica is not None else _link_beside(real)
    if link is not None:
        return link.norm(real)
    return global_norm(each.cpu() for each in real)


def _link_beside(gradients: list[torch.Tensor]) -> DeviceLink | None:
    """Of the one GPU that has all of them."""
    there = {device.runtime.ordinal(each) if device.runtime.holds(each) else None for each in gradients}
    links = (replica.link for replica in live_replicas())
    return next((each for each in links if each is not None and there == {each.ordinal} and each.comm.is_alive), None)


def _scale(gradients: list[torch.Tensor], factor: float) -> None:
    """On a GPU by one launch for many, where that has mul_'s bits: torch's own for lists may round the factor to a half's dtype first."""
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        is_plain = type(gradient) is torch.Tensor and gradient.dtype in (torch.float32, torch.float64)
        if is_plain and device.runtime.holds(gradient):
            together.setdefault(gradient.dtype, []).append(gradient)
        else:
            gradient.mul_(factor)
    for each in together.values():
        torch._foreach_mul_(each, factor)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, ShardedGradient):
        raise _engine.Error("clip_grad_norm_ needs the wrapped module, not its parameters, at zero >= 2")
    return as_real(gradient)
