"""Law: with dp_mesh_dims= a module whose parameters are DTensors on the whole mesh, data dimensions included, trains as under FSDP2.
Inside a forward its parameters have the placements that they were given, after it those that FSDP2 gives them."""

import copy

import pytest
import torch
from harness import gather, on_every_rank
from peer import PEER, batch, sw
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

Dims = getattr(fsdp, "DataParallelMeshDims", None)
pytestmark = [
    pytest.mark.skipif(PEER == "torch", reason="ours"),
    pytest.mark.skipif(Dims is None, reason="this torch has no dp_mesh_dims"),
]

#: names of dimensions, and which of them has all ranks
# Each test has processes of its own: torch caches what it knows of equal meshes, and then wants that they are one object
MESHES = {
    "data": (("dp",), 0),
    "data of two": (("dp", "tp"), 0),
    "model": (("dp", "tp"), 1),
    "replicas": (("replicate", "dp", "tp"), 0),
    "rows of replicas": (("replicate", "dp"), 1),
    "replicas inside": (("dp", "replicate"), 0),
    "flattened": (("dp", "cp", "tp"), 1),
    "flattened beside replicas": (("replicate", "dp", "cp"), 1),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.seen = []

    def forward(self, x):
        self.seen.append([(type(p) is nn.Parameter, p.placements, p.is_contiguous()) for p in self.parameters()])
        return x + self.down(torch.tanh(self.up(x)))


def built(mesh, names):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(6, 3))
    cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        placements = [Replicate()] * mesh.ndim
        if "tp" in names:
            placements[names.index("tp")] = cuts.get(name.partition(".")[2], Replicate())
        owner, _, own = name.rpartition(".")
        placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        setattr(model.get_submodule(owner), own, placed)
    return model


def train(fully_shard, rank, mesh, names, **options):
    model = built(mesh, names)
    data = [name for name in names if name not in ("tp", "replicate")]
    dims = Dims(
        shard=tuple(data) if len(data) > 1 else data[0], replicate="replicate" if "replicate" in names else None
    )
    for each in (*model[:2], model):
        fully_shard(each, mesh=mesh, dp_mesh_dims=dims, **options)
    before = [p.placements for p in model.parameters()]
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    place = [mesh.get_local_rank(name) for name in names if name != "tp"]
    seed, inputs = sum(place), [Replicate() if name == "tp" else Shard(0) for name in names]
    for step in range(4):
        for number in range(2):
            x = DTensor.from_local(batch(seed, 4, 6, step=10 * step + number), mesh, inputs, run_check=False)
            loss = model(x).square().sum().full_tensor() / 100
            loss.backward()
            found.append(loss.item())
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        grads = [p.grad.placements for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.full_tensor().detach() for name, value in model.state_dict().items()}
    assert [p.placements for p in model.parameters()] == before
    return found, (before, grads, model[0].seen[0]), state, model


@pytest.mark.parametrize("name", MESHES)
@on_every_rank(deadline_s=120, spoils=True)
def test_training_is_that_of_fsdp2(rank, world_size, name):
    names, all_at = MESHES[name]
    sizes = [world_size if at == all_at else 1 for at in range(len(names))]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if name.startswith("flattened") and hasattr(mesh, "_unflatten"):  # a part of another mesh, as torchtitan's
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("world",))._unflatten(0, sizes, names)
    for options in ({}, {"reshard_after_forward": False}):
        expected, places, state, _ = train(fsdp.fully_shard, rank, mesh, names, **options)
        found, ours, own, model = train(sw.fully_shard, rank, mesh, names, **options)
        assert found == pytest.approx(expected, rel=1e-5) and ours == places
        whole = sw.full_state_dict(model)
        for key, value in state.items():
            torch.testing.assert_close(own[key], value, rtol=1e-3, atol=1e-5)
            assert torch.equal(whole[key], own[key]), key
    gather(None)


@on_every_rank(at_least=2, spoils=True)
def test_a_parameter_on_another_mesh_is_refused(rank, world_size):
    sizes = (world_size, 1), (1, world_size)
    own, other = (init_device_mesh("cpu", each, mesh_dim_names=("dp", "tp")) for each in sizes)
    with pytest.raises(ValueError, match="the same mesh passed to fully_shard: parameter 'weight' lies on"):
        sw.fully_shard(built(own, ("dp", "tp"))[2], mesh=other, dp_mesh_dims=Dims(shard="dp"))
    gather(None)


@pytest.mark.parametrize("name", ["data", "model"])
@on_every_rank(deadline_s=120, spoils=True)
def test_a_policy_casts_them(rank, world_size, name):
    names, all_at = MESHES[name]
    mesh = init_device_mesh(
        "cpu", [world_size if at == all_at else 1 for at in range(len(names))], mesh_dim_names=names
    )
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"reshard_after_forward": False}):
        expected, *_ = train(fsdp.fully_shard, rank, mesh, names, mp_policy=policy, **options)
        found, *_, model = train(sw.fully_shard, rank, mesh, names, mp_policy=policy, **options)
        assert (
            found == pytest.approx(expected, rel=0.02)
            and found[0] == expected[0] != train(sw.fully_shard, rank, mesh, names)[0][0]
        )
        assert all(p.dtype is torch.float32 and isinstance(p, DTensor) for p in model.parameters())
    gather(None)


@on_every_rank(spoils=True)
def test_a_parameter_that_is_cut_over_a_data_dimension_is_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    model = nn.Linear(6, 6)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP dim 'dp' \(index 0\)"):
        sw.fully_shard(copy.copy(model), mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    gather(None)
