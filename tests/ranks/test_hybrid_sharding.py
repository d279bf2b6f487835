"""Law: on a mesh (replicate, shard) state is sliced inside a row and equal on all rows. Losses, parameters, norms and
optimizer state are those of zero=0 on the same ranks, bit for bit, on one host and on several. A mesh that does not fit
is one error on all ranks.
"""

import copy
import re

import pytest
import torch
from harness import LONG, gather, in_turn, same_everywhere
from internals import Slicing, process_group
from models import Heads, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_compressed_gradients_at_every_stage import NAMES as COMPRESSORS
from test_compressed_gradients_at_every_stage import made as compressed
from test_compressed_gradients_at_every_stage import train
from test_every_stage_has_the_same_bits import (
    OPTIMIZERS,
    PRIVATE,
    Odd,
    Outcome,
    accumulating_inside_no_sync,
    accumulating_onto_the_average,
    clipped_by_ours,
    clipped_by_torch,
    plain_steps,
    run,
    some_heads,
    stage,
)
from test_sliced_ranks_may_run_out_of_inputs import assert_same
from test_sliced_ranks_may_run_out_of_inputs import clipped_by_ours as until_the_inputs_end
from test_sliced_ranks_may_run_out_of_inputs import run as run_unevenly
from test_whole_tensors_are_stepped_on_by_their_owners import OPTIMIZERS as WHOLE_TENSORS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = (1, 2, 3, PRIVATE)
ROWS = [[0, 1], [2, 3]]
#: rows, and the host of each rank; None: one host, found as ever
CASES = {
    "rows": (ROWS, None),
    "turned": ([[3, 1], [0, 2]], None),
    "rows on hosts": (ROWS, [0, 0, 1, 1]),
    "replicas only": ([[0], [1], [2], [3]], None),
    "columns on hosts": ([[0, 2], [1, 3]], [0, 1, 0, 1]),
    "two rows on a host": ([[0, 1], [2, 3], [4, 5]], [0, 0, 0, 0, 1, 1]),
    "rows across hosts": (ROWS, [0, 1, 0, 1]),
    "rows across hosts, that have all slices": ([[0, 3], [2, 1]], [0, 0, 1, 1]),
    "wide rows across hosts": ([[0, 1, 2], [5, 3, 4]], [0, 0, 1, 1, 2, 2]),
    "a row across hosts, and one on a host": ([[0, 3], [1, 2]], [0, 0, 0, 1]),
}
QUICK = ("rows", "rows on hosts", "turned", "rows across hosts", "wide rows across hosts")


def mesh_of(rows):
    return DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))


def trains_as_stage_0(rank, world_size, rows, hosts, trainings):
    process_group._forced_hosts = hosts
    mesh = mesh_of(rows)
    for number, (training, build) in enumerate(trainings):
        whole = run(0, training, rank, build=build, bucket_cap_mb=0.001)
        for zero in in_turn(STAGES, number + len(rows[0]) + bool(hosts)):
            sliced = run(zero, training, rank, build=build, bucket_cap_mb=0.001, device_mesh=mesh)
            sliced.assert_equals(whole, (training.__name__, zero))
    assert same_everywhere([*whole.parameters])


@pytest.mark.parametrize("case", CASES if LONG else QUICK)
def test_every_stage_has_the_bits_of_stage_0(fresh_ranks, case):
    rows, hosts = CASES[case]
    trainings = [(accumulating_onto_the_average, Mlp)]
    if LONG or case == "rows":
        trainings += [(clipped_by_ours, Odd), (some_heads, Heads)]
    if LONG:
        trainings += [(accumulating_inside_no_sync, Mlp), (plain_steps, Odd)]
    with fresh_ranks(sum(map(len, rows))) as team:
        team.run(trains_as_stage_0, rows=rows, hosts=hosts, trainings=trainings)


def compresses_as_stage_0(rank, world_size, rows, hosts):
    process_group._forced_hosts = hosts
    mesh = mesh_of(rows)
    for number, name in enumerate(in_turn(COMPRESSORS, int(bool(hosts)))):
        for cap in (0.001, 25) if LONG else (0.001,):
            whole, optimizer = compressed(0, name, cap)
            train(whole, optimizer, rank, 4)
            for zero in in_turn(STAGES, number + bool(hosts), of=4):
                sliced, optimizer = compressed(**stage(zero, dict(name=name, cap=cap, device_mesh=mesh)))
                train(sliced, optimizer, rank, 4)
                with sw.full_parameters(sliced):
                    assert all(
                        bits_equal(mine.detach(), theirs.detach())
                        for mine, theirs in zip(sliced.module.parameters(), whole.module.parameters(), strict=True)
                    ), (name, cap, zero)
                gather(None)


@pytest.mark.parametrize("case", [*CASES] if LONG else ["rows", "rows across hosts"])
def test_compressed_gradients_have_the_bits_of_stage_0(fresh_ranks, case):
    rows, hosts = CASES[case]
    with fresh_ranks(sum(map(len, rows))) as team:
        team.run(compresses_as_stage_0, rows=rows, hosts=hosts)


def does_everything_else(rank, world_size, hosts):
    process_group._forced_hosts = hosts
    mesh = mesh_of(ROWS)
    plain = run(0, clipped_by_torch, rank)  # the norm: each slice counts once
    for mine, theirs in zip(run(2, clipped_by_torch, rank, device_mesh=mesh).parameters, plain.parameters):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    uneven = run_unevenly(rank, world_size, 0, until_the_inputs_end)
    for zero in (1, 2, 3) if LONG else (1, 3) if hosts else (2,):
        assert_same(run_unevenly(rank, world_size, zero, until_the_inputs_end, device_mesh=mesh), uneven)
    found = []
    for zero in (0, *(STAGES if LONG else STAGES[bool(hosts) :: 2])):
        torch.manual_seed(0)
        module = Mlp()
        options = {"bucket_cap_mb": 0.001, "device_mesh": mesh, "partition": "tensor"}
        model, optimizer = sw.wrap(module, WHOLE_TENSORS["TrustRatio"](module.parameters()), **stage(zero, options))
        losses = plain_steps(model, optimizer, rank)
        found.append(Outcome(losses, model, copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))))
        gather(None)
        found[-1].assert_equals(found[0], zero)
    whole = run(0, plain_steps, rank)
    torch.manual_seed(0)
    model = Mlp()
    for module in model:
        if isinstance(module, nn.Linear):
            sw.fully_shard(module, device_mesh=mesh)
    sw.fully_shard(model, device_mesh=mesh)
    optimizer = sw.shard_optimizer(model, OPTIMIZERS["AdamW"](model.parameters()))
    losses = plain_steps(model, optimizer, rank)
    Outcome(losses, model, copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))).assert_equals(
        whole, "in place"
    )
    described = sw.describe()["models"][-1]
    assert described["replicas"] == 2
    slices = {key: value for key, value in described.items() if key == "parameter_bytes"}
    everything = sum(p.numel() for p in Mlp().parameters()) * 4
    if hosts is None:
        assert everything / 2 <= slices["parameter_bytes"] <= everything / 2 + 128 * 2 * len(whole.parameters), slices
    gather(None)


@pytest.mark.parametrize("hosts", [None, [0, 1, 0, 1], *([[0, 0, 0, 1]] if LONG else [])])
def test_norms_uneven_inputs_whole_tensors_and_units_in_place(fresh_ranks, hosts):
    with fresh_ranks(4) as team:
        team.run(does_everything_else, hosts=hosts)


def changes_stage_and_saves(rank, world_size, hosts, folder):
    """A checkpoint of one stage on a mesh continues at another with the bits of zero=0."""
    process_group._forced_hosts = hosts
    mesh = mesh_of(ROWS)
    whole = run(0, plain_steps, rank)
    pairs = ((3, 1), (PRIVATE, 2), (2, PRIVATE), (1, 3))
    for first, second in pairs if LONG else pairs[bool(hosts) :: 2]:
        path = f"{folder}/{first}-{second}".replace(" ", "")
        torch.manual_seed(0)
        module = Mlp()
        options = {"bucket_cap_mb": 0.001, "device_mesh": mesh}
        model, optimizer = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), **stage(first, options))
        losses = plain_steps(model, optimizer, rank, 2)
        with sw.full_parameters(model):
            values = [p.tolist() for p in model.module.parameters()]
        assert same_everywhere(values)
        sw.save(path, model, optimizer)
        module = Mlp()
        model, optimizer = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), **stage(second, options))
        sw.load(path, model, optimizer)
        for step in (2, 3):
            value = model(batch(rank, 6, 7, step=step)).square().mean()
            value.backward()
            assert same_everywhere([*sw.full_gradients(model).values()])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
        Outcome(losses, model, state).assert_equals(whole, (first, second))
        with sw.full_parameters(model, writable=True), torch.no_grad():
            for p in model.module.parameters():
                p.fill_(rank + 1.0)
        with sw.full_parameters(model):
            assert all(bool((p == 1).all()) for p in model.module.parameters())
        gather(None)


@pytest.mark.parametrize("hosts", [None, [0, 1, 0, 1]])
def test_states_of_a_mesh_load_at_another_stage(fresh_ranks, hosts, tmp_path):
    with fresh_ranks(4) as team:
        team.run(changes_stage_and_saves, hosts=hosts, folder=str(tmp_path))


def asks_for_what_does_not_fit(rank, world_size):
    found = []

    def refused(kind, zero=2, mesh=None, **options):
        module = Mlp()
        with pytest.raises(kind) as caught:
            sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, device_mesh=mesh, **options)
        gather(None)
        return str(caught.value)

    found.append(refused(ValueError, mesh=DeviceMesh("cpu", torch.arange(4).reshape(2, 2, 1))))
    other = ROWS if rank != 3 else [[0, 2], [1, 3]]
    found.append(refused(sw.Error, mesh=mesh_of(other)))
    return found


def test_a_mesh_that_does_not_fit_is_one_error_on_all_ranks(fresh_ranks):
    with fresh_ranks(4) as team:
        values = team.run(asks_for_what_does_not_fit)
    assert all(found == values[0] for found in values), values
    dimensions, ranks = values[0]
    assert "one dimension, or two (replicate, shard), got 3" in dimensions
    assert "device_mesh" in ranks and re.search(r"rank 3", ranks), ranks


def trains_on_a_part(rank, world_size):
    mesh = mesh_of(ROWS)
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if rank == 4:
        with pytest.raises(ValueError, match="this rank, 4, is not part of the device_mesh given"):
            sw.wrap(module, optimizer, zero=2, device_mesh=mesh)
        return None
    model, optimizer = sw.wrap(module, optimizer, zero=2, device_mesh=mesh)
    plain_steps(model, optimizer, rank)
    return [p.tolist() for p in module.parameters()]


def test_a_mesh_of_some_ranks(fresh_ranks):
    with fresh_ranks(5) as team:
        values = team.run(trains_on_a_part)
    assert values[4] is None and all(value == values[0] for value in values[:4])


def test_slices_of_a_mesh():
    slicing = Slicing.of_rows(4, [[3, 1, 5], [0, 4, 2]])
    assert (slicing.count, slicing.own, slicing.replica(), slicing.speaks) == (3, 1, [0, 2, 4], False)
    assert slicing.rows() == [[3, 1, 5], [0, 4, 2]] and slicing.first_owner(1) == 1
    assert Slicing.of_rows(1, [[1, 0]]) == Slicing.one_a_rank(1, 2)
