"""Laws of the beginning: with init_sync every rank holds rank 0's parameters and buffers. If modules differ in any
other way, all ranks get one sentence that names both sides. broadcast_buffers copies rank 0's buffers to all ranks at
each forward.
"""

from collections import OrderedDict

import pytest
import torch
from harness import Stopwatch, gather, on_every_rank, same_everywhere
from models import Mlp
from peer import PEER, batch, data_parallel, engine
from torch import nn


def normed():
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def flat_state(module):
    return {name: value.tolist() for name, value in module.state_dict().items()}


@on_every_rank()
def test_init_sync_gives_every_rank_the_state_of_rank_zero(rank, world_size):
    torch.manual_seed(100 + rank)
    module = normed().to(torch.float64)
    module[1].running_mean.fill_(rank)
    module[1].num_batches_tracked.fill_(rank + 5)
    states = gather(flat_state(module))
    assert world_size == 1 or states[0] != states[1]
    data_parallel(module)
    assert flat_state(module) == states[0]


@on_every_rank()
def test_init_sync_reaches_parameters_of_any_layout(rank, world_size):
    torch.manual_seed(100 + rank)
    module = nn.Module()
    module.last = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    module.turned = nn.Parameter(torch.randn(5, 7).t())
    module.gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])
    module.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    module.empty = nn.Parameter(torch.empty(0))
    module.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
    states = gather(flat_state(module))
    data_parallel(module)
    assert flat_state(module) == states[0]


@on_every_rank()
def test_without_init_sync_every_rank_keeps_its_own(rank, world_size):
    torch.manual_seed(100 + rank)
    module = Mlp()
    before = flat_state(module)
    data_parallel(module, init_sync=False)
    assert flat_state(module) == before


@pytest.mark.parametrize("broadcast", [True, False])
@on_every_rank()
def test_broadcast_buffers_decides_whose_buffers_a_forward_uses(rank, world_size, broadcast):
    torch.manual_seed(0)
    wrapped = data_parallel(normed(), broadcast_buffers=broadcast)
    norm = wrapped.module[1]
    for step in range(2):
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
        wrapped.zero_grad()
    means = gather(norm.running_mean.tolist())
    assert world_size == 1 or means[0] != means[1]  # each has seen its own batch since
    wrapped.eval()
    wrapped(batch(rank, 6, 7)).sum().backward()
    assert norm.running_mean.tolist() == (means[0] if broadcast else means[rank])
    assert int(norm.num_batches_tracked) == 2


@on_every_rank()
def test_buffers_are_left_alone_after_a_forward_inside_no_sync(rank, world_size):
    """torch's rule: a forward after one that did not synchronise does not broadcast."""
    torch.manual_seed(0)
    wrapped = data_parallel(normed())
    with wrapped.no_sync():
        wrapped(batch(rank, 6, 7)).sum().backward()
        mine = wrapped.module[1].running_mean.tolist()
        wrapped.eval()
        wrapped(batch(rank, 6, 7)).sum().backward()
    assert wrapped.module[1].running_mean.tolist() == mine
    gather(None)


class Layers(nn.Module):
    def __init__(self, *shapes, dtype=torch.float32, names="abcdef", frozen=()):
        super().__init__()
        for name, shape in zip(names, shapes):
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=name not in frozen))


#: the module of all ranks but the last, the module of the last, words the sentence must hold
DIFFERENCES = OrderedDict(
    names=(lambda: Layers((3, 4), (5,)), lambda: Layers((3, 4), (5,), names="ax"), ("'b'", "'x'")),
    shape=(lambda: Layers((3, 4), (5,)), lambda: Layers((4, 3), (5,)), ("'a'", "(3, 4)", "(4, 3)")),
    dtype=(lambda: Layers((3, 4)), lambda: Layers((3, 4), dtype=torch.float64), ("'a'", "float32", "float64")),
    order=(
        lambda: Layers((3, 4), (3, 4), names="ab"),
        lambda: Layers((3, 4), (3, 4), names="ba"),
        ("'a'", "'b'"),
    ),
    count=(lambda: Layers((3, 4), (5,)), lambda: Layers((3, 4), (5,), (6,)), ("2", "3")),
    frozen=(lambda: Layers((3, 4), (5,)), lambda: Layers((3, 4), (5,), frozen="b"), ("'b'", "frozen")),
)


@pytest.mark.skipif(PEER == "torch", reason="torch sees shapes alone")
@pytest.mark.parametrize("init_sync", [True, False], ids=["init_sync", "no init_sync"])
@pytest.mark.parametrize("difference", DIFFERENCES)
@on_every_rank(at_least=2)
def test_modules_that_differ_get_one_sentence_naming_both_sides(rank, world_size, difference, init_sync):
    usual, odd, words = DIFFERENCES[difference]
    last = world_size - 1
    start = Stopwatch()
    with pytest.raises(engine.Error) as raised:
        data_parallel((odd if rank == last else usual)(), init_sync=init_sync)
    assert start.seconds() < 2
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size
    for word in (*words, "0", str(last)):
        assert word in texts[0], (word, texts[0])
    # nothing is broken by it: the right module is wrapped at once
    wrapped = data_parallel(Mlp())
    wrapped(batch(rank, 6, 7)).sum().backward()
    assert same_everywhere([parameter.grad for parameter in wrapped.parameters()])


_PRIVATE = dict(zero=3, share_parameters=False)
#: what all ranks but the last say, what that one says, and a word of either
OPTIONS = dict(
    bucket_cap_mb=(dict(bucket_cap_mb=1), dict(bucket_cap_mb=25), ("1", "25")),
    zero=(dict(zero=1), dict(zero=2), ("zero 1", "zero 2")),
    compress=(dict(), dict(compress="bf16"), ("None", "Bf16")),
    auto=(dict(), dict(compress="auto"), ("None", "'auto'")),
    reduce=(dict(), dict(reduce="sum"), ("mean", "sum")),
    precision=(dict(), dict(precision="bf16"), ("None", "bfloat16")),
    broadcast_buffers=(dict(), dict(broadcast_buffers=False), ("True", "False")),
    units=(dict(units="size", **_PRIVATE), dict(units=torch.nn.Linear, **_PRIVATE), ("'size'", "Linear")),
    reshard=(dict(**_PRIVATE), dict(reshard_after_forward=False, **_PRIVATE), ("True", "reshard_after_forward False")),
)


@pytest.mark.skipif(PEER == "torch", reason="torch trains on")
@pytest.mark.parametrize("option", OPTIONS)
@on_every_rank(at_least=2)
def test_an_option_that_differs_is_named(rank, world_size, option):
    import shardwright as sw

    usual, odd, words = OPTIONS[option]
    given = dict(odd if rank == world_size - 1 else usual)
    if given.get("compress") == "bf16":
        given["compress"] = sw.Bf16()
    with pytest.raises(engine.Error, match="ranks disagree about the wrapped Mlp") as raised:
        data_parallel(Mlp(), **given)
    assert same_everywhere(str(raised.value))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.skipif(PEER == "torch", reason="an AttributeError there")
@on_every_rank()
def test_what_is_no_module_is_refused_by_its_type(rank, world_size):
    for given, name in ((None, "NoneType"), (Mlp, "type"), ([Mlp()], "list")):
        with pytest.raises(TypeError, match=f"needs a torch.nn.Module, got {name}"):
            data_parallel(given)


@pytest.mark.skipif(PEER == "torch", reason="our sentence")
@on_every_rank(at_least=2)
def test_units_of_the_same_types_in_another_order_are_the_same(rank, world_size):
    types = [torch.nn.Linear, torch.nn.Tanh]
    wrapped = data_parallel(Mlp(), units=types[::-1] if rank else tuple(types), **_PRIVATE)
    wrapped(batch(rank, 6, 7)).sum().backward()
