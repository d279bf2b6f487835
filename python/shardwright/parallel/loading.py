"""Loading: a model's stored tensors into a wrapped module, each rank the elements that it keeps.

The readers of shardwright/formats give names, shapes and dtypes without data. Those of safetensors and of our own
folders also give ranges of bytes, so a rank reads its slices alone and holds nothing besides.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._engine import Error
from ..comm.agreement import gather_answers
from ..comm.model_ranks import together
from ..formats.lazy import Lazy
from ..formats.stored import Stored
from ..layout.shard_runs import memory_order
from ..layout.views import dtype_name
from ..options.name_map import NameMap, Rename
from ..options.names import near
from ..torch_compat.dtensor import held_tensor, is_dtensor, local_part
from ..torch_compat.internals import buffers_of_state, ignored_by_transformers
from .replica import Replica

#: a cast reads this much at a time
_CHUNK_BYTES = 16 << 20
_NAMED_MOST = 3
_PLACES = "load_pretrained: the place must be a path, a mapping of str to Tensor, or an iterable of pairs (str, Tensor)"
_ROUNDINGS = ("bfloat16", "float16", "float32")


def place_of(weights: Any) -> tuple[Any, dict[str, Any]]:
    """Return the place of wrap's `weights`, and load_pretrained's options. Raise TypeError for an unknown option."""
    if not (isinstance(weights, tuple) and len(weights) == 2 and isinstance(weights[1], dict)):
        return weights, {}
    unknown = [name for name in weights[1] if name not in ("rename", "dtype", "strict")]
    if unknown:
        raise TypeError(f"weights=: options of load_pretrained are 'rename', 'dtype' and 'strict', got {unknown[0]!r}")
    return weights


class UnmatchedNames(NamedTuple):
    """The names that only one side has, under torch's names."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def fill_module(
    bare: torch.nn.Module, replicas: Sequence[Replica], place: Any, *, strict: bool = True, **options: Any
) -> UnmatchedNames:
    """Load the tensors of a place into a module of these replicas. `own`: all of them, each needed. Collective."""
    ranks = next((each.model_ranks for each in replicas if each.model_ranks is not None), None)
    found: UnmatchedNames = together(
        ranks,
        lambda: _fill_module(bare, replicas, place, strict=strict, **options),
        f"weights of {type(bare).__name__}",
    )
    return found


def _fill_module(
    bare: torch.nn.Module,
    replicas: Sequence[Replica],
    place: Any,
    *,
    rename: Rename = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
    own: bool = False,
) -> UnmatchedNames:
    comm, label = replicas[0].group.comm, f"weights of {type(bare).__name__}"
    names, targets = NameMap(rename=rename, strict=strict), _Targets(bare, replicas, own)
    stored: dict[str, Any] = {}
    rounds: torch.dtype | None = None
    streams = not isinstance(place, (str, os.PathLike, Mapping))
    found = UnmatchedNames([], [])

    def match() -> bytes:
        nonlocal stored, found, rounds
        from ..formats.places import stored_tensors  # imports torch.distributed.checkpoint

        rounds = _rounding(dtype)
        targets.check()
        if streams and not isinstance(place, Iterable):
            raise TypeError(f"{_PLACES}, got a {type(place).__name__}")
        if streams:
            return json.dumps([["dtype=", repr(rounds)]]).encode()
        stored = names.renamed(stored_tensors(place))
        left = [name for name in stored if not targets.has(name)] if own else []
        if left:
            raise Error(f"load_pretrained: no parameter and no buffer of the module would get {_some(left, ())}")
        found = targets.match(stored, strict, "the mapping" if isinstance(place, Mapping) else f"{os.fspath(place)!r}")
        rows = [_row(name, each) for name, each in stored.items()]
        return json.dumps([["dtype=", repr(rounds)], *rows]).encode()

    def fill() -> bytes:
        nonlocal found
        rows, loaded = list[list[Any]](), dict[str, Any]()
        for name, each in _pairs(place, names) if streams else stored.items():
            if streams:
                targets.check_fits(name, each)
                if name in loaded:
                    raise Error(f"load_pretrained: two pairs have the name {name!r}, by rename= or as given")
                loaded[name] = None
            is_whole = isinstance(each, Lazy) and each.part is None
            each = Lazy.of(each.read()) if is_whole else each  # once, where the format has no ranges
            if streams or is_whole:
                rows.append(_row(name, each))
            targets.fill(name, each, rounds)
        if streams:
            found = targets.match(loaded, strict, "the iterable")
        return json.dumps(rows).encode()

    for replica in replicas:
        replica.access.abandon_load()  # of a load_state_dict() that ended in an exception
    _agree(comm, match, label)
    failure: Exception | None = None
    said = b""
    with contextlib.ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.filling())
        try:
            with torch.no_grad():
                said = fill()
        except Exception as error:  # the peers wait for this rank
            failure = error

    def outcome() -> bytes:
        if failure is not None:
            raise failure
        return said

    _agree(comm, outcome, label)
    return found


def _retold(rank: int, sentence: str) -> Exception:
    return Error(sentence if sentence.startswith("load_pretrained") else f"load_pretrained: rank {rank}: {sentence}")


def _agree(comm: Any, answer: Any, label: str) -> None:
    try:
        gather_answers(comm, answer, label, refusals=(Exception,), retell=_retold, compare=_difference)
    except BaseException as error:
        if not isinstance(error, Exception) and comm.is_alive:  # an interrupt of this rank only
            comm.abort(f"load_pretrained: rank {comm.rank}: {error!r}")
        raise


def _row(name: str, each: Any) -> list[Any]:
    """Return what all ranks must find of a stored tensor; its values if the format has ranges."""
    if not isinstance(each, Lazy):
        return [name, "extra state"]
    return [name, dtype_name(each.dtype), list(each.shape), "" if each.part is None else each.sample()]


def _difference(said: Sequence[bytes]) -> str:
    """Name the first tensor of which ranks found something else."""
    tables = [json.loads(each) for each in said]
    rows = next(rows for rows in itertools.zip_longest(*tables) if any(row != rows[0] for row in rows))
    rank = next(rank for rank, row in enumerate(rows) if row != rows[0])
    texts = ["nothing" if row is None else " ".join(map(str, row[:3])) for row in (rows[0], rows[rank])]
    what = f"{texts[0]} with other values" if texts[0] == texts[1] else f"{texts[0]} and {texts[1]}"
    return f"load_pretrained: ranks 0 and {rank} found different tensors, {what}: name the same place on every rank"


def _rounding(dtype: Any) -> torch.dtype | None:
    found = getattr(torch, dtype) if isinstance(dtype, str) and dtype in _ROUNDINGS else dtype
    if found is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    kind = ValueError if isinstance(dtype, (str, torch.dtype)) else TypeError
    raise kind(f"load_pretrained: dtype= must be a floating-point torch.dtype or one of {_ROUNDINGS}, got {dtype!r}")


def _pairs(place: Iterable[tuple[str, torch.Tensor]], names: NameMap) -> Iterator[tuple[str, Any]]:
    from ..formats.places import stored_value

    for pair in place:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{_PLACES}, got a {type(place).__name__} of {type(pair).__name__}")
        yield names.new(pair[0]), stored_value(*pair)


class _Targets:
    """The tensors of a module by their names, and where each rank keeps them."""

    def __init__(self, bare: torch.nn.Module, replicas: Sequence[Replica], own: bool) -> None:
        self._bare, self._replicas = bare, replicas
        self._named: dict[str, torch.Tensor] = dict(bare.named_parameters(remove_duplicate=False))
        self._extra: dict[str, torch.nn.Module] = {}
        for prefix, each in bare.named_modules(remove_duplicate=False):
            if type(each).set_extra_state is not torch.nn.Module.set_extra_state:
                self._extra[f"{prefix}._extra_state".lstrip(".")] = each
            buffers = each._buffers if own else buffers_of_state(each)
            self._named |= {f"{prefix}.{n}" if prefix else n: b for n, b in buffers.items() if b is not None}
        self._places = {id(p): (r, i) for r in replicas for i, p in enumerate(r.table.module_parameters)}
        self._done: dict[int, str] = {}

    def has(self, name: str) -> bool:
        return name in self._named

    def check(self) -> None:
        """Raise Error if the module's values would not last."""
        for each in self._replicas:
            if each.access.is_writing:
                raise Error("load_pretrained: full_parameters(writable=True) would undo it as it ends: call it outside")

    def match(self, stored: Mapping[str, Any], strict: bool, what: str) -> UnmatchedNames:
        """Return the names on one side only, without stored ones that a transformers model ignores. Raise Error if `strict`."""
        rules = ignored_by_transformers(self._bare)
        seen, missing = {id(self._named[name]) for name in stored if name in self._named}, []
        for name, tensor in self._named.items():
            if id(tensor) not in seen:
                missing.append(name)
            seen.add(id(tensor))
        known = self._named.keys() | self._extra.keys()
        unexpected = [name for name in stored if name not in known and not any(re.search(r, name) for r in rules)]
        for name, each in stored.items():
            if each is not None and name in self._named:
                self.check_fits(name, each)
        if strict and (missing or unexpected):
            lacks = [f"{what} lacks {_some(missing, stored)}"] if missing else []
            lacks += [f"the module lacks {_some(unexpected, self._named)}"] if unexpected else []
            raise Error(f"load_pretrained: {'; '.join(lacks)}; rename= maps names, strict=False accepts this")
        return UnmatchedNames(missing, unexpected)

    def check_fits(self, name: str, each: Any) -> None:
        """Raise Error for a stored tensor of another shape, or of a dtype that cannot be cast."""
        target = self._named.get(name)
        if target is None:
            return
        if tuple(each.shape) != tuple(target.shape):
            raise Error(
                f"load_pretrained: {name!r} has shape {tuple(each.shape)}, and the module's {tuple(target.shape)}"
            )
        if each.dtype != target.dtype and not _can_cast(each.dtype, target.dtype):
            raise Error(
                f"load_pretrained: {name!r} is {dtype_name(each.dtype)}, which cannot be cast to the module's {dtype_name(target.dtype)}"
            )

    def fill(self, name: str, each: Any, dtype: torch.dtype | None) -> None:
        """Write this rank's elements of a stored tensor. Raise Error if another name of it has stored other values."""
        if name in self._extra:
            self._extra[name].set_extra_state(each.read() if isinstance(each, Lazy) else each)
        target = self._named.get(name)
        if target is None:
            return
        each = _part_of(each, target) if is_dtensor(target) else each
        rounds = dtype if each.dtype.is_floating_point else None
        first = self._done.setdefault(id(target), name)
        for low, memory, whole in self._memory(target, each, rounds):
            values = memory if first == name else torch.empty_like(memory)
            if whole is None:
                _read(each, low, values, rounds)
            else:
                values.copy_(whole)
            if values is not memory and not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (values, memory))):
                raise Error(
                    f"load_pretrained: {first!r} and {name!r} are one tensor of the module, with other values stored"
                )
        replica, index = self._places.get(id(target), (None, 0))
        if replica is not None:
            replica.parameters().note_written(index)

    def _memory(self, target: torch.Tensor, each: Lazy, rounds: Any) -> Iterator[tuple[int, torch.Tensor, Any]]:
        """Return (first element, memory) of this rank's row-major elements of a tensor; with values, of all other elements."""
        replica, index = self._places.get(id(target), (None, 0))  # None: a buffer, or an ignored parameter
        storage = None if replica is None else replica.parameters()
        like, pieces = (target, []) if storage is None else (storage.like(index), storage.pieces(index))
        if pieces and like.is_contiguous():
            yield from ((low, piece, None) for low, high, piece in pieces if low < high)
            return
        whole = torch.empty(each.shape, dtype=like.dtype, device="cpu")
        _read(each, 0, whole.view(-1), rounds)
        yield from ((low, piece, memory_order(whole, like)[low:high]) for low, high, piece in pieces)
        if not pieces:  # outside of a replica, or strides that overlap or leave gaps
            yield 0, held_tensor(target) if is_dtensor(target) else target, whole


def _part_of(each: Any, like: Any) -> Lazy:
    """Return this rank's part of a stored tensor, cut like the DTensor `like`, without reading it."""
    part: Any = local_part(Stored.of(each), like)
    return part.lazy


def _read(each: Lazy, low: int, out: torch.Tensor, rounds: torch.dtype | None) -> None:
    """Copy the elements of a stored tensor that begin at `low`, row-major, to `out`, rounded to `rounds` first."""
    if each.part is None:
        source = each.read().reshape(-1)[low : low + out.numel()]
        out.copy_(source if rounds is None else source.to(rounds))
        return
    item = each.dtype.itemsize
    is_plain = out.is_contiguous() and out.device.type == "cpu"
    in_place = is_plain and each.dtype == out.dtype and rounds in (None, out.dtype)
    step = _CHUNK_BYTES // item
    buffer = torch.empty(0 if in_place else min(step, out.numel()), dtype=each.dtype, device="cpu")
    for at in range(0, out.numel(), step):
        target = out[at : at + step]
        memory = target if in_place else buffer[: target.numel()]
        each.part((low + at) * item, memory.nbytes, memory.data_ptr())
        if memory is not target:
            target.copy_(memory if rounds is None else memory.to(rounds))


def _can_cast(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return True between floating-point dtypes, and from integers or bools to integers that hold all their values."""
    if any(each.is_floating_point or each.is_complex for each in (dtype, other)):
        return dtype.is_floating_point and other.is_floating_point
    infos = [torch.iinfo(torch.uint8 if each == torch.bool else each) for each in (dtype, other)]
    return dtype == torch.bool or (
        other != torch.bool and infos[1].min <= infos[0].min and infos[0].max <= infos[1].max
    )


def _some(names: Sequence[str], known: Iterable[str]) -> str:
    shown = [f"{name!r}{_nearest(name, known)}" for name in names[:_NAMED_MOST]]
    more = f" and {len(names) - _NAMED_MOST} more" if len(names) > _NAMED_MOST else ""
    return ", ".join(shown) + more


def _nearest(name: str, known: Iterable[str]) -> str:
    return near(name, known).replace(": did", " (did").replace("?", "?)")
