"""Copies and state dicts of a wrapper: the part of DistributedDataParallel that has no engine."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._engine import Error
from ..comm.process_group import is_default_group
from ..layout.memory import copied
from ..torch_compat.foreign_wrappers import guard_from_wrappers
from ..torch_compat.internals import JoinConfig
from ..torch_compat.state_dicts import asked_by_torchs_functions
from .composition.nested import take

_RANK_LOCAL = (
    "_outer",
    "_given_back",
    "process_group",
    "device_mesh",
    "reducer",
    "logger",
    "_replica",
    "_parts",
    "_drift",
    "_retire",
    "__weakref__",
)


class PortableWrapper(torch.nn.Module):
    """The base of a wrapper that can be copied and pickled, and whose state dict is torch's."""

    module: torch.nn.Module
    parameters_to_ignore: set[str]
    _options: Any
    _taken: Sequence[str]
    _zero: int
    _engines: Callable[[], list[Any]]
    _reset_engine: Callable[[], None]

    # state dicts: torch's own methods, while parameters are whole ---------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's state dict. At zero=3 torch.distributed.checkpoint.state_dict's functions get copies of whole
        parameters, collectively."""
        if self._zero < 3 or not asked_by_torchs_functions():
            return super().state_dict(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for engine in self._engines():
                stack.enter_context(engine.access.whole())
            return copied(super().state_dict(*args, **kwargs))

    # copies: weights without an engine; the first forward with gradients makes it, collectively ---------------------

    def __getstate__(self) -> dict[str, Any]:
        if not is_default_group(self.process_group) or self._options.groups is not None:
            raise Error(
                "a wrapper over a group of its own cannot be pickled, since the group cannot: pickle sw.unwrap(model)"
            )
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        if self._comm_hooks:
            raise Error(
                "a wrapper with a communication hook cannot be copied, the hook's state belongs to its group: "
                "copy sw.unwrap(model)"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in _RANK_LOCAL}
        if self._is_taken:  # a separate copy averages by itself; a copy of the outer wrapper takes it over again
            state.update(_is_taken=False, _is_around=False)
        state.update(_options=self._options.without_group(), _join_config=JoinConfig.construct_disabled_join_config())
        del state["modules_buffers"], state["named_module_buffers"], state["_module_parameters"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        take(map(self.module.get_submodule, self._taken), self)
        self._module_parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        self._reset_engine()
        guard_from_wrappers(self, self.parameters_to_ignore)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._portable_state(), memo))
        made._options = self._options  # a group is shared, not copied
        made.process_group = self._options.process_group
        return made
