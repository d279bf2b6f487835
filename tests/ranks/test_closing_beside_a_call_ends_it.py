"""Law: another thread may call close() at any time. A call inside the communicator then raises at once, whatever it
waits for. The process lives on, and its peers are notified. A fork at any time disturbs no thread, and its child is
refused at once.
"""

import os
import threading
import time

import pytest
from harness import LONG, Stopwatch, gather, on_every_rank
from peer import engine, host_comm, in_a_child

pytestmark = pytest.mark.skipif(engine is None, reason="the engine itself")

TRIES = 10_000 if LONG else 60
#: far above a loaded machine's turn, far below the deadline
PROMPT_S, DEADLINE_S = 20.0, 100.0


def inside(call):
    """A thread that runs `call`, and then has `.error` and `.seconds`."""

    def run():
        start = Stopwatch()
        try:
            call()
        except engine.Error as error:
            thread.error = error
        thread.seconds = start.seconds()

    thread = threading.Thread(target=run)
    thread.error = None
    thread.start()
    return thread


def wait_out(thread):
    thread.join(DEADLINE_S / 2)
    assert not thread.is_alive() and thread.seconds < PROMPT_S, "it waited on"
    return thread.error


def from_the_start_to_deep_inside(turn):
    time.sleep((turn % 7) * 1e-4 if turn % 20 else 0.03)


@pytest.mark.timeout(900)
@on_every_rank(at_least=2, deadline_s=880)
def test_close_beside_a_barrier(rank, world_size):
    for turn in range(TRIES):
        comm = host_comm(rank, world_size, timeout_s=DEADLINE_S)
        if rank == 1:
            thread = inside(lambda comm=comm: comm.barrier("beside"))
            from_the_start_to_deep_inside(turn)
            comm.close()
            assert "closed" in str(wait_out(thread))
        gather(None)
        if rank != 1:
            assert not comm.is_alive and "rank 1" in comm.end_reason
        gather(None)  # a late rank would hear of another that left before it looked
        if rank != 1:
            comm.close()


@pytest.mark.timeout(900)
@on_every_rank(at_least=2, deadline_s=880)
def test_close_beside_connect(rank, world_size):
    """Rank 1 never comes, so the others wait inside until they are closed."""
    for turn in range(TRIES // 10):  # each takes a look of a tenth of a second
        comms = [engine.HostComm(rank, world_size, timeout_s=DEADLINE_S) for _ in range(10)]
        addresses = gather([comm.address for comm in comms])
        if rank != 1:
            threads = [
                inside(lambda c=comm, i=i: c.connect([a[i] for a in addresses], b"s" * 16, ["h"] * world_size))
                for i, comm in enumerate(comms)
            ]
            from_the_start_to_deep_inside(turn)
            for comm in comms:
                comm.close()
            for thread in threads:
                assert isinstance(wait_out(thread), engine.Error)
            for comm in comms:
                with pytest.raises(engine.Error, match="closed"):
                    comm.barrier()
        gather(None)
        for comm in comms:
            comm.close()


@pytest.mark.timeout(900)
@on_every_rank(at_least=2, deadline_s=880)
def test_close_beside_the_making_of_an_arena(rank, world_size):
    for turn in range(TRIES):
        comm = host_comm(rank, world_size, timeout_s=DEADLINE_S)
        arenas = []
        thread = inside(
            lambda comm=comm, arenas=arenas: [arenas.append(comm.arena(8192, "beside")) for _ in range(10**6)]
        )
        from_the_start_to_deep_inside(turn)
        if rank == turn % world_size:
            comm.close()
        assert wait_out(thread) is not None
        arenas.clear()  # the last of them ends what was closed
        comm.close()
        gather(None)


@pytest.mark.timeout(900)
@on_every_rank(at_least=2, deadline_s=880)
def test_a_fork_beside_a_barrier(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=DEADLINE_S)

    def calls():
        start = Stopwatch()
        assert not comm.is_alive and "forked" in comm.end_reason
        for call in (comm.barrier, lambda: comm.arena(4096, "child"), lambda: comm.abort("child")):
            with pytest.raises(engine.Error, match="forked"):
                call()
        comm.close()
        assert start.seconds() < 0.5

    for turn in range(TRIES):
        thread = inside(lambda: comm.barrier("beside"))
        from_the_start_to_deep_inside(turn)
        if rank == turn % world_size:
            assert in_a_child(calls) == ""
        gather(None)
        assert wait_out(thread) is None
    comm.close()


@on_every_rank(at_least=2)
def test_a_range_that_is_refused_is_refused_before_any_is_sent(rank, world_size):
    """A call that raised after it had sent an earlier range would end while peers still read that memory."""
    comm = host_comm(rank, world_size, timeout_s=20)
    arena = comm.arena(1 << 16, "ranges")
    slices = (list(range(world_size)), [0] * world_size)
    before = comm.stats()["all_gather"]
    for ranges, kind in (([(0, 4096), (1 << 16, 4096)], ValueError), ([(0, 4096), (-1, 4096)], ValueError)):
        with pytest.raises(kind):
            comm.all_gather(arena, ranges, "refused", slices=slices)
    assert comm.stats()["all_gather"] == before
    comm.all_gather(arena, [(0, 4096), (4096, 4096)], "sent", slices=slices)
    comm.barrier()
    comm.close()


@on_every_rank(at_least=2)
def test_a_communicator_is_as_large_as_the_job_before_it_knows_its_host(rank, world_size):
    """A communicator may have more ranks than one host can have, and than there are file descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    comm = engine.HostComm(rank, 16384)
    assert len(os.listdir("/proc/self/fd")) == before + 1 and comm.world_size == 16384
    comm.close()
    assert len(os.listdir("/proc/self/fd")) == before
