"""The tested wrapper: how tests build it, and how they compare its gradients with the oracle's.

SW_TEST_PEER=torch runs the behaviour tests on torch's DistributedDataParallel instead, to test the tests. Gradients are
then compared approximately, and tests of features that torch lacks fail.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from typing import Any

import internals
import torch
import torch.distributed as dist
from harness import gather
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal

PEER = os.environ.get("SW_TEST_PEER", "shardwright")

if PEER == "torch":
    sw: Any = None
    engine: Any = None
else:
    import shardwright as sw
    from internals import _engine as engine

TRANSPORTS = ("pool", "staged")


def data_parallel(module: torch.nn.Module, **options: Any) -> Any:
    """Return `module` wrapped. Assert the world size, and that a requested transport is in use."""
    group = options.get("process_group")
    if PEER == "torch":
        options.pop("transport", None)
        return torch.nn.parallel.DistributedDataParallel(module, **options)
    wrapped = sw.DistributedDataParallel(module, **options)
    if "transport" in options:
        assert internals.reducer(wrapped).transport == options["transport"]
    assert wrapped.process_group.size() == dist.get_world_size(group)
    return wrapped


def pair(build: Callable[[], torch.nn.Module], **options: Any) -> tuple[Any, NaiveDataParallel]:
    """Return the same module twice: wrapped, and under the naive law. `build` runs with the same seed on every rank."""
    torch.manual_seed(0)
    module = build()
    naive = NaiveDataParallel(copy.deepcopy(module), options.get("process_group"), options.get("reduce", "mean"))
    return data_parallel(module, **options), naive


def batch(rank: int, *shape: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return data that differs by rank and step."""
    generator = torch.Generator().manual_seed(7919 * step + rank + 1)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_same_gradients(wrapped: Any, naive: NaiveDataParallel) -> None:
    expected = dict(naive.module.named_parameters())
    for name, parameter in wrapped.module.named_parameters():
        ours, theirs = parameter.grad, expected[name].grad
        assert (ours is None) == (theirs is None), f"{name}: .grad is {ours}, the oracle's {theirs}"
        if ours is None:
            continue
        assert ours.shape == parameter.shape and ours.dtype == parameter.dtype, name
        assert not ours.is_sparse, name
        if PEER == "torch":
            assert torch.allclose(ours.detach(), theirs, rtol=0.02, atol=1e-3, equal_nan=True), name
            continue
        assert bits_equal(ours.detach(), theirs), (
            f"{name}: {int((ours != theirs).sum())} of {ours.numel()} elements differ, "
            f"by up to {(ours - theirs).abs().max()}; first {ours.flatten()[:3]} {theirs.flatten()[:3]}"
        )


def assert_same_parameters(wrapped: Any, naive: NaiveDataParallel) -> None:
    expected = dict(naive.module.named_parameters())
    for name, parameter in wrapped.module.named_parameters():
        if PEER == "torch":
            assert torch.allclose(parameter, expected[name], rtol=0.02, atol=1e-3), name
        else:
            assert bits_equal(parameter.detach(), expected[name].detach()), name


def zero_grad(wrapped: Any, naive: NaiveDataParallel, set_to_none: bool = True) -> None:
    wrapped.zero_grad(set_to_none=set_to_none)
    naive.module.zero_grad(set_to_none=set_to_none)


def compare_step(wrapped: Any, naive: NaiveDataParallel, backward: Callable[[Any], None]) -> None:
    """Run `backward(model)` on both modules and one round of the law. Check that every parameter has the same bits."""
    backward(wrapped)
    backward(naive)
    naive.synchronise()
    assert_same_gradients(wrapped, naive)


def host_comm(rank: int, world_size: int, **options: Any) -> Any:
    """Return a communicator of the engine, joined through Gloo."""
    comm = engine.HostComm(rank, world_size, host=socket.gethostname(), **options)
    secret = gather(os.urandom(16))[0]
    comm.connect(gather(comm.address), secret, gather(socket.gethostname()))
    assert comm.world_size == world_size and comm.rank == rank
    return comm


def in_a_child(action: Callable[[], Any]) -> str:
    """Run `action` in a forked child. Return the error that it raised, or ""."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return text
