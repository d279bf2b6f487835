"""Law: a failure while ranks join, or map one another's memory, reaches every rank at once, and leaves nothing behind."""

import contextlib
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time

import internals
import pytest
import torch
import torch.distributed as dist
from harness import LONG, Stopwatch, gather, on_every_rank
from models import Mlp
from peer import PEER, batch, compare_step, data_parallel, engine, pair

pytestmark = pytest.mark.skipif(PEER == "torch", reason="about the engine's way to join")


@contextlib.contextmanager
def with_address_space(more_bytes):
    """Limit the address space of this process to its present size and `more_bytes`."""
    with open("/proc/self/statm") as file:
        soft = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@on_every_rank(at_least=3, spoils=True)
def test_memory_that_one_rank_could_not_map_is_not_taken_for_the_next(rank, world_size):
    """The last rank has room for its own part and for no peer's. The peers' messages must not stay in the sockets."""
    data_parallel(Mlp())
    torch.manual_seed(0)
    module = torch.nn.Linear(4096, 4096, bias=False)  # 64 MiB
    with with_address_space(104 << 20) if rank == world_size - 1 else contextlib.nullcontext():
        wrapped = data_parallel(module, timeout_s=20.0)
        reducer = internals.reducer(wrapped)
        assert reducer.transport == "staged" and f"rank {world_size - 1}" in reducer.transport_reason, (
            reducer.transport_reason
        )
        assert "mapping" in reducer.transport_reason
    wrapped, naive = pair(Mlp, transport="pool", timeout_s=20.0)
    for step in range(2):
        compare_step(
            wrapped, naive, lambda model, step=step: model(batch(rank, 4, 7, step=step)).square().sum().backward()
        )


@on_every_rank(at_least=3, spoils=True)
def test_a_rank_that_could_not_join_and_lives_on_is_not_waited_for(rank, world_size):
    """Rank 1 cannot map the control pages that rank 0 sends."""
    comm = engine.HostComm(rank, world_size, host=socket.gethostname(), timeout_s=20.0)
    secret = gather(os.urandom(16))[0]
    addresses, hosts = gather(comm.address), gather(socket.gethostname())
    begin_s = Stopwatch()
    with with_address_space(0) if rank == 1 else contextlib.nullcontext():
        with pytest.raises((engine.Error, MemoryError, OSError)) as raised:
            comm.connect(addresses, secret, hosts)
            comm.barrier()
    seconds = begin_s.seconds()
    texts = gather(str(raised.value))  # rank 1 lives on all the while
    assert seconds < 3, texts
    assert re.search(rf"mapping the control pages of {world_size} ranks failed", texts[1]), texts
    assert all("rank 1" in text or "rank 0" in text for rank, text in enumerate(texts) if rank != 1), texts


@on_every_rank(at_least=3)
def test_a_late_rank_is_waited_for(rank, world_size):
    """Rank 1 is late for longer than its socket's queue has room for the probes of its peers."""
    comm = engine.HostComm(rank, world_size, host=socket.gethostname(), timeout_s=20.0)
    secret = gather(os.urandom(16))[0]
    addresses, hosts = gather(comm.address), gather(socket.gethostname())
    time.sleep(1.5 if rank else 0.0)  # rank 0 looks for all others
    time.sleep(1.0 if rank == world_size - 1 else 0.0)  # and the others for the last one
    begin_s = Stopwatch()
    comm.connect(addresses, secret, hosts)
    comm.barrier()
    seconds = begin_s.seconds()
    comm.close()
    assert max(gather(seconds)) < 10


class Poor:
    """Join a HostComm in a process that can map no more memory from then on."""

    def __init__(self, *arguments, **options):
        self._comm = engine.HostComm(*arguments, **options)

    def connect(self, *arguments, **options):
        with with_address_space(0):
            self._comm.connect(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self._comm, name)


@pytest.mark.parametrize("poor", [0, 1, 2])
@on_every_rank(at_least=3, spoils=True)
def test_what_keeps_one_rank_from_joining_is_one_sentence_on_every_rank(rank, world_size, poor):
    from internals import process_group

    kept = process_group.HostComm
    process_group.HostComm = Poor if rank == poor else kept
    begin_s = Stopwatch()
    try:
        with pytest.raises(engine.CommError) as raised:
            data_parallel(Mlp(), process_group=dist.new_group(range(world_size)), timeout_s=20.0)
    finally:
        process_group.HostComm = kept
    seconds = begin_s.seconds()
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size
    assert f"joining failed on rank {poor} on host" in texts[0] and "mapping the control page" in texts[0], texts
    assert seconds < 3, texts
    wrapped, naive = pair(Mlp)  # the group itself goes on
    compare_step(wrapped, naive, lambda model: model(batch(rank, 4, 7)).square().sum().backward())


@on_every_rank(at_least=3)
def test_ranks_with_more_threads_than_cores_are_told_so_once(rank, world_size):
    """Join three ranks on two cores, and on three."""
    cores = os.sched_getaffinity(0)

    def said(own, threads):
        heard = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())
        logging.getLogger("shardwright").addHandler(handler)
        os.sched_getaffinity = lambda _: own
        torch.set_num_threads(threads)
        try:
            data_parallel(Mlp(), process_group=dist.new_group(range(world_size)))
        finally:
            os.sched_getaffinity = real
            torch.set_num_threads(1)
            logging.getLogger("shardwright").removeHandler(handler)
        return [text for text in heard if "threads" in text]

    real = os.sched_getaffinity
    texts = gather(said({0, 1}, 2))
    assert len(texts[0]) == 1 and texts[1:] == [[]] * (world_size - 1), texts
    assert f"{world_size} ranks" in texts[0][0] and f"on {2 * world_size} threads" in texts[0][0], texts
    assert "2 cores" in texts[0][0] and "OMP_NUM_THREADS=1" in texts[0][0], texts
    assert gather(said({0, 1}, 1)) == [[]] * world_size  # one thread a rank is as few as there are
    assert gather(said({2 * rank, 2 * rank + 1}, 2)) == [[]] * world_size  # cores of its own
    assert os.sched_getaffinity(0) == cores


def test_the_self_test_ends_when_a_thread_cannot_be_started():
    """Run in a process that has room for no, one or two thread stacks."""
    program = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("_engine", sys.argv[1])
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
seen = set()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for quarters in range(0, 160):
    resource.setrlimit(resource.RLIMIT_AS, (size + quarters * (1 << 18), -1))
    try:
        engine.self_test()
        seen.add("right")
    except (engine.Error, MemoryError) as error:
        seen.add(str(error))
print(seen)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, engine.__file__], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "could not be started" in done.stdout and "right" in done.stdout, done.stdout


def fails_in_wrap(rank, folder):
    """A program whose rank 1 cannot join, which ends all its ranks."""
    import shardwright as sw
    from internals import process_group

    def refuse(*_, **__):
        raise MemoryError("no memory in this test")

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sys.setswitchinterval(10)
    if rank == 1:
        process_group.HostComm = refuse
    try:
        sw.wrap(torch.nn.Linear(2, 2))
    except MemoryError as error:
        sys.exit(7 if "rank 1" in str(error) else 8)


_PROGRAM = """
import os, sys, tempfile
import torch, torch._dynamo
sys.path[:0] = {path!r}
import test_joining_fails_cleanly as test
codes = []
for trial in range({trials}):
    folder = tempfile.mkdtemp(dir={folder!r})
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            test.fails_in_wrap(rank, folder)
            sys.exit(9)
        children.append(child)
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(codes)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not LONG, reason="20 pairs of programs; the test above sees the same in one")
def test_programs_that_end_with_the_error_of_a_handshake_end_with_it():
    """The interpreters exit right after the exchange. Without the wait above one in ten aborted."""
    trials = 20
    with tempfile.TemporaryDirectory() as folder:
        program = _PROGRAM.format(path=sys.path, trials=trials, folder=folder)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([7] * 2 * trials), (done.stdout, done.stderr)


class BrokenWire:
    """Break a process group of torch's, so that nothing can be sent over it."""

    slow_bytes_per_s = 0

    def refuse(self, *_):
        raise RuntimeError("no route to the other host")

    send = receive = wait = refuse

    def close(self, gently):
        return True


@pytest.mark.skipif(engine is None, reason="the engine itself")
def test_a_communicator_whose_hosts_do_not_join_is_closed():
    comm = engine.HostComm(0, 2, timeout_s=5, host="one")
    comm.connect([comm.address], b"x" * 16, ["one"], members=[0])
    with pytest.raises(engine.Error, match="no route"):
        comm.extend([0, 1], "one", wire=BrokenWire())
    for call in (comm.describe, comm.stats, comm.barrier):
        with pytest.raises(engine.Error, match="the communicator was closed"):
            call()
