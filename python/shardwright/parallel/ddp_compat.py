"""Attributes of torch's DistributedDataParallel that other libraries use: `.reducer`, `.logger`, its constructor's
arguments.

accelerate and Lightning call `reducer.prepare_for_backward`, torch's own code calls the logger. Nothing here does work
of its own. A method without meaning for our engine is missing, or is accepted where its effect holds anyway.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from .._engine import Error


class ReducerFacade:
    """torch's Reducer, with the methods that other libraries use."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)

    def prepare_for_forward(self) -> None:
        """Do nothing: forward() does it."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor] = ()) -> None:
        """Declare that the next backward synchronises, for graphs whose forward ran inside no_sync()."""
        wrapper = self._wrapper()
        if wrapper is None or not torch.is_grad_enabled():
            return
        reducer = wrapper._engine().reducer
        if not reducer.is_open and not reducer.pending_forward:
            reducer.forward(wrapper.require_backward_grad_sync)

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: buckets are never rebuilt."""

    def _set_static_graph(self) -> None:
        """Do nothing: nothing depends on it."""

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        """Do nothing: stats() counts always."""

    def _remove_autograd_hooks(self) -> None:
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper._engine().retire()

    def _check_reducer_finalized(self) -> None:
        wrapper = self._wrapper()
        if wrapper is not None and wrapper._engine().reducer.is_open:
            raise Error("the round of the last backward was never closed: the backward ended in an exception")


class LoggerFacade:
    """torch's DDP logger, with the methods that torch calls."""

    def set_runtime_stats_and_log(self) -> None: ...
    def set_error_and_log(self, message: str) -> None: ...
    def _set_uneven_input_join(self) -> None: ...
    def _set_static_graph(self) -> None: ...
    def _set_comm_hook_name(self, name: str) -> None: ...


def check_device_ids(device_ids: Any, output_device: Any, device: torch.device) -> None:
    """Raise ValueError if they name a device other than the module's own GPU."""
    if not device_ids and output_device is None:
        return
    given = [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in device_ids or ()]
    if output_device is not None:
        given.append(
            torch.device("cuda", output_device) if isinstance(output_device, int) else torch.device(output_device)
        )
    if device.type != "cuda" or len(device_ids or ()) > 1 or any(each != device for each in given):
        raise ValueError(
            f"device_ids={device_ids!r} and output_device={output_device!r} must name the one GPU that the module is on, which is "
            f"on {device}: move the module there first, or leave both None"
        )


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with the tensors of nested tuples, lists and dicts on `device`; the lengths of a PackedSequence
    stay on the CPU.
    """
    if isinstance(value, (torch.Tensor, PackedSequence)):
        movable: Any = value  # torch's stub of PackedSequence.to() knows a dtype alone
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
    """Check torch's constructor arguments that have no field in Options. Raise for those that cannot work."""
    if arguments["mixed_precision"] is not None:
        raise NotImplementedError(
            "mixed_precision= is not there: precision='bf16', 'fp16' or sw.Precision(...) computes in low precision and reduces in what "
            "it says, or put torch.autocast around the forward"
        )
    if arguments["delay_all_reduce_named_params"] is not None or arguments["param_to_hook_all_reduce"] is not None:
        raise NotImplementedError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce are not there: "
            "buckets are sent in order as they fill, leave both None"
        )
    if arguments["bucket_cap_mb_list"]:
        raise NotImplementedError(
            "bucket_cap_mb_list is not there: pass one bucket_cap_mb; results do not depend on it"
        )
    if arguments["check_reduction"]:
        warnings.warn("check_reduction has no effect: a round always ends complete", FutureWarning, stacklevel=4)
    if arguments["dim"] != 0:
        raise ValueError(f"dim must be 0, got {arguments['dim']!r}: inputs are not scattered")
