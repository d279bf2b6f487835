"""Law: a module of the meta device with DTensors (tensor parallelism, experts of fewer ranks) or of a pipeline stage gets the
values of the whole one at every stage, from init= and from weights=. A rank reads and keeps its part alone.
"""

import os
from pathlib import Path

import pytest
import torch
from expert_subjects import Model as Experts
from expert_subjects import mesh_of as mesh_of_experts
from harness import gather, on_every_rank, same_everywhere
from model_parallel_subjects import Model, mesh_of, optimizer_of, parallelized, tokens, train
from oracle.fold import bits_equal
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
PRIVATE = {"zero": 3, "share_parameters": False}
STAGES = {"0": {"zero": 0}, "2": {"zero": 2}, "3": {"zero": 3}, "private": PRIVATE}
every_stage = pytest.mark.parametrize("stage", STAGES)


def parallelized_on_meta(mesh):
    with torch.device("meta"):
        return parallelized(mesh, Model())


def init(module):
    if isinstance(module, (Model, Experts)):
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.normal_(parameter, std=0.3 + len(name))
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
        if isinstance(module, nn.Linear):  # some parts, and a read of a whole
            module.weight.data[1:3] *= 1.5
            module.weight.data /= module.weight.norm()
    else:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)


def oracle(kind=Model):
    torch.manual_seed(7)
    with torch.device("meta"):
        model = kind()
    sw.materialize(model, init=init)
    return model


def folder_with(model):
    folder = Path(os.environ["SW_TEST_FOLDER"], f"weights-{type(model).__name__}")
    if gather(None) and int(os.environ.get("RANK", torch.distributed.get_rank())) == 0:
        folder.mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / "model.pt")
    gather(None)
    return folder / "model.pt"


def assert_is(model, twin):
    found, expected = sw.full_state_dict(model), twin.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not bits_equal(found[name], expected[name])] == []


@every_stage
@on_every_rank(exactly=4)
def test_tensor_parallel_modules(rank, world_size, stage):
    twin, mesh = oracle(), mesh_of(2, 2)
    saved = folder_with(twin)
    trained = []
    for source in ({"init": init}, {"weights": saved}):
        model = parallelized_on_meta(mesh)
        optimizer = optimizer_of(model)
        before = list(model.parameters())
        torch.manual_seed(7 if rank == 0 else 100 + rank)
        if "init" in source:
            torch.manual_seed(7)
        model, optimizer = sw.wrap(model, optimizer, device_mesh=mesh["dp"], **source, **STAGES[stage])
        assert all(a is b for a, b in zip(before, sw.unwrap(model).parameters(), strict=True))
        assert_is(model, twin)
        norms = train(model, optimizer, mesh.get_local_rank("dp"), 2, 0.7)
        found = sw.full_state_dict(model)
        assert same_everywhere([norms, *found.values()])
        trained.append((norms, found))
    assert trained[0][0] == trained[1][0]
    assert all(bits_equal(trained[0][1][name], each) for name, each in trained[1][1].items())


@on_every_rank(exactly=4)
def test_materialize_gives_dtensors_their_parts(rank, world_size):
    twin, model = oracle(), parallelized_on_meta(mesh_of(2, 2))
    torch.manual_seed(7)
    sw.materialize(model, init=init)
    assert type(model.blocks[0].up.weight).__name__ == "DTensor" and model.head.weight is model.embedding.weight
    for name, each in model.named_parameters():
        whole = each.full_tensor() if hasattr(each, "full_tensor") else each
        assert bits_equal(whole.detach(), twin.state_dict()[name]), name


@on_every_rank(exactly=4)
def test_a_model_is_loaded_into_slices_of_shards(rank, world_size):
    twin, mesh = oracle(), mesh_of(2, 2)
    saved = folder_with(twin)
    folder = Path(os.environ["SW_TEST_FOLDER"], "ours")
    model, _ = sw.wrap(twin, optimizer_of(twin), zero=1)
    sw.save(folder, model)
    for place in (saved, folder, {name: each.clone() for name, each in torch.load(saved).items()}):
        model = parallelized_on_meta(mesh)
        torch.manual_seed(7)
        sw.materialize(model, init=init)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0)
        wrapped, _ = sw.wrap(model, optimizer_of(model), device_mesh=mesh["dp"], **PRIVATE)
        assert sw.load_pretrained(wrapped, place).missing_keys in ([], ["head.weight"])
        assert_is(wrapped, oracle())


@every_stage
@on_every_rank(exactly=4)
def test_experts_of_fewer_ranks(rank, world_size, stage):
    from torch.distributed.tensor import Shard, distribute_tensor

    twin, mesh = oracle(Experts), mesh_of_experts(2)
    saved = folder_with(twin)
    for source in ({"init": init}, {"weights": saved}):
        with torch.device("meta"):
            model = Experts()
        for layer in model.layers:
            layer.group = mesh["ep"].get_group()
            for name, parameter in list(layer.experts.named_parameters()):
                sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)]))
                layer.experts.register_parameter(name, sharded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        groups = {"layers.*.experts.*": mesh["dp_mod_ep"]}
        model, optimizer = sw.wrap(model, optimizer, groups=groups, **source, **STAGES[stage])
        assert_is(model, twin)


@every_stage
@on_every_rank(exactly=4)
def test_stages_of_a_pipeline(rank, world_size, stage):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    twin, index = oracle(), mesh.get_local_rank("pp")
    saved = folder_with(twin)
    names = (("embedding", "shift", "blocks"), ("blocks", "norm"))[index]
    with torch.device("meta"):
        model = Model()
    own = nn.Module()
    for name in names:
        setattr(own, name, getattr(model, name))
    own.blocks = nn.ModuleDict({str(index): model.blocks[index]})
    options = {"process_group": mesh["dp"].get_group(), **STAGES[stage]}
    if stage != "0":
        with pytest.raises(sw.Error, match="the module lacks"):
            sw.wrap(own, weights=saved, **options)
    wrapped = sw.wrap(own, weights=(saved, {"strict": False}), **options)
    found = sw.full_state_dict(wrapped)
    assert all(bits_equal(each, twin.state_dict()[name]) for name, each in found.items()) and len(found) > 4
    with torch.device("meta"):
        odd = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "other": nn.Linear(3, 3)})
    with pytest.raises(sw.Error, match="lacks 'other"):
        sw.wrap(odd, weights=(saved, {"strict": False}), **options)
    with pytest.raises(TypeError, match="options of load_pretrained"):
        sw.wrap(odd, weights=(saved, {"strickt": False}), **options)


@on_every_rank(exactly=4)
def test_a_shard_that_a_rank_cannot_read_is_one_sentence_on_all_ranks(rank, world_size):
    twin, mesh = oracle(), mesh_of(2, 2)
    saved = folder_with(twin)
    place = saved if rank != 3 else saved.with_name("gone.pt")
    model = parallelized_on_meta(mesh)
    with pytest.raises((sw.Error, OSError), match="gone.pt"):
        sw.wrap(model, optimizer_of(model), device_mesh=mesh["dp"], weights=place, **PRIVATE)
    assert all(p.is_meta for p in model.parameters())
    model, optimizer = sw.wrap(model, optimizer_of(model), device_mesh=mesh["dp"], weights=saved, **PRIVATE)
    assert_is(model, twin)
    train(model, optimizer, mesh.get_local_rank("dp"), 1)
    assert tokens(0, 0) is not None
