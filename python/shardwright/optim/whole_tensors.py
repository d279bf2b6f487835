"""partition="tensor": whole tensors instead of slices, balanced over ranks.

It serves optimizers whose update depends on a tensor as a whole: Adafactor's row and column averages, Muon's
orthogonalised momentum, norms a tensor, third-party classes. Only a parameter's owner keeps its optimizer state and
steps on it as a whole tensor. Then all ranks get the owner's values. Gradients are averaged and sliced as usual: at
zero >= 2 an owner assembles its tensors' gradients before the step.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..layout.memory import bytes_of
from ..parallel.replica import Replica
from .forwarding import NotAveraged
from .sharded import ShardedOptimizer

if TYPE_CHECKING:
    from .device_clip import DeviceClip

_CHUNK_BYTES = 8 << 20


class TensorPartitionedOptimizer(ShardedOptimizer):
    """The optimizer that `sw.wrap(module, optimizer, zero=1, partition="tensor")` returns.

    Parameters
    ----------
    optimizer : Optimizer
        An optimizer whose update of a tensor depends only on that tensor, its gradient and its state.
    replica : Replica

    Notes
    -----
    Memory: state about 1 / world_size, at worst one tensor more than that. At zero=3 without sharing also a copy of the
    tensors that this rank owns, read from slices before a step and written to them after it. Otherwise a step sends
    every tensor to world_size - 1 ranks (to none at zero=3). At zero >= 2 the gradients' bytes go to every rank before
    the step, 8 MiB at a time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replica: Replica,
        partition: str = "tensor",
        without_master: Collection[torch.Tensor] = (),
        parts: Sequence[Replica] = (),
    ) -> None:
        self._owners: dict[int, int] = {}
        self._loads = [0] * replica.slicing.count
        self._gradient_slices: dict[int, torch.Tensor] = {}
        super().__init__(optimizer, replica, partition, without_master, parts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._give_owners(param_group["params"])

    def _give_owners(self, parameters: list[torch.Tensor]) -> None:
        """Assign owners, the largest tensor first, each to the rank of a replica with the fewest bytes. Equal on every
        rank.

        Ranks are numbered by their slices.
        """
        new = {self._index[id(p)]: p.numel() * p.element_size() for p in parameters}
        for index in sorted(new, key=lambda index: (-new[index], index)):
            if index not in self._owners:
                owner = min(range(len(self._loads)), key=lambda owner: (self._loads[owner], owner))
                self._owners[index] = owner
                self._loads[owner] += new[index]

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """Return all elements of a parameter for its owner."""
        return (
            (0, self._replica.table.parameters[index].numel())
            if self._owners.get(index) == self._replica.slicing.of_rank[rank]
            else (0, 0)
        )

    def _make_piece(self, index: int) -> torch.Tensor | None:
        if self._owners.get(index) != self._replica.slicing.own:
            return None
        memory, like = self._replica.parameters(), self._replica.layout_of(index)
        if memory.releases:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        flat = memory.flat(index)
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())

    def _held_whole(self) -> Iterator[tuple[int, torch.Tensor]]:
        """copies of parameters on which this rank steps, in memory order"""
        for index in self._owners:
            piece = self.slice_of(index)
            if piece is not None:
                yield index, piece.as_strided((piece.numel(),), (1,))

    # stepping -----------------------------------------------------------------------------------------------------

    def take_clip(self, clip: DeviceClip) -> bool:
        """Return False: gradients are clipped before they are sent to the owners of whole tensors."""
        return False

    def _own_gradient(self, index: int) -> torch.Tensor | None:
        piece = super()._own_gradient(index)  # raises if no step is possible
        gradient = self._replica.table.parameters[index].grad
        return piece if self._replica.zero >= 2 or gradient is None else gradient.detach()

    def _take_gradients(self, gradient_of: Callable[[int], torch.Tensor | None]) -> None:
        self._gradient_slices = {}
        super()._take_gradients(gradient_of)

    def _take_gradient(self, index: int, piece: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
        if self._replica.zero >= 2 and not isinstance(gradient, NotAveraged):
            if gradient is not None:
                self._gradient_slices[index] = gradient
        elif piece is not None:
            piece.grad = None if gradient is None else _shaped(gradient, piece)

    def _complete_gradients(self) -> None:
        """Gather for each owner the gradients of its tensors, and its released tensors, from all ranks' slices.
        Collective."""
        slices, self._gradient_slices = self._gradient_slices, {}
        memory, group = self._replica.parameters(), self._replica.group
        if memory.releases:
            for index, flat in self._held_whole():
                memory.read_whole(index, flat)
        for piece in map(self.slice_of, slices):
            if piece is not None:
                piece.grad = torch.empty_strided(piece.shape, piece.stride(), dtype=piece.dtype, device="cpu")
        for chunk in self._chunks(sorted(slices)):
            mine = b"".join(bytes_of(slices[index]) for index in chunk)
            label = f"gradients of the tensors that ranks own, of {self._replica.label}"
            for rank, data in enumerate(group.comm.all_gather_bytes(mine, label)):
                at = 0
                for index in chunk:
                    low, high = memory.run(index, rank)
                    size = (high - low) * slices[index].element_size()
                    piece = self.slice_of(index)
                    if piece is not None and piece.grad is not None and size:
                        flat = piece.grad.as_strided((piece.numel(),), (1,))
                        flat[low:high] = torch.frombuffer(bytearray(data[at : at + size]), dtype=piece.dtype)
                    at += size

    def _chunks(self, indices: list[int]) -> Iterator[list[int]]:
        chunk: list[int] = []
        size = 0
        for index in indices:
            parameter = self._replica.table.parameters[index]
            chunk.append(index)
            size += parameter.numel() * parameter.element_size()
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _publish(self, failed: bool) -> None:
        memory, comm = self._replica.parameters(), self._replica.group.comm
        if memory.releases:
            for index, flat in self._held_whole():
                memory.write_whole(index, flat)
            for index, flat in self._from_other_hosts():
                memory.write_whole(index, flat)
            memory.publish(sliced=False)
            return
        if memory.shared:
            for index, flat in self._from_other_hosts():
                memory.flat(index).copy_(flat)
            comm.barrier(f"updated tensors of {self._replica.label}")
            memory.cast_stepped()
            return
        for root, owned in self._owned():
            self._broadcast(root, [memory.flat(index) for index in owned])

    def _owned(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (rank, the parameters that it owns and may have updated)."""
        memory, slicing = self._replica.parameters(), self._replica.slicing
        for owner in range(slicing.count):
            owned = [index for index, its_owner in sorted(self._owners.items()) if its_owner == owner]
            yield slicing.first_owner(owner), [index for index in owned if memory.is_stepped(index)]

    def _broadcast(self, root: int, flats: list[torch.Tensor]) -> None:
        ranges = [(flat.data_ptr(), flat.numel() * flat.element_size()) for flat in flats if flat.numel()]
        if ranges:
            self._replica.group.comm.broadcast(ranges, root, f"updated tensors of {self._replica.label}")

    def _from_other_hosts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Send tensors that ranks of other hosts updated to the rank with this host's copy. Collective.

        On a mesh of two dimensions, to each replica's copy on this host. Tensors are in memory order. Temporary memory:
        one tensor besides the copy.
        """
        group = self._replica.group
        slicing = self._replica.slicing
        if not group.is_apart(slicing):
            return
        mine = dict(self._held_whole())
        beside = [rank for rank in slicing.replica() if group.host_of[rank] == group.host_of[group.rank]]
        here = {slicing.of_rank[rank] for rank in beside}
        for root, owned in self._owned():
            for index in owned:
                like = self._replica.layout_of(index)
                flat = mine[index] if index in mine else torch.empty(like.numel(), dtype=like.dtype, device="cpu")
                self._broadcast(root, [flat])
                if group.rank == beside[0] and slicing.of_rank[root] not in here:
                    yield index, flat

    # state --------------------------------------------------------------------------------------------------------

    def _take_state(self, index: int, state: Mapping[str, Any]) -> None:
        piece = self.slice_of(index)
        if piece is not None:
            copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            self._inner.state[piece] = self._placed(index, copied, piece)

    def as_held(self, parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        like = self._replica.layout_of(self._index[id(parameter)])
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())

    def _layout(self) -> list[Any]:
        group = self._replica.group
        return [group.rank, group.world_size, "tensor", sorted(self._owners.items())]

    def _gather_state(self, index: int) -> dict[str, Any]:
        piece = self.slice_of(index)
        packed = io.BytesIO()
        if piece is not None:
            state = self._inner.state.get(piece, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            on_gpu = [key for key, value in tensors.items() if not value.is_cpu]  # numbers differ between ranks
            torch.save([{**state, **{key: tensors[key].cpu() for key in on_gpu}}, on_gpu], packed)
        label = f"optimizer state of {self._replica.table.names[index]}"
        owner = self._replica.slicing.first_owner(self._owners[index])
        sent = self._replica.group.comm.all_gather_bytes(packed.getvalue(), label)[owner]
        found, on_gpu = torch.load(io.BytesIO(sent), weights_only=True)
        where = self._replica.layout_of(index).device
        return {key: value.to(where) if key in on_gpu else value for key, value in found.items()}


def _shaped(gradient: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Return the state unchanged; or another rank's, one-dimensional in memory order, in the shape of `piece`."""
    return gradient if gradient.shape == piece.shape else gradient.as_strided(piece.shape, piece.stride())
