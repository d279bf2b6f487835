"""Law: a compressor takes a bucket without elements, and a hook's own group of fewer ranks than the module's; a rank that is
out of memory inside it is an error on all ranks at once."""

import resource

import pytest
import torch
import torch.distributed as dist
from harness import Stopwatch, gather, on_every_rank, same_everywhere
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


class WithNothing(nn.Module):
    """A bucket of its own has no elements: its dtype is another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x):
        return self.second(self.first(x)) + self.nothing.sum().float()


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("compress", [sw.Fp16(), sw.Bf16(), sw.Int8(), sw.PowerSGD(rank=1)], ids=str)
@on_every_rank()
def test_a_bucket_without_elements_is_averaged(rank, world_size, compress, zero):
    torch.manual_seed(0)
    model = sw.wrap(WithNothing(), zero=zero, compress=compress)
    for _ in range(3):
        model(torch.ones(2, 8) * (rank + 1)).sum().backward()
    whole = sw.full_gradients(model)
    assert same_everywhere([value.tolist() for value in whole.values() if value is not None])
    assert all(value is None or bool(value.isfinite().all()) for value in whole.values())
    gather(None)


HOOKS = {
    "fp16": lambda group: (group, sw.hooks.fp16_compress_hook),
    "int8": lambda group: (sw.hooks.BlockState(group), sw.hooks.int8_compress_hook),
    "powersgd": lambda group: (sw.hooks.PowerSGDState(group, start_powerSGD_iter=10), sw.hooks.powerSGD_hook),
}


@pytest.mark.parametrize("name", HOOKS)
@on_every_rank(exactly=3)
def test_a_hook_averages_over_its_own_group(rank, world_size, name):
    groups = [dist.new_group(each) for each in ([0, 1], [2])]
    torch.manual_seed(0)
    model = sw.wrap(nn.Linear(64, 64, bias=False))
    model.register_comm_hook(*HOOKS[name](groups[rank == 2]))
    model(torch.ones(2, 64) * (rank + 1)).sum().backward()
    expected = 6.0 if rank == 2 else 3.0  # 2 (r + 1) of each rank
    torch.testing.assert_close(model.module.weight.grad, torch.full((64, 64), expected), rtol=1e-2, atol=0)
    gather(None)


def one_without_memory(rank, world_size):
    torch.manual_seed(0)
    model = sw.wrap(nn.Linear(4096, 4096, bias=False), compress=sw.PowerSGD(rank=1), timeout_s=30)
    loss = model(torch.ones(1, 4096)).sum()

    def limit(_):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used - (40 << 20), resource.RLIM_INFINITY))

    if rank == world_size - 1:
        model.module.weight.register_post_accumulate_grad_hook(limit)
    start = Stopwatch()
    with pytest.raises(MemoryError, match=f"rank {world_size - 1} gave up: no memory for"):
        loss.backward()
    assert start.seconds() < 15
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_rank_without_memory_is_named_on_all(fresh_ranks):
    with fresh_ranks(2) as team:
        team.run(one_without_memory)
