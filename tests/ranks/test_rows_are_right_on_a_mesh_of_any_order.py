"""Law: fully_shard over a mesh whose rows are not in the order of their ranks trains with the bits of stage 0. Each rank has
the rows that FSDP2 gives it there, those of its rank in its group; state dicts, torch's folders and ours are right, which
torch's own are not, since DTensors count by the mesh. A module of DTensors on such a mesh gets one sentence.
"""

import pytest
import torch
from harness import gather
from peer import PEER, sw
from subjects_of_rows import assert_released, assert_same_state, rows_of
from test_fully_shard_has_the_contract_of_fsdp2 import Odd, built, reference, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
MESHES = {
    "one row": [2, 0, 1],
    "turned": [[3, 1], [0, 2]],
    "rows of one": [[2], [0], [1]],
    "backwards": [[1, 0], [3, 2]],
}


def mesh_of(ranks):
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("replicate", "shard")[-torch.tensor(ranks).ndim :])


def made(mesh):
    module = built(Odd)
    sw.fully_shard(module.first, mesh=mesh)
    sw.fully_shard(module, mesh=mesh)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def is_right(rank, world_size, ranks, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    mesh = mesh_of(ranks)
    model = reference(Odd)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    module, optimizer = made(mesh)
    row = sorted(ranks if mesh.ndim == 1 else next(each for each in ranks if rank in each))
    for name, value in module.state_dict().items():
        assert torch.equal(value.to_local(), rows_of(model.module.state_dict()[name], row.index(rank), len(row))), name
        assert sorted(value.device_mesh.mesh.flatten().tolist()) == list(range(world_size))
    for micro in (1, 2):
        expected = train(model, theirs, rank, steps=2, micro=micro)
        assert train(module, optimizer, rank, steps=2, micro=micro) == expected
    assert_released(module)
    whole = {name: value.clone() for name, value in model.module.state_dict().items()}
    assert_same_state(module, whole)
    state = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    if rank == 0:
        for name, p in model.module.named_parameters():
            if name in state and "exp_avg" in state[name]:
                assert torch.equal(state[name]["exp_avg"], theirs.state[p]["exp_avg"]), name
    dcp.save(module.state_dict(), checkpoint_id=folder + "/torch")
    found = {name: torch.full_like(value, 7) for name, value in whole.items()}
    dcp.load(found, checkpoint_id=folder + "/torch")
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    sw.save(folder + "/ours", module, optimizer)
    for mesh in (mesh, init_device_mesh("cpu", (world_size,))):
        other, its = made(mesh)
        dcp.load(other.state_dict(), checkpoint_id=folder + "/torch")
        assert_same_state(other, whole)
        resumed, its = made(mesh)
        sw.load(folder + "/ours", resumed, its)
        assert_same_state(resumed, whole)
        model = reference(Odd)
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sw.load(folder + "/ours", model, theirs)
        assert train(resumed, its, rank, first=4) == train(model, theirs, rank, first=4)
        assert_same_state(resumed, model.module.state_dict())
    gather(None)


@pytest.mark.parametrize("case", MESHES)
def test_it_trains_saves_and_resumes(fresh_ranks, case, tmp_path):
    with fresh_ranks(torch.tensor(MESHES[case]).numel()) as team:
        team.run(is_right, ranks=MESHES[case], folder=str(tmp_path))


def has_one_sentence(rank, world_size):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]]), mesh_dim_names=("data", "model"))
    module = parallelize_module(nn.Linear(4, 4), mesh["model"], ColwiseParallel())
    assert module.weight.placements == (Shard(0),)
    with pytest.raises(ValueError, match="needs a mesh whose rows have ascending ranks"):
        sw.fully_shard(module, mesh=mesh["data"])

    from types import SimpleNamespace

    whole, rows = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    other = SimpleNamespace(placement=Shard(0), mesh_info=SimpleNamespace(mesh=rows["one"]))
    with pytest.raises(NotImplementedError, match="only a DTensor on the ranks between both"):
        sw.fully_shard(nn.Linear(4, 4), mesh=whole, shard_placement_fn=lambda p: other)


def test_dtensors_and_plain_parameters_on_other_meshes_get_one_sentence(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(has_one_sentence)
