"""float32 masters behind low-precision parameters.

A step in bfloat16 is lost where it is smaller than half a unit of the parameter. So an optimizer steps on a float32 copy, the
master, with float32 state, and the parameter is its rounding. sw.optim does both in one pass; around every other optimizer the
masters take the parameters' places for the time of its step. Either way a master is `state[p]["master"]`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

__all__ = ["LOW", "MasterOptimizer", "Masters", "has_own_masters", "load_in_float32", "without_masters"]

LOW = (torch.bfloat16, torch.float16)
_KEY = "master"
#: what makes the float32 tensor that holds a master: of a parameter's shape and strides
_Empty = Callable[[torch.Tensor], torch.Tensor]


def _empty(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)


class Masters:
    """The masters of one optimizer: they follow parameters that were written by others.

    By id, the version that each parameter had after our own last write: where it differs and the master no longer rounds to
    the parameter, the master is taken anew.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_versions": {}}  # of a copy, whose parameters are others

    def of(self, parameter: torch.Tensor, state: dict[str, Any], empty: _Empty = _empty) -> torch.Tensor:
        """The master in `state`, made, laid out as its parameter and taken anew where that is due."""
        master: torch.Tensor | None = state.get(_KEY)
        if master is None or master.stride() != parameter.stride():
            made = state[_KEY] = empty(parameter).copy_(parameter if master is None else master)
            if master is None:
                return made
            master = made
        if self._versions.get(id(parameter)) != parameter._version:
            if not torch.equal(master.to(parameter.dtype), parameter.to(master.device)):
                master.copy_(parameter)
        return master

    def written(self, parameters: Iterable[torch.Tensor]) -> None:
        """Their masters were just rounded into them."""
        for parameter in parameters:
            self._versions[id(parameter)] = parameter._version

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """They, or their masters, were written by others."""
        for parameter in parameters:
            self._versions.pop(id(parameter), None)

    @contextlib.contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, masters stand in the optimizer's groups for those of `parameters` that are low-precision and have a gradient;
        afterwards these are the masters' roundings.

        Cost: a float32 copy of their gradients for the time.
        """
        taken = {id(p): (p, self._take(optimizer, p)) for p in parameters if p.dtype in LOW and p.grad is not None}
        if not taken:
            yield
            return
        before = [group["params"] for group in optimizer.param_groups]
        for group, members in zip(optimizer.param_groups, before):
            group["params"] = [taken[id(p)][1] if id(p) in taken else p for p in members]
        try:
            yield
        finally:  # after an exception too: what was stepped on stays so, as without masters
            for group, members in zip(optimizer.param_groups, before):
                group["params"] = members
            for parameter, master in taken.values():
                self._give_back(optimizer, parameter, master)

    def _take(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        """The master with the gradient, and with the state of its parameter."""
        state = optimizer.state.pop(parameter, {})
        if _KEY not in state:  # state that was made without masters
            state = {key: _widened(value, parameter) for key, value in state.items()}
        with torch.no_grad():
            master = self.of(parameter, state)
        del state[_KEY]  # an optimizer tells by an empty state that a step is the first
        if state:
            optimizer.state[master] = state
        assert parameter.grad is not None
        master.grad = parameter.grad.to(torch.float32)
        return master

    def _give_back(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, master: torch.Tensor) -> None:
        master.grad = None
        state = optimizer.state.pop(master, {})
        state[_KEY] = master
        optimizer.state[parameter] = state
        with torch.no_grad():
            parameter.copy_(master)
        self.written([parameter])


def _widened(value: Any, parameter: torch.Tensor) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in LOW and value.shape == parameter.shape
    return value.to(torch.float32) if low else value


def has_own_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of sw.optim's, which keep masters as `master=` says."""
    return any(kind.__module__ == "shardwright.optim" for kind in type(optimizer).__mro__)


def load_in_float32(
    optimizer: torch.optim.Optimizer,
    load: Callable[[dict[str, Any]], Any],
    state_dict: dict[str, Any],
    has_master: Callable[[torch.Tensor], bool],
) -> None:
    """`load(state_dict)`, torch's own loading of `optimizer`, which casts state to the parameter's dtype; what belongs to a
    master, and the master, are float32 all the same."""
    loaded: list[dict[str, Any]] = []
    # The last of the pre-hooks: it sees what the user's own made of the dict.
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given))
    try:
        load(state_dict)
    finally:
        handle.remove()
    saved = chain.from_iterable(group["params"] for group in loaded[0]["param_groups"])
    for number, p in zip(saved, chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        for key, value in loaded[0]["state"].get(number, {}).items():
            if torch.is_tensor(value) and key != "step" and value.shape == p.shape and value.is_floating_point():
                dtype = torch.float32 if has_master(p) else p.dtype
                optimizer.state[p][key] = torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value)


class MasterOptimizer(torch.optim.Optimizer):
    """What `sw.wrap(module, optimizer)` returns at zero=0 for an optimizer without masters that has low-precision parameters.

    Parameters
    ----------
    optimizer : Optimizer
        The user's, which does the arithmetic, on masters. Its groups are taken over as they are.
    without : iterable of Tensor
        Parameters that a policy denies a master (Precision(master=False)).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, without: Iterable[torch.Tensor] = ()) -> None:
        self._inner = optimizer
        self._masters, self._without = Masters(), list(without)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state

    def __repr__(self) -> str:
        return f"MasterOptimizer({self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_inner": self._inner, "_masters": self._masters, "_without": self._without}
        return {**super().__getstate__(), **kept}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        if all(group is not param_group for group in self._inner.param_groups):
            self._inner.param_groups.append(param_group)

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer steps on a master of it."""
        return parameter.dtype in LOW and all(parameter is not each for each in self._without)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on the masters; `closure` runs before it, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        denied = {id(parameter) for parameter in self._without}
        members = [p for group in self._inner.param_groups for p in group["params"] if id(p) not in denied]
        with self._masters.in_place(self._inner, members):
            self._inner.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes torch's format. A master that it lacks is made from the parameter at the next step."""
        load_in_float32(self._inner, self._inner.load_state_dict, state_dict, self.has_master)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._masters.forget(p for group in self.param_groups for p in group["params"])


def without_masters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The user's own inside a MasterOptimizer, whose state, masters among it, it shares; any other as it is."""
    return optimizer._inner if isinstance(optimizer, MasterOptimizer) else optimizer
