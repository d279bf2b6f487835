"""Stored: a tensor whose values are still in files, with the shape, dtype and device that it will have.

Views, concatenations and casts of it are computed on boxes: which elements of which stored tensors are its elements. So a
program may rename, transpose, split and merge what it loads, and a rank reads its slices' bytes alone. Any other
operation is refused, or inside replaying() kept and done on whole tensors as they are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .._engine import Error
from ..torch_compat.internals import (
    TensorBase,
    is_view_op,
    name_of_op,
    no_torch_function,
    subclassed,
    swap_memory,
    tree_leaves,
    tree_map,
    without_memory_of,
    without_torch_function,
    written_by,
)
from .lazy import Lazy

#: one read of a stored tensor at most, and gaps that cost less to read than to jump over
_READ_BYTES, _GAP_BYTES = 16 << 20, 4 << 10
_CATS, _CASTS, _COPIES = ("aten::cat", "aten::stack"), ("aten::_to_copy",), ("aten::clone", "aten::_unsafe_view")
_LIKES = ("_like", "::new_empty", "::new_zeros", "::new_ones", "::new_full", "::new_empty_strided")
_replays = _tries = 0
_has_told = False
#: methods that use a tensor's memory past its operations
_BY_ADDRESS = (
    *("data_ptr", "numpy", "tolist", "share_memory_", "storage", "untyped_storage", "_typed_storage"),
    *("__array__", "__dlpack__"),
)
_logger = logging.getLogger("shardwright")


@dataclasses.dataclass(frozen=True)
class _Box:
    """Elements low..low+size of a tensor: those of a stored one from `start`, `strides` apart, cast to `casts` in turn."""

    source: Lazy
    low: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    casts: tuple[torch.dtype, ...] = ()

    def cut(self, low: Sequence[int], size: Sequence[int]) -> _Box | None:
        """Return the part inside other bounds; None if there is none."""
        lows = tuple(map(max, self.low, low))
        sizes = tuple(min(a + n, b + m) - at for a, n, b, m, at in zip(self.low, self.size, low, size, lows))
        if any(each <= 0 for each in sizes):
            return None
        start = self.start + sum((at - own) * step for at, own, step in zip(lows, self.low, self.strides))
        return dataclasses.replace(self, low=lows, size=sizes, start=start)

    def copy_to(self, out: torch.Tensor, read: Callable[[Lazy, int, int], torch.Tensor]) -> None:
        """Write the elements to `out`. read(source, first element, count) returns elements of a stored tensor."""
        span = 1 + sum((n - 1) * step for n, step in zip(self.size, self.strides))
        item, count, run = self.source.dtype.itemsize, math.prod(self.size), 1
        for step, n in sorted((step, n) for n, step in zip(self.size, self.strides) if n > 1):
            run *= n if step == run else 1
        gaps = (span - count) * item / max(count // run - 1, 1)  # bytes each, on average
        if count == 1 or (span * item <= _READ_BYTES and gaps <= _GAP_BYTES):
            values = read(self.source, self.start, span).as_strided(self.size, self.strides)
            for dtype in self.casts:
                values = values.to(dtype)
            out.copy_(values)
            return
        steps = [step if n > 1 else -1 for n, step in zip(self.size, self.strides)]
        at = steps.index(max(steps))
        half = self.size[at] // 2
        for low, n in ((0, half), (half, self.size[at] - half)):
            size = (*self.size[:at], n, *self.size[at + 1 :])
            part = dataclasses.replace(self, size=size, start=self.start + low * self.strides[at])
            part.copy_to(out.narrow(at, low, n), read)


class Stored(torch.Tensor):
    """See the module. `boxes`: where its elements are; None if `replay` must make it of whole tensors, by `what`."""

    boxes: tuple[_Box, ...] | None
    replay: Callable[[], torch.Tensor] | None
    what: str
    #: of a view that must become one of the same memory: (tensor, function of it)
    made_of: tuple[Any, Callable[[Any], Any]] | None

    #: see layout.memory
    has_no_address = True

    __torch_function__ = no_torch_function

    @classmethod
    def of(cls, lazy: Lazy, device: Any = "cpu") -> Stored:
        """Return a tensor of the stored one's dtype and shape."""
        like = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
        box = _Box(lazy, (0,) * like.ndim, tuple(lazy.shape), 0, like.stride())
        return _made(cls, like, device, (box,) if like.numel() else ())

    def refuse(self, operation: str) -> None:
        """Raise Error for an operation that needs values."""
        raise Error(
            f"{operation} needs the values of a tensor of shape {tuple(self.shape)}, which sw.meta_loading() left in "
            "its file: give the model to sw.wrap, sw.fully_shard or the program's trainer first, or to sw.materialize, which reads it whole"
        )

    @property
    def lazy(self) -> Lazy:
        """The tensor as a reader has it, row-major."""
        boxes, shape, twin = self.boxes, tuple(self.shape), _twin(self)
        if _is_stale(self):
            return Lazy.of(_values(self).contiguous())
        if boxes is None:
            assert self.replay is not None
            return Lazy(self.dtype, shape, self.replay)
        if len(boxes) == 1 and boxes[0].source.shape == shape and not boxes[0].casts:
            if boxes[0].strides == twin.contiguous().stride() and boxes[0].start == 0:
                return boxes[0].source
        dtype = next((box.casts[-1] if box.casts else box.source.dtype for box in boxes), self.dtype)

        def read() -> torch.Tensor:
            whole, sources = torch.empty(shape, dtype=dtype, device="cpu"), dict[int, torch.Tensor]()
            for box in boxes:
                flat = sources.setdefault(id(box.source), box.source.read().reshape(-1))
                values = flat.as_strided(box.size, box.strides, box.start + flat.storage_offset())
                for each in box.casts:
                    values = values.to(each)
                whole[tuple(slice(at, at + n) for at, n in zip(box.low, box.size))] = values
            return whole

        has_parts = all(box.source.part is not None for box in boxes)
        if not has_parts:
            return Lazy(dtype, shape, read)
        part = _reader(boxes, shape, dtype)
        sources = tuple({id(box.source): box.source for box in boxes}.values())
        how = repr([(box.low, box.size, box.start, box.strides, box.casts) for box in boxes])
        return Lazy(dtype, shape, read, part=part, sources=sources, how=how)

    @property
    def data(self) -> Any:
        return TensorBase.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, Stored):
            raise Error("a tensor that sw.meta_loading() left in its file takes no other data: wrap the model first")
        TensorBase.data.__set__(self, value)
        self.boxes, self.replay, self.what = value.boxes, value.replay, value.what

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = kwargs or {}, name_of_op(func)
        if name.endswith(_LIKES) and isinstance(args[0], Stored):
            like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device=args[0].device)
            return func(like, *args[1:], **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        held = [each for each in tensors if isinstance(each, Stored)]
        written = written_by(func, args, kwargs)
        if not written:
            made = _made_of_boxes(func, name, args, kwargs, tensors)
            if made is not None:
                return made
        writes = any(isinstance(each, Stored) for each in written)
        if not _replays or writes:
            if not all(isinstance(each, StoredOnDemand) for each in held) or (writes and not _tries):
                held[0].refuse(name.removeprefix("aten::"))
            if _tries:
                raise _NeedsValues(name.removeprefix("aten::"))
            return func(*_read_all(args), **_read_all(kwargs))
        return _kept(func, name, args, kwargs, computes=bool(written) or len(held) < len(tensors))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        made: Any = self.detach().requires_grad_(self.requires_grad)
        made.made_of = None  # a copy
        memo[id(self)] = made
        made.__dict__.update({name: each for name, each in self.__dict__.items() if name not in made.__dict__})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "a tensor that sw.meta_loading() left in its file cannot be pickled: give the model to sw.wrap or sw.materialize first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def _by_address(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "data_ptr" and _replays:
            return 0
        if not isinstance(self, StoredOnDemand) or not _fill(self, name):
            self.refuse(name)
        return getattr(self, name)(*args, **kwargs)

    return method


for _name in _BY_ADDRESS:
    setattr(Stored, _name, _by_address(_name))


class _NeedsValues(Error):
    """An operation, which it names, was not begun, since it needs values."""


class StoredOnDemand(Stored):
    """One that gets memory and its values in place, as an operation needs them: for programs that did not ask for Stored."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        global _tries
        kwargs = kwargs or {}
        with without_torch_function():
            held = [each for each in tree_leaves((args, kwargs)) if isinstance(each, StoredOnDemand)]
            for each in filter(_is_stale, held):
                _fill(each, "")
            _tries += 1
            try:
                return func(*args, **kwargs)
            except _NeedsValues as error:
                name = str(error)
            finally:
                _tries -= 1
            for each in held:
                _fill(each, name)
            return func(*args, **kwargs)

    @property
    def data(self) -> Any:
        return TensorBase.data.__get__(self) if _replays or not _fill(self, "data") else self.data

    @data.setter
    def data(self, value: Any) -> None:
        if isinstance(value, Stored):
            Stored.data.fset(self, value)  # type: ignore[attr-defined]
            self.made_of = value.made_of
        elif _fill(self, "data"):
            self.data = value
        else:
            self.refuse("data")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce_ex__(protocol) if _fill(self, "pickle") else super().__reduce_ex__(protocol)


def _is_stale(tensor: Any) -> bool:
    """Return True for a view of a tensor that has got memory since."""
    while isinstance(tensor, Stored) and tensor.made_of is not None:
        tensor = tensor.made_of[0]
    return not isinstance(tensor, Stored)


def _values(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, Stored):
        return tensor.detach()
    if tensor.made_of is not None:
        of, view = tensor.made_of
        return view(_values(of))
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.lazy.read())


def _fill(tensor: Any, operation: str) -> bool:
    """Give a tensor memory and its values in place; False if something else refers to it, such as a hook."""
    global _has_told
    if not isinstance(tensor, Stored):
        return True
    if not _has_told and operation:
        _has_told = True
        _logger.warning(
            "%s needs values of a model whose tensors sw.meta_loading() left in their files, as zero=3 asks: this rank reads that tensor "
            "of shape %s whole now, and others alike as they are needed. Do it after the model is wrapped to save memory",
            *(operation, tuple(tensor.shape)),
        )
    with without_torch_function(), torch.no_grad():
        if tensor.made_of is not None and not _fill(tensor.made_of[0], operation):
            return False
        memory, trains = _values(tensor), tensor.requires_grad
        if isinstance(tensor, torch.nn.Parameter):
            kind = type(tensor) if issubclass(type(tensor), torch.nn.Parameter) else torch.nn.Parameter
            memory = subclassed(kind, memory, trains)
        else:
            memory = memory.requires_grad_(trains)
        memory.__dict__.update(attributes_of(tensor))
        with contextlib.suppress(RuntimeError):
            swap_memory(tensor, memory)
        return not isinstance(tensor, Stored)


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a program gave a tensor."""
    ours = {*Stored.__annotations__, "_is_param"}
    return {name: each for name, each in vars(tensor).items() if name not in ours}


def waits(tensor: Any) -> bool:
    """Return True for a tensor without values: on the meta device, or still in its file."""
    return tensor is not None and (tensor.is_meta or isinstance(tensor, Stored))


def check_of_hosts(tensors: Iterable[tuple[str, Any]], what: str) -> None:
    """Raise Error for a tensor in its file, of these with names, that would be on another device than the CPU."""
    for name, each in tensors:
        if isinstance(each, Stored) and each.device.type != "cpu":
            raise Error(
                f"{what}: {name!r} is on {each.device}, and sw.meta_loading() left it in its file: only models of the CPU are read from "
                "there; load this one without sw.meta_loading()"
            )


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Return a context in which operations that boxes cannot express are kept, and done as the tensors are read."""
    global _replays
    _replays += 1
    try:
        yield
    finally:
        _replays -= 1


def _made(kind: Any, like: torch.Tensor, device: Any, boxes: Any, replay: Any = None, what: str = "") -> Stored:
    made: Stored = without_memory_of(kind, like, device=device)
    made.boxes, made.replay, made.what, made.made_of = boxes, replay, what, None
    return made


def _twin(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _made_of_boxes(func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the result of an operation on boxes; None if they cannot express it."""
    if any(not isinstance(each, Stored) or each.boxes is None for each in tensors):
        return None
    first: Any = tensors[0]
    kind = type(first)
    if name in _CASTS:
        device = kwargs.get("device") or first.device
        if kind is StoredOnDemand and not _replays and torch.device(device).type not in ("meta", first.device.type):
            return None
        like = func(_twin(first), *args[1:], **{**kwargs, "device": "meta", "pin_memory": None})
        casts = () if like.dtype == first.dtype else (like.dtype,)
        cast = tuple(dataclasses.replace(each, casts=(*each.casts, *casts)) for each in first.boxes)
        return _made(kind, like, first.device if torch.device(device).type == "meta" else device, cast)
    if name in _CATS:
        like, parts = func(*tree_map(_twin, args), **kwargs), args[0]
        at = kwargs.get("dim", args[1] if len(args) > 1 else 0) % like.ndim
        if any(each.dtype != like.dtype for each in parts) or any(each.ndim != parts[0].ndim for each in parts):
            return None
        stacks = name == "aten::stack"
        lows = itertools.accumulate((1 if stacks else each.shape[at] for each in parts), initial=0)
        moved = (_moved(box, at, low, stacks) for each, low in zip(parts, lows) for box in each.boxes)
        return _made(kind, like, first.device, tuple(moved))
    if name in _COPIES:
        like = func(_twin(first), *args[1:], **kwargs)
        views = torch.ops.aten.view.default if name == "aten::_unsafe_view" else torch.ops.aten.alias.default
        boxes = _viewed(first, views, args[1:] if name == "aten::_unsafe_view" else (), {})
        return None if boxes is None else _made(kind, like, first.device, boxes[0])
    if not is_view_op(func) or len(tensors) != 1:
        return None
    aliases = kind is StoredOnDemand and not _replays  # a program may write to the view
    if aliases and _tries and name != "aten::detach":
        return None
    results = func(_twin(first), *args[1:], **kwargs)
    found = [results] if isinstance(results, torch.Tensor) else list(results)
    if any(each.dtype != first.dtype or each.is_conj() or each.is_neg() for each in found):
        return None
    boxes = _viewed(first, func, args[1:], kwargs)
    if boxes is None:
        return None
    made = [_made(kind, like, first.device, each) for like, each in zip(found, boxes)]
    if aliases:
        for at, each in enumerate(made):
            each.made_of = first, functools.partial(_viewed_again, func, args[1:], kwargs, at)
    return made[0] if isinstance(results, torch.Tensor) else made


def _viewed_again(func: Any, args: Any, kwargs: Any, at: int, tensor: torch.Tensor) -> torch.Tensor:
    found = func(tensor, *args, **kwargs)
    return found if isinstance(found, torch.Tensor) else found[at]


def _moved(box: _Box, at: int, low: int, stacks: bool) -> _Box:
    """Return a box of a tensor that is concatenated, or stacked, along a dimension."""
    if not stacks:
        return dataclasses.replace(box, low=(*box.low[:at], box.low[at] + low, *box.low[at + 1 :]))
    low_, size, strides = (
        (*each[:at], new, *each[at:]) for each, new in ((box.low, low), (box.size, 1), (box.strides, 0))
    )
    return dataclasses.replace(box, low=low_, size=size, strides=strides)


def _viewed(tensor: Any, func: Any, args: Any, kwargs: Any) -> list[tuple[_Box, ...]] | None:
    """Return the boxes of each result of a view, found with a tensor of the meta device of the right strides; or None."""
    boxes, shape = tensor.boxes, tuple(tensor.shape)
    is_one = len(boxes) == 1
    # strides from which the place of an element of `tensor`, digit by digit, can be read
    strides = (
        boxes[0].strides if is_one else tuple(math.prod(n + 1 for n in shape[at + 1 :]) for at in range(len(shape)))
    )
    start = boxes[0].start if is_one else 0
    span = start + 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, strides))
    base = torch.empty(span, dtype=torch.uint8, device="meta").as_strided(shape, strides, start)
    try:
        results = func(base, *args, **kwargs)
    except RuntimeError:  # not a view of these strides
        return None
    found = [results] if isinstance(results, torch.Tensor) else list(results)
    if is_one:
        whole = [
            _Box(boxes[0].source, (0,) * e.ndim, tuple(e.shape), int(e.storage_offset()), e.stride(), boxes[0].casts)
            for e in found
        ]
        return [(box,) if each.numel() else () for each, box in zip(found, whole)]
    chosen = [_window(each, shape, strides) for each in found]
    if None in chosen:
        return None
    return [
        tuple(made for box in boxes if (made := _through(box, *window)) is not None)
        for window in chosen
        if window is not None
    ]


def _window(view: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return (lows, sizes, dimension of the tensor for each of the view's, or None for a new one); None if it is no window."""
    lows = [view.storage_offset() // step % (n + 1) for n, step in zip(shape, strides)]
    dims = [
        None if n == 1 else strides.index(step) if step in strides else -1 for n, step in zip(view.shape, view.stride())
    ]
    known = [each for each in dims if each is not None]
    if -1 in known or len(set(known)) < len(known):
        return None
    sizes = [1] * len(shape)
    for n, at in zip(view.shape, dims):
        if at is not None:
            sizes[at] = n
    return lows, sizes, dims


def _through(box: _Box, lows: Sequence[int], sizes: Sequence[int], dims: Sequence[int | None]) -> _Box | None:
    """Return a box as a window on its tensor shows it."""
    part = box.cut(lows, sizes)
    if part is None:
        return None
    low = tuple(0 if at is None else part.low[at] - lows[at] for at in dims)
    size = tuple(1 if at is None else part.size[at] for at in dims)
    strides = tuple(0 if at is None else part.strides[at] for at in dims)
    return dataclasses.replace(part, low=low, size=size, strides=strides)


def _read_all(tree: Any) -> Any:
    return tree_map(lambda each: each.lazy.read().to(each.device) if isinstance(each, Stored) else each, tree)


def _kept(func: Any, name: str, args: Any, kwargs: Any, *, computes: bool) -> Any:
    """Return results that are computed as they are read; computed now if they are no tensors, or others are involved."""
    try:
        likes = None if computes else func(*tree_map(_twin, args), **tree_map(_twin, kwargs))
    except (RuntimeError, NotImplementedError):  # values decide
        likes = None
    found = [likes] if isinstance(likes, torch.Tensor) else likes
    if not found or not all(isinstance(each, torch.Tensor) for each in found):
        return func(*_read_all(args), **_read_all(kwargs))
    first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Stored))

    def result(at: int) -> torch.Tensor:
        made = func(*_read_all(args), **_read_all(kwargs))
        return made if isinstance(made, torch.Tensor) else made[at]

    before = (each.what for each in tree_leaves((args, kwargs)) if isinstance(each, Stored) and each.boxes is None)
    short = next(before, name.removeprefix("aten::"))
    made = [
        _made(type(first), each, first.device, None, lambda at=at: result(at).contiguous(), short)
        for at, each in enumerate(found)
    ]
    return made[0] if isinstance(likes, torch.Tensor) else made


def _rectangles(shape: Sequence[int], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (lows, sizes) of boxes that are the row-major elements low..high of a shape, in order."""
    if low >= high:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row, end = low // inner, high // inner
    if low % inner:
        for lows, sizes in _rectangles(shape[1:], low % inner, min(inner, high - row * inner)):
            yield (row, *lows), (1, *sizes)
        row += 1
    if row < end:
        yield (row, *(0,) * (len(shape) - 1)), (end - row, *shape[1:])
    if row <= end and high % inner:
        for lows, sizes in _rectangles(shape[1:], 0, high % inner):
            yield (end, *lows), (1, *sizes)


def _reader(boxes: Sequence[_Box], shape: Sequence[int], dtype: torch.dtype) -> Callable[[int, int, int], None]:
    """Return Lazy.part of a tensor of boxes."""

    def read(source: Lazy, first: int, count: int) -> torch.Tensor:
        made, item = torch.empty(count, dtype=source.dtype, device="cpu"), source.dtype.itemsize
        assert source.part is not None
        source.part(first * item, count * item, made.data_ptr())
        return made

    def part(first: int, nbytes: int, address: int) -> None:
        item = dtype.itemsize
        low, high = first // item, -(-(first + nbytes) // item)
        out, at = torch.empty(high - low, dtype=dtype, device="cpu"), 0
        for lows, sizes in _rectangles(shape, low, high):
            count = math.prod(sizes)
            whole = out[at : at + count].view(sizes)
            for box in filter(None, (each.cut(lows, sizes) for each in boxes)):
                place = tuple(slice(a - b, a - b + n) for a, b, n in zip(box.low, lows, box.size))
                box.copy_to(whole[place], read)
            at += count
        ctypes.memmove(address, out.data_ptr() + first - low * item, nbytes)

    return part
