"""Learning rates and loss scales by DeepSpeed's rules, as torch's LambdaLR and a plain object."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...options.checks import among

_Values = float | list[float]


class _Absolute(torch.optim.lr_scheduler.LambdaLR):
    """A LambdaLR with functions from steps taken to learning rates, instead of factors of the first rate.

    DeepSpeed's schedules count from -1: their first step repeats the first learning rate.
    """

    def get_lr(self) -> Any:
        return [function(self.last_epoch) for function in self.lr_lambdas]


def _each(optimizer: torch.optim.Optimizer, name: str, value: _Values) -> list[float]:
    """Return one value for each group of parameters."""
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} must be a number, or one for each of the {count} parameter groups, got {value!r}")
    return [float(each) for each in values]


def _warmup(kind: str, steps: int, step: int) -> float:
    """Return the progress of the warm-up at `step` < `steps`: 0 at the first rate, 1 at the largest."""
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)


def _check_warmup(steps: Any, kind: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, (int, float)) or steps < 0 or steps != int(steps):
        raise ValueError(f"warmup_num_steps must be a whole number of at least 0, got {steps!r}")
    among("log", "linear")("warmup_type", kind)
    return max(2, int(steps))


class WarmupLR(_Absolute):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps (at least 2), then a constant rate.

    Rates are numbers, or one for each parameter group; `warmup_max_lr=None` is the optimizer's rate. `warmup_type` is
    "log" or "linear".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: _Values = 0.0,
        warmup_max_lr: _Values | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self._steps, self._kind = _check_warmup(warmup_num_steps, warmup_type), warmup_type
        largest = optimizer.param_groups[0]["lr"] if warmup_max_lr is None else warmup_max_lr
        lows = _each(optimizer, "warmup_min_lr", warmup_min_lr)
        pairs = zip(lows, _each(optimizer, "warmup_max_lr", largest), strict=True)
        super().__init__(optimizer, [functools.partial(self._rate, low, high) for low, high in pairs])

    def _rate(self, low: float, high: float, taken: int) -> float:
        step = taken - 1
        if step < 0:
            return low
        progress = _warmup(self._kind, self._steps, step) if step < self._steps else self._after(step)
        return low + (high - low) * progress

    def _after(self, step: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A warm-up as WarmupLR, and a linear decay to the first rate at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: _Values = 0.0,
        warmup_max_lr: _Values = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self._total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after(self, step: int) -> float:
        return max(0.0, (self._total - step) / max(1.0, self._total - self._steps))


class WarmupCosineLR(_Absolute):
    """A warm-up to the optimizer's learning rate, then a half cosine to a fraction of it at `total_num_steps`.

    `warmup_min_ratio` and `cos_min_ratio` are fractions of the optimizer's rate at the start of the warm-up and at the
    end. `warmup_num_steps` and `warmup_type`: see WarmupLR.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self._total, self._low, self._end = total_num_steps, warmup_min_ratio, cos_min_ratio
        self._steps, self._kind = _check_warmup(warmup_num_steps, warmup_type), warmup_type
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, [functools.partial(self._rate, rate) for rate in rates])

    def _rate(self, rate: float, taken: int) -> float:
        step = taken - 1
        if step < 0:
            return 0.0
        if step < self._steps:
            return rate * (self._low + (1.0 - self._low) * _warmup(self._kind, self._steps, step))
        progress = min(1.0, (step - self._steps + 1) / max(1, self._total - self._steps))
        return rate * max(0.0, self._end + (1.0 - self._end) * (1 + math.cos(math.pi * progress)) / 2)


class OneCycle(_Absolute):
    """One cycle of the learning rate, with an inverse cycle of Adam's first beta; then a decay.

    The rate goes from `cycle_min_lr` to `cycle_max_lr` in `cycle_first_step_size` steps, and back in
    `cycle_second_step_size` (None: as many). With `cycle_momentum` betas cycle between the two momenta. After the cycle
    the rate is divided by 1 + `decay_lr_rate` for each `decay_step_size` steps (0: never); the momentum is multiplied
    likewise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        if cycle_first_stair_count or cycle_second_stair_count:
            raise NotImplementedError("cycle_first_stair_count and cycle_second_stair_count do not exist here: give 0")
        self._up = cycle_first_step_size
        self._total = self._up + (self._up if cycle_second_step_size is None else cycle_second_step_size)
        self._low, self._high = cycle_min_lr, cycle_max_lr
        self._momenta = (cycle_min_mom, cycle_max_mom)
        self._decay_steps, self._decay, self._momentum_decay = decay_step_size, decay_lr_rate, decay_mom_rate
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, [self._rate] * len(optimizer.param_groups))

    def _height(self, taken: int) -> float:
        """Return the fraction of the rise at a step of the cycle."""
        x, turn = taken / self._total % 1.0, self._up / self._total
        return x / turn if x <= turn else (x - 1) / (turn - 1)

    def _decayed(self, rate: float, taken: int) -> float:
        return 1 + rate * ((taken - self._total) / self._decay_steps) if self._decay_steps else 1.0

    def _rate(self, taken: int) -> float:
        if taken <= self._total:
            return self._low + (self._high - self._low) * self._height(taken)
        return self._low / self._decayed(self._decay, taken)

    def get_lr(self) -> Any:
        if self._cycles_momentum:
            (low, high), taken = self._momenta, self.last_epoch
            if not taken:  # DeepSpeed starts with the smaller momentum, and its first step jumps to the larger
                momentum = low
            elif taken <= self._total:
                momentum = high - (high - low) * self._height(taken)
            else:
                momentum = high * self._decayed(self._momentum_decay, taken)
            for group in self.optimizer.param_groups:
                group["betas"] = (momentum, 0.99)
        return super().get_lr()


class LRRangeTest(_Absolute):
    """A learning rate that grows from `lr_range_test_min_lr`, a number or one for each parameter group.

    In each `lr_range_test_step_size` steps it grows by its first value times `lr_range_test_step_rate`: linearly, or
    with `lr_range_test_staircase` at the end of each interval.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: _Values = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self._size, self._growth = lr_range_test_step_size, lr_range_test_step_rate
        self._stairs = lr_range_test_staircase
        rates = _each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        super().__init__(optimizer, [functools.partial(self._rate, rate) for rate in rates])

    def _rate(self, rate: float, taken: int) -> float:
        interval = taken / self._size
        return rate * (1 + self._growth * (math.floor(interval) if self._stairs else interval))


SCHEDULES: dict[str, type[_Absolute]] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


class LossScale:
    """The factor of the loss under float16. An overflow halves it; a window without overflow doubles it.

    `loss_scale` is a fixed factor; 0 makes it dynamic, with 2 to the power of `initial_scale_power` first and at least
    `min_loss_scale`. `loss_scale_window` steps without an overflow double it; the first of them does not count, as in
    DeepSpeed. `hysteresis` is the overflow, counted from 1, that first halves it. With `consecutive_hysteresis` a step
    without an overflow restarts that count; else only a full window does.
    """

    def __init__(
        self,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        self.is_dynamic = not loss_scale
        self.scale = float(loss_scale or 2.0**initial_scale_power)
        self._window, self._patience, self._consecutive = loss_scale_window, hysteresis, consecutive_hysteresis
        self._smallest, self._left, self._quiet = float(min_loss_scale), hysteresis, 0

    def update(self, overflow: bool) -> None:
        """Count a step. Raise OverflowError if a dynamic factor would fall below its minimum."""
        if not self.is_dynamic:
            return
        if overflow:
            self._quiet = 0
            if self._left > 1:
                self._left -= 1
            elif self.scale <= self._smallest:
                raise OverflowError(
                    f"the loss scale must stay at least {self._smallest:g} (fp16.min_loss_scale), and gradients overflow at it"
                )
            else:
                self.scale = max(self.scale / 2, self._smallest)
            return
        self._quiet += 1
        if self._consecutive:
            self._left = self._patience
        if self._quiet > 1 and (self._quiet - 1) % self._window == 0:
            self._left = self._patience
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        """Return the state that changes in training."""
        return {"scale": self.scale, "left": self._left, "quiet": self._quiet}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a result of state_dict()."""
        self.scale, self._left, self._quiet = float(state["scale"]), int(state["left"]), int(state["quiet"])
