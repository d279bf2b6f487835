"""Law: a gradient that no backward of the module produced (torch.autograd.grad, `weight.grad +=` of zero-bubble
pipelines) is never stepped on as if it were averaged. It is an error on all ranks, or sw.average_gradients() gives it
the bits of a backward. Changes that users make to averaged gradients before the step (clipping, noise, scaling,
replacing, dropping) work as under torch's DistributedDataParallel.
"""

import itertools
import time

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Heads, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3 shared": {"zero": 3},
    "3 private": {"zero": 3, "share_parameters": False},
}
every_stage = pytest.mark.parametrize("stage", STAGES)
whole_gradients = pytest.mark.parametrize("stage", ["0", "1"])


def wrap(stage, build=Mlp):
    torch.manual_seed(0)
    module = build()
    return sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), **STAGES[stage])


def loss_of(model, rank, step=0):
    return model(batch(rank, 6, 7, step=step)).square().mean()


def plain(model, optimizer, rank, step=0):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(model, rank, step=0):
    """Set gradients without any hook."""
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss_of(model, rank, step), parameters), strict=True):
        p.grad = gradient


def bubbles(model, rank, step=0):
    """Run two microbatches of a zero-bubble pipeline with torch's own functions: first inputs, later weights."""
    from torch.distributed.pipelining import _backward  # 2 s in each process that collects tests

    parts = []
    for x in batch(rank, 6, 7, step=step).chunk(2):
        x = x.requires_grad_()
        loss = model(x).square().mean() / 2
        parts.append(_backward.stage_backward_input([loss], None, [x], model.parameters())[1])
    for groups in parts:
        _backward.stage_backward_weight(model.parameters(), groups)


def microbatches(model, rank, step=0):
    """Run the same microbatches by backwards."""
    for number, x in enumerate(batch(rank, 6, 7, step=step).chunk(2)):
        model.set_requires_gradient_sync(number == 1)
        (model(x).square().mean() / 2).backward()
    model.set_requires_gradient_sync(True)


def assert_weights(model, expected):
    found = sw.full_state_dict(model)
    assert all(bits_equal(value, expected[name]) for name, value in found.items())
    assert same_everywhere([*found.values()])


MADE = {"by hand": by_hand, "bubbles": bubbles}
made_by = pytest.mark.parametrize("how", MADE)


# refused -------------------------------------------------------------------------------------------------------------


@every_stage
@made_by
@on_every_rank(at_least=2, spoils=True)
def test_what_nobody_averaged_is_not_stepped_on(rank, world_size, stage, how):
    if how == "bubbles" and stage == "3 private":
        return  # torch's functions read parameters outside of a backward: refused there
    model, optimizer = wrap(stage)
    plain(model, optimizer, rank)
    before = sw.full_state_dict(model)
    MADE[how](model, rank, 1)
    with pytest.raises(
        engine.Error, match=r"parameter '0\.weight' has a gradient that no backward.*sw\.average_gradients"
    ) as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))
    if stage != "0":  # where the step itself told all ranks, training goes on
        assert_weights(model, before)
        optimizer.zero_grad()
        plain(model, optimizer, rank, 2)
        assert same_everywhere([*sw.full_state_dict(model).values()])
    gather(None)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "0"])
@on_every_rank(at_least=2, spoils=True)
def test_nor_after_the_wrapper_was_dropped(rank, world_size, stage):
    model, optimizer = wrap(stage)
    module = model.module
    del model
    loss_of(module, rank).backward()
    with pytest.raises(engine.Error, match=r"keep and call the module that sw\.wrap returned") as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))
    gather(None)


@whole_gradients
@on_every_rank(at_least=2, spoils=True)
def test_nor_what_was_added_to_gradients_that_were_zeroed_in_place(rank, world_size, stage):
    model, optimizer = wrap(stage)
    plain(model, optimizer, rank)
    loss_of(model, rank).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    bubbles(model, rank, 1)
    with pytest.raises(engine.Error, match=r"parameter '0\.weight' has a gradient that no backward"):
        optimizer.step()


@every_stage
@on_every_rank(at_least=2, spoils=True)
def test_what_one_rank_alone_set_is_told_to_all(rank, world_size, stage):
    model, optimizer = wrap(stage)
    plain(model, optimizer, rank)
    odd = rank == world_size - 1
    with pytest.raises(
        engine.Error, match=r"parameter '0\.weight' has a gradient that no backward.*sw\.average_gradients"
    ):  # noqa: PT012
        loss = loss_of(model, rank)
        if odd:
            parameters = list(model.parameters())
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = gradient
        optimizer.step()
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:  # a host that runs ahead of its GPU is told at a later call
            plain(model, optimizer, rank)
    gather(None)


@on_every_rank(at_least=2)
def test_nor_where_one_parameter_of_many_was_set(rank, world_size):
    """The other ranks' round does not average it."""
    model, optimizer = wrap("1", Heads)
    x = batch(rank, 6, 7)
    model(x, "left right").backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x, "left").backward()
    weight = model.module.right.weight
    with model.no_sync():
        (weight.grad,) = torch.autograd.grad(model(x, "right"), [weight])
    with pytest.raises(engine.Error, match=r"parameter 'right\.weight' has a gradient that no backward"):
        optimizer.step()
    gather(None)


# averaged by a call --------------------------------------------------------------------------------------------------


@every_stage
@made_by
@pytest.mark.parametrize("to_none", [True, False])
@on_every_rank()
def test_an_explicit_call_has_the_bits_of_a_backward(rank, world_size, stage, how, to_none):
    def train(model, optimizer, make):
        for step in range(3):
            make(model, rank, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return sw.full_state_dict(model)

    def averaged(model, rank, step):
        MADE[how](model, rank, step)
        sw.average_gradients(model)

    def backward(model, rank, step):
        if how == "bubbles":
            microbatches(model, rank, step)
        else:
            loss_of(model, rank, step).backward()

    if how == "bubbles" and (stage == "3 private" or (not to_none and STAGES[stage]["zero"] >= 2)):
        return  # parameters are read outside of a backward; a zeroed slice takes a backward's gradient and nothing else
    expected = train(*wrap(stage), backward)
    model, optimizer = wrap(stage)
    train(model, optimizer, averaged)
    assert_weights(model, expected)
    gather(None)


@on_every_rank()
def test_the_call_outside_of_its_place(rank, world_size):
    with pytest.raises(engine.Error, match="needs a wrapped module"):
        sw.average_gradients(Mlp())
    model, optimizer = wrap("0")
    sw.average_gradients(model)  # no gradient anywhere
    assert all(p.grad is None for p in model.parameters())
    seen = []

    def inside(gradient):
        with pytest.raises(engine.Error, match="outside of a backward"):
            sw.average_gradients(model)
        seen.append(True)

    output = model(batch(rank, 6, 7))
    output.register_hook(inside)
    output.sum().backward()
    assert seen
    gather(None)


@on_every_rank(at_least=2)
def test_ranks_that_lack_some_gradients_contribute_zeros(rank, world_size):
    model, _ = wrap("0")
    first, second = list(model.parameters())[:2]
    first.grad = torch.full_like(first, 3.0) if rank == 0 else None
    second.grad = torch.full_like(second, float(rank))
    sw.average_gradients(model)
    assert torch.allclose(first.grad, torch.full_like(first, 3 / world_size))
    assert torch.allclose(second.grad, torch.full_like(second, (world_size - 1) / 2))
    assert all(p.grad is None for p in list(model.parameters())[2:])
    gather(None)


# what users make of averaged gradients -------------------------------------------------------------------------------


def replaced(model, step):
    for p in model.parameters():
        p.grad = p.grad * 2 if p.grad is not None else None


def cloned(model, step):
    for p in model.parameters():
        p.grad = p.grad.clone() if p.grad is not None else None


def noisy(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)


def scaled(model, step):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def through_data(model, step):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data * 0.5


def dropped(model, step):
    list(model.parameters())[step % 2].grad = None


def projected(model, step):
    """Like gradient surgery: new tensors from several gradients."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum(g.square().sum() for g in found).sqrt()
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad / (total + 1)


CHANGES = [replaced, cloned, noisy, scaled, through_data, dropped, projected]


def changing(model, optimizer, rank, change, to_none):
    for step in range(4):
        model(batch(rank, 6, 7, step=step), ("left right", "left", "right", "left")[step]).backward()
        change(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("to_none", [True, False])
@on_every_rank()
def test_changes_between_backward_and_step_are_stepped_on(rank, world_size, change, to_none):
    expected = changing(*wrap("0", Heads), rank, change, to_none)
    torch.manual_seed(0)
    module = Heads()
    stock = torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    theirs = changing(stock, torch.optim.AdamW(module.parameters(), lr=1e-2), rank, change, to_none)
    for mine, other in zip(expected, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert same_everywhere(expected)
    found = changing(*wrap("1", Heads), rank, change, to_none)
    assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True))
    gather(None)


@whole_gradients
@on_every_rank()
def test_replaced_gradients_are_stepped_on_more_than_once(rank, world_size, stage):
    model, optimizer = wrap(stage)
    loss_of(model, rank).backward()
    replaced(model, 0)
    optimizer.step()
    optimizer.step()
    with model.no_sync(), torch.no_grad():
        loss_of(model, rank)
    optimizer.step()
    assert same_everywhere([p.detach() for p in model.parameters()])
    gather(None)


@whole_gradients
@on_every_rank()
def test_two_optimizers_of_one_module_step_at_their_own_pace(rank, world_size, stage):
    torch.manual_seed(0)
    module = Heads()
    body, heads = list(module.body.parameters()), [*module.left.parameters(), *module.right.parameters()]
    stock = torch.optim.SGD(heads, lr=0.1)
    model, optimizer = sw.wrap(module, torch.optim.SGD(body, lr=0.1), **STAGES[stage])
    other = sw.shard_optimizer(model, stock) if STAGES[stage]["zero"] else stock
    for step in range(4):
        model(batch(rank, 6, 7, step=step), "left right").backward()
        replaced(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            other.step()
            other.zero_grad()
    assert same_everywhere([p.detach() for p in module.parameters()])
    gather(None)


@whole_gradients
@on_every_rank()
def test_a_forward_for_metrics_between_backward_and_step(rank, world_size, stage):
    model, optimizer = wrap(stage)
    for step, to_none in itertools.product(range(2), (True, False)):
        loss_of(model, rank, step).backward()
        noisy(model, step)
        loss_of(model, rank, step + 10)  # with gradients, and no backward
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, rank, step + 20)
        optimizer.step()  # on zeros, or nothing
    assert same_everywhere([p.detach() for p in model.parameters()])
    gather(None)


@on_every_rank()
def test_steps_of_each_rank_for_itself_stay_possible_inside_no_sync(rank, world_size):
    model, optimizer = wrap("0")
    for step in range(2):
        with model.no_sync():
            by_hand(model, rank, step)
        optimizer.step()
        with model.no_sync():
            loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert world_size == 1 or not same_everywhere([p.detach() for p in model.parameters()])
    gather(None)


@every_stage
@on_every_rank(exactly=1)
def test_one_rank_has_nothing_to_average(rank, world_size, stage):
    if STAGES[stage]["zero"] >= 2:
        return  # a gradient is a slice there
    model, optimizer = wrap(stage)
    by_hand(model, rank)
    optimizer.step()
