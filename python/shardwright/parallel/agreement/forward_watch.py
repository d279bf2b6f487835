"""A warning about forwards that an exception ended, and the range of each forward in a profile."""

from __future__ import annotations

import logging

import torch

from ...torch_compat import autograd as _hooks

__all__ = ["ForwardWatch"]

_logger = logging.getLogger("shardwright")
_UNENDED_FORWARD = (
    "rank %d: a forward of %s ended in an exception, and the next one begins without a step of the optimizer between them. Ranks match "
    "their backwards by count. Skip this batch on all ranks, or repeat it on this one; otherwise all later averages mix different "
    "batches"
)


class ForwardWatch:
    """A warning of the first forward that did not end, and torch's range of each forward in a profile.

    Attributes
    ----------
    is_inside : bool
        True from the start of a forward with gradients to its end. A step, or a round without a backward, sets it to
        False: ranks are at the same point again.
    """

    def __init__(self, rank: int, world_size: int, label: str) -> None:
        self._rank, self._label = rank, label
        self.is_inside, self._warns = False, world_size > 1
        self._range: torch.profiler.record_function | None = None

    def begin(self) -> None:
        """Begin a forward with gradients."""
        # a recomputation inside a backward may stop as soon as it has its values
        if _hooks.graph_task_id() < 0:
            if self.is_inside and self._warns:
                self._warns = False
                _logger.warning(_UNENDED_FORWARD, self._rank, self._label)
            self.is_inside = True
        if self._range is not None:  # an exception ended that forward
            self._end_range()
        if _hooks.profiler_enabled():
            self._range = torch.profiler.record_function("DistributedDataParallel.forward")
            self._range.__enter__()

    def end(self) -> None:
        """End a forward without an exception."""
        self.is_inside = False
        if self._range is not None:
            self._end_range()

    def _end_range(self) -> None:
        assert self._range is not None
        self._range.__exit__(None, None, None)
        self._range = None
