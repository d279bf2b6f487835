"""Repeated: the content of a step whose tensors are those of the step before, so that keeping it costs little beside the copy."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._engine import CheckpointError
from ...layout.memory import address_of
from .. import tree
from ..slices import is_dtensor
from ..state.content import Content, Source, group_options, holds_shards, parameter_names
from ..state.names import ModelTensors, walk
from ..state.optimizer_extras import further_state


class Repeated:
    """The sources of model and optimizer that one step had, for as long as the training has the same tensors at the same places.

    Identity and address of every tensor decide, and the objects are held, so that no other can take their identity.

    Attributes
    ----------
    found : ModelTensors
    sources : list
        Those of the first `count` numbers of the plan.
    """

    def __init__(
        self, training: Any, layout: Any, found: ModelTensors, content: Content, sources: Sequence[Source], groups: int
    ) -> None:
        self.layout, self.found = layout, found
        self.count = sum(len(group.tensors) for group in content.groups[:groups])
        self.sources = [source for source in sources if source[0] < self.count]
        self._content = content  # owns memory that sources point to
        self._modules = [module for _, module in walk(training.model, "")]
        self._marks = list(self._each_mark(training))
        self._tensors = [*found.parameters.values(), *_state_of(training.optimizer)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._entries = b""  # the text of "state" in optimizer.json, on rank 0

    @classmethod
    def of(
        cls,
        training: Any,
        layout: Any,
        found: ModelTensors,
        content: Content,
        sources: Sequence[Source],
        optimizer_text: bytes,
    ) -> Repeated | None:
        """Return what can be repeated; None if something may change between steps without a sign, or is copied before it is saved."""
        state = list(_state_of(training.optimizer))
        tensors = [*found.parameters.values(), *state]
        if (
            found.buffers
            or layout.has_values
            or layout.state is not None
            or holds_shards([training.user_state, training.extra])
            or any(not isinstance(each, torch.Tensor) or is_dtensor(each) for each in tensors)
            or any(each.numel() and not address_of(each) for each in tensors)
        ):
            return None
        made = cls(training, layout, found, content, sources, 1 + (training.optimizer is not None))
        if not _all_inside(made.sources, tensors) or (
            training.optimizer is not None and further_state(training.optimizer)
        ):
            return None
        if optimizer_text:
            made._entries = tree.dumps(tree.loads(optimizer_text)["state"]).rstrip()
        return made

    def fits(self, training: Any) -> bool:
        """Return True if the training has the same tensors, at the same places. Costs 0.1 us a tensor and module."""
        marks = list(self._each_mark(training))
        return (
            len(marks) == len(self._marks)
            and all(map(operator.is_, marks, self._marks))
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
        )

    def optimizer_text(self, training: Any) -> bytes:
        """Return the text of optimizer.json on rank 0, b"" without an optimizer. Raise CheckpointError if an option is a tensor."""
        if training.optimizer is None:
            return b""
        tensors: dict[str, Any] = {}
        groups = group_options(training.optimizer, parameter_names(training.optimizer, self.found), tensors)
        if tensors:
            raise CheckpointError(f"the option {next(iter(tensors))} has become a tensor")
        return b'{"groups":%s,"state":%s}\n' % (tree.dumps(groups).rstrip(), self._entries)

    def _each_mark(self, training: Any) -> Iterator[Any]:
        for module in self._modules:
            yield from module._parameters.values()
            yield from module._buffers.values()
            yield from module._modules.values()
        if training.optimizer is not None:
            for group in training.optimizer.param_groups:
                yield from group["params"]
            yield from _state_of(training.optimizer)


def _state_of(optimizer: Any) -> Iterator[Any]:
    for state in () if optimizer is None else optimizer.state.values():
        yield from state.values() if isinstance(state, dict) else (state,)


def _all_inside(sources: Sequence[Source], tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if sources are memory of `tensors`, not copies of it."""
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    for _, _, nbytes, address, *_ in sources:
        at = bisect.bisect_right(places, (address, 1 << 64)) - 1
        if at < 0 or address + nbytes > places[at][1]:
            return False
    return True
