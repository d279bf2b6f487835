"""A model of the device on which torch would have each tensor, while all tensors are really the CPU's
(simulated_gpus.py).

An adopted tensor is on the GPU, and so are results of operations on it. A tensor created without a device is on the
host. The device of a tensor created with one is unknown, since a simulated GPU's device is called cpu. So the
simulation refuses what torch refuses on real GPUs, and counts host waits, if the package makes the call. A test's own
scenes may mix tensors.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as sw
import torch
from internals import ShardedGradient
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_PACKAGE = str(Path(sw.__file__).parent)
#: whoever is between the package and an operation
_BETWEEN = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), __file__, "<")
#: take tensors of several devices
_ACROSS = ("copy_", "_to_copy", "_foreach_copy_", "index", "index_put_")
#: read a GPU's values on the host; the first is how the second is called by what __torch_dispatch__ runs
_WAIT = ("item", "_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim")
#: no operation of these has a number from the host
_ALL_THERE = ("_amp_foreach_non_finite_check_and_unscale_",)
#: read nothing of what they are given but its shape
_SHAPES_ALONE = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_empty",
    "new_zeros",
)
READ, WRITE = 1, 2
#: types without a model of their own
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: read one number of a GPU, for which the host waits
_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
_KEPT = 4096
#: functions of the package that a program calls for values
_GIVE_VALUES = ("full_gradients", "state_dict")


class WrongDevice(RuntimeError):
    """The error that torch raises on real GPUs."""


class Devices:
    """The known devices of tensors.

    Parameters
    ----------
    is_adopted : callable
        Whether an address is in memory that stands for a GPU's.

    Attributes
    ----------
    waits : list of str
        Each place in the package at which torch has made the host wait.
    """

    def __init__(self, is_adopted: Callable[[int], bool]) -> None:
        self._is_adopted = is_adopted
        self._known: dict[int, tuple[StorageWeakRef, bool]] = {}  # by storage: whether on the GPU
        self._room = _KEPT
        self.waits: list[str] = []

    def on_gpu(self, tensor: torch.Tensor) -> bool | None:
        """Return the device of a tensor; None if it is unknown."""
        if type(tensor) not in _PLAIN:
            if isinstance(tensor, ShardedGradient):
                return True
            tensor = held(tensor)
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        found = self._known.get(storage._cdata)
        if found is not None:
            return found[1]
        return True if self._is_adopted(storage.data_ptr()) else None

    def put(self, tensor: torch.Tensor, on_gpu: bool) -> torch.Tensor:
        """Record the device of a tensor's memory."""
        tensor = held(tensor)
        if tensor.layout is torch.strided and not isinstance(tensor, ShardedGradient):
            storage = tensor.untyped_storage()
            if len(self._known) > self._room:
                self._known = {at: kept for at, kept in self._known.items() if not kept[0].expired()}
                self._room = max(_KEPT, 2 * len(self._known))
            self._known[storage._cdata] = StorageWeakRef(storage), on_gpu
        return tensor

    def wait(self, what: str) -> None:
        """Count a host wait of torch if the package caused it, unless the program asked for values."""
        place = _place_in_package()
        if place is not None and not _is_asked_for():
            self.waits.append(f"{what} at {place}")

    def refuse(self, tensor: torch.Tensor, error: Exception) -> None:
        """Raise `error` if the package asks for something that a GPU tensor does not have."""
        if self.on_gpu(tensor) and _place_in_package() is not None:
            raise error

    def before(self, operator: Operator, given: list[torch.Tensor], args: Any, kwargs: Any) -> bool | None:
        """Raise what torch would raise. Return the device of the results if it is known. `given`: the tensors among the arguments."""
        on_gpu = self.on_gpu
        where = [on_gpu(tensor) for tensor in given]
        if True in where:
            name = operator.name
            if name in _WAIT or (name == "copy_" and False in where and not _non_blocking(args, kwargs)):
                self.wait(name)
            if name not in _ACROSS:
                if False in where:
                    self._check(name, given, where)
                if operator.written:
                    self.after([tensor for tensor, _ in operator.tensors(operator.written, args, kwargs)], True)
            # torch itself, and scenes, name the device of a tensor
            return None if kwargs.get("device") is not None and _place_in_package() is not None else True
        known = all(each is False for each in where) and kwargs.get("device") is None
        return False if known else None

    def _check(self, name: str, given: list[torch.Tensor], where: list[bool | None]) -> None:
        whole = name in _ALL_THERE
        if any(at is False and (whole or tensor.dim()) for tensor, at in zip(given, where)):
            place = _place_in_package()
            if place is not None:
                raise WrongDevice(f"{name} at {place}: expected all tensors to be on the same device, cuda:0 and cpu")

    def after(self, result: Any, on_gpu: bool | None) -> None:
        """Record the device of an operation's `result`."""
        if on_gpu is None:
            return
        for tensor in (result,) if isinstance(result, torch.Tensor) else _tensors_in(result):
            if self.on_gpu(tensor) is None:
                self.put(tensor, on_gpu)


#: of torch: they hold tensors, and have no memory
HOLDERS = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}


def held(tensor: Any) -> Any:
    """Return the tensor with memory inside one of HOLDERS, or the tensor itself."""
    while type(tensor).__name__ in HOLDERS:
        tensor = getattr(tensor, HOLDERS[type(tensor).__name__])
    return tensor


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument or result; most are a tensor or a flat list."""
    flat = value if type(value) in (list, tuple) else tree_leaves(value)
    return [each for each in flat if isinstance(each, torch.Tensor)]


class Operator:
    """The tensor arguments of an operator of torch, as its schema declares them: (position, name, access) of each.

    Attributes
    ----------
    arguments : all of them; `written` : those that it writes to.
    accesses : those whose values it touches.
    call : what runs it.
    """

    __slots__ = ("function", "name", "arguments", "written", "accesses", "label", "call", "reads_a_number")

    def __init__(self, function: Any) -> None:
        schema = function._schema
        of_tensors = [(at, each) for at, each in enumerate(schema.arguments) if "Tensor" in str(each.type)]
        writes = [each.alias_info is not None and each.alias_info.is_write for _, each in of_tensors]
        self.function, self.name, self.label = function, function.overloadpacket.__name__, str(function).encode()
        self.call = function._op if type(function) is torch._ops.OpOverload else function
        self.reads_a_number = function in _NUMBERS
        self.arguments = [
            (at, each.name, READ | WRITE if is_written else READ) for (at, each), is_written in zip(of_tensors, writes)
        ]
        self.written = [argument for argument, is_written in zip(self.arguments, writes) if is_written]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.accesses = [] if is_view or self.name in _SHAPES_ALONE else self.arguments

    def tensors(self, arguments: list[tuple[int, str, int]], args: Any, kwargs: Any) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors in these arguments, each with its access."""
        found: list[tuple[torch.Tensor, int]] = []
        count = len(args)
        for position, name, access in arguments:
            value = args[position] if position < count else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                found.append((value, access))
            elif value is not None:
                found += [(each, access) for each in _tensors_in(value)]
        return found


_operators: dict[int, Operator] = {}


def operator_of(function: Any) -> Operator:
    """Cache by the identity of the function, which is kept alive; torch computes its hash in Python."""
    found = _operators.get(id(function))
    return found or _operators.setdefault(id(function), Operator(function))


def _non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _place_in_package() -> str | None:
    """Return the running line of the package; None if other code runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        if not file.startswith(_BETWEEN) and file != _SIMULATION:
            return None
        frame = frame.f_back
    return None


def _is_asked_for() -> bool:
    """Return True if a function that returns values to the host is on the call stack."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _GIVE_VALUES:
        frame = frame.f_back
    return frame is not None


_SIMULATION = str(Path(__file__).with_name("simulated_gpus.py"))
