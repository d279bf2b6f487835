"""Law: when a process or host ends, every surviving rank raises at once and names the rank and host. (Stopped or late
ranks: test_hosts_say_for_whom_they_wait.py.)
"""

import os
import pathlib
import signal
import sys
import time

import pytest
import shardwright as sw
import torch
from harness import LONG, Stopwatch

#: the other victims, and what differs in the number of ranks alone
long_form = pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
TIMEOUT_S = 2.0
#: what a dead process shows at once, a dead network only by silence
AT_ONCE_S = 1.5


def lives_as_long_as(folder):
    while folder.exists():
        time.sleep(0.05)
    os._exit(0)


def trains_until_an_error(rank, world_size, parent=-1):
    """`parent` is the rank that forks a child, which survives it."""
    torch.manual_seed(0)
    model = sw.wrap(torch.nn.Linear(200, 200), timeout_s=TIMEOUT_S)
    begun = pathlib.Path(os.environ["SW_TEST_FOLDER"], f"begun-{rank}")
    for _ in range(100_000):
        try:
            model(torch.ones(2, 200)).sum().backward()
        except sw.CommError as error:
            return type(error).__name__, error.rank, error.host, str(error), time.monotonic()
        if rank == parent and not begun.exists() and not os.fork():
            lives_as_long_as(begun.parent)
        begun.touch()
        time.sleep(0.01)
    return None


def exits_when_told(rank, world_size):
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
    return trains_until_an_error(rank, world_size)


def exits(rank, world_size):
    raise SystemExit(0)


def survivors_of(lab, fault, dead=(), deadline_s=20, body=trains_until_an_error, **arguments):
    """Return what each survivor saw of the fault: {rank: (type, rank, host, text, seconds after the fault)}."""
    lab.team.start(body, **arguments)
    folder = pathlib.Path(lab.team._folder.name)
    end = time.monotonic() + 20
    while len(list(folder.glob("begun-*"))) < lab.team.world_size:
        assert time.monotonic() < end, "the ranks did not begin to train"
        time.sleep(0.01)
    begin = time.monotonic()
    fault()
    outcomes = lab.team.wait(deadline_s, ignore=dead, patient=True)
    found = {}
    for outcome in outcomes:
        if outcome.rank not in dead:
            assert outcome.ok and outcome.value, outcome
            *said, at = outcome.value
            found[outcome.rank] = (*said, at - begin)
    return found


def ends_in_order(lab, ranks):
    """A survivor can exit at once."""
    begin = Stopwatch()
    for rank in ranks:
        lab.team._connections[rank].send((exits.__module__, exits.__name__, {}))
    outcomes = lab.team.wait(10, ignore=[r for r in range(lab.team.world_size) if r not in ranks], patient=True)
    assert all(outcomes[rank].ended == "exit 0" for rank in ranks), outcomes
    assert begin.seconds() < 5


@pytest.mark.parametrize("host", [0, 1], ids=["the store's host", "another host"])
def test_a_host_that_is_killed_is_named_at_once(hosts, host):
    with hosts(2, 2) as lab:
        dead, alive = lab.ranks_of(host), lab.ranks_of(1 - host)
        for kind, rank, name, text, seconds in survivors_of(lab, lambda: lab.kill(host), dead).values():
            assert kind == "CommError" and rank in dead and name == f"host{host}" and f"host{host}" in text
            assert f"rank {rank}" in text and seconds < AT_ONCE_S, (text, seconds)
        ends_in_order(lab, alive)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=long_form), 1, 2, pytest.param(3, marks=long_form)])
def test_one_rank_that_is_killed_is_named_on_every_host(hosts, victim):
    with hosts(2, 2) as lab:
        fault = lambda: lab.team.signal(victim, signal.SIGKILL)  # noqa: E731
        for kind, rank, name, text, seconds in survivors_of(lab, fault, [victim]).values():
            assert kind == "CommError" and rank == victim and name == f"host{lab.host_of(victim)}", text
            assert f"rank {victim} (pid {lab.team.pids[victim]} on host" in text and "all_reduce" in text, text
            assert seconds < AT_ONCE_S, (text, seconds)


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=long_form)])
def test_a_child_that_outlives_its_rank_hides_nothing(hosts, victim):
    """Ranks that are connected to other hosts close those sockets too."""
    with hosts(2, 1) as lab:
        fault = lambda: lab.team.signal(victim, signal.SIGKILL)  # noqa: E731
        for kind, rank, name, text, seconds in survivors_of(lab, fault, [victim], parent=victim).values():
            assert kind == "CommError" and rank == victim and name == f"host{lab.host_of(victim)}", text
            assert seconds < AT_ONCE_S, (text, seconds)


def test_a_rank_that_exits_is_named_on_every_host(hosts):
    with hosts(2, 1) as lab:
        fault = lambda: lab.team.signal(2, signal.SIGUSR2)  # noqa: E731
        for kind, rank, name, text, seconds in survivors_of(lab, fault, [2], body=exits_when_told).values():
            assert kind == "CommError" and (rank, name) == (2, "host1"), text
            assert seconds < AT_ONCE_S, (text, seconds)
