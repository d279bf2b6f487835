"""Laws of waiting across hosts: a late rank is a warning on every other rank and nothing more. At the deadline all
ranks name a rank that never comes, by rank and host, also on hosts that wait for another rank of its host.
"""

import logging
import pathlib
import signal
import time

import pytest
import torch
from harness import LONG, RanksFailed, Stopwatch, gather
from peer import PEER, engine, sw
from test_a_dead_host_is_named import ends_in_order

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch names no rank")
long_form = pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")

WARN_AFTER_S = 0.3
TIMEOUT_S = 1.2
#: past the deadline: whoever is asked has 0.3 s to answer, on a machine with fewer cores than ranks
LATE_S = 2.0


def warned(timeout_s, **options):
    """Return a wrapped layer whose communicator warns early, and the list of the lines that it logs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardwright").addHandler(handler)
    torch.manual_seed(0)
    return sw.wrap(torch.nn.Linear(8, 8), timeout_s=timeout_s, warn_after_s=WARN_AFTER_S, **options), lines


def backward(model, rank):
    model.zero_grad()
    model(torch.full((2, 8), rank + 1.0)).sum().backward()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def trains_until_an_error(rank, world_size, begun, **options):
    """Return the error, the time from the last step's end to it, and the log. All ranks train once there is a file
    `begun`.
    """
    model, lines = warned(**{"timeout_s": TIMEOUT_S, **options})
    backward(model, rank)
    gather(None)
    if rank == 0:
        pathlib.Path(begun).touch()
    while True:
        since = Stopwatch()
        try:
            backward(model, rank)
        except engine.CommError as error:
            return type(error).__name__, error.rank, error.host, str(error), (since.elapsed(), since.seconds()), lines
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [1, 2, *(pytest.param(rank, marks=long_form) for rank in (0, 3))])
def test_a_stopped_rank_is_warned_about_and_named_at_the_deadline(hosts, victim, tmp_path):
    """Rank 1 shares a host with the carrier for which the others wait. Rank 2 is a carrier."""
    with hosts(2, 2) as lab:
        survivors = [rank for rank in range(4) if rank != victim]
        lab.team.start(trains_until_an_error, begun=str(tmp_path / "begun"))
        wait_for(tmp_path / "begun")
        time.sleep(0.3)
        lab.team.signal(victim, signal.SIGSTOP)
        outcomes = lab.team.wait(15, ignore=[victim], patient=True)
        for rank in survivors:
            if not outcomes[rank].ok:
                raise RanksFailed(outcomes)
            kind, culprit, host, text, seconds, lines = outcomes[rank].value
            assert kind == "CommTimeoutError" and (culprit, host) == (victim, f"host{lab.host_of(victim)}"), text
            assert f"rank {victim} (pid {lab.team.pids[victim]} on host {host})" in text, text
            assert TIMEOUT_S - 0.1 < seconds[0] and seconds[1] < TIMEOUT_S + LATE_S, (seconds, text)
            near = lab.host_of(rank) == lab.host_of(victim)
            words = [f"rank {victim}", "(stopped)"] if near else [host]
            assert lines and all(word in lines[0] for word in words), (rank, lines)
        ends_in_order(lab, survivors)


@pytest.mark.parametrize(
    "victim", [1, pytest.param(3, marks=long_form)]
)  # not carriers: they are their hosts' only voice
def test_a_rank_that_is_stopped_for_longer_than_silent_s_is_an_error_on_all_hosts(hosts, victim, tmp_path):
    with hosts(2, 2) as lab:
        survivors = [rank for rank in range(4) if rank != victim]
        lab.team.start(trains_until_an_error, begun=str(tmp_path / "begun"), timeout_s=30.0, silent_s=0.8)
        wait_for(tmp_path / "begun")
        time.sleep(0.3)
        lab.team.signal(victim, signal.SIGSTOP)
        outcomes = lab.team.wait(15, ignore=[victim], patient=True)
        for rank in survivors:
            if not outcomes[rank].ok:
                raise RanksFailed(outcomes)
            kind, culprit, host, text, seconds, _ = outcomes[rank].value
            assert kind == "CommError" and (culprit, host) == (victim, f"host{lab.host_of(victim)}"), text
            assert f"rank {victim} has been stopped for" in text, text
            assert 0.7 < seconds[0] and seconds[1] < 0.8 + LATE_S, (seconds, text)
        ends_in_order(lab, survivors)


def evaluates_now_and_then(rank, world_size, late_s):
    """Ranks are late in turns, for longer than the silence after which the wire is probed."""
    model, lines = warned(30.0)
    backward(model, rank)
    for late in range(world_size):
        if rank == late:
            time.sleep(late_s)
        backward(model, rank)
    mean = (world_size + 1) / 2
    assert torch.equal(model.module.weight.grad, torch.full((8, 8), 2 * mean))
    return gather(lines)


def test_a_rank_that_evaluates_for_long_is_a_warning_and_nothing_more(hosts):
    with hosts(2, 1) as lab:
        logs = lab.team.run(evaluates_now_and_then, late_s=8.0 if LONG else 0.5)[0]
    for rank, lines in enumerate(logs):
        others = [other for other in range(3) if other != rank]
        # of another host, a rank may not know which of that host's ranks it is
        assert len(lines) >= len(others) and all(f"rank {rank} has waited" in line for line in lines), logs
        assert all("the deadline is 30.0 s" in line for line in lines), logs
    assert any("for rank 1" in line for line in logs[0]) and any("for rank 2" in line for line in logs[0]), logs


def goes_on(rank, world_size, begun):
    model, lines = warned(30.0)
    for step in range(120):
        backward(model, rank)
        if rank == 0 and step == 10:
            pathlib.Path(begun).touch()
        time.sleep(0.005)
    return gather(lines)


def test_a_rank_that_was_stopped_for_a_while_goes_on(hosts, tmp_path):
    with hosts(2, 1) as lab:
        lab.team.start(goes_on, begun=str(tmp_path / "begun"))
        wait_for(tmp_path / "begun")
        lab.team.signal(2, signal.SIGSTOP)
        time.sleep(0.6)
        lab.team.signal(2, signal.SIGCONT)
        outcomes = lab.team.wait(20)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(outcomes)
        for lines in outcomes[0].value[:2]:
            assert lines and "for rank 2" in lines[0] and "host1" in lines[0], lines
