"""The options as keywords, for editors and type checkers: names and types are those of Options, in its order.

One call takes `**options: Unpack[WrapOptions]`. The parts differ in which call takes them; ten basic options come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from os import PathLike
from typing import Any, Literal, TypedDict

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .compress import Compressor
from .precision import Precision

# At run time too: programs read types with typing.get_type_hints()
PrecisionLike = Literal["bf16", "fp16", "fp32"] | Precision
Weights = str | PathLike[str] | Iterable[tuple[str, torch.Tensor]] | tuple[Any, Mapping[str, Any]]
Zero = Literal[0, 1, 2, 3]
Partition = Literal["auto", "flat", "tensor"]
SparseGradients = Literal["auto", "dense"]
Reduce = Literal["mean", "sum"]
CommunicatorOf = Literal["own", "borrow"]
Transport = Literal["auto", "pool", "staged"]
Gather = Literal["int8"]
WriteGuard = Literal["auto", "samples"]


class StageOptions(TypedDict, total=False):
    """Basic options that fully_shard sets itself."""

    zero: Zero
    share_parameters: bool | Literal["auto"]


class ModuleOptions(TypedDict, total=False):
    """Basic options of every call."""

    precision: PrecisionLike | Mapping[str, PrecisionLike] | None
    compress: Compressor | Literal["auto"] | None
    offload: str | Mapping[str, str | None] | None
    units: float | Literal["auto", "size"] | type[torch.nn.Module] | Collection[type[torch.nn.Module]]


class StepOptions(TypedDict, total=False):
    """Basic options of a call that takes the optimizer."""

    clip_grad_norm: float | None
    partition: Partition


class RankOptions(TypedDict, total=False):
    """Basic options that torch's DistributedDataParallel has by position."""

    process_group: ProcessGroup | None
    device_mesh: DeviceMesh | None


class BackwardOptions(TypedDict, total=False):
    """Expert options of a call that takes the optimizer."""

    step_in_backward: bool


class ExpertOptions(TypedDict, total=False):
    """Expert options of every call."""

    groups: Mapping[Any, DeviceMesh | ProcessGroup] | None
    timeout_s: float
    warn_after_s: float | None
    silent_s: float | None
    sparse_gradients: SparseGradients
    reduce: Reduce
    deterministic: bool
    communicator: CommunicatorOf
    transport: Transport
    prefetch: int
    gather: Gather | None
    write_guard: WriteGuard | None
    check_every: int | None


class FlatOptions(TypedDict, total=False):
    """Expert options that fully_shard has with other types, or not."""

    device: str | torch.device | None
    ignored_params: Collection[torch.nn.Parameter | str]
    reshard_after_forward: bool


class TorchOptions(TypedDict, total=False):
    """Expert options that torch's DistributedDataParallel has by position."""

    bucket_cap_mb: float
    broadcast_buffers: bool
    init_sync: bool
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool


class BuildOptions(TypedDict, total=False):
    """Keywords that build a module of the meta device; no fields of Options."""

    init: Callable[[torch.nn.Module], object] | bool | None
    weights: Weights | None


class OptionFields(
    StageOptions, ModuleOptions, StepOptions, RankOptions, BackwardOptions, ExpertOptions, FlatOptions, TorchOptions,
    total=False,
):  # fmt: skip
    """All fields of Options."""


class WrapOptions(OptionFields, BuildOptions, total=False):
    """Keywords of sw.wrap."""

    mixed_precision: Any


class DDPOptions(StageOptions, ModuleOptions, ExpertOptions, FlatOptions, total=False):
    """Keywords of DistributedDataParallel that torch's class does not have."""


class FullyShardOptions(ModuleOptions, RankOptions, ExpertOptions, TorchOptions, BuildOptions, total=False):
    """Keywords of fully_shard."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    ignored_params: Collection[torch.nn.Parameter | str] | None
    dp_mesh_dims: Any
    shard_placement_fn: Callable[[torch.nn.Parameter], Any] | None
    mp_policy: Any
    offload_policy: Any
