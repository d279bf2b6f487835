"""partition="tensor" on a GPU: like optim/whole_tensors.py, but values travel between GPUs.

Tensors are assembled and broadcast bucket by bucket in one buffer on the GPU: one all_gather collects slices, and one
broadcast per owner sends its tensors. All of it runs in the order of torch's current stream; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from ..backend.device_link import DeviceLink
from ..layout.shard_runs import itemsize_of
from ..torch_compat import cuda
from .whole_tensors import TensorPartitionedOptimizer


class DeviceTensorPartitionedOptimizer(TensorPartitionedOptimizer):
    """The optimizer that `sw.wrap(module, optimizer, zero=1, partition="tensor")` returns for a module on a GPU.

    Notes
    -----
    Memory: state about 1 / world_size, at worst one tensor more than that. At zero >= 2 also the largest bucket, and
    during a step the gradients of the tensors that this rank owns; at zero=3 also a copy of owned tensors that are
    released. A step sends every tensor to each rank. Before it, at zero >= 2 the gradients' bytes are sent, at zero=3
    those of the parameters too.
    """

    _room: torch.Tensor | None = None
    #: this rank's slices of released parameters that the current step changes
    _released: Mapping[int, torch.Tensor] = {}

    @property
    def _link(self) -> DeviceLink:
        link = self._replica.link
        assert link is not None
        return link

    def _is_released(self, index: int) -> bool:
        return self._memory.releases and bool(self._memory.is_released(index))

    def _make_piece(self, index: int) -> torch.Tensor | None:
        if self._owners.get(index) != self._replica.slicing.own:
            return None
        like = self._replica.layout_of(index)
        if self._is_released(index):
            flat = cuda.runtime.zeros(like.numel(), like.dtype, like)
        else:
            flat = self._memory.flat(index)
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())

    # bucket by bucket -----------------------------------------------------------------------------------------------

    def _by_bucket(self, indices: Iterable[int]) -> Iterator[tuple[torch.Tensor, dict[int, tuple[int, int]]]]:
        """Yield, for each bucket with some of these parameters, memory for the bucket and their [begin, end) in
        elements.
        """
        found: dict[int, list[int]] = {}
        for index in sorted(indices):
            found.setdefault(self._replica.reducer.place(index)[0], []).append(index)
        for bucket, members in sorted(found.items()):
            _, numel, dtype, _ = self._replica.reducer.bucket_shape(bucket)
            nbytes = numel * itemsize_of(dtype)
            if self._room is None or self._room.numel() < nbytes:
                like = self._replica.layout_of(members[0])
                self._room = cuda.runtime.zeros(nbytes, torch.uint8, like)
            places = {index: self._replica.reducer.place(index)[1:] for index in members}
            whole = self._room[:nbytes].view(getattr(torch, dtype))
            yield whole, {index: (begin, begin + size) for index, (begin, size) in places.items()}

    def _own_part(self, whole: torch.Tensor, index: int, begin: int) -> torch.Tensor:
        low, high = self._memory.own_run(index)
        return whole[begin + low : begin + high]

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (to, from) pairs of dense tensors with equal strides."""
        copies = [(to.data_ptr(), of.data_ptr(), to.numel() * to.element_size()) for to, of in pairs if to.numel()]
        if copies:
            self._link.comm.pack(copies, self._link.current_stream())

    def _gathered(
        self, slices: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, dict[int, tuple[int, int]]]]:
        """Yield like _by_bucket, with all ranks' slices of these tensors filled in. Collective."""
        row = self._replica.backend.row
        assert row is not None
        for whole, places in self._by_bucket(slices):
            self._copy((self._own_part(whole, i, begin), slices[i]) for i, (begin, _) in places.items())
            dtype = str(whole.dtype).removeprefix("torch.")
            row.comm.all_gather([(whole.data_ptr(), whole.numel(), dtype)], row.current_stream())
            yield whole, places

    # stepping -------------------------------------------------------------------------------------------------------

    def _complete_gradients(self) -> None:
        """Gather for each owner the gradients of its tensors, and its released tensors, from all ranks' slices.
        Collective."""
        slices, self._gradient_slices = self._gradient_slices, {}
        self._released = {i: self._memory.piece(i) for i in slices if self._is_released(i)}
        for whole, places in self._gathered(self._released):
            self._copy((flat, whole[slice(*places[i])]) for i, flat in self._held(places))
        for whole, places in self._gathered(slices):
            for index in places:
                piece = self.slice_of(index)
                if piece is not None:
                    gradient = whole[slice(*places[index])].clone()
                    piece.grad = gradient.as_strided(piece.shape, piece.stride())

    def _held(self, indices: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the parameters among these that this rank owns, in memory order."""
        for index in indices:
            piece = self.slice_of(index)
            if piece is not None:
                yield index, piece.as_strided((piece.numel(),), (1,))

    def _publish(self, failed: bool) -> None:
        for whole, places in self._by_bucket(self._released):
            self._copy((whole[slice(*places[i])], flat) for i, flat in self._held(places))
            for owner in range(self._replica.slicing.count):
                root = self._replica.slicing.first_owner(owner)
                self._broadcast(root, [whole[slice(*at)] for i, at in places.items() if self._owners[i] == owner])
            self._copy((self._released[i], self._own_part(whole, i, begin)) for i, (begin, _) in places.items())
        self._released = {}
        for root, owned in self._owned():
            self._broadcast(root, [self._memory.flat(i) for i in owned if not self._is_released(i)])
        if self._memory.releases:
            self._memory.publish(sliced=False)

    def _broadcast(self, root: int, flats: list[torch.Tensor]) -> None:
        ranges = [(flat.data_ptr(), flat.numel() * flat.element_size(), "uint8") for flat in flats if flat.numel()]
        if ranges and self._link.world_size > 1:
            self._link.comm.broadcast(ranges, root, self._link.current_stream())
