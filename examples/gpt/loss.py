"""Cross-entropy in nats/byte, over one rank's rows and over the held-out rows of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt import ranks
from gpt.model import VOCABULARY

ROWS_AT_ONCE = 16  # rows of a validation pass, to bound its memory


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log p over the target bytes, a float32 scalar; both inputs are int64 (rows, context)."""
    logits = model(inputs).view(-1, VOCABULARY)
    return F.cross_entropy(logits, targets.reshape(-1), reduction="sum")


@torch.no_grad()
def validate(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the mean loss over the rows of all ranks, equal on all ranks."""
    chunks = zip(inputs.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE))
    local = sum(summed_loss(model, *chunk).item() for chunk in chunks)
    total, count = ranks.sum_over_ranks([local, targets.numel()])
    return total / count
