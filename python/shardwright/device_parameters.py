"""Parameters on a GPU of which a rank updates its slices, and keeps all (zero 1 and 2): in buckets, whose slices are gathered after a step.

Order is said with events alone: the communicator's stream comes after what the optimizer's was given, and what that stream is
given next, such as the next forward, after the gathering.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils.dlpack import from_dlpack

from . import device
from ._engine import Reducer, device_tensor
from .device import DeviceLink
from .device_registration import Registration
from .gradients import dense_strides
from .parameter_slices import ParameterSlices, itemsize_of
from .slicing import Slicing
from .table import ParameterTable


class DeviceParameters(ParameterSlices):
    """Moves the parameters of a table into buckets on the GPU.

    Parameters
    ----------
    link : DeviceLink
    row : DeviceLink
        Of the ranks that own all slices together: the same, but on a mesh of two dimensions.
    reducer : Reducer
    table : ParameterTable
    label : str
        Of the model, in messages.
    slicing : Slicing
    registers : bool
        Buckets lie in memory that is registered with NCCL, where all ranks can.

    Notes
    -----
    A parameter keeps its identity, shape and strides (or is contiguous from then on, where its strides overlapped or left gaps), and has
    a storage of exactly its bytes; its data moves. Memory: the layout's size a rank.
    """

    def __init__(
        self,
        link: DeviceLink,
        row: DeviceLink,
        reducer: Reducer,
        table: ParameterTable,
        label: str,
        slicing: Slicing,
        registers: bool = False,
    ) -> None:
        super().__init__(reducer, table, slicing, label)
        self._link, self._row = link, row
        self._buckets: dict[int, torch.Tensor] = {}
        self._registered: dict[int, torch.Tensor] = {}
        if registers:
            self._register()
        for index, parameter in enumerate(table.parameters):
            if parameter.requires_grad:
                self.adopt(index)

    def _register(self) -> None:
        """Buckets that take part from the start. Gathering each is an operation of its own: those that come later lie elsewhere. Collective."""
        parameters = self._table.parameters
        buckets = sorted({self._reducer.place(i)[0] for i, p in enumerate(parameters) if p.requires_grad})
        sizes = []
        for bucket in buckets:
            _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
            sizes.append(numel * itemsize_of(dtype))
        made = Registration(self._row, sizes, parameters[0].data, f"parameters of {self._label}")
        self._registered = dict(zip(buckets, made.buffers))

    @property
    def row(self) -> DeviceLink:
        """Of the ranks that own all slices together."""
        return self._row

    def adopt(self, index: int) -> None:
        """Moves a parameter, and its whole bucket into what publish() gathers."""
        parameter = self._table.parameters[index]
        bucket, begin, _ = self._reducer.place(index)
        _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
        if bucket not in self._buckets:
            torch_dtype = getattr(torch, dtype)
            registered = self._registered.pop(bucket, None)
            self._buckets[bucket] = (
                device.runtime.zeros(numel, torch_dtype, parameter.data)
                if registered is None
                else registered.view(torch_dtype)
            )
            self._moved.add(bucket)
        self._stepped.add(bucket)
        flat = self._buckets[bucket]
        ordinal = -1 if flat.device.type == "cpu" else self._link.ordinal
        address = flat.data_ptr() + begin * itemsize_of(dtype)
        moved = from_dlpack(
            device_tensor(ordinal, flat, address, dtype, list(parameter.shape), dense_strides(parameter))
        )
        moved.copy_(parameter.data)
        parameter.data = moved
        self._flat[index] = moved.as_strided((moved.numel(),), (1,))

    def give_back(self, together: bool = False) -> None:
        """Nothing: parameters are this rank's own."""

    def publish(self, *, failed: bool | None = None) -> None:
        """Every rank has updated its slices, on torch's current stream: makes them everybody's, in the order of that stream.
        Collective.

        Cost: of the parameters, (world_size - 1) / world_size to and from each rank. Waits for nothing, so what `failed` is told by hosts.
        """
        ranges = [
            (self._buckets[bucket].data_ptr(), numel, dtype)
            for bucket in sorted(self._stepped)
            for _, numel, dtype, _ in (self._reducer.bucket_shape(bucket),)
        ]
        if ranges:
            self._row.comm.all_gather(ranges, self._link.current_stream())

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Inside, each rank may write to the parameters; afterwards all have rank 0's. Collective. Cost: a broadcast."""
        try:
            yield
        finally:
            self._link.broadcast(self._table.parameters, 0)
