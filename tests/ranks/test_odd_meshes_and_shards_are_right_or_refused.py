"""Law: meshes without names, in another order or of individually named devices, and shards of unequal size or without
elements, train like one process. A combination that cannot work is one sentence on all ranks. torch's own FSDP2 over
the same DTensors is the comparison.
"""

import os
from collections import OrderedDict
from pathlib import Path

import expert_subjects as experts
import pytest
import torch
from harness import LONG, gather, on_every_rank, same_everywhere
from model_parallel_subjects import mesh_of, parallelized, tokens, train, with_loss_parallel
from oracle.fold import bits_equal
from peer import PEER, sw
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STEPS = 3


def uneven():
    """Over two ranks 5 columns become 3 and 2, and 1 column becomes 1 and 0."""
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(a=nn.Linear(4, 5), b=nn.Linear(5, 3), c=nn.Linear(3, 1), d=nn.Linear(1, 3), e=nn.Linear(3, 2))
    )


def place(model, mesh):
    """Over a mesh of one dimension: sharded by columns, by rows, and replicated."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = {"a.weight": Shard(0), "b.weight": Shard(1), "c.weight": Shard(0), "d.weight": Shard(1)}
    for name, layer in model.named_children():
        for kind, parameter in list(layer.named_parameters()):
            placed = distribute_tensor(parameter.detach(), mesh, [placements.get(f"{name}.{kind}", Replicate())])
            layer.register_parameter(kind, nn.Parameter(placed))
    return model


def run(model, x):
    """Run the forward with whole tensors, which torch gathers and whose gradients it slices."""
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    for name in "abcde":
        x = torch.tanh(nn.functional.linear(x, whole[f"{name}.weight"], whole[f"{name}.bias"]))
    return x


class Whole(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return run(self.layers, x)


def batch(step, number):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + number))


def adam(model, fused=True):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def alone(data_ranks):
    model = Whole(uneven())
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(data_ranks):
            (model(batch(step, number)).square().sum() / data_ranks).backward()
        optimizer.step()
    return model.state_dict()


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "MANIFEST.json"}


@on_every_rank(exactly=4)
def test_uneven_and_empty_shards(rank, world_size):
    folder = Path(os.environ["SW_TEST_FOLDER"]) / "uneven"
    grid = torch.arange(4).view(2, 2)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))  # the other way round
    row, column = grid[rank // 2].tolist(), grid[:, rank % 2].tolist()
    rows = [DeviceMesh("cpu", each.tolist()) for each in grid]  # without names
    columns = [DeviceMesh("cpu", each.tolist()) for each in grid.T]
    ways = {
        "named": (named["dp"], named["tp"]),
        "nameless": (columns[rank % 2], rows[rank // 2]),
        "group": (None, rows[rank // 2]),
    }
    assert rows[rank // 2].mesh.tolist() == row and columns[rank % 2].mesh.tolist() == column
    expected, first, kept = alone(2), None, None
    cases = [("named", 0), ("nameless", 2), ("group", "private")]
    cases += [("named", "by hand"), ("nameless", 3), ("group", 1)] if LONG else []
    for way, stage in cases:
        over, tp = ways[way]
        options = {"device_mesh": over} if over is not None else {"process_group": columns[rank % 2].get_group()}
        number = over.get_local_rank() if over is not None else rank // 2
        model = Whole(place(uneven(), tp))
        if stage == "by hand":
            sw.fully_shard(model, **options)
            optimizer = sw.shard_optimizer(model, adam(model))
        else:
            zero = 3 if stage == "private" else stage
            options |= {"share_parameters": False} if stage == "private" else {}
            model, optimizer = sw.wrap(model, adam(model), zero=zero, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, number)).square().sum().backward()
            sw.clip_grad_norm_(model, 1e9)
            optimizer.step()
        found = sw.full_state_dict(model)
        first = first or found
        for name, value in expected.items():
            assert bits_equal(found[name], first[name]), (way, stage, name)
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (way, stage, name)
        random = torch.get_rng_state()
        folder.mkdir(exist_ok=True)
        sw.save(folder / f"{way}-{stage}", model, optimizer, step=STEPS)
        torch.set_rng_state(random)
        kept = kept or files_of(folder / f"{way}-{stage}")
        assert files_of(folder / f"{way}-{stage}") == kept, (way, stage)
    whole = Whole(uneven())
    whole, optimizer = sw.wrap(whole, adam(whole), zero=1)
    sw.load(folder / "named-0", whole, optimizer)
    assert all(bits_equal(value, first[name]) for name, value in sw.full_state_dict(whole).items())
    sw.save(folder / "whole", whole, optimizer, step=STEPS)
    assert files_of(folder / "whole") == kept


@pytest.mark.skipif(not LONG, reason="torch plans each operation over two dimensions anew: slow")
@on_every_rank(exactly=4)
def test_as_torch_composes_fsdp2_over_the_same_dtensors(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2)
    place, theirs = mesh.get_local_rank("dp"), parallelized(mesh)
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(theirs, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for step in range(5):
        optimizer.zero_grad()
        with_loss_parallel(theirs, tokens(step, place))
        optimizer.step()
    expected = {name: value.full_tensor() for name, value in theirs.named_parameters()}
    for zero in (1, 2, 3):
        model = parallelized(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = sw.wrap(model, optimizer, zero=zero, device_mesh=mesh["dp"])
        train(model, optimizer, place, 5)
        found = sw.full_state_dict(model)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (zero, name)


@on_every_rank(exactly=4)
def test_what_cannot_be_is_one_sentence(rank, world_size):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(2, 2)

    def refused(text, model, **options):
        with pytest.raises(Exception, match=text) as caught:
            sw.wrap(model, adam(model), **{"device_mesh": mesh["dp"], **options})
        said = gather(str(caught.value).split(": ", 1)[-1])
        assert len(set(said)) <= 2, said  # one for each row: ranks differ
        assert len({type(each) for each in said}) == 1

    def linear(placement):
        model = nn.Linear(4, 4)
        if isinstance(placement, Partial):
            weight = DTensor.from_local(model.weight.detach(), mesh["tp"], [placement], run_check=False)
        else:
            weight = distribute_tensor(model.weight.detach(), mesh["tp"], [placement])
        model.weight = nn.Parameter(weight)
        return model

    torch.manual_seed(0)
    refused("'weight' is a DTensor on a mesh of dimension 'tp' .* placed as Partial", linear(Partial()), zero=1)
    torch.manual_seed(0)
    refused(
        r"about the wrapped Linear along mesh dimension 'tp': rank 0 has weight .*S\(0\), rank 1",
        linear(Shard(rank % 2)),
        zero=2,
    )  # ranks that disagree about a placement
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if rank == 3:  # one rank of a column has a DTensor; the other column has none, and cannot know
        weight = DTensor.from_local(model.weight.detach(), mesh["tp"], [Replicate()], run_check=False)
        model.weight = nn.Parameter(weight)
    if rank % 2:
        with pytest.raises(sw.Error, match=r"rank 1 has no DTensor, rank 3 has DTensors on \(2,\) ranks"):
            sw.wrap(model, adam(model), zero=1, device_mesh=mesh["dp"])
    both = nn.Sequential(linear(Shard(0)), nn.Linear(4, 4))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    both[1].weight = nn.Parameter(distribute_tensor(both[1].weight.detach(), flat, [Replicate()]))
    refused("the DTensors of a wrapped module must lie on one mesh|share one rank", both, zero=1)


@on_every_rank(exactly=4)
def test_experts_in_the_stages_of_a_pipeline(rank, world_size):
    from torch.distributed.pipelining import Schedule1F1B
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = Path(os.environ["SW_TEST_FOLDER"]) / "staged-experts"
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp_mod_ep", "ep"))
    index, ep = mesh.get_local_rank("pp"), mesh["ep"]

    class Layer(nn.Module):
        def __init__(self, number, group=None):
            super().__init__()
            torch.manual_seed(number)
            self.moe, self.after = experts.MoE(), nn.Linear(experts.WIDTH, experts.WIDTH)
            self.moe.group = group

        def forward(self, x):
            return self.after(x + self.moe(x)[0])

    def data(step, place):
        return torch.randn(8, experts.WIDTH, generator=torch.Generator().manual_seed(10 * step + place))

    def loss_of(found, target):
        return nn.functional.mse_loss(found, target)

    model = nn.Sequential(Layer(0), Layer(1))
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(2):
            for part in data(step, place).chunk(4):
                (loss_of(model(part), torch.tanh(part)) / 8).backward()
        expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
    expected = model.state_dict()
    first = None
    for stage in (0, 1, 2, 3, "private") if LONG else (1, "private"):
        module = nn.Sequential(OrderedDict([(str(index), Layer(index, ep.get_group()))]))
        held = module[0].moe.experts
        for name, parameter in list(held.named_parameters()):
            held.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), ep, [Shard(0)])))
        options = {"zero": 3, "share_parameters": False} if stage == "private" else {"zero": stage}
        groups = {"*.moe.experts": mesh["dp_mod_ep"]}
        module, optimizer = sw.wrap(module, adam(module, not LONG), device_mesh=ep, groups=groups, **options)
        part = sw.PipelineStage(module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(part, n_microbatches=4, loss_fn=loss_of)
        for step in range(STEPS):
            x = data(step, ep.get_local_rank())
            optimizer.zero_grad()
            schedule.step(*([x] if index == 0 else []), **({"target": torch.tanh(x)} if index else {}))
            norm = sw.clip_grad_norm_(module, 0.5, pp_mesh=mesh["pp"]).item()
            optimizer.step()
        assert norm == pytest.approx(expected_norm, rel=1e-5) and same_everywhere([norm])
        found = sw.full_state_dict(module)
        first = first or found
        for name, value in found.items():
            assert bits_equal(value, first[name]), (stage, name)
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), (stage, name)
    folder.mkdir(exist_ok=True)
    sw.save(folder / "stages", part, optimizer)
    whole = nn.Sequential(Layer(0), Layer(1))
    whole, optimizer = sw.wrap(whole, adam(whole), zero=1)
    sw.load(folder / "stages", whole, optimizer)
    loaded = sw.full_state_dict(whole)
    assert all(bits_equal(loaded[name], value) for name, value in found.items())
    sw.save(folder / "whole", whole, optimizer)
    assert files_of(folder / "stages") == files_of(folder / "whole")
