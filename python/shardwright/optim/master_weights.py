"""float32 masters behind low-precision parameters.

A bfloat16 parameter does not change in a step smaller than half its unit in the last place. The optimizer therefore
steps on a float32 copy, `state[p]["master"]`, and the parameter is the rounded master. sw.optim does both in one pass;
for any other optimizer, masters replace the parameters during its step. A parameter that other code has written wins: a
step begins with the parameter wherever the master does not round to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from ..parallel.agreement.optimizer_agreement import check_groups
from ..torch_compat import cuda
from ..torch_compat.dtensor import held_tensor, is_dtensor, waited
from ..torch_compat.optimizers import hooks_around
from . import moments as records
from .forwarding import Forwarding, NotAveraged, loss_of

LOW = (torch.bfloat16, torch.float16)
_KEY = "master"


def master_of(
    parameter: torch.Tensor,
    state: dict[str, Any],
    new: Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, bool]] | None = None,
) -> Any:
    """Return the master in `state`; make it, or match its layout to the parameter's, if needed.

    `new` returns memory for it, and True if that holds zeros. Such a master stays 0 until the step, which begins with the
    parameter wherever the master does not round to it: nothing is written to a file twice.
    """
    master = master_in(state)
    if master is None or master.stride() != parameter.stride():
        made, holds_zeros = new(parameter, torch.float32) if new is not None else (None, False)
        if made is None:
            made = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        if master is not None or not holds_zeros:
            made.copy_(parameter if master is None else master)
        master = state[_KEY] = made
    return master


def as_written(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a master with its parameter in each element that does not round to it, as the fused step reads it."""
    rounded, held = master.to(parameter.dtype).view(torch.int16), parameter.view(torch.int16)  # bits: -0 is not 0
    if not cuda.runtime.holds(master) and torch.equal(rounded, held):  # a GPU's answer would have to be waited for
        return master
    return torch.where(rounded == held, master, parameter)


@contextlib.contextmanager
def masters_in_place(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], *, stateful: bool = False
) -> Iterator[None]:
    """Inside, replace low-precision parameters that have a gradient (or `stateful`: state) by their masters.

    On exit parameters are the rounded masters, and gradients that were written to or cleared follow. Cost: a float32
    copy of the gradients meanwhile.
    """
    taken: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]] = {}
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for p in parameters:
            if p.dtype in LOW and (p.grad is not None or (stateful and optimizer.state.get(p))):
                master = _take(optimizer, p)
                taken[id(p)] = (p, master, master.grad, _version_of(master.grad))
        for group, members in zip(optimizer.param_groups, before):
            group["params"] = [taken[id(p)][1] if id(p) in taken else p for p in members]
        yield
    finally:  # even after an exception: completed updates stay, as without masters
        for group, members in zip(optimizer.param_groups, before):
            group["params"] = members
        for parameter, master, gradient, version in taken.values():
            writes = stateful or master.grad is not gradient or _version_of(gradient) != version
            _give_back(optimizer, parameter, master, writes)  # `.data` has no version


def _take(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Give the master its parameter's gradient and state, and return it. If memory runs out, nothing has changed."""
    state = dict(optimizer.state.get(parameter, {}))
    if master_in(state) is None:  # the state was made without masters
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dtype in LOW and value.shape == parameter.shape:
                state[key] = value.to(torch.float32)
    with torch.no_grad():
        master = master_of(parameter, state)
        pair = master, parameter.detach().to(master.device)
        own, held = (waited(held_tensor(each)) if is_dtensor(each) else each for each in pair)
        own.copy_(as_written(own, held))
    gradient = None if parameter.grad is None else parameter.grad.to(torch.float32)
    del state[_KEY]  # an optimizer recognises a first step by an empty state
    optimizer.state.pop(parameter, None)
    if state:
        optimizer.state[master] = state
    master.grad = gradient
    return master


def _version_of(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None or gradient.is_inference() else gradient._version


def _give_back(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, master: torch.Tensor, writes: bool) -> None:
    """Round the master to its parameter and take its state; with `writes` its gradient, too."""
    gradient, master.grad = master.grad, None
    state = optimizer.state.pop(master, {})
    state[_KEY] = master
    optimizer.state[parameter] = state
    with torch.no_grad():
        held = parameter.grad
        if writes and (gradient is None or held is None):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        elif gradient is not None and held is not None and writes and not isinstance(gradient, NotAveraged):
            held.copy_(gradient)
        parameter.copy_(master)


def master_in(state: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the master in `state`, unless torch's own loading has cast it to the parameter's dtype."""
    master = state.get(_KEY)
    return master if isinstance(master, torch.Tensor) and master.dtype is torch.float32 else None


def as_kept(state: Mapping[str, Any], parameter: torch.Tensor, has_master: bool, moments: Any = None) -> dict[str, Any]:
    """Convert loaded state to the kept form: float32 with a master, else the parameter's dtype; `moments`, if given, but
    for masters. Step counts stay.
    """
    kept = {}
    for key, value in state.items():
        if key == _KEY and not has_master:
            continue
        value = records.kept(value, key, parameter, moments)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
            if isinstance(moments, torch.dtype) and key != _KEY:
                value = value.to(moments)
            elif has_master:
                value = value.to(torch.float32) if value.dtype in LOW else value
            elif parameter.is_floating_point():
                value = value.to(parameter.dtype)
        kept[key] = value
    return kept


def has_own_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for an optimizer of sw.optim, which keeps its own masters (option `master=`)."""
    return any(kind.__module__ == "shardwright.optim" for kind in type(optimizer).__mro__)


def load_with_hooks(
    optimizer: torch.optim.Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Run `load(state_dict)` with the hooks that users have registered on `optimizer`, as torch's own loading does."""
    state_dict = dict(state_dict)
    before, after = hooks_around(optimizer, "load_state_dict")
    for hook in before:
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    load(state_dict)
    for loaded_hook in after:
        loaded_hook(optimizer)


def load_in_float32(
    optimizer: torch.optim.Optimizer,
    load: Callable[[dict[str, Any]], Any],
    state_dict: dict[str, Any],
    has_master: Callable[[torch.Tensor], bool],
    moments: Any = None,
) -> None:
    """Run `load(state_dict)`, torch's own loading of `optimizer`, but keep masters and their state in float32."""
    loaded: list[dict[str, Any]] = []

    def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for place, (number, p) in enumerate(zip(numbers, own)):
            records.check_fits(given["state"].get(number, {}), p.numel(), f"parameter {place}")
        loaded.append(given)

    # This pre-hook runs last, so it sees the dict after the user's own hooks.
    handle = optimizer.register_load_state_dict_pre_hook(take)
    try:
        load(state_dict)
    finally:
        handle.remove()
    saved = chain.from_iterable(group["params"] for group in loaded[0]["param_groups"])
    for number, p in zip(saved, chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        given = loaded[0]["state"].get(number, {})
        if not given:
            continue
        state = optimizer.state[p]
        if not has_master(p):
            state.pop(_KEY, None)
        for key, value in as_kept(records.readable(given, p), p, has_master(p), moments).items():
            if (
                torch.is_tensor(value)
                and key != "step"
                and (value.is_floating_point() or records.is_records(key, value))
            ):
                like = p if value.shape == p.shape else value
                made = torch.empty_like(like, dtype=value.dtype, device=p.device, requires_grad=False)
                state[key] = made.copy_(value)


class MasterOptimizer(Forwarding):
    """The optimizer that `sw.wrap` returns at zero=0 for one without its own masters, over the user's groups.

    It steps on float32 masters of low-precision parameters, except for those in `without`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, without: Iterable[torch.Tensor] = ()) -> None:
        self._inner = optimizer
        self._without = list(without)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._forwards = True

    def __repr__(self) -> str:
        return f"MasterOptimizer({self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_without": self._without}

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Return True if the optimizer steps on a master of `parameter`."""
        return parameter.dtype in LOW and all(parameter is not each for each in self._without)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step on the masters; `closure` runs before it, once."""
        loss = None if closure is None else loss_of(closure)
        self._call("step", self._inner.step)
        return loss

    def _call(self, name: str, method: Callable[[], Any]) -> Any:
        """Call a method of the user's optimizer on the masters."""
        check_groups(self, self._inner)
        denied = {id(parameter) for parameter in self._without}
        members = [p for group in self._inner.param_groups for p in group["params"] if id(p) not in denied]
        with masters_in_place(self._inner, members, stateful=name != "step"):
            return method()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's format. The next step makes a missing master from the parameter."""
        load_with_hooks(self, self._load, state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        load_in_float32(self._inner, self._inner.load_state_dict, state_dict, self.has_master)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state


def kept_by(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a parameter's restored state to the form that `optimizer` keeps."""
    if has_own_masters(optimizer):
        moments = getattr(optimizer, "state_dtype", None)
        return as_kept(state, parameter, optimizer._has_master(parameter), moments)  # type: ignore[attr-defined]
    has_master = isinstance(optimizer, MasterOptimizer) and optimizer.has_master(parameter)
    return as_kept(state, parameter, True) if has_master else records.floating(state, parameter)


def without_masters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the user's optimizer inside a MasterOptimizer, which shares its state and masters; any other unchanged."""
    return optimizer._inner if isinstance(optimizer, MasterOptimizer) else optimizer
