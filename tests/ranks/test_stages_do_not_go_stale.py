"""Laws of order at zero >= 1: after wrapping again, loading, freezing, writing, dropping or failing, no old slice,
version or gradient is used as a current one.
"""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
every_stage = pytest.mark.parametrize("zero", [1, 2, 3])
sliced_gradients = pytest.mark.parametrize("zero", [2, 3])


def wrap(zero, build=Mlp, optimizer=None, **options):
    torch.manual_seed(0)
    module = build()
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(module.parameters())
    return sw.wrap(module, made, zero=zero, **options)


def backward(model, rank, step=0):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def step(model, optimizer, rank, number=0):
    backward(model, rank, number)
    optimizer.step()
    optimizer.zero_grad()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(left, right):
    return all(bits_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("clip", [None, "wrap", "ours", "torch"])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, sw.optim.AdamW], ids=["SGD", "AdamW", "ours"]
)
@on_every_rank()
def test_gradients_that_nobody_keeps_stay_where_they_are(rank, world_size, zero, clip, optimizer):
    model, made = wrap(
        zero, optimizer=lambda p: optimizer(p, lr=0.01), **({"clip_grad_norm": 0.1} if clip == "wrap" else {})
    )
    views = []
    for number in range(4):
        backward(model, rank, number)
        views.append([weakref.ref(p.grad) for p in model.parameters()])  # weak: not kept by the test itself
        if clip == "ours":
            sw.clip_grad_norm_(model, 0.1)
        elif clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
        made.zero_grad()
    assert all(now() is not None and now() is before() for now, before in zip(views[-1], views[0], strict=True))


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("second", [0, 1, 2, 3])
@on_every_rank()
def test_wrapping_again_at_another_stage(rank, world_size, first, second):
    found = []
    for stages in ((0, 0), (first, second)):
        model, optimizer = wrap(stages[0])
        step(model, optimizer, rank)
        backward(model, rank, 1)  # its gradients are left standing
        gather(None)
        module = sw.unwrap(model)
        fresh = torch.optim.SGD(module.parameters(), lr=0.1)
        again, fresh = sw.wrap(module, fresh, zero=stages[1])
        if stages[1]:
            with pytest.raises(engine.Error, match="earlier wrapper|steps on whole parameters"):
                optimizer.step()
        again.zero_grad()
        for number in (2, 3):
            step(again, fresh, rank, number)
        gather(None)
        found.append(values(again))
    assert equal(*found)


@on_every_rank(at_least=2)
def test_parameters_are_a_ranks_own_again_once_nobody_shares_them(rank, world_size):
    model, _ = wrap(3)
    module = sw.unwrap(model)
    before = values(module)
    gather(None)
    del model, _
    gc.collect()
    gather(None)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    gather(None)
    assert equal(values(module), [value + 1 for value in before])


@on_every_rank()
def test_an_optimizer_that_cannot_be_sliced_moves_nothing(rank, world_size):
    module = Mlp()
    marks = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ValueError, match="LBFGS"):
        sw.wrap(module, torch.optim.LBFGS(module.parameters()), zero=3)
    assert marks == [p.data_ptr() for p in module.parameters()]


@every_stage
@on_every_rank()
def test_loading_everything_inside_full_parameters(rank, world_size, zero):
    whole, optimizer = wrap(0)
    for number in range(2):
        step(whole, optimizer, rank, number)
    weights, state = copy.deepcopy(whole.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(whole, optimizer, rank, 5)
    model, sliced = wrap(zero)
    with sw.full_parameters(model, writable=True):
        model.module.load_state_dict(weights)
        sw.load_full_optimizer_state_dict(model, sliced, state)
    step(model, sliced, rank, 5)
    gather(None)
    assert equal(values(model), values(whole))


@every_stage
@on_every_rank()
def test_asking_for_state_between_unfreezing_and_the_forward(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        torch.manual_seed(0)
        module = Mlp()
        module[2].requires_grad_(False)
        model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), zero=stage)
        step(model, optimizer, rank)
        module[2].requires_grad_(True)
        optimizer.state_dict()
        sw.full_optimizer_state_dict(model, optimizer)
        for number in (1, 2):
            step(model, optimizer, rank, number)
        gather(None)
        found.append(values(model))
    assert equal(*found)


def low(dtype=torch.bfloat16):
    return Mlp().to(dtype)


@every_stage
@on_every_rank()
def test_masters_follow_what_is_written_to_parameters(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        model, optimizer = wrap(stage, build=low, optimizer=lambda p: sw.optim.AdamW(p, lr=1e-3))
        for number in range(2):
            model(batch(rank, 6, 7, step=number).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                with sw.full_parameters(model, writable=True), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(0.5)
        gather(None)
        found.append(values(model))
    assert equal(*found)


@every_stage
@on_every_rank()
def test_masters_and_moments_keep_their_dtype_when_loaded(rank, world_size, zero):
    model, optimizer = wrap(zero, build=low, optimizer=lambda p: sw.optim.AdamW(p, lr=1e-3))
    model(batch(rank, 6, 7).bfloat16()).float().square().mean().backward()
    optimizer.step()
    state = sw.full_optimizer_state_dict(model, optimizer)
    sw.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
    again = sw.full_optimizer_state_dict(model, optimizer)
    gather(None)
    assert {value.dtype for value in state["state"][0].values() if isinstance(value, torch.Tensor)} == {torch.float32}
    for key, entry in state["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert bits_equal(value, again["state"][key][name]), (key, name)


@every_stage
@on_every_rank()
def test_a_backward_over_a_step_is_seen_by_autograd(rank, world_size, zero):
    model, optimizer = wrap(zero)
    value = model(batch(rank, 6, 7)).square().mean()
    value.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    gather(None)


@sliced_gradients
@on_every_rank()
def test_a_model_that_is_dropped_leaves_no_memory(rank, world_size, zero):
    def mappings():
        with open("/proc/self/maps") as file:
            return sum("memfd:shardwright" in line for line in file)

    counts = []
    for number in range(4):
        model, optimizer = wrap(zero)
        backward(model, rank, number)  # and the gradients stand
        optimizer.step()
        gather(None)
        del model, optimizer
        gc.collect()
        counts.append(mappings())
        gather(None)
    assert counts[1] == counts[3], counts


class Adapted(nn.Module):
    """A large frozen layer and a small trained one."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(2000, 2000).requires_grad_(False)
        self.small = nn.Linear(2000, 3)

    def forward(self, x):
        return self.small(self.large(x))


@sliced_gradients
@on_every_rank()
def test_what_is_frozen_costs_no_gradient_memory(rank, world_size, zero):
    model, _ = wrap(zero, build=Adapted)
    described = sw.describe()["models"][-1]
    assert described["gradient_bytes"] < 100_000, described
    gather(None)


class Table(nn.Module):
    """A parameter that is larger than all others together."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5000, 200)
        self.layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))


@sliced_gradients
@on_every_rank(at_least=2)
def test_one_large_parameter_does_not_make_slices_larger_than_the_whole(rank, world_size, zero):
    whole, _ = wrap(0, build=Table, bucket_cap_mb=1)
    plan = sw.describe()["models"][-1]["gradient_bytes"]
    model, _ = wrap(zero, build=Table, bucket_cap_mb=1)
    sliced = sw.describe()["models"][-1]["gradient_bytes"]
    assert sliced <= plan * (1 + 1 / world_size) + (1 << 20), (sliced, plan)
    gather(None)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank()
def test_clipping_at_each_step_clips_what_a_closure_makes(rank, world_size, zero):
    model, optimizer = wrap(zero, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), clip_grad_norm=0.02)
    before = values(model)

    def closure():
        optimizer.zero_grad()
        value = model(batch(rank, 6, 7)).square().mean()
        value.backward()
        return value

    optimizer.step(closure)
    gather(None)
    moved = torch.cat([(a - b).flatten() for a, b in zip(values(model), before, strict=True)])
    assert abs(moved.norm().item() - 0.02) < 1e-4


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank()
def test_clipping_after_a_loss_that_touches_nothing_on_one_rank(rank, world_size, zero):
    model, optimizer = wrap(zero)
    value = model(batch(rank, 6, 7)).square().mean()
    if rank == world_size - 1 and world_size > 1:
        value = torch.zeros((), requires_grad=True) * 1
    value.backward()
    sw.clip_grad_norm_(model, 0.01)
    optimizer.step()
    gather(None)
    assert same_everywhere([*model.parameters()])


@every_stage
@on_every_rank()
def test_a_step_without_an_averaged_gradient_is_refused_and_the_next_is_clean(rank, world_size, zero):
    model, optimizer = wrap(zero)
    with model.no_sync():
        backward(model, rank)
    with pytest.raises(engine.Error, match="not averaged yet") as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))
    with pytest.raises(engine.Error, match="not averaged yet"):
        sw.full_gradients(model)
    optimizer.zero_grad()
    step(model, optimizer, rank, 1)
    reference, plain = wrap(0)
    step(reference, plain, rank, 1)
    gather(None)
    assert equal(values(model), values(reference))


def uneven(model, optimizer, rank):
    """One rank alone zeroes its gradients before a backward that adds to the others' accumulated ones."""
    for number in range(3):
        backward(model, rank, number)
        optimizer.step()
        if rank == number % 2:
            optimizer.zero_grad(set_to_none=False)
    return values(model)


@every_stage
@on_every_rank()
def test_zeroing_on_one_rank_alone(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        found.append(uneven(*wrap(stage, bucket_cap_mb=0.001), rank))
        gather(None)
    assert equal(*found)


@sliced_gradients
@on_every_rank(at_least=2)
def test_scaling_on_one_rank_alone_is_named(rank, world_size, zero):
    model, optimizer = wrap(zero)
    backward(model, rank)
    if rank == 1:
        next(iter(model.parameters())).grad.mul_(3)
    with pytest.raises(engine.Error, match="scaled by") as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))


@every_stage
@on_every_rank()
def test_the_original_optimizer_cannot_go_its_own_way(rank, world_size, zero):
    torch.manual_seed(0)
    module = Mlp()
    original = torch.optim.SGD(module[0].parameters(), lr=0.1)
    model, optimizer = sw.wrap(module, original, zero=zero)
    step(model, optimizer, rank)
    with pytest.raises(engine.Error, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    original.add_param_group({"params": list(module[2].parameters())})
    backward(model, rank, 1)
    with pytest.raises(engine.Error, match="no longer has the groups"):
        optimizer.step()
    gather(None)


# found by random programs ---------------------------------------------------------------------------------------------


@sliced_gradients
@on_every_rank()
def test_what_no_sync_added_is_gone_once_gradients_are_none(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        model, optimizer = wrap(stage)
        backward(model, rank, 0)
        with model.no_sync():
            backward(model, rank, 1)
        model.zero_grad(set_to_none=True)
        backward(model, rank, 2)
        backward(model, rank, 3)
        optimizer.step()
        gather(None)
        found.append(values(model))
    assert equal(*found)


@sliced_gradients
@on_every_rank(at_least=2)
def test_scaling_on_one_rank_alone_is_named_after_another_backward(rank, world_size, zero):
    model, optimizer = wrap(zero)
    backward(model, rank)
    if rank == 1:
        next(iter(model.parameters())).grad.mul_(3)
    with pytest.raises(engine.Error, match="disagree about what the averaged gradients .* rank 1 by mul_") as raised:
        sw.full_gradients(model)
    assert same_everywhere(str(raised.value))
    backward(model, rank, 1)
    with pytest.raises(engine.Error, match="factors that gradients were scaled by") as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))


@sliced_gradients
@on_every_rank(at_least=2)
def test_scaling_on_one_rank_alone_is_forgotten_once_all_have_cleared_it(rank, world_size, zero):
    model, optimizer = wrap(zero)
    for number in range(3):
        backward(model, rank, number)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5 if number else 1.0 + rank)
        if not number:
            model.zero_grad()
        else:
            optimizer.step()
    assert same_everywhere(values(model))
    gather(None)


@every_stage
@pytest.mark.parametrize("to_none", [True, False])
@on_every_rank(at_least=2)
def test_a_step_on_gradients_that_one_rank_alone_has_cleared_is_named(rank, world_size, zero, to_none):
    if zero == 1 and not to_none:
        return  # whole gradients are each rank's own there, and a zero is as good as any
    model, optimizer = wrap(zero)
    backward(model, rank)
    if rank == 1:
        optimizer.zero_grad(set_to_none=to_none)
    what = "without a gradient" if to_none else "whose gradient was zeroed"
    with pytest.raises(
        engine.Error, match=f"parameters {what}: none on rank 0 alone, 0.weight, .* on rank 1"
    ) as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))
    optimizer.zero_grad()
    step(model, optimizer, rank, 1)
    assert same_everywhere(values(model))
    gather(None)


@every_stage
@pytest.mark.parametrize("asking", ["step", "clip", "full_gradients", "torch's clip", "unscale"])
@on_every_rank(at_least=2)
def test_gradients_that_one_rank_alone_has_not_averaged_are_an_error_on_all(rank, world_size, zero, asking):
    if zero == 1 and asking in ("full_gradients", "torch's clip", "unscale"):
        return  # which ask nobody there
    model, optimizer = wrap(zero)
    backward(model, rank)
    if rank == 1:
        with model.no_sync():
            backward(model, rank, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    ask = {
        "step": optimizer.step,
        "clip": lambda: sw.clip_grad_norm_(model, 0.1),
        "full_gradients": lambda: sw.full_gradients(model),
        "torch's clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        "unscale": lambda: scaler.unscale_(optimizer),
    }[asking]
    with pytest.raises(engine.Error, match="not averaged yet") as raised:
        ask()
    assert same_everywhere(str(raised.value))
    optimizer.zero_grad()
    step(model, optimizer, rank, 2)
    assert same_everywhere(values(model))
    gather(None)


@every_stage
@on_every_rank()
def test_gradients_of_a_backward_that_broke_off_are_not_stepped_on(rank, world_size, zero):
    model, optimizer = wrap(zero)
    before = values(model)

    def fail(gradient):
        raise ValueError("on purpose")

    handle = model.module[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        backward(model, rank)
    handle.remove()
    gather(None)
    # at zero >= 2 what it added may be in a bucket already: then there is no gradient left to step on
    with pytest.raises(engine.Error, match="not averaged yet") if zero == 1 else contextlib.suppress(engine.Error):
        optimizer.step()
    gather(None)
    assert equal(values(model), before)


class Scaled(nn.Module):
    """A layer and a parameter of few bytes, such as a temperature."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 40)
        self.scale = nn.Parameter(torch.tensor([2.0, 1.0, 0.5]))

    def forward(self, x):
        return self.layer(x) * self.scale.sum()


@pytest.mark.parametrize("partition", ["auto", "tensor"])
@on_every_rank()
def test_a_parameter_that_is_never_released_may_be_written_by_all(rank, world_size, partition):
    """Like zero 0 to 2: a program that clamps its temperature after each step does so on every rank."""
    found = []
    for options in ({"zero": 0}, {"zero": 3, "share_parameters": False, "partition": partition}):
        model, optimizer = wrap(build=Scaled, **options)
        for number in range(3):
            step(model, optimizer, rank, number)
            if number % 2:
                model.module.scale.data.clamp_(0.1, 0.6)
            else:
                with torch.no_grad():
                    model.module.scale.clamp_(0.2, 1.0)
        with sw.full_parameters(model):
            found.append(values(model))
        gather(None)
    assert equal(*found)
