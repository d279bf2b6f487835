"""Learning rates for a global batch that grows with the number of ranks: `sw.scale_lr`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..options.checks import count

_RULES = {"linear": float, "sqrt": math.sqrt}
_SCALE = "lr_scale"


class ScaledLR(torch.optim.lr_scheduler.LRScheduler):
    """The scheduler that `scale_lr` returns."""

    def __init__(self, optimizer: torch.optim.Optimizer, world_size: int, rule: str, warmup_steps: int) -> None:
        self.world_size, self.warmup_steps = world_size, warmup_steps
        self.target = _RULES[rule](world_size)
        #: the ramp begins with this scale at this step
        self.begin, self.begin_step = 1.0, 0
        super().__init__(optimizer)

    def scale(self) -> float:
        """Return the factor of the rates at the current step."""
        share = min(1.0, (self.last_epoch - self.begin_step) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.begin + (self.target - self.begin) * share

    def get_lr(self) -> list[Any]:
        """Return the rates of the current step. The scale that a group's rate has is in the group, and saved with it."""
        scale, rates = self.scale(), []
        for group in self.optimizer.param_groups:
            rates.append(group["lr"] * (scale / group.get(_SCALE, 1.0)))
            group[_SCALE] = scale
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the scale and the world size that it belongs to."""
        ramp = {"begin": self.begin, "begin_step": self.begin_step, "target": self.target}
        return {"last_epoch": self.last_epoch, "scale": self.scale(), "world_size": self.world_size, **ramp}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the ramp. After a change of the target ramp up from the scale reached; a lower target holds at once."""
        self.last_epoch = int(state_dict["last_epoch"])
        if state_dict["target"] == self.target:
            self.begin, self.begin_step = state_dict["begin"], state_dict["begin_step"]
        else:
            self.begin, self.begin_step = min(state_dict["scale"], self.target), self.last_epoch
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate


def scale_lr(
    optimizer: torch.optim.Optimizer, world_size: int, rule: str = "linear", warmup_steps: int = 0
) -> torch.optim.lr_scheduler.LRScheduler:
    """Scale an optimizer's learning rates to `world_size` times the batch of one rank.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its learning rates are those for one rank's batch.
    world_size : int
        The ranks whose batches make one step, at least 1.
    rule : "linear" or "sqrt"
        "linear" multiplies rates by world_size, for SGD; "sqrt" by its square root, for Adam and its kin.
    warmup_steps : int, default 0
        Steps over which rates grow linearly from those of one rank; 0: scaled from the first step.

    Returns
    -------
    torch.optim.lr_scheduler.LRScheduler
        Call its step() after optimizer.step(), and save it with the optimizer: a Checkpointer takes `scheduler=`. If a run
        goes on at another world size, rates ramp up from those reached over `warmup_steps`, or drop at once if there are
        fewer ranks. Schedulers that multiply the current rate, such as CosineAnnealingLR, may run beside it; LambdaLR,
        which sets it, may not.

    Raises
    ------
    ValueError
        For another rule, or numbers out of range.

    Notes
    -----
    "sqrt" changes rates alone: Malladi et al. also scale 1 - beta1 and 1 - beta2 by world_size, and eps by its inverse root. With a
    fixed global batch (`sw.elastic.batches`) rates need no scale.

    References
    ----------
    Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017, section 2 (linear, and the ramp).
    Krizhevsky, *One weird trick for parallelizing convolutional neural networks*, 2014, section 5 (the root). Malladi, Lyu,
    Panigrahi and Arora, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, 2022 (the root for Adam).

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> scheduler = sw.scale_lr(optimizer, 8, warmup_steps=100)
    >>> scheduler.get_last_lr()
    [0.1]
    """
    if rule not in _RULES:
        raise ValueError(f'scale_lr: rule must be "linear" or "sqrt", not {rule!r}')
    count(1, float("inf"), "a number of ranks, at least 1")("scale_lr: world_size", world_size)
    count(0, float("inf"), "a number of steps")("scale_lr: warmup_steps", warmup_steps)
    return ScaledLR(optimizer, world_size, rule, warmup_steps)
