"""The optimizers that step on one module.

A loss may have parameters (class centres, a temperature), which its optimizer gets with the wrapped module's, and which
no wrapper averages. Without an average they drift apart in silence. So at zero=0 ranks compare the first gradient of each
that is not zero: equal bits mean that torch's wrapper, or the program itself, averages them. The digest travels with the
next round (sw_reducer_note_step), which every rank runs anyway: a rank that skips a step alone misses no exchange.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ..._engine import Error
from ...comm.agreement import gather_values
from ...comm.process_group import HostGroup
from ...comm.signals import StopRequest
from ...torch_compat.dtensor import is_dtensor
from ...torch_compat.optimizers import optimizers_of, take_hooks
from .optimizer_agreement import UNLIKE_BEFORE, Row, difference, hyperparameters
from .replica_check import digest_of

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
    """The optimizers of one module, held weakly, and their last stepped hyperparameters. is_known(p): p is wrapped."""

    def __init__(self, group: HostGroup, label: str, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._group, self._label = group, label
        self._is_known = is_known
        #: by optimizer: the number of its groups, and the parameters that no wrapper averages without a gradient so far;
        #: both make note_gradients() due
        self.waiting: weakref.WeakKeyDictionary[Any, tuple[int, dict[str, torch.Tensor]]] = weakref.WeakKeyDictionary()
        #: by optimizer: the parameters that had their first gradient when it was last noted, and its digest
        self._last: weakref.WeakKeyDictionary[Any, dict[str, tuple[torch.Tensor, int]]] = weakref.WeakKeyDictionary()
        self._warns_of_forwards = True
        #: for ranks that differ in what they step with
        self.unlike_steps = _OWN_STEPS
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
        self.waiting.clear()
        self._last.clear()

    def compare(self, *forwards: int) -> None:
        """Raise Error that names what differs between ranks, collectively; or, with `forwards`, log uneven ones once."""
        if forwards:
            most_rank, most, fewest_rank, fewest, backward, step = forwards
            if self._warns_of_forwards:
                _logger.warning(_UNEVEN, most_rank, most, self._label, backward, step, fewest_rank, fewest)
            self._warns_of_forwards = False
            return
        is_request = self.stop is not None and self.stop.explains(self._group.comm.all_gather_bytes)
        tables = self._gather(self._rows(), "hyperparameters")
        if any(table != tables[min(tables)] for table in tables.values()):
            raise Error(self.unlike_steps.format(difference(tables)))
        self._explain_gradients()
        if self.explain_replicas is not None:
            self.explain_replicas()
        if not is_request:
            raise Error(self.unlike_steps.format(UNLIKE_BEFORE))

    def _gather(self, mine: Any, label: str) -> dict[int, Any]:
        """Return the values of the ranks that took the last step, by rank: a joined one did not. Collective."""
        gathered = gather_values(self._group.comm, lambda: None if self.has_joined else mine, label)
        return {rank: each for rank, each in enumerate(gathered) if each is not None}

    def _rows(self) -> list[Row]:
        return [(f"group {number}", [], _readable(group)) for number, group in enumerate(self._groups)]

    def describe(self) -> str:
        """Return this rank's last stepped hyperparameters as the end of a message."""
        groups = (
            f"{title} {', '.join(f'{key}={value}' for key, value in values.items() if isinstance(value, (int, float)))}"
            for title, _, values in self._rows()
        )
        return f" (rank {self._group.rank}: {'; '.join(groups)[:_DESCRIBED]})"

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the digest of the first gradients in the step that begins, 32 bits; 0 if there are none."""
        groups, waiting = self.waiting.get(optimizer, (0, {}))
        if groups != len(optimizer.param_groups):
            # by place, the same places on all ranks: a rank alone may have frozen one
            waiting = {
                f"group {position}, parameter {number}": p
                for position, group in enumerate(optimizer.param_groups)
                for number, p in enumerate(group["params"])
                if not is_dtensor(p) and not self._is_known(p)
            }
            self.waiting[optimizer] = len(optimizer.param_groups), waiting
        last = {place: (p, found) for place, p in waiting.items() if (found := _digest(p.grad))}
        self._last[optimizer] = last
        for place in last:
            del waiting[place]
        return zlib.crc32(repr([(place, found) for place, (_, found) in last.items()]).encode()) if last else 0

    def _explain_gradients(self) -> None:
        """Raise Error if a first gradient of the last step differs between ranks. Collective."""
        mine = {
            f"{number}:{place}": (found, _name_of(p), tuple(p.shape))
            for number, last in enumerate(self._last.values())
            for place, (p, found) in last.items()
        }
        gathered = list(self._gather(mine, "gradients that no wrapper averages").values())
        for place in sorted({place for each in gathered for place in each}):
            values = [each.get(place, [0])[0] for each in gathered]
            if any(value != values[0] for value in values):
                name, shape = next(each[place][1:] for each in gathered if place in each)
                raise Error(
                    f"optimizer: {name!r} of shape {tuple(shape)} ({place.partition(':')[2]}) is not a parameter of the wrapped {self._label}, "
                    "and its gradients of the last step differed between ranks, so they are not averaged and ranks drift apart: "
                    "wrap one ModuleList of both modules, sw.wrap the other module too, average its gradients before each "
                    "step, or give it an optimizer of its own if each rank trains its own"
                )


def _readable(group: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters() without tensors on a GPU, since reading those would make the host wait."""
    there = {key for key, value in group.items() if isinstance(value, torch.Tensor) and value.device.type != "cpu"}
    return hyperparameters({key: value for key, value in group.items() if key not in there})


def _digest(gradient: torch.Tensor | None) -> int:
    """Return a number that is 0 for no gradient or zeros, and else differs if bits differ."""
    if gradient is None:
        return 0
    dense = gradient.detach().to_dense()
    return int(digest_of(dense)) or 1 if dense.any() else 0


def _name_of(parameter: torch.Tensor) -> str:
    """Return "Class.name" from the module that holds a parameter, for a message; the tensor's class if none does."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            for name, held in each.__dict__.get("_parameters", {}).items():
                if held is parameter:
                    return f"{type(each).__name__}.{name}"
    return type(parameter).__name__


def adopt_steps_in_backward(replica: Any) -> None:
    """Make torch's _apply_optimizer_in_backward step after the round's means are complete; raise Error at zero >= 1.

    torch's hooks, which step on a local gradient as soon as it exists, are removed, except those of ignored parameters.
    A backward that does not synchronise steps nothing. With step_in_backward=True parameters have the BackwardOptimizer.
    """
    stepped = [(name, p) for name, p in zip(replica.table.names, replica.table.module_parameters) if optimizers_of(p)]
    if not stepped:
        return
    if replica.zero:
        raise Error(
            f"parameter {stepped[0][0]!r} has an optimizer that steps inside the backward (_apply_optimizer_in_backward), on the whole "
            f"parameter: zero={replica.zero} steps on slices; call sw.wrap(module, zero={replica.zero}, step_in_backward=True) after "
            "_apply_optimizer_in_backward, give it an ordinary optimizer, or wrap with zero=0"
        )
    parameters = [parameter for _, parameter in stepped]
    take_hooks(parameters)
    replica.gradients.after_round.append(functools.partial(_step_all, list(map(weakref.ref, parameters))))


def _step_all(parameters: list[weakref.ref[torch.nn.Parameter]]) -> None:
    """Step the optimizers of parameters with a gradient, then set the gradient to None."""
    for reference in parameters:
        parameter = reference()
        if parameter is None or parameter.grad is None:
            continue
        for optimizer in optimizers_of(parameter):
            optimizer.step()
        parameter.grad = None
