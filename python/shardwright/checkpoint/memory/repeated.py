"""Repeated: the content of a step with the same tensors as the previous one, so that little work remains but the
copy."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._engine import CheckpointError, object_addresses, tensor_places
from ...formats import tree
from ...layout.memory import address_of
from ...torch_compat.dtensor import held_tensor, is_dtensor
from ..device_staging import DeviceStaging
from ..joined import members_of, parts_of
from ..rows import LINES, Rows, add_rows, dense, structure_of
from ..slices import Sliced
from ..state.content import Content, Source, group_options, holds_shards, packed, parameter_names
from ..state.names import ModelTensors, walk
from ..state.optimizer_extras import further_state


class Repeated:
    """The sources of model and optimizer of one step, valid while the training has the same tensors at the same addresses.

    It keeps the objects alive, so that no other object can take their identity. `sources` have the first `count` numbers of the
    plan. `needs_no_agreement`: no other content can differ between ranks. Not `is_usable`: content may change unnoticed between
    steps, or is copied before it is saved.
    """

    def __init__(
        self,
        training: Any,
        layout: Any,
        found: ModelTensors,
        content: Content,
        sources: Sequence[Source],
        entries_text: bytes,
        released: Mapping[int, Sliced] = {},
    ) -> None:
        self.layout, self.found = layout, found
        self._optimizers = [weakref.ref(each) for each in members_of(training.optimizer)]
        self._parts = list(parts_of(training.model).values())
        self.groups = content.groups[: 1 + (training.optimizer is not None)]
        self.count = sum(len(group.tensors) for group in self.groups)
        self.sources = [source for source in sources if source[0] < self.count]
        self.needs_no_agreement = not (
            found.buffers or released or layout.state is not None or holds_shards([training.user_state, training.extra])
        )
        self._modules = [module for _, module in walk(training.model, "")]
        self._kept = [list(_members_of(each)) for each in self._containers(training)]
        state = list(_state_of(training.optimizer))
        parameters = [each for each in found.parameters.values() if id(each) not in released]
        tensors = [each for each in (*parameters, *found.buffers.values(), *state) if isinstance(each, torch.Tensor)]
        plain = [each for each in tensors if not is_dtensor(each)]
        self._plain = plain if tensor_places(plain) is not None else []
        self._odd = [each for each in tensors if not self._plain or is_dtensor(each)]
        self._known = self._places(training, released)
        self._options: bytes | None = None  # tree.mark() of the options of the groups
        self._optimizer_text = b""  # of these options
        self._rest: OwnRows | None = None
        self._entries = entries_text  # the text of "state" in optimizer.json, on rank 0
        held = [_memory_of(each) for each in tensors]
        has_memory = all(address_of(each) or not each.numel() for each in held)
        held += [memory for each in released.values() for _, memory in each.parts]
        self.is_usable = (
            not layout.has_values
            and all(isinstance(each, torch.Tensor) for each in state)
            and has_memory
            and self._has_plain_options(training)
            and _all_inside(self.sources, held)
        )

    def fits(self, training: Any, released: Mapping[int, Sliced] = {}) -> bool:
        """Return True if the training has the same tensors with the same memory, shape and layout."""
        return self._places(training, released) == self._known and self._has_plain_options(training)

    def _places(self, training: Any, released: Mapping[int, Sliced]) -> tuple[Any, ...]:
        """Return identities of the members of all containers, and address, dtype, shape and strides of each tensor."""
        odd = [_memory_of(tensor) for tensor in self._odd]  # C cannot read them
        odd += [memory for each in released.values() for _, memory in each.parts]
        of_odd = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in odd]
        return object_addresses(self._containers(training)), tensor_places(self._plain), of_odd

    def is_of(self, training: Any) -> bool:
        """Return True if a load into `training` may replace some of the tensors."""
        own = [*(each() for each in self._optimizers), *self._parts]
        others = [*members_of(training.optimizer), *parts_of(training.model).values()]
        return any(each is other for each in own for other in others)

    def _has_plain_options(self, training: Any) -> bool:
        """Return True if no option of the optimizer is a tensor, and its state_dict() has no further keys."""
        if training.optimizer is None:
            return True
        options = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
        mark = tree.mark(options)
        tensors: dict[str, Any] = {}
        try:
            if mark is None or mark != self._options:
                tree.encode(options, "options", tensors)
                self._options, self._optimizer_text = None if tensors else mark, b""  # an array has a mark, too
            return not tensors and not further_state(training.optimizer)
        except CheckpointError:
            return False

    def rest(
        self, rows: Rows, body: dict[str, Any], tensors: Mapping[str, torch.Tensor], staging: DeviceStaging
    ) -> OwnRows | None:
        """Return the content of a step whose rank's own values are `body` and `tensors`; None if they do not fit."""
        if self._rest is None:
            self._rest = OwnRows(rows, tensors, Content([], staging, ahead=self))
        return self._rest if self._rest.fill(body, tensors) else None

    def optimizer_text(self, training: Any) -> bytes:
        """Return the text of optimizer.json on rank 0, b"" without an optimizer. Call fits() first."""
        if training.optimizer is None:
            return b""
        if not self._optimizer_text:
            groups = group_options(training.optimizer, parameter_names(training.optimizer, self.found), {})
            self._optimizer_text = optimizer_json(groups, self._entries)
        return self._optimizer_text

    def _containers(self, training: Any) -> list[Any]:
        """Return the dicts and lists that hold the modules, parameters, buffers and state of a training."""
        found: list[Any] = []
        for module in self._modules:
            found += module._parameters, module._buffers, module._modules
        if training.optimizer is not None:
            found += [group["params"] for group in training.optimizer.param_groups]
            found += training.optimizer.state.values()
        return found


class OwnRows:
    """A rank's own line and rows in memory that each step overwrites, so that a step's packed `sources` are those of the last."""

    def __init__(self, rows: Rows, tensors: Mapping[str, torch.Tensor], content: Content) -> None:
        self._rows, self.content = rows, content
        self._mark: bytes | None = None
        self._copies = {name: dense(each).cpu().clone() for name, each in tensors.items()}
        self._line = bytearray(rows.line_bytes)
        self._fits = rows.fits(structure_of(tensors), 0)
        if self._fits:
            add_rows(content, rows, b"", self._copies)
            nbytes, begin, _ = content.lines[LINES]
            content.lines[LINES] = nbytes, begin, self._line
            self.sources = packed(content.sources())

    @torch.no_grad()
    def fill(self, body: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy a step's values here. Return False if they do not fit."""
        if not self._fits or tensors.keys() != self._copies.keys():
            return False
        if any(each.dtype != tensors[n].dtype or each.shape != tensors[n].shape for n, each in self._copies.items()):
            return False
        mark = tree.mark(body)
        if mark is None or mark != self._mark:
            text = tree.dumps(body)
            if len(text) >= self._rows.line_bytes:
                return False
            self._line[:] = self._rows.line(text)[2]
            self._mark = mark
        for name, each in self._copies.items():
            each.copy_(tensors[name])
        return True


def optimizer_json(groups: list[Any], entries_text: bytes) -> bytes:
    """Return the text of optimizer.json without further keys, from its groups and the text of its state."""
    return b'{"groups":%s,"state":%s}\n' % (tree.dumps(groups).rstrip(), entries_text)


def _memory_of(tensor: Any) -> Any:
    """Return the tensor that holds the memory this rank saves of `tensor`."""
    return held_tensor(tensor) if is_dtensor(tensor) else tensor


def _members_of(container: Any) -> Iterator[Any]:
    """Yield the objects that object_addresses() reads."""
    if isinstance(container, dict):
        yield from container
        yield from container.values()
    elif isinstance(container, list):
        yield from container
    else:
        yield container


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
