"""Law: a forked child reads its parent's gradients and parameters, and its own writes stay private."""

import pytest
import torch
from harness import on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, compare_step, in_a_child, pair, sw, zero_grad

pytestmark = pytest.mark.skipif(PEER == "torch", reason="about the engine's memory")


def backward(model, rank, step):
    model(batch(rank, 4, 7, step=step)).square().mean().backward()


def scribble(wrapped, rank):
    """Try every way in which a child could write into its parent's gradients."""
    for parameter in wrapped.parameters():
        parameter.grad.fill_(7)
    assert all(bool((p.grad == 7).all()) for p in wrapped.parameters())
    try:
        backward(wrapped, rank, 1)  # autograd adds, and then the engine refuses
    finally:
        wrapped.zero_grad(set_to_none=False)


@on_every_rank()
@pytest.mark.parametrize("transport", ["pool", "staged"])
def test_what_a_child_writes_to_gradients_does_not_reach_its_parent(rank, world_size, transport):
    wrapped, naive = pair(Mlp, transport=transport, bucket_cap_mb=0.001)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    before = [p.grad.clone() for p in wrapped.parameters()]
    text = in_a_child(lambda: scribble(wrapped, rank))
    assert text.startswith("Error") and "fork" in text, text
    assert all(bits_equal(p.grad, old) for p, old in zip(wrapped.parameters(), before))
    zero_grad(wrapped, naive)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 2))


@on_every_rank()
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_a_child_writes_to_parameters_does_not_reach_its_parent(rank, world_size, zero):
    torch.manual_seed(0)
    model = Mlp()
    model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters()), zero=zero)
    backward(model, rank, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]

    def write():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        assert all(bool((p == 7).all()) for p in model.parameters())

    assert in_a_child(write) == ""
    model._replica.group.comm.barrier()
    assert all(bits_equal(p.detach(), old) for p, old in zip(model.parameters(), before))
    optimizer.zero_grad()
    backward(model, rank, 1)
    optimizer.step()


@on_every_rank()
def test_a_childs_child_has_what_the_child_wrote(rank, world_size):
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    first = next(iter(wrapped.parameters()))

    def write():
        first.grad.fill_(7)

        def look():
            assert bool((first.grad == 7).all())
            first.grad.fill_(8)

        assert in_a_child(look) == ""
        assert bool((first.grad == 7).all())

    assert in_a_child(write) == ""
    assert not bool((first.grad == 7).any())
