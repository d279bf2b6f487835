"""The rules of ownership of a sliced optimizer: the elements on which each rank steps.

`Slices` cuts each parameter where its bucket is cut. `WholeTensors` gives whole tensors to ranks, balanced by work,
for optimizers whose update depends on a tensor as a whole: Adafactor, Muon, third-party classes. Only a parameter's
owner keeps its state and steps on it; then all ranks get the owner's values. Gradients are averaged and sliced as
usual: at zero >= 2 an owner assembles its tensors' gradients before the step.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ..layout.local_parameters import is_local, whole_of
from ..layout.memory import bytes_of
from ..layout.shard_runs import itemsize_of, memory_order
from ..layout.views import dtype_name
from ..parallel.agreement.optimizer_agreement import plain
from ..parallel.replica import Replica
from ..torch_compat import cuda
from . import moments
from .forwarding import NotAveraged
from .rules import Cost, element_cost, rule_of
from .sliced_state import description_of

#: of a message between hosts, and of a turn of the pages that a host's ranks share
_CHUNK_BYTES, _TURN_BYTES = 8 << 20, 2 << 20


class Entry:
    """One parameter: its number in the optimizer and `at` in its engine, and what this rank steps on in its place."""

    def __init__(self, index: int, replica: Replica, at: int) -> None:
        self.index, self.replica, self.at = index, replica, at
        self.memory: Any = replica.parameters()
        #: the module's parameter, and the engine's: a DTensor's local part
        self.member, self.parameter = replica.table.module_parameters[at], replica.table.parameters[at]
        #: return this rank's slice of the averaged gradient; raise Error if no step is possible
        self.gradient: Callable[[], torch.Tensor | None] = functools.partial(replica.gradients.slice_of, at)
        self.group: dict[str, Any] | None = None  # of the optimizer
        self.owner: int | None = None  # of a whole tensor: the number of its slice
        self.piece: torch.Tensor | None = None
        self.home: torch.Tensor | None = None  # the piece's memory
        #: None: no piece was made; False: a frozen parameter moves when it is unfrozen
        self.is_final: bool | None = None

    @property
    def name(self) -> str:
        return self.replica.table.names[self.at]

    @property
    def like(self) -> torch.Tensor:
        """Return a tensor with the parameter's shape and strides, released or not. Its values must not be read."""
        return self.replica.layout_of(self.at)

    def run(self, rank: int) -> tuple[int, int]:
        """Return [begin, end) of the elements, in memory order, of a rank's slice."""
        return self.memory.run(self.at, rank)


class Slices:
    """Each rank of an engine owns a slice of each parameter."""

    is_whole = False
    #: return the gradient that a step needs of an entry; raise Error if no step is possible
    gradient: Callable[[Entry], torch.Tensor | None] = operator.methodcaller("gradient")

    def assign(self, entries: Iterable[Entry]) -> None:
        """Give new parameters their owners."""

    def run(self, entry: Entry, rank: int) -> tuple[int, int]:
        """Return [begin, end) of the elements, in memory order, that a rank steps on."""
        return entry.run(rank)

    def piece(self, entry: Entry) -> torch.Tensor | None:
        """Return what this rank steps on; None for nothing."""
        return entry.memory.slice(entry.at)

    def publish(self, replicas: Sequence[Replica], failed: bool) -> list[int] | None:
        """Make what this rank stepped on visible to all. Return which ranks failed; None if that is not known."""
        outcomes: list[int] | None = replicas[0].parameters().publish(failed=failed)
        for part in replicas[1:]:  # the first engine's publish reports the failure to their ranks
            part.parameters().publish(failed=None)
        return outcomes

    def layout(self, entries: Iterable[Entry]) -> list[Any]:
        """Return what must be equal for a rank's state to fit again."""
        return [[[each.index, *each.run(each.replica.group.rank)] for each in entries]]

    def described(self, entry: Entry, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Return each entry of a parameter's state, in its form on the ranks that have it. Collective."""
        label = f"optimizer state of {entry.name}"
        sent = entry.replica.group.comm.all_gather_bytes(description_of(mine, entry.piece).encode(), label)
        return next((each for each in map(json.loads, sent) if each), {})

    def gather(self, entry: Entry, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's whole state on every rank. Collective."""
        like, whole = entry.like, dict[str, Any]()
        for key, (kind, name, value) in self.described(entry, mine).items():
            dtype = getattr(torch, name, None)
            if kind == "records":
                whole[key] = self._gather_records(entry, key, mine.get(key))
                continue
            if kind != "sliced":
                whole[key] = torch.tensor(value, dtype=dtype, device="cpu") if kind == "tensor" else value
                continue
            result = torch.empty_like(like, dtype=dtype, requires_grad=False)
            flat = memory_order(result, like)
            fill_from_ranks(entry.replica, flat, mine.get(key), entry.run, f"optimizer state of {entry.name}")
            if flat.data_ptr() != result.data_ptr():
                result = flat.as_strided(like.shape, like.contiguous().stride()).clone()
            whole[key] = whole_of(entry.parameter, result)
        return whole

    def _gather_records(self, entry: Entry, key: str, mine: torch.Tensor | None) -> torch.Tensor:
        """Return a moment of int8 as records if others can read them, else decoded. Collective."""
        like, label = entry.like, f"optimizer state of {entry.name}"
        flat = torch.empty(moments.run(0, like.numel())[1], dtype=torch.uint8, device="cpu")
        fill_from_ranks(entry.replica, flat, mine, lambda rank: moments.run(*self.run(entry, rank)), label)
        found = {key: flat.reshape(-1, moments.RECORD)}
        if like.is_contiguous() and not is_local(entry.parameter):
            return found[key]
        return whole_of(entry.parameter, moments.floating(found, like)[key])


def fill_from_ranks(
    replica: Replica, flat: torch.Tensor, mine: torch.Tensor | None, run: Callable[[int], tuple[int, int]], label: str
) -> None:
    """Fill a parameter's elements, in memory order, from all ranks' parts: run(rank) is [begin, end). Collective."""
    data = b"" if mine is None or not replica.slicing.speaks else bytes_of(mine)
    for rank, each in enumerate(replica.group.comm.all_gather_bytes(data, label)):
        low, high = run(rank)
        if low < high and each:
            flat[low:high] = torch.frombuffer(bytearray(each), dtype=flat.dtype)


def divided(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Return an owner of each piece of work: the costliest first, each to the one with the least. `loads` grow."""
    owners = [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        owners[at] = min(range(len(loads)), key=lambda owner: (loads[owner], owner))
        loads[owners[at]] += costs[at]
    return owners


class _Turn(NamedTuple):
    """The copies of this rank between two barriers, in bytes."""

    written: list[tuple[Entry, int, int, int]]  # [begin, end) of its slice, place in its pages
    read: list[tuple[Entry, int, int, int, int]]  # begin in the whole, size, slice of the sender, place in its pages


class WholeTensors(Slices):
    """One rank of a replica owns each tensor, so that ranks have equal work.

    Memory: state about 1 / world_size, at worst one tensor more; at zero=3 without sharing also a copy of owned
    tensors; at zero >= 2 4 MiB of pages that the host's ranks map. A step sends every tensor to world_size - 1 ranks (to
    none at zero=3), and at zero >= 2 the slices of its gradient to its owner alone; between hosts to all.
    """

    is_whole = True

    def __init__(self, replica: Replica, cost: Cost) -> None:
        self._replica, self._slicing, self._memory = replica, replica.slicing, replica.parameters()
        self._link: Any = replica.link
        self._cost = cost
        self._loads = [0.0] * self._slicing.count
        self._owned: list[Entry] = []  # by some rank
        self._slices: dict[Entry, torch.Tensor] = {}  # of this step's gradients, at zero >= 2
        self._pages: list[torch.Tensor] = []
        self._plan: tuple[list[Entry], list[_Turn]] = ([], [])
        self._turn = 0
        if (
            self._link is None
            and replica.zero >= 2
            and self._slicing.count > 1
            and not replica.group.is_apart(self._slicing)
        ):
            self._pages = self._make_pages()
        #: bytes of averaged gradients that this rank has got from others
        self.received_bytes = 0

    def _make_pages(self) -> list[torch.Tensor]:
        """Return memory of each rank of this replica, in order of their slices, that all of them map. Collective."""
        pages = self._replica.group.comm.arena(2 * _TURN_BYTES, "gradients of whole tensors", of_hosts=True)
        ranks = sorted(self._slicing.replica(), key=self._slicing.of_rank.__getitem__)
        return [from_dlpack(pages.tensor(0, "uint8", [2 * _TURN_BYTES], None, rank)) for rank in ranks]

    def assign(self, entries: Iterable[Entry]) -> None:
        """Give the costliest tensor first, each to the rank of a replica with the least work, alike on every rank."""
        costs = {each: self._cost(tuple(each.like.shape), each.group or {}) for each in entries if each.owner is None}
        entries = sorted(costs, key=lambda each: each.index)
        for entry, owner in zip(entries, divided([costs[each] for each in entries], self._loads)):
            entry.owner = owner
        self._owned += entries

    def run(self, entry: Entry, rank: int) -> tuple[int, int]:
        return (0, entry.parameter.numel()) if entry.owner == self._slicing.of_rank[rank] else (0, 0)

    def piece(self, entry: Entry) -> torch.Tensor | None:
        if entry.owner != self._slicing.own:
            return None
        like = entry.like
        flat = self._copy_of(like) if self._is_released(entry) else self._memory.flat(entry.at)
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())

    def _is_released(self, entry: Entry) -> bool:
        return bool(self._memory.releases)

    def _copy_of(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, device="cpu")

    def _mine(self, entries: Iterable[Entry] | None = None) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yield those of the parameters that this rank owns, in memory order."""
        for entry in self._owned if entries is None else entries:
            if entry.piece is not None:
                yield entry, entry.piece.as_strided((entry.piece.numel(),), (1,))

    def gradient(self, entry: Entry) -> torch.Tensor | None:
        piece = entry.gradient()
        gradient = entry.parameter.grad
        return piece if self._replica.zero >= 2 or gradient is None else gradient.detach()

    def begin(self) -> None:
        """Forget the gradients of an earlier step."""
        self._slices = {}

    def take(self, entry: Entry, gradient: torch.Tensor | None) -> None:
        """Note a slice of a gradient, to be sent to its owner; or set the gradient of a tensor of this rank."""
        piece = entry.piece
        if self._replica.zero >= 2 and not isinstance(gradient, NotAveraged):
            if gradient is not None:
                self._slices[entry] = gradient
        elif piece is not None:  # one from another rank is one-dimensional, in memory order
            if gradient is not None and gradient.shape != piece.shape:
                gradient = gradient.as_strided(piece.shape, piece.stride())
            piece.grad = gradient

    def complete(self) -> None:
        """Gather for each owner the gradients of its tensors, and its released tensors, from all slices. Collective."""
        slices, self._slices = self._slices, {}
        if self._memory.releases:
            for entry, flat in self._mine():
                self._memory.read_whole(entry.at, flat)
        for entry in slices:
            if (piece := entry.piece) is not None:
                piece.grad = torch.empty_strided(piece.shape, piece.stride(), dtype=piece.dtype, device="cpu")
        label = f"gradients of the tensors that ranks own, of {self._replica.label}"
        ordered = sorted(slices, key=lambda each: each.index)
        if self._pages:
            self._exchange_through_pages(ordered, slices, label)
            return
        ends = itertools.accumulate(entry.parameter.nbytes for entry in ordered)
        for _, members in itertools.groupby(zip(ordered, ends), key=lambda pair: pair[1] // _CHUNK_BYTES):
            chunk = [entry for entry, _ in members]
            mine = b"".join(bytes_of(slices[entry]) for entry in chunk)
            for rank, data in enumerate(self._replica.group.comm.all_gather_bytes(mine, label)):
                at = 0
                for entry in chunk:
                    low, high = entry.run(rank)
                    size = (high - low) * slices[entry].element_size()
                    whole = None if entry.piece is None else entry.piece.grad
                    if whole is not None and size:
                        flat = whole.as_strided((whole.numel(),), (1,))
                        flat[low:high] = torch.frombuffer(bytearray(data[at : at + size]), dtype=whole.dtype)
                    at += size

    def _exchange_through_pages(self, ordered: list[Entry], slices: Mapping[Entry, torch.Tensor], label: str) -> None:
        """Copy slices to their tensors' owners, in turns: a rank writes its own, and owners read after a barrier."""
        if self._plan[0] != ordered:
            self._plan = (ordered, self._turns(ordered))
        pages, own = self._pages, self._slicing.own
        mine = {entry: slices[entry].view(torch.uint8) for entry in ordered}
        wholes = {
            entry: entry.piece.grad.as_strided((entry.piece.numel(),), (1,)).view(torch.uint8)
            for entry in ordered
            if entry.piece is not None and entry.piece.grad is not None
        }
        for entry, flat in wholes.items():
            low, high = (each * slices[entry].element_size() for each in entry.run(self._replica.group.rank))
            flat[low:high] = mine[entry]
        for turn in self._plan[1]:
            at = _TURN_BYTES * (self._turn % 2)  # a rank writes again only after owners have come to a later barrier
            for entry, begin, end, place in turn.written:
                pages[own][at + place : at + place + end - begin] = mine[entry][begin:end]
            self._replica.group.comm.barrier(label)
            for entry, low, size, of, place in turn.read:
                wholes[entry][low : low + size] = pages[of][at + place : at + place + size]
                self.received_bytes += size
            self._turn += 1

    def _turns(self, ordered: list[Entry]) -> list[_Turn]:
        """Return the copies of an exchange: each rank sends its slices of others' tensors as one stream, cut into turns."""
        turns: list[_Turn] = []
        rank_of = {self._slicing.of_rank[rank]: rank for rank in self._slicing.replica()}
        for of in range(self._slicing.count):
            at = 0
            for entry in ordered:
                low, high = (each * entry.like.element_size() for each in entry.run(rank_of[of]))
                begin = low
                while entry.owner != of and begin < high:
                    end = min(high, begin + _TURN_BYTES - at % _TURN_BYTES)
                    while len(turns) <= at // _TURN_BYTES:
                        turns.append(_Turn([], []))
                    turn, place = turns[at // _TURN_BYTES], at % _TURN_BYTES
                    if of == self._slicing.own:
                        turn.written.append((entry, begin - low, end - low, place))
                    elif entry.owner == self._slicing.own:
                        turn.read.append((entry, begin, end - begin, of, place))
                    at, begin = at + end - begin, end
        return turns

    def publish(self, replicas: Sequence[Replica], failed: bool) -> None:
        memory, comm = self._memory, self._replica.group.comm
        if memory.releases:
            for entry, flat in itertools.chain(self._mine(), self._from_other_hosts()):
                memory.write_whole(entry.at, flat)
            memory.publish(sliced=False)
        elif memory.shared:
            for entry, flat in self._from_other_hosts():
                memory.flat(entry.at).copy_(flat)
            comm.barrier(f"updated tensors of {self._replica.label}")
            memory.cast_stepped()
        else:
            for root, owned in self._by_owner():
                self._broadcast(root, [memory.flat(entry.at) for entry in owned])

    def _by_owner(self) -> Iterator[tuple[int, list[Entry]]]:
        """Yield (rank, the parameters that it owns and may have updated)."""
        stepped = sorted((e for e in self._owned if self._memory.is_stepped(e.at)), key=lambda each: each.index)
        for owner in range(self._slicing.count):
            yield self._slicing.first_owner(owner), [entry for entry in stepped if entry.owner == owner]

    def _broadcast(self, root: int, flats: list[torch.Tensor]) -> None:
        ranges = [(flat.data_ptr(), flat.numel() * flat.element_size()) for flat in flats if flat.numel()]
        if ranges:
            self._replica.group.comm.broadcast(ranges, root, f"updated tensors of {self._replica.label}")

    def _from_other_hosts(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yield tensors that other hosts updated, on the rank with this host's copy of their replica. Collective."""
        group, slicing = self._replica.group, self._slicing
        if not group.is_apart(slicing):
            return
        mine = dict(self._mine())
        beside = group.sharers(slicing)
        here = {slicing.of_rank[rank] for rank in beside}
        for root, owned in self._by_owner():
            for entry in owned:
                flat = mine[entry] if entry in mine else WholeTensors._copy_of(self, entry.like)
                self._broadcast(root, [flat])
                if group.rank == beside[0] and slicing.of_rank[root] not in here:
                    yield entry, flat

    def layout(self, entries: Iterable[Entry]) -> list[Any]:
        return ["tensor", sorted((each.index, each.owner) for each in self._owned)]

    def gather(self, entry: Entry, mine: Mapping[str, Any]) -> dict[str, Any]:
        packed, mine = io.BytesIO(), moments.portable(mine, entry.like)
        if entry.piece is not None:
            on_gpu = [key for key, value in mine.items() if isinstance(value, torch.Tensor) and not value.is_cpu]
            torch.save([{**mine, **{key: mine[key].cpu() for key in on_gpu}}, on_gpu], packed)
        assert entry.owner is not None
        owner = self._slicing.first_owner(entry.owner)
        sent = self._replica.group.comm.all_gather_bytes(packed.getvalue(), f"optimizer state of {entry.name}")[owner]
        found, on_gpu = torch.load(io.BytesIO(sent), weights_only=True)
        where = entry.like.device  # its number differs between ranks
        return {key: value.to(where) if key in on_gpu else value for key, value in found.items()}


class WholeTensorsOnGpu(WholeTensors):
    """Whole tensors of a module on a GPU: one all_gather a bucket collects slices, one broadcast per owner sends.

    All is enqueued on torch's current stream. Memory: at zero >= 2 also the largest bucket, and in a step the gradients
    of owned tensors; at zero=3 also a copy of owned tensors that are released.
    """

    _room: torch.Tensor | None = None
    #: this rank's slices of released parameters that the current step changes
    _released: Mapping[Entry, torch.Tensor] = {}

    def _is_released(self, entry: Entry) -> bool:
        return self._memory.releases and bool(self._memory.is_released(entry.at))

    def _copy_of(self, like: torch.Tensor) -> torch.Tensor:
        return cuda.runtime.zeros(like.numel(), like.dtype, like)

    def _by_bucket(self, entries: Iterable[Entry]) -> Iterator[tuple[torch.Tensor, dict[Entry, slice]]]:
        """Yield memory for each bucket with some of these parameters, and their elements of it."""
        reducer, found = self._replica.reducer, dict[int, list[Entry]]()
        for entry in sorted(entries, key=lambda each: each.index):
            found.setdefault(reducer.place(entry.at)[0], []).append(entry)
        for bucket, members in sorted(found.items()):
            _, numel, dtype, _ = reducer.bucket_shape(bucket)
            nbytes = numel * itemsize_of(dtype)
            if self._room is None or self._room.numel() < nbytes:
                self._room = cuda.runtime.zeros(nbytes, torch.uint8, members[0].like)
            places = {entry: reducer.place(entry.at)[1:] for entry in members}
            whole = self._room[:nbytes].view(getattr(torch, dtype))
            yield whole, {entry: slice(begin, begin + size) for entry, (begin, size) in places.items()}

    def _own_part(self, whole: torch.Tensor, entry: Entry, place: slice) -> torch.Tensor:
        low, high = self._memory.own_run(entry.at)
        return whole[place.start + low : place.start + high]

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (to, from) pairs of dense tensors with equal strides."""
        copies = [(to.data_ptr(), of.data_ptr(), to.numel() * to.element_size()) for to, of in pairs if to.numel()]
        if copies:
            self._link.comm.pack(copies, self._link.current_stream())

    def _gathered(self, slices: Mapping[Entry, torch.Tensor]) -> Iterator[tuple[torch.Tensor, dict[Entry, slice]]]:
        """Yield like _by_bucket, with all ranks' slices of these tensors filled in. Collective."""
        row = self._replica.backend.row
        assert row is not None
        for whole, places in self._by_bucket(slices):
            self._copy((self._own_part(whole, each, place), slices[each]) for each, place in places.items())
            dtype = dtype_name(whole.dtype)
            row.comm.all_gather([(whole.data_ptr(), whole.numel(), dtype)], row.current_stream())
            yield whole, places

    def complete(self) -> None:
        slices, self._slices = self._slices, {}
        self._released = {each: self._memory.piece(each.at) for each in slices if self._is_released(each)}
        for whole, places in self._gathered(self._released):
            self._copy((flat, whole[places[each]]) for each, flat in self._mine(places))
        for whole, places in self._gathered(slices):
            for entry, place in places.items():
                if (piece := entry.piece) is not None:
                    piece.grad = whole[place].clone().as_strided(piece.shape, piece.stride())

    def publish(self, replicas: Sequence[Replica], failed: bool) -> None:
        for whole, places in self._by_bucket(self._released):
            self._copy((whole[places[each]], flat) for each, flat in self._mine(places))
            for owner in range(self._slicing.count):
                sent = [whole[place] for each, place in places.items() if each.owner == owner]
                self._broadcast(self._slicing.first_owner(owner), sent)
            self._copy((self._released[each], self._own_part(whole, each, place)) for each, place in places.items())
        self._released = {}
        for root, owned in self._by_owner():
            self._broadcast(root, [self._memory.flat(each.at) for each in owned if not self._is_released(each)])
        if self._memory.releases:
            self._memory.publish(sliced=False)

    def _broadcast(self, root: int, flats: list[torch.Tensor]) -> None:
        ranges = [(flat.data_ptr(), flat.numel() * flat.element_size(), "uint8") for flat in flats if flat.numel()]
        if ranges and self._link.world_size > 1:
            self._link.comm.broadcast(ranges, root, self._link.current_stream())


def owner_of(partition: str, replicas: Sequence[Replica], optimizer: torch.optim.Optimizer) -> Slices:
    """Return the rule of ownership of an optimizer of these engines. Collective."""
    if partition != "tensor":
        return Slices()
    rule = rule_of(optimizer)
    cost = element_cost if rule is None else rule.cost
    return (WholeTensors if replicas[0].backend.link is None else WholeTensorsOnGpu)(replicas[0], cost)


def members_of(param_group: Any) -> list[torch.Tensor]:
    """Return the tensors of a new group, named or not; turn an iterator into a list."""
    given = param_group.get("params", ()) if isinstance(param_group, dict) else ()
    if isinstance(given, torch.Tensor):
        given = [given]
    elif not isinstance(given, (list, tuple, set)):
        given = param_group["params"] = list(given)
    named = (each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in given)
    return [each for each in named if isinstance(each, torch.Tensor)]  # torch refuses everything else


def adopt(group: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Copy another rank's hyperparameters; write a tensor's value in place."""
    for key, value in theirs.items():
        mine = group.get(key)
        if plain(mine) == value:
            continue
        if isinstance(mine, torch.Tensor):
            mine.copy_(torch.tensor(value, dtype=mine.dtype, device="cpu"))
        else:
            group[key] = tuple(value) if isinstance(mine, tuple) else value
