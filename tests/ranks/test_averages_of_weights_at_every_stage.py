"""Law: averages of weights that a program keeps beside the model and swaps through `.data` (EMA, SWA: torch_ema,
torch's AveragedModel, Lightning's callbacks) have the values of one process at every stage with private whole
parameters. If the ranks of a host share parameters, or parameters are released, the swap is an error on all ranks that
names the context to use. Inside that context it is right at every stage.
"""

import contextlib
import importlib.util

import internals
import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3 shared": {"zero": 3},
    "3 private": {"zero": 3, "share_parameters": False},
}


class Ema:
    """Like torch_ema's ExponentialMovingAverage."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.shadow = [p.clone().detach() for p in self.parameters]

    def update(self):
        with torch.no_grad():
            for s, p in zip(self.shadow, self.parameters):
                s.sub_(0.1 * (s - p))

    def swap_in(self):
        self.stored = [p.clone() for p in self.parameters]
        for s, p in zip(self.shadow, self.parameters):
            p.data.copy_(s.data)

    def swap_out(self):
        for s, p in zip(self.stored, self.parameters):
            p.data.copy_(s.data)


class Averaged:
    """Like Lightning's WeightAveraging over torch's AveragedModel: exchanges values with the model's, in and out."""

    def __init__(self, parameters, module):
        self.module = module
        self.average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(self):
        self.average.update_parameters(self.module)

    def swap_in(self):
        for average, current in zip(self.average.module.parameters(), self.module.parameters()):
            kept = average.data.clone()
            average.data.copy_(current.data)
            current.data.copy_(kept)

    swap_out = swap_in


def published(parameters, module):
    """Use torch_ema itself if it is installed."""
    import torch_ema

    ema = torch_ema.ExponentialMovingAverage(module.parameters(), decay=0.9)

    class Adapted:
        update = staticmethod(ema.update)

        def swap_in(self):
            ema.store()
            ema.copy_to()

        swap_out = staticmethod(ema.restore)

    return Adapted()


KINDS = {"store and restore": lambda p, m: Ema(p), "exchange": Averaged, "torch_ema": published}
no_torch_ema = pytest.mark.skipif(importlib.util.find_spec("torch_ema") is None, reason="torch_ema is not installed")
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=no_torch_ema if kind == "torch_ema" else ()) for kind in KINDS]
)
every_stage = pytest.mark.parametrize("stage", STAGES)


class Wide(nn.Sequential):
    """A model so large that another rank swaps during a swap."""

    def __init__(self):
        super().__init__(nn.Linear(7, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 5))


def train(rank, kind, stage, inside, build=Mlp):
    """`inside`: the context for reads and writes of parameters outside of a step."""
    torch.manual_seed(0)
    module = build()
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), **STAGES[stage])
    with inside(model):
        ema = KINDS[kind](module.parameters(), module)
    evaluated = []
    for step in range(4):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with inside(model):
            ema.update()
        if step % 2:
            with inside(model):
                ema.swap_in()
            with torch.no_grad():
                evaluated.append(model(batch(0, 6, 7)).tolist())
            with inside(model):
                ema.swap_out()
    return evaluated, sw.full_state_dict(model)


def nothing(model):
    return contextlib.nullcontext()


def writable(model):
    return sw.full_parameters(model, writable=True)


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all(bits_equal(value, expected[1][name]) for name, value in found[1].items())
    assert same_everywhere([*found[1].values()])


@every_kind
@pytest.mark.parametrize("stage", ["1", "2"])
@on_every_rank()
def test_parameters_of_each_rank_are_swapped_as_in_one_process(rank, world_size, kind, stage):
    expected = train(rank, kind, "0", nothing)
    assert_same(train(rank, kind, stage, nothing), expected)
    gather(None)


@every_kind
@every_stage
@on_every_rank()
def test_where_all_have_whole_parameters_every_stage_is_right(rank, world_size, kind, stage):
    expected = train(rank, kind, "0", nothing)
    assert_same(train(rank, kind, stage, writable), expected)
    gather(None)


@every_kind
@pytest.mark.parametrize("build", [Mlp, Wide])
@on_every_rank(at_least=2, spoils=True)
def test_shared_parameters_are_not_swapped(rank, world_size, kind, build):
    with pytest.raises(
        engine.Error,
        match=r"parameter '.*' was written to outside of the step.*full_parameters\(module, writable=True\).*EMA, SWA",
    ):
        train(rank, kind, "3 shared", nothing, build)


@on_every_rank(at_least=2, spoils=True)
def test_one_rank_that_swaps_is_named_on_all(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters()), zero=3)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    gather(None)
    if rank == world_size - 1:
        Ema(module.parameters()).parameters[2].data.mul_(2)
    gather(None)
    with (
        torch.no_grad(),
        pytest.raises(engine.Error, match=r"parameter '2\.weight' was written to outside of the step"),
    ):
        model(batch(rank, 6, 7))
        sw.full_state_dict(model)
    gather(None)


@every_kind
@on_every_rank()
def test_released_parameters_are_not_swapped(rank, world_size, kind):
    with pytest.raises(engine.Error, match=r"released.*sw\.full_parameters\(module\)"):
        train(rank, kind, "3 private", nothing)
    gather(None)


@every_kind
@on_every_rank(exactly=1)
def test_one_rank_shares_with_nobody(rank, world_size, kind):
    assert_same(train(rank, kind, "3 shared", nothing), train(rank, kind, "0", nothing))


@on_every_rank()
def test_the_guard_can_be_turned_off(rank, world_size):
    model = sw.wrap(Mlp(), zero=3, write_guard=None)
    assert "write_guard" not in sw.describe()["models"][-1]
    assert internals.replica(model).access.write_guard is None
    sw.wrap(Mlp(), zero=1, write_guard=None)
    sw.wrap(Mlp(), zero=3, share_parameters=False, write_guard=None)
    model = sw.wrap(Mlp(), zero=3)
    assert sw.describe()["models"][-1].get("write_guard") == (None if world_size == 1 else "samples")
    gather(None)
