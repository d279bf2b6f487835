"""A stand-in for GPUs: torch's tests that ask for one GPU a rank run on the CPU.

`.cuda()`, `device=rank`, "cuda:1" and autocast on GPUs mean the CPU; streams and waits for a device do nothing. What a
test says about gradients, hooks, errors and states holds on any device; what it says about streams or device memory does
not, and such a test is in the table of differences.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
#: test_ddp_uneven_inputs convolves images of 200 billion operations a step: minutes on a CPU
_LARGE_IMAGE, _SMALL_IMAGE = (1, 1, 1000, 1000), (1, 1, 60, 60)


def admit_gpu_tests() -> None:
    """Have torch's decorators run tests that need GPUs. To be called before the suite is imported."""
    from torch.testing._internal import common_distributed as common

    def admit(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return run

    def admit_for(count: int, *_: Any, **__: Any) -> Callable[..., Any]:
        def mark(function: Callable[..., Any]) -> Callable[..., Any]:
            run = admit(function)
            run.gpus = count  # type: ignore[attr-defined]
            return run

        return mark

    common.skip_if_lt_x_gpu = admit_for
    common.skip_if_no_gpu = admit
    common.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}


def on_cpu(device: Any) -> Any:
    """Return the CPU in the place of a GPU; anything else as it is."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return CPU
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


class _Stream(contextlib.nullcontext[None]):
    """A stream or event whose work is done at once."""

    def record_event(self, *_: Any) -> _Stream:
        return self

    def wait_event(self, *_: Any) -> None:
        pass

    wait_stream = synchronize = record = wait = wait_event


class _OnCpu(TorchFunctionMode):
    """A mode in which a GPU as an argument is the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0].clone()
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        elif function is torch._C._nn._parse_to and args:
            args = (on_cpu(args[0]), *args[1:])
        elif function is torch.ones and args == _LARGE_IMAGE:
            args = _SMALL_IMAGE
        return function(*args, **kwargs)


@contextlib.contextmanager
def gpus_on_cpu() -> Iterator[None]:
    """Run a rank's test with the CPU in the place of GPUs."""
    for name in ("set_device", "synchronize", "manual_seed"):  # a function each: the compiler has a rule a function
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    torch.nn.Module.cuda = lambda module, device=None: module
    for name in ("Stream", "current_stream", "stream", "Event"):
        setattr(torch.cuda, name, lambda *_, **__: _Stream())
    with _OnCpu():
        yield


def meshes_on_cpu() -> None:
    """Make meshes of GPUs meshes of the CPU, and have torch's replicate() take a module that lies there."""
    from torch.distributed import _composable, device_mesh

    make = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **options: Any) -> Any:
        return make("cpu", *args, **options)

    device_mesh.init_device_mesh = torch.distributed.init_device_mesh = init_device_mesh
    torch.distributed.tensor.init_device_mesh = init_device_mesh
    replicate = _composable.replicate
    _composable.replicate = lambda module, device_ids=None, **options: replicate(module, **options)


def attention_on_cpu() -> None:
    """Have attention run on local heads of DTensors, which is torch's rule for GPUs. Its form for CPUs has no rule."""
    from torch.distributed.tensor import DTensor

    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_locally(query: Any, *others: Any, **options: Any) -> Any:
        if not isinstance(query, DTensor):
            return attend(query, *others, **options)
        local = (each.to_local() if isinstance(each, DTensor) else each for each in (query, *others))
        return DTensor.from_local(attend(*local, **options), query.device_mesh, query.placements, run_check=False)

    torch.nn.functional.scaled_dot_product_attention = attend_locally
