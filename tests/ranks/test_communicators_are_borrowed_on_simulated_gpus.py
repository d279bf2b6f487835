"""Law: over torch's own NCCL communicator training has the same bits as over ours. Its operations and torch's have one
order, so no two run at the same time, and torch keeps ownership. If torch on some rank has no communicator to lend, all
ranks get one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import internals
import pytest
import torch
from harness import gather
from internals import VARIABLE
from internals import cuda as sw_device
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
FLOAT32, SUM = 7, 0


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class Backend:
    """A stand-in for torch's ProcessGroupNCCL: owns a communicator, whose collectives run on torch's stream."""

    def __init__(self, gpus: SimulatedGpus, rank: int, world_size: int) -> None:
        self._gpus, self._nccl, self.aborted = gpus, gpus._nccl, 0
        self.address = 0
        made = _Id()
        if rank == 0:
            assert self._nccl.ncclGetUniqueId(ctypes.byref(made)) == 0
        made = _Id.from_buffer_copy(next(told for told in gather(bytes(made)) if any(told)))
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 1)
        found = ctypes.c_void_p()
        with self._context():
            begun = self._nccl.ncclCommInitRankConfig(ctypes.byref(found), world_size, made, rank, ctypes.byref(config))
        assert begun == 0 and found.value
        self.address = found.value
        gather(None)
        self.memory = gpus.adopt(torch.zeros(3))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        context, cuda = ctypes.c_void_p(), self._gpus._cuda
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert cuda.cuCtxPushCurrent_v2(context) == 0
        yield
        assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        assert cuda.cuDevicePrimaryCtxRelease_v2(0) == 0

    def _comm_ptr(self) -> int:
        return self.address

    def all_reduce(self) -> None:
        """Run one of torch's own collectives between the program's."""
        at, stream = ctypes.c_void_p(self.memory.data_ptr()), ctypes.c_void_p(self._gpus.stream)
        comm = ctypes.c_void_p(self.address)
        assert self._nccl.ncclAllReduce(at, at, ctypes.c_size_t(3), FLOAT32, SUM, comm, stream) == 0

    def abort(self) -> None:
        self.aborted += 1
        if self.address:
            self._nccl.ncclCommAbort(ctypes.c_void_p(self.address))
        self.address = 0


@contextlib.contextmanager
def lending(gpus: SimulatedGpus, rank: int, world_size: int) -> Iterator[Backend]:
    """Give torch's process group an NCCL communicator for GPUs."""
    backend = Backend(gpus, rank, world_size)
    sw_device.runtime.backend = lambda group: backend
    sw_device.runtime.communicator = lambda backend, ordinal: backend._comm_ptr()
    yield backend
    gpus.synchronize()
    gc.collect()
    gpus._close_groups()
    assert backend.address or backend.aborted
    backend.abort()


def training(gpus: SimulatedGpus, options: dict[str, Any]) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return module, *sw.wrap(module, optimizer, bucket_cap_mb=0.001, **options)


def trained(gpus: SimulatedGpus, rank: int, backend: Backend | None = None, **options: Any) -> list[torch.Tensor]:
    """Return the parameters after steps with torch's own collectives between them."""
    module, model, optimizer = training(gpus, options)
    gc.collect()  # an earlier one's end waits, and would count here
    waits = 0
    for step in range(4):
        if backend is not None:
            backend.all_reduce()
        before = stats(model)
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        if backend is not None:
            backend.all_reduce()
        optimizer.step()
        if step > 1:
            after = stats(model)
            waits += after["host_waits"] - before["host_waits"] + after["allocations"] - before["allocations"]
        if backend is not None:
            backend.all_reduce()
        optimizer.zero_grad()
    assert waits == 0
    return [value.clone() for value in sw.full_state_dict(model).values()]


CASES: list[dict[str, Any]] = [
    {"deterministic": True},
    {},
    {"deterministic": True, "zero": 1},
    {"zero": 2},
    {"deterministic": True, "zero": 3},
    {"compress": sw.Int8(block=32, error_feedback=True)},
    {"compress": sw.PowerSGD(2, min_compression_rate=1), "zero": 2},
    {"compress": sw.Bf16()},
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_bits_are_those_over_a_communicator_of_our_own(
    teams: Any, world_size: int, paths: dict[str, str], number: int
) -> None:
    run(teams, world_size, paths, compare, number, policy=POLICIES[number % len(POLICIES)])


def compare(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    expected = trained(gpus, rank, **CASES[number])
    with lending(gpus, rank, world_size) as backend:
        comms = gpus.communicators()
        found = trained(gpus, rank, backend, communicator="borrow", **CASES[number])
        gathers = CASES[number].get("zero") == 3 and world_size > 1  # have one of their own
        assert gpus.communicators() == comms + gathers
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert backend.aborted == 0
        gpus.synchronize()
        gc.collect()
        gpus._close_groups()
        backend.memory.fill_(rank)
        backend.all_reduce()  # it is as before
        assert backend.memory.tolist() == [sum(range(world_size))] * 3


def at_least_two(test: Any) -> Any:
    test.at_least = 2
    return test


NOTHING: dict[str, Any] = {
    "has no _comm_ptr\\(\\)": lambda backend: object(),
    "has made no NCCL communicator for this GPU yet": lambda backend: setattr(backend, "address", 0) or backend,
    "has no backend for GPUs: no": None,
}


@pytest.mark.parametrize("sentence", NOTHING)
@at_least_two
def test_a_rank_that_cannot_borrow_is_named_on_all(
    teams: Any, world_size: int, paths: dict[str, str], sentence: str
) -> None:
    run(teams, world_size, paths, nothing_to_lend, sentence)


def nothing_to_lend(gpus: SimulatedGpus, rank: int, world_size: int, sentence: str) -> None:
    with lending(gpus, rank, world_size) as backend:
        address, change = backend.address, NOTHING[sentence]

        def changed(group: Any) -> Any:
            if change is None:
                raise RuntimeError("no")
            return change(backend)

        if rank == world_size - 1:
            sw_device.runtime.backend = changed
        with pytest.raises(NotImplementedError, match=sentence) as caught:
            training(gpus, {"communicator": "borrow"})
        assert rank == world_size - 1 or f"rank {world_size - 1} cannot use its GPU" in str(caught.value)
        backend.address = address
        sw_device.runtime.backend = lambda group: backend
        trained(gpus, rank, backend, communicator="borrow")  # nothing is left of it


@at_least_two
def test_borrowing_means_nccl(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, means_nccl, transport="auto")


def means_nccl(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """A borrowed communicator also works between ranks that share a GPU, since torch has made it. Slots, or borrowing
    on some ranks only, are an error on all ranks.
    """
    with lending(gpus, rank, world_size) as backend, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIM_BUS", "7")
        _, model, _ = training(gpus, {"communicator": "borrow"})
        assert internals.reducer(model).transport == "nccl"
        assert "NCCL 2.21.0, torch's communicator; kernels" in internals.reducer(model).transport_reason
        gpus._close_groups()
        patch.setenv(VARIABLE, "shm")
        with pytest.raises(NotImplementedError, match="needs NCCL, but SHARDWRIGHT_GPU_TRANSPORT=shm asks") as caught:
            training(gpus, {"communicator": "borrow"})
        assert len(set(gather(str(caught.value)))) == 1
        patch.setenv(VARIABLE, "auto")
        with pytest.raises(sw.Error, match="communicator"):
            training(gpus, {"communicator": "own" if rank == 1 else "borrow"})
        trained(gpus, rank, backend, communicator="borrow")  # nothing is left of it


@pytest.mark.parametrize("kind", [sw.SyncBatchNorm, torch.nn.SyncBatchNorm], ids=["ours", "torch"])
@at_least_two
def test_a_batch_norm_over_the_same_ranks_is_refused_by_name(
    teams: Any, world_size: int, paths: dict[str, str], kind: type[torch.nn.SyncBatchNorm]
) -> None:
    run(teams, world_size, paths, with_batch_norm, kind)


def with_batch_norm(gpus: SimulatedGpus, rank: int, world_size: int, kind: type[torch.nn.SyncBatchNorm]) -> None:
    """Borrowing on one rank only is an error on all ranks. Over a group of its own it is not."""
    with lending(gpus, rank, world_size):
        norm = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Sequential(kind(5)))
        with pytest.raises(NotImplementedError, match="'borrow' with SyncBatchNorm '1.0': .* own") as caught:
            sw.wrap(gpus.adopt_module(norm), communicator="borrow")
        assert len(set(gather(str(caught.value)))) == 1
        alone = gpus.adopt_module(norm if rank == 1 else torch.nn.Sequential(torch.nn.Linear(7, 5), norm[0]))
        with pytest.raises((NotImplementedError, sw.Error), match="'borrow' with SyncBatchNorm '1.0'"):
            sw.wrap(alone, communicator="borrow")
        norm[1][0].process_group = object()  # type: ignore[assignment]
        model = sw.wrap(gpus.adopt_module(norm), communicator="borrow")
        assert internals.link(model).borrows


def test_a_communicator_of_others_is_refused(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, of_others)


def of_others(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    turned = (rank + 1) % world_size
    with lending(gpus, turned, world_size):
        if world_size > 1:
            expected = f"of rank {rank} of {world_size} on GPU 0, not of rank {turned} of {world_size} on GPU 0"
            with pytest.raises(ValueError, match=expected):
                training(gpus, {"communicator": "borrow"})
        else:
            training(gpus, {"communicator": "borrow"})


@at_least_two
def test_a_backward_that_fails_is_told_to_torch(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, failing_backward)


def failing_backward(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    with lending(gpus, rank, world_size) as backend:
        module, model, optimizer = training(gpus, {"communicator": "borrow"})
        handle = module[0].weight.register_hook(_raise) if rank == 0 else None
        with pytest.raises((ArithmeticError, sw.Error), match="as the test asked|a backward of Mlp failed on rank 0"):
            for step in range(50):
                model(batch(rank, 6, 7, step=step)).square().mean().backward()
                optimizer.step()
        if handle is not None:
            handle.remove()
        with pytest.raises(sw.Error, match="a backward of Mlp failed on rank 0|rank has left|was closed|abort"):
            for step in range(50):
                model(batch(rank, 6, 7, step=step)).square().mean().backward()
        assert backend.aborted == 1 and backend.address == 0
        with pytest.raises(NotImplementedError, match="has made no NCCL communicator for this GPU yet"):
            training(gpus, {"communicator": "borrow"})
        gather(None)
        trained(gpus, rank)  # with one of our own


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("as the test asked")


def test_what_torch_has_ended_is_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, ended_by_torch)


def ended_by_torch(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for watched in (False, True):
        with mock.patch.object(sw_device.runtime, "watches", watched):
            ended_once(gpus, rank, world_size)


def ended_once(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with lending(gpus, rank, world_size) as backend:
        _, model, optimizer = training(gpus, {"communicator": "borrow"})
        model(batch(rank, 6, 7)).square().mean().backward()
        gpus.synchronize()
        gather(None)
        backend.abort()
        gather(None)
        with pytest.raises(sw.Error, match="torch has ended the communicator that was borrowed"):
            model(batch(rank, 6, 7))
        assert backend.aborted == 1
        gather(None)
        trained(gpus, rank)  # with one of our own


def test_the_cpu_has_nothing_to_borrow(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, on_the_cpu)


def on_the_cpu(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with gpus.torch_on_cpu():
        with pytest.raises(
            NotImplementedError, match="communicator='borrow' requires a module on a GPU, got Mlp on the CPU"
        ):
            sw.wrap(Mlp(), communicator="borrow")
        with pytest.raises(ValueError, match="communicator must be 'own' or 'borrow', got 'torch'"):
            sw.wrap(Mlp(), communicator="torch")
    gather(None)
