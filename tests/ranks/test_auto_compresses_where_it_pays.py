"""Law: headroom() says the same on every rank, its parts add up, and it asks for a compressor only where the network is slow;
compress="auto" on one host is no compression, in one line."""

import logging

import pytest
import torch
from harness import on_every_rank, same_everywhere
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
def test_auto_on_one_host_is_none_and_says_so_in_one_line(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shardwright")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = made(compress="auto")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    said = [line for line in lines if line.startswith("compress='auto'")]
    assert len(said) == (rank == 0) and all("none" in line and "one host" in line for line in said)
    assert "compress" not in sw.stats()["models"][-1] and model.compression_state is None


@on_every_rank()
def test_misuse_is_named(rank, world_size):
    model = made()
    with pytest.raises(ValueError, match="repeat must be at least 3, got 1"):
        sw.headroom(model, lambda: None, repeat=1)
    with pytest.raises(ValueError, match="bandwidth must be above 0 bytes a second, got 0"):
        sw.headroom(model, lambda: None, bandwidth=0)
    with pytest.raises(sw.Error, match="a model that sw.wrap made"):
        sw.headroom(torch.nn.Linear(1, 1), lambda: None)
    with pytest.raises(sw.Error, match="has a compressor"):
        sw.headroom(made(compress=sw.Fp16()), lambda: None)
    with pytest.raises(TypeError, match="compress must be None, 'auto', sw.Fp16"):
        made(compress="fp16")
