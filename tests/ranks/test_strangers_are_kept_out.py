"""Law: a process that does not know a group's secret learns only names, and delays no rank. A process of another user
is not heard at all, one of the same user only until it should have proved itself. Ranks join in the usual time beside
any number of such processes. A stranger that takes the name of a dead rank is not believed.

The stranger of another user is a forked child that has become `nobody`; those tests need root.
"""

import contextlib
import glob
import hmac
import os
import re
import select
import signal
import socket
import statistics
import struct
import time

import pytest
from harness import Stopwatch, gather, on_every_rank
from models import Mlp
from peer import batch, compare_step, engine, pair

pytestmark = pytest.mark.skipif(engine is None, reason="the engine itself")

NOBODY = 65534
MAGIC, CALL_BYTES, ANSWER_BYTES = 0x53574833, 28, 48  # csrc/comm/bootstrap.h
ROUNDS, NOISE_S = 7, 0.15
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: this process cannot become another user")
USERS = [pytest.param("nobody", marks=needs_root), "the same user"]


def become(user):
    if user == "nobody":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@contextlib.contextmanager
def stranger(user, act, *arguments):
    """A child process that has become `user` and runs `act`; it reports through the pipe `.say`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 3)
            os.closerange(4, 4096)  # what the rank listens with is not the stranger's
            with os.fdopen(3, "w", buffering=1) as say:
                become(user)
                act(say, *arguments)
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    pipe = os.fdopen(reader)
    try:
        assert pipe.readline() == "begun\n"
        yield pipe
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pipe.close()


def call(name, limit_s=1.0):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(limit_s)
    made.connect("\0" + name)
    return made


def hello(rank=1, world_size=3):
    return struct.pack("<Iii", MAGIC, rank, world_size) + os.urandom(16)


def is_silent(say, names):
    kept = [call(name) for name in names for _ in range(3)]
    say.write("begun\n")
    signal.pause()
    del kept


def sends_garbage(say, names):
    kept = []
    for size in (1, CALL_BYTES, 48, 4000):
        for name in names:
            kept.append(call(name))
            kept[-1].send(os.urandom(size))
    say.write("begun\n")
    signal.pause()


def begins_and_stops(say, names):
    """Make a rank's first call, and nothing more."""
    kept = [call(name) for name in names for _ in range(5)]
    for each in kept:
        each.send(hello())
    say.write("begun\n")
    signal.pause()


def connects_a_thousand_times(say, names):
    say.write("begun\n")
    kept = []
    while len(kept) < 1000:
        with contextlib.suppress(OSError):
            kept.append(call(names[0], 0.2))
            kept[-1].send(hello())
        if len(kept) % 200 == 199:
            kept = kept[100:]  # a descriptor each
    signal.pause()


def knows_another_secret(say, names):
    """Go through the whole exchange. Report the lengths of the answers, the number of file descriptors received, and
    their contents.
    """
    with call(names[0], 10.0) as made:
        asked, received = hello(), []
        made.send(asked)  # before the ranks call: the first rank answers before it has linked all of them
        say.write("begun\n")
        with contextlib.suppress(OSError):  # it may hang up at any time
            received.append(socket.recv_fds(made, 4096, 4))
            made.send(hmac.new(b"another secret!!", asked + received[0][0], "sha256").digest())
            received.append(socket.recv_fds(made, 4096, 4))
    lengths = [len(each[0]) for each in received]
    say.write(f"{lengths}|{sum(len(each[1]) for each in received)}|{b''.join(each[0] for each in received).hex()}\n")


STRANGERS = [is_silent, sends_garbage, begins_and_stops, connects_a_thousand_times, knows_another_secret]


def join_beside(rank, world_size, user, act):
    """Return the seconds that this rank takes to join, and the stranger's report."""
    comm = engine.HostComm(rank, world_size, host="here", timeout_s=60)
    secret = gather(os.urandom(16))[0]
    addresses = gather(comm.address)
    with stranger(user, act, addresses) if act and rank == 0 else contextlib.nullcontext() as pipe:
        gather(None)  # the stranger has begun, and no rank listens to it yet
        start = time.monotonic()
        comm.connect(addresses, secret, ["here"] * world_size)
        seconds = time.monotonic() - start
        assert comm.all_gather_bytes(b"%d" % rank) == [b"%d" % r for r in range(world_size)]
        if pipe is not None and act is knows_another_secret:
            lengths, descriptors, text = pipe.readline().strip().split("|")
            heard = [[], [0]] if user == "nobody" else [[ANSWER_BYTES], [ANSWER_BYTES, 0]]  # a nonce and a proof
            assert eval(lengths) in heard and descriptors == "0" and secret.hex() not in text, (lengths, descriptors)
        gather(None)
    comm.close()
    return max(gather(seconds))


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("act", STRANGERS, ids=lambda act: act.__name__)
@on_every_rank(at_least=3)
def test_ranks_join_in_the_usual_time_beside(rank, world_size, act, user):
    usual, beside = [], []
    for _ in range(ROUNDS):
        usual.append(join_beside(rank, world_size, user, None))
        beside.append(join_beside(rank, world_size, user, act))
    assert statistics.median(beside) < 1.1 * statistics.median(usual) + NOISE_S, (usual, beside)


@pytest.mark.parametrize("user", USERS)
@on_every_rank(at_least=3)
def test_training_goes_on_beside_callers(rank, world_size, user):
    """After the ranks have joined, no rank listens any more."""

    def calls_again_and_again(say):
        say.write("begun\n")
        while True:
            with open("/proc/net/unix") as file:
                names = {line.split("@", 1)[1].strip() for line in file if "@shardwright-" in line}
            for name in names:
                with contextlib.suppress(OSError), call(name, 0.05) as made:
                    made.send(hello())

    with stranger(user, calls_again_and_again) if rank == 0 else contextlib.nullcontext():
        gather(None)
        wrapped, naive = pair(Mlp)
        for step in range(4):
            compare_step(wrapped, naive, lambda model, step=step: model(batch(rank, 4, 7, step=step)).sum().backward())
        gather(None)


def takes_the_name(say, name):
    """Take the name as soon as it is free, listen, and report what arrived."""
    say.write("begun\n")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        with contextlib.suppress(OSError):
            made.bind("\0" + name)
            break
    made.listen(64)
    say.write("bound\n")
    while True:
        other, _ = made.accept()
        other.settimeout(0.5)
        with contextlib.suppress(OSError):
            message, fds, _, _ = socket.recv_fds(other, 4096, 4)
            if message:
                say.write(f"{len(message)} {len(fds)} {message.hex()}\n")
                other.send(os.urandom(ANSWER_BYTES))
                message, fds, _, _ = socket.recv_fds(other, 4096, 4)
                say.write(f"{len(message)} {len(fds)} {message.hex()}\n")
        other.close()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("dead", [0, 1], ids=["the first rank", "another rank"])
@on_every_rank(at_least=3)
def test_a_name_that_a_stranger_has_taken_is_not_believed(rank, world_size, dead, user):
    """The rank with that name died before the others called it. With the same user, the rank that waits for a call by
    `dead` cannot tell.
    """
    comm = engine.HostComm(rank, world_size, host="here", timeout_s=60 if dead == 0 or user == "nobody" else 1.5)
    secret = gather(os.urandom(16))[0]
    addresses = gather(comm.address)
    with stranger(user, takes_the_name, addresses[dead]) if rank == 2 else contextlib.nullcontext() as pipe:
        gather(None)
        if rank == dead:
            comm.close()
        if rank == 2:
            assert pipe.readline() == "bound\n"
        gather(None)
        start = Stopwatch()
        if rank != dead:
            with pytest.raises(engine.CommError) as raised:
                comm.connect(addresses, secret, ["here"] * world_size)
            assert start.seconds() < 10
            assert f"rank {dead}" in str(raised.value) or (dead != 0 and "rank 0" in str(raised.value)), raised.value
        gather(None)
        if rank == 2 and dead == 0 and user == "the same user":
            said = pipe.readline().split()
            assert said[:2] == [str(CALL_BYTES), "0"] and secret.hex() not in said[2], said
            said = pipe.readline().split()
            assert said[:2] == ["0", "0"], said  # nothing follows an answer that proves nothing
        elif rank == 2:
            assert not select.select([pipe], [], [], 0)[0]  # not a byte came
    comm.close()


def looks_around(say, pid, secret, names):
    """Try each way to read a rank of another user, and report the outcome."""
    say.write("begun\n")
    found = {}
    for what in ("fd", "fdinfo", "map_files", "task"):
        found[what] = attempt(lambda what=what: os.listdir(f"/proc/{pid}/{what}"))
    for what in (
        "maps",
        "smaps",
        "environ",
        "mem",
        "auxv",
        "io",
        "stack",
        "syscall",
        "cmdline",
        "stat",
        "status",
        "limits",
    ):
        found[what] = attempt(lambda what=what: open(f"/proc/{pid}/{what}", "rb").read(1 << 20))
    found["memory"] = attempt(lambda: open(f"/proc/{pid}/fd/{max(range(3, 64))}", "rb"))
    found["unix"] = attempt(lambda: open("/proc/net/unix", "rb").read())
    found["locks"] = attempt(lambda: open("/proc/locks", "rb").read())
    found["shm"] = attempt(lambda: os.listdir("/dev/shm"))
    found["signal"] = attempt(lambda: os.kill(pid, 0))
    for name in names:
        found[f"call {names.index(name)}"] = attempt(lambda name=name: call(name))
    leaks = [what for what, text in found.items() if secret in text or secret.hex().encode() in text]
    refused = sorted(what for what, text in found.items() if text.startswith(b"refused"))
    named = sum(name.encode() in found["unix"] for name in names)
    say.write(f"{leaks!r}|{refused!r}|{named}|{b'memfd' in b''.join(found.values())}\n")


def attempt(action):
    try:
        return repr(action()).encode()
    except OSError as error:
        return f"refused: {error.strerror}".encode()


@needs_root
@on_every_rank(at_least=3)
def test_what_a_stranger_can_read_is_names_and_sizes(rank, world_size):
    """Such a process can see names of sockets (/proc/net/unix), which bytes of an unnamed file are locked and by which
    pid (/proc/locks), and what every user sees of every process (command, state, limits, total memory). It cannot see
    memory, file descriptors, mappings or environment, or call a rank.
    """
    comm = engine.HostComm(rank, world_size, host="here", timeout_s=60)
    secret = gather(os.urandom(16))[0]
    addresses = gather(comm.address)
    comm.connect(addresses, secret, ["here"] * world_size)
    arena = comm.arena(1 << 20, "gradients")
    if rank == 0:
        with stranger("nobody", looks_around, os.getpid(), secret, addresses) as pipe:
            leaks, refused, named, sees_memory = pipe.readline().strip().split("|")
        assert leaks == "[]" and sees_memory == "False", (leaks, sees_memory)
        can = {"task", "cmdline", "stat", "status", "limits", "unix", "locks", "shm"}
        cannot = {
            "fd",
            "fdinfo",
            "map_files",
            "maps",
            "smaps",
            "environ",
            "mem",
            "auxv",
            "io",
            "stack",
            "syscall",
            "memory",
            "signal",
        }
        cannot |= {f"call {r}" for r in range(world_size)}
        assert set(eval(refused)) == cannot, (set(eval(refused)) ^ cannot, can)
        assert int(named) <= world_size
    gather(None)
    del arena
    comm.close()


def test_nothing_is_left_in_the_file_system():
    found = {*glob.glob("/tmp/shardwright-*"), *glob.glob("/run/shardwright-*")}
    for each in found - set(glob.glob("/tmp/shardwright-doctor-*")):  # a doctor that runs meanwhile has a folder
        uid = re.fullmatch(
            r"/tmp/shardwright-(\d+)", each
        )  # accounts of dead jobs, left on purpose, for their owner alone
        assert uid and os.stat(each).st_uid == int(uid[1]) and os.stat(each).st_mode & 0o777 == 0o700, each
