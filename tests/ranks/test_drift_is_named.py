"""Law: a module that is no longer the one that was wrapped is an error that names the parameter and the remedy, before
a gradient goes unaveraged."""

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from internals import param_table
from models import Mlp
from peer import PEER, batch, data_parallel, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch trains on")


def replace(module):
    module[2].weight = nn.Parameter(module[2].weight.detach().clone())


def add(module):
    module.register_parameter("extra", nn.Parameter(torch.ones(3)))


def add_module(module):
    module.append(nn.Linear(5, 5))


def assign(module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def remove(module):
    module[2].bias = None


def cast(module):
    module.to(torch.float64)


CASES = {
    "replaced": (replace, "2.weight"),
    "added": (add, "extra"),
    "added with a module": (add_module, "5.weight"),
    "assigned by load_state_dict": (assign, "0.weight"),
    "removed": (remove, "2.bias"),
    "cast": (cast, "0.weight"),
}


def step(model, rank):
    model(batch(rank, 6, 7, dtype=next(model.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize("case", CASES)
@on_every_rank()
def test_a_parameter_that_changed_is_named_at_the_forward(rank, world_size, case):
    change, name = CASES[case]
    torch.manual_seed(0)
    module = Mlp()
    wrapped = data_parallel(module)
    step(wrapped, rank)
    change(module)
    with pytest.raises(engine.Error) as raised:
        step(wrapped, rank)
    assert name in str(raised.value) and "wrap" in str(raised.value)
    again = data_parallel(module)  # the remedy
    module.zero_grad()
    step(again, rank)
    grads = [parameter.grad for name, parameter in module.named_parameters() if name != "extra"]
    assert same_everywhere([*grads])


@pytest.mark.parametrize("case", CASES)
@on_every_rank()
def test_a_parameter_that_changed_is_named_at_the_step(rank, world_size, case):
    change, name = CASES[case]
    torch.manual_seed(0)
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped = data_parallel(module)
    step(wrapped, rank)
    change(module)
    with pytest.raises(engine.Error, match=name.replace(".", "[.]")):
        optimizer.step()
    gather(None)


@on_every_rank()
def test_what_leaves_the_parameters_in_place_is_no_drift(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    wrapped = data_parallel(module)
    for change in (
        lambda: module.load_state_dict(module.state_dict()),
        lambda: module.to(torch.float32),
        lambda: module.train(False),
        lambda: module.requires_grad_(True),
        lambda: module.register_buffer("note", torch.ones(2)),
        lambda: [parameter.data.mul_(0.5) for parameter in module.parameters()],
    ):
        change()
        module.zero_grad()
        step(wrapped, rank)
        assert same_everywhere([parameter.grad for parameter in module.parameters()])


class Adapted(nn.Module):
    """A layer with a low-rank adapter."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def adapt(module):
    module[2] = Adapted(module[2])


@pytest.mark.parametrize(
    ("change", "name"),
    [(nn.Module.share_memory, "0[.]weight"), (adapt, "2[.]layer|2[.]down|2[.]up")],
    ids=["moved", "adapted"],
)
@pytest.mark.parametrize("zero", [1, 2, 3])
@on_every_rank()
def test_what_moves_or_adapts_a_sliced_module_is_named(rank, world_size, zero, change, name):
    torch.manual_seed(0)
    module = Mlp()
    wrapped, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero)
    step(wrapped, rank)
    optimizer.step()
    if change is nn.Module.share_memory:  # refused at its line, and nothing has moved
        with pytest.raises(engine.Error, match="cannot move|no memory to share"):
            change(module)
        step(wrapped, rank)
        gather(None)
        return
    change(module)
    with pytest.raises(engine.Error, match=name):
        step(wrapped, rank)
    gather(None)


def write_in_place(module):
    with torch.no_grad():
        module[0].weight.add_(1)


@pytest.mark.parametrize(
    ("change", "options"),
    [(add_module, {}), (cast, {"zero": 1}), (write_in_place, {"zero": 3}), (write_in_place, {"zero": 3, "write_guard": None})],
    ids=["added", "cast at 1", "written at 3", "written at 3 unguarded"],
)  # fmt: skip
@on_every_rank()
def test_a_change_on_one_rank_alone_ends_its_peers_waits_at_once(rank, world_size, change, options):
    module = Mlp()
    wrapped = sw.wrap(module, **options)
    step(wrapped, rank)
    if rank == world_size - 1:
        change(module)
    with pytest.raises(
        sw.Error, match=r"parameter '\d\.(weight|bias)'"
    ):  # the one that the peers heard, within the harness's deadline
        for _ in range(2):
            wrapped(batch(rank, 6, 7, dtype=next(module.parameters()).dtype)).sum().backward()
    gather(None)  # the rank lives on, so its end has told no peer


@on_every_rank()
def test_a_rank_of_another_version_is_named(rank, world_size):
    kept, other = param_table.__version__, world_size - 1
    param_table.__version__ = "0.0.9" if rank == other else kept
    try:
        if world_size == 1:
            return
        with pytest.raises(
            sw.Error, match=r"has shardwright 0\.0\.9 .*install the same version on every rank"
        ) as caught:
            sw.wrap(Mlp())
        holders = "rank 0 has" if world_size == 2 else "ranks 0, 1 have"
        assert world_size > 3 or f"{holders} shardwright {kept}" in str(caught.value)
    finally:
        param_table.__version__ = kept
    gather(None)
