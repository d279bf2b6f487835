"""Building: a module of the meta device gets memory and values as it is wrapped, where no rank holds the whole of it.

A parameter gets a range of addresses whose pages exist once they are written. The initialisation runs in the order of
sw.materialize, from rank 0's random stream, on every rank. At private zero=3 two units are whole at a time. The
operations of the initialisation are watched. One that touches a third unit first writes another to the ranks' slices
and gives its pages back (docs/design/large_models.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._engine import Error, HostComm, crc32c
from ..comm.agreement import gather_answers
from ..comm.model_ranks import ModelRanks, together
from ..comm.process_group import HostGroup, host_group, resolve_group
from ..formats.stored import Stored, check_of_hosts, waits
from ..layout.local_parameters import end_local_parameters
from ..layout.memory import bytes_of, is_resident, reserved
from ..layout.param_groups import UnitPlan
from ..layout.param_table import ParameterTable
from ..options.options import Options
from ..options.precision import LOW_DTYPES
from ..torch_compat.dtensor import is_dtensor
from ..torch_compat.internals import buffers_of_state, changing_weights, swap_memory, tree_leaves
from .materialize import Writes, initialisers, local_with_memory, part_of_whole, place, places_of, with_memory
from .sharded_parameter import RowsTaken, ShardedParameter, take_rows

#: a parameter below it gets ordinary memory: a range of addresses has whole pages
_PAGE_BYTES = 4096
_WHOLE_AT_ONCE = 2


@dataclasses.dataclass(frozen=True)
class Values:
    """Where a module's values come from: wrap's `init` and `weights`. `optimizer`: what will step on them.

    `rows`: the parameters that fully_shard has cut, whose values are in their local tensors.
    """

    init: Any = None
    weights: Any = None
    optimizer: Any = None
    rows: Sequence[ShardedParameter] = ()


def begin_building(module: torch.nn.Module, options: Options, values: Values) -> Building | RowsTaken | None:
    """Give a module's tensors memory, until undo() or keep(); None if they have it and no values are given. Collective."""
    init, weights = values.init, values.weights
    stored = sum(isinstance(each, Stored) for each in (*module.parameters(), *module.buffers()))
    if init is None and weights is None and not stored:
        return RowsTaken(values.rows) if values.rows else None
    group = host_group(
        resolve_group(options.process_group, options.device_mesh, trains=True), options.timeout_s, options.warn_after_s
    )
    # ranks that have values come to the same agreement first
    beside = ModelRanks.beside(module.parameters(), group, stored)
    label, made = type(module).__name__, list[Building]()
    # an initialisation of DTensors runs on whole ones, whose units no slices lie under
    whole = init is not None and weights is None and any(is_dtensor(p) and p.is_meta for p in module.parameters())
    in_units = options.zero == 3 and (options.share_parameters is False or options.device is not None) and not whole

    def make() -> bytes:
        if init not in (None, True) and not callable(init):
            raise TypeError(f"init must be a function of a module, or True, got {init!r}")
        what = "weights=" if weights is not None else "init=" if init is not None else "sw.meta_loading()"
        check_buildable(module, values.optimizer, options, what, in_units=in_units)
        loads = weights is not None or init is None
        function = init if callable(init) else None
        made.append(Building(module, function, loads=loads, in_units=in_units, reads=weights is None, group=group))
        return b""

    def build() -> Building:
        gather_answers(group.comm, make, f"the build of {label}", refusals=(Exception,))
        made[0].begin(group.comm, label)
        if not made[0].in_units:
            made[0].initialise(group.comm, label)
        return made[0]

    try:
        built: Building = together(beside, build, label)
        return built
    except BaseException:
        for each in made:
            each.undo()
        raise


def check_buildable(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, options: Options, what: str, *, in_units: bool
) -> None:
    """Raise Error for a module of which some parameters have no values and would get none, or that cannot be built otherwise."""
    unmanaged = {id(each) if isinstance(each, torch.Tensor) else each for each in options.ignored_params}
    named = [(n, p) for n, p in module.named_parameters() if id(p) not in unmanaged and n not in unmanaged]
    check_of_hosts([*module.named_parameters(), *module.named_buffers()], "wrap")
    meta = next((name for name, p in named if p.is_meta), None)
    real = next((name for name, p in named if not waits(p)), None)
    is_stored = any(isinstance(each, Stored) for each in (*module.parameters(), *module.buffers()))
    if real is not None and (not is_stored or what == "weights=") and (meta is not None or what == "init="):
        mixed = f"parameter {real!r} has memory" + ("" if meta is None else f" and {meta!r} is on the meta device")
        raise Error(f"wrap: {mixed}: {what} needs all parameters on the meta device")
    if meta is not None and what == "sw.meta_loading()":
        raise Error(
            f"wrap: parameter {meta!r} is on the meta device and came from no file: build its module off the meta device, or pass "
            "init=, which is called with each module that holds such tensors"
        )
    low = next((n for n, p in named if waits(p) and p.dtype in LOW_DTYPES), None)
    if in_units and options.precision is not None and low is not None:
        raise NotImplementedError(
            f"wrap: {what} with precision= needs float32 parameters at zero=3 without sharing, and {low!r} is not: build the module in float32"
        )
    state = {} if optimizer is None else getattr(optimizer, "state", {})
    held = next((name for name, p in named if waits(p) and state.get(p)), None)
    if held is not None:
        raise Error(f"optimizer: it holds state of parameter {held!r}, which has no values yet")


class Building:
    """The tensors of a module that got memory, and the calls that give them values.

    `init`: see materialize. `loads`: values come from elsewhere, and only modules with meta buffers are initialised.
    `stored`: if it `reads`, the values of tensors that are still in their files, by name. `gave`: parameters have their
    memory from here. `in_units`: that is ranges of addresses, and fill() runs the calls; else initialise() does.
    """

    def __init__(
        self, module: torch.nn.Module, init: Any, *, loads: bool, in_units: bool, reads: bool, group: HostGroup
    ) -> None:
        self._module, self.gave, self._group = module, any(map(waits, module.parameters())), group
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self.stored = {name: each.lazy for name, each in tensors if reads and isinstance(each, Stored)}
        #: parameters that had memory, by id, with it
        self._real = {id(p): (p, p.data) for p in module.parameters() if not waits(p)}
        self.in_units = in_units and self.gave
        self._calls = initialisers(module, init, "wrap", unstored=loads)
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._loads = loads
        #: DTensors, by id, each with a whole parameter in its place until initialise() ends
        self._whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: the ranges of addresses, by address
        self._ranges: dict[int, mmap.mmap] = {}
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._names = {id(each): name for name, each in named}
        stored = (
            [*module.parameters(), *(b for m in module.modules() for b in buffers_of_state(m).values())]
            if loads
            else []
        )
        #: the ids of what the calls must write
        self._needed = {id(each) for _, each in named if each.is_meta} - set(map(id, stored))
        self._before = places_of(module)
        self._stream: torch.Tensor = torch.get_rng_state()

    def begin(self, comm: HostComm, label: str) -> None:
        """Give all meta tensors memory, and take rank 0's random stream. Collective."""

        def give() -> bytes:
            with changing_weights(self._module):
                for each in self._module.modules():
                    for tensor in (*each._parameters.values(), *each._buffers.values()):
                        if tensor is not None and waits(tensor) and not torch.nn.parameter.is_lazy(tensor):
                            self._give(tensor)
            return bytes_of(self._stream)

        said = gather_answers(comm, give, f"memory of {label}", refusals=(Exception,), retell=_retold)
        self._stream = torch.frombuffer(bytearray(said[0]), dtype=torch.uint8)

    def _give(self, tensor: torch.Tensor) -> None:
        if is_dtensor(tensor) and not self._loads:
            self._show(tensor, with_memory(tensor, self._allocate))
            return
        make = local_with_memory if is_dtensor(tensor) else with_memory
        memory = make(tensor, self._allocate)
        try:
            swap_memory(tensor, memory)
        except RuntimeError as error:
            refs = weakref.getweakrefs(tensor)
            held = [(f"{n}.{k}", tree_leaves(v)) for n, m in self._module.named_modules() for k, v in vars(m).items()]
            holders = [at for at, leaves in held if any(each is ref for each in leaves for ref in refs)]
            holders = holders or sorted({type(each).__name__ for ref in refs for each in gc.get_referrers(ref)})
            what = f" (in {', '.join(holders)}): drop them, or call sw.materialize first" if refs else ""
            raise Error(f"{self._names[id(tensor)]!r} cannot get memory in place: {error}{what}") from None
        self._given.append((tensor, memory))

    def _show(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Put a whole parameter in the place of a DTensor: torch swaps no tensors of other slots."""
        self._whole[id(tensor)] = tensor, whole
        self._names[id(whole)] = self._names[id(tensor)]
        self._needed |= {id(whole)} if id(tensor) in self._needed else set()
        for held, earlier in self._before:
            held.update({name: whole for name, each in earlier.items() if each is tensor})

    def _end_whole(self) -> None:
        """Give each DTensor its part of the whole parameter that stands in its place."""
        for held, earlier in self._before:
            held.update({name: each for name, each in earlier.items() if id(each) in self._whole})
        for tensor, whole in self._whole.values():
            part = part_of_whole(whole, tensor)
            swap_memory(tensor, part)
            self._given.append((tensor, part))
        self._whole.clear()

    def _allocate(self, numel: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        if not self.in_units or not dtype.is_floating_point or numel * dtype.itemsize < _PAGE_BYTES:
            return torch.zeros(numel, dtype=dtype, device=device)
        made, memory = reserved(numel, dtype)
        self._ranges[made.data_ptr()] = memory
        return made

    def undo(self) -> None:
        """Put all tensors back where they were."""
        for held, before in self._before:  # init= may have replaced some
            held.update(before)
        end_local_parameters(self._module)
        with changing_weights(self._module):
            for tensor, memory in self._given:
                swap_memory(tensor, memory)
        for parameter, data in self._real.values() if self.gave else ():
            if parameter.data_ptr() != data.data_ptr():  # released, and not gathered
                parameter.data = data
        self._given.clear()
        self._real.clear()

    def keep(self) -> None:
        """Forget what undo() needs."""
        self._given.clear()
        self._calls.clear()
        self._before.clear()
        self._real.clear()

    @contextlib.contextmanager
    def _on_the_stream(self) -> Iterator[None]:
        """Run on rank 0's random stream. A rank whose own stream was another one has it back afterwards."""
        own = torch.get_rng_state()
        torch.set_rng_state(self._stream)
        try:
            yield
        finally:
            if not torch.equal(own, self._stream):
                torch.set_rng_state(own)

    def initialise(self, comm: HostComm, label: str) -> None:
        """Run the calls on whole tensors. Collective."""

        label = f"initial values of {label}"
        gather_answers(comm, lambda: self._run(Writes()), label, refusals=(Exception,), retell=_retold)
        with changing_weights(self._module):
            self._end_whole()

    def _run(self, mode: Writes) -> bytes:
        with self._on_the_stream():
            mode.run(self._module, self._calls, self._needed, "wrap")
        replaced = next((n for n, p in self._module.named_parameters() if id(p) not in self._names), None)
        if replaced is not None:
            raise Error(f"wrap: init= replaced parameter {replaced!r}: write its values in place")
        return b""

    def fill(self, store: Any, table: ParameterTable, plans: Sequence[UnitPlan], comm: HostComm) -> None:
        """Run the calls, and write the values of all units to the ranks' slices. Collective."""
        uses = [{id(p) for p in module._parameters.values()} for module, _ in self._calls]
        units = _Units(store, table, plans, comm, uses, self._ranges)

        def run() -> bytes:
            self._run(units)
            if self._calls:
                units.put_all()
            return units.digest()

        units.agree(run)
        self.fill_real(store, table, self._group)
        self._ranges.clear()

    def fill_real(self, store: Any, table: ParameterTable, group: HostGroup) -> None:
        """Write the values of parameters that had memory, such as adapters on a stored model. Collective."""
        own = [index for index, each in enumerate(table.module_parameters) if id(each) in self._real]
        if own and table.is_by_rows:
            take_rows(store, table, own)
        elif own:
            group.broadcast([table.parameters[index] for index in own], 0, "parameters that had memory")
            store.write_slices(own)


class PartOfBuilding:
    """Fills the slices of parameters that fewer ranks average (groups=), whose values are loaded later."""

    def __init__(self, building: Building | RowsTaken, group: HostGroup) -> None:
        self._building, self._group = building, group

    def fill(self, store: Any, table: ParameterTable, plans: Sequence[UnitPlan], comm: HostComm) -> None:
        self._building.fill_real(store, table, self._group)


class _Units(Writes):
    """The units of a module that is initialised, at most two of them whole."""

    def __init__(
        self,
        store: Any,
        table: ParameterTable,
        plans: Sequence[UnitPlan],
        comm: HostComm,
        uses: Sequence[set[int]],
        ranges: dict[int, mmap.mmap],
    ) -> None:
        super().__init__()
        self._store, self._table, self._comm, self._ranges = store, table, comm, ranges
        self._names = [each.name or "the outermost" for each in plans]
        self._members = [each.indices for each in plans]
        self._unit_of = {place(table.parameters[i]): number for number, each in enumerate(plans) for i in each.indices}
        self._unit_of.pop(0, None)  # no elements
        own = [{id(table.parameters[i]) for i in each.indices} for each in plans]
        self._used_at = [[at for at, each in enumerate(uses) if each & mine] for mine in own]
        self._homes = [parameter.data for parameter in table.parameters]
        self._index = {id(parameter): index for index, parameter in enumerate(table.parameters)}
        self._whole: list[int] = []
        self._sliced: set[int] = set()
        self._said: list[list[str]] = []  # unit, digest of its values
        self._is_over = self._is_looking = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_looking:
            self.touch([each for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def before_call(self, module: torch.nn.Module) -> None:
        self.touch([each for each in module._parameters.values() if each is not None])

    def touch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the units of tensors whole before an operation that uses all of them."""
        strided = [each for each in tensors if each.layout is torch.strided and not each.is_meta]
        needed = {number: None for each in strided if (number := self._unit_of.get(place(each))) is not None}
        for number in needed:
            if number in self._whole:
                continue
            others = [each for each in self._whole if each not in needed]
            if len(self._whole) >= _WHOLE_AT_ONCE and others:
                self._put(max(others, key=self._next_use))
            if number in self._sliced:
                self._check_untouched(number)
            self._whole.append(number)
            self._settle(self._members[number], reads=number in self._sliced)

    def after_call(self, module: torch.nn.Module) -> None:
        known = [self._index[id(each)] for each in module.parameters() if id(each) in self._index]
        for index in filter(self._is_replaced, known):
            self.touch([self._homes[index]])
            self._settle([index])
        super().after_call(module)

    def _is_replaced(self, index: int) -> bool:
        self._is_looking = True  # `.data` is an operation that reads no value: it makes no unit whole
        try:
            data, home = self._table.parameters[index].data, self._homes[index]
        finally:
            self._is_looking = False
        return data.data_ptr() != home.data_ptr() or data.stride() != home.stride()

    def _settle(self, indices: Sequence[int], *, reads: bool = False) -> None:
        """Read slices if asked. Then copy data that init= put in the place of parameters' own, which they get back."""
        found = [(self._homes[i], self._table.parameters[i].data, i) for i in indices if self._is_replaced(i)]
        for home, data, index in found:
            others = self._unit_of.keys() - {place(home)}
            if data.shape != home.shape or data.dtype != home.dtype or place(data) in others:
                raise Error(f"wrap: init= gave {self._table.names[index]!r} data of another shape, dtype or parameter")
            self._table.parameters[index].data = home
            self._waiting.pop(place(home), None)
        if reads:
            self.agree(self.digest)  # all ranks have written their slices
            self._store.read_slices(indices)
            self.agree(self.digest)  # all have read them, and may write them again
        for home, data, _ in found:
            home.copy_(data.clone() if data.data_ptr() == home.data_ptr() else data)

    def _next_use(self, number: int) -> float:
        return next((at for at in self._used_at[number] if at >= self.now), math.inf)

    def _put(self, number: int) -> None:
        """Write a unit to this rank's slices, and give its pages back."""
        members = self._members[number]
        self._settle(members)
        held = [self._table.parameters[index].data for index in members]
        sums = [crc32c(each.data_ptr(), each.nbytes) for each in held if each.nbytes]
        self._said.append([self._names[number], hashlib.sha256(repr(sums).encode()).hexdigest()[:16]])
        self._store.write_slices(members)
        for index in members:
            memory = self._ranges.get(self._homes[index].data_ptr())
            if memory is not None:
                memory.madvise(mmap.MADV_DONTNEED)
        self._whole.remove(number)
        self._sliced.add(number)

    def put_all(self) -> None:
        """Write what is still whole, or was written past torch. A unit that no call has touched keeps zeros."""
        for number in list(self._whole):
            self._put(number)
        for number in range(len(self._members)):
            if number in self._sliced:
                self._check_untouched(number)
            elif self._touched(number) is not None:
                self._whole.append(number)
                self._put(number)

    def _touched(self, number: int) -> str | None:
        """Return the first parameter of a unit, which is not whole, that has pages: something wrote to it past torch."""
        for index in self._members[number]:
            home = self._homes[index]
            if home.data_ptr() in self._ranges and is_resident(home.data_ptr(), home.nbytes):
                return self._table.names[index]
        return None

    def _check_untouched(self, number: int) -> None:
        name = self._touched(number)
        if name is not None:
            raise Error(
                f"wrap: init= wrote to {name!r} or read it through numpy, an address or another thread after its unit had been sliced: "
                "use torch's operations, in the thread that calls init="
            )

    def digest(self) -> bytes:
        return json.dumps(self._said).encode()

    def agree(self, answer: Callable[[], bytes]) -> None:
        """Raise on all ranks if answer() fails on one, or if ranks have written other values. Collective."""
        failure, said = None, b""
        try:
            said = answer()
        except Exception as error:
            if self._is_over:  # an exchange inside raised it on all ranks
                raise
            failure = error

        def say() -> bytes:
            if failure is not None:
                raise failure
            return said

        self._is_over = True
        label = "initial values of units"
        gather_answers(self._comm, say, label, refusals=(Exception,), retell=_retold, compare=_difference)
        self._is_over = False


def _retold(rank: int, sentence: str) -> Exception:
    return Error(f"rank {rank} could not build the module: {sentence}")


def _difference(answers: Sequence[bytes]) -> str:
    tables = [json.loads(each) for each in answers]
    rank = next(rank for rank, each in enumerate(tables) if each != tables[0])
    at = next(
        (i for i, (a, b) in enumerate(zip(tables[0], tables[rank])) if a != b), min(len(tables[0]), len(tables[rank]))
    )
    unit = next(table[at][0] for table in (tables[0], tables[rank]) if at < len(table))
    return (
        f"ranks disagree about the initial values of unit {unit!r}: rank {rank} wrote others than rank 0; init= must do the same "
        "on all ranks, and draw from torch's default generator alone, which is rank 0's here"
    )
