"""Law: a long program over hosts trains right: many buckets, several models, rounds at different times, forks.

Ranks of one machine are told their host, as in test_hosts_fold_in_two_steps.py.
"""

import gc
import os

import shardwright as sw
import torch
from harness import on_every_rank, same_everywhere
from internals import process_group
from test_hosts_fold_in_two_steps import hosts_of, on_hosts


def deep(count=90):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(count)])


@on_every_rank(at_least=3)
def test_more_buckets_than_operations_in_flight(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        model = sw.wrap(deep(), process_group=group, bucket_cap_mb=1e-5, timeout_s=10)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
    assert same_everywhere([p.grad.sum().item() for p in model.parameters()])


@on_every_rank(at_least=3)
def test_two_models_and_rounds_without_synchronisation(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        models = [sw.wrap(torch.nn.Linear(4, 4, bias=False), process_group=group, timeout_s=10) for _ in range(2)]
    with models[0].no_sync():
        models[0](torch.ones(1, 4)).sum().backward()
    for _ in range(2):
        for model in models:
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
    mean = (world_size + 1) / 2
    assert torch.equal(models[0].module.weight.grad, torch.full((4, 4), 2 * mean + 1))
    assert torch.equal(models[1].module.weight.grad, torch.full((4, 4), 2 * mean))


@on_every_rank(at_least=3)
def test_a_forked_child_is_refused_and_its_parent_goes_on(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        found = process_group.host_group(group, 10)
    found.comm.barrier()
    child = os.fork()
    if child == 0:
        try:
            found.comm.barrier()
            code = 1
        except sw.Error as error:
            code = 0 if "forked" in str(error) else 2
        found.close()
        gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found.comm.barrier()
