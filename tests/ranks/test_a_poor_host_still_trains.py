"""Laws of a host that refuses a system call or memory: the ranks train to the same bits by another path, which
describe() names with the reason; or every rank gets one sentence that names the limit and the rank.
"""

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import time

import internals
import pytest
import torch
from harness import Stopwatch, at_least_two, gather, join_from_own_namespaces
from models import Mlp
from peer import PEER, batch, compare_step, data_parallel, engine, pair, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

PIDFD_OPEN = 434
CGROUPS = "/sys/fs/cgroup"


def backward(model, rank, step):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def refuse_system_call(number):
    """Make the system call fail with EPERM in this process, as a container's seccomp filter does."""
    libc = ctypes.CDLL(None, use_errno=True)
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | 1
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in [(load, 0, 0, 0), (jump_if_equal, 0, 1, number), (answer, 0, 0, fail), (answer, 0, 0, allow)]
    )
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    if libc.prctl(set_seccomp, filter_mode, ctypes.c_char_p(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def dies_without_a_pidfd(rank, world_size, everywhere):
    if everywhere or rank == 1:
        refuse_system_call(PIDFD_OPEN)
        with pytest.raises(PermissionError):
            os.pidfd_open(os.getpid())
    wrapped, naive = pair(Mlp)
    for step in range(2):
        compare_step(wrapped, naive, lambda model, step=step: backward(model, rank, step))
    watch = internals.comm(wrapped).describe()["watch"]
    gather(None)
    if rank == 1:
        if os.fork() == 0:  # a child that lives on, with every descriptor, hides nothing
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = Stopwatch()
    with pytest.raises(engine.CommError, match="rank 1") as raised:
        backward(wrapped, rank, 5)
    return watch, raised.value.rank, start.seconds()


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@at_least_two
def test_where_pidfds_are_refused_a_death_is_seen_by_a_lock(fresh_ranks, world_size, everywhere):
    with fresh_ranks(world_size) as team:
        team.start(dies_without_a_pidfd, everywhere=everywhere)
        outcomes = team.wait(40, patient=True)
    assert outcomes[1].ended == "signal SIGKILL"
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.ok, outcome
            watch, dead, seconds = outcome.value
            assert (watch, dead) == ("file lock", 1) and seconds < 1.0, outcome.value


@contextlib.contextmanager
def memory_group(limit_bytes):
    """Yield the folder of a control group with that much memory; skip if it cannot be made."""
    with open("/proc/self/cgroup") as file:
        lines = [line.strip().split(":", 2) for line in file]
    v1 = next((path for _, controllers, path in lines if controllers == "memory"), None)
    root = f"{CGROUPS}/memory{v1}" if v1 else f"{CGROUPS}{lines[0][2]}"
    folder = f"{root}/shardwright-test-{os.getpid()}"
    try:
        os.mkdir(folder)
        with open(f"{folder}/{'memory.limit_in_bytes' if v1 else 'memory.max'}", "w") as file:
            file.write(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while os.path.exists(folder) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            time.sleep(0.05)


def under_a_memory_limit(rank, world_size, folder):
    """Gradients take 64 MiB, and one rank has 40 MiB left. No form of them fits, and the kernel would kill the rank."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4096, 4096, bias=False)
    if rank == world_size - 1:
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    with pytest.raises(MemoryError) as raised:
        data_parallel(module, timeout_s=20.0)
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    return str(raised.value)


@at_least_two
def test_a_memory_limit_on_one_rank_is_named_on_every_rank_before_anything_is_taken(fresh_ranks, world_size):
    with memory_group(40 << 20) as folder, fresh_ranks(world_size) as team:
        texts = team.run(under_a_memory_limit, 30, folder=folder)
    assert texts == [texts[0]] * world_size, texts
    assert f"rank {world_size - 1}" in texts[0] and "memory.max" in texts[0] and "Linear" in texts[0], texts


def under_a_memory_limit_together(rank, world_size, folder):
    """Gradients take 64 MiB per rank: those of one rank fit, those of all do not."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4096, 4096, bias=False)
    with open(f"{folder}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    gather(None)
    with pytest.raises(MemoryError) as raised:
        data_parallel(module, timeout_s=20.0)
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    return str(raised.value)


@at_least_two
def test_a_memory_limit_that_ranks_share_is_compared_with_what_they_need_together(fresh_ranks, world_size):
    with memory_group((64 * world_size - 20) << 20) as folder, fresh_ranks(world_size) as team:
        texts = team.run(under_a_memory_limit_together, 30, folder=folder)
    assert texts == [texts[0]] * world_size, texts
    assert f"{world_size} ranks" in texts[0] and "memory.max" in texts[0] and "Linear" in texts[0], texts


def trains_beside_a_small_dev_shm(rank, world_size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
    wrapped, naive = pair(lambda: torch.nn.Linear(600, 601))
    for step in range(2):
        x = batch(rank, 2, 600, step=step)
        compare_step(wrapped, naive, lambda model, x=x: model(x).square().mean().backward())
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_bsize == 64 << 10
    assert os.listdir("/dev/shm") == []
    return internals.reducer(wrapped).transport, sw.describe()["models"][-1]["transport"]


def test_a_small_dev_shm_does_not_matter(fresh_ranks):
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True, capture_output=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no mount namespaces here: {error}")
    with fresh_ranks(3, [(join_from_own_namespaces, {})] * 3) as team:
        assert team.run(trains_beside_a_small_dev_shm) == [("pool", "pool")] * 3
