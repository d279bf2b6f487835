"""Law: torch.compile of the module or the wrapper does not change the averages."""

import copy

import pytest
import torch
from harness import on_every_rank, same_everywhere
from models import Mlp
from oracle.data_parallel import NaiveDataParallel
from peer import PEER, batch, data_parallel

pytestmark = pytest.mark.timeout(180)


def close(wrapped, naive):
    for (name, ours), theirs in zip(wrapped.named_parameters(), naive.module.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), name


def train(rank, model, optimizer, naive):
    """Train three steps, one with accumulation. A compiled graph may round differently from the eager one."""
    for step in range(3):
        if step == 1:
            with model_of(model).no_sync():
                for each in (model, naive):
                    each(batch(rank, 6, 7, step=50)).square().mean().backward()
        for each in (model, naive):
            each(batch(rank, 6, 7, step=step)).square().mean().backward()
        naive.synchronise()
        wrapped = model_of(model)
        close(wrapped.module, naive)
        assert same_everywhere([parameter.grad for parameter in wrapped.parameters()])
        naive.module.zero_grad()
        optimizer.zero_grad()


def model_of(model):
    return getattr(model, "_orig_mod", model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["module", "wrapper", "wrapper in place"])
@on_every_rank(deadline_s=150)
def test_a_compiled_module_trains_as_the_naive_loop(rank, world_size, what, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Mlp()
    naive = NaiveDataParallel(copy.deepcopy(module))
    if what == "module":
        model = data_parallel(torch.compile(module, backend=backend))
    elif what == "wrapper":
        model = torch.compile(data_parallel(module), backend=backend)
    else:
        model = data_parallel(module)
        model.compile(backend=backend)
    train(rank, model, torch.optim.SGD(module.parameters(), lr=0.1), naive)
    torch._dynamo.reset()


@pytest.mark.skipif(PEER == "torch", reason="ours")
@on_every_rank(deadline_s=150)
def test_a_small_bucket_cap_does_not_upset_the_compiler(rank, world_size):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Mlp()
    naive = NaiveDataParallel(copy.deepcopy(module))
    model = torch.compile(data_parallel(module, bucket_cap_mb=0.001), backend="aot_eager")
    train(rank, model, torch.optim.SGD(module.parameters(), lr=0.1), naive)
    torch._dynamo.reset()
