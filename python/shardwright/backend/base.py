"""The protocol of the memory that training uses; HostBackend and CudaBackend have it. Differences are Capabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from .._engine import Reducer
    from ..comm.process_group import HostGroup
    from ..layout.param_groups import UnitPlan
    from ..layout.param_table import ParameterTable
    from ..layout.shard_mesh import Slicing
    from ..layout.shard_runs import Storage
    from ..options.compress import Compressor
    from ..options.options import Options
    from .device_link import DeviceLink


class Capabilities(NamedTuple):
    """Differences between backends, each with a name. The defaults are those of host memory."""

    #: at zero=3 the ranks of a host can map one copy of the parameters; else each has its own, in units
    one_copy: bool = True
    #: a rank gathers a unit without the others; else ranks run the same units in the same order
    free_unit_order: bool = True
    #: a contribution travels with its accumulated mean; else joined ranks get accumulated means as a round opens
    tells_accumulated: bool = True
    #: compressed buckets can cross to other hosts while the backward goes on
    sends_beside_backward: bool = True
    #: the mean is always the fold in rank order
    rank_order_only: bool = True
    #: offload="cpu" has no effect: optimizer state is in the host's memory already
    state_is_there: bool = True
    #: publish() returns before the slices have arrived, and readers wait for them (StepGathers.settle)
    publishes_behind: bool = False


class Request(NamedTuple):
    """A wrapper's request to a backend."""

    table: ParameterTable
    options: Options
    zero: int
    slicing: Slicing
    label: str
    #: units, if parameters are released
    plans: Sequence[UnitPlan] | None = None
    compress: Compressor | None = None
    sends_early: bool = True
    #: the 16-bit dtypes in which modules compute with wider parameters, by number
    compute_dtypes: Mapping[int, torch.dtype] = MappingProxyType({})
    #: units whose forwards wait for their own parameters after a step, if the backend publishes behind it
    forwards: Sequence[UnitPlan] = ()
    #: fills the slices of units, if the parameters have no values yet (Building)
    building: Any = None


class Backend(Protocol):
    """The memory in which a module trains. `link` and `row`, over the ranks that own all slices, are a GPU's."""

    capabilities: Capabilities
    group: HostGroup

    def __init__(self, group: HostGroup, request: Request) -> None:
        """Make the backend. Collective."""

    @property
    def link(self) -> DeviceLink | None: ...

    @property
    def row(self) -> DeviceLink | None: ...

    @staticmethod
    def check_request(module: torch.nn.Module, request: Request, group: HostGroup) -> None:
        """Raise NotImplementedError for options that this backend does not support. Not collective."""

    def reducer(self, request: Request) -> Reducer:
        """Make the reducer, with memory for gradients. Collective."""

    def store(self, reducer: Reducer, request: Request, *, shared: bool) -> tuple[Any, Any]:
        """Make memory for whole parameters in the reducer's layout: the engine's Store, or what has its calls, and the
        gathers that its publish() leaves running (StepGathers), or None. Collective.
        """

    def tensor(self, store: Any, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `like` over a parameter's memory, with a storage of its own."""

    def unshard_store(self, reducer: Reducer, request: Request) -> Storage:
        """Make the storage of parameters that are gathered in units. Collective."""

    def exchange(self, compress: Compressor, like: torch.Tensor) -> Any:
        """Return the exchange of a compressor's hook; None if the reducer runs it. `like` is on the device."""

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, label: str) -> None:
        """Broadcast the values of rank `root`. Collective."""

    def norm_sums(self, tensors: Iterable[torch.Tensor]) -> bytes:
        """Return the exact sums of squares of this rank's tensors, as global_norm() adds them up."""

    def fence(self, label: str) -> None:
        """Make the writes of all ranks visible to the next read of any rank. Collective."""

    def abort(self, reason: str) -> None:
        """End the communicators with a reason that every rank reports."""
