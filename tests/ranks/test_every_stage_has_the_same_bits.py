"""Law: losses, parameters, optimizer state and norms do not depend on the stage: zero=0, 1, 2, 3 have the same bits for
any bucket cap, transport, optimizer and form of accumulation, and stage 0 has the naive oracle's.
"""

import copy
import functools
import warnings

import pytest
import torch
from harness import LONG, gather, on_every_rank, same_everywhere
from models import Heads, Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
#: in the long form
MORE_WORLDS = [7]

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ours AdamW": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "ours Adam": lambda p: sw.optim.Adam(p, lr=1e-2, amsgrad=True),
    "ours SGD": lambda p: sw.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


#: the third step uses what the second cleared
STEPS = 4 if LONG else 3
#: a stage too: zero=3, and each rank has nothing but its slices outside of a layer's run
PRIVATE = "3, private"


def stage(zero, options):
    """Return keyword arguments of sw.wrap."""
    if zero != PRIVATE:
        return {**options, "zero": zero}
    return {"units": nn.Linear, **options, "zero": 3, "share_parameters": False}


class Outcome:
    """The results of a training run on this rank."""

    def __init__(self, losses, model, state):
        self.losses = losses
        with sw.full_parameters(model):
            self.parameters = [p.detach().clone() for p in model.parameters()]
        self.state = state

    def assert_equals(self, other, what):
        assert self.losses == other.losses, (what, self.losses, other.losses)
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            assert bits_equal(mine, theirs), what
        assert self.state["param_groups"] == other.state["param_groups"], what
        assert self.state["state"].keys() == other.state["state"].keys(), what
        for key, entry in self.state["state"].items():
            for name, value in entry.items():
                theirs = other.state["state"][key][name]
                same = bits_equal(value, theirs) if isinstance(value, torch.Tensor) else value == theirs
                assert same, (what, key, name)


def loss(model, rank, step):
    return model(batch(rank, 6, 7, step=step)).square().mean()


def plain_steps(model, optimizer, rank, steps=4):
    losses = []
    for step in range(steps):
        value = loss(model, rank, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def accumulating_inside_no_sync(model, optimizer, rank):
    losses = []
    for step in range(STEPS):
        with model.no_sync():
            loss(model, rank, 10 * step).backward()
            loss(model, rank, 10 * step + 1).backward()
        value = loss(model, rank, 10 * step + 2)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def accumulating_onto_the_average(model, optimizer, rank):
    losses = []
    for step in range(STEPS):
        for part in range(3):
            value = loss(model, rank, 10 * step + part)
            value.backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def never_cleared(model, optimizer, rank):
    losses = []
    for step in range(STEPS):
        value = loss(model, rank, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def clipped_by_torch(model, optimizer, rank):
    losses = []
    for step in range(STEPS):
        value = loss(model, rank, step)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        assert norm > 0.02
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def scheduled(model, optimizer, rank):
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for step in range(4):
            losses += plain_steps(model, optimizer, rank, 1)
            scheduler.step()
            losses.append(optimizer.param_groups[0]["lr"])
    return losses


TRAININGS = [plain_steps, accumulating_inside_no_sync, accumulating_onto_the_average, never_cleared, scheduled]


def run(zero, training, rank, build=Mlp, optimizer="AdamW", **options):
    torch.manual_seed(0)
    module = build()
    made = OPTIMIZERS[optimizer](module.parameters())
    if zero == 3:
        options.pop("transport", None)  # one copy on the host has to be mapped
    model, made = sw.wrap(module, made, **stage(zero, options))
    losses = training(model, made, rank)
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, made))
    outcome = Outcome(losses, model, state)
    gather(None)  # at zero=3 nobody leaves while others read
    return outcome


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("cap", [0.001, 25])
@on_every_rank()
def test_every_training_at_every_stage(rank, world_size, cap, training):
    whole = run(0, training, rank, bucket_cap_mb=cap)
    for zero in (1, 2, 3, PRIVATE):
        run(zero, training, rank, bucket_cap_mb=cap).assert_equals(whole, f"zero={zero}")
        if LONG or zero == 2:
            run(zero, training, rank, bucket_cap_mb=0.004).assert_equals(whole, f"zero={zero}, another cap")
        if LONG or zero in (1, 2):
            run(zero, training, rank, bucket_cap_mb=cap, transport="staged").assert_equals(
                whole, f"zero={zero}, staged"
            )
    assert same_everywhere([*whole.parameters])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_every_rank()
def test_every_elementwise_optimizer_of_torch(rank, world_size, optimizer):
    whole = run(0, plain_steps, rank, optimizer=optimizer, bucket_cap_mb=0.001)
    for zero in (1, 2, 3, PRIVATE):
        run(zero, plain_steps, rank, optimizer=optimizer, bucket_cap_mb=0.001).assert_equals(whole, f"zero={zero}")


@on_every_rank()
def test_stage_0_is_the_naive_loop(rank, world_size):
    torch.manual_seed(0)
    naive = NaiveDataParallel(Mlp())
    optimizer = OPTIMIZERS["AdamW"](naive.module.parameters())
    for step in range(4):
        loss(naive, rank, step).backward()
        naive.synchronise()
        optimizer.step()
        naive.module.zero_grad()
    outcome = run(2, plain_steps, rank)
    for mine, theirs in zip(outcome.parameters, naive.module.parameters(), strict=True):
        assert bits_equal(mine, theirs)


@on_every_rank()
def test_clipping_by_torch_agrees_to_rounding(rank, world_size):
    """torch's own sum of squares rounds in a different order on slices."""
    whole = run(0, clipped_by_torch, rank)
    for zero in (1, 2, 3, PRIVATE):
        sliced = run(zero, clipped_by_torch, rank)
        for mine, theirs in zip(sliced.parameters, whole.parameters, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def clipped_by_ours(model, optimizer, rank):
    losses = []
    for step in range(STEPS):
        value = loss(model, rank, step)
        value.backward()
        norm = sw.clip_grad_norm_(model, 0.02)
        assert norm > 0.02
        optimizer.step()
        optimizer.zero_grad()
        losses += [value.item(), norm.item()]
    return losses


@pytest.mark.parametrize("cap", [0.001, 25])
@on_every_rank()
def test_clipping_by_ours_has_the_same_bits(rank, world_size, cap):
    whole = run(0, clipped_by_ours, rank, bucket_cap_mb=cap)
    plain = functools.partial(plain_steps, steps=STEPS)
    other = run(0, plain, rank, clip_grad_norm=0.02)
    for mine, theirs in zip(other.parameters, whole.parameters, strict=True):
        assert bits_equal(mine, theirs)
    for zero in (1, 2, 3, PRIVATE):
        run(zero, clipped_by_ours, rank, bucket_cap_mb=cap).assert_equals(whole, f"zero={zero}")
        run(zero, plain, rank, clip_grad_norm=0.02).assert_equals(other, f"zero={zero}, at each step")


class Odd(nn.Module):
    """A model with every kind of parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.tied = nn.Linear(13, 13)
        self.again = nn.Linear(13, 13)
        self.again.weight = self.tied.weight
        self.low = nn.Linear(13, 5).to(torch.bfloat16)
        self.high = nn.Linear(5, 3).to(torch.float64)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(13, 11).t())
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.turned.t()[:, :11] @ self.turned
        x = self.again(torch.relu(self.tied(torch.tanh(self.frozen(x)))))
        x = self.high(self.low(x.to(torch.bfloat16)).double()) * self.scalar
        return x.float() * self.complex.abs() + self.empty.sum()


@pytest.mark.parametrize("training", [plain_steps, accumulating_onto_the_average, accumulating_inside_no_sync])
@on_every_rank()
def test_every_kind_of_parameter(rank, world_size, training):
    whole = run(0, training, rank, build=Odd, optimizer="AdamW", bucket_cap_mb=0.001)
    for zero in (1, 2, 3, PRIVATE):
        run(zero, training, rank, build=Odd, optimizer="AdamW", bucket_cap_mb=0.001).assert_equals(
            whole, f"zero={zero}"
        )


def some_heads(model, optimizer, rank):
    """Parameters that no rank, or only one rank, uses. Unused ones keep gradient and state unchanged."""
    losses = []
    for step, heads in enumerate([["left", "right"], ["left", "left"], ["left", "right"], ["right", "right"]]):
        value = model(batch(rank, 6, 7, step=step), heads[rank % 2])
        value.backward()
        optimizer.step()
        if step != 1:
            optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("cap", [0.0005, 25])
@on_every_rank()
def test_parameters_that_some_or_all_ranks_leave_unused(rank, world_size, cap):
    whole = run(0, some_heads, rank, build=Heads, bucket_cap_mb=cap)
    for zero in (1, 2, 3, PRIVATE):
        run(zero, some_heads, rank, build=Heads, bucket_cap_mb=cap).assert_equals(whole, f"zero={zero}")


def checkpointed(model, optimizer, rank):
    from torch.utils.checkpoint import checkpoint

    losses = []
    for step in range(4):
        x = batch(rank, 6, 7, step=step).requires_grad_()
        value = checkpoint(model, x, use_reentrant=step % 2 == 0).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def failing_once(model, optimizer, rank):
    """An exception inside a backward on every rank, then clean steps."""
    losses = plain_steps(model, optimizer, rank, 1)

    def fail(gradient):
        raise ValueError("on purpose")

    handle = model.module[2].weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss(model, rank, 7).backward()
    handle.remove()
    optimizer.zero_grad()
    return losses + plain_steps(model, optimizer, rank, 2)


@pytest.mark.parametrize("training", [checkpointed, failing_once])
@pytest.mark.parametrize("cap", [0.001, 25])
@on_every_rank()
def test_recomputed_and_interrupted_backwards(rank, world_size, cap, training):
    whole = run(0, training, rank, bucket_cap_mb=cap)
    for zero in (1, 2, 3, PRIVATE):
        run(zero, training, rank, bucket_cap_mb=cap).assert_equals(whole, f"zero={zero}")


@on_every_rank()
def test_full_gradients_are_those_of_stage_0(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3, PRIVATE):
        torch.manual_seed(0)
        module = Mlp()
        model, _ = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), **stage(zero, {"bucket_cap_mb": 0.001}))
        loss(model, rank, 0).backward()
        found.append(sw.full_gradients(model))
        gather(None)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(bits_equal(other[name], found[0][name]) for name in other)


@on_every_rank()
def test_state_goes_from_any_stage_to_any_other(rank, world_size):
    """Two steps, the whole state, and two more steps at another stage: the bits of four steps."""
    whole = run(0, plain_steps, rank)
    for first, second in [(0, 2), (1, 3), (2, PRIVATE), (3, 1), (PRIVATE, 0), (PRIVATE, 3)]:
        torch.manual_seed(0)
        module = Mlp()
        model, optimizer = sw.wrap(
            module, OPTIMIZERS["AdamW"](module.parameters()), **stage(first, {"bucket_cap_mb": 0.001})
        )
        losses = plain_steps(model, optimizer, rank, 2)
        weights = sw.full_state_dict(model)
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
        gather(None)
        module = Mlp()
        module.load_state_dict(weights)
        model, optimizer = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), **stage(second, {}))
        sw.load_full_optimizer_state_dict(model, optimizer, state)
        for step in (2, 3):
            value = loss(model, rank, step)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        Outcome(losses, model, copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))).assert_equals(
            whole, f"{first} to {second}"
        )
        gather(None)


@on_every_rank()
def test_an_optimizer_that_has_state_is_taken_over(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3, PRIVATE):
        torch.manual_seed(0)
        module = Mlp()
        optimizer = OPTIMIZERS["AdamW"](module.parameters())
        module(batch(0, 6, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = sw.wrap(module, optimizer, **stage(zero, {"bucket_cap_mb": 0.001}))
        losses = plain_steps(model, optimizer, rank, 2)
        found.append(Outcome(losses, model, copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))))
        gather(None)
    for other in found[1:]:
        other.assert_equals(found[0], "taken over")
    assert engine is not None
