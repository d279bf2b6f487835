"""materialize: memory and initial values for a module that was built on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._engine import Error
from ..torch_compat.internals import buffers_of_state, initialiser_above, refresh_weights, reset_of

__all__ = ["initialisers", "materialize", "run_initialiser", "waiting_modules", "with_memory"]


def materialize(module: torch.nn.Module, *, init: Callable[[torch.nn.Module], object] | None = None) -> torch.nn.Module:
    """Allocate parameters and buffers of the meta device on the CPU, with their modules' own initial values. In place.

    Parameters
    ----------
    module : Module
        A module that is not wrapped yet and has no optimizer (wrap refuses an optimizer of meta parameters). New
        parameters replace meta parameters; tied ones stay tied. Tensors with memory stay.
    init : callable, optional
        A function called instead of reset_parameters() with each module that held meta tensors, inner ones first.
        Default for a transformers model: its `_init_weights`.

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
    layers, for example) is not repeated: use `init` for it. Memory: the whole module on each rank until it is wrapped;
    sw.wrap(module, init=) builds it in slices.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4, 1)
    >>> sw.materialize(model).weight.device
    device(type='cpu')
    """
    calls = initialisers(module, init, "materialize")
    waiting = waiting_modules(module)
    made: dict[int, torch.Tensor] = {}
    kept = [tensor for each in waiting for tensor in _own(each)]  # kept alive, so that no id is used twice
    for each in waiting:
        for places in (each._parameters, each._buffers):
            for name, tensor in places.items():
                if tensor is not None and tensor.is_meta:
                    places[name] = made.setdefault(id(tensor), with_memory(tensor, torch.empty))  # type: ignore[assignment]
    del kept
    for each, call in calls:
        run_initialiser(each, call)
    return module


def waiting_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that hold meta tensors of their own, inner ones first."""
    return [each for each in reversed(list(module.modules())) if any(t.is_meta for t in _own(each))]


def initialisers(
    module: torch.nn.Module, init: Callable[[torch.nn.Module], object] | None, what: str, *, unstored: bool = False
) -> list[tuple[torch.nn.Module, Callable[[], object]]]:
    """Return (module, function that gives it its initial values) in the order of the calls.

    `init` is called with each module that holds meta tensors; without it transformers' `_init_weights` with each one that
    holds them itself or further inside, since it writes to a module's children too; else the module's own method is
    called. `unstored`: only modules with meta buffers that no state dict holds count. Raise Error for one without code.
    """
    waiting = [each for each in waiting_modules(module) if not unstored or any(map(_is_meta, _unstored(each)))]
    if init is not None:
        return [(each, functools.partial(init, each)) for each in waiting]
    names, own = {each: name for name, each in module.named_modules()}, set(map(id, waiting))
    found: list[tuple[torch.nn.Module, Callable[[], object]]] = []
    without = []
    for each in reversed(list(module.modules())):
        above = initialiser_above(module, names[each])
        if above is not None and any(id(inner) in own for inner in each.modules()):
            found.append((each, functools.partial(above, each)))
        elif id(each) in own:
            without += [each] if reset_of(each) is None else []
            found.append((each, reset_of(each)))
    if without:
        raise Error(
            f"{what}: {names[without[0]] or 'the module'!r}, a {type(without[0]).__name__}, has tensors on the meta device and no "
            f"reset_parameters() ({len(without)} such modules): pass init=, which is called with each module"
        )
    return found


def run_initialiser(module: torch.nn.Module, call: Callable[[], object]) -> None:
    refresh_weights(module)
    with torch.no_grad():
        call()


def _unstored(module: torch.nn.Module) -> list[torch.Tensor | None]:
    stored = buffers_of_state(module)
    return [each for name, each in module._buffers.items() if name not in stored]


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def with_memory(tensor: torch.Tensor, allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same class, strides and attributes on the CPU. allocate(numel, dtype=) returns its memory."""
    like = torch.empty_like(tensor, requires_grad=False, memory_format=torch.preserve_format)
    memory = allocate(like.numel(), dtype=like.dtype, device="cpu").as_strided(like.shape, like.stride())
    if isinstance(tensor, torch.nn.Parameter):
        memory = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad)
    memory.__dict__.update(tensor.__dict__)
    return memory
