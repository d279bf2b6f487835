"""Law: over hosts a stage changes no bit. Losses, parameters and optimizer state are those of zero=0 over the same map
of hosts, whose gradients have their own oracle (test_hosts_fold_in_two_steps.py). The bytes sent are those of the
design.

Ranks of one machine are told their host. Separate hosts: test_stages_over_hosts_that_are_apart.py.
"""

import copy

import internals
import pytest
import torch
from harness import LONG, gather, in_turn, on_every_rank, same_everywhere
from models import Heads, Mlp
from peer import PEER, batch, sw
from test_every_stage_has_the_same_bits import (
    OPTIMIZERS,
    PRIVATE,
    Odd,
    Outcome,
    accumulating_inside_no_sync,
    accumulating_onto_the_average,
    clipped_by_ours,
    clipped_by_torch,
    failing_once,
    loss,
    never_cleared,
    plain_steps,
    run,
    some_heads,
    stage,
)
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from test_sliced_ranks_may_run_out_of_inputs import assert_same
from test_sliced_ranks_may_run_out_of_inputs import clipped_by_ours as until_the_inputs_end
from test_sliced_ranks_may_run_out_of_inputs import run as run_unevenly
from test_whole_tensors_are_stepped_on_by_their_owners import OPTIMIZERS as WHOLE_TENSORS

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = (1, 2, 3, PRIVATE)
MAPS = ("2+1", "crosswise", *(("1+2", "1+1+1", "one host") if LONG else ()))
every_map = pytest.mark.parametrize("shape", MAPS)
TRAININGS = {
    "2+1": [accumulating_onto_the_average, clipped_by_ours],
    "crosswise": [accumulating_inside_no_sync],
}
ALL = [
    plain_steps,
    accumulating_inside_no_sync,
    accumulating_onto_the_average,
    never_cleared,
    clipped_by_ours,
    failing_once,
]


@every_map
@on_every_rank(at_least=3)
def test_every_training_at_every_stage(rank, world_size, shape):
    with on_hosts(hosts_of(shape, world_size)) as group:
        for number, training in enumerate(ALL if LONG else TRAININGS[shape]):
            whole = run(0, training, rank, bucket_cap_mb=0.001, process_group=group)
            for zero in in_turn(STAGES, number + (shape == "crosswise")):
                for cap in (0.001, 25) if LONG or zero == 2 else (0.001,):
                    sliced = run(zero, training, rank, bucket_cap_mb=cap, process_group=group)
                    sliced.assert_equals(whole, (training.__name__, zero, cap))
    assert same_everywhere([*whole.parameters])


@pytest.mark.parametrize(
    ("build", "training"), [(Odd, accumulating_onto_the_average), (Heads, some_heads)], ids=["odd", "unused"]
)
@on_every_rank(at_least=3)
def test_every_kind_of_parameter_used_or_not(rank, world_size, build, training):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        whole = run(0, training, rank, build=build, bucket_cap_mb=0.001, process_group=group)
        for zero in in_turn(STAGES, int(build is Heads)):
            sliced = run(zero, training, rank, build=build, bucket_cap_mb=0.001, process_group=group)
            sliced.assert_equals(whole, zero)


@on_every_rank(at_least=3)
def test_torch_s_own_clipping_agrees_to_rounding(rank, world_size):
    with on_hosts(hosts_of("crosswise", world_size)) as group:
        whole = run(0, clipped_by_torch, rank, process_group=group)
        for zero in (2, 3):
            sliced = run(zero, clipped_by_torch, rank, process_group=group)
            for mine, theirs in zip(sliced.parameters, whole.parameters, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@on_every_rank(at_least=3)
def test_gradients_and_states_are_whole_on_request_and_load_at_another_stage(rank, world_size):
    with on_hosts(hosts_of("crosswise", world_size)) as group:
        whole = run(0, plain_steps, rank, process_group=group)
        for first, second in in_turn([(0, 3), (3, 1), (PRIVATE, 2), (2, PRIVATE)], 1):
            torch.manual_seed(rank)  # rank 0's values are everybody's
            module = Mlp()
            torch.manual_seed(0)
            module = Mlp() if rank == 0 else module
            options = {"bucket_cap_mb": 0.001, "process_group": group}
            model, optimizer = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), **stage(first, options))
            losses = plain_steps(model, optimizer, rank, 2)
            weights = sw.full_state_dict(model)
            state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
            assert same_everywhere([*weights.values()])
            module = Mlp()
            model, optimizer = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), **stage(second, options))
            sw.load_full_state_dict(model, weights if rank == 0 else None)
            sw.load_full_optimizer_state_dict(model, optimizer, state)
            for step in (2, 3):
                value = loss(model, rank, step)
                value.backward()
                gradients = sw.full_gradients(model)
                assert same_everywhere([*gradients.values()])
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.item())
            end = Outcome(losses, model, copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer)))
            end.assert_equals(whole, (first, second))
            gather(None)


@on_every_rank(at_least=3)
def test_at_zero_3_a_host_has_one_copy(rank, world_size):
    host_of = hosts_of("2+1", world_size)
    with on_hosts(host_of) as group:
        module = Mlp()
        model, _ = sw.wrap(module, OPTIMIZERS["AdamW"](module.parameters()), zero=3, process_group=group)
    weight = module[0].weight
    if rank == 0:
        weight.data[0, 0] = 77.0
    gather(None)
    assert (weight.data[0, 0].item() == 77.0) == (host_of[rank] == 0)
    gather(None)
    with sw.full_parameters(model, writable=True):
        module[0].weight.data.fill_(rank + 1.0)
    assert torch.equal(weight.data, torch.ones_like(weight)) and same_everywhere(weight.data.tolist())
    described = sw.describe()["models"][-1]
    assert described["shared_parameter_bytes"] >= 4 * sum(p.numel() for p in module.parameters())


@on_every_rank(at_least=3)
def test_compressed_gradients_too(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        whole = run(0, plain_steps, rank, process_group=group, compress=sw.Int8())
        for zero in in_turn(STAGES, 0):
            run(zero, plain_steps, rank, process_group=group, compress=sw.Int8()).assert_equals(whole, zero)


@on_every_rank(at_least=3)
def test_whole_tensors_reach_every_host(rank, world_size):
    found, stages = [], in_turn(STAGES, 1)
    with on_hosts(hosts_of("2+1", world_size)) as group:
        for zero in (0, *stages):
            torch.manual_seed(0)
            module = Mlp()
            optimizer = WHOLE_TENSORS["TrustRatio"](module.parameters())
            options = {"bucket_cap_mb": 0.001, "process_group": group, "partition": "tensor"}
            model, optimizer = sw.wrap(module, optimizer, **stage(zero, options))
            losses = plain_steps(model, optimizer, rank)
            found.append(Outcome(losses, model, copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))))
            gather(None)
    for zero, other in zip(stages, found[1:]):
        other.assert_equals(found[0], zero)


@on_every_rank(at_least=3)
def test_what_travels_is_what_hosts_want(rank, world_size):
    """Return the bytes that a host sends in a step: partial sums of slices that other hosts own, and slices that its
    ranks have updated; without cleared gradients also the means that its ranks own.
    """
    host_of = hosts_of("2+1", world_size)
    hosts = max(host_of) + 1
    here = host_of.count(host_of[rank])
    numel = 1024 * 1026 * 4
    with on_hosts(host_of) as group:
        for zero, expected in [
            (0, (hosts - 1) / hosts * 2),
            (1, (hosts - 1) / hosts * 2 + here / world_size * (hosts - 1)),
            (2, 1 - here / world_size + here / world_size * (hosts - 1)),
            (3, 1 - here / world_size + here / world_size * (hosts - 1)),
        ]:
            model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1))
            model, optimizer = sw.wrap(
                model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group, **stage(zero, {})
            )
            comm = internals.comm(model)
            for step, on_top in enumerate([False, False, True]):
                if not on_top:
                    optimizer.zero_grad()
                gather(None)
                before = comm.stats()["wire_bytes_sent"]
                model(batch(rank, 2, 1024, step=step)).sum().backward()
                optimizer.step()
                comm.barrier()
                sent = comm.stats()["wire_bytes_sent"] - before
                means = (hosts - 1) * here / world_size if on_top and zero >= 2 else 0
                assert abs(sent - (expected + means) * numel) < 0.02 * numel, (zero, step, sent / numel, expected)
            gather(None)


@on_every_rank(at_least=3)
def test_ranks_may_run_out_of_inputs(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        expected = run_unevenly(rank, world_size, 0, until_the_inputs_end, process_group=group)
        for zero in in_turn((1, 2, 3), 0):
            found = run_unevenly(rank, world_size, zero, until_the_inputs_end, bucket_cap_mb=0.001, process_group=group)
            assert_same(found, expected)


@on_every_rank(at_least=3)
def test_gathers_of_fully_shard_cross_no_host_whatever_it_reshards_to(rank, world_size):
    """A forward begins with the updated slices. A backward sends gradients alone, a forward without gradients after it
    the slices again.
    """
    host_of, numel = hosts_of("2+1", world_size), 512 * 512 * 4
    carries = host_of.index(host_of[rank]) == rank
    found = {}
    with on_hosts(host_of) as group:
        for reshard in (False, True, world_size):
            module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
            for each in module:
                sw.fully_shard(each, process_group=group, reshard_after_forward=reshard)
            sw.fully_shard(module, process_group=group)
            module(batch(rank, 2, 512)).sum().backward()
            module.zero_grad()
            comm = module._shardwright_mark.engine.replica.group.comm
            output = module(batch(rank, 2, 512)).sum()
            gather(None)
            before = comm.stats()["wire_bytes_sent"] if carries else 0
            output.backward()
            gather(None)
            found[reshard] = sum(gather(comm.stats()["wire_bytes_sent"] - before if carries else 0))
    assert max(found.values()) - min(found.values()) < 0.01 * numel, found
    assert 3 * numel < found[True] < 3.1 * numel, found
