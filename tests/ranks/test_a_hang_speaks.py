"""Law: a rank that waits for long says for which rank it waits: rank, process, host, collective, and what that process does; then at
doubling intervals. The lowest waiting rank says what the others wait for. A call that only some ranks make says so.
"""

import collections
import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time

import internals
import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, Stopwatch, gather, in_turn, on_every_rank
from peer import PEER, engine, sw
from test_a_dead_rank_is_named import wait_for_state

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch says nothing")

WARN_AFTER_S = 0.2
LATE_S = 1.3
#: what the absent rank does, and the word for it
ABSENCES = {"sleep": "sleeping", "stop": "stopped", "spin": "running"}


def lines_of():
    """Return the list of the lines that the package logs from now on."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("shardwright").addHandler(handler)
    return lines


def be_absent(how):
    end_s = time.monotonic() + LATE_S
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleep":
        time.sleep(LATE_S)
    while time.monotonic() < end_s:
        sum(range(1000))


def one_is_absent(rank, world_size, how, zero):
    lines = lines_of()
    model = sw.wrap(torch.nn.Linear(8, 8), zero=zero, timeout_s=60.0, warn_after_s=WARN_AFTER_S)
    model(torch.ones(2, 8)).sum().backward()
    gather(None)
    lines.clear()
    if rank == 1:
        be_absent(how)
    model(torch.ones(2, 8)).sum().backward()
    return lines


@pytest.mark.parametrize("how, zero", [*zip(ABSENCES, (0, 2, 3)), *in_turn([("sleep", 1)], 0, 1)])
def test_a_hang_names_the_absent_rank_and_what_it_does(fresh_ranks, how, zero):
    with fresh_ranks(3) as team:
        team.start(one_is_absent, how=how, zero=zero)
        if how == "stop":
            wait_for_state(team.pids[1], "T")
            time.sleep(LATE_S)
            team.signal(1, signal.SIGCONT)
        outcomes = team.wait(40)
        pid = team.pids[1]
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    for rank in (0, 2):
        said = outcomes[rank].value
        told = [text for level, text in said if f"rank {rank} has waited" in text and level == "WARNING"]
        assert told and all(re.search(rf"for rank 1 \(pid {pid} on host [^)]+\) \(", text) for text in told), said
        assert any(f"({ABSENCES[how]})" in text for text in told), told
        assert any("Linear" in text for text in told), told
        assert len(told) <= 4, told  # at doubling intervals
    first = [text for _, text in outcomes[0].value]
    assert any(", and so does rank 2" in text for text in first), first
    assert not any("and so do" in text for _, text in outcomes[2].value), outcomes[2].value


@on_every_rank(at_least=3, spoils=True)
def test_a_rank_that_waits_for_another_reason_is_told_beside(rank, world_size):
    from test_a_dead_rank_is_named import host_comm

    lines = []
    comm = host_comm(rank, world_size, timeout_s=30, warn_after_s=WARN_AFTER_S, log=lines.append)
    comm.barrier("before")
    if rank == 1:
        time.sleep(LATE_S)
    comm.barrier("an evaluation")
    comm.warn_after_s = 0.0
    told = len(lines)
    gather(None)
    if rank == 1:
        time.sleep(0.5)
    comm.barrier("silence")
    assert len(lines) == told, lines
    assert rank == 1 or any("barrier 'an evaluation' for rank 1" in text for text in lines), lines
    assert rank or any(", and so do" in text for text in lines), lines


CALLS = [
    *"sw.full_gradients() sw.full_optimizer_state_dict() sw.full_parameters() sw.clip_grad_norm_() sw.save()".split(),
    *("sw.load_full_state_dict()", "load_state_dict() at zero=3", "optimizer.consolidate_state_dict()"),
    "Checkpointer.steps()",
]


def writes(model):
    with sw.full_parameters(model, writable=True):
        pass


def calls_alone(rank, world_size, name):
    from internals import host_group

    lines = lines_of()
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    inner = torch.optim.AdamW(module.parameters())
    zero = 3 if "parameters" in name or "zero=3" in name else 2
    deadline_s = 4.0 if name == "sw.save()" else 60.0  # a save takes the wrapper's own
    model, optimizer = sw.wrap(module, inner, zero=zero, timeout_s=deadline_s, warn_after_s=WARN_AFTER_S)
    model(torch.ones(2, 64)).sum().backward()
    if "clip" not in name and "gradients" not in name:
        optimizer.step()
    weights = sw.full_state_dict(model)
    calls = {
        "sw.full_gradients()": lambda: sw.full_gradients(model),
        "sw.full_optimizer_state_dict()": lambda: sw.full_optimizer_state_dict(model, optimizer),
        "sw.full_parameters()": lambda: writes(model),
        "sw.clip_grad_norm_()": lambda: sw.clip_grad_norm_(model, 1.0),
        "sw.save()": lambda: sw.save(os.path.join(os.environ["SW_TEST_FOLDER"], "alone"), model, optimizer),
        "sw.load_full_state_dict()": lambda: sw.load_full_state_dict(model, {}),
        "load_state_dict() at zero=3": lambda: model.load_state_dict(weights),
        "optimizer.consolidate_state_dict()": lambda: optimizer.consolidate_state_dict(),
        "Checkpointer.steps()": lambda: checkpoints.steps(),
    }
    if "Checkpointer" in name:
        folder = os.path.join(os.environ["SW_TEST_FOLDER"], "steps")
        checkpoints = sw.Checkpointer(folder, model, optimizer, timeout_s=1.0)
    host_group(dist.group.WORLD, 1.0)  # not before: a busy machine may take longer for the calls that all ranks make
    lines.clear()
    gather(None)
    if rank == 1:
        time.sleep(5.5 if name == "sw.save()" else 2.5)
        return None
    with pytest.raises(engine.CommTimeoutError) as raised:
        calls[name]()
    return str(raised.value), [text for _, text in lines]


@pytest.mark.parametrize(
    "name",
    in_turn(CALLS, 0, 1),
)
def test_a_collective_that_some_ranks_call_alone_says_call_it_on_every_rank(fresh_ranks, name):
    with fresh_ranks(3) as team:
        said = team.run(calls_alone, name=name)
    remedy = f"{name} is collective: call it on every rank"
    for rank in (0, 2):
        text, lines = said[rank]
        assert "rank 1 (pid" in text and remedy in text and text.count("is collective") == 1, text
        assert any(remedy in line and "rank 1 (pid" in line for line in lines), lines


def test_ranks_that_have_not_come_are_named(monkeypatch):
    from internals import Line, Rendezvous, attempt_store

    lines, room = [], dist.HashStore()

    def meets(rank):
        meeting = Rendezvous(room, rank, 4, "here", 20, warn_after_s=WARN_AFTER_S, log=lines.append)
        meeting.meet(Line(rank, "", "here", "here", 1, "0x1", ""))

    threads = [threading.Thread(target=meets, args=(rank,)) for rank in range(4)]
    for rank in (0, 1, 2):
        threads[rank].start()
    time.sleep(3 * WARN_AFTER_S)
    threads[3].start()
    for thread in threads:
        thread.join(20)
    assert any("joining: rank 0 of 4 on host here has waited" in text and "for rank 3" in text for text in lines), lines

    monkeypatch.setattr(internals.attempt, "START_S", WARN_AFTER_S)
    said = lines_of()
    errors, store = {}, dist.HashStore()

    def starts(rank):
        try:
            attempt_store(store, rank, 4, 1.0)
        except TimeoutError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=starts, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert any(
        re.search(r"rank 0 of 4 has waited 0\.[2-9] s for ranks 2, 3, which have not come", text) for _, text in said
    ), said
    assert any("rank 1 of 4 has waited" in text for _, text in said), said
    assert errors[0] == errors[1] and "waited 1 s for ranks 2, 3, which have not come" in errors[0], errors


class Counting(dist.PrefixStore):
    """A rank's store, which counts its checks by the first part of the key."""

    def __init__(self, store):
        super().__init__("counted", store)
        self.checks = collections.Counter()

    def check(self, keys):
        self.checks[keys[0].split("/")[0]] += 1
        return super().check(keys)


def test_only_rank_0_asks_for_each_absent_rank(monkeypatch):
    """Law: while ranks are absent, a line costs rank 0 one call of the store per rank, and the others at most two."""
    from internals import Rendezvous, attempt

    world_size, shared, room, errors = 40, dist.HashStore(), dist.HashStore(), {}
    stores = [Counting(shared), Counting(shared)]
    rooms = [Counting(room), Counting(room)]
    monkeypatch.setattr(attempt, "START_S", WARN_AFTER_S)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)

    def starts(rank):
        try:
            attempt.attempt_store(stores[rank], rank, world_size, 1.0)
        except TimeoutError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=starts, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors[0] == errors[1] and "ranks 2, 3" in errors[0], errors
    assert stores[0].checks["came"] >= world_size - 1, stores[0].checks
    assert stores[1].checks["came"] == 0 and 0 < stores[1].checks["absent"] < 10, stores[1].checks

    meetings = [Rendezvous(rooms[rank], rank, world_size, "here", 1.0) for rank in (0, 1)]
    assert meetings[1]._absent() == "rank 0 or ranks that it waits for"
    said = [meeting._absent() for meeting in meetings]
    assert said[0] == said[1] and said[0].endswith("which have not come"), said
    assert rooms[0].checks["lines"] > 20 and rooms[1].checks["lines"] == 0, [each.checks for each in rooms]


def test_a_host_that_drops_packets_does_not_silence_joining(monkeypatch):
    """Law: one attempt to connect is short, so lines of the wait name rank and address, and the deadline holds."""
    from internals import Launch, process_group

    with socket.socket() as full, contextlib.ExitStack() as opened:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # and no accept: once the queue is full, the kernel drops what asks to connect
        port = full.getsockname()[1]
        for _ in range(8):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        monkeypatch.setattr(process_group, "START_S", WARN_AFTER_S)
        monkeypatch.setattr(process_group, "_ATTEMPT_S", WARN_AFTER_S)
        said, begun = lines_of(), Stopwatch()
        with pytest.raises(TimeoutError, match=f"rank 1 of 3 waited 2 s for rank 0, whose store at 127.0.0.1:{port}"):
            process_group._connect(Launch("torchrun", 1, 3, 1, "127.0.0.1", port), False, 2.0)
        assert begun.seconds() < 6
    lines = [text for _, text in said if f"127.0.0.1:{port}" in text]
    assert lines and "rank 1 of 3 has waited" in lines[0], said


def test_a_rank_that_cannot_start_a_thread_is_named_on_all(monkeypatch):
    from internals import Line, Rendezvous, attempt_store, process_group

    start, failing = threading.Thread.start, {"sw-join", "sw-try"}

    def refuse(self):
        if self.name in failing and threading.current_thread().name == "rank 1":
            raise RuntimeError("can't start new thread")
        start(self)

    errors, store, room = {}, dist.HashStore(), dist.HashStore()

    def joins(rank):
        for join in (
            lambda: Rendezvous(room, rank, 3, "here", 20).meet(Line(rank, "", "here", "here", 1, "0x1", "")),
            lambda: attempt_store(store, rank, 3, 20.0, process_group._try_threads()),
        ):
            try:
                join()
            except Exception as error:
                errors.setdefault(rank, []).append(f"{type(error).__name__}: {error}")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads = [threading.Thread(target=joins, args=(rank,), name=f"rank {rank}") for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors[0] == errors[1] == errors[2] and len(errors[0]) == 2, errors
    assert all("rank 1 " in text and "cannot join" in text and "ulimit -u" in text for text in errors[0]), errors


def test_an_option_that_is_no_time_is_refused():
    for value in (-1, "soon", True, float("nan")):
        with pytest.raises((TypeError, ValueError), match=r"warn_after_s must be None or 0 for never, or "):
            sw.wrap(torch.nn.Linear(2, 2), warn_after_s=value)
    for value in (None, 0, 0.5):
        sw.Options(warn_after_s=value)
