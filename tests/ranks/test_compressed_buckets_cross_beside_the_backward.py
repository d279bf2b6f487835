"""Law: between hosts a compressed bucket travels during the backward, with the bits of buckets that wait for its end.

Ranks of one machine are told their host, as in test_hosts_compress_between_them.py.
"""

import gc
import os
import signal
import threading
import time
import weakref

import internals
import pytest
import shardwright as sw
import torch
from harness import RanksFailed, gather, on_every_rank, same_everywhere
from internals import comm_thread as bucket_thread
from internals import host_backend, levels
from models import Mlp
from oracle.fold import bits_equal
from peer import batch
from test_hosts_compress_between_them import COMPRESSORS, hosts_of, on_hosts

CAP = {"bucket_cap_mb": 0.001}


class Sometimes(torch.nn.Module):
    """A model whose head's gradient comes first. A rank may skip the middle, fail after it, or die there."""

    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = torch.nn.Linear(7, 40), torch.nn.Linear(40, 40), torch.nn.Linear(40, 33)

    def forward(self, x, skips=False, then=None):
        x = torch.tanh(self.body(x))
        if then is not None:
            x.register_hook(then)
        return self.head(x if skips else self.middle(x))


class Gated(Sometimes):
    """The same with a gradient between the middle and the failure: it sends the bucket that the middle completed."""

    def __init__(self):
        super().__init__()
        middle, head = self.middle, self.head
        del self.middle, self.head
        self.gate, self.middle, self.head = torch.nn.Linear(40, 40), middle, head

    def forward(self, x, skips=False, then=None):
        x = torch.tanh(self.body(x))
        if then is not None:
            x.register_hook(then)
        return self.head(x if skips else self.middle(self.gate(x)))


class Normed(torch.nn.Module):
    """A model whose backward communicates with other ranks while the head's bucket is in flight."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = torch.nn.Linear(7, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 33)

    def forward(self, x, skips=False):
        return self.head(self.norm(self.body(x)))


def made(rank, shape, world_size, compress, module=Sometimes, zero=0, **options):
    torch.manual_seed(0)
    with on_hosts(hosts_of(shape, world_size)) as group:
        module = sw.SyncBatchNorm.convert_sync_batchnorm(module(), group)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        options = {**CAP, "timeout_s": 20, **options}
        return sw.wrap(module, optimizer, process_group=group, compress=compress, zero=zero, **options)


def at_the_end(monkeypatch):
    """Make buckets wait for the end of the backward."""
    monkeypatch.setattr(host_backend, "leased_levels", lambda group: (levels.levels_of(group), None))


def train(rank, model, optimizer, steps=4, skips=lambda step: False):
    for step in range(steps):
        model(batch(rank, 8, 7, step=step), skips(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.module.parameters()]


def early(model):
    return sw.stats(model)["models"][0]["buckets_early"]


def wait_until(condition, within_s=5.0):
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank(at_least=3)
def test_the_bits_are_those_of_buckets_that_wait(rank, world_size, name, zero):
    after, sent = [], []
    for waits in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if waits:
                at_the_end(monkeypatch)
            model, optimizer = made(rank, "2+1", world_size, COMPRESSORS[name], zero=zero)
        after.append(train(rank, model, optimizer))
        sent.append(sw.stats(model)["models"][0])
        state = model.compression_state
        assert state is None or state.iter == 4
    assert sent[0]["buckets_early"] == 0 and sent[1]["buckets_early"] == 9  # three in each of three rounds
    assert sent[0]["wire_bytes"] == sent[1]["wire_bytes"]
    assert sent[0]["bucket_wire_bytes"] == sent[1]["bucket_wire_bytes"]
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)
    assert same_everywhere([*after[1]])


@pytest.mark.parametrize("name", ["bf16", "int4", "powersgd"])
@on_every_rank(at_least=3)
def test_ranks_may_pass_on_different_buckets(rank, world_size, name):
    """A parameter that one rank skipped waits for the end. One that no rank used keeps its bits and its error."""
    skips = lambda step: rank == step % world_size or step == 3  # noqa: E731
    after = []
    for waits in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if waits:
                at_the_end(monkeypatch)
            model, optimizer = made(rank, "1+1+1", world_size, COMPRESSORS[name])
        after.append(train(rank, model, optimizer, steps=5, skips=skips))
    assert len(set(gather(early(model)))) > 1
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)


@pytest.mark.parametrize("name", ["bf16", "int4", "powersgd"])
@on_every_rank(at_least=3)
def test_sums_on_accumulated_averages_and_local_ones_are_the_same(rank, world_size, name):
    after = []
    for waits in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if waits:
                at_the_end(monkeypatch)
            model, optimizer = made(rank, "1+2", world_size, COMPRESSORS[name], transport="staged")
        for step in range(4):
            if step == 2:
                with model.no_sync():
                    model(batch(rank, 8, 7, step=9)).square().mean().backward()
            model(batch(rank, 8, 7, step=step)).square().mean().backward()  # on top of the accumulated mean
        after.append([p.grad.clone() for p in model.module.parameters()])
    assert early(model) > 0
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)


@on_every_rank(at_least=3)
def test_a_backward_that_communicates_itself_overlaps(rank, world_size):
    after = []
    for waits in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if waits:
                at_the_end(monkeypatch)
            model, optimizer = made(rank, "2+1", world_size, COMPRESSORS["bf16"], module=Normed)
        assert isinstance(model.module.norm, sw.SyncBatchNorm)
        after.append(train(rank, model, optimizer))
    assert early(model) > 0
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("name", ["bf16", "int4", "powersgd"])
@on_every_rank(at_least=3)
def test_a_backward_that_raises_leaves_all_ranks_in_step(rank, world_size, name, in_flight):
    model, optimizer = made(rank, "2+1", world_size, COMPRESSORS[name], module=(Sometimes, Gated)[in_flight - 1])
    train(rank, model, optimizer, steps=2)
    before, victim = early(model), world_size - 1

    def fails(gradient):
        raise ZeroDivisionError

    loss = model(batch(rank, 8, 7, step=2), False, fails if rank == victim else None).square().mean()
    if rank == victim:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        # the head; the middle too where a gradient follows it, for which it waits
        assert early(model) - before == in_flight
        if model.compression_state is not None:
            with pytest.raises(sw.Error, match="state_dict: rank .* has buckets in flight of a backward"):
                model.compression_state.state_dict()
    else:
        with pytest.raises(sw.Error, match=f"rank {victim} .*left a backward unfinished"):
            loss.backward()
    optimizer.zero_grad()
    after = train(rank, model, optimizer, steps=3)
    assert same_everywhere([*after])
    assert all(bool(p.isfinite().all()) for p in after)
    assert len(sw.stats(model)["models"][0]["bucket_wire_bytes"]) == 2 + in_flight
    state = model.compression_state
    assert same_everywhere(state and state.iter)  # the abandoned round counts if its last bucket was exchanged


@pytest.mark.parametrize("initial", [True, False], ids=["over all ranks", "over active ranks"])
@on_every_rank(at_least=3)
def test_joined_ranks_take_part(rank, world_size, initial):
    after = []
    for waits in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if waits:
                at_the_end(monkeypatch)
            model, optimizer = made(rank, "2+1", world_size, COMPRESSORS["int4"])
        with model.join(divide_by_initial_world_size=initial):
            train(rank, model, optimizer, steps=2 + rank)
        after.append([p.detach().clone() for p in model.module.parameters()])
    assert same_everywhere([*after[1]])
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)


@on_every_rank(at_least=3)
def test_a_hook_that_fails_raises_at_the_end_of_the_backward_and_no_thread_stays(rank, world_size):
    model, optimizer = made(rank, "1+1+1", world_size, COMPRESSORS["int4"])
    train(rank, model, optimizer, steps=1)
    state = model.compression_state
    good = state.state_dict()
    state.load_state_dict({**good, "parameters": {"other.weight": {"error": torch.zeros(3)}}})
    loss = model(batch(rank, 8, 7)).square().mean()
    with pytest.raises(sw.Error, match="the loaded state belongs to another model"):
        loss.backward()
    state.load_state_dict(good)
    optimizer.zero_grad()
    after = train(rank, model, optimizer)  # the failure is equal on all ranks, so they continue
    assert same_everywhere([*after])


@on_every_rank(at_least=3)
def test_leased_communicators_are_reused(rank, world_size):
    torch.manual_seed(0)
    count = lambda: sum(thread.name == "shardwright buckets" for thread in threading.enumerate())  # noqa: E731
    gc.collect()
    wait_until(lambda: count() == 0)
    with on_hosts(hosts_of("2+1", world_size)) as group:
        both = [sw.wrap(Mlp(), process_group=group, compress=sw.Bf16(), timeout_s=20) for _ in range(2)]
        for model in both:
            for step in range(2):
                model(batch(rank, 8, 7, step=step)).square().mean().backward()
        host_group = internals.replica(both[0]).group
        assert count() == 2 and len(levels._joined[host_group]) == 3  # exchanges without a thread share one
        ended = [weakref.ref(model) for model in both]
        del both, model
        gc.collect()
        assert all(each() is None for each in ended)
        wait_until(lambda: count() == 0)
        again = sw.wrap(Mlp(), process_group=group, compress=sw.Bf16(), timeout_s=20)
        again(batch(rank, 8, 7)).square().mean().backward()
        assert len(levels._joined[host_group]) == 3


class SlowRunner:
    def job(self, bucket, is_last, is_early):
        return lambda: time.sleep(0.4)

    def finish_early(self, buckets):
        pass


class Alone:
    rank, timeout_s, warn_after_s = 0, 0.05, 0.0

    def __init__(self):
        self.ended = ""

    def abort(self, message):
        self.ended = message


def test_the_wait_has_a_deadline(monkeypatch):
    monkeypatch.setattr(bucket_thread, "_GRACE_S", 0.0)
    comm = Alone()
    thread = bucket_thread.BucketThread(SlowRunner(), comm, "Mlp", None)
    thread(0, True, True)
    with pytest.raises(sw.CommTimeoutError, match=r"rank 0: .* of Mlp was not exchanged within 0.05 s"):
        thread.wait()
    assert "within 0.05 s" in comm.ended


@on_every_rank(at_least=3, spoils=True)
def dies(rank, world_size, where):
    model, optimizer = made(rank, "1+1+1", world_size, COMPRESSORS["powersgd"])
    train(rank, model, optimizer, steps=2)

    def kill(*_):
        if where == "exchange":
            time.sleep(0.5)  # all ranks have reached the end of their backward
        os.kill(os.getpid(), signal.SIGKILL)

    victim, then = world_size - 1, None
    if rank == victim:
        then = kill if where == "backward" else None
        if where == "exchange":
            internals.replica(model).compression[1]._all_gather = kill
    loss = model(batch(rank, 8, 7, step=2), False, then).square().mean()
    start_s = time.monotonic()
    try:
        loss.backward()
    except sw.CommError as error:
        return error.rank, str(error), time.monotonic() - start_s
    return None


@pytest.mark.parametrize("where", ["backward", "exchange"])
def test_a_rank_that_dies_is_named(teams, where):
    with pytest.raises(RanksFailed) as caught:
        teams.run(3, dies.body, spoils=True, deadline_s=30, arguments={"where": where})
    for outcome in caught.value.outcomes:
        if outcome.rank == 2:
            assert "SIGKILL" in (outcome.ended or "")
            continue
        assert outcome.ok, outcome.trace
        culprit, text, seconds = outcome.value
        assert culprit == 2 and "rank 2" in text and seconds < 5, outcome.value
