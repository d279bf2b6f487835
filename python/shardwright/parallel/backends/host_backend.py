"""HostBackend: modules in host memory that the ranks of a host map; hosts exchange data over the bridge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from ..._engine import Arena, Reducer, norm_sum
from ...backend.base import Capabilities, Request
from ...comm.levels import Lease, Levels, leased_levels, levels_of
from ...comm.process_group import HostGroup
from ...layout.shard_mesh import Slicing
from ...layout.shard_runs import OUTCOME_BYTES, Storage, itemsize_of, outcome_sets, populate
from ...layout.views import as_real, dense_strides, dtype_name
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

    capabilities = Capabilities(
        one_copy=True,
        free_unit_order=True,
        tells_accumulated=True,
        sends_beside_backward=True,
        rank_order_only=True,
        state_is_there=True,
        publishes_behind=False,
    )
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
        return Reducer(
            self.group.comm,
            request.table.rows(),
            bucket_cap_bytes=min(options.bucket_cap_bytes, *limits) if limits else options.bucket_cap_bytes,
            transport=options.chosen_transport,
            reduce=options.reduce,
            sliced=request.zero >= 2,
            slices=request.slicing.for_engine() if request.zero else None,
            label=request.label,
            first_cap_bytes=_HOSTS_FIRST_CAP_BYTES if over_hosts else 0,
        )

    def empty(self, reducer: Reducer, buckets: Collection[int], request: Request, *, shared: bool) -> HostBuckets:
        narrows = shared and bool(request.compute_dtypes) and self.group.shares(request.slicing)
        return HostBuckets(self.group, reducer, buckets, request.slicing, request.label, shared, narrows)

    def unshard_store(self, reducer: Reducer, request: Request) -> Storage:
        slicing, label = request.slicing, request.label
        coded = request.options.gather == "int8"
        if coded and (self.group.host_count > 1 or slicing.is_replicated):
            raise NotImplementedError(
                f"gather='int8' runs inside one host and without a mesh of two dimensions; {label} is over {self.group.host_count} "
                f"hosts, and slices are kept {'by each replica' if slicing.is_replicated else 'once'}"
            )
        return UnitMemory(self, reducer, request, coded=coded)

    def exchange(self, compress: Compressor, request: Request, like: torch.Tensor) -> tuple[Levels, Lease | None]:
        if self.group.host_count > 1 and request.zero < 2:
            return leased_levels(self.group)
        return levels_of(self.group), None

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, label: str) -> None:
        self.group.broadcast(tensors, root, label)

    def norm_sums(self, tensors: Iterable[torch.Tensor]) -> bytes:
        return norm_sum([as_real(tensor) for tensor in tensors])

    def fence(self, label: str) -> None:
        self.group.comm.barrier(label)

    def abort(self, reason: str) -> None:
        if self.group.comm.is_alive:
            self.group.comm.abort(reason)


class HostBuckets:
    """Buckets, and 16-bit casts if `narrows`, in an arena of a host's ranks: one copy a rank or, if `shared`, a host."""

    def __init__(
        self,
        group: HostGroup,
        reducer: Reducer,
        buckets: Collection[int],
        slicing: Slicing,
        label: str,
        shared: bool,
        narrows: bool = False,
    ) -> None:
        self._group, self._reducer, self._slicing, self._label, self._shared = group, reducer, slicing, label, shared
        self._home = group.home_of(slicing) if shared else group.rank
        self.is_home = group.rank == self._home
        self.is_copied = slicing.is_replicated or group.host_count > 1
        self.reason = ""
        self._arena: Arena | None = None
        self._outcomes: list[tuple[int, torch.Tensor]] = []
        self._is_apart, self._slices = group.is_apart(slicing), slicing.for_engine()
        self._ranges: dict[int, tuple[int, int]] = {}
        self._nbytes = max(sum(self._range(bucket)) for bucket in range(reducer.bucket_count))
        outcome_bytes = OUTCOME_BYTES * group.world_size
        try:
            self._narrow_offset, narrow_bytes = self._nbytes + outcome_bytes, self._nbytes // 2 * narrows
            size = self._narrow_offset + narrow_bytes
            self._arena = group.comm.arena(size, f"parameters of {label}", of_hosts=True)
        except MemoryError as error:  # the same on every rank
            if shared:
                raise
            self.reason = str(error)
            return
        if not slicing.is_replicated:  # otherwise a rank may not see all ranks' outcomes
            self._outcomes = outcome_sets(self._arena, self._nbytes, group.world_size, self._home)
        if self.is_home:
            populate(self._arena, [*map(self._range, buckets), *[(self._narrow_offset, narrow_bytes)] * narrows])

    def _range(self, bucket: int) -> tuple[int, int]:
        offset, numel, dtype, _ = self._reducer.bucket_shape(bucket)
        return self._ranges.setdefault(bucket, (offset, numel * itemsize_of(dtype)))

    def tensor(self, bucket: int, begin: int, like: torch.Tensor) -> torch.Tensor | None:
        if self._arena is None:
            return None
        offset, _, dtype, _ = self._reducer.bucket_shape(bucket)
        strides = dense_strides(like)
        first = offset + begin * itemsize_of(dtype)
        return engine_tensor(self._arena.tensor(first, dtype, list(like.shape), strides and list(strides), self._home))

    def narrow(self, bucket: int, begin: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a parameter's cast to a 16-bit dtype."""
        assert self._arena is not None
        offset = self._reducer.bucket_shape(bucket)[0]
        first = self._narrow_offset + offset // 2 + begin * dtype.itemsize  # casts take half of a bucket at most
        strides = dense_strides(like)
        shape = list(like.shape)
        return engine_tensor(self._arena.tensor(first, dtype_name(dtype), shape, strides and list(strides), self._home))

    def mapped(self) -> list[tuple[int, int]]:
        return [] if self._arena is None else [(self.words().data_ptr(), self._arena.nbytes)]

    def words(self) -> torch.Tensor:
        """Return all of the memory as words of 4 bytes."""
        if self._arena is None:
            return torch.empty(0, dtype=torch.int32, device="cpu")
        return engine_tensor(self._arena.tensor(0, "int32", [self._nbytes // 4], None, self._home))

    def publish(
        self, buckets: Collection[int], failed: bool | None, owned: Callable[[int], Sequence[tuple[int, int]]]
    ) -> list[int] | None:
        """Publish. Cost: private, a rank's slices written world_size - 1 times; shared, one barrier; over hosts, slices once."""
        comm, label = self._group.comm, f"updated parameters of {self._label}"
        outcomes = [] if failed is None else self._outcomes
        if outcomes:
            outcomes.reverse()
            outcomes[0][1][self._group.rank, 0] = bool(failed)
        if self._shared and (not self._is_apart or not buckets):
            comm.barrier(label)
            outcomes = [] if self._is_apart else outcomes
        elif self._arena is not None:
            ranges = [
                *map(self._ranges.__getitem__, sorted(buckets)),
                *((at, each.numel()) for at, each in outcomes[:1]),
            ]
            comm.all_gather(self._arena, ranges, label, one_copy=self._shared, slices=self._slices)
        else:
            for root in map(self._slicing.first_owner, range(self._slicing.count)):
                if owned(root):
                    comm.broadcast(owned(root), root, label)
        return outcomes[0][1][:, 0].tolist() if outcomes else None

    def settle(self) -> None:
        """Do nothing: publish() already waits."""

    #: there are none
    arrange_hooks: Callable[[bool], None] | None = None

    close = settle
