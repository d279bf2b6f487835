"""Law: at zero=3 with private parameters, any module and backward has the bits of stage 0. Outside of a unit's run a
rank holds only its slices, and reading more is an error.
"""

import copy
import math
import os
import pathlib
import pickle
import sys

import internals
import pytest
import torch
from harness import LONG, gather, on_every_rank, same_everywhere
from models import Heads
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.back(torch.tanh(self.wide(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.last = nn.Linear(WIDTH, 5)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.last(self.run(self.first(x)))


class Twice(Blocks):
    """A model with a module that is called several times, one that is never called, and one registered under two names."""

    def __init__(self):
        super().__init__()
        self.again = self.blocks[1]
        self.never = Block()

    def run(self, x):
        return super().run(self.again(super().run(x)))


class Tied(Blocks):
    """A model with a parameter of two units, and a head that is another module's weight."""

    def __init__(self):
        super().__init__()
        self.blocks[2].wide.weight = self.blocks[0].wide.weight
        self.last = nn.Linear(WIDTH, 7)
        del self.last.weight

    def forward(self, x):
        return nn.functional.linear(self.run(self.first(x)), self.first.weight.t(), self.last.bias)


class Normed(Blocks):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[0].wide)
        nn.utils.parametrizations.spectral_norm(self.blocks[1].wide)
        nn.utils.weight_norm(self.blocks[2].wide)


class Recomputed(Blocks):
    reentrant = False

    def run(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrant(Recomputed):
    reentrant = True


class RecomputedTogether(Blocks):
    def run(self, x):
        return checkpoint(super().run, x, use_reentrant=False)


class RecomputedInPart(Blocks):
    """A model whose blocks run in a reentrant checkpoint and then plainly: their gradients come in two graph tasks."""

    def run(self, x):
        return super().run(checkpoint(super().run, x, use_reentrant=True))


class _Reversed(torch.autograd.Function):
    """Blocks without a graph, whose backward runs one of its own, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks, ctx.name = blocks, "a program's own attribute"
        ctx.save_for_backward(x)
        return blocks(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.blocks(x).backward(gradient)
        return x.grad, None


class Reversed(Blocks):
    """A model whose blocks run in a function that keeps no graph, and then plainly."""

    def run(self, x):
        return super().run(_Reversed.apply(x, super().run))


class Adapted(Blocks):
    """A model with frozen units between trained ones."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].wide.requires_grad_(False)
        self.first.requires_grad_(False)


class Several(Blocks):
    """Units with outputs in a dictionary, some of them unused, and one that is the input."""

    def forward(self, x):
        hidden = self.first(x)
        found = {"input": hidden, "states": []}
        for block in self.blocks:
            hidden = block(hidden)
            found["states"].append(hidden)
        return {**found, "last": self.last(hidden)}


class Viewed(Blocks):
    """Units whose output is a parameter, or a view of one."""

    class Place(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, WIDTH) / 4)

        def forward(self, rows):
            return self.table[:rows] if rows else self.table

    def __init__(self):
        super().__init__()
        self.places = nn.ModuleList(self.Place() for _ in range(2))

    def run(self, x):
        return super().run(x + self.places[0](6)) + self.places[1](0).sum(0)


class Turned(Blocks):
    """A model with parameters that are not row-major."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.wide.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH).div(8).t())


MODELS = [
    Blocks,
    Twice,
    Tied,
    Normed,
    Recomputed,
    RecomputedReentrant,
    RecomputedTogether,
    RecomputedInPart,
    Reversed,
    Adapted,
    Several,
    Viewed,
    Turned,
]
#: what is gathered together: repeated blocks, all layers, layers inside of blocks, all at once
CUTS = {"blocks": "auto", "layers": nn.Linear, "nested": (Block, nn.Linear), "whole": 1.0}


def wrap(build, zero, **options):
    torch.manual_seed(0)
    module = build()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    return sw.wrap(module, optimizer, zero=zero, bucket_cap_mb=0.004, **options)


def private(build, units="auto", **options):
    return wrap(build, 3, share_parameters=False, units=units, **options)


def loss_of(model, rank, step):
    output = model(batch(rank, 6, 7, step=step).requires_grad_())
    return (output["last"] + output["states"][0][:, :5] if isinstance(output, dict) else output).square().mean()


def parameters_of(model):
    with sw.full_parameters(model):
        return [p.detach().clone() for p in model.parameters()]


def assert_released(model):
    for name, p in model.named_parameters():
        if p.numel() * p.element_size() > 128:
            with pytest.raises(
                engine.Error, match="is released, so that this rank keeps a slice of it, and isnan needs"
            ):
                torch.isnan(p)
            assert p.untyped_storage().nbytes() < 4096, name


def steps(model, optimizer, rank, count=3, check=None):
    losses = []
    for step in range(count):
        loss = loss_of(model, rank, step)
        loss.backward()
        if check:
            check(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_training(train, build, **options):
    """Check that `train(model, optimizer)` leaves the same values and parameters at zero=0 and at zero=3, private."""
    model, optimizer = wrap(build, 0)
    expected = train(model, optimizer), parameters_of(model)
    model, optimizer = private(build, **options)
    found = train(model, optimizer), parameters_of(model)
    assert found[0] == expected[0]
    for name, ours, theirs in zip(dict(model.named_parameters()), found[1], expected[1], strict=True):
        assert bits_equal(ours, theirs), name
    assert_released(model)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("build", MODELS)
@on_every_rank()
def test_every_module_has_the_bits_of_stage_0(rank, world_size, build, cut):
    if build is Tied and cut in ("layers", "nested"):
        return  # the head is another unit's weight, which cannot be read there
    assert_same_training(lambda model, optimizer: steps(model, optimizer, rank), build, units=CUTS[cut])


@pytest.mark.parametrize("build", [Blocks, Twice, Recomputed])
@on_every_rank()
def test_units_that_are_kept_after_the_forward(rank, world_size, build):
    def train(model, optimizer):
        return steps(model, optimizer, rank)

    assert_same_training(train, build, units=Block, reshard_after_forward=False)


@on_every_rank()
def test_a_parameter_read_outside_of_its_unit_is_an_error_with_its_name(rank, world_size):
    model, _ = private(Tied, units=nn.Linear)
    with pytest.raises(engine.Error, match=r"parameter 'first\.weight' is released.*sw\.full_parameters"):
        model(batch(rank, 6, 7))
    gather(None)


@pytest.mark.parametrize("build", [Blocks, Recomputed, RecomputedInPart, Reversed])
@on_every_rank()
def test_the_first_backward_holds_no_more_whole_gradients_than_later_ones(rank, world_size, build):
    model, optimizer = private(build)
    with torch.no_grad():
        model(batch(rank, 6, 7))
    early = []
    for step in range(2):
        loss_of(model, rank, step).backward()
        early.append(sw.stats(model)["models"][0]["buckets_early"])
        optimizer.zero_grad()
    waits = build in (RecomputedInPart, Reversed)  # for second gradients
    assert (early == [0, 0]) if waits else (0 < early[0] < early[1]), early


@on_every_rank()
def test_a_function_around_a_part_of_a_unit_may_run_a_backward(rank, world_size):
    assert_same_training(lambda model, optimizer: steps(model, optimizer, rank), Reversed, units=CUTS["whole"])


@on_every_rank()
def test_everything_is_released_after_a_backward(rank, world_size):
    model, optimizer = private(Blocks)
    assert_released(model)
    losses = steps(model, optimizer, rank, check=assert_released)
    assert all(map(math.isfinite, losses))
    gather(None)


def several_forwards(model, optimizer, rank):
    losses = []
    for step in range(3):
        loss = loss_of(model, rank, step) + loss_of(model, rank, step + 10)
        with torch.no_grad():
            losses.append(loss_of(model, rank, 20).item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def the_same_graph_twice(model, optimizer, rank):
    losses = []
    for step in range(3):
        loss = loss_of(model, rank, step)
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_forwards_again(model, optimizer, rank):
    """Recompute the whole model twice in one backward: all gradients come in two graph tasks, and no output has a graph."""
    losses = []
    for step in range(2):
        parts = [
            checkpoint(model, batch(rank, 6, 7, step=2 * step + n).requires_grad_(), use_reentrant=True) for n in (0, 1)
        ]
        loss = sum(part.square().mean() for part in parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_of_inputs(model, optimizer, rank):
    losses = []
    for step in range(3):
        x = batch(rank, 6, 7, step=step).requires_grad_()
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
        losses += [found.sum().item(), *steps(model, optimizer, rank, 1)]
    return losses


def accumulating(model, optimizer, rank):
    losses = []
    for step in range(3):
        with model.no_sync():
            for part in range(2):
                loss_of(model, rank, 3 * step + part).backward()
        losses += steps(model, optimizer, rank, 1)
    return losses


class Planned(ValueError):
    pass


def fail(*_):
    raise Planned


def broken_off(model, optimizer, rank):
    """Raise in a forward and in a backward on every rank, then take clean steps."""
    losses = steps(model, optimizer, rank, 1)
    block = model.module.blocks[1]
    handle = block.wide.register_forward_pre_hook(fail)
    with pytest.raises(Planned):
        model(batch(rank, 6, 7))
    handle.remove()
    losses += steps(model, optimizer, rank, 1)
    handle = block.norm.register_full_backward_hook(fail)
    with pytest.raises(Planned):
        loss_of(model, rank, 5).backward()
    handle.remove()
    optimizer.zero_grad()
    return losses + steps(model, optimizer, rank, 2)


@pytest.mark.parametrize(
    "train",
    [several_forwards, the_same_graph_twice, whole_forwards_again, gradients_of_inputs, accumulating, broken_off],
)
@pytest.mark.parametrize("cut", ["blocks", "nested"])
@on_every_rank()
def test_every_shape_of_a_step(rank, world_size, train, cut):
    assert_same_training(lambda model, optimizer: train(model, optimizer, rank), Blocks, units=CUTS[cut])


def penalty_on_gradients(model, optimizer, rank):
    losses = []
    for step in range(3):
        x = batch(rank, 6, 7, step=step).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = output.square().mean() + slope.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_every_rank()
def test_a_backward_through_a_backward(rank, world_size):
    assert_same_training(lambda model, optimizer: penalty_on_gradients(model, optimizer, rank), Blocks)


@on_every_rank()
def test_ranks_that_take_different_branches(rank, world_size):
    def train(model, optimizer):
        losses = []
        for step in range(4):
            head = ["left", "right"][(rank + step) % 2]
            loss = model(batch(rank, 6, 7, step=step), head).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert_same_training(train, Heads, units=nn.Linear)


@on_every_rank()
def test_a_rank_that_evaluates_alone(rank, world_size):
    def train(model, optimizer):
        losses = []
        for _ in range(3):
            losses += steps(model, optimizer, rank, 1)
            if rank == 0:
                with torch.no_grad():
                    losses.append(sw.unwrap(model)(batch(rank, 6, 7)).sum().item())
        return losses

    assert_same_training(train, Blocks)


def small_gpt():
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
    from gpt.model import GPT, VOCABULARY

    torch.manual_seed(0)
    return GPT(context=16, layers=3, width=48, heads=3), VOCABULARY


@pytest.mark.parametrize(
    "options", [{}, {"units": nn.Linear}, {"reshard_after_forward": False}], ids=["auto", "layers", "kept"]
)
@on_every_rank()
def test_twenty_steps_of_a_gpt(rank, world_size, options):
    found = []
    for stage in ({"zero": 0}, {"zero": 3, "share_parameters": False, **options}):
        module, vocabulary = small_gpt()
        model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-3), clip_grad_norm=1.0, **stage)
        generator = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(20 if LONG or not options else 5):
            tokens = torch.randint(vocabulary, (2, 17), generator=generator)
            output = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(output.flatten(0, -2), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, sw.full_state_dict(model)))
    assert found[0][0] == found[1][0]
    assert all(bits_equal(value, found[1][1][name]) for name, value in found[0][1].items())
    gather(None)


# misuse ---------------------------------------------------------------------------------------------------------------


@on_every_rank()
def test_copies_of_a_released_module_are_refused(rank, world_size):
    model, optimizer = private(Blocks)
    module = sw.unwrap(model)
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(module),
        lambda: pickle.dumps(module),
        lambda: model.state_dict(),
        lambda: module.state_dict(),
        lambda: module.blocks[1].wide.state_dict(),
    ):
        with pytest.raises(engine.Error, match=r"sw\.full_parameters.*sw\.full_state_dict"):
            attempt()
    steps(model, optimizer, rank, 1)
    whole = sw.full_state_dict(model)
    with sw.full_parameters(model):
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        assert all(bits_equal(whole[name], p) for name, p in module.state_dict().items())
    x = batch(0, 6, 7)
    with torch.no_grad():
        expected = module(x)
    for each in copies:
        assert bits_equal(each(x).detach(), expected)
        each(x).sum().backward()
        assert copy.deepcopy(each).state_dict().keys() == whole.keys()
    assert_released(model)
    assert same_everywhere([*whole.values()])


@on_every_rank()
def test_a_write_to_a_released_parameter_is_an_error_at_its_line_and_nothing_is_lost(rank, world_size):
    def train(model, optimizer):
        losses = steps(model, optimizer, rank, 1)
        weight = model.module.blocks[1].wide.weight
        for write in (
            lambda: weight.fill_(0.5),
            lambda: weight.add_(1),
            lambda: weight.data.fill_(0.5),
            lambda: weight.__setitem__(0, 0.5),
            lambda: setattr(weight, "data", torch.ones_like(weight)),
            lambda: nn.init.zeros_(weight),
            lambda: torch._foreach_mul_([torch.ones(2), weight], 2),
            lambda: torch.mul(torch.ones(2), 2, out=weight),
        ):
            if internals.replica(model).zero and rank == world_size - 1:
                with (
                    torch.no_grad(),
                    pytest.raises(engine.Error, match=r"parameter 'blocks\.1\.wide\.weight' is released"),
                ):
                    write()
        return losses + steps(model, optimizer, rank, 2)

    assert_same_training(train, Blocks)


@pytest.mark.parametrize("who", ["all", "last"])
@on_every_rank(spoils=True)
def test_what_an_old_view_writes_to_a_released_parameter_is_an_error_with_its_name_on_all_ranks(rank, world_size, who):
    model, optimizer = private(Blocks)
    steps(model, optimizer, rank, 1)
    with sw.full_parameters(model):
        old = model.module.blocks[1].wide.weight.data
    if who == "all" or rank == world_size - 1:
        with torch.no_grad():
            assert torch.isnan(old).all()
            old.add_(1)
            old[3] = 2
    with pytest.raises(engine.Error, match=r"parameter 'blocks\.1\.wide\.weight' was"):
        steps(model, optimizer, rank, 1)
    gather(None)
    module = sw.unwrap(model)
    model, optimizer = sw.wrap(
        module, torch.optim.AdamW(module.parameters()), zero=3, share_parameters=False, bucket_cap_mb=0.004
    )
    assert all(map(math.isfinite, steps(model, optimizer, rank, 2)))
    whole = sw.full_state_dict(model)
    assert same_everywhere([*whole.values()])


@on_every_rank(spoils=True)
def test_the_parameter_that_an_old_view_wrote_to_is_found(rank, world_size):
    """A unit with several such parameters is checked by its pages, since its order is not the module's."""
    model, optimizer = private(Large, units=100.0)
    with sw.full_parameters(model):
        old = model.module[3].weight.data
    old[512] = 1.0
    with pytest.raises(engine.Error, match=r"parameter '3\.weight' was written to, through an older view"):
        steps(model, optimizer, rank, 1)
    gather(None)


class Clamps(Block):
    def forward(self, x):
        with torch.no_grad():
            self.wide.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamped(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Clamps() for _ in range(3))


@pytest.mark.parametrize("where", ["forward", "full_parameters"])
@on_every_rank(spoils=True)
def test_a_write_that_a_release_would_lose_is_an_error(rank, world_size, where):
    model, optimizer = private(Clamped if where == "forward" else Blocks)
    with pytest.raises(
        engine.Error, match=r"parameter 'blocks\.0\.wide\.weight' was written to while it was whole.*writable=True"
    ):
        if where == "forward":
            steps(model, optimizer, rank, 1)
        else:
            with sw.full_parameters(model), torch.no_grad():
                model.module.blocks[0].wide.weight.mul_(2)
    gather(None)


@on_every_rank()
def test_hooks_that_are_added_later_see_whole_parameters(rank, world_size):
    def train(model, optimizer):
        seen = []

        def look(module, *_):
            own = module.first if isinstance(module, Blocks) else module
            seen.append(sum(p.detach().double().sum().item() for p in own.parameters()))

        module = sw.unwrap(model)
        for each in (module, *module.blocks):
            each.register_forward_pre_hook(look, prepend=True)
            each.register_forward_hook(look)
            each.register_forward_hook(look, always_call=True)
        losses = steps(model, optimizer, rank, 2)
        module.blocks[1].register_forward_pre_hook(look, prepend=True)
        with torch.no_grad():
            losses.append(module(batch(rank, 6, 7)).sum().item())
        assert len(seen) == 3 * 4 * 3 + 1 and not any(map(math.isnan, seen))
        return losses, seen

    assert_same_training(train, Blocks)


@on_every_rank()
def test_a_forked_child_does_not_write_into_its_parents_pages(rank, world_size):
    model, optimizer = private(Blocks)
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                sw.unwrap(model)(batch(rank, 6, 7))
        except engine.Error as error:
            os._exit(0 if "child" in str(error) else 3)
        except BaseException:
            os._exit(4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps(model, optimizer, rank, 1)
    gather(None)


@on_every_rank()
def test_what_is_written_in_full_parameters_is_everybodys(rank, world_size):
    model, optimizer = private(Blocks)
    with sw.full_parameters(model, writable=True), torch.no_grad():
        for p in model.parameters():
            p.fill_(rank + 0.125)
    assert_released(model)
    for p in parameters_of(model):
        assert bool((p == 0.125).all())
    steps(model, optimizer, rank, 1)
    gather(None)


@on_every_rank()
def test_parameters_outlive_their_wrapper(rank, world_size):
    model, optimizer = private(Blocks)
    steps(model, optimizer, rank, 1)
    expected = sw.full_state_dict(model)
    module = sw.unwrap(model)
    del model, optimizer
    import gc

    gc.collect()
    assert all(bits_equal(expected[name], p) for name, p in module.state_dict().items())
    module(batch(0, 6, 7)).sum().backward()
    gather(None)


# memory ---------------------------------------------------------------------------------------------------------------


def resident_bytes(tensors):
    """Return the resident bytes of the mappings that hold `tensors`."""
    wanted = sorted(t.data_ptr() for t in tensors)
    total, counts = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and ":" not in words[0]:
                low, high = (int(word, 16) for word in words[0].split("-"))
                counts = any(low <= address < high for address in wanted)
            elif counts and words[0] == "Rss:":
                total += int(words[1]) * 1024
    return total


class Large(nn.Sequential):
    """Layers of 4 MiB each."""

    def __init__(self):
        super().__init__(nn.Linear(7, 1024), *(nn.Linear(1024, 1024, bias=False) for _ in range(4)), nn.Linear(1024, 5))


@on_every_rank()
def test_a_released_unit_has_no_pages(rank, world_size):
    model, optimizer = private(Large)
    layer = model.module[2]
    seen = {}

    def look(module, *_):
        data = module.weight.data
        seen["whole"] = data
        seen["pages"] = resident_bytes([data])

    layer.register_forward_pre_hook(look)
    steps(model, optimizer, rank, 2)
    assert seen["pages"] >= 4 << 20
    assert resident_bytes([seen["whole"]]) == 0
    stats = sw.stats()["models"][-1]
    whole = sum(p.numel() for p in model.parameters()) * 4
    assert stats["most_unit_bytes"] <= 3 * (4 << 20), stats
    described = sw.describe()["models"][-1]
    assert described["parameter_bytes"] < whole / world_size * 1.1 + 65536
    assert LONG or torch.isnan(seen["whole"][0, 0])
    gather(None)


@on_every_rank()
def test_a_write_through_data_is_named_where_units_stay_whole_until_the_step(rank, world_size):
    """A double backward needs the units until the step."""
    module = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    model, optimizer = sw.wrap(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        zero=3,
        share_parameters=False,
        units=nn.Linear,
        timeout_s=20,
    )
    inputs = batch(rank, 6, 7).requires_grad_()
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (output.square().mean() + slope.square().mean()).backward()
    for p in module.parameters():
        p.data.mul_(0.5)
    with pytest.raises(engine.Error, match=r"parameter '.*weight' was written to while it was whole.*is lost"):
        optimizer.step()


@on_every_rank()
def test_a_backward_that_fails_releases_its_units(rank, world_size):
    """A later write would be lost: the unit is gathered from slices that lack it."""
    module = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    model, optimizer = sw.wrap(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        zero=3,
        share_parameters=False,
        units=nn.Linear,
        timeout_s=20,
    )

    def fail(gradient):
        raise ValueError("on purpose")

    handle = module[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(batch(rank, 6, 7)).square().mean().backward()
    handle.remove()
    with pytest.raises(engine.Error, match=r"parameter '0.weight' is released.*\.data needs all of its values"):
        module[0].weight.data.mul_(0.5)
    model.zero_grad()
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()


@on_every_rank()
def test_a_small_parameter_whose_data_was_replaced_keeps_its_values(rank, world_size):
    """It is never released. Its slices have the dtype of the wrap, and values of another one are cast."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(7, 33)
            self.scale = nn.Parameter(torch.arange(1.0, 5.0), requires_grad=False)

        def forward(self, x):
            return self.wide(x) * self.scale.sum()

    module = Scaled()
    optimizer = torch.optim.SGD(module.wide.parameters(), lr=0.1)
    model, optimizer = sw.wrap(module, optimizer, zero=3, share_parameters=False)
    for dtype in (torch.float16, torch.float64):
        module.scale.data = torch.arange(1.0, 5.0, dtype=dtype)
        with sw.full_parameters(model, writable=True):
            pass
        assert sw.full_state_dict(model)["scale"].tolist() == [1.0, 2.0, 3.0, 4.0]
        model(batch(rank, 6, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert module.scale.tolist() == [1.0, 2.0, 3.0, 4.0]
    module.scale.data = torch.ones(3)
    with pytest.raises(engine.Error, match="'scale' has 3 elements, and had 4"):
        with sw.full_parameters(model, writable=True):
            pass
