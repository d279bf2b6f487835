"""The logging data of a wrapped module, under torch's names (`_get_ddp_logging_data()`), and its logger.

Facts about the constructor and the buckets are read on request. Times are measured only after a program requested the
data or set the sample rate, because measuring costs Python calls in each training step; torch always measures. Buckets
are laid out once, so torch's fields about rebuilt buckets are absent.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import torch

#: torch measures the first iterations, and then one of every _SAMPLE_RATE
_FIRST_ITERATIONS, _SAMPLE_RATE = 10, 100
#: torch's C++ names of dtypes
_CXX_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_GLOO_ENVIRONMENT = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")


class IterationTimes:
    """Timestamps of one iteration, in nanoseconds of time.perf_counter_ns(); 0 for an event that has not happened."""

    forward_start = backward_start = backward_end = close_end = 0

    def durations(self) -> dict[str, int]:
        """Return torch's fields. Communication time is the wait at the end of a backward, so no overlap is reported."""
        return {
            "forward_compute_time": self.backward_start - self.forward_start,
            "backward_compute_time": self.backward_end - self.backward_start,
            "backward_comm_time": self.close_end - self.backward_end,
            "backward_compute_comm_overlap_time": 0,
        }

    def events(self) -> dict[str, int]:
        return {
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": self.backward_start,
            "backward_compute_time_end": self.backward_end,
            "backward_comm_time_start": self.backward_end,
            "backward_comm_time_end": self.close_end,
        }


class DDPLogger:
    """A stand-in for torch's DDP logger: the methods that torch calls, and the data that it returns."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.proxy(wrapper)
        self._rate = _SAMPLE_RATE
        self._times: IterationTimes | None = None
        self._samples = 0
        self._measured: dict[str, int] = {"iteration": 0}
        self._facts: dict[str, Any] = {}

    # methods that torch calls ------------------------------------------------------------------------------------

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: begin_iteration() records the times."""

    def set_error_and_log(self, message: str) -> None:
        """Store the text of an error."""
        self._facts.update(has_error=1, error=message)

    def _set_uneven_input_join(self) -> None:
        self._facts["join_uneven_inputs"] = True

    def _set_static_graph(self) -> None:
        self._facts["static_graph"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._facts["comm_hook"] = name

    def set_sample_rate(self, rate: int) -> None:
        """Measure the first iterations, and then one of every `rate`."""
        self._rate = rate
        self._measure()

    # measuring ------------------------------------------------------------------------------------------------------

    def _measure(self) -> Any:
        """Measure iterations from now on; return the wrapper's engine on this rank."""
        replica = self._wrapper._engine.replica
        replica.gradients.begin_iteration = self.begin_iteration
        return replica

    def begin_iteration(self, iterations: int) -> IterationTimes | None:
        """Record the times of the last iteration, number `iterations`. Return an object for those of the next."""
        times, measured = self._times, self._measured
        if self._is_sampled(iterations) and times is not None and times.close_end:
            self._samples += 1
            measured.update(times.durations(), **times.events(), iteration=iterations)
            for name, value in times.durations().items():
                before = measured.get(f"avg_{name}", 0)
                measured[f"avg_{name}"] = before + (value - before) // self._samples
        self._times = IterationTimes() if self._is_sampled(iterations + 1) else None
        if self._times is not None:
            self._times.forward_start = time.perf_counter_ns()
        return self._times

    def _is_sampled(self, iteration: int) -> bool:
        return iteration <= _FIRST_ITERATIONS or iteration % self._rate == 0

    # the data -------------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """Return torch's fields and the engine's counts."""
        wrapper, replica = self._wrapper, self._measure()
        error = wrapper._engine.error
        return {
            **_of_wrapper(wrapper),
            **_of_group(wrapper.process_group, replica),
            **_of_buckets(replica),
            **self._measured,
            **self._facts,
            **({"has_error": 1, "error": error} if error else {}),
            **replica.reducer.stats(),
        }


def _of_wrapper(wrapper: Any) -> dict[str, Any]:
    return {
        "module_name": type(wrapper.module).__name__,
        "device_ids": ", ".join(map(str, wrapper.device_ids or ())),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "is_multi_device_module": 0,
        "has_sync_bn": int(any(isinstance(each, torch.nn.SyncBatchNorm) for each in wrapper.module.modules())),
        "zero": wrapper._engine.options.zero,
    }


def _of_group(group: Any, replica: Any) -> dict[str, Any]:
    backend = torch.distributed.get_backend(group) if isinstance(group, torch.distributed.ProcessGroup) else "none"
    names = _ENVIRONMENT + (_GLOO_ENVIRONMENT if backend == "gloo" else ())
    return {
        "world_size": replica.group.world_size,
        "rank": replica.group.rank,
        "backend_name": backend,
        "engine": "shardwright",
        **{name.lower(): os.environ.get(name, "N/A") for name in names},
    }


def _of_buckets(replica: Any) -> dict[str, Any]:
    parameters, reducer = replica.table.parameters, replica.reducer
    trained = [each for each in parameters if each.requires_grad]
    members = (reducer.bucket_parameters(bucket) for bucket in range(reducer.bucket_count))
    buckets = list(filter(None, ([i for i in each if parameters[i].requires_grad] for each in members)))
    dtypes = sorted({_CXX_NAMES.get(each.dtype, str(each.dtype)) for each in trained})
    return {
        "dtypes": ", ".join(dtypes),
        "total_parameter_size_bytes": sum(each.nbytes for each in trained),
        "num_parameter_tensors": len(trained),
        "bucket_sizes": ", ".join(str(sum(parameters[i].nbytes for i in each)) for each in buckets),
        "per_bucket_param_indices": ", ".join(" ".join(map(str, each)) for each in buckets),
        "has_rebuilt_buckets": 0,
        "num_buckets_reduced": len(buckets),
        "can_set_static_graph": True,
    }
