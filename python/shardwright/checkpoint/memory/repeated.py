"""Repeated: the content of a step with the same tensors as the previous one, so that little work remains but the
copy."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._engine import CheckpointError
from ...layout.memory import address_of
from ...torch_compat.dtensor import held_tensor
from .. import tree
from ..slices import Sliced, is_dtensor
from ..state.content import Content, Source, group_options, holds_shards, parameter_names
from ..state.names import ModelTensors, walk
from ..state.optimizer_extras import further_state


class Repeated:
    """The sources of model and optimizer of one step, valid while the training has the same tensors at the same
    addresses.

    It compares identity, address, dtype, shape and strides of every tensor. It keeps the objects alive, so that no other
    object can take their identity.

    Attributes
    ----------
    found : ModelTensors
    groups, sources, count
        The groups of model and optimizer, and their sources, which have the first `count` numbers of the plan.
    needs_no_agreement : bool
        True if no other content can differ between ranks: no buffers, no state in parts.
    """

    def __init__(
        self,
        training: Any,
        layout: Any,
        found: ModelTensors,
        content: Content,
        sources: Sequence[Source],
        entries_text: bytes,
        released: Mapping[int, Sliced],
    ) -> None:
        self.layout, self.found = layout, found
        self.groups = content.groups[: 1 + (training.optimizer is not None)]
        self.count = sum(len(group.tensors) for group in self.groups)
        self.sources = [source for source in sources if source[0] < self.count]
        self.needs_no_agreement = not (
            found.buffers or released or layout.state is not None or holds_shards([training.user_state, training.extra])
        )
        self._modules = [module for _, module in walk(training.model, "")]
        self._marks = list(self._each_mark(training))
        self._tensors = [
            *(each for each in found.parameters.values() if id(each) not in released),
            *found.buffers.values(),
            *_state_of(training.optimizer),
        ]
        self._addresses = self._places(released)
        self._entries = entries_text  # the text of "state" in optimizer.json, on rank 0

    @classmethod
    def of(
        cls,
        training: Any,
        layout: Any,
        found: ModelTensors,
        content: Content,
        sources: Sequence[Source],
        entries_text: bytes,
        released: Mapping[int, Sliced] = {},
    ) -> Repeated | None:
        """Make the object; None if content may change unnoticed between steps, or is copied before it is saved."""
        if layout.has_values or any(not isinstance(each, torch.Tensor) for each in _state_of(training.optimizer)):
            return None
        made = cls(training, layout, found, content, sources, entries_text, released)
        held = [_memory_of(each) for each in made._tensors]
        if any(each.numel() and not address_of(each) for each in held):
            return None
        held += [memory for each in released.values() for _, memory in each.parts]
        return made if made._has_plain_options(training) and _all_inside(made.sources, held) else None

    def fits(self, training: Any, released: Mapping[int, Sliced] = {}) -> bool:
        """Return True if the training has the same tensors with the same memory, shape and layout."""
        marks = list(self._each_mark(training))
        return (
            len(marks) == len(self._marks)
            and all(map(operator.is_, marks, self._marks))
            and self._places(released) == self._addresses
            and self._has_plain_options(training)
        )

    def _places(self, released: Mapping[int, Sliced]) -> list[Any]:
        """Return address, dtype, shape and strides of each tensor: `.data = ` replaces them under the same object."""
        held = [_memory_of(tensor) for tensor in self._tensors]
        held += [memory for each in released.values() for _, memory in each.parts]
        return [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in held]

    def _has_plain_options(self, training: Any) -> bool:
        """Return True if no option of the optimizer is a tensor, and its state_dict() has no further keys."""
        if training.optimizer is None:
            return True
        tensors: dict[str, Any] = {}
        options = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        try:
            tree.encode(options, "options", tensors)
            return not tensors and not further_state(training.optimizer)
        except CheckpointError:
            return False

    def optimizer_text(self, training: Any) -> bytes:
        """Return the text of optimizer.json on rank 0, b"" without an optimizer. Call fits() first."""
        if training.optimizer is None:
            return b""
        groups = group_options(training.optimizer, parameter_names(training.optimizer, self.found), {})
        return optimizer_json(groups, self._entries)

    def _each_mark(self, training: Any) -> Iterator[Any]:
        for module in self._modules:
            for held in (module._parameters, module._buffers, module._modules):
                yield from held
                yield from held.values()
        if training.optimizer is not None:
            for group in training.optimizer.param_groups:
                yield from group["params"]
            yield from _state_of(training.optimizer)


def optimizer_json(groups: list[Any], entries_text: bytes) -> bytes:
    """Return the text of optimizer.json without further keys, from its groups and the text of its state."""
    return b'{"groups":%s,"state":%s}\n' % (tree.dumps(groups).rstrip(), entries_text)


def _memory_of(tensor: Any) -> Any:
    """Return the tensor that holds the memory this rank saves of `tensor`."""
    return held_tensor(tensor) if is_dtensor(tensor) else tensor


def _state_of(optimizer: Any) -> Iterator[Any]:
    for state in () if optimizer is None else optimizer.state.values():
        yield from state.values() if isinstance(state, dict) else (state,)


def _all_inside(sources: Sequence[Source], tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if all sources point into the memory of `tensors`, not into copies."""
    places = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    for _, _, nbytes, address, *_ in sources:
        at = bisect.bisect_right(places, (address, 1 << 64)) - 1
        if at < 0 or address + nbytes > places[at][1]:
            return False
    return True
