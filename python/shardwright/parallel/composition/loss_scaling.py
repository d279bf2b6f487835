"""Loss scaling for modules with DTensors: one agreement about overflow of all ranks with a part of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..._engine import Error
from ...comm.agreement import gather_answers
from ...gradients.sharded_gradient import unscale_on_this_rank
from ...torch_compat.dtensor import held_tensor, is_dtensor, waited
from ...torch_compat.optimizers import unscale_by
from ..replica import Replica, live_replicas

_LABEL = "whether a gradient overflowed"


def install() -> None:
    """Make GradScaler unscale the gradients of wrapped modules with DTensors through this file."""
    unscale_by(_unscale)


@torch.no_grad()
def _unscale(
    optimizer: torch.optim.Optimizer, inverse_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor] | None:
    """Unscale gradients as torch's GradScaler, over all ranks; None if no DTensors are stepped on. Collective."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    engines = [each for each in live_replicas() if any(map(each.holds, parameters))]
    if all(each.model_ranks is None for each in engines):
        return None
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype == torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")  # torch's wording
        held = waited(held_tensor(gradient)) if is_dtensor(gradient) else gradient
        if held.is_sparse and held.dtype == torch.float16:  # sums of equal indices may overflow
            held = parameter.grad = held.coalesce()
        held = held._values() if held.is_sparse else held
        lists.setdefault((gradient.device, gradient.dtype), []).append(held)
    devices = {device for device, _ in lists} or {found_inf.device}  # a rank without gradients answers, too
    found = {device: found_inf.to(device, copy=True) for device in devices}

    def overflowed() -> bool:
        for (device, _), gradients in lists.items():
            unscale_on_this_rank(gradients, found[device], inverse_scale.to(device))
        return any(bool(each) for each in found.values())

    if _any_rank(engines, overflowed):
        for each in found.values():
            each.fill_(1.0)
    return found


def _any_rank(engines: Sequence[Replica], overflowed: Callable[[], bool]) -> bool:
    """Return True if any rank of the engines' groups and meshes overflowed; if one raises, all raise. Collective."""
    found: bool | None = None
    failure: Error | None = None

    def answer() -> bytes:
        nonlocal found
        if failure is not None:
            raise failure
        found = overflowed() if found is None else found
        return bytes([found])

    for engine in engines:
        try:
            if engine.zero >= 2:  # below, its ranks have equal gradients
                engine.gradients.announce("vote")
                found = b"\1" in gather_answers(engine.group.comm, answer, _LABEL)
            if engine.model_ranks is not None:
                found = engine.model_ranks.any_rank(answer, _LABEL)
        except Error as error:
            failure = error
    if failure is not None:
        raise failure
    return b"\1" == answer()
