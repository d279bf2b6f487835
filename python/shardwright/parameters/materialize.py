"""materialize: memory and initial values for a module that was built on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._engine import Error
from ..formats.stored import Stored, check_of_hosts, waits
from ..torch_compat.dtensor import held_tensor, is_dtensor, local_part, placed_parameter
from ..torch_compat.internals import (
    TorchDispatchMode,
    buffers_of_state,
    changing_weights,
    initialiser_above,
    name_of_op,
    reset_of,
    subclassed,
    written_by,
)

_Call = tuple[torch.nn.Module, Callable[[], object]]
#: operations that write some elements of a tensor -> the same on marks of elements, given their other arguments
_MARKS: Mapping[str, Callable[..., object]] = {
    "aten::index_put_": lambda marks, indices, *_, **__: marks.index_put_(tuple(indices), marks.new_ones(())),
    "aten::_index_put_impl_": lambda marks, indices, *_, **__: marks.index_put_(tuple(indices), marks.new_ones(())),
    "aten::index_fill_": lambda marks, dim, index, *_, **__: marks.index_fill_(dim, index, True),
    "aten::index_copy_": lambda marks, dim, index, *_, **__: marks.index_fill_(dim, index, True),
    "aten::masked_fill_": lambda marks, mask, *_, **__: marks.masked_fill_(mask, True),
    "aten::scatter_": lambda marks, dim, index, *_, **__: marks.scatter_(dim, index, True),
}
#: attributes that a tensor loses as it gets memory
_OF_STORED = (*Stored.__annotations__, "_is_param")


def materialize(module: torch.nn.Module, *, init: Callable[[torch.nn.Module], object] | None = None) -> torch.nn.Module:
    """Allocate parameters and buffers of the meta device on the CPU, with their modules' own initial values. In place.

    Tensors that sw.meta_loading() left in their files are read whole.

    Parameters
    ----------
    module : Module
        A module that is not wrapped yet and has no optimizer (wrap refuses an optimizer of meta parameters). New
        parameters replace meta parameters; tied ones stay tied. Tensors with memory stay. DTensors are whole while the
        calls run, and then this rank's parts: they have the bits of the module without its mesh.
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
        If a module that holds meta tensors of its own has no reset_parameters(), and there is no `init`, or if no call
        has written a tensor: its values would be undefined. After any error the module is as before.

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
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"materialize needs a torch.nn.Module, got {type(module).__name__}")
    check_of_hosts([*module.named_parameters(), *module.named_buffers()], "materialize")
    calls = initialisers(module, init, "materialize")
    made, stored = dict[int, torch.Tensor](), dict[int, Stored]()
    before = places_of(module)
    try:
        with changing_weights(module):
            for held, earlier in before:
                for name, tensor in earlier.items():
                    if waits(tensor) and id(tensor) not in made:
                        made[id(tensor)] = with_memory(tensor, torch.zeros)
                        if isinstance(tensor, Stored):
                            stored[id(made[id(tensor)])] = tensor
                    if waits(tensor):
                        held[name] = made[id(tensor)]
        Writes().run(module, calls, {id(each) for each in made.values()} - stored.keys(), "materialize")
        with torch.no_grad():
            for each in made.values():
                if id(each) in stored:
                    each.copy_(stored[id(each)].lazy.read())
            parts = dict[int, torch.Tensor]()
            for held, earlier in before:
                for name, tensor in earlier.items():
                    if is_dtensor(tensor) and tensor.is_meta:
                        held[name] = parts.setdefault(id(tensor), part_of_whole(made[id(tensor)], tensor))
    except BaseException:
        with changing_weights(module):
            for held, earlier in before:
                held.update(earlier)
        raise
    return module


def waiting_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that hold meta tensors of their own, inner ones first."""
    return [each for each in reversed(list(module.modules())) if any(t.is_meta for t in _own(each))]


def initialisers(
    module: torch.nn.Module, init: Callable[[torch.nn.Module], object] | None, what: str, *, unstored: bool = False
) -> list[_Call]:
    """Return (module, function that gives it its initial values) in the order of the calls.

    `init` is called with each module that holds meta tensors; without it transformers' `_init_weights` with each one that
    holds them itself or further inside, since it writes to a module's children too; else the module's own method is
    called. `unstored`: only modules with meta buffers that no state dict holds count. Raise Error for one without code.
    """
    waiting = [each for each in waiting_modules(module) if not unstored or any(map(_is_meta, _unstored(each)))]
    if not waiting:
        return []
    if init is not None:
        if not callable(init):
            raise TypeError(f"{what}: init must be a function of a module, got {init!r}")
        return [(each, functools.partial(init, each)) for each in waiting]
    names, own = {each: name for name, each in module.named_modules()}, set(map(id, waiting))
    found: list[_Call] = []
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


class Writes(TorchDispatchMode):
    """A mode that runs an initialisation, and notes which tensors torch's operations write."""

    def __init__(self) -> None:
        super().__init__()
        #: address -> memory that no call has written all of
        self._waiting: dict[int, torch.Tensor] = {}
        #: address -> which elements calls have written, and how many not, of memory that is written in parts
        self._parts: dict[int, tuple[torch.Tensor, int]] = {}
        #: the number of the call that runs
        self.now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in written_by(func, args, kwargs):
            if isinstance(each, torch.Tensor) and place(each) in self._waiting:
                self._note(each, func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, written: torch.Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """Note which elements an operation writes."""
        at, name = place(written), name_of_op(func)
        whole = self._waiting[at]
        marks = _MARKS.get(name)
        if marks is None and written.numel() == whole.numel():
            self._written(at)
            return
        size = whole.untyped_storage().nbytes() // whole.element_size()
        seen, left = self._parts.get(at) or (torch.zeros(size, dtype=torch.bool, device="cpu"), whole.numel())
        if written.element_size() == whole.element_size():
            view = seen.as_strided(written.shape, written.stride(), written.storage_offset())
            before = int(view.sum())
            view.fill_(True) if marks is None else marks(view, *args[1:], **kwargs)
            left -= int(view.sum()) - before
        self._parts[at] = seen, left
        if not left:
            self._written(at)

    def _written(self, at: int) -> None:
        self._waiting.pop(at, None)
        self._parts.pop(at, None)

    def before_call(self, module: torch.nn.Module) -> None:
        """Prepare for the call of a module."""

    def after_call(self, module: torch.nn.Module) -> None:
        """Note what numpy, say, has written to a module's own tensors: they began as zeros."""
        for each in _own(module):
            if place(each) in self._waiting and place(each) not in self._parts and bool(each.any()):
                self._written(place(each))

    def run(self, module: torch.nn.Module, calls: Sequence[_Call], given: set[int], what: str) -> None:
        """Run the calls. Raise Error for tensors of `given`, by their ids, that the module still has and no call wrote."""
        self._parts.clear()
        self._waiting = {place(t): t.data for t in _named(module).values() if id(t) in given and place(t)}
        with torch.no_grad(), self:
            for self.now, (each, call) in enumerate(calls):
                self.before_call(each)
                call()
                self.after_call(each)
        left = [name for name, each in _named(module).items() if place(each) in self._waiting]
        if left:
            parts = self._parts.get(place(_named(module)[left[0]]))
            some = "" if parts is None else f"{parts[1]} elements of "
            raise Error(
                f"{what}: no call of the initialisation wrote {some}{', '.join(map(repr, left[:8]))} ({len(left)} in all), which would be zeros: "
                "pass an init= that writes to each, or build their modules off the meta device, as with torch.device('cpu')"
            )


def places_of(module: torch.nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the tables of all modules' own tensors, each with a copy."""
    return [(held, {**held}) for each in module.modules() for held in (each._parameters, each._buffers)]


def place(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, or 0 for one without."""
    try:
        return 0 if isinstance(tensor, Stored) else tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # sparse, lazy, or a wrapper of others
        return 0


def _named(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _unstored(module: torch.nn.Module) -> list[torch.Tensor | None]:
    stored = buffers_of_state(module)
    return [each for name, each in module._buffers.items() if name not in stored]


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def part_of_whole(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's DTensor parameter, placed like `like`, of a whole one."""
    return placed_parameter(local_part(whole.detach(), like).clone(memory_format=torch.contiguous_format), like)


def local_with_memory(tensor: Any, allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a DTensor parameter like one of the meta device, whose local tensor has memory."""
    return placed_parameter(with_memory(held_tensor(tensor), allocate), tensor)


def with_memory(tensor: torch.Tensor, allocate: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same class, strides and attributes on the CPU; a DTensor becomes a whole, plain parameter."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    like = like if like.is_contiguous() else torch.empty_like(like, memory_format=torch.preserve_format)
    memory = allocate(like.numel(), dtype=like.dtype, device="cpu").as_strided(like.shape, like.stride())
    if isinstance(tensor, torch.nn.Parameter):
        kind = type(tensor) if issubclass(type(tensor), torch.nn.Parameter) else torch.nn.Parameter
        memory = subclassed(kind, memory, tensor.requires_grad)
    memory.__dict__.update({name: each for name, each in tensor.__dict__.items() if name not in _OF_STORED})
    return memory
