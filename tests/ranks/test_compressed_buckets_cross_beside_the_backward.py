"""Law: between hosts a compressed bucket travels during the backward at every stage, with the bits of buckets that wait
for its end.

Ranks of one machine are told their host, as in test_hosts_compress_between_them.py.
"""

import gc
import os
import signal
import time
import weakref

import pytest
import shardwright as sw
import torch
from harness import RanksFailed, Stopwatch, gather, on_every_rank, same_everywhere
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


def at_the_end(model):
    """Make buckets wait for the end of the backward: a user's hook behind ours might change each gradient."""
    for parameter in model.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)


def train(rank, model, optimizer, steps=4, skips=lambda step: False):
    for step in range(steps):
        model(batch(rank, 8, 7, step=step), skips(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.module.parameters()]


def early(model):
    return sw.stats(model)["models"][0]["buckets_early"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank(at_least=3)
def test_the_bits_are_those_of_buckets_that_wait(rank, world_size, name, zero):
    after, sent = [], []
    for waits in (True, False):
        model, optimizer = made(rank, "2+1", world_size, COMPRESSORS[name], zero=zero)
        if waits:
            at_the_end(model)
        after.append(train(rank, model, optimizer))
        sent.append(sw.stats(model)["models"][0])
        state = model.compression_state
        assert state is None or state.iter == 4
    # in each of three rounds: all but the last one, which no gradient follows; at zero >= 2 those that find a free slot in time
    early_at = sent[1]["buckets_early"]
    assert sent[0]["buckets_early"] == 0 and (early_at == 6 if zero < 2 else early_at >= 3), early_at
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
        model, optimizer = made(rank, "1+1+1", world_size, COMPRESSORS[name])
        if waits:
            at_the_end(model)
        after.append(train(rank, model, optimizer, steps=5, skips=skips))
    assert len(set(gather(early(model)))) > 1
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)


@pytest.mark.parametrize("name", ["bf16", "int4", "powersgd"])
@on_every_rank(at_least=3)
def test_sums_on_accumulated_averages_and_local_ones_are_the_same(rank, world_size, name):
    after = []
    for waits in (True, False):
        model, optimizer = made(rank, "1+2", world_size, COMPRESSORS[name])
        if waits:
            at_the_end(model)
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
        model, optimizer = made(rank, "2+1", world_size, COMPRESSORS["bf16"], module=Normed)
        if waits:
            at_the_end(model)
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
    else:
        with pytest.raises(sw.Error, match=f"rank {victim} .*left a backward unfinished"):
            loss.backward()
    optimizer.zero_grad()
    after = train(rank, model, optimizer, steps=3)
    assert same_everywhere([*after])
    assert all(bool(p.isfinite().all()) for p in after)
    assert len(sw.stats(model)["models"][0]["bucket_wire_bytes"]) == 2 + in_flight
    state = model.compression_state
    assert same_everywhere(state and state.iter)
    assert state is None or state.iter == 5  # the abandoned round does not count


@pytest.mark.parametrize("initial", [True, False], ids=["over all ranks", "over active ranks"])
@on_every_rank(at_least=3)
def test_joined_ranks_take_part(rank, world_size, initial):
    after = []
    for waits in (True, False):
        model, optimizer = made(rank, "2+1", world_size, COMPRESSORS["int4"])
        if waits:
            at_the_end(model)
        with model.join(divide_by_initial_world_size=initial):
            train(rank, model, optimizer, steps=2 + rank)
        after.append([p.detach().clone() for p in model.module.parameters()])
    assert same_everywhere([*after[1]])
    for mine, theirs in zip(*after):
        assert bits_equal(mine, theirs)


@pytest.mark.parametrize("name", ["int4", "powersgd"])
@on_every_rank(at_least=3)
def test_a_state_in_use_is_neither_saved_nor_loaded(rank, world_size, name):
    model, optimizer = made(rank, "1+1+1", world_size, COMPRESSORS[name])
    train(rank, model, optimizer, steps=2)
    state, caught = model.compression_state, []

    def saves(gradient):
        for call in (state.state_dict, lambda: state.scale_errors(2.0)):
            with pytest.raises(sw.Error, match="rank .* has buckets in flight of a backward that is not over"):
                call()
            caught.append(call)
        return gradient

    # the head's bucket leaves at the next gradient, which the middle brings; the hook runs behind it
    model(batch(rank, 8, 7), False, saves).square().mean().backward()
    assert len(caught) == 2
    assert state.state_dict()["iter"] == 3


@on_every_rank(at_least=3)
def test_a_model_that_is_dropped_ends(rank, world_size):
    model, optimizer = made(rank, "2+1", world_size, COMPRESSORS["int4"])
    train(rank, model, optimizer, steps=2)
    ended = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert ended() is None


@on_every_rank(at_least=3, spoils=True)
def dies(rank, world_size, where):
    model, optimizer = made(rank, "1+1+1", world_size, COMPRESSORS["powersgd"])
    train(rank, model, optimizer, steps=2)

    def kill(*_):
        if where == "exchange":
            time.sleep(0.5)  # the other ranks have reached the end of their backward
        os.kill(os.getpid(), signal.SIGKILL)

    victim, then = world_size - 1, None
    if rank == victim:
        then = kill if where == "backward" else None
        if where == "exchange":
            model.module.body.weight.register_hook(kill)  # the other buckets are on their way
    loss = model(batch(rank, 8, 7, step=2), False, then).square().mean()
    start = Stopwatch()
    try:
        loss.backward()
    except sw.CommError as error:
        return error.rank, str(error), start.seconds()
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
