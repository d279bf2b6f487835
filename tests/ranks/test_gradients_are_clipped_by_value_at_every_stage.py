"""Law: torch's clip_grad_value_ clips averaged gradients with the same bits at every stage. The norm has the gradients'
precision.
"""

import pytest
import torch
from harness import on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


def train(rank, zero, foreach=None, dtype=torch.float32):
    torch.manual_seed(0)
    module = Mlp().to(dtype)
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), zero=zero)
    norms = []
    for step in range(3):
        model(batch(rank, 6, 7, step=step).to(dtype)).square().sum().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5, foreach=foreach)
        if step == 1:  # what comes on top of a clipped mean is clipped with it
            model(batch(rank, 6, 7, step=7).to(dtype)).square().sum().backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5, foreach=foreach)
        found = sw.full_gradients(model)
        assert max(each.abs().max() for each in found.values()) == 0.5
        norms.append(sw.clip_grad_norm_(model, 1e9))
        optimizer.step()
        optimizer.zero_grad()
    return norms, sw.full_state_dict(model)


@pytest.mark.parametrize("foreach", [None, True, False])
@on_every_rank()
def test_all_stages_end_with_the_same_bits(rank, world_size, foreach):
    norms, expected = train(rank, 0, foreach=foreach)
    for zero in (1, 2, 3):
        found_norms, found = train(rank, zero, foreach=foreach)
        assert all(bits_equal(a, b) for a, b in zip(found_norms, norms, strict=True))
        assert all(bits_equal(found[name], each) for name, each in expected.items()), zero
    assert same_everywhere(list(expected.values()))


@on_every_rank()
def test_the_norm_of_doubles_is_a_double(rank, world_size):
    expected, _ = train(rank, 0, dtype=torch.float64)
    assert all(norm.dtype == torch.float64 for norm in expected)
    assert any(norm != norm.float() for norm in expected)
    for zero in (1, 2, 3):
        assert train(rank, zero, dtype=torch.float64)[0] == expected


@on_every_rank()
def test_a_clamp_that_no_slice_can_answer_is_refused(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=2)
    model(batch(rank, 6, 7)).square().sum().backward()
    gradient = next(model.parameters()).grad
    for bounds in ({"min": 0.1}, {"max": -0.1}):
        with pytest.raises(sw.Error, match="clamped by numbers"):
            gradient.clamp_(**bounds)
    with model.no_sync():
        model(batch(rank, 6, 7)).square().sum().backward()
    with pytest.raises(sw.Error, match="not averaged yet"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
