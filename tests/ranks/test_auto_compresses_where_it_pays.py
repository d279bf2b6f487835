"""Law: headroom() returns the same on every rank, its parts add up, and it names a compressor only on a slow network.
On one host compress="auto" is no compression, reported in one line."""

import copy
import logging

import internals
import pytest
import torch
from harness import on_every_rank, same_everywhere
from internals import process_group
from oracle.fold import bits_equal
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch has none")


def made(**options):
    torch.manual_seed(0)
    return sw.wrap(
        torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 64)), **options
    )


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_a_slow_network_pays_for_a_compressor_and_one_host_does_not(rank, world_size, zero):
    model = made(zero=zero)

    def backward():
        model(batch(rank, 4, 64)).square().mean().backward()

    before = [p.detach().clone() for p in model.parameters()]
    slow = sw.headroom(model, backward, repeat=3, bandwidth=1e6)
    assert same_everywhere(repr(slow))
    assert (slow.choice != "none") == (world_size > 1)
    assert abs(slow.step_s - slow.local_s - slow.exposed_s) < 1e-9
    assert [c.step_s for c in slow.candidates] == sorted(c.step_s for c in slow.candidates)
    if world_size > 1:
        assert slow.candidates[0].name == repr(sw.PowerSGD(rank=4)) and str(slow).startswith("compress: PowerSGD")
        bf16 = next(c for c in slow.candidates if c.name == "Bf16()")
        plain = sum(p.numel() for p in model.parameters()) * 4 * 2 * (world_size - 1) / world_size
        assert 0.49 * plain <= bf16.wire_bytes <= 0.52 * plain
    fast = sw.headroom(model, backward, repeat=3, bandwidth=1e15)
    assert fast.exposed_s < slow.exposed_s or world_size == 1
    assert all(bits_equal(a, b.detach()) for a, b in zip(before, model.parameters()))
    assert all(p.grad is None for p in model.parameters()) and model.require_backward_grad_sync


@on_every_rank()
def test_auto_on_one_host_is_none_and_logs_one_line(rank, world_size):
    with Lines() as said:
        model = made(compress="auto")
        at_first = len(said)
        # a copy has an engine of its own, made when it is first used
        copy.deepcopy(model)(batch(rank, 4, 64)).sum().backward()
    said = [line for line in said if line.startswith("compress='auto'")]
    assert at_first == (rank == 0) and len(said) == 2 * at_first
    assert all("none" in line and "one host" in line for line in said)
    assert "compress" not in sw.stats()["models"][-1] and model.compression_state is None


class Lines(logging.Handler):
    """A handler that collects the library's log while its context is open."""

    def __init__(self):
        super().__init__()
        self.said = []
        self._logger = logging.getLogger("shardwright")

    def emit(self, record):
        self.said.append(record.getMessage())

    def __enter__(self):
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self.said

    def __exit__(self, *_):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def train(model, rank, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(rank, 4, 64, step=step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.module.parameters()]


def between_hosts(rank, world_size):
    with Lines() as said:
        model = made(compress="auto", timeout_s=20)
        train(model, rank, 4)
        assert internals.replica(model).compression is None and not said
        model.zero_grad()
        with model.no_sync():  # not a round
            model(batch(rank, 4, 64)).square().mean().backward()
        assert internals.replica(model).compression is None
        train(model, rank, 2, first=4)
        compression = internals.replica(model).compression
    assert len(said) == (rank == 0), said
    assert all("waits" in line and "GB/s" in line for line in said)
    assert compression is not None and same_everywhere(compression[0])
    assert not said or said[0].startswith(f"compress='auto': {compression[0]}, because")
    assert sw.stats()["models"][-1]["step_wire_bytes"] < 64 * 1024 * 2 * 4
    assert same_everywhere([*train(model, rank, 2, first=6)])


def test_between_hosts_it_chooses_after_five_rounds(hosts):
    with hosts(1, 1, rate="50mbit") as lab:
        lab.team.run(between_hosts)


@on_every_rank(at_least=3)
def test_without_a_wait_it_is_none(rank, world_size):
    group = torch.distributed.new_group(range(world_size))
    process_group._forced_hosts = [0] * (world_size - 1) + [1]
    try:
        model = made(compress="auto", process_group=group, timeout_s=20)
        plain = made(process_group=group, timeout_s=20)
    finally:
        process_group._forced_hosts = None
    watcher = internals.replica(model).gradients.watcher
    with Lines() as said:
        for step in range(6):
            train(model, rank, 1, first=step)
            watcher.waits[:] = [0.0] * len(watcher.waits)
    assert len(said) == (rank == 0) and all(line.startswith("compress='auto': none, because") for line in said)
    assert internals.replica(model).compression is None and internals.replica(model).gradients.watcher is None
    train(plain, rank, 6)
    assert all(bits_equal(a.detach(), b.detach()) for a, b in zip(model.parameters(), plain.parameters()))


@on_every_rank(at_least=3)
def test_joined_ranks_decide_too(rank, world_size):
    group = torch.distributed.new_group(range(world_size))
    process_group._forced_hosts = [0] * (world_size - 1) + [1]
    try:
        model = made(compress="auto", process_group=group, timeout_s=20)
    finally:
        process_group._forced_hosts = None
    with model.join():
        train(model, rank, 8 if rank == 0 else 3)
    assert internals.replica(model).gradients.watcher is None
    assert same_everywhere(repr(internals.replica(model).compression and internals.replica(model).compression[0]))
    assert same_everywhere([*model.module.parameters()])


@on_every_rank()
def test_misuse_is_named(rank, world_size):
    model = made()
    with pytest.raises(ValueError, match="repeat must be at least 3, got 1"):
        sw.headroom(model, lambda: None, repeat=1)
    with pytest.raises(ValueError, match="bandwidth must be above 0 bytes a second, got 0"):
        sw.headroom(model, lambda: None, bandwidth=0)
    with pytest.raises(sw.Error, match="a model that sw.wrap returned"):
        sw.headroom(torch.nn.Linear(1, 1), lambda: None)
    with pytest.raises(sw.Error, match="has a compressor"):
        sw.headroom(made(compress=sw.Fp16()), lambda: None)
    with pytest.raises(TypeError, match="compress must be None, 'auto', sw.Fp16"):
        made(compress="fp16")
