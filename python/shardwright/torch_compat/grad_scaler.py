"""GradScaler: its private method that unscales the gradients of an optimizer.

torch calls one kernel for each dtype of gradients, and a collective in each if the first gradient is a DTensor. It
refuses plain gradients beside DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: (optimizer, inverse of the scale, found_inf, allow_fp16) -> found_inf by device; None: torch's own method is used
Unscale = Callable[[torch.optim.Optimizer, torch.Tensor, torch.Tensor, bool], dict[torch.device, torch.Tensor] | None]


def unscale_by(unscale: Unscale) -> None:
    """Make every GradScaler call `unscale` first. Only the first call has an effect."""
    original = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if original is None or hasattr(original, "_shardwright"):
        return

    @functools.wraps(original)
    def method(
        self: Any,
        optimizer: torch.optim.Optimizer,
        inverse_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = unscale(optimizer, inverse_scale, found_inf, allow_fp16)
        return original(self, optimizer, inverse_scale, found_inf, allow_fp16) if found is None else found

    method._shardwright = True  # type: ignore[attr-defined]
    setattr(torch.amp.GradScaler, "_unscale_grads_", method)  # noqa: B010 # mypy has no other word for it
