"""Law: after sw.checkpoint_units a step has the bits of one without it, at every stage, whatever a forward draws at
random or writes to its buffers. Each unit's forward then runs twice in a step. Misuse is a sentence.
"""

import copy
import errno
import io
import os
import pickle
import weakref

import pytest
import torch
from harness import gather, in_turn, on_every_rank
from internals import Recompute, _Region
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from test_offloaded_state_has_the_same_bits import mount_small
from test_units_are_whole_only_while_they_run import (
    Block,
    Blocks,
    accumulating,
    assert_released,
    broken_off,
    gradients_of_inputs,
    penalty_on_gradients,
    several_forwards,
    steps,
    the_same_graph_twice,
)
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}]
CALLS = {
    "each": {},
    "two": {"every": 2},
    "all": {"every": 9},
    "file": {"offload": "nvme:{}"},
    "two in a file": {"every": 2, "offload": "nvme:{}"},
    "policy": {"policy": [torch.ops.aten.addmm.default]},
}


class Drawing(nn.Module):
    """A unit that draws at random, has running means, and takes keywords and a tensor without gradient."""

    calls = 0

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.norm = norm(16)
        self.wide, self.back = nn.Linear(16, 48), nn.Linear(48, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, scale, mask):
        Drawing.calls += 1
        return x + scale * self.drop(self.back(torch.tanh(self.wide(self.norm(x))))) * mask


class Random(Blocks):
    norm = nn.BatchNorm1d

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Drawing(self.norm) for _ in range(5))

    def run(self, x):
        mask = (torch.arange(len(x)) % 3 > 0).unsqueeze(1)
        for block in self.blocks:
            x = block(x, scale=0.5, mask=mask)
        return x


class Cast(Random):
    norm = nn.LayerNorm


def trained(rank, call, when, *, sharded=False, build=Random, **stage):
    torch.manual_seed(rank)
    generator = torch.get_rng_state()
    torch.manual_seed(0)
    module = build()
    if call is not None and when == "before":
        sw.checkpoint_units(module, **call)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if sharded:
        for block in module.blocks:
            sw.fully_shard(block)
        model = sw.fully_shard(module, bucket_cap_mb=0.004, broadcast_buffers=True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    else:
        model, optimizer = sw.wrap(module, optimizer, bucket_cap_mb=0.004, **stage)
    if call is not None and when == "after":
        assert sw.checkpoint_units(model, **call) is model
    torch.set_rng_state(generator)
    Drawing.calls = 0
    losses = steps(model, optimizer, rank, 3)
    return losses, sw.full_state_dict(model), [b.clone() for b in module.buffers()], torch.get_rng_state()


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all(bits_equal(value, expected[1][name]) for name, value in found[1].items())
    assert all(map(bits_equal, found[2], expected[2]))
    assert bits_equal(found[3], expected[3])


def placed(call, folder):
    return {name: value.format(folder) if name == "offload" else value for name, value in call.items()}


@pytest.mark.parametrize("name", CALLS)
@on_every_rank()
def test_a_step_has_the_same_bits_at_every_stage(rank, world_size, name):
    call, at = placed(CALLS[name], "/tmp"), [*CALLS].index(name)
    expected = trained(rank, None, None, zero=0)
    assert Drawing.calls == 15
    cases = [(stage, when) for stage in STAGES for when in ("before", "after")]
    cases.append(({"sharded": True}, "after"))
    for stage, when in in_turn(cases, at, of=3):
        assert_same(trained(rank, call, when, **stage), expected)
        assert Drawing.calls == 30  # a recomputation that gives the next one its inputs is not repeated
    gather(None)


@on_every_rank()
def test_low_precision_and_autocast_are_those_of_the_forward(rank, world_size):
    for stage in in_turn(STAGES, world_size):
        found = [
            trained(rank, call, "after", build=Cast, precision="bf16", **stage) for call in (None, {}, {"every": 2})
        ]
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])
        losses = []
        for call in (None, {"every": 2}):
            torch.manual_seed(0)
            model, optimizer = sw.wrap(module := Cast(), torch.optim.SGD(module.parameters(), lr=0.1), **stage)
            if call is not None:
                sw.checkpoint_units(model, **call)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(rank, 6, 7)).float().square().mean()
            loss.backward()  # outside of autocast
            optimizer.step()
            losses.append((loss.item(), sw.full_state_dict(model)))
        assert losses[0][0] == losses[1][0]
        assert all(bits_equal(value, losses[1][1][name]) for name, value in losses[0][1].items())
    gather(None)


@pytest.mark.parametrize(
    "train",
    [several_forwards, the_same_graph_twice, gradients_of_inputs, accumulating, broken_off, penalty_on_gradients],
)
@on_every_rank()
def test_every_shape_of_a_step(rank, world_size, train):
    found = []
    for call in (None, {}, {"every": 2}):
        torch.manual_seed(0)
        module = Blocks()
        model, optimizer = sw.wrap(
            module, torch.optim.AdamW(module.parameters(), lr=1e-2), zero=3, share_parameters=False, bucket_cap_mb=0.004
        )
        if call is not None:
            sw.checkpoint_units(model, **call)
        losses = train(model, optimizer, rank)
        found.append((losses, sw.full_state_dict(model)))
        assert_released(model)
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert all(bits_equal(value, found[0][1][name]) for name, value in state.items())
    gather(None)


@on_every_rank(exactly=1)
def test_activations_are_gone_and_nothing_outlives_the_backward(rank, world_size, tmp_path):
    for every, kept in ((1, 3), (3, 1)):
        torch.manual_seed(0)
        model = sw.checkpoint_units(Blocks(), every=every)
        seen = []
        for block in model.blocks:
            block.wide.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
            block.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
        loss = model(batch(rank, 6, 7)).sum()
        alive = [each() is not None for each in seen]
        assert sum(alive[0::2]) == 0 and sum(alive[1::2]) == 1  # the head's input
        loss.backward()
        del loss
        assert not any(each() is not None for each in seen), kept
    torch.manual_seed(0)
    model = sw.checkpoint_units(Blocks(), offload=f"nvme:{tmp_path}")
    for _ in range(3):
        model(torch.randn(2048, 7)).sum().backward()
    store = type(model.blocks[0])._shardwright_recompute.store
    assert os.listdir(tmp_path) == [] and 0 < store.nbytes <= 64 << 20
    assert sum(map(len, store._pages._free.values())) <= 3
    loss = model(torch.randn(2048, 7)).sum()
    del loss  # a graph without a backward
    assert sum(map(len, store._pages._free.values())) <= 3


@on_every_rank()
def test_misuse_is_a_sentence(rank, world_size, tmp_path):
    model = sw.wrap(Blocks(), zero=2)
    for call, kind, text in (
        ({"every": 0}, ValueError, "every must be"),
        ({"offload": "disk"}, ValueError, "offload must be"),
        ({"every": 2, "policy": []}, ValueError, "policy= needs every=1"),
        ({"offload": f"nvme:{tmp_path}/none" if rank == world_size - 1 else f"nvme:{tmp_path}"}, OSError, "none"),
    ):
        with pytest.raises(kind, match=text):
            sw.checkpoint_units(model, **call)
    sw.checkpoint_units(model)
    with pytest.raises(engine.Error, match=r"unit 'blocks\.0' already"):
        sw.checkpoint_units(model)
    with pytest.raises(engine.Error, match="finds no units in this Linear"):
        sw.checkpoint_units(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="needs a torch.nn.Module, got int"):
        sw.checkpoint_units(3)
    for change in (sw.checkpoint_units, sw.compile_units):
        with pytest.raises(engine.Error, match="cannot change the call of a module of TorchScript"):
            change(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    by_itself = Blocks()
    by_itself.gradient_checkpointing = True
    with pytest.raises(engine.Error, match="recomputes its activations by itself"):
        sw.checkpoint_units(by_itself)
    gather(None)


class InPlace(Blocks):
    def run(self, x):
        for block in self.blocks:
            before, x = x, block(x)
            with torch.no_grad():
                before.mul_(2)
        return x


@on_every_rank(exactly=1)
def test_an_input_that_was_changed_in_place_is_an_error_and_copies_are_plain(rank, world_size, tmp_path):
    model = sw.checkpoint_units(InPlace())
    with pytest.raises(RuntimeError, match="was changed in place after the unit's forward"):
        model(batch(rank, 6, 7)).sum().backward()
    in_file = sw.checkpoint_units(InPlace(), offload=f"nvme:{tmp_path}")  # changed before, beside or behind its write
    with pytest.raises(RuntimeError, match="was changed in place after the unit's forward"):
        in_file(torch.randn(2048, 7)).sum().backward()
    saved = io.BytesIO()
    torch.save(output := sw.checkpoint_units(Blocks(), every=2).blocks[0](torch.ones(2, 16)), saved)
    saved.seek(0)
    assert bits_equal(torch.load(saved), output.detach())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(each.blocks[0]) is Block and isinstance(model.blocks[0], Block)
        assert type(model.blocks[0]) is type(model.blocks[1]) is not Block


def norms(switches):
    """Return buffers after forwards of which the first leaves running means at 0, or has frozen norms."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)) for _ in range(3)))
    yield model
    torch.manual_seed(1)
    for x, trains in zip((torch.zeros(5, 4), torch.randn(5, 4), torch.randn(5, 4)), (not switches, True, True)):
        for each in model:
            each[1].train(trains)
        model(x).square().sum().backward()
    yield [buffer.clone() for buffer in model.buffers()]


@on_every_rank(exactly=1)
def test_running_means_count_once_whatever_the_first_forward_was(rank, world_size):
    for switches in (False, True):
        plain, recomputed = norms(switches), norms(switches)
        next(plain), sw.checkpoint_units(next(recomputed))
        assert all(map(bits_equal, next(plain), next(recomputed)))


class Latent(nn.Module):
    """A unit that changes its buffers only if it is told to."""

    def __init__(self):
        super().__init__()
        self.norm, self.back, self.on = nn.BatchNorm1d(4), nn.Linear(4, 4), False

    def forward(self, x):
        return self.back(self.norm(x) if self.on else x)


@on_every_rank(exactly=1)
def test_a_change_of_buffers_that_is_new_is_an_error_once(rank, world_size):
    model = sw.checkpoint_units(nn.Sequential(Latent(), Latent()))
    model(torch.randn(5, 4)).sum().backward()
    model[0].on = True
    with pytest.raises(engine.Error, match=r"changes its buffer 'norm\.num_batches_tracked' now, and did not before"):
        model(torch.randn(5, 4))
    before = model[0].norm.num_batches_tracked.clone()
    mean = model[0].norm.running_mean.clone()
    x = torch.randn(5, 4)
    model(x).sum().backward()
    assert model[0].norm.num_batches_tracked == before + 1
    assert torch.allclose(model[0].norm.running_mean, 0.9 * mean + 0.1 * x.mean(0))


class Pair(nn.Module):
    """A unit that takes and gives a hidden and a residual tensor."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(7, 7), nn.Dropout(0.2)

    def forward(self, x, residual):
        Pair.calls += 1
        residual = x if residual is None else residual + x
        return self.drop(self.line(residual)).tanh(), residual


class Pairs(nn.Module):
    """Units whose residual tensor goes to the next one, or to the one after it."""

    def __init__(self, skips):
        super().__init__()
        self.blocks, self.skips = nn.ModuleList(Pair() for _ in range(5)), skips

    def forward(self, x):
        residual = earlier = None
        for block in self.blocks:
            x, given = block(x, residual)
            residual, earlier = (earlier, given) if self.skips else (given, None)
        return x + (given if residual is None else residual)


@on_every_rank(exactly=1)
def test_several_outputs_may_go_to_later_units(rank, world_size):
    for skips in (False, True):
        found = []
        for every in (None, 1, 2, 3, 9):
            torch.manual_seed(0)
            model = Pairs(skips)
            if every is not None:
                sw.checkpoint_units(model, every=every)
            Pair.calls = 0
            loss = model(batch(rank, 6, 7)).square().sum()
            loss.backward(retain_graph=True)
            assert Pair.calls == (5 if every is None else 10)
            loss.backward()
            found.append([p.grad for p in model.parameters()])
        assert all(all(map(bits_equal, each, found[0])) for each in found[1:])


@on_every_rank(exactly=1)
def test_a_functional_call_is_an_error(rank, world_size):
    model = sw.checkpoint_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    other = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(engine.Error, match="functional_call on Linear, a unit of checkpoint_units"):
        torch.func.functional_call(model, other, (torch.ones(2, 4),))
    with torch.no_grad():  # nothing is recomputed
        torch.func.functional_call(model, other, (torch.ones(2, 4),))


@on_every_rank(exactly=1)
def test_random_state_is_kept_of_the_device_that_is_no_host(rank, world_size, monkeypatch):
    kept = []
    monkeypatch.setattr(_Region, "end", lambda region, output: kept.append(region.anchor.device.type))
    host, device = Drawing(nn.LayerNorm), Drawing(nn.LayerNorm).to("meta")
    settings = Recompute(1, None, ())
    x, scale = torch.ones(2, 16), torch.ones(())
    for unit, inputs in ((host, x), (device, x.to("meta")), (host, None), (device, None)):
        settings.run(unit, lambda *args, **kwargs: x, (), {"scale": scale, "inputs": inputs})
    assert kept == ["cpu", "meta", "cpu", "meta"]


class Adding(nn.Linear):
    """A unit that changes its input in its forward."""

    def forward(self, x):
        x += 1
        return super().forward(x)


@on_every_rank(exactly=1)
def test_a_unit_that_changes_its_input_is_an_error(rank, world_size):
    for x in (torch.ones(2, 4), torch.ones(2, 4, requires_grad=True) * 1):
        for every in (1, 2):
            model = sw.checkpoint_units(nn.Sequential(*(Adding(4, 4) for _ in range(3))), every=every)
            with pytest.raises(engine.Error, match=r"unit Adding changes an input of shape \[2, 4\] in place"):
                model(x.clone())


@on_every_rank(exactly=1)
def test_nested_units_are_recomputed_once(rank, world_size):
    model = sw.wrap(Blocks(), zero=3, share_parameters=False, units=(Block, nn.Linear))
    sw.checkpoint_units(model)
    named = {name: getattr(type(each), "_shardwright_recompute", None) for name, each in model.module.named_modules()}
    assert {name for name, each in named.items() if each} == {"blocks.0", "blocks.1", "blocks.2", "first", "last"}
    model(batch(rank, 6, 7)).sum().backward()


def on_a_full_disk(rank, world_size, folder):
    if rank == 0 and not mount_small(folder):
        return gather("not permitted")
    if gather("")[0]:
        return "not permitted"
    model = sw.wrap(Blocks(), zero=2)
    sw.checkpoint_units(model, offload=f"nvme:{folder}")
    with pytest.raises((OSError, engine.Error), match="rank 0.* No space left|allocating .* No space left") as caught:
        model(torch.randn(2048, 7)).sum().backward()
    if rank == 0:
        assert caught.value.errno == errno.ENOSPC
    assert os.listdir(folder) == []
    return "done"


def test_a_full_disk_is_one_sentence_on_all_ranks(fresh_ranks, world_size, tmp_path):
    with fresh_ranks(world_size) as team:
        if "not permitted" in team.run(on_a_full_disk, folder=str(tmp_path)):
            pytest.skip("mounting is not permitted here")
