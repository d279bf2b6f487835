"""iter_full_parameters: a module's whole parameters, one chunk after another; sharding: where their elements lie."""

from __future__ import annotations

import builtins
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from ._engine import CommError, Error, HostComm
from .comm.agreement import gather_answers
from .comm.process_group import group_ranks
from .comm.waits import calling, on_every_rank
from .layout.views import dtype_name
from .options.names import near, offers_names
from .parallel.engine import needed_engine
from .parallel.replica import Replica
from .parameters.whole_reads import Pool, Reads, aligned, check_plain, flat_like, named_whole, shaped
from .torch_compat import cuda
from .torch_compat.adapters import Made, merged_names

_CALL = "iter_full_parameters"
_Names = Collection[str] | Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor to yield: its name, what makes it, its dtype, and the rank that gets it (-1: all)."""

    name: str
    made: Made
    dtype: torch.dtype
    receiver: int
    nbytes: int


@offers_names
@on_every_rank("sw.iter_full_parameters()")
def iter_full_parameters(
    module: torch.nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bytes: int = 256 << 20,
    ranks: str | int = "all",
    names: _Names = None,
    merge_lora: bool = False,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over the names and the whole values of a wrapped module's parameters, at any stage. Collective.

    Parameters
    ----------
    module : Module
        A wrapped module.
    dtype : torch.dtype, optional
        Cast floating-point values to it. Default: each parameter's own.
    bytes : int
        Bytes of a chunk, the tensors that are gathered at once. A larger tensor is a chunk of its own.
    ranks : {"all", "owner"} or int
        Which rank gets the values: all, one by its number in the module's group, or for each tensor the one that owns
        its first element. The others get None in their place.
    names : collection of str, or callable, optional
        The parameters to yield: names, or a function from a name to a bool. Default: all.
    merge_lora : bool
        True to add the active LoRA adapters of peft to the weights, which have the base model's names.

    Yields
    ------
    (str, Tensor or None)
        In the order of named_parameters(), a tied parameter under its first name. The tensor has the parameter's shape
        and device, and memory of its own: a program may keep or change it.

    Raises
    ------
    Error, TypeError, ValueError, NotImplementedError
        On all ranks alike, at the call: for an argument that is not legal or differs between ranks, inside
        full_parameters(writable=True), for DTensors, for groups=, for other adapters than LoRA's of linear layers.
    Error
        While iterating, on the ranks that go on, which it tells the rank that stopped: it left the loop by `break`, by
        an exception or by close(), or its memory ran out. A rank that keeps the iterator and does not go on makes the
        others wait until the module's `timeout_s`.

    Notes
    -----
    Memory: at most two chunks on a rank that gets values, as long as it keeps none; none on other ranks of hosts. On GPUs
    released parameters (zero=3) take one chunk on all ranks. merge_lora needs one more tensor. Values are those of the
    call: ranks leave the loop together, so none can step while another reads.
    """
    engine = needed_engine(_CALL, module)
    replicas, bare = list(engine.replicas), engine.module
    comm, group = replicas[0].group.comm, replicas[0].group
    reads, items = Reads(replicas), list[_Item]()

    def list_items() -> builtins.bytes:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{_CALL}: dtype= must be a floating-point torch.dtype or None, got {dtype!r}")
        if not isinstance(bytes, int) or isinstance(bytes, bool) or bytes < 1:
            raise ValueError(f"{_CALL}: bytes= must be an integer of at least 1, got {bytes!r}")
        legal = ranks in ("all", "owner") or (type(ranks) is int and 0 <= ranks < group.world_size)
        if not legal:
            raise ValueError(
                f'{_CALL}: ranks= must be "all", "owner" or a rank in [0, {group.world_size}), got {ranks!r}'
            )
        check_readable(replicas, _CALL)
        named = named_whole(bare)
        check_plain(named, _CALL)
        made = merged_names(bare, named) if merge_lora else {name: Made(name) for name in named}
        for name in _chosen(made, names):
            source = reads.like(named[made[name].base])
            to = dtype if dtype is not None and source.dtype.is_floating_point else source.dtype
            to_rank = ranks if isinstance(ranks, int) else -1 if ranks == "all" else reads.owner(named[made[name].base])
            items.append(_Item(name, made[name], to, to_rank, source.numel() * to.itemsize))
        return json.dumps([["bytes=", bytes], *([i.name, dtype_name(i.dtype), i.receiver] for i in items)]).encode()

    label = f"whole parameters of {type(bare).__name__}"
    gather_answers(comm, list_items, label, refusals=(Exception,), retell=_retold, compare=_difference)
    for replica in replicas:
        replica.access.before_reads()
    stream = _stream(reads, named_whole(bare), items, bytes, comm, label)
    next(stream)  # behind its `try`: an end of the program's loop reaches it from now on
    return stream  # type: ignore[return-value]


def check_readable(replicas: Sequence[Replica], call: str) -> None:
    """Raise for a module of which no rank can read whole values now."""
    if len(replicas) > 1:
        raise NotImplementedError(f"{call}: modules with groups= are not supported: use sw.full_state_dict")
    for each in replicas:
        if each.access.is_writing:
            raise Error(
                f"{call}: inside full_parameters(writable=True) ranks have values of their own: call it outside"
            )
        if each.model_ranks is not None:
            raise NotImplementedError(f"{call}: DTensors are not supported: use sw.full_state_dict")
        if each.in_sliced_join:
            raise Error(f"{call} is collective, and inside join a rank without inputs takes no part: call it outside")


def _chosen(made: Iterable[str], names: _Names) -> list[str]:
    if names is None:
        return list(made)
    if callable(names):
        return [name for name in made if names(name)]
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{_CALL}: names= must be a collection of str, a callable or None, got {names!r}")
    known = set(made)
    odd = next((name for name in sorted(names) if name not in known), None)
    if odd is not None:
        raise ValueError(f"{_CALL}: names= has {odd!r}, which is no parameter{near(odd, known)}")
    return [name for name in made if name in names]


def _retold(rank: int, sentence: str) -> Exception:
    return Error(sentence if sentence.startswith((_CALL, "merge_lora")) else f"{_CALL}: rank {rank}: {sentence}")


def _difference(said: Sequence[bytes]) -> str:
    tables = [json.loads(each) for each in said]
    rank = next(number for number, each in enumerate(tables) if each != tables[0])
    at = next((n for n, pair in enumerate(zip(tables[0], tables[rank])) if pair[0] != pair[1]), None)
    at = min(len(tables[0]), len(tables[rank])) if at is None else at
    texts = [" ".join(map(str, each[at])) if at < len(each) else "nothing more" for each in (tables[0], tables[rank])]
    return f"{_CALL}: rank 0 asks for {texts[0]} and rank {rank} for {texts[1]}: pass the same arguments on every rank"


def _chunks(items: Sequence[_Item], most: int) -> list[list[_Item]]:
    found: list[list[_Item]] = []
    filled = 0
    for item in items:
        if not found or filled + item.nbytes > most:
            found.append([])
            filled = 0
        found[-1].append(item)
        filled += item.nbytes
    return found


def _stream(
    reads: Reads, named: dict[str, torch.Tensor], items: Sequence[_Item], most: int, comm: HostComm, label: str
) -> Iterator[tuple[str, torch.Tensor | None] | None]:
    chunks = _chunks(items, most)
    pool = Pool(max((sum(aligned(item.nbytes) for item in chunk) for chunk in chunks), default=0))
    last, is_over = "", not chunks
    try:
        yield None
        for number, chunk in enumerate(chunks):
            if reads.sends:
                _meet(comm, label)
            failure: Exception | None = None
            values: list[torch.Tensor | None] = []
            try:
                with torch.no_grad():
                    values = _read(reads, named, chunk, pool, comm.rank)
            except Exception as error:  # the peers learn of it where they meet
                failure = error
            is_over = failure is not None or number + 1 == len(chunks)
            _meet(comm, label, failure)
            while values:
                last = chunk[-len(values)].name
                yield last, values.pop(0)
    except GeneratorExit:
        if not is_over and comm.is_alive:
            is_over = True
            _tell(comm, label, f"stopped {f'after {last!r}' if last else 'before the first parameter'}")
        raise


def _meet(comm: HostComm, label: str, failure: Exception | None = None) -> None:
    """Wait for all ranks. Raise `failure`, or Error if another rank does not go on."""
    said = _tell(comm, label, "" if failure is None else f"failed: {failure}")
    if failure is not None:
        raise failure
    rank = next((number for number, each in enumerate(said) if each), None)
    if rank is not None:
        raise Error(
            f"{_CALL}: rank {rank} {said[rank].decode()}, and rank {comm.rank} goes on: every rank must iterate equally far"
        )


def _tell(comm: HostComm, label: str, sentence: str) -> list[bytes]:
    with calling("sw.iter_full_parameters()"):
        try:
            return comm.all_gather_bytes(sentence.encode(errors="backslashreplace"), label)
        except CommError:
            if sentence:  # this rank has its own reason to end
                return []
            raise


def _read(
    reads: Reads, named: dict[str, torch.Tensor], chunk: Sequence[_Item], pool: Pool, rank: int
) -> list[torch.Tensor | None]:
    """Return a chunk's tensors, None in place of those for other ranks."""
    mine = [item for item in chunk if item.receiver in (-1, rank)]
    sources = {name: named[name] for item in chunk for name in item.made.sources} if reads.sends else {}
    whole = dict(zip(sources, reads.gather(list(sources.values()))))
    on_host = [item for item in mine if not cuda.runtime.holds(reads.like(named[item.made.base]))]
    memory = pool.take([(named[item.made.base].numel(), item.dtype) for item in on_host]) if on_host else []
    made: dict[str, torch.Tensor] = dict(zip((item.name for item in on_host), memory))
    for item in mine:
        base, flat = named[item.made.base], made.get(item.name)
        if item.made.adapters:
            parts = [shaped(*_flat(reads, named[name], whole.get(name))) for name in item.made.sources]
            weight = parts[0] if parts[0].dtype.is_floating_point else parts[0].float()
            item.made.add(weight, parts[1:])
            source = weight.as_strided((weight.numel(),), (1,), weight.storage_offset())
        elif flat is None or item.made.base in whole:
            source = _flat(reads, base, whole.get(item.made.base))[0]
        else:
            source = flat
            reads.read(base, flat)
        if flat is None:
            flat = source.to(item.dtype)
        elif source is not flat:
            flat.copy_(source)
        made[item.name] = shaped(flat, reads.like(base))
    return [made.get(item.name) for item in chunk]


def _flat(reads: Reads, tensor: torch.Tensor, whole: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of all elements in memory order, and their layout."""
    like = reads.like(tensor)
    if whole is None:
        whole = flat_like(like)
        reads.read(tensor, whole)
    return whole, like


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Where the elements of a parameter lie.

    Attributes
    ----------
    shape, stride : tuple of int
        Of the whole parameter. Elements are numbered in memory order: row-major if it is contiguous.
    dtype : torch.dtype
    mesh : tuple of tuple of int
        Global numbers of the ranks: each row is a replica, whose ranks together own every element once.
    ranges : tuple of (int, int)
        By rank of the module's group: [low, high), the elements that it owns; (0, 0) for none.
    is_whole : bool
        True if every rank can read all elements at any time; else only a rank's own last.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    mesh: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int], ...]
    is_whole: bool
    _own: Callable[[], torch.Tensor] = dataclasses.field(repr=False, compare=False)

    def own(self) -> torch.Tensor:
        """Return this rank's elements, flat: the memory itself, to read until the next step. Not collective."""
        return self._own()


def sharding(module: torch.nn.Module) -> dict[str, Sharding]:
    """Return where the elements of a wrapped module's parameters lie, by name, for transfers that a program plans itself.

    Not collective, but for the first call on a module of fully_shard. Names are those of iter_full_parameters().

    Raises
    ------
    Error
        If the module is not wrapped.
    NotImplementedError
        For DTensors and for groups=.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = sw.wrap(torch.nn.Linear(4, 2), zero=3)
    >>> found = sw.sharding(model)["weight"]
    >>> found.shape, found.ranges, found.own().numel()
    ((2, 4), ((0, 8),), 8)
    """
    engine = needed_engine("sharding", module)
    replicas = list(engine.replicas)
    for each in replicas:
        if len(replicas) > 1 or each.model_ranks is not None:
            raise NotImplementedError("sharding: DTensors and groups= are not supported")
    reads, named = Reads(replicas), named_whole(engine.module)
    members = group_ranks(replicas[0].group.torch_group)
    rows = tuple(tuple(members[rank] for rank in row) for row in replicas[0].slicing.rows())

    def describe(tensor: torch.Tensor) -> Sharding:
        like, runs, is_whole = reads.like(tensor), reads.runs(tensor), not reads.is_released(tensor)
        runs += [(0, 0)] * (len(members) - len(runs))
        low, high = runs[replicas[0].group.rank]

        def own() -> torch.Tensor:
            if not is_whole:
                return reads.own(tensor)[1]
            replicas[0].access.settle()
            data = tensor.detach()
            return data.as_strided((data.numel(),), (1,), data.storage_offset())[low:high]

        return Sharding(tuple(like.shape), tuple(like.stride()), like.dtype, rows, tuple(runs), is_whole, own)

    return {name: describe(each) for name, each in named.items()}
