"""HostBackend: modules in host memory that the ranks of a host map; hosts exchange data over the bridge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..._engine import Error, Reducer, Store, norm_sum
from ...backend.base import Capabilities, Request
from ...comm.process_group import HostGroup
from ...layout.shard_runs import Storage
from ...layout.views import as_real, dense_strides, dtype_name
from ...options.checks import offload_folder, offload_place
from ...options.compress import Compressor
from ...parameters.sharded_groups import UnitMemory
from ...torch_compat.engine_storage import engine_tensor

#: at zero >= 2 gradients share a ring for the largest bucket and one more; large buckets would need much memory
_SLICED_CAP_BYTES = 8 << 20
#: between hosts the wire is the bottleneck. It starts with the first bucket, which is therefore small, and is idle for
#: up to 4 ms between batches. Compressed buckets that leave at the end of the backward (zero >= 2) are best few and large
_HOSTS_CAP_BYTES, _HOSTS_FIRST_CAP_BYTES = 8 << 20, 1 << 20


class HostBackend:
    """The backend of host memory; see Backend."""

    capabilities = Capabilities()
    link = row = None

    def __init__(self, group: HostGroup, request: Request) -> None:
        self.group = group

    @staticmethod
    def check_request(module: torch.nn.Module, request: Request, group: HostGroup) -> None:
        if request.options.communicator != "own":
            raise NotImplementedError(
                f"communicator={request.options.communicator!r} requires a module on a GPU, got {request.label} on the CPU"
            )

    def reducer(self, request: Request) -> Reducer:
        options, over_hosts = request.options, self.group.host_count > 1 and request.sends_early
        limits = [_SLICED_CAP_BYTES] * (request.zero >= 2) + [_HOSTS_CAP_BYTES] * over_hosts
        made = Reducer(
            self.group.comm,
            request.table.rows(),
            bucket_cap_bytes=min(options.bucket_cap_bytes, *limits) if limits else options.bucket_cap_bytes,
            transport=options.chosen_transport,
            reduce=options.reduce,
            sliced=request.zero >= 2,
            slices=request.slicing.for_engine() if request.zero else None,
            label=request.label,
            first_cap_bytes=_HOSTS_FIRST_CAP_BYTES if over_hosts else 0,
            takes_means=options.step_in_backward,
        )
        if options.step_in_backward and made.transport == "staged":  # alike on all ranks
            raise Error(
                f"step_in_backward=True needs gradients in memory that the ranks of a host share; here they are staged: {made.transport_reason}"
            )
        return made

    def store(self, reducer: Reducer, request: Request, *, shared: bool) -> tuple[Store, None]:
        made = Store(
            reducer,
            "shared" if shared else "private",
            self.group.host_of,
            request.label,
            slices=request.slicing.for_engine(),
            narrow=[(index, dtype_name(dtype)) for index, dtype in request.compute_dtypes.items() if shared],
        )
        return made, None

    def tensor(self, store: Store, index: int, like: torch.Tensor) -> torch.Tensor:
        strides = dense_strides(like)
        return engine_tensor(store.whole(index, list(like.shape), strides and list(strides)))

    def unshard_store(self, reducer: Reducer, request: Request) -> Storage:
        slicing, label = request.slicing, request.label
        coded = request.options.gather == "int8"
        if coded and (self.group.host_count > 1 or slicing.is_replicated):
            raise NotImplementedError(
                f"gather='int8' runs inside one host and without a mesh of two dimensions; {label} is over {self.group.host_count} "
                f"hosts, and slices are kept {'by each replica' if slicing.is_replicated else 'once'}"
            )
        folder = offload_folder(offload_place(request.options.offload, "parameters"))
        return UnitMemory(self, reducer, request, coded=coded, folder=folder)

    def exchange(self, compress: Compressor, like: torch.Tensor) -> None:
        return None

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, label: str) -> None:
        self.group.broadcast(tensors, root, label)

    def norm_sums(self, tensors: Iterable[torch.Tensor]) -> bytes:
        return norm_sum([as_real(tensor) for tensor in tensors])

    def fence(self, label: str) -> None:
        self.group.comm.barrier(label)

    def abort(self, reason: str) -> None:
        if self.group.comm.is_alive:
            self.group.comm.abort(reason)
