"""CudaBackend: modules on one GPU per rank, over NCCL or slots, in the order of torch's streams.

Features that only the host supports raise an error that names the feature.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from ..._engine import Reducer
from ...backend.base import Capabilities, Request
from ...backend.device_link import DeviceLink, device_link, mesh_links
from ...comm.process_group import HostGroup
from ...compress.device_exchange import DeviceExchange
from ...gradients.device_reducer import DeviceReducer
from ...layout.param_table import ParameterTable
from ...layout.shard_runs import Storage
from ...options.checks import offload_kinds
from ...options.compress import Compressor
from ...options.compressors import Bf16, Fp16
from ...parameters.device_groups import DeviceUnitMemory, rows_in_groups
from ...parameters.step_gathers import StepGathers
from ...torch_compat.weak import weakly


class CudaBackend:
    """The backend of a GPU; see Backend. Construction is collective."""

    capabilities = Capabilities(
        one_copy=False,
        free_unit_order=False,
        tells_accumulated=False,
        sends_beside_backward=False,
        rank_order_only=False,
        state_is_there=False,
        publishes_behind=True,
    )

    def __init__(self, group: HostGroup, request: Request) -> None:
        self.group = group
        self._like, self._timeout_s = request.table.like, request.options.timeout_s
        borrows = request.options.communicator == "borrow"
        self.link = device_link(group, self._like, self._timeout_s, borrows=borrows)
        #: link over the ranks that own all slices together
        self.row = self.link
        if request.zero and (request.plans is not None or request.slicing.is_replicated):
            # A separate communicator: gathers and means each have an order on all ranks, but none between them.
            self.row = device_link(group, self._like, self._timeout_s, request.slicing.rows(), borrows)
        #: links of this rank's row and column, over which NCCL reduces on a mesh
        self._mesh: tuple[DeviceLink, DeviceLink] | None = None
        if request.slicing.is_replicated and _reduces_by_rows(request):
            self._mesh = mesh_links(group, self._like, self._timeout_s, request.slicing.rows(), borrows)

    @staticmethod
    def check_request(module: torch.nn.Module, request: Request, group: HostGroup) -> None:
        options = request.options
        if options.step_in_backward:
            raise NotImplementedError(
                "step_in_backward=True is for modules on the CPU: on a GPU leave it out, and step after the backward"
            )
        if request.zero == 3 and (
            options.share_parameters is True or options.gather is not None or options.write_guard == "samples"
        ):
            raise NotImplementedError(
                "share_parameters=True, gather='int8' and write_guard= are the host's: at zero=3 on GPUs each rank keeps its slices as they are"
            )
        parameters, optimizer = offload_kinds(options.offload)
        if parameters == "nvme":
            raise NotImplementedError(
                f"offload={options.offload!r} keeps parameters in a file, which is for modules on the CPU: on a GPU their place is None or 'cpu'"
            )
        if parameters == "cpu" and request.table.is_by_rows:
            raise NotImplementedError(
                f"offload={options.offload!r} with fully_shard on a GPU is not supported: its optimizers step on DTensors of the GPU; use sw.wrap"
            )
        if parameters == "cpu" and (request.zero != 3 or optimizer is None):
            raise ValueError(
                f"offload={options.offload!r} keeps parameters of a GPU in host memory, which needs zero=3 and a place of the optimizer's state, "
                f"'cpu' or 'nvme:<folder>', got zero={request.zero} and {optimizer!r}"
            )
        if options.communicator == "borrow" and group.world_size > 1:
            _check_borrowing(module, group)
        wire_of(request.compress, request.table)

    def reducer(self, request: Request) -> Reducer:
        options = request.options
        return DeviceReducer(
            self.link,
            request.table.rows() if request.plans is None else rows_in_groups(request),
            self._like,
            # one mean for each unit and dtype: a ring's hops are paid for each call, and units end buckets anyway
            bucket_cap_bytes=options.bucket_cap_bytes if request.plans is None else sys.maxsize,
            reduce=options.reduce,
            deterministic=options.deterministic,
            label=request.label,
            sliced=request.zero >= 2,
            slicing=request.slicing,
            wire=wire_of(request.compress, request.table),
            mesh=self._mesh,
            at_home=_is_at_home(request),
        )

    def store(self, reducer: Reducer, request: Request, *, shared: bool) -> tuple[StepGathers, StepGathers]:
        made = StepGathers(self.row, reducer, request)
        return made, made

    def tensor(self, store: StepGathers, index: int, like: torch.Tensor) -> torch.Tensor:
        return store.tensor(index, like)

    def unshard_store(self, reducer: Reducer, request: Request) -> Storage:
        assert request.plans is not None
        made = DeviceUnitMemory(self, self.row, reducer, request, at_home=_is_at_home(request))
        reducer.set_order(weakly(made.digest, 0))
        made.schedule.pass_over = reducer.pass_over
        return made

    def exchange(self, compress: Compressor, like: torch.Tensor) -> DeviceExchange:
        if isinstance(compress, (Fp16, Bf16)):
            raise NotImplementedError(
                f"{compress!r} on GPUs is the reducer's own, made with it: sw.wrap(..., compress={compress!r})"
            )
        return DeviceExchange(self.link, like)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, label: str) -> None:
        self.link.broadcast(tensors, root)

    def norm_sums(self, tensors: Iterable[torch.Tensor]) -> bytes:
        return self.link.norm_sum(tensors)

    def fence(self, label: str) -> None:
        """Do nothing: streams order the writes of ranks."""

    def abort(self, reason: str) -> None:
        if self.link.comm.is_alive:
            self.link.fail(reason)


def _check_borrowing(module: torch.nn.Module, group: HostGroup) -> None:
    """Raise NotImplementedError if a batch normalisation would use the same communicator, on another stream."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm) and group.is_of(part.process_group):
            raise NotImplementedError(
                f"communicator='borrow' with {type(part).__name__} {name!r}: it exchanges over torch's communicator of the same ranks "
                "inside forward and backward, beside gradients: pass communicator='own', or give it a process_group of its own"
            )


def _is_at_home(request: Request) -> bool:
    """Return whether slices, of parameters and of means, lie in pinned host memory."""
    return offload_kinds(request.options.offload)[0] == "cpu"


def _reduces_by_rows(request: Request) -> bool:
    """Return False if means are folds or come from a compressor. A sum is a fold at zero >= 2, so no sum is by rows."""
    options = request.options
    return not options.deterministic and options.reduce == "mean" and request.compress is None


def wire_of(compress: Compressor | None, table: ParameterTable) -> str | None:
    """Return the dtype of gradients between GPUs; None: unchanged, or chosen by a hook (compress/device_exchange.py)."""
    if not isinstance(compress, (Fp16, Bf16)):
        return None
    for name, parameter in zip(table.names, table.parameters):
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(
                f"compress={compress!r} on GPUs: parameter {name!r} must be float32, float16 or bfloat16, not {parameter.dtype}"
            )
    return "float16" if isinstance(compress, Fp16) else "bfloat16"
