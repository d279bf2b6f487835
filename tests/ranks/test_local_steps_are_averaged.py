"""Law: DiLoCo is H local steps, then an outer step on the mean change, fragment by fragment. After an exchange all
ranks are bitwise equal.
"""

import copy
import math
import time

import pytest
import torch
from harness import Stopwatch, gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.compression import block_mean, half_mean
from oracle.fold import bits_equal, fold
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch has none")


def made(every, fragments=1, wire="bf16", wrapped=False, rank=0, **options):
    torch.manual_seed(0)
    model = Mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wrapped:
        model = sw.wrap(model)
    return model, sw.DiLoCo(model, inner, every=every, fragments=fragments, wire=wire, **options)


def steps(model, trainer, rank, first, count):
    for step in range(first, first + count):
        trainer.zero_grad()
        model(batch(rank, 8, 7, step=step)).square().mean().backward()
        trainer.step()


class Naive:
    """A naive DiLoCo with all parameters in one fragment: gathers changes and writes out the outer Nesterov step."""

    def __init__(self, every, mean):
        torch.manual_seed(0)
        self.model = Mlp()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.every, self.mean, self.count = every, mean, 0
        self.common = [p.detach().clone() for p in self.model.parameters()]
        self.momentum = [None for _ in self.common]

    def step(self, rank, step):
        self.inner.zero_grad()
        self.model(batch(rank, 8, 7, step=step)).square().mean().backward()
        self.inner.step()
        self.count += 1
        if self.count % self.every:
            return
        everyone = gather([c - p.detach() for c, p in zip(self.common, self.model.parameters())])
        for i, parameter in enumerate(self.model.parameters()):
            change = self.mean([changes[i] for changes in everyone])
            self.momentum[i] = change.clone() if self.momentum[i] is None else self.momentum[i].mul(0.9).add(change)
            self.common[i].add_(change.add(self.momentum[i], alpha=0.9), alpha=-0.7)
            parameter.data.copy_(self.common[i])


MEANS = {
    "float32": lambda changes: fold(changes, "mean"),
    "bf16": lambda changes: half_mean(changes, torch.bfloat16),
    "int8": lambda changes: block_mean(changes, 256, 127),
}


@pytest.mark.parametrize("wire", list(MEANS))
@pytest.mark.parametrize("wrapped", [False, True])
@on_every_rank()
def test_it_is_the_naive_one(rank, world_size, wire, wrapped):
    model, trainer = made(3, wire=wire, wrapped=wrapped)
    naive = Naive(3, MEANS[wire])
    for step in range(9):
        steps(model, trainer, rank, step, 1)
        naive.step(rank, step)
        pairs = zip(model.parameters(), naive.model.parameters())
        if wire == "float32" or step % 3 == 2:
            assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in pairs), step
        if step % 3 == 2:
            assert same_everywhere([*model.parameters()])
    assert (trainer.wire_bytes > 0) == (world_size > 1)


@on_every_rank()
def test_fragments_take_turns_and_each_is_averaged_every_h_steps(rank, world_size):
    model, trainer = made(4, fragments=2)
    parts = [[p for p in trainer._tensors if any(p is trainer._tensors[i] for i in f)] for f in trainer._fragments]
    assert len(parts) == 2 and sum(map(len, parts)) == 6
    for step in range(8):
        steps(model, trainer, rank, step, 1)
        equal = [same_everywhere([*part]) for part in parts]
        if world_size > 1:
            assert equal == [step % 4 == 1, step % 4 == 3], step
    trainer.synchronise()
    assert same_everywhere([*model.parameters()])


@on_every_rank()
def test_it_resumes_with_the_same_bits(rank, world_size):
    whole, trainer = made(3, fragments=2, wire="int8")
    steps(whole, trainer, rank, 0, 8)
    first, trainer = made(3, fragments=2, wire="int8")
    steps(first, trainer, rank, 0, 4)
    model, state = {k: v.clone() for k, v in first.state_dict().items()}, trainer.state_dict()
    again, trainer = made(3, fragments=2, wire="int8")
    again.load_state_dict(model)
    trainer.load_state_dict(state)
    steps(again, trainer, rank, 4, 4)
    assert all(bits_equal(a.detach(), b.detach()) for a, b in zip(whole.parameters(), again.parameters()))
    with pytest.raises(sw.Error, match="another model"):
        trainer.load_state_dict({**state, "anchors": {}})
    with pytest.raises(ValueError):  # and nothing of a wrong state is loaded
        trainer.load_state_dict({**state, "steps": 3, "inner": {"state": {}, "param_groups": []}})
    assert trainer.steps == 8


class NaiveOverlap(Naive):
    """A naive DiLoCo of two fragments, which applies a mean `overlap` steps after its exchange began."""

    def __init__(self, every, mean, overlap, fragments):
        super().__init__(every, mean)
        self.overlap, self.fragments, self.under_way = overlap, fragments, None

    def step(self, rank, step):
        self.inner.zero_grad()
        self.model(batch(rank, 8, 7, step=step)).square().mean().backward()
        self.inner.step()
        self.count += 1
        parameters = list(self.model.parameters())
        if self.under_way is not None and self.under_way[0] == self.count:
            for i, (change, then) in self.under_way[1].items():
                self.momentum[i] = change.clone() if self.momentum[i] is None else self.momentum[i].mul(0.9).add(change)
                self.common[i].add_(change.add(self.momentum[i], alpha=0.9), alpha=-0.7)
                parameters[i].data.copy_(parameters[i].detach() - then + self.common[i])
        for k, fragment in enumerate(self.fragments):
            if (self.count - (k + 1) * self.every // len(self.fragments)) % self.every:
                continue
            everyone = gather({i: self.common[i] - parameters[i].detach() for i in fragment})
            taken = {i: (self.mean([c[i] for c in everyone]), parameters[i].detach().clone()) for i in fragment}
            self.under_way = self.count + self.overlap, taken


@pytest.mark.parametrize("wire", list(MEANS))
@on_every_rank()
def test_an_exchange_that_overlaps_later_steps_is_the_naive_one(rank, world_size, wire):
    model, trainer = made(4, fragments=2, wire=wire, overlap=1)
    naive = NaiveOverlap(4, MEANS[wire], 1, trainer._fragments)
    for step in range(11):
        steps(model, trainer, rank, step, 1)
        naive.step(rank, step)
        for mine, theirs in zip(model.parameters(), naive.model.parameters()):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6), step
    assert same_everywhere([*trainer._anchors])
    trainer.synchronise()
    assert same_everywhere([*model.parameters()])


@pytest.mark.parametrize("saved_after", [4, 5, 6])
@on_every_rank()
def test_it_resumes_with_an_exchange_in_flight(rank, world_size, saved_after):
    options = {"fragments": 2, "wire": "int8", "overlap": 2}
    whole, trainer = made(6, **options)
    steps(whole, trainer, rank, 0, 10)
    first, trainer = made(6, **options)
    steps(first, trainer, rank, 0, saved_after)
    model, state = copy.deepcopy(first.state_dict()), copy.deepcopy(trainer.state_dict())
    assert ("pending" in state) == (saved_after != 5)
    steps(first, trainer, rank, saved_after, 1)  # training continues after a save
    again, trainer = made(6, **options)
    again.load_state_dict(model)
    trainer.load_state_dict(state)
    steps(again, trainer, rank, saved_after, 10 - saved_after)
    assert all(bits_equal(a.detach(), b.detach()) for a, b in zip(whole.parameters(), again.parameters()))
    if saved_after != 5:
        _, other = made(6, fragments=2, wire="int8")
        with pytest.raises(sw.Error, match=r"was in flight, which needs the same fragments and overlap > 0"):
            other.load_state_dict(state)


@on_every_rank(at_least=2)
def test_later_steps_do_not_wait_for_an_exchange(rank, world_size):
    """The last rank comes to the exchange half a second late; the others take their next step meanwhile."""
    model, trainer = made(2, overlap=1)
    steps(model, trainer, rank, 0, 1)
    gather(None)
    if rank == world_size - 1:
        time.sleep(0.5)
    start_s = time.monotonic()
    steps(model, trainer, rank, 1, 1)
    begun_s = time.monotonic() - start_s
    steps(model, trainer, rank, 2, 1)
    ended_s = time.monotonic() - start_s
    if rank != world_size - 1:
        assert begun_s < 0.4 <= ended_s + 0.05


@on_every_rank()
def test_a_change_that_is_not_finite_is_the_same_error_everywhere(rank, world_size):
    model, trainer = made(2)
    steps(model, trainer, rank, 0, 1)
    if rank == world_size - 1:
        next(model.parameters()).data[0, 0] = math.inf
    with pytest.raises(
        sw.Error, match=r"the change of the fragment of '0.weight' is not finite on some rank after 2 steps"
    ):
        steps(model, trainer, rank, 1, 1)


@on_every_rank()
def test_misuse_is_named(rank, world_size):
    model = Mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, value, most in (("every", 0, 2**31), ("fragments", 5, 4), ("fragments", 0, 4)):
        with pytest.raises(ValueError, match=rf"{name} must be an integer in \[1, {most}\], got {value}"):
            sw.DiLoCo(model, inner, **{"every": 4, name: value})
    with pytest.raises(ValueError, match="wire must be 'float32', 'bf16' or 'int8', got 'fp8'"):
        sw.DiLoCo(model, inner, every=4, wire="fp8")
    for overlap in (2, -1):
        with pytest.raises(ValueError, match=rf"overlap must be an integer in \[0, 2\), .* got {overlap}"):
            sw.DiLoCo(model, inner, every=5, fragments=2, overlap=overlap)
    wrapped = sw.wrap(Mlp(), zero=2)
    with pytest.raises(sw.Error, match="DiLoCo cannot run at zero=2"):
        sw.DiLoCo(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), every=4)
    stock = torch.nn.parallel.DistributedDataParallel(Mlp())
    with pytest.raises(TypeError, match="averages the gradients of every step"):
        sw.DiLoCo(stock, torch.optim.SGD(stock.parameters(), lr=0.1), every=4)
    hooked = sw.wrap(Mlp(), compress=sw.Int8())
    with pytest.raises(ValueError, match="which would never run"):
        sw.DiLoCo(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), every=4)
    wide = Mlp().double() if rank == 0 and world_size > 1 else Mlp()
    if world_size > 1:
        kind = TypeError if rank == 0 else sw.Error
        with pytest.raises(kind, match="'0.weight' must be a contiguous float32 tensor on the CPU, not torch.float64"):
            sw.DiLoCo(wide, torch.optim.SGD(wide.parameters(), lr=0.1), every=4, timeout_s=10)
    with pytest.raises(TypeError, match="must be a contiguous float32 tensor on the CPU, not torch.float64"):
        sw.DiLoCo(Mlp().double(), inner, every=4)
    trainer = sw.DiLoCo(model, inner, every=4)
    with pytest.raises(sw.Error, match="it has no 'inner'"):
        trainer.load_state_dict({"steps": 3})
    state = trainer.state_dict()
    with pytest.raises(sw.Error, match="this one does not train 'head.weight'"):
        trainer.load_state_dict({**state, "anchors": {**state["anchors"], "head.weight": torch.ones(2)}})


class Counted(torch.nn.Module):
    """A model with a buffer that differs between ranks."""

    def __init__(self, rank):
        super().__init__()
        self.layer = torch.nn.Linear(7, 3)
        self.register_buffer("seen", torch.full((4,), float(rank)))
        self.register_buffer("scratch", torch.full((2, 3), rank, dtype=torch.int64), persistent=False)


@on_every_rank()
def test_buffers_are_rank_0s(rank, world_size):
    model = Counted(rank)
    sw.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    assert bool((model.seen == 0).all()) and bool((model.scratch == 0).all())
    assert same_everywhere([*model.parameters()])


BAD = {
    "every": (0, ValueError, r"every must be an integer in \[1, 2147483648\], got 0"),
    "fragments": (9, ValueError, r"fragments must be an integer in \[1, 4\], got 9"),
    "wire": ("fp8", ValueError, "wire must be 'float32', 'bf16' or 'int8', got 'fp8'"),
    "timeout_s": (-1, ValueError, "timeout_s must be above 0 and at most 1e.09 seconds, got -1"),
    "outer": (lambda parameters: None, TypeError, "outer must return a torch.optim.Optimizer, got NoneType"),
    "inner": (None, TypeError, "inner_optimizer must be an optimizer, got NoneType"),
}


@pytest.mark.parametrize("name", list(BAD))
@on_every_rank(at_least=2)
def test_an_error_of_one_rank_is_raised_on_all_at_once(rank, world_size, name):
    value, kind, sentence = BAD[name]
    model = Mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = world_size - 1
    arguments = {"every": 4, name: value} if rank == wrong else {"every": 4}
    inner = arguments.pop("inner", inner)
    begin = Stopwatch()
    with pytest.raises(kind if rank == wrong else sw.Error, match=sentence) as caught:
        sw.DiLoCo(model, inner, **arguments)
    assert begin.seconds() < 10
    assert rank == wrong or str(caught.value).startswith(f"rank {wrong} could not begin DiLoCo: ")
    trainer = sw.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)  # all ranks are still in step
    steps(model, trainer, rank, 0, 1)
    assert same_everywhere([*model.parameters()])


@on_every_rank(at_least=2)
def test_outer_optimizers_that_differ_are_named(rank, world_size):
    model = Mlp()
    outer = lambda parameters: torch.optim.SGD(parameters, lr=0.5 + 0.1 * (rank == 1))  # noqa: E731
    with pytest.raises(sw.Error, match="ranks disagree about DiLoCo: .* outer SGD .*0.5.* outer SGD .*0.6"):
        sw.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=4, outer=outer)
