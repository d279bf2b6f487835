"""Law: a host ahead of its GPU blocks in a driver call once the launch queue is full, and blocks no other thread: no
engine call enqueues with the GIL held. If a peer dies or does not come, an engine thread ends the communicator beside
the blocked call. That call returns, and the next call reports the reason. The simulated driver's queue holds a few
operations per stream.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import internals
import pytest
import torch
from gpu_promises import Place, adamw, inputs, steps, wrapped
from harness import Stopwatch, at_least_two, gather, in_turn
from models import Mlp
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, simulate, sw

pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.timeout(120)]
QUICK_FORM_IS_THE_LARGEST_WORLD = True

#: the simulation gives a blocked call up after 15 s (tests/fake/sim_run.c)
SOON_S = 10.0
DEADLINE_S = 3.0


def test_no_call_that_enqueues_holds_the_gil(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, trainings, policy="random")


def trainings(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    place = Place("simulated", rank, gpus)
    gpus.watch_gil()
    for options in (
        {"zero": 0, "clip_grad_norm": 0.5},
        {"zero": 1},
        {"zero": 2, "compress": sw.Bf16()},
        {"zero": 3, "clip_grad_norm": 0.5},
        {"zero": 1, "offload": "cpu"},
        {"zero": 0, "compress": sw.Int8()},
        {"zero": 0, "compress": sw.PowerSGD(2)},
    ):
        model, optimizer = wrapped(place, options)
        steps(model, optimizer, rank, place.device, 2)
        del model, optimizer
    sgd = wrapped(place, {}, lambda parameters: sw.optim.SGD(parameters, lr=0.1, momentum=0.9))
    with sgd[0].join():
        steps(*sgd, rank, place.device, 1 + rank)
    assert gpus.held_gil() == set()


# a blocked call ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_queue(gpus: SimulatedGpus, comm: Any) -> Any:
    """A context in which the GPU stands still and the communicator's stream takes no more operations."""
    memory = [gpus.adopt(torch.zeros(8)) for _ in range(2)]
    gpus.synchronize()
    gpus.stall(True)
    comm.pack([(*(each.data_ptr() for each in memory), 32)], comm.stream)
    gpus.limit_queue(1)
    try:
        yield
    finally:
        gpus.stall(False)
        gpus.limit_queue(0)


def test_another_thread_runs_beside_a_blocked_call(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 1, paths, beside_a_blocked_call, policy="on demand")


def beside_a_blocked_call(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """Only this thread lets the GPU run again."""
    model, _ = wrapped(Place("simulated", rank, gpus), {})
    comm = internals.link(model).comm
    memory = [gpus.adopt(torch.zeros(8)) for _ in range(2)]
    gpus.synchronize()
    to, source = (each.data_ptr() for each in memory)
    for call in (
        lambda: comm.pack([(to, source, 32)], comm.stream),
        lambda: comm.convert([(to, source, 32)], "float32", "float32", 0.5, comm.stream),
        lambda: comm.norm_sum([(to, 8, "float32")], comm.stream),
        lambda: comm.clip([(source, 8, "float32")], 1.0, True, to, comm.stream),
    ):
        went_on = threading.Event()

        def let_go() -> None:
            while not gpus.blocked()[0]:
                time.sleep(0.002)
            went_on.set()
            gpus.stall(False)

        with full_queue(gpus, comm):
            helper = threading.Thread(target=let_go)
            helper.start()
            call()
            assert went_on.is_set()
        helper.join()


# peers ---------------------------------------------------------------------------------------------------------------


def many_steps(gpus: SimulatedGpus, model: Any, optimizer: Any, rank: int) -> None:
    """Enqueue until the queue is full, and beyond. Only a blocked driver call waits for the GPU here."""
    for step in range(60):
        model(inputs(rank, step, torch.device("cpu"))).backward()
        optimizer.step()
        optimizer.zero_grad()


@at_least_two
@pytest.mark.parametrize("transport", in_turn(["nccl", "shm"], 0))
def test_a_killed_peer_lets_a_blocked_host_go(
    fresh_ranks: Any, world_size: int, paths: dict[str, str], transport: str
) -> None:
    with fresh_ranks(world_size) as team:
        place = {"module": __name__, "scene": "killed", "given": ()}
        team.start(simulate, paths=paths, policy="random", transport=transport, **place)
        outcomes = team.wait(90, patient=True)
        assert outcomes[-1].ended == "signal SIGKILL"
        assert all(outcome.ok for outcome in outcomes[:-1]), outcomes


def killed(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    model, optimizer = wrapped(Place("simulated", rank, gpus), {})
    steps(model, optimizer, rank, torch.device("cpu"), 2)
    gpus.synchronize()
    gather(None)
    if rank == world_size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    gpus.limit_queue(6)
    begin = Stopwatch()
    with pytest.raises(sw.CommError, match=rf"rank {world_size - 1} .*died or exited"):
        keep_enqueuing(gpus, model)
    assert begin.seconds() < SOON_S
    gpus.limit_queue(0)


def keep_enqueuing(gpus: SimulatedGpus, model: Any) -> None:
    """Enqueue collectives and copies behind them, as a host ahead of its GPU does."""
    link = internals.link(model)
    memory = [gpus.adopt(torch.zeros(8 * link.world_size)) for _ in range(2)]
    addresses = [each.data_ptr() for each in memory]
    gpus.synchronize()
    for _ in range(100):
        link.comm.all_gather([(addresses[0], 8 * link.world_size, "float32")], link.comm.stream)
        for _ in range(8):
            link.comm.pack([(*addresses, 32)], link.comm.stream)
    assert gpus.blocked()[1] > 0


@at_least_two
@pytest.mark.parametrize("transport", in_turn(["nccl", "shm"], 1))
def test_a_late_peer_lets_a_blocked_host_go(teams: Any, world_size: int, paths: dict[str, str], transport: str) -> None:
    run(teams, world_size, paths, late, policy="random", transport=transport)


def late(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, adamw(module.parameters()), timeout_s=DEADLINE_S)
    model(batch(rank, 6, 7)).square().mean().backward()
    gpus.synchronize()
    gather(None)
    begin = Stopwatch()
    if rank == 0:
        gpus.limit_queue(6)
        with pytest.raises(sw.CommTimeoutError, match="a collective was not done within 3 s; a peer has not issued it"):
            keep_enqueuing(gpus, model)
        gpus.limit_queue(0)
        assert begin.elapsed() > DEADLINE_S / 2 and begin.seconds() < 3 * DEADLINE_S + SOON_S
    gather(None)
