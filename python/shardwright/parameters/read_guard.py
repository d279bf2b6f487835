"""Guards of parameters without values: reading a released one raises, reading one that is being gathered waits.

A guarded parameter's class is a subclass made for it (guarded_classes), whose __torch_function__ torch calls for every operation.
Metadata, gradients and hooks work as usual. An operation that reads or writes values raises with the parameter's name
(zero=3, private), or makes the current stream wait (after a step on a GPU, step_gathers.py). It then gets its
own class back, so whole parameters cost nothing. On a guarded parameter `.grad` costs 0.3 us more, other metadata 1.2 us.
Our loops over many parameters run inside unguarded(), which avoids the cost.

A read does not gather a released parameter. On GPUs a gather is a collective, in which a rank that reads alone would
hang. A program that reads all parameters once would hold all of them until the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from .._engine import Error
from ..torch_compat.autograd import CAN_BE_UNGUARDED, read_gradient, set_gradient, unguarded
from ..torch_compat.internals import TensorBase

#: attributes that need values, or give a tensor that has them
_VALUES = frozenset("data H T imag mH mT real __cuda_array_interface__ _cdata".split())
_METHODS = (
    "_is_view _use_count data_ptr dim dim_order element_size get_device is_complex is_conj is_contiguous "
    "is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed ndimension nelement "
    "new_empty new_empty_strided new_full new_ones new_zeros numel register_hook register_post_accumulate_grad_hook "
    "requires_grad_ retain_grad size storage_offset stride untyped_storage __len__"
).split()
_FUNCTIONS = (
    "empty_like full_like is_complex is_conj is_floating_point is_inference is_neg is_same_size is_signed numel "
    "ones_like rand_like randint_like randn_like result_type zeros_like"
).split()
#: functions that run autograd's graph, which gathers a parameter before its use
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward)


def _allowed() -> frozenset[Any]:
    found: set[Any] = set()
    for name in dir(torch.Tensor):
        attribute = torch.Tensor.__dict__.get(name, getattr(TensorBase, name, None))
        if name not in _VALUES and hasattr(attribute, "__set__"):
            found |= {attribute.__get__, attribute.__set__}
    found |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
    return frozenset(found | {getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)})


_ALLOWED = _allowed()
#: methods that return the memory itself: it exists while a parameter is released, and is being written while one is
#: awaited
_MEMORY = frozenset((torch.Tensor.data_ptr, torch.Tensor.untyped_storage))
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Guarded(torch.nn.Parameter):
    """Base of the class of a guarded parameter."""

    #: names by id, the class while it is not guarded, and the function that makes an awaited one readable
    _shardwright_names: dict[int, str]
    _shardwright_own: type
    _shardwright_arrive: Any
    #: True once nothing gathers the parameters any longer
    _shardwright_is_orphan = False

    # Each step reads and writes it for every parameter, so it bypasses __torch_function__.

    @property
    def grad(self) -> Any:
        with unguarded():
            return read_gradient(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        with unguarded():
            set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        with unguarded():
            set_gradient(self, None)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class Released(_Guarded):
    """Base of the class of a released parameter."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ALLOWED:
            with unguarded():
                return function(*args, **(kwargs or {}))
        if function == _SET_DATA and args[0]._shardwright_is_orphan:
            args[0].__class__ = args[0]._shardwright_own
            args[0].data = args[1]
            return None
        if function in _BACKWARDS:
            return _run_plainly(function, args, kwargs or {})
        _refuse(function, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter {_name_of(self)!r} of shape {tuple(self.shape)}, {self.dtype}, released"

    def __deepcopy__(self, memo: Any) -> Any:
        _refuse(torch.Tensor.__deepcopy__, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(torch.Tensor.__reduce_ex__, (self,), {})


class Awaited(_Guarded):
    """Base of the class of a parameter that is being gathered."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ALLOWED and function not in _MEMORY:
            with unguarded():
                return function(*args, **(kwargs or {}))
        for parameter in _found([args, kwargs], Awaited):
            _arrive(parameter)
        return function(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_arrive(self))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_arrive(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _arrive(self).__reduce_ex__(protocol)


class Inherited(Awaited):
    """Base of the class of a parameter in a forked child that has not read it."""

    grad = _Guarded.grad.getter(lambda self: _arrive(self).grad)  # type: ignore[attr-defined]


def guarded_classes(
    base: type,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    arrive: Callable[[torch.Tensor], None] | None = None,
) -> tuple[dict[type, type], dict[type, type]]:
    """Return the classes under `base` of guarded parameters, by their own classes, and the reverse (change_classes)."""
    guarded: dict[type, type] = {}
    for own in set(map(type, parameters)) if CAN_BE_UNGUARDED else ():
        if issubclass(own, base):  # another guard's
            continue
        body = {
            "_shardwright_names": {id(parameter): name for name, parameter in zip(names, parameters)},
            "_shardwright_own": own,
            "_shardwright_arrive": arrive,
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
        }
        make: Any = type(own)
        guarded[own] = make(own.__name__, (base,) if own is torch.nn.Parameter else (base, own), body)
    return guarded, {kind: own for own, kind in guarded.items()}


def change_classes(parameters: Sequence[torch.Tensor], classes: dict[type, type]) -> None:
    """Give each parameter the class that `classes` has for its own."""
    for parameter in parameters:
        parameter.__class__ = classes.get(type(parameter), type(parameter))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return `.grad` without a read."""
    with unguarded():
        return read_gradient(parameter)


def _arrive(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter that the current stream waits for."""
    kind: Any = type(parameter)
    own = kind._shardwright_own
    kind._shardwright_arrive(parameter)
    if type(parameter) is kind:
        parameter.__class__ = own
    return parameter


def _run_plainly(function: Any, args: Any, kwargs: Any) -> Any:
    """Run a backward. Released parameters passed to it have their own classes meanwhile."""
    lent = [(p, type(p), p.data_ptr()) for p in _found([args, kwargs], Released)]
    for parameter, kind, _ in lent:
        parameter.__class__ = kind._shardwright_own
    try:
        return function(*args, **kwargs)
    finally:
        for parameter, kind, address in lent:
            if parameter.data_ptr() == address:
                parameter.__class__ = kind


def _refuse(function: Any, args: Any, kwargs: Any) -> NoReturn:
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        name = f".{getattr(getattr(function, '__self__', None), '__name__', '')}"
    which = next(_found([args, kwargs], Released))
    remedy = (
        "its wrapper is gone, and no rank has the others' slices: assign new values, p.data = ..., or load_state_dict(..., assign=True)"
        if which._shardwright_is_orphan
        else "it has them in its module's forward and backward, and inside `with sw.full_parameters(module)` (writable=True to write); "
        "sw.full_state_dict(module) has copies"
    )
    raise Error(
        f"parameter {_name_of(which)!r} is released, so that this rank keeps a slice of it, and {name} needs all of its values: {remedy}"
    )


def _name_of(parameter: _Guarded) -> str:
    return str(parameter._shardwright_names.get(id(parameter), ""))


def _found(value: Any, kind: type) -> Iterator[Any]:
    """Yield parameters guarded by `kind` in nested lists, tuples and dicts."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        yield from _found(list(value.values()), kind)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _found(each, kind)
