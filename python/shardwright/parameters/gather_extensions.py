"""All-gather extensions: parameters whose local tensor says what of it travels, and makes the whole parameter of that.

FSDP2's contract. `fsdp_pre_all_gather` of a rank's rows returns tensors of any dtype and number. Those of all ranks, one
behind the other, are what `fsdp_post_all_gather` makes the whole parameter of. They lie in one memory that a host's ranks
map, and are written when ranks meet, so that a gather moves no byte (docs/design/fully_shard.md).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from .._engine import Error
from ..comm.agreement import gather_answers, gather_values
from ..comm.process_group import HostGroup
from ..layout.memory import address_of, bytes_of, has_memory
from ..layout.shard_mesh import Slicing
from ..torch_compat.dtensor import held_tensor
from ..torch_compat.engine_storage import engine_tensor
from .leaves import Leaf

#: the outputs begin at multiples of it in the memory that ranks map
_ALIGNMENT = 128


def _defines(local: torch.Tensor) -> bool:
    """Return True for a local tensor with both functions. Raise AssertionError, as FSDP2 does, for one of them."""
    found = [hasattr(local, name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")]
    if found[0] != found[1]:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{type(local).__name__}"
        )
    return found[0]


def inner_name(local: torch.Tensor) -> str | None:
    """Return the attribute that holds a local tensor's values, "" if it does itself; None: a subclass of another kind."""
    flatten: Any = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        return "" if has_memory(local) else None
    names: Sequence[str] = flatten()[0]
    inner = getattr(local, names[0]) if len(names) == 1 else None
    is_alike = type(inner) is torch.Tensor and (inner.dtype, inner.shape) == (local.dtype, local.shape)
    return names[0] if inner is not None and is_alike and inner.is_contiguous() and has_memory(inner) else None


class Extension(Leaf):
    """The extension of one parameter's local tensor.

    `owner`: its ShardedParameter. `outputs`: what all ranks of this replica gave, over the memory that they map. Raise NotImplementedError for rows of
    another dimension than 0.
    """

    is_extension = True

    def __init__(self, owner: Any, shape: torch.Size) -> None:
        super().__init__(owner)
        self._shape = shape
        self._strides = torch.empty(shape, dtype=owner.dtype, device="meta").stride()
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.metadata: Any = None
        self._own: list[tuple[torch.UntypedStorage, int]] = []  # of the whole parameter, beside `outputs`
        self._is_open = False
        if owner.dim:
            raise NotImplementedError(
                f"parameter {owner.name!r} has an all-gather extension ({type(self._local).__name__}), and is cut along dimension {owner.dim}: "
                "0 is needed"
            )

    @classmethod
    def of(cls, owner: Any, shape: torch.Size) -> Extension | None:
        """Return the extension of a parameter; None if its local tensor defines none."""
        return cls(owner, shape) if _defines(held_tensor(owner.sharded)) else None

    @property
    def _local(self) -> torch.Tensor:
        return held_tensor(self._owner.sharded)

    def inputs(self) -> tuple[Sequence[torch.Tensor], Any]:
        """Call fsdp_pre_all_gather, in either of its two forms. Return this rank's tensors and the metadata."""
        owner, call = self._owner, self._local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        count = len(inspect.signature(call).parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(call)}\nExpects fsdp_pre_all_gather(self, mesh: DeviceMesh, "
                "outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        more = () if count == 1 else (self._shape, self._strides, owner.holder, owner.policy)
        with torch.no_grad():
            given, metadata = call(owner.shard_mesh, *more)
        return given, metadata

    def rows_of(self, memory: torch.Tensor, rest: Sequence[int], ranks: int) -> torch.Tensor:
        """Return an output of all ranks in rows of shape `rest`; where they are the parameter's, without the padding behind."""
        if not memory.numel():
            return memory.new_empty(0, *rest)
        found, rows = memory.view(-1, *rest), self._shape[0]
        return found[:rows] if found.shape[0] == -(-rows // ranks) * ranks else found

    def show(self) -> torch.Tensor:
        """Return the whole parameter, made of the outputs unless it is."""
        if not self._is_open:
            self._make()
            self._is_open = True
        assert self.whole is not None
        return self.whole

    def close(self) -> None:
        """Free what the whole parameter has beside the outputs."""
        for storage, _ in self._own if self._is_open else ():
            storage.resize_(0)
        self._is_open = False

    def renew(self) -> None:
        """Make a whole parameter that stands in its slots of new outputs."""
        if self._is_open:
            self._make()

    def _make(self) -> None:
        owner, local = self._owner, self._local
        dtype = getattr(owner.policy, "param_dtype", None) or owner.dtype
        with torch.no_grad():
            if self.whole is not None:
                for storage, nbytes in self._own:
                    if storage.nbytes() != nbytes:
                        storage.resize_(nbytes)
                local.fsdp_post_all_gather(self.outputs, self.metadata, dtype, out=self.whole)  # type: ignore[attr-defined]
                return
            made, inner = local.fsdp_post_all_gather(self.outputs, self.metadata, dtype)  # type: ignore[attr-defined]
            ours = {address_of(each) for each in self.outputs}
            storages = [each.untyped_storage() for each in inner if each.untyped_storage().data_ptr() not in ours]
            self._own = [(each, each.nbytes()) for each in storages]
            made = owner.placed(torch.as_strided(made, self._shape, self._strides, 0))
        self._begin(made)


class Extensions:
    """The extensions of a module's parameters, and the memory of their outputs. Making it is collective.

    Each output lies in its own range, with a slot for each rank: behind one another, so that a replica's are one tensor.
    """

    def __init__(self, group: HostGroup, slicing: Slicing, each: Sequence[Extension], label: str) -> None:
        self._group, self._each, self._label = group, each, label
        self._given: list[tuple[Sequence[torch.Tensor], Any]] = []
        row = slicing.replica()
        if [slicing.of_rank[rank] for rank in row] != list(range(slicing.count)) or row[-1] - row[0] >= len(row):
            raise NotImplementedError(
                f"{label}: all-gather extensions need a mesh whose rows are neighbouring ranks, got row {row}"
            )
        said = gather_values(group.comm, self._describe, f"outputs of extensions of {label}", refusals=(Exception,))
        plans = [self._plan(each, [one[at] for one in said]) for at, each in enumerate(self._each)]
        sizes = [_aligned(group.world_size * slot) for plan in plans for _, _, slot in plan]
        self._arena = group.comm.arena(max(sum(sizes), 1), f"outputs of extensions of {label}", of_hosts=True)
        self._home = group.carriers[group.host_of[group.rank]]
        #: for each extension, for each output: (offset of rank 0's slot, bytes of a slot)
        self._slots: list[list[tuple[int, int]]] = []
        offset = 0
        for extension, plan in zip(self._each, plans):
            views, slots = [], []
            for dtype, rest, slot in plan:
                memory = self._memory(offset + row[0] * slot, len(row) * slot).view(dtype)
                views.append(extension.rows_of(memory, rest, len(row)))
                slots.append((offset, slot))
                offset += _aligned(group.world_size * slot)
            extension.outputs = tuple(views)
            self._slots.append(slots)
        self.write()

    def _memory(self, offset: int, nbytes: int) -> torch.Tensor:
        return engine_tensor(self._arena.tensor(offset, "uint8", [nbytes], None, self._home))

    def _describe(self) -> list[list[tuple[str, list[int]]]]:
        self._given = [each.inputs() for each in self._each]
        return [[(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in given] for given, _ in self._given]

    def _plan(
        self, each: Extension, said: Sequence[Sequence[tuple[str, list[int]]]]
    ) -> list[tuple[torch.dtype, list[int], int]]:
        """Return (dtype, shape of a row, bytes of a slot) of each output. Raise Error, on all ranks, if ranks differ in the first two."""
        kinds = [[(dtype, shape[1:]) for dtype, shape in one] for one in said]
        other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise Error(
                f"fsdp_pre_all_gather of parameter {each._owner.name!r} returned tensors of (dtype, shape of a row) {kinds[0]} on rank 0 and "
                f"{kinds[other]} on rank {other}: equal ones are needed"
            )
        plan = []
        for number, (name, rest) in enumerate(kinds[0]):
            dtype, rows = getattr(torch, name), max((one[number][1] or [1])[0] for one in said)
            plan.append((dtype, rest, rows * math.prod(rest) * dtype.itemsize))
        return plan

    def write(self) -> None:
        """Take this rank's outputs of its rows as they are now, and let the other ranks see them. Collective.

        No rank may read outputs meanwhile. Cost: a copy of this rank's outputs, a barrier, and over hosts all of them.
        """
        label = f"outputs of extensions of {self._label}"
        gather_answers(self._group.comm, self._write, label, refusals=(Exception,))
        if self._group.host_count > 1:
            self._send(label)
        for each in self._each:
            each.renew()

    def _write(self) -> bytes:
        given, self._given = self._given or [each.inputs() for each in self._each], []
        for extension, (tensors, metadata), slots in zip(self._each, given, self._slots):
            extension.metadata = metadata
            if len(tensors) != len(slots):
                raise Error(
                    f"fsdp_pre_all_gather of parameter {extension._owner.name!r} returned {len(tensors)} tensors, and {len(slots)} before"
                )
            for tensor, output, (offset, slot) in zip(tensors, extension.outputs, slots):
                nbytes = tensor.numel() * tensor.element_size()
                if tensor.dtype is not output.dtype or nbytes > slot:
                    raise Error(
                        f"fsdp_pre_all_gather of parameter {extension._owner.name!r} returned {nbytes} bytes of {tensor.dtype}, and at most {slot} "
                        f"of {output.dtype} fit, as it returned before"
                    )
                memory = self._memory(offset + self._group.rank * slot, nbytes)
                if nbytes:
                    memory.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return b""

    def _send(self, label: str) -> None:
        """Bring each rank's slots to the other hosts, one output at a time."""
        group = self._group
        for offset, slot in (each for slots in self._slots for each in slots):
            said = group.comm.all_gather_bytes(bytes_of(self._memory(offset + group.rank * slot, slot)), label)
            for rank, data in enumerate(said) if group.rank == self._home else ():
                if data and group.host_of[rank] != group.host_of[group.rank]:
                    self._memory(offset + rank * slot, slot).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        group.comm.barrier(label)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
