"""Law: iter_full_parameters() yields what full_state_dict() holds, in one order on all ranks, at every stage; a rank holds two
chunks at most, and one that gets no values none. A rank that stops alone is named on those that go on; an error at the call is
one on all ranks. sharding() tells where the elements lie.
"""

import contextlib
import gc

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, sw
from test_a_module_is_built_in_slices import PRIVATE, STAGES, Model, every_stage, train
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_memory_is_held_to_the_plan import pss_bytes, settled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


def model_of(dtype=torch.float32):
    """Return a model with a tied and a frozen parameter, one that is not row-major, and one without elements."""
    torch.manual_seed(5)
    model = Model().to(dtype)
    with torch.no_grad():
        for each in model.parameters():
            nn.init.normal_(each)
    model.first.weight.data = model.first.weight.data.t().contiguous().t()
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def trained(rank, wrap=sw.wrap, **options):
    model = model_of()
    model, optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    train(model, optimizer, rank, 2)
    return model, optimizer


def whole(model):
    """Return the parameters' values as the whole state has them, each under its first name."""
    state = sw.full_state_dict(model)
    return {name: state[name].clone() for name, _ in model.module.named_parameters()}


def assert_equal(found, wanted):
    assert list(found) == list(wanted)
    assert [name for name in wanted if not bits_equal(found[name], wanted[name])] == []


@every_stage
@on_every_rank()
def test_values_are_the_whole_states(rank, world_size, stage):
    model, optimizer = trained(rank, **STAGES[stage])
    wanted = whole(model)
    for most in (1, 5000, 1 << 20):
        found = dict(sw.iter_full_parameters(model, bytes=most))
        assert_equal(found, wanted)
        assert found["first.weight"].stride() == (1, 40)
    for receiver in (*range(min(world_size, 2)), "owner"):
        rows = list(sw.iter_full_parameters(model, bytes=5000, ranks=receiver))
        assert [name for name, _ in rows] == list(wanted)
        held = gather([each is not None for _, each in rows])
        assert all(sum(row) == 1 for row in zip(*held))
        assert receiver == "owner" or all(held[receiver])
        assert all(each is None or bits_equal(each, wanted[name]) for name, each in rows)
    names = ["gain", "blocks.0.up.weight"]
    low = dict(sw.iter_full_parameters(model, names=names, dtype=torch.bfloat16))
    assert_equal(low, {name: each.bfloat16() for name, each in wanted.items() if name in names})
    assert_equal(dict(sw.iter_full_parameters(model, names=names.__contains__, dtype=torch.bfloat16)), low)
    assert list(sw.iter_full_parameters(model, names=())) == []
    train(model, optimizer, rank, 1)
    assert_equal(found, wanted)  # what a program keeps stays
    for _, each in sw.iter_full_parameters(model):
        each.zero_()
    assert_equal(dict(sw.iter_full_parameters(model)), whole(model))
    gather(None)


@every_stage
@on_every_rank(exactly=4)
def test_a_mesh_of_rows_streams_alike(rank, world_size, stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _ = trained(rank, device_mesh=mesh, **STAGES[stage])
    wanted = whole(model)
    assert_equal(dict(sw.iter_full_parameters(model, bytes=5000)), wanted)
    owned = [each for _, each in sw.iter_full_parameters(model, ranks="owner")]
    held = [sum(row) for row in zip(*gather([each is not None for each in owned]))]
    assert held == [1] * len(wanted)
    found = sw.sharding(model)
    assert all(each.mesh == ((0, 1), (2, 3)) for each in found.values())
    assert all(each.ranges[0] == each.ranges[2] for each in found.values())
    gather(None)


@every_stage
@pytest.mark.parametrize("shape", ["2+1", "crosswise"])
@on_every_rank(at_least=3)
def test_several_hosts_stream_alike(rank, world_size, shape, stage):
    with on_hosts(hosts_of(shape, world_size)) as group:
        model, _ = trained(rank, process_group=group, **STAGES[stage])
        wanted = whole(model)
        assert_equal(dict(sw.iter_full_parameters(model, bytes=5000)), wanted)
        rows = dict(sw.iter_full_parameters(model, bytes=5000, ranks=world_size - 1))
        if rank == world_size - 1:
            assert_equal(rows, wanted)


@on_every_rank()
def test_every_face_streams(rank, world_size):
    plain = model_of()
    plain.first.weight.data = plain.first.weight.data.contiguous()  # as fully_shard demands
    wanted = {name: each.detach().clone() for name, each in plain.named_parameters()}
    for block in plain.blocks:
        sw.fully_shard(block)
    sw.fully_shard(plain)
    assert_equal(dict(sw.iter_full_parameters(plain, bytes=5000)), wanted)
    assert_equal(dict(sw.iter_full_parameters(sw.DistributedDataParallel(model_of()))), wanted)
    low = model_of(torch.bfloat16)
    wanted = {name: each.detach().clone() for name, each in low.named_parameters()}
    model, _ = sw.wrap(low, sw.optim.AdamW(low.parameters()), **PRIVATE)
    assert_equal(dict(sw.iter_full_parameters(model)), wanted)
    gather(None)


@every_stage
@on_every_rank(at_least=2)
def test_a_rank_that_stops_alone_is_named_on_the_others(rank, world_size, stage):
    model, optimizer = trained(rank, **STAGES[stage])
    last = world_size - 1
    told = f"rank {last} stopped after 'first.bias', and rank {rank} goes on"

    def leave(how):
        for name, _ in sw.iter_full_parameters(model, bytes=1):
            if name == "first.bias" and rank == last:
                if how == "break":
                    break
                raise KeyError(name)

    for how in ("break", "raise"):
        expected = contextlib.nullcontext() if how == "break" else pytest.raises(KeyError)
        with expected if rank == last else pytest.raises(sw.Error, match=told):
            leave(how)
    stream = sw.iter_full_parameters(model, bytes=1)
    if rank == last:
        del stream
    else:
        with pytest.raises(sw.Error, match=f"rank {last} stopped before the first parameter"):
            next(stream)
    for name, _ in sw.iter_full_parameters(model, bytes=1):  # all together: no error
        if name == "first.bias":
            break
    train(model, optimizer, rank, 1)
    assert_equal(dict(sw.iter_full_parameters(model)), whole(model))
    gather(None)


@on_every_rank(at_least=2, spoils=True)
def test_a_rank_that_does_not_go_on_ends_the_others_at_the_deadline(rank, world_size):
    model = sw.wrap(model_of(), process_group=torch.distributed.new_group(range(world_size)), timeout_s=2, **PRIVATE)
    stream = sw.iter_full_parameters(model, bytes=1)
    if rank == 0:
        with pytest.raises(sw.Error, match="iter_full_parameters"):
            list(stream)
    gather(None)


@every_stage
@on_every_rank()
def test_an_error_at_the_call_is_one_on_all_ranks(rank, world_size, stage):
    model, _ = trained(rank, **STAGES[stage])
    bad = [
        ({"bytes": 0}, "bytes= must be an integer of at least 1, got 0"),
        ({"bytes": 1.5}, "bytes= must be an integer of at least 1, got 1.5"),
        ({"dtype": torch.int8}, "dtype= must be a floating-point torch.dtype or None, got torch.int8"),
        ({"ranks": world_size}, rf"or a rank in \[0, {world_size}\), got {world_size}"),
        ({"ranks": True}, "ranks= must be"),
        ({"names": "gain"}, "names= must be a collection of str, a callable or None, got 'gain'"),
        ({"names": ["gian"]}, "'gian', which is no parameter: did you mean 'gain'"),
    ]
    for given, match in bad:
        with pytest.raises((ValueError, TypeError), match=match):
            sw.iter_full_parameters(model, **given)
    with pytest.raises(sw.Error, match="needs a wrapped module"):
        sw.iter_full_parameters(nn.Linear(1, 1))
    with sw.full_parameters(model, writable=True), pytest.raises(sw.Error, match=r"inside full_parameters\(writable"):
        sw.iter_full_parameters(model)
    last = rank == world_size - 1
    if world_size > 1:
        for given in (
            {"bytes": 99 if last else 98},
            {"names": ["gain"] if last else None},
            {"ranks": 0 if last else 1},
        ):
            with pytest.raises(sw.Error, match="rank 0 asks for .*: pass the same arguments on every rank"):
                sw.iter_full_parameters(model, **given)
        with pytest.raises((sw.Error, ValueError), match="bytes= must be"):
            sw.iter_full_parameters(model, bytes=0 if last else 1)
    assert_equal(dict(sw.iter_full_parameters(model)), whole(model))
    gather(None)


@every_stage
@on_every_rank()
def test_sharding_tells_where_the_elements_lie(rank, world_size, stage):
    model, _ = trained(rank, **STAGES[stage])
    wanted = whole(model)
    found = sw.sharding(model)
    assert list(found) == list(wanted)
    for name, each in found.items():
        assert (each.shape, each.dtype) == (tuple(wanted[name].shape), wanted[name].dtype)
        runs = sorted(run for run in each.ranges if run[0] < run[1])
        assert [0, *(high for _, high in runs)] == [*(low for low, _ in runs), wanted[name].numel()]
        assert each.mesh == (tuple(range(world_size)),)
        flat = torch.empty_strided(each.shape, each.stride)
        flat.copy_(wanted[name])
        low, high = each.ranges[rank]
        assert bits_equal(each.own(), flat.as_strided((flat.numel(),), (1,))[low:high])
        assert each.is_whole is (stage != "3, private" or wanted[name].nbytes <= 128)
    gather(None)


class Lora(nn.Module):
    """A stand-in for peft's layer of LoRA."""

    def __init__(self, base, rank=3, *, dtype=None):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({n: nn.Linear(base.in_features, rank, bias=False, dtype=dtype) for n in ("x", "y")})
        self.lora_B = nn.ModuleDict(
            {n: nn.Linear(rank, base.out_features, bias=False, dtype=dtype) for n in ("x", "y")}
        )
        self.scaling, self.active_adapters, self.merged_adapters = {"x": 0.7, "y": 2.0}, ["x"], []
        base.requires_grad_(False)

    def forward(self, x):
        return self.base_layer(x) + self.scaling["x"] * self.lora_B["x"](self.lora_A["x"](x))


@every_stage
@on_every_rank()
def test_adapters_are_added_to_their_weights(rank, world_size, stage):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(6)
        inner = nn.Sequential(nn.Linear(7, 40), Lora(nn.Linear(40, 50)), nn.Linear(50, 3)).to(dtype)
        wanted = {n.replace(".base_layer", ""): p.detach().clone() for n, p in inner.named_parameters()}
        wanted = {n: each for n, each in wanted.items() if "lora" not in n}
        low, high = inner[1].lora_A["x"].weight.detach(), inner[1].lora_B["x"].weight.detach()
        wanted["1.weight"] += ((high.float() @ low.float()) * 0.7).to(dtype)
        outer = nn.Module()
        outer.base_model = nn.Module()
        outer.base_model.model = inner
        model = sw.wrap(outer, **STAGES[stage])
        for most in (1, 1 << 20):
            assert_equal(dict(sw.iter_full_parameters(model, merge_lora=True, bytes=most)), wanted)
        cast = dict(sw.iter_full_parameters(model, merge_lora=True, dtype=torch.float16, names=["1.weight"]))
        assert_equal(cast, {"1.weight": wanted["1.weight"].half()})
        assert "base_model.model.1.lora_A.x.weight" in dict(sw.iter_full_parameters(model))
        inner[1].lora_magnitude_vector = {"x": None}
        with pytest.raises(NotImplementedError, match="'base_model.model.1' has lora_magnitude_vector"):
            sw.iter_full_parameters(model, merge_lora=True)
    gather(None)


def tied_lora():
    layer, embedding = Lora(nn.Linear(40, 50, bias=False)), nn.Embedding(50, 40)
    embedding.weight = layer.base_layer.weight
    return nn.Sequential(embedding, layer)


def lora_of_a_parameter():
    layer = Lora(nn.Linear(40, 50))
    layer.parameter_name = "weight"
    return nn.Sequential(layer)


def lora_of_tokens():
    module = nn.Module()
    module.token_adapter = nn.Module()
    module.token_adapter.base_layer = nn.Embedding(5, 4)
    return nn.Sequential(Lora(nn.Linear(4, 5)), module)


def lora_with_more():
    layer = Lora(nn.Linear(40, 50))
    layer.lora_diag = nn.ParameterDict({"x": nn.Parameter(torch.ones(3))})
    return nn.Sequential(layer)


def lora_beside_others():
    module = nn.Module()
    module.base_layer = nn.Linear(4, 5)
    return nn.Sequential(Lora(nn.Linear(4, 5)), module)


def copy_of_a_tied_weight():
    module = nn.Module()
    module.original_module, module.modules_to_save = nn.Embedding(5, 4), nn.ModuleDict({"x": nn.Embedding(5, 4)})
    module.active_adapters, head = ["x"], nn.Linear(4, 5)
    head.weight = module.original_module.weight
    return nn.Sequential(module, head)


REFUSED = {
    tied_lora: "'1.base_layer.weight' has the memory of '0.weight'",
    lora_of_a_parameter: "'0' has adapters of a parameter",
    lora_of_tokens: "'1' has a token_adapter",
    lora_with_more: "'0' has lora_diag.x",
    lora_beside_others: "'1.base_layer.weight' has no place in the base model",
    copy_of_a_tied_weight: "'0.original_module.weight' has the memory of '1.weight'",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda each: each.__name__)
@on_every_rank()
def test_no_adapter_is_lost(rank, world_size, build):
    model = sw.wrap(build(), **PRIVATE)
    with pytest.raises(NotImplementedError, match=REFUSED[build]):
        sw.iter_full_parameters(model, merge_lora=True)
    gather(None)


@on_every_rank(at_least=2)
def test_a_rank_holds_two_chunks_or_none(rank, world_size):
    layers, chunk = 12, 16 << 20
    model = sw.wrap(nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(layers)]), **PRIVATE)
    for receiver in ("all", 0):
        gc.collect()
        gather(None)
        before, peak = settled(), 0
        gather(None)
        for _, each in sw.iter_full_parameters(model, bytes=chunk, ranks=receiver):
            peak = max(peak, pss_bytes()) if each is None or each.numel() else 0
        held = peak - before
        most = 2 * chunk + (8 << 20) if receiver == "all" or rank == 0 else 8 << 20
        assert held <= most, (receiver, held >> 20)
    gather(None)
