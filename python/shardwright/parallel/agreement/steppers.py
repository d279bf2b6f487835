"""The optimizers that step on one module."""

from __future__ import annotations

import json
import logging
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ..._engine import Error
from ...comm.process_group import HostGroup
from ...comm.stop_request import StopRequest
from .optimizer_agreement import UNLIKE_BEFORE, Row, difference, hyperparameters
from .unaveraged import UnaveragedCheck

_logger = logging.getLogger("shardwright")
_UNEVEN = (
    "rank %d ran %d forwards of %s before its backward %d of step %d, and rank %d ran %d: a rank that skips backward() and "
    "optimizer.step() alone (a NaN in its loss) is one batch behind from then on, averages mix batches, and the run ends with "
    "ranks that wait. Skip a batch on every rank or on none, by a flag that is all-reduced; run a forward without a backward "
    "under torch.no_grad(). This is logged once"
)
_OWN_STEPS = (
    "ranks disagree about {}; each rank has stepped with its own, so that their parameters differ: "
    "begin again from a checkpoint, with the same hyperparameters on every rank"
)
#: largest number of characters of hyperparameters in a message
_DESCRIBED = 200


class Steppers:
    """The optimizers of one module, held weakly, and their last stepped hyperparameters.

    is_known(parameter) tells whether a parameter is one of a wrapped module.
    """

    def __init__(self, group: HostGroup, label: str, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._group, self._label = group, label
        self.unaveraged = UnaveragedCheck(label, is_known)
        self._warns_of_forwards = True
        self._sliced: list[weakref.ref[torch.optim.Optimizer]] = []
        self._plain: list[weakref.ref[torch.optim.Optimizer]] = []
        #: the number of rounds at each optimizer's last step at zero=0
        self.rounds_at_step: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: hyperparameters of the last step at zero=0, and the texts of known ones
        self._groups: list[dict[str, Any]] = []
        self._texts: dict[int, tuple[dict[str, Any], str]] = {}
        #: function that raises if replicas differ
        self.explain_replicas: Callable[[], None] | None = None
        #: True if this rank ran out of inputs in a join that still runs
        self.has_joined = False
        self.stop: StopRequest | None = None

    def add_sliced(self, optimizer: torch.optim.Optimizer) -> int:
        """Add an optimizer of zero >= 1. Return its position in order of construction, equal on all ranks."""
        self._sliced.append(weakref.ref(optimizer))
        return len(self._sliced) - 1

    def add_plain(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer of zero=0, which steps without communication."""
        if all(reference() is not optimizer for reference in self._plain):
            self._plain.append(weakref.ref(optimizer))

    def sliced(self) -> list[Any]:
        """Return the optimizers of zero >= 1 by position; None for one that has ended."""
        return [reference() for reference in self._sliced]

    def all(self) -> list[Any]:
        """Return all known optimizers; None for one that has ended."""
        return [reference() for reference in [*self._sliced, *self._plain]]

    def last_step_on(self, parameter: torch.Tensor) -> int:
        """Return the number of rounds at a sliced optimizer's last step on a parameter."""
        holders = (each for each in self.sliced() if each is not None and each.holds(parameter))
        return max((each.rounds_at_step for each in holders), default=0)

    def note(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the digest of the hyperparameters of a step at zero=0 that is about to begin: 32 bits."""
        self._groups, texts = [], []
        for group in optimizer.param_groups:
            values = dict(group)
            del values["params"]
            before, text = self._texts.get(id(group), (None, ""))
            try:
                is_known = before is not None and before == values
            except RuntimeError:  # two tensors were compared
                is_known = False
            if not is_known:
                text = json.dumps(_readable(values))
                # values that change in place are read anew in each step
                if not any(isinstance(value, (torch.Tensor, list, dict)) for value in values.values()):
                    self._texts[id(group)] = values, text
            self._groups.append(values)
            texts.append(text)
        return zlib.crc32("\n".join(texts).encode())

    def begin_anew(self) -> None:
        """Forget past hyperparameters on all ranks, after a join in which not all ranks stepped."""
        self.has_joined = False
        self._groups = []
        self.unaveraged.forget()

    def compare(self, *forwards: int) -> None:
        """Raise an error that names the parameters, or the hyperparameters, that differ between ranks. Collective.

        With `forwards` (see Reducer.attach), log once that ranks ran different numbers of forwards: a legal program can.
        """
        if forwards:
            self._warn_of(*forwards)
        else:
            self._explain()

    def _warn_of(self, most_rank: int, most: int, fewest_rank: int, fewest: int, backward: int, step: int) -> None:
        if self._warns_of_forwards:
            self._warns_of_forwards = False
            _logger.warning(_UNEVEN, most_rank, most, self._label, backward, step, fewest_rank, fewest)

    def _explain(self) -> None:
        gather = self._group.comm.all_gather_bytes
        is_request = self.stop is not None and self.stop.explains(gather)
        mine = json.dumps(self._rows()).encode() if not self.has_joined else b""  # a joined rank did not step
        tables = {rank: json.loads(data) for rank, data in enumerate(gather(mine, "hyperparameters")) if data}
        if any(table != tables[min(tables)] for table in tables.values()):
            raise Error(_OWN_STEPS.format(difference(tables)))
        self.unaveraged.explain(gather, contributes=not self.has_joined)
        if self.explain_replicas is not None:
            self.explain_replicas()
        if not is_request:
            raise Error(_OWN_STEPS.format(UNLIKE_BEFORE))

    def _rows(self) -> list[Row]:
        return [(f"group {number}", [], _readable(group)) for number, group in enumerate(self._groups)]

    def describe(self) -> str:
        """Return this rank's last stepped hyperparameters as the end of a message."""
        groups = (
            f"{title} {', '.join(f'{key}={value}' for key, value in values.items() if isinstance(value, (int, float)))}"
            for title, _, values in self._rows()
        )
        return f" (rank {self._group.rank}: {'; '.join(groups)[:_DESCRIBED]})"


def _readable(group: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters() without tensors on a GPU, since reading those would make the host wait."""
    there = {key for key, value in group.items() if isinstance(value, torch.Tensor) and value.device.type != "cpu"}
    return hyperparameters({key: value for key, value in group.items() if key not in there})
