"""Law: a fault that ends a GPU's communicator on one rank ends it on every rank at once, with one sentence that names
the rank, also during creation and closing. Other ranks may wait for their GPUs or in an exchange between hosts.
Deadlines are half an hour here. Wrapping again works. A thread that watches a GPU delays no other thread, and a forked
child leaves the GPU alone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import internals
import pytest
import test_modules_on_simulated_gpus as modules
import torch
from harness import Stopwatch, at_least_two, gather, in_turn
from internals import cuda as sw_device
from internals import cuda_backend, process_group
from models import Heads, Mlp
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, simulate, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

#: a second, on a machine with nothing else to do
SOON_S = 8.0


@contextlib.contextmanager
def soon() -> Iterator[None]:
    start = Stopwatch()
    yield
    assert start.seconds() < SOON_S


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


def wrapped_mlp(gpus: SimulatedGpus, **options: Any) -> Any:
    torch.manual_seed(0)
    return sw.wrap(gpus.adopt_module(Mlp()), deterministic=True, bucket_cap_mb=0.001, **options)


def backward(wrapped: Any, rank: int) -> None:
    wrapped(batch(rank, 6, 7)).square().mean().backward()


# a failure, and peers that wait in the host's communicator -----------------------------------------------------------


@at_least_two
@pytest.mark.parametrize(
    "transport, call",
    [("nccl", "ncclSend"), ("nccl", "cuLaunchKernel"), ("shm", "cuMemcpyAsync"), ("ipc", "cuStreamWriteValue32")],
)
def test_peers_that_wait_for_the_host_hear_of_a_gpus_failure(
    teams: Any, world_size: int, paths: dict[str, str], transport: str, call: str
) -> None:
    run(teams, world_size, paths, failing_call, call, transport=transport)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, call: str) -> None:
    wrapped = wrapped_mlp(gpus)
    gather(None)
    with soon(), pytest.raises(sw.Error) as caught:
        if rank == 1:
            gpus.fail_next(call, 3)
            backward(wrapped, rank)
        internals.link(wrapped).host.barrier("what hosts do")
    assert gpus.failed_call() == (call if rank == 1 else "")
    said = gather(str(caught.value))
    assert all(text == said[1] for text in said), said
    assert f"rank 1 of {world_size}" in said[1]
    modules.train(rank, *modules.on_gpu(gpus, Mlp, bucket_cap_mb=0.001))


@at_least_two
def test_a_failure_that_is_seen_beside_a_hosts_exchange_ends_that(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, seen_beside, transport="nccl")


def seen_beside(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The thread that watches rank 1's GPU raises the fault, while the program's thread waits for rank 0."""
    gpus.watch()
    host = internals.link(wrapped_mlp(gpus)).host
    gather(None)
    if rank == 1:
        gpus.fail_next("ncclCommGetAsyncError", 3)
    with soon():
        if rank:
            with pytest.raises(sw.CommError, match=f"NCCL on rank 1 of {world_size}: "):
                host.barrier("what hosts do")
        while host.is_alive:
            time.sleep(0.01)
    assert f"NCCL on rank 1 of {world_size}: " in host.end_reason
    gather(None)
    modules.train(rank, *modules.on_gpu(gpus, Mlp, bucket_cap_mb=0.001))


@at_least_two
def test_what_nccl_takes_for_a_peers_failure_is_told_in_that_peers_words(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, a_peers_words, transport="nccl")


def a_peers_words(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    wrapped = wrapped_mlp(gpus)
    comm = internals.link(wrapped).comm
    gather(None)
    with pytest.raises(sw.Error, match=f"NCCL on rank 1 of {world_size}: send of a slice failed"):
        if rank == 1:
            gpus.fail_next("ncclSend", 3)
            backward(wrapped, rank)
        gather(None)
        gpus.fail_next("ncclCommGetAsyncError", 6)  # a remote error
        comm.watch()
    if rank == 1:
        gather(None)
    gpus.fail_next("", 0)
    gather(None)


# a rank that dies ----------------------------------------------------------------------------------------------------


class Dying:
    """A DeviceComm whose process is killed as it joins its peers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._comm = sw_device_comm(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("connect"):
            time.sleep(0.5)  # the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._comm, name)


sw_device_comm = sw_device.DeviceComm


def run_one_that_dies(
    fresh_ranks: Any, world_size: int, paths: dict[str, str], transport: str, scene: str, *given: Any
) -> None:
    with fresh_ranks(world_size) as team:
        place = {"module": __name__, "scene": scene, "given": given}
        team.start(simulate, paths=paths, policy="random", transport=transport, **place)
        outcomes = team.wait(60, patient=True)
        assert outcomes[-1].ended == "signal SIGKILL"
        assert all(outcome.ok for outcome in outcomes[:-1]), outcomes


@at_least_two
@pytest.mark.parametrize("transport", in_turn(["nccl", "shm"], 0))
def test_a_rank_that_is_killed_as_communicators_are_made_is_named(
    fresh_ranks: Any, world_size: int, paths: dict[str, str], transport: str
) -> None:
    run_one_that_dies(fresh_ranks, world_size, paths, transport, "killed_in_creation")


def killed_in_creation(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        sw_device.DeviceComm = Dying  # type: ignore[misc]
    with soon(), pytest.raises(sw.CommError, match=rf"rank {world_size - 1} .*died or exited"):
        wrapped_mlp(gpus)


@at_least_two
@pytest.mark.parametrize("transport, end", in_turn([("shm", "close"), ("nccl", "close"), ("nccl", "drop")], 0))
def test_a_rank_that_is_killed_as_communicators_end_holds_nobody_up(
    fresh_ranks: Any, world_size: int, paths: dict[str, str], transport: str, end: str
) -> None:
    run_one_that_dies(fresh_ranks, world_size, paths, transport, "killed_at_the_end", end)


def killed_at_the_end(gpus: SimulatedGpus, rank: int, world_size: int, end: str) -> None:
    """No thread watches the GPUs here, so a thread that closes or drops must wait itself."""
    wrapped = wrapped_mlp(gpus)
    link = internals.link(wrapped)
    backward(wrapped, rank)
    gpus.synchronize()
    gather(None)
    if rank == world_size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    backward(wrapped, rank)
    with soon():
        if end == "drop":
            gone = weakref.ref(internals.reducer(wrapped))
            del wrapped
            for _ in range(500):  # the thread of the backward may have the last reference, and wait instead
                gc.collect()
                if gone() is None and not link.comm.is_alive:
                    break
                time.sleep(0.02)
            assert gone() is None and not link.comm.is_alive
        link.close()


@at_least_two
def test_an_end_that_takes_its_time_is_no_failure(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, slow_end, transport="nccl")


def slow_end(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The fault is in the group's or the row's communicator. The thread that watches the other one must not take it for
    its own, which would end all ranks.
    """
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3)
    backward(model, rank)
    optimizer.step()
    gpus.synchronize()
    group = internals.replica(model).group
    assert len(group.links) == 2
    gather(None)
    with logged() as lines:
        if rank == 0:
            gpus.slow_next("ncclCommDestroy", 0.4)
            group.close()
            assert lines == []
        else:
            deadline = time.monotonic() + 20
            while group.comm.is_alive and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "rank 0 " in group.comm.end_reason and "left the group" in group.comm.end_reason
            group.close()
    group.links.clear()


# interrupts, and peers that hang -------------------------------------------------------------------------------------


@at_least_two
@pytest.mark.parametrize("transport", ["nccl", "shm"])
@pytest.mark.parametrize("where", ["in a wait", "at the end"])
def test_an_interrupt_ends_a_wait_for_peers(
    teams: Any, world_size: int, paths: dict[str, str], where: str, transport: str
) -> None:
    run(teams, world_size, paths, interrupted, where, transport=transport)


def interrupted(gpus: SimulatedGpus, rank: int, world_size: int, where: str) -> None:
    wrapped = sw.wrap(gpus.adopt_module(Heads()))
    link = internals.link(wrapped)
    gather(None)
    if rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with soon(), pytest.raises(KeyboardInterrupt):
            if where == "at the end":
                wrapped(batch(rank, 6, 7), "left right").backward()
                link.close()
            else:  # who left a parameter unused waits for the others' use
                wrapped(batch(rank, 6, 7), "left").backward()
        signal.signal(signal.SIGINT, before)
    else:
        with soon(), pytest.raises(sw.CommError, match="rank 0 was interrupted while its GPU waited for "):
            link.host.barrier("what hosts do")
    gather(None)
    modules.train(rank, *modules.on_gpu(gpus, Mlp, bucket_cap_mb=0.001))


# threads -------------------------------------------------------------------------------------------------------------


def test_a_call_of_the_driver_that_does_not_return_holds_up_nobody_else(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, 1, paths, slow_call)


def slow_call(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The watching thread holds the communicator for a while; a thread that needs it waits."""
    wrapped = wrapped_mlp(gpus)
    comm = internals.link(wrapped).comm
    backward(wrapped, rank)
    gpus.slow_next("cuEventQuery", 1.0)
    watcher = threading.Thread(target=comm.watch)
    watcher.start()
    longest_s, last = 0.0, time.monotonic()
    for _ in range(20):
        time.sleep(0.005)
        longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
    assert watcher.is_alive() and longest_s < 0.5, longest_s
    internals.link(wrapped).broadcast([*wrapped.parameters()], 0)
    assert comm.is_alive
    comm.close()
    watcher.join()


@at_least_two
@pytest.mark.parametrize("call", ["ncclBroadcast", "ncclCommGetAsyncError"])
def test_aborts_that_wait_for_one_another_end(teams: Any, world_size: int, paths: dict[str, str], call: str) -> None:
    run(teams, world_size, paths, aborts_that_wait, call, transport="nccl")


def aborts_that_wait(gpus: SimulatedGpus, rank: int, world_size: int, call: str) -> None:
    """With two communicators per rank, each abort waits for the other's kernels and for the aborts of other ranks."""
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3, deterministic=True)
    means, gathers = sorted(live_links(), key=lambda link: link._main is not None)
    gpus.let_aborts_wait()
    gather(None)
    with soon(), pytest.raises(sw.Error, match=f"NCCL on rank 1 of {world_size}: .* failed"):
        if rank == 1:
            ranges = [(gpus.adopt(torch.zeros(world_size)).data_ptr(), world_size, "float32") for _ in range(2)]
            torchs = means.current_stream()
            with gpus.other_stream() as aside:
                gathers.comm.follow(aside, torchs)
                gathers.comm.all_gather(ranges[:1], aside)  # to which nobody else comes
            gpus.fail_next(call, 3)  # inside a group of NCCL's; or outside, as the thread looks that watches
            means.comm.broadcast(ranges[1:], 0, torchs)
            while means.host.is_alive:
                time.sleep(0.01)
        means.host.barrier("what hosts do")
    gather(None)
    modules.train(rank, *modules.on_gpu(gpus, Mlp, bucket_cap_mb=0.001))


# processes -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_gpu_alone(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, forked_child)


def forked_child(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """A worker of a DataLoader inherits everything from its parent. Its drops and attempts make no driver call and
    print nothing, and it never waits for a thread that only its parent has.
    """
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    gpus.slow_next("cuEventQuery", 0.3)
    watcher = threading.Thread(target=next(iter(live_links())).comm.watch)
    watcher.start()
    time.sleep(0.05)
    read, write = os.pipe()
    child = gpus.fork()
    if child == 0:
        signal.alarm(20)
        os.dup2(write, 1)
        os.dup2(write, 2)
        code = 1
        try:
            before = gpus.calls()
            with pytest.raises(sw.Error, match="forked"):
                model(batch(rank, 6, 7))
            for group in process_group.live_groups():
                group.close()
            sw_device.runtime.kernels.clear()
            del model, optimizer, module
            gc.collect()
            code = 0 if gpus.calls() == before else 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    said = b""
    while part := os.read(read, 4096):
        said += part
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    watcher.join()
    assert (code, said) == (0, b""), (code, said.decode())
    for step in range(2):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()


def live_links() -> list[Any]:
    return [link for group in process_group.live_groups() for link in group.links.values()]


@at_least_two
def test_a_rank_that_has_no_memory_as_it_wraps_is_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, has_no_memory)


def has_no_memory(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("the GPU has no memory left")

    gpus.watch()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(cuda_backend.CudaBackend, "reducer", refuse)
        with pytest.raises(MemoryError if rank == 1 else sw.Error, match="the GPU has no memory left") as caught:
            sw.wrap(gpus.adopt_module(Mlp()))
    assert rank == 1 or "rank 1" in str(caught.value)
    gather(None)
