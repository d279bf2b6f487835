"""Law of launching: ranks on two hosts form the intended group from the variables of Open MPI or SLURM alone."""

import os

import pytest
import torch
import torch.distributed as dist
from hosts import unheard_stderr
from peer import PEER

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch reads torchrun's variables only")

TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables(launcher, rank, world_size, local_rank, local_size, address):
    if launcher == "torchrun":
        return {name: os.environ[name] for name in TORCHRUNS}
    if launcher == "Open MPI":
        return {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": world_size,
            "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
            "MASTER_ADDR": address,
        }
    return {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": world_size,
        "SLURM_LOCALID": local_rank,
        "SLURM_JOB_ID": 77,
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_NODELIST": "10.77.0.[1-2]",
    }


def joins(rank, world_size, launcher):
    from internals import resolve_group

    own = variables(
        launcher, rank, world_size, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"]
    )
    for name in TORCHRUNS:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in own.items()})
    with unheard_stderr():
        group = resolve_group(None, None)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    return dist.get_rank(group), dist.get_world_size(group), total.item()


@pytest.mark.parametrize("launcher", ["torchrun", "Open MPI", "SLURM"])
def test_ranks_of_two_hosts_meet(hosts, launcher):
    with hosts(2, 1, joined=False) as lab:
        values = lab.team.run(joins, launcher=launcher)
    assert values == [(rank, 3, 3.0) for rank in range(3)]


def is_alone(rank, world_size, variables):
    from internals import resolve_group

    for name in TORCHRUNS:
        del os.environ[name]
    os.environ.update(variables)
    group = resolve_group(None, None)
    return None if group is None else (dist.get_rank(group), dist.get_world_size(group))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, None), ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)), ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1))],
    ids=["nothing", "srun", "torchrun"],
)
def test_one_task_is_one_rank_with_a_group_if_a_launcher_is_present(hosts, variables, expected):
    with hosts(1, joined=False) as lab:
        assert lab.team.run(is_alone, variables=variables) == [expected]
