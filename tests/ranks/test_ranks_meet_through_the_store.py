"""Law: ranks meet through torch's store as a tree, in which each writes one key. The first failure is the error of all
ranks, and a carrier that does not know the group's secret is refused. Ranks are threads of one process here.
"""

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import Stopwatch
from internals import Line, Rendezvous, children, internals, rendezvous, wire
from peer import PEER, engine

pytestmark = pytest.mark.skipif(PEER == "torch", reason="about the engine's way to join")


class CountingStore:
    """A store that counts its calls by thread."""

    def __init__(self):
        self._store = dist.HashStore()
        self.calls = Counter()
        self._lock = threading.Lock()

    def __getattr__(self, name):
        def call(*arguments):
            with self._lock:
                key = arguments[0][0] if name == "check" else arguments[0]
                self.calls[name, key] += 1
            return getattr(self._store, name)(*arguments)

        return call


def run_threads(count, body):
    """Return the value or the exception of `body(rank)`, by rank."""
    results = [None] * count

    def run(rank):
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def line_of(rank, failure=""):
    return Line(rank, f"address {rank}", f"host{rank // 3}", f"place {rank // 3}", 1, "0x1", failure)


def test_every_rank_is_the_child_of_one_rank():
    world_size = 16384
    seen = [child for rank in range(world_size) for child in children(rank, world_size)]
    assert seen == list(range(1, world_size))
    depth = [0] * world_size
    for rank in range(world_size):
        for child in children(rank, world_size):
            depth[child] = depth[rank] + 1
    assert max(depth) == 3 and max(len(children(rank, world_size)) for rank in range(world_size)) == rendezvous.FAN_OUT


def test_each_rank_writes_one_key_and_rank_0_one_a_host(monkeypatch):
    monkeypatch.setattr(rendezvous, "FAN_OUT", 3)
    world_size = 20
    store = CountingStore()
    met = run_threads(world_size, lambda rank: Rendezvous(store, rank, world_size, "", 20).meet(line_of(rank)))
    host_of = [rank // 3 for rank in range(world_size)]
    for rank, each in enumerate(met):
        assert each.host_of == host_of and each.secret == met[0].secret and len(each.secret) == 16, each
        assert each.here == [line_of(other) for other in range(world_size) if host_of[other] == host_of[rank]]
    written = Counter({key: count for (name, key), count in store.calls.items() if name == "set"})
    assert written == Counter(
        [*(f"lines/{rank}" for rank in range(1, world_size)), *(f"host/{host}" for host in range(7)), "map"]
    )
    read = {key: count for (name, key), count in store.calls.items() if name == "get"}
    assert all(read[f"lines/{rank}"] == 1 for rank in range(1, world_size))
    assert read["map"] == world_size and sum(read[f"host/{host}"] for host in range(7)) == world_size


def test_a_rank_that_cannot_join_is_named_on_all(monkeypatch):
    monkeypatch.setattr(rendezvous, "FAN_OUT", 3)
    store = dist.HashStore()
    errors = run_threads(
        9, lambda rank: Rendezvous(store, rank, 9, "", 20).meet(line_of(rank, "no room" if rank in (5, 7) else ""))
    )
    assert {type(each) for each in errors} == {MemoryError}
    assert {str(each) for each in errors} == {"rank 5 on host host1 cannot join its peers: no room"}


def test_the_first_reason_is_that_of_all_ranks():
    store = dist.HashStore()

    def fails(rank):
        time.sleep(0.1 if rank == 2 else 0)
        error = engine.CommError("heard of rank 2")
        error.rank = 2
        meeting = Rendezvous(store, rank, 4, f"host{rank}", 20)
        return meeting.fail(OSError("no memory for this") if rank == 2 else error)

    errors = run_threads(4, fails)
    assert {str(each) for each in errors} == {"joining failed on rank 2 on host host2: no memory for this"}
    assert {(each.rank, each.host) for each in errors} == {(2, "host2")}


def test_a_store_that_does_not_answer_is_an_error_at_the_deadline():
    class Silent:
        def set(self, *_):
            time.sleep(5)

    begin_s = Stopwatch()
    with pytest.raises(engine.CommTimeoutError, match=r"rank 1: it did not answer set\(\) within 0.3 s"):
        Rendezvous(Silent(), 1, 2, "", 0.3).meet(line_of(1))
    assert begin_s.seconds() < 2


def wires(secrets, spoil=lambda rank, gloo: gloo):
    store = dist.HashStore()

    def connect(rank):
        gloo = internals.make_gloo(store, rank, len(secrets), timedelta(seconds=20))
        return wire.Wire(spoil(rank, gloo), range(len(secrets)), secrets[rank], wire.sockets())

    return run_threads(len(secrets), connect)


def test_a_carrier_that_does_not_know_the_secret_is_refused(monkeypatch):
    monkeypatch.setattr(wire, "_TOKENS_S", 2.0)
    assert all(isinstance(each, wire.Wire) for each in wires([b"s" * 16] * 3))
    good, other, stranger = wires([b"s" * 16, b"s" * 16, b"t" * 16])
    for each in (good, other):
        assert isinstance(each, RuntimeError) and "rank 2 does not know the secret" in str(each), each
    assert isinstance(stranger, RuntimeError)


def test_a_token_of_another_pair_of_carriers_is_refused(monkeypatch):
    """Rank 1 replays to rank 0 what rank 0 sent to it."""
    monkeypatch.setattr(wire, "_TOKENS_S", 2.0)
    token = wire.Wire._token

    def reflect(self, sender, receiver):
        return token(self, receiver, sender) if self._rank == sender == 1 else token(self, sender, receiver)

    monkeypatch.setattr(wire.Wire, "_token", reflect)
    found = wires([b"s" * 16] * 2)
    assert isinstance(found[0], RuntimeError) and "rank 1 does not know the secret" in str(found[0]), found


def test_a_carrier_that_connects_late_proves_itself_first(monkeypatch):
    """Beyond EAGER_HOSTS hosts, connections are made at first use, and their data is accepted after the token."""
    monkeypatch.setattr(wire, "EAGER_HOSTS", 2)
    monkeypatch.setattr(wire, "first_peers", lambda place, count: [1 - place] if place < 2 else [])
    store = dist.HashStore()

    def connect(rank):
        gloo = internals.make_gloo(store, rank, 3, timedelta(seconds=20), connects_late=True)
        return wire.Wire(gloo, range(3), b"s" * 16 if rank != 1 else b"t" * 16, wire.sockets())

    monkeypatch.setattr(wire.Wire, "_exchange_tokens", lambda *_: None)  # whatever the first two would say
    made = run_threads(3, connect)
    heard = bytearray(5)
    into = (wire.ctypes.c_uint8 * 5).from_buffer(heard)
    said = wire.ctypes.create_string_buffer(b"hello", 5)

    def exchange(rank):
        if rank == 2:
            made[2].wait(made[2].receive(0, 7, wire.ctypes.addressof(into), 5))
            made[2].wait(made[2].receive(1, 7, wire.ctypes.addressof(into), 5))
        else:
            made[rank].wait(made[rank].send(2, 7, wire.ctypes.addressof(said), 5))

    outcomes = run_threads(3, exchange)
    assert outcomes[0] is None and heard == b"hello", outcomes
    assert "rank 1 does not know the secret" in str(outcomes[2]), outcomes


@pytest.mark.parametrize(("count", "most"), [(2, 1), (33, 22), (2048, 48), (16384, 70)])
def test_a_carrier_is_connected_to_few_others(count, most):
    for place in (0, count // 3, count - 1):
        peers = wire.first_peers(place, count)
        assert place not in peers and len(peers) <= most, len(peers)
        assert all(place in wire.first_peers(other, count) for other in peers)


def test_a_group_may_have_more_ranks_than_a_host():
    """`ulimit -n 1024` suffices for thousands of ranks before their hosts are known."""
    program = """
import importlib.util, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
spec = importlib.util.spec_from_file_location("_engine", sys.argv[1])
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
for world_size in (512, 1025, 16384):
    comm = engine.HostComm(0, world_size)
    comm.connect([comm.address], b"s" * 16, ["here"], members=[0])
    comm.close()
    print(world_size)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, engine.__file__], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["512", "1025", "16384"], done.stderr


def test_members_that_cannot_be_are_one_sentence():
    comm = engine.HostComm(1, 4, host=socket.gethostname())
    for members in ([0, 2], [1, 0], [1, 4], [1, 1]):
        with pytest.raises(ValueError, match=r"members must be ranks in \[0, 4\), ascending, with rank 1 among them"):
            comm.connect([comm.address] * len(members), b"s" * 16, [""] * len(members), members=members)
    comm.close()
