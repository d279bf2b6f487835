"""On a mesh of two dimensions, (replicate, shard), state is sliced inside a row and alike on all rows: losses, parameters, norms and optimizer
state are those of zero=0 on the same ranks, bit for bit, on one host and on several."""

import copy

import pytest
import torch
import torch.distributed as dist
from harness import gather, same_everywhere
from models import Mlp
from peer import PEER, sw
from shardwright import process_group
from test_every_stage_has_the_same_bits import (
    OPTIMIZERS,
    PRIVATE,
    Odd,
    accumulating_onto_the_average,
    clipped_by_ours,
    plain_steps,
    run,
    stage,
)
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = (1, 2, 3, PRIVATE)
MESHES = {
    "rows": [[0, 1], [2, 3]],
    "columns": [[0, 2], [1, 3]],
    "turned": [[3, 1], [0, 2]],
    "replicas only": [[0], [1], [2], [3]],
}


def mesh_of(rows):
    return DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))


def trains_as_stage_0(rank, world_size, rows, hosts=None):
    process_group._forced_hosts = hosts
    mesh = mesh_of(rows)
    for training in (plain_steps, accumulating_onto_the_average, clipped_by_ours):
        whole = run(0, training, rank, bucket_cap_mb=0.001)
        for zero in STAGES:
            for cap in (0.001, 25):
                sliced = run(zero, training, rank, bucket_cap_mb=cap, device_mesh=mesh)
                sliced.assert_equals(whole, (training.__name__, zero, cap))
    whole = run(0, plain_steps, rank, build=Odd)
    for zero in STAGES:
        run(zero, plain_steps, rank, build=Odd, device_mesh=mesh).assert_equals(whole, zero)
    assert same_everywhere([p.tolist() for p in whole.parameters])


@pytest.mark.parametrize("shape", MESHES)
def test_every_stage_has_the_bits_of_stage_0(fresh_ranks, shape):
    with fresh_ranks(4) as team:
        team.run(trains_as_stage_0, rows=MESHES[shape])


def test_rows_on_hosts(fresh_ranks):
    with fresh_ranks(4) as team:
        team.run(trains_as_stage_0, rows=MESHES["rows"], hosts=[0, 0, 1, 1])
