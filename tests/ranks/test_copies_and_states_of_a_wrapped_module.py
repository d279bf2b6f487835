"""Law: a state dict is torch's own (prefix `module.`, whole, plain tensors), and a copy of a wrapper is right or
refused with a sentence, never wrong: a copy shares no memory and averages by itself."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from harness import gather, on_every_rank
from models import Mlp
from oracle.data_parallel import NaiveDataParallel
from peer import PEER, assert_same_gradients, batch, compare_step, data_parallel, pair, zero_grad
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def backward(model, rank, step):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


@on_every_rank()
def test_state_dicts_go_to_and_from_torchs_own_wrapper(rank, world_size):
    torch.manual_seed(1)
    wrapped = data_parallel(Mlp())
    theirs = TorchDDP(Mlp())
    state = wrapped.state_dict()
    assert list(state) == ["module." + name for name in Mlp().state_dict()]
    theirs.load_state_dict(state)
    addresses = [parameter.data_ptr() for parameter in wrapped.parameters()]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(1)
    wrapped.load_state_dict(theirs.state_dict())
    assert addresses == [parameter.data_ptr() for parameter in wrapped.parameters()]
    for ours, other in zip(wrapped.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other)
    naive = NaiveDataParallel(copy.deepcopy(wrapped.module))
    wrapped.zero_grad()
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))


@on_every_rank()
def test_a_state_dict_asks_nobody_and_saves_small(rank, world_size):
    wrapped, _ = pair(Mlp)
    backward(wrapped, rank, 0)
    if rank == 0:
        file = io.BytesIO()
        torch.save(wrapped.state_dict(), file)
        numel = sum(parameter.numel() for parameter in wrapped.parameters())
        assert len(file.getvalue()) < 4 * numel + 20_000
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(torch.equal(loaded[name], value) for name, value in wrapped.state_dict().items())
        file = io.BytesIO()
        torch.save({name: parameter.grad for name, parameter in wrapped.named_parameters()}, file)
        assert len(file.getvalue()) < 4 * numel + 20_000  # a gradient is a view of a bucket: its own bytes alone
    gather(None)


def copies_are_right_or_refused(rank, duplicate):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 0))
    try:
        other = duplicate(wrapped)
    except (RuntimeError, TypeError, NotImplementedError, pickle.PicklingError) as refusal:
        assert len(str(refusal)) > 20
        compare_step(wrapped, naive, lambda model: backward(model, rank, 1))
        return
    mine = {parameter.data_ptr() for parameter in wrapped.parameters()}
    mine |= {parameter.grad.data_ptr() for parameter in wrapped.parameters()}
    for parameter in other.parameters():
        assert parameter.data_ptr() not in mine
        assert parameter.grad is None or parameter.grad.data_ptr() not in mine
    other.zero_grad()
    naive_other = NaiveDataParallel(copy.deepcopy(other.module))
    for step in range(2):
        compare_step(other, naive_other, lambda model, step=step: backward(model, rank, 10 + step))
        compare_step(wrapped, naive, lambda model, step=step: backward(model, rank, 20 + step))
        assert_same_gradients(other, naive_other)


@on_every_rank()
def test_deepcopy_of_the_wrapper(rank, world_size):
    copies_are_right_or_refused(rank, copy.deepcopy)


@on_every_rank()
def test_pickle_of_the_wrapper(rank, world_size):
    copies_are_right_or_refused(rank, lambda wrapped: pickle.loads(pickle.dumps(wrapped)))


@on_every_rank()
def test_torch_save_of_the_wrapper(rank, world_size):
    def through_a_file(wrapped):
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    copies_are_right_or_refused(rank, through_a_file)


@on_every_rank()
def test_copies_of_the_wrapped_module_are_plain_modules(rank, world_size):
    wrapped, naive = pair(Mlp)
    backward(wrapped, rank, 0)
    for other in (copy.deepcopy(wrapped.module), pickle.loads(pickle.dumps(wrapped.module))):
        if rank == 0:  # alone: a plain module synchronises nothing
            other.zero_grad()
            backward(other, rank, 1)
            reference = Mlp()
            reference.load_state_dict(wrapped.module.state_dict())
            backward(reference, rank, 1)
            for ours, theirs in zip(other.parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
    zero_grad(wrapped, naive)
    compare_step(wrapped, naive, lambda model: backward(model, rank, 2))


@pytest.mark.skipif(PEER == "torch", reason="sw.unwrap")
@on_every_rank()
def test_unwrap_gives_the_users_own_module(rank, world_size):
    import shardwright as sw

    module = Mlp()
    wrapped = data_parallel(module)
    assert sw.unwrap(wrapped) is module and sw.unwrap(module) is module


@pytest.mark.skipif(PEER == "torch", reason="the engine's communicators")
@on_every_rank()
def test_a_wrapper_that_one_rank_keeps_and_others_drop_does_not_disturb_the_next(rank, world_size):
    """Each rank may collect its garbage at its own time."""
    import gc

    kept = []
    for step in range(3):
        wrapped, naive = pair(Mlp)
        compare_step(wrapped, naive, lambda model, step=step: backward(model, rank, step))
        if rank == step % world_size:
            kept.append(wrapped)
        del wrapped
        gc.collect()
    assert dist.get_world_size() == world_size
    gather(None)


@pytest.mark.skipif(PEER == "torch", reason="torch refuses a module without a gradient")
@on_every_rank()
def test_a_frozen_copy_for_averages_asks_nobody(rank, world_size):
    wrapped, _ = pair(Mlp)
    average = copy.deepcopy(wrapped).requires_grad_(False)
    if rank == 0:  # with gradients enabled, and on one rank alone
        assert average(batch(rank, 4, 7)).shape == (4, 5)
    gather(None)
