"""Parts of torch's DistributedDataParallel that other libraries use: `.reducer` and arguments of the constructor.

accelerate and Lightning call `reducer.prepare_for_backward`. Methods here only delegate. A method without meaning for
our engine is missing, or does nothing if the engine has its effect anyway.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from .._engine import Error
from ..options.precision import Precision
from ..torch_compat.internals import set_low_precision


class ReducerFacade:
    """A stand-in for torch's Reducer with the methods that other libraries use."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.proxy(wrapper)

    def prepare_for_forward(self) -> None:
        """Do nothing: our forward() prepares itself."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor] = ()) -> None:
        """Make the next backward synchronise, also for a graph with a forward inside no_sync()."""
        if torch.is_grad_enabled():
            reducer = self._wrapper._engine.replica.reducer
            if not reducer.is_open and not reducer.pending_forward:
                reducer.forward(self._wrapper.require_backward_grad_sync)

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: buckets are never rebuilt."""

    def _set_static_graph(self) -> None:
        """Do nothing: the engine does not use static_graph."""

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self._wrapper.logger.set_sample_rate(rate)

    def _remove_autograd_hooks(self) -> None:
        for replica in self._wrapper._engine.replicas:
            replica.retire()

    def _check_reducer_finalized(self) -> None:
        if self._wrapper._engine.replica.reducer.is_open:
            raise Error("the round of the last backward was never closed: the backward ended in an exception")


def check_device_ids(device_ids: Any, output_device: Any, device: torch.device) -> None:
    """Raise ValueError if an argument names a device other than the module's own GPU."""
    if not device_ids and output_device is None:
        return
    named = [*(device_ids or ()), *([] if output_device is None else [output_device])]
    given = [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in named]
    if device.type != "cuda" or len(device_ids or ()) > 1 or any(each != device for each in given):
        raise ValueError(
            f"device_ids={device_ids!r} and output_device={output_device!r} must name the one GPU that the module is on, which is "
            f"on {device}: move the module there first, or leave both None"
        )


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in nested tuples, lists and dicts to `device`; lengths of a PackedSequence stay on the CPU."""
    if isinstance(value, (torch.Tensor, PackedSequence)):
        movable: Any = value  # torch's stub of PackedSequence.to() accepts only a dtype
        return movable.to(device, non_blocking=True)
    if isinstance(value, tuple):
        moved = [to_device(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value


def check_arguments(arguments: dict[str, Any]) -> None:
    """Check torch's constructor arguments without a field in Options. Raise for those that cannot work."""
    if arguments["mixed_precision"] is not None and arguments["options"].get("precision") is not None:
        raise ValueError("mixed_precision= and precision= were both given: pass one of them")
    if arguments["delay_all_reduce_named_params"] is not None or arguments["param_to_hook_all_reduce"] is not None:
        raise NotImplementedError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported: "
            "buckets are sent in order as they fill, leave both None"
        )
    caps = arguments["bucket_cap_mb_list"] or ()
    if any(isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 0 for cap in caps):
        raise ValueError(f"bucket_cap_mb_list must be a list of positive numbers of MiB, got {caps!r}")
    if arguments["broadcast_buffers"] is not None:  # torch 2.13 deprecated it; the option of sw.wrap is not deprecated
        text = "`broadcast_buffers` is deprecated, and without effect beside `forward_sync_buffers`"
        if arguments["forward_sync_buffers"] is None:
            text = (
                "`broadcast_buffers` is deprecated: use `forward_sync_buffers`, which, unlike it, leaves the broadcast of buffers at "
                "construction in place, or sw.wrap(broadcast_buffers=...)"
            )
        warnings.warn(text, FutureWarning, stacklevel=3)
    if arguments["check_reduction"]:
        warnings.warn("check_reduction has no effect: a round always ends complete", FutureWarning, stacklevel=4)
    if arguments["dim"] != 0:
        raise ValueError(f"dim must be 0, got {arguments['dim']!r}: inputs are not scattered")


def bucket_cap(bucket_cap_mb: float | None, bucket_cap_mb_list: Any) -> float:
    """Return the cap of all buckets, in MiB: bucket_cap_mb, or the largest of torch's list."""
    if bucket_cap_mb_list:
        return float(max(bucket_cap_mb_list))
    return 25 if bucket_cap_mb is None else bucket_cap_mb


def precision_of(mixed_precision: Any) -> Precision:
    """Convert torch's policy for DDP (param_dtype, reduce_dtype, buffer_dtype) to a Precision."""
    if not all(hasattr(mixed_precision, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")):
        raise TypeError(
            f"mixed_precision must have param_dtype, reduce_dtype and buffer_dtype, got {mixed_precision!r}; precision= takes 'bf16', "
            "'fp16' or sw.Precision(...)"
        )
    reduce_dtype = mixed_precision.reduce_dtype or mixed_precision.param_dtype
    return Precision(
        param_dtype=mixed_precision.param_dtype, reduce_dtype=None if reduce_dtype is torch.float32 else reduce_dtype
    )


def apply_mixed_precision(
    module: torch.nn.Module, mixed_precision: Any, ignored: Collection[str], *, keeps_places: bool
) -> None:
    """Cast buffers by torch's policy. If parameters keep their places, set the attributes that torch's code reads."""
    for name, buffer in module.named_buffers():
        if mixed_precision.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.data.to(mixed_precision.buffer_dtype)
    for name, parameter in module.named_parameters() if keeps_places else ():
        if name in ignored or not parameter.is_floating_point():
            continue
        set_low_precision(parameter, mixed_precision.param_dtype or parameter.dtype)
