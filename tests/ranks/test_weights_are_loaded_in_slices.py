"""Law: wrap(weights=) and load_pretrained() of a module on the meta device have the bits of load_state_dict() before wrap, from
every kind of place, at every stage; each rank reads its slices alone. An error is one on all ranks, and nothing has changed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Stopwatch, gather, on_every_rank
from internals import live_replicas
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_a_module_is_built_in_slices import PRIVATE, STAGES, Model, assert_is, every_stage, init, on_meta, train
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder as folder_of_team
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_memory_is_held_to_the_plan import pss_bytes, settled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def write_safetensors(path, state):
    """Write a file as the format's text has it."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, each in state.items():
        header[name] = {"dtype": NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in state.values():
            file.write(bytes(each.contiguous().view(-1).view(torch.uint8).tolist()))


def shared_folder(rank):
    """Return a folder that rank 0 has made and all ranks see."""
    return pathlib.Path(folder_of_team(rank))


def plain_model():
    """Return a model without buffers, which computes in any dtype."""
    model = Model()
    model.norm = nn.LayerNorm(40)
    return model


def values_of(plain=False):
    torch.manual_seed(11)
    twin = plain_model() if plain else Model()
    with torch.no_grad():
        for each in twin.parameters():
            nn.init.normal_(each)
    if not plain:
        twin.norm.running_mean.normal_()
        twin.norm.num_batches_tracked.fill_(5)
    return twin


def write_places(folder, state):
    """Write the state in every form but ours; return the places."""
    untied = {name: each for name, each in state.items() if name != "tied.weight"}
    (folder / "one").mkdir()
    write_safetensors(folder / "one" / "model.safetensors", untied)
    (folder / "many").mkdir()
    names = list(untied)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        write_safetensors(folder / "many" / file, {name: untied[name] for name in own})
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "many" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({"model": state}, folder / "saved.pt")
    dcp.save({"model": untied}, checkpoint_id=str(folder / "dcp"), no_dist=True)


@every_stage
@on_every_rank()
def test_every_place_has_the_same_bits(rank, world_size, stage):
    folder, options = shared_folder(rank), STAGES[stage]
    twin = values_of()
    state = {name: each.clone() for name, each in twin.state_dict().items()}
    if rank == 0:
        write_places(folder, state)
    other, plain = sw.wrap(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), **options)
    sw.save(str(folder / "ours"), other)
    gather(None)
    wanted = train(other, plain, rank)
    for place in ("one", "many", "saved.pt", "dcp", "ours", state, iter(state.items())):
        module = on_meta()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        where = str(folder / place) if isinstance(place, str) else place
        model, optimizer = sw.wrap(module, optimizer, weights=where, **options)
        assert module.tied.weight is module.head.weight
        assert_is(model, state)
        assert train(model, optimizer, rank) == wanted, place
    gather(None)


@every_stage
@on_every_rank()
def test_a_wrapped_module_takes_renamed_and_cast_values(rank, world_size, stage):
    folder, options = shared_folder(rank), STAGES[stage]
    state = {name: each.clone() for name, each in values_of(plain=True).state_dict().items()}
    low = {f"old.{name}": each.bfloat16() if each.is_floating_point() else each for name, each in state.items()}
    wide = {name.removeprefix("old."): each.float() if each.is_floating_point() else each for name, each in low.items()}
    if rank == 0:
        write_safetensors(folder / "model.safetensors", low)
        write_safetensors(folder / "wide.safetensors", state)
    gather(None)
    for precision in (None, "bf16"):
        module = plain_model()
        if precision is None:
            module.first.weight.data = module.first.weight.data.t().contiguous().t()  # columns lie together
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), precision=precision, **options)
        train(model, optimizer, rank, 1)
        assert sw.load_pretrained(model, folder, rename={"^old\\.": ""}) == ([], [])
        assert_is(model, wide)
        losses = train(model, optimizer, rank, 2)
        found = sw.load_pretrained(model, str(folder / "wide.safetensors"), dtype=torch.bfloat16)
        assert found == ([], [])
        assert_is(model, wide)
        assert losses[0] == train(model, optimizer, rank, 1)[0]
    module = plain_model().to(torch.bfloat16)
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=1e-2), **options)
    losses = train_low(model, optimizer, rank)
    sw.load_pretrained(model, folder, rename={"^old\\.": ""})
    assert_is(model, {name.removeprefix("old."): each for name, each in low.items()})
    train_low(model, optimizer, rank)  # the masters have taken the new values
    moved = sw.full_state_dict(model)["blocks.0.up.weight"]
    assert 0 < (moved.float() - wide["blocks.0.up.weight"]).abs().max() < 0.1 and losses
    gather(None)


def train_low(model, optimizer, rank):
    loss = model(batch(rank, 6, 7).to(torch.bfloat16)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


@every_stage
@on_every_rank()
def test_an_error_is_one_on_all_ranks_and_the_module_stays_on_meta(rank, world_size, stage):
    folder, options = shared_folder(rank), STAGES[stage]
    state = {name: each.clone() for name, each in values_of().state_dict().items()}
    if rank == 0:
        bad = {
            "lacks": {name: each for name, each in state.items() if name != "blocks.0.up.weight"},
            "shape": {**state, "gain": state["gain"][:-1].clone()},
            "cast": {**state, "gain": state["gain"].long()},
            "more": {**state, "blocks.0.up.weigth": state["gain"]},
            "good": state,
        }
        for name, each in bad.items():
            write_safetensors(folder / f"{name}.safetensors", each)
        data = (folder / "good.safetensors").read_bytes()
        (folder / "torn.safetensors").write_bytes(data[:-5])
    gather(None)
    module = on_meta()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    cases = {
        "lacks": "lacks 'blocks.0.up.weight' .did you mean",
        "shape": r"'gain' has shape \(39,\), and the module's \(40,\)",
        "cast": "'gain' is int64, which cannot be cast to the module's float32",
        "more": r"the module lacks 'blocks.0.up.weigth' \(did you mean 'blocks.0.up.weight'",
        "torn": "torn",
        "none": "does not exist",
    }
    for name, match in cases.items():
        with pytest.raises(sw.Error, match=match):
            sw.wrap(module, optimizer, weights=str(folder / f"{name}.safetensors"), **options)
        assert all(p.is_meta for p in (*module.parameters(), *module.buffers()))
    with pytest.raises(sw.Error, match="does not exist|could not|cannot"):  # on one rank only
        sw.wrap(
            module,
            optimizer,
            weights=str(folder / ("none" if rank == world_size - 1 else "good.safetensors")),
            **options,
        )
    with pytest.raises(sw.Error, match="'head.weight' and 'tied.weight' are one tensor of the module"):
        sw.wrap(module, optimizer, weights={**state, "tied.weight": state["tied.weight"] + 1}, **options)
    assert all(p.is_meta for p in (*module.parameters(), *module.buffers()))
    pairs = list(state.items())
    with pytest.raises((sw.Error, RuntimeError), match="shape|no more"):
        sw.wrap(module, optimizer, weights=iter([*pairs[:3], ("gain", torch.zeros(3))]), **options)
    assert all(p.is_meta for p in (*module.parameters(), *module.buffers()))
    model, optimizer = sw.wrap(module, optimizer, weights=str(folder / "good.safetensors"), **options)
    assert_is(model, state)
    missing, unexpected = sw.load_pretrained(model, str(folder / "lacks.safetensors"), strict=False)
    assert (missing, unexpected) == (["blocks.0.up.weight"], [])
    assert_is(model, state)
    losses = train(model, optimizer, rank)
    assert losses[0] == losses[0] and losses[1] != losses[0]
    gather(None)


@every_stage
@on_every_rank()
def test_an_error_leaves_a_module_of_memory_as_it_was(rank, world_size, stage):
    options = STAGES[stage]
    for dtype, precision in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "bf16")):
        module = gather(values_of(plain=True).to(dtype))[0]
        before = [(p, p.detach().clone()) for p in module.parameters()]
        with pytest.raises(sw.Error, match="the mapping lacks"):
            sw.wrap(module, weights={"other": torch.ones(1)}, precision=precision, **options)
        assert all(p is q and bits_equal(p.detach(), data) for p, (q, data) in zip(module.parameters(), before))
        assert not any(each._forward_pre_hooks or each._forward_hooks for each in module.modules())
        state = {name: each.clone() for name, each in module.state_dict().items()}
        assert_is(sw.wrap(module, weights=state, **options), state)
    outer = nn.Sequential(sw.wrap(nn.Linear(7, 7)), nn.Linear(7, 7))
    with pytest.raises(sw.Error, match="the mapping lacks"):
        sw.wrap(outer, weights={"other": torch.ones(1)}, **options)
    outer[0](torch.full((1, 7), float(rank))).sum().backward()
    assert outer[0].module.weight.grad[0, 0] == sum(range(world_size)) / world_size
    gather(None)


@every_stage
@on_every_rank(at_least=2)
def test_values_that_differ_between_ranks_are_an_error_that_names_the_tensor(rank, world_size, stage):
    folder = pathlib.Path(shared_folder(rank), str(rank))
    folder.mkdir()
    model = sw.wrap(values_of(plain=True), **STAGES[stage])
    state = {name: each.clone() for name, each in sw.full_state_dict(model).items()}
    other = {**state, "first.weight": state["first.weight"] + rank}
    write_safetensors(folder / "a.safetensors", other)
    torch.save(other, folder / "a.pt")
    dcp.save(other, checkpoint_id=str(folder / "dcp"), no_dist=True)
    columns = {**other, "first.weight": other["first.weight"].t().contiguous().t()}
    for place in (folder / "a.safetensors", folder / "a.pt", other):
        with pytest.raises(sw.Error, match="ranks 0 and 1 found.* first.weight float32 .* with other values"):
            sw.load_pretrained(model, place)
        assert_is(model, state)
    for place in (folder / "dcp", columns, iter(other.items())):  # read once
        with pytest.raises(sw.Error, match="first.weight float32 .* with other values"):
            sw.load_pretrained(model, place)
    with pytest.raises(sw.Error, match="ranks 0 and 1 found different tensors, dtype= None and dtype= torch.float16"):
        sw.load_pretrained(model, state, dtype=torch.float16 if rank else None)
    sw.load_pretrained(model, state)
    assert_is(model, state)
    gather(None)


@every_stage
@on_every_rank()
def test_an_error_of_the_optimizer_leaves_the_module_on_meta(rank, world_size, stage):
    folder = shared_folder(rank)
    (folder / "file").write_text("")
    gather(None)
    state = {name: each.clone() for name, each in values_of().state_dict().items()}
    for given in ({"weights": state}, {"init": init}):
        module = on_meta()
        optimizer = sw.optim.AdamW(module.parameters(), lr=1e-2)
        with pytest.raises((sw.Error, OSError, ValueError)) as told:
            sw.wrap(module, optimizer, offload=f"nvme:{folder / 'file'}", **given, **STAGES[stage])
        assert "file" in str(told.value)
        assert all(p.is_meta for p in (*module.parameters(), *module.buffers()))
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=1e-2), **given, **STAGES[stage])
        losses = train(model, optimizer, rank)
        assert losses[0] == losses[0]
    gather(None)


@every_stage
@on_every_rank()
def test_a_load_inside_writable_parameters_is_an_error(rank, world_size, stage):
    model = sw.wrap(values_of(plain=True), **STAGES[stage])
    state = {name: each + 1 for name, each in sw.full_state_dict(model).items()}

    def pairs():
        raise AssertionError("read")
        yield

    for place in (pairs(), "absent"):
        with (
            pytest.raises(sw.Error, match=r"full_parameters\(writable=True\) would undo it"),
            sw.full_parameters(model, writable=True),
        ):
            sw.load_pretrained(model, place)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.module.load_state_dict({**state, "gain": torch.zeros(3)})
    sw.load_pretrained(model, state)
    assert_is(model, state)
    gather(None)


@every_stage
@pytest.mark.parametrize("moment", ["match", "begin", "fill"])
@on_every_rank(at_least=2, deadline_s=100)
def test_an_interrupt_of_one_rank_ends_the_load_of_all(rank, world_size, moment, stage):
    model = sw.wrap(Model(), process_group=dist.new_group(range(world_size)), timeout_s=90, **STAGES[stage])
    state = gather(sw.full_state_dict(model))[0]
    last = rank == world_size - 1

    def interrupted(*_):
        if last:
            raise SystemExit(3) if moment == "match" else KeyboardInterrupt if moment == "fill" else OSError("no hook")

    def pairs():
        for number, pair in enumerate(state.items()):
            yield pair
            if number == 3:
                interrupted()

    how = {"rename": lambda name: interrupted() or name} if moment == "match" else {}
    if moment == "begin":
        next(each for each in live_replicas() if each.wraps(model.module)).access.register_before_writes(interrupted)
    start = Stopwatch()
    match = f"rank {world_size - 1}: .*(SystemExit|KeyboardInterrupt|no hook)"
    with pytest.raises((SystemExit, KeyboardInterrupt, OSError) if last else sw.Error, match=None if last else match):
        sw.load_pretrained(model, pairs() if moment == "fill" else state, **how)
    assert start.seconds() < 30
    versions = gather([p._version for p in model.module.parameters()])
    assert moment != "fill" or all(versions[-1])
    gather(None)


@every_stage
@on_every_rank()
def test_a_dtype_is_one_that_rounds_or_an_error(rank, world_size, stage):
    model = sw.wrap(nn.Linear(40, 40), **STAGES[stage])
    state = gather(sw.full_state_dict(model))[0]
    for dtype, kind in ((torch.int8, ValueError), ("cpu", ValueError), ("double", ValueError), (16, TypeError)):
        for place in (state, iter(state.items())):
            with pytest.raises(
                kind, match="floating-point torch.dtype or one of .'bfloat16', 'float16', 'float32'., got"
            ):
                sw.load_pretrained(model, place, dtype=dtype)
    assert_is(model, state)
    for place in (state, iter(state.items())):
        sw.load_pretrained(model, place, dtype="bfloat16")
        assert_is(model, {name: each.bfloat16().float() for name, each in state.items()})
    gather(None)


@every_stage
@on_every_rank()
def test_a_name_given_twice_is_an_error(rank, world_size, stage):
    model = sw.wrap(nn.Linear(40, 40), **STAGES[stage])
    state = gather(sw.full_state_dict(model))[0]
    pairs = list(state.items())
    with pytest.raises(sw.Error, match="two pairs have the name 'bias', by rename= or as given"):
        sw.load_pretrained(model, iter([*pairs, ("bias", state["bias"] + 1)]))
    both = [(f"{prefix}.{name}", each) for prefix in "ab" for name, each in pairs]
    for place in (both, dict(both)):
        with pytest.raises((sw.Error, ValueError), match="two (pairs|tensors).* name 'weight'"):
            sw.load_pretrained(model, place, rename={"^[ab]\\.": ""})
    assert_is(model, state)
    if world_size > 1:
        low = [(name, each.bfloat16() if rank else each) for name, each in pairs]
        with pytest.raises(sw.Error, match=r"weight float32 \[40, 40\] and weight bfloat16"):
            sw.load_pretrained(model, low)
    gather(None)


class Ties(nn.Module):
    """Tied: a parameter whose columns lie together, and a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        self.a.w = self.b.w = nn.Parameter(torch.zeros(41, 50).t())
        for each in (self.a, self.b):
            each.register_buffer("scale", torch.zeros(4) if each is self.a else self.a.scale)


@every_stage
@on_every_rank()
def test_conflicting_values_of_any_tied_tensor_are_an_error(rank, world_size, stage):
    torch.manual_seed(3)
    state = {"a.w": torch.randn(50, 41), "a.scale": torch.randn(4)}
    state |= {name.replace("a.", "b."): each.clone() for name, each in state.items()}
    model = sw.wrap(Ties(), **STAGES[stage])
    assert sw.load_pretrained(model, state) == ([], [])
    assert_is(model, state)
    for name in ("b.w", "b.scale"):
        changed = state[name].clone()
        changed[-1] += 1
        with pytest.raises(sw.Error, match=f"'a{name[1:]}' and '{name}' are one tensor of the module"):
            sw.load_pretrained(model, {**state, name: changed})
    gather(None)


class Kinds(nn.Module):
    """A complex buffer, and buffers of integers."""

    def __init__(self, dtype=torch.int64, value=0):
        super().__init__()
        self.line = nn.Linear(40, 40)
        self.register_buffer("turns", torch.full((30, 3), complex(value, 2 * value)))
        self.register_buffer("count", torch.full((5,), value, dtype=dtype))


@every_stage
@on_every_rank()
def test_complex_buffers_and_lossless_casts_of_integers(rank, world_size, stage):
    folder, options = shared_folder(rank), STAGES[stage]
    model = sw.wrap(Kinds(value=1), **options)
    state = gather(sw.full_state_dict(model))[0]
    sw.save(str(folder / "ours"), model)
    other = sw.wrap(Kinds(), **options)
    for place in (folder / "ours", state):
        other.module.turns.zero_()
        assert sw.load_pretrained(other, place) == ([], [])
        assert_is(other, state)
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.uint16, torch.int32):
        other.module.count.zero_()
        sw.load_pretrained(other, {**state, "count": torch.ones(5, dtype=dtype)})
        assert_is(other, state)
    for given, own in ((torch.int64, torch.int32), (torch.int8, torch.uint8), (torch.uint8, torch.bool)):
        narrow = sw.wrap(Kinds(own), **options)
        with pytest.raises(sw.Error, match="'count' is u?int.*, which cannot be cast to the module's"):
            sw.load_pretrained(narrow, {**state, "count": torch.ones(5, dtype=given)})
    gather(None)


@every_stage
@on_every_rank()
def test_a_place_is_known_by_what_it_holds(rank, world_size, stage):
    folder = shared_folder(rank)
    module = nn.Sequential(nn.Linear(40, 40))
    model = sw.wrap(module, **STAGES[stage])
    state = gather(sw.full_state_dict(model))[0]
    if rank == 0:
        torch.save(state, folder / "zip")
        torch.save(state, folder / "pickle.weights", _use_new_zipfile_serialization=False)
        torch.save(nn.Sequential(nn.Linear(40, 40)), folder / "whole.pt")
        torch.save({"model": nn.Sequential(nn.Linear(40, 40)), "epoch": 3}, folder / "under.pt")
    gather(None)
    for name in ("zip", "pickle.weights"):
        assert sw.load_pretrained(model, folder / name) == ([], []), name
        assert_is(model, state)
    for name in ("whole.pt", "under.pt"):
        with pytest.raises(
            sw.Error, match=r"torch.nn.modules.container.Sequential, not .*: save module.state_dict\(\)"
        ):
            sw.load_pretrained(model, folder / name)
    with open(folder / "zip", "rb") as file:
        for place in (5, None, nn.Linear(40, 40), module, file, b"zip", [("0.bias",)], {"0.bias"}):
            with pytest.raises(TypeError, match="must be a path, a mapping of str to Tensor, or an iterable of pairs"):
                sw.load_pretrained(model, place)
    assert_is(model, state)
    gather(None)


class Counted(nn.Linear):
    """A module with extra state."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@every_stage
@on_every_rank()
def test_extra_state_is_set_and_other_values_are_named(rank, world_size, stage):
    folder = shared_folder(rank)
    module = nn.Sequential(Counted(40, 40))
    model = sw.wrap(module, **STAGES[stage])
    state = {**gather(sw.full_state_dict(model))[0], "0._extra_state": {"seen": 5}}
    if rank == 0:
        torch.save(state, folder / "a.pt")
        torch.save({**state, "0._extra_state": {"seen": argparse.Namespace()}}, folder / "odd.pt")
        dcp.save({"model": state}, checkpoint_id=str(folder / "dcp"), no_dist=True)
    gather(None)
    module[0].seen = 5
    sw.save(folder / "ours", model)
    for place in (state, folder / "a.pt", folder / "dcp", iter(state.items()), folder / "ours"):
        module[0].seen = 0
        assert sw.load_pretrained(model, place) == ([], [])
        assert module[0].seen == 5
    sparse = torch.eye(40).to_sparse()
    with FakeTensorMode():
        fake = torch.zeros(40)
    places = [{**state, "0.bias": odd} for odd in ({}, [1.0], None, torch.zeros(40, device="meta"), sparse, fake)]
    for place in (*places, iter(places[0].items())):
        with pytest.raises(sw.Error, match="'0.bias' is a .*, not a dense tensor with memory"):
            sw.load_pretrained(model, place)
    with pytest.raises(sw.Error, match="0._extra_state.seen, of class argparse.Namespace, which cannot be read"):
        sw.load_pretrained(model, folder / "odd.pt")
    plain = sw.wrap(nn.Sequential(nn.Linear(40, 40)), **STAGES[stage])
    with pytest.raises(sw.Error, match="the module lacks '0._extra_state'"):
        sw.load_pretrained(plain, state)
    assert sw.load_pretrained(plain, state, strict=False) == ([], ["0._extra_state"])
    assert_is(plain, {name: each for name, each in state.items() if name != "0._extra_state"})
    gather(None)


class Table(nn.Module):
    """A buffer that no state dict holds, and one that it does."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(30, 30)
        self.register_buffer("angles", torch.arange(30.0), persistent=False)
        self.register_buffer("kept", torch.zeros(30))

    def forward(self, x):
        return self.line(x) + self.angles + self.kept


@every_stage
@on_every_rank()
def test_buffers_that_are_not_stored_come_from_init(rank, world_size, stage):
    options = STAGES[stage]
    state = {name: each + 1 for name, each in Table().state_dict().items()}
    state = {name: each.clone() for name, each in zip(state, gather(list(state.values()))[0])}
    module = on_meta(Table)
    with pytest.raises(sw.Error, match="'the module', a Table, has tensors on the meta device.*pass init="):
        sw.wrap(module, weights=state, **options)
    model = sw.wrap(module, weights=state, init=lambda each: each.angles.copy_(torch.arange(30.0)), **options)
    assert_is(model, state)
    assert module.angles.tolist() == list(range(30)) and module.kept.tolist() == [1.0] * 30
    real = Table()
    assert_is(sw.wrap(real, weights=state, **options), state)
    half = Table()
    half.angles = torch.empty(30, device="meta")
    values = gather(half.state_dict())[0]
    model = sw.wrap(half, weights=values, init=lambda each: each.angles.fill_(2), **options)
    assert_is(model, values)
    assert half.angles.tolist() == [2.0] * 30
    gather(None)


def transformers_models():
    import transformers

    llama = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    gpt2 = transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2, **none)
    return {"llama": (transformers.LlamaForCausalLM, llama), "gpt2": (transformers.GPT2LMHeadModel, gpt2)}


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@every_stage
@on_every_rank()
def test_transformers_models_are_those_of_from_pretrained(rank, world_size, stage, name):
    folder, options = shared_folder(rank), STAGES[stage]
    kind, config = transformers_models()[name]
    torch.manual_seed(5)
    if rank == 0:
        kind(config).save_pretrained(folder)
    gather(None)
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(rank))

    def losses(module, **how):
        model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), **options, **how)
        found = []
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, sw.full_state_dict(model)

    wanted, state = losses(kind.from_pretrained(folder, dtype=torch.float32))
    found, loaded = losses(on_meta(lambda: kind(config)), weights=folder)
    assert found == wanted
    assert [n for n in state if not bits_equal(state[n], loaded[n])] == []
    torch.manual_seed(9)
    wanted, state = losses(sw.materialize(on_meta(lambda: kind(config))))
    torch.manual_seed(9)
    found, made = losses(on_meta(lambda: kind(config)), init=True)
    assert found == wanted and [n for n in state if not bits_equal(state[n], made[n])] == []
    gather(None)


@contextlib.contextmanager
def peak_pss():
    """Sample the PSS while the body runs."""
    found, ended = [pss_bytes()], threading.Event()

    def sample():
        while not ended.wait(0.005):
            found.append(pss_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


WIDTH, LAYERS = 1024, 24  # 24 units of 16 MiB


@pytest.mark.timeout(170)
@on_every_rank(exactly=4, deadline_s=150)
def test_a_rank_reads_its_slices_and_holds_no_more(rank, world_size):
    def build():
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False))
                for _ in range(LAYERS)
            )
        )

    folder = shared_folder(rank)
    module = on_meta(build)
    if rank == 0:  # a sparse file: zeros, but for the last element of each tensor
        header, at, ends = {}, 0, []
        for name, each in module.named_parameters():
            nbytes = each.numel() * 4
            header[name] = {"dtype": "F32", "shape": list(each.shape), "data_offsets": [at, at + nbytes]}
            at += nbytes
            ends.append(at)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
            for end in ends:
                file.seek(8 + len(text) + end - 4)
                file.write(b"\0\0\x80\x3f")
    sw.wrap(nn.Linear(4, 4), **PRIVATE)
    gather(None)
    before = settled()
    read_before = int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
    with peak_pss() as peak:
        model = sw.wrap(module, weights=folder, **PRIVATE)
    read = int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1]) - read_before
    held = max(peak) - before
    slices = LAYERS * 16 // world_size
    found = gather((held >> 20, read >> 20))
    assert max(each[0] for each in found) <= slices + 16, found
    assert max(each[1] for each in found) <= slices + 8, found
    print("PSS and bytes read of ranks, MiB:", found)
    with sw.full_parameters(model):
        assert all(p.view(-1)[-1] == 1 and p.view(-1)[0] == 0 for p in module.parameters())
    gather(None)
    if rank == 0:
        os.unlink(folder / "model.safetensors")


@every_stage
@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@on_every_rank(at_least=3)
def test_several_hosts_build_and_load_alike(rank, world_size, stage, shape):
    state = {name: each.clone() for name, each in values_of().state_dict().items()}
    torch.manual_seed(2)
    made = {name: each.clone() for name, each in sw.materialize(on_meta(), init=init).state_dict().items()}
    for precision in (None, "fp16"):
        with on_hosts(hosts_of(shape, world_size)) as group:
            options = {**STAGES[stage], "process_group": group, "precision": precision}
            torch.manual_seed(2)
            model = sw.wrap(on_meta(), init=init, **options)
            assert_is(model, made)
            assert sw.load_pretrained(model, state) == ([], [])
            assert_is(model, state)
            assert_is(sw.wrap(on_meta(), weights=state, **options), state)


@every_stage
@on_every_rank(exactly=4)
def test_a_mesh_of_rows_builds_and_loads_alike(rank, world_size, stage):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    state = {name: each.clone() for name, each in values_of().state_dict().items()}
    torch.manual_seed(2)
    made = {name: each.clone() for name, each in sw.materialize(on_meta(), init=init).state_dict().items()}
    torch.manual_seed(2)
    model = sw.wrap(on_meta(), init=init, device_mesh=mesh, **STAGES[stage])
    assert_is(model, made)
    assert sw.load_pretrained(model, state) == ([], [])
    assert_is(model, state)
    gather(None)
