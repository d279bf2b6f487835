"""Law: with communicator="register" training has the same bits as without, and every rank passes registered memory to
the same operations at the same offsets. If one rank cannot register, no rank does, and one line of the log names it
with NCCL's reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import LONG, gather, in_turn
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from shardwright._engine import DeviceRegion
from shardwright.backend import registration as device_registration
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from test_communicators_are_borrowed_on_simulated_gpus import _raise, at_least_two, trained, training

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
FAILURE = 999

CASES: list[dict[str, Any]] = [
    {"deterministic": True},
    {},
    {"deterministic": True, "zero": 1},
    {"zero": 1},
    {"deterministic": True, "zero": 2},
    {"zero": 2},
    {"deterministic": True, "zero": 3},
    {"zero": 3},
    {"compress": sw.Bf16()},
    {"compress": sw.Bf16(), "zero": 2},
    {"zero": 1, "partition": "tensor"},
    {"reduce": "sum", "zero": 2},
]
#: of them: each stage, and each option once
QUICK = [0, 3, 4, 7, 9, 10, 11]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """A handler that collects the engine's warnings."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    kept = Kept()
    logging.getLogger("shardwright").addHandler(kept)
    try:
        yield lines
    finally:
        logging.getLogger("shardwright").removeHandler(kept)


def reason_of(model: Any) -> str:
    reason: str = model._engine.replica.reducer.transport_reason
    return reason


@pytest.mark.parametrize("number", range(len(CASES)) if LONG else QUICK, ids=lambda n: str(CASES[n]))
def test_bits_are_those_without(teams: Any, world_size: int, paths: dict[str, str], number: int) -> None:
    run(teams, world_size, paths, compare, number, policy=POLICIES[number % len(POLICIES)])


def compare(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    """No step waits or allocates. Memory is registered while the module trains, and no longer."""
    expected = trained(gpus, rank, **CASES[number])
    with logged() as lines:
        found = trained(gpus, rank, communicator="register", **CASES[number])
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
        gc.collect()
        model = training(gpus, {"communicator": "register", **CASES[number]})[1]
    assert not lines
    sharing = world_size > 1
    memories = 1 + (CASES[number].get("zero", 0) > 0)  # parameters, or units
    assert gpus.registrations() == sharing * memories
    text = " bytes registered; kernels" if sharing else ", nothing registered: there is nothing to share"
    assert text in reason_of(model)
    del model
    gpus.synchronize()
    gc.collect()
    assert gpus.registrations() == 0


def _old(gpus: SimulatedGpus, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SIM_NCCL_VERSION", "21803")


def _declining(gpus: SimulatedGpus, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NCCL_LOCAL_REGISTER", "0")


def _failing(name: str) -> Any:
    return lambda gpus, patch: gpus.fail_next(name, FAILURE)


REASONS: dict[str, Any] = {
    "registering memory needs NCCL 2.19 or newer, not 2.18.3": _old,
    "declined to register .* .NCCL_LOCAL_REGISTER=0": _declining,
    "NCCL: ncclMemAlloc failed for .* bytes on GPU 0: an error of the simulation .999.": _failing("ncclMemAlloc"),
    "NCCL on rank . of .: registering memory failed: an error of the simulation .999.": _failing("ncclCommRegister"),
}


@pytest.mark.parametrize("sentence", REASONS)
@at_least_two
def test_a_rank_that_cannot_is_named_and_none_does(
    teams: Any, world_size: int, paths: dict[str, str], sentence: str
) -> None:
    run(teams, world_size, paths, falling_back, sentence)


def falling_back(gpus: SimulatedGpus, rank: int, world_size: int, sentence: str) -> None:
    last = world_size - 1
    for zero in in_turn((0, 2), list(REASONS).index(sentence)):
        expected = trained(gpus, rank, zero=zero)
        with pytest.MonkeyPatch.context() as patch, logged() as lines:
            gc.collect()  # an earlier module keeps its GPU open
            gpus._close_groups()  # the version is asked as the GPU is opened
            if rank == last:
                REASONS[sentence](gpus, patch)
            found = trained(gpus, rank, communicator="register", zero=zero)
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
        told = [line for line in lines if "not registered with NCCL" in line]
        assert told and all(f"not registered with NCCL: rank {last}: " in line for line in told)
        assert len(set(gather(told[0]))) == 1
        assert re.search(sentence, told[0]), told
        gpus.synchronize()
        gc.collect()


@at_least_two
def test_units_lie_in_a_window_where_all_ranks_can(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, in_windows)


def in_windows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """Windows need NCCL 2.27 on all ranks; otherwise memory is registered without. A rank that fails in the collective
    is an error on all.
    """
    last = world_size - 1
    expected = trained(gpus, rank, zero=3)
    for oldest in ("22703", "22605"):
        with pytest.MonkeyPatch.context() as patch:
            gpus._close_groups()  # the version is asked as the GPU is opened
            patch.setenv("SIM_NCCL_VERSION", oldest if rank == last else "22703")
            before = gpus.windows()
            for _ in range(2):  # the communicator's second is registered plainly
                found = trained(gpus, rank, communicator="register", zero=3)
                assert gpus.windows() - before == (oldest == "22703")
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        gpus._close_groups()
        patch.setenv("SIM_NCCL_VERSION", "22703")
        if rank == last:
            gpus.fail_next("ncclCommWindowRegister", FAILURE)
        with pytest.raises(sw.Error, match=f"NCCL on rank {last} of {world_size}: registering memory failed"):
            training(gpus, {"communicator": "register", "zero": 3})
    gather(None)
    gc.collect()
    trained(gpus, rank, communicator="register", zero=3)  # nothing is left of it


class WithoutWindow:
    """Replace a region by one for which NCCL seems to have made no window."""

    is_window = False

    def __init__(self, *given: Any) -> None:
        self._region = DeviceRegion(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


@at_least_two
def test_a_window_that_one_rank_lacks_is_used_by_none(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, lacking_a_window)


def lacking_a_window(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    last = world_size - 1
    expected = trained(gpus, rank, zero=3)
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        gpus._close_groups()
        patch.setenv("SIM_NCCL_VERSION", "22703")
        if rank == last:
            patch.setattr(device_registration, "DeviceRegion", WithoutWindow)
        found = trained(gpus, rank, communicator="register", zero=3)
    assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
    (told,) = [line for line in lines if line.startswith("units of ")]
    assert f"rank {last}: memory was registered without a window, and on rank 0 as a window" in told, told
    gpus.synchronize()
    gc.collect()
    assert gpus.registrations() == 0


@at_least_two
def test_what_cannot_be_given_back_ends_nothing(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, not_given_back)


def not_given_back(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The last rank cannot register, and NCCL refuses to deregister the first rank's memory, which then stays unused."""
    addresses: list[int] = []

    def noted(*given: Any) -> Any:
        region = DeviceRegion(*given)
        addresses.append(region.address)
        return region

    expected = trained(gpus, rank)
    if rank == 0:
        gpus.fail_next("ncclCommDeregister", FAILURE)
    if rank == world_size - 1:
        gpus.fail_next("ncclCommRegister", FAILURE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_registration, "DeviceRegion", noted)
        _, model, optimizer = training(gpus, {"communicator": "register"})
    assert gpus.registrations() == (rank == 0)
    assert gpus.failed_call() == {0: "ncclCommDeregister", world_size - 1: "ncclCommRegister"}.get(rank, "")
    for step in range(4):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = sw.full_state_dict(model).values()
    assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
    gather(None)
    model._engine.replica.link.fail("the test's end")  # an orderly one finds it registered
    if rank == 0:
        free(gpus, addresses[0])


def free(gpus: SimulatedGpus, address: int) -> None:
    """Free NCCL memory that no other code will free."""
    cuda, context = gpus._cuda, ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxPushCurrent_v2(context) == 0
    assert gpus._nccl.ncclMemFree(ctypes.c_void_p(address)) == 0
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == cuda.cuDevicePrimaryCtxRelease_v2(0) == 0


@at_least_two
def test_slots_register_nothing_and_say_so(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, through_slots, transport="shm")


def through_slots(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with logged() as lines:
        _, model, _ = training(gpus, {"communicator": "register"})
    assert len(lines) == 1 and "buckets of Mlp: not registered with NCCL: rank 0: slots (shm)" in lines[0], lines
    assert "nothing registered: rank 0: slots (shm)" in reason_of(model)


@at_least_two
def test_what_does_not_lie_in_it_ends_it(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, ended_on_the_way)


def ended_on_the_way(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """With a communication hook, a compressor that is a hook, or a parameter unfrozen later, buckets stay in plain
    memory.
    """

    def compressed(zero: int, communicator: str) -> list[torch.Tensor]:
        options = {"communicator": communicator, "zero": zero, "compress": sw.Int8(block=32, error_feedback=True)}
        _, model, optimizer = training(gpus, options)
        return stepped(model, optimizer)

    def unfrozen(zero: int, communicator: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = gpus.adopt_module(Mlp())
        module[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, optimizer = sw.wrap(
            module, optimizer, bucket_cap_mb=0.0001, zero=zero, deterministic=True, communicator=communicator
        )
        before = stepped(model, optimizer)
        assert gpus.registrations() == (communicator == "register") * (1 + (zero > 0))
        module[0].weight.requires_grad_(True)
        return before + stepped(model, optimizer)

    def stepped(model: Any, optimizer: Any) -> list[torch.Tensor]:
        for step in range(3):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if "nothing registered" in reason_of(model):
            assert gpus.registrations() == (model._engine.replica.zero in (1, 2))
        return [value.clone() for value in sw.full_state_dict(model).values()]

    for train in (compressed, unfrozen):
        for zero in in_turn((0, 2), int(train is unfrozen)):
            expected, found = train(zero, "own"), train(zero, "register")
            assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True)), train
            gpus.synchronize()
            gc.collect()


def test_parameters_outlive_all_that_registered_them(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, outliving)


def outliving(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """Wrapper, communicator and optimizer are dropped. Parameters and gradients keep their values, and their memory
    ends with them.
    """
    for zero in in_turn((0, 1, 2), 0):
        module, model, optimizer = training(gpus, {"communicator": "register", "zero": zero})
        for step in range(2):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
        values = [value.clone() for value in sw.full_state_dict(model).values()]
        kept = module[0].weight.grad if zero == 0 else None
        copy = None if kept is None else kept.clone()
        del model, optimizer
        gc.collect()
        gpus._close_groups()
        assert gpus.registrations() == 0
        assert all(bits_equal(p.data, value) for p, value in zip(module.parameters(), values, strict=True))
        if kept is not None and copy is not None:
            assert bits_equal(kept, copy)
        del module, kept


@at_least_two
def test_ranks_that_run_out_use_the_same_memory(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, joining)


def joining(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for options in in_turn([{}, {"zero": 1}, {"zero": 2}, {"zero": 2, "deterministic": True}, {"zero": 3}], 1):
        results = []
        for communicator in ("own", "register"):
            _, model, optimizer = training(gpus, {"communicator": communicator, **options})
            with model.join():
                for step in range(2 + rank):
                    model(batch(rank, 6, 7, step=step)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([value.clone() for value in sw.full_state_dict(model).values()])
            del model, optimizer
            gpus.synchronize()
            gc.collect()
        assert all(bits_equal(a, b) for a, b in zip(*results, strict=True)), options


@at_least_two
def test_a_rank_that_fails_later_is_everybodys_error(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, failing_later)


def failing_later(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """A failed backward ends the communicator and its registrations."""
    gpus.watch()
    module, model, optimizer = training(gpus, {"communicator": "register", "zero": 1})
    handle = module[0].weight.register_hook(_raise) if rank == 0 else None
    with pytest.raises((ArithmeticError, sw.Error), match="as the test asked|a backward of Mlp failed on rank 0"):
        for step in range(50):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
    if handle is not None:
        handle.remove()
    del module, model, optimizer
    gc.collect()
    gather(None)
    assert gpus.registrations() == 0
    trained(gpus, rank, communicator="register")  # nothing is left of it
