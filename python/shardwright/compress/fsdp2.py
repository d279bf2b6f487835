"""Compressors for torch's FSDP2: the all-reduce of slices over replicas.

Given only the sharded dimension of a mesh, FSDP2 leaves the other one to a hook (FSDPModule.set_all_reduce_hook), which
gets one flat slice a unit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._engine import Error
from ..comm.exchange import group_exchange
from ..layout.bucket import Bucket, real_bucket
from ..options.compress import Compressor
from ..torch_compat.internals import fsdp2_groups, is_hsdp
from .make import make_state
from .state import CompressionState


class ReplicaCompression:
    """The result of compress_all_reduce(). `state`, which each rank saves and loads, is None for stateless ones."""

    def __init__(self, compress: Compressor, group: Any) -> None:
        self._given = state = make_state(compress, group_exchange(group))
        self.state = state if isinstance(state, CompressionState) else None
        self._units: list[_Unit] = []
        self._seen: set[int] = set()

    @property
    def wire_bytes(self) -> int:
        """Return the bytes that this rank has sent to other replicas so far."""
        return self._given.codec.sent_bytes

    def attach(self, module: Any, group: Any, names: dict[int, str]) -> None:
        unit = _Unit(group.fsdp_params, names)
        if self.state is not None:
            self.state.set_names(zip(unit.names, unit.keys))
        number = len(self._units)
        self._units.append(unit)
        module.set_all_reduce_hook(lambda output: self._average(number, output))

    @torch.no_grad()
    def _average(self, number: int, output: torch.Tensor) -> None:
        if number in self._seen:  # the last backward did not reach every unit
            self._seen.clear()
            if self.state is not None:
                self.state.end_bucket(True)
        self._seen.add(number)
        is_last = len(self._seen) == len(self._units)
        unit = self._units[number]
        if self.state is not None and output.numel() != unit.numel:
            raise Error(
                f"the gradients of the unit of {', '.join(unit.names[:3])} have {output.numel()} elements on this rank, "
                f"not {unit.numel}: a parameter got none in this backward, and the compressor cannot tell which; use a stateless "
                "compressor (sw.Fp16, sw.Bf16), or let FSDP2 reduce unused parameters as zeros (set_reduce_scatter_unused_params)"
            )
        bucket = Bucket(output, unit.layouts, unit.keys, number, is_last)
        self._given.average(real_bucket(bucket))
        if is_last:
            self._seen.clear()


class _Unit:
    """A set of parameters that FSDP2 gathers and reduces together, with the offset of each slice in the flat output."""

    def __init__(self, parameters: list[Any], names: dict[int, str]) -> None:
        trained = [each for each in parameters if each.sharded_param.requires_grad]
        self.names = [names[id(each.sharded_param)] for each in trained]
        # placeholders, since FSDP2 may replace its parameters
        self.keys = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in trained]
        self.layouts, self.numel = [], 0
        for each in trained:
            self.layouts.append((each.sharded_size, each.contiguous_sharded_stride, self.numel))
            self.numel += each.padded_sharded_param_size.numel()


def compress_all_reduce(module: torch.nn.Module, compress: Compressor, replicate: Any) -> ReplicaCompression:
    """Compress the all-reduce between replicas of an FSDP2 module.

    Parameters
    ----------
    module : Module
        The module after torch's fully_shard over the sharded dimension alone; every unit of it gets the hook.
    compress : Fp16, Bf16, Int8, Int4 or PowerSGD
    replicate : DeviceMesh or ProcessGroup
        The other dimension: ranks that own the same slices.

    Returns
    -------
    ReplicaCompression
        The compressor's `state`, which each rank saves, and `wire_bytes`.

    Raises
    ------
    Error, TypeError, NotImplementedError
        If FSDP2 has sharded nothing in the module, or has sharded it over two dimensions, where its all-reduce precedes
        any hook; for no compressor; without set_all_reduce_hook, or for parameters that are not on the CPU.

    Notes
    -----
    FSDP2 averages over the sharded dimension, the hook over the replicas: together the mean over all ranks. Inside
    set_requires_gradient_sync(False) neither runs. Replicas must start equal, as in FSDP2 itself. PowerSGD compresses a
    rank's slice of each matrix. State belongs to this rank's slices and can be loaded on a mesh with the same
    dimensions. Cost: the compressor's, on 1/S of the gradients.

    Examples
    --------
    ::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        compression = sw.hooks.compress_all_reduce(model, sw.PowerSGD(rank=4), mesh["replicate"])
    """
    if not isinstance(compress, Compressor):
        raise TypeError(
            f"compress_all_reduce: compress must be sw.Fp16(), sw.Bf16(), sw.Int8(), sw.Int4() or sw.PowerSGD(), got {compress!r}"
        )
    group = replicate if isinstance(replicate, dist.ProcessGroup) else replicate.get_group()
    units = [(each, found) for each in module.modules() for found in fsdp2_groups(each)]
    if not units:
        raise Error("compress_all_reduce: torch's fully_shard was called on no module here")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for each, found in units:
        _check(each, found)
    made = ReplicaCompression(compress, group)
    for each, found in units:
        if any(p.sharded_param.requires_grad for p in found.fsdp_params):
            made.attach(each, found, names)
    return made


def _check(module: Any, group: Any) -> None:
    if not hasattr(module, "set_all_reduce_hook"):
        raise NotImplementedError(f"compress_all_reduce: torch {torch.__version__} has no set_all_reduce_hook")
    if is_hsdp(group):
        raise Error(
            "compress_all_reduce: the module was sharded over a mesh of two dimensions, so FSDP2 all-reduces whole gradients before "
            "any hook: give fully_shard only the sharded dimension, mesh['shard'], and this function mesh['replicate']"
        )
    for each in group.fsdp_params:
        device = each.sharded_param.device.type
        if device != "cpu":
            raise NotImplementedError(f"compress_all_reduce: parameters must be on the CPU, not on {device}")
