"""materialize: memory and initial values for a module that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._engine import Error
from ..torch_compat.internals import refresh_weights, reset_of

__all__ = ["materialize"]


def materialize(module: torch.nn.Module, *, init: Callable[[torch.nn.Module], object] | None = None) -> torch.nn.Module:
    """Allocate parameters and buffers of the meta device on the CPU, with their modules' own initial values. In place.

    Parameters
    ----------
    module : Module
        A module that is not wrapped yet and has no optimizer (wrap refuses an optimizer of meta parameters). New
        parameters replace meta parameters; tied ones stay tied. Tensors with memory stay.
    init : callable, optional
        A function called instead of reset_parameters() with each module that held meta tensors, inner ones first.

    Returns
    -------
    Module
        `module`.

    Raises
    ------
    Error
        If a module that holds meta tensors of its own has no reset_parameters(), and there is no `init`: its values
        would be undefined. Nothing has changed then.

    Notes
    -----
    Not collective; sw.wrap gives all ranks rank 0's values. A parent's initialisation of its children (scaled output
    layers, for example) is not repeated: use `init` for it. Memory: the whole module on each rank until it is wrapped.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4, 1)
    >>> sw.materialize(model).weight.device
    device(type='cpu')
    """
    waiting = [each for each in reversed(list(module.modules())) if any(t.is_meta for t in _own(each))]
    if init is None:
        names = {each: name for name, each in module.named_modules()}
        without = [each for each in waiting if reset_of(each) is None]
        if without:
            raise Error(
                f"materialize: {names[without[0]] or 'the module'!r}, a {type(without[0]).__name__}, has tensors on the meta device and no "
                f"reset_parameters() ({len(without)} such modules): pass init=, which is called with each module"
            )
    made: dict[int, torch.Tensor] = {}
    kept = [tensor for each in waiting for tensor in _own(each)]  # kept alive, so that no id is used twice
    for each in waiting:
        for places in (each._parameters, each._buffers):
            for name, tensor in places.items():
                if tensor is not None and tensor.is_meta:
                    places[name] = made.setdefault(id(tensor), _with_memory(tensor))  # type: ignore[assignment]
    del kept
    for each in waiting:
        refresh_weights(each)
        reset = init or _call_reset
        with torch.no_grad():
            reset(each)
    return module


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _call_reset(module: torch.nn.Module) -> None:
    reset_of(module)()


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor of the same class, strides and attributes on the CPU."""
    memory = torch.empty_like(tensor, device="cpu", requires_grad=False, memory_format=torch.preserve_format)
    if isinstance(tensor, torch.nn.Parameter):
        memory = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad)
    memory.__dict__.update(tensor.__dict__)
    return memory
