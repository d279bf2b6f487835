"""Compressed means, element by element: encode every contribution, fold in rank order, encode the result."""

from collections.abc import Sequence

import torch


def half_mean(contributions: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the mean of float32 tensors of one shape, through `dtype`."""
    factor = torch.tensor(1 / len(contributions))
    total = (contributions[0] * factor).to(dtype).float()
    for contribution in contributions[1:]:
        total = total + (contribution * factor).to(dtype).float()
    return total.to(dtype).float()


def block_mean(contributions: Sequence[torch.Tensor], block: int, levels: int) -> torch.Tensor:
    """Return the mean of float32 tensors of one shape, through block-scaled integers."""
    total = through_blocks(contributions[0], block, levels)
    for contribution in contributions[1:]:
        total = total + through_blocks(contribution, block, levels)
    return through_blocks(total * torch.tensor(1 / len(contributions)), block, levels)


def through_blocks(tensor: torch.Tensor, block: int, levels: int) -> torch.Tensor:
    """Encode and decode a tensor."""
    parts, most = [], torch.tensor(float(levels))
    for part in tensor.flatten().split(block):
        greatest = part.abs().max()
        codes = torch.round(part * (most / greatest)) if greatest >= 2.0**-120 else torch.zeros_like(part)
        parts.append((greatest / most) * (codes + 0.0))  # integers have no -0
    return torch.cat(parts).view(tensor.shape)


class BlockFeedback:
    """A parameter's block means with error feedback on every rank.

    One rank takes the rounding error of the mean: `owner(element)` is the rank in whose slice a block's first element
    lies.
    """

    def __init__(self, numel: int, world_size: int, block: int, levels: int, owners: Sequence[int]) -> None:
        self.errors = [torch.zeros(numel) for _ in range(world_size)]
        self.block, self.levels, self.owners = block, levels, owners

    def mean(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        wanted = [c.flatten() + e for c, e in zip(contributions, self.errors)]
        sent = [through_blocks(each, self.block, self.levels) for each in wanted]
        total = sent[0]
        for each in sent[1:]:
            total = total + each
        mean = total * torch.tensor(1 / len(sent))
        result = through_blocks(mean, self.block, self.levels)
        self.errors = [each - said for each, said in zip(wanted, sent)]
        rest = (mean - result) * len(sent)
        for start in range(0, mean.numel(), self.block):
            owner = self.owners[start]
            self.errors[owner][start : start + self.block] += rest[start : start + self.block]
        return result.view(contributions[0].shape)
