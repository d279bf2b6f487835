"""Law: after sw.fully_shard parameters and gradients are DTensors of each rank's rows, as FSDP2's are. Optimizers, clipping,
scalers and state dicts of torch take them, with the bits of stage 0."""

import contextlib
import copy
import importlib.util
import itertools
import os
import sys
import tempfile
import time

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from subjects_of_rows import assert_released, assert_same_state, rows_of
from test_units_are_whole_only_while_they_run import Blocks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


class Odd(nn.Module):
    """Parameters of 1, 2, 5 and 7 rows, one of no elements, one that is frozen, one that two modules share."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 7)
        self.third = nn.Linear(7, 5, bias=False)
        self.third.weight = self.first.weight
        self.scale, self.pair = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2, 5))
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x))) * self.scale
        return self.third(x) + self.pair.sum(0) + self.nothing.sum() + self.frozen


def built(kind=Odd):
    torch.manual_seed(0)
    return kind()


def sharded(kind=Odd, **options):
    module = built(kind)
    for each in [*getattr(module, "blocks", ()), *([module.second] if kind is Odd else [])]:
        sw.fully_shard(each, **options)
    return sw.fully_shard(module, **options)


def reference(kind=Odd, **options):
    return sw.wrap(built(kind), zero=0, **options)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "ours": lambda p: sw.optim.AdamW(p, lr=1e-2),
}


def train(model, optimizer, rank, steps=4, first=0, max_norm=None, micro=1, scaler=None, schedule=None):
    losses = []
    for step in range(first, first + steps):
        for number in range(micro):
            loss = model(batch(rank, 6, 7, step=10 * step + number)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            losses.append(sw.clip_grad_norm_(model, max_norm).item())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return losses


@on_every_rank()
def test_parameters_and_gradients_are_dtensors_of_rows(rank, world_size):
    module, whole = sharded(), built().state_dict()
    before = dict(module.named_parameters())
    for name, parameter in before.items():
        assert type(parameter.data) is DTensor and isinstance(parameter, nn.Parameter) and parameter.is_leaf
        assert parameter.placements == (Shard(0),) and parameter.shape == whole[name].shape
        assert bits_equal(parameter.to_local().detach(), rows_of(whole[name], rank, world_size))
        assert parameter.to_local().is_contiguous() and bits_equal(parameter.full_tensor().detach(), whole[name])
    assert module.third.weight is module.first.weight
    module(batch(rank, 6, 7)).square().mean().backward()
    model = reference()
    model(batch(rank, 6, 7)).square().mean().backward()
    for (name, parameter), theirs in zip(module.named_parameters(), model.parameters(), strict=True):
        assert parameter is before[name], "the objects are made once"
        if name in ("frozen", "nothing"):
            assert parameter.grad is None or not parameter.grad.numel()
            continue
        assert type(parameter.grad) is DTensor and parameter.grad.placements == (Shard(0),)
        assert bits_equal(parameter.grad.full_tensor(), theirs.grad), name
    assert module.frozen.requires_grad is False
    gather(None)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_every_rank()
def test_torchs_optimizers_step_with_the_bits_of_stage_0(rank, world_size, name):
    for kind, options in itertools.product((Odd, Blocks), ({}, {"max_norm": 0.05}, {"micro": 3})):
        model = reference(kind)
        expected = train(model, OPTIMIZERS[name](model.parameters()), rank, **options)
        module = sharded(kind)
        assert train(module, OPTIMIZERS[name](module.parameters()), rank, **options) == expected
        assert_same_state(module, model.module.state_dict())
        assert_released(module)
    for each in (model, module):
        each(batch(rank, 6, 7)).square().mean().backward()
    expected, norm = (nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (model, module))
    assert norm.full_tensor().item() == pytest.approx(expected.item(), rel=1e-6)
    whole = sw.full_gradients(model)
    for name, value in sw.full_gradients(module).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=0, msg=name)
    gather(None)


@contextlib.contextmanager
def calls_of_dtensors():
    """A list of the Python functions of torch's DTensors that are called."""
    found = []

    def note(frame, event, _):
        if event == "call" and "torch/distributed/tensor/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@on_every_rank()
def test_fused_steps_run_on_local_tensors(rank, world_size, kind):
    """With the bits of a step on plain rows, and without a Python call of torch's DTensors. Other DTensors go torch's way."""
    module = sharded()
    rows = [nn.Parameter(p.to_local().clone()) for p in module.parameters()]
    options = {"lr": torch.tensor(1e-2) if kind is torch.optim.Adam else 1e-2, "fused": True, "amsgrad": True}
    optimizer, plain = kind(module.parameters(), **options), kind(rows, **options)
    other = nn.Parameter(DTensor.from_local(torch.ones(2, 3), module.pair.device_mesh, [Shard(0)]))
    others = kind([other], **options)
    for step in range(4):
        module(batch(rank, 6, 7, step=step)).square().mean().backward()
        for p, q in zip(module.parameters(), rows, strict=True):
            q.grad = None if p.grad is None else p.grad.to_local().clone()
        with calls_of_dtensors() as calls:
            optimizer.step()
        assert step == 0 or not calls, (step, calls)
        other.grad = torch.ones_like(other)
        with calls_of_dtensors() as calls:
            others.step()
        assert calls
        plain.step()
        for (name, p), q in zip(module.named_parameters(), rows, strict=True):
            assert bits_equal(p.to_local(), q), (step, name)
        optimizer.zero_grad()
    torch.testing.assert_close(other.to_local(), torch.full((2, 3), 0.96), rtol=0, atol=2e-3)
    module(batch(rank, 6, 7)).square().mean().backward()
    for p, q in zip(module.parameters(), rows, strict=True):
        q.grad = None if p.grad is None else p.grad.to_local().clone()
    module.pair.grad = module.pair.grad.redistribute(placements=[Replicate()])
    try:
        optimizer.step()
    except RuntimeError as error:
        assert world_size > 1 and "Sharding propagation" in str(error)
        return
    plain.step()  # torch 2.11 takes them together
    assert all(bits_equal(p.to_local(), q) for p, q in zip(module.parameters(), rows, strict=True))


@on_every_rank()
def test_scalers_schedules_and_gradients_that_programs_change(rank, world_size):
    def run(model, scaled):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if scaled else None
        return train(model, optimizer, rank, scaler=scaler, schedule=schedule)

    for scaled in (False, True):
        assert run(sharded(), scaled) == run(reference(), scaled)
    module, model = sharded(), reference()
    for each in (module, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            each(batch(rank, 6, 7, step=step)).square().mean().backward()
            for p in each.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
                    p.grad = p.grad + 0.25 * p.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    assert_same_state(module, model.module.state_dict())
    gather(None)


@on_every_rank()
def test_gradients_stand_until_they_are_cleared(rank, world_size):
    """Two synchronised backwards add up, one inside no_sync() waits, and zero_grad() in either way drops what stood."""
    module, model = sharded(Blocks), sw.wrap(built(Blocks), zero=2)

    def backward(each, step):
        each(batch(rank, 6, 7, step=step)).square().mean().backward()

    def same():
        whole = sw.full_gradients(model)
        assert all(bits_equal(value, whole[name]) for name, value in sw.full_gradients(module).items())

    for each in (module, model):
        backward(each, 0)
        with each.no_sync():
            backward(each, 1)
        backward(each, 2)
    same()
    for set_to_none in (True, False):
        for each in (module, model):
            each.zero_grad(set_to_none=set_to_none)
            backward(each, 3)
        same()
    gather(None)


@on_every_rank()
def test_an_optimizer_in_the_backward(rank, world_size):
    module, model = sharded(Blocks), built(Blocks)
    for parameter in module.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    reference = sw.wrap(model, zero=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        for each in (module, reference):
            each(batch(rank, 6, 7, step=number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    assert_same_state(module, model.state_dict())
    gather(None)


@on_every_rank()
def test_what_a_rank_writes_to_its_rows_is_gathered(rank, world_size):
    module, model = sharded(Blocks), built(Blocks)
    x = batch(0, 6, 7)
    with torch.no_grad():
        module(x)
        for number in range(3):
            for p in module.parameters():
                p.to_local().mul_(0.9)
                p.add_(0.01)
            for p in model.parameters():
                p.mul_(0.9).add_(0.01)
            assert bits_equal(module(x), model(x))
    assert_same_state(module, model.state_dict())
    other = built(Blocks)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    given = {
        name: DTensor.from_local(
            rows_of(value, rank, world_size).clone(), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        for (name, p), value in zip(module.named_parameters(), other.state_dict().values())
    }
    for assign in (False, True):
        module.load_state_dict(given if not assign else {n: v.clone() * 0.5 for n, v in given.items()}, assign=assign)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5 if assign else 1)
            assert bits_equal(module(x), other(x))
    module.requires_grad_(False)
    module.last.requires_grad_(True)
    module(x).sum().backward()
    assert [n for n, p in module.named_parameters() if p.grad is not None] == ["last.weight", "last.bias"]
    module.requires_grad_(True)
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    gather(None)


@on_every_rank(exactly=4)
def test_a_mesh_of_replicas_and_one_of_two_dimensions(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, module = reference(Blocks), sharded(Blocks, mesh=mesh)
    weight = module.first.weight
    assert weight.placements == (Replicate(), Shard(0)) and weight.device_mesh.ndim == 2
    assert bits_equal(weight.to_local().detach(), rows_of(model.module.first.weight.detach(), rank % 2, 2))
    make = OPTIMIZERS["adamw"]
    assert train(module, make(module.parameters()), rank) == train(model, make(model.parameters()), rank)
    assert_same_state(module, model.module.state_dict())

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for way in ("plain", "ours"):
        each = built(Blocks)
        if way == "ours":
            for block in each.blocks:
                parallelize_module(block, mesh["tp"], {"wide": ColwiseParallel(), "back": RowwiseParallel()})
                sw.fully_shard(block, mesh=mesh["dp"])
            sw.fully_shard(each, mesh=mesh["dp"])
        models.append(each)
    plain, ours = models
    wide = ours.blocks[0].wide.weight
    assert wide.device_mesh.mesh_dim_names == ("dp", "tp") and len(wide.placements) == 2
    assert bits_equal(wide.full_tensor().detach(), plain.blocks[0].wide.weight.detach())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in models]
    for step in range(3):
        ours(batch(rank // 2, 6, 7, step=step)).square().mean().backward()
        for row in range(2):
            (plain(batch(row, 6, 7, step=step)).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.full_tensor() if isinstance(p, DTensor) else p, q, rtol=1e-4, atol=1e-5, msg=name)
    gather(None)


@on_every_rank()
def test_folders_of_torch_and_states_without_a_gather(rank, world_size):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    folder = gather(tempfile.mkdtemp(prefix="rows-", dir=os.environ.get("SW_TEST_FOLDER")) if rank == 0 else None)[0]

    def theirs():
        module = built(Blocks)
        for block in module.blocks:
            fully_shard(block)
        return fully_shard(module)

    makers = {"ours": lambda: sharded(Blocks), "theirs": theirs}
    for writer, reader in itertools.permutations(makers):
        module = makers[writer]()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        train(module, optimizer, rank, 2)
        states = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer)))
        assert all(isinstance(value, DTensor) for value in states["model"].values())
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
        whole = {name: value.clone() for name, value in whole.items()}
        dcp.save(states, checkpoint_id=f"{folder}/{writer}")
        expected = train(module, optimizer, rank, 2, first=2)
        module = makers[reader]()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        states = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer)))
        dcp.load(states, checkpoint_id=f"{folder}/{writer}")
        set_state_dict(module, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        assert_same_state(module, whole)
        assert train(module, optimizer, rank, 2, first=2) == pytest.approx(expected, rel=1e-6)
    gather(None)


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="torch's writer needs safetensors")
@on_every_rank()
def test_torchs_writer_of_safetensors_takes_the_state(rank, world_size):
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
    except ImportError:  # an older torch
        return
    folder = gather(tempfile.mkdtemp(prefix="rows-", dir=os.environ.get("SW_TEST_FOLDER")) if rank == 0 else None)[0]
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = sw.fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))
        module(batch(rank, 4, 7))
        states.append(module.state_dict())
    options = {"save_distributed": True, "enable_consolidation": False}
    try:
        writer = HuggingFaceStorageWriter(folder, **options)
    except TypeError:  # before torch 2.8 it wrote whole tensors alone
        return
    torch.distributed.checkpoint.save(states[0], storage_writer=writer)
    gather(None)
    torch.distributed.checkpoint.load(states[1], storage_reader=HuggingFaceStorageReader(folder))
    module.load_state_dict(states[1])
    module(batch(rank, 4, 7))
    for name, value in sw.full_state_dict(module).items():
        assert bits_equal(value, states[0][name].full_tensor()), name


@on_every_rank()
def test_forwards_of_every_order(rank, world_size):
    """Several forwards before a backward, units that run alone, evaluation between, modules without parameters, nested calls."""
    module, model = sharded(Blocks), reference(Blocks)
    for each in (module, model):
        losses = [each(batch(rank, 6, 7, step=number)).square().mean() for number in range(3)]
        with torch.no_grad():
            each(batch(rank, 2, 7))
        sum(losses).backward()
    whole = sw.full_gradients(model)
    assert all(bits_equal(value, whole[name]) for name, value in sw.full_gradients(module).items())
    assert_released(module)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.act = nn.Linear(7, 7), nn.ReLU()

        def forward(self, x):
            return self.act(self.inner(x)) + self.inner(x)

    module, model = built(Two), built(Two)
    for each in (module.inner, module.act, module):
        sw.fully_shard(each)
    model = sw.wrap(model, zero=0)
    alone = batch(rank, 6, 7, step=7)
    for each in (module, model):
        each(batch(rank, 6, 7)).square().mean().backward()
        bare = each if each is module else each.module
        assert bits_equal(bare.inner(alone).detach(), sw.unwrap(model).inner(alone).detach())
    whole = sw.full_gradients(model)
    assert all(bits_equal(value, whole[name]) for name, value in sw.full_gradients(module).items())
    assert sw.fully_shard(nn.ReLU())(alone).shape == alone.shape  # nothing to gather
    gather(None)


@on_every_rank()
def test_what_cannot_be_is_said_on_all_ranks(rank, world_size):
    from torch.distributed.device_mesh import DeviceMesh

    def refused(call, kind, words):
        with pytest.raises(kind, match=words) as raised:
            call()
        assert same_everywhere(str(raised.value))

    module = built(Blocks)
    stale = torch.optim.SGD(module.parameters(), lr=0.1)
    sw.fully_shard(module)
    module(batch(rank, 6, 7)).sum().backward()
    refused(stale.step, engine.Error, "is one that sw.fully_shard has cut since.*make the optimizer after")
    with torch.no_grad():
        module.first.weight = nn.Parameter(torch.zeros(16, 7))
    refused(lambda: module(batch(rank, 6, 7)), engine.Error, "'weight' was replaced by a Parameter of shape .16, 7.")
    module = sharded(Blocks)
    module(batch(rank, 6, 7)).sum().backward()
    module.first.weight.grad = None
    module.last.bias.grad = DTensor.from_local(torch.zeros(5), module.last.bias.device_mesh, [Replicate()])
    refused(
        module(batch(rank, 6, 7)).sum().backward, engine.Error, "gradient of 'last.bias' must be a DTensor placed as"
    )
    for made, kind, words in [
        (
            lambda: nn.ParameterList([nn.Parameter(torch.ones(()))]),
            ValueError,
            "Change 0 to a 1D tensor with numel equal to 1",
        ),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), ValueError, "do not implement forward"),
    ]:
        refused(lambda made=made: sw.fully_shard(made()), kind, words)
    refused(
        lambda: sw.fully_shard(nn.Linear(12, 5), shard_placement_fn=lambda p: Shard(1)),
        AssertionError,
        "Shard dim 1 is invalid for 1D",
    )
    if world_size == 3:
        refused(
            lambda: sw.fully_shard(nn.Linear(7, 6, bias=False), shard_placement_fn=lambda p: Shard(1)),
            NotImplementedError,
            "does not support uneven sharding on dim 1: 'weight'",
        )
        lone = DeviceMesh("cpu", [rank])
        inner = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 6))
        sw.fully_shard(inner[1])
        refused(lambda: sw.fully_shard(inner, mesh=lone)(torch.ones(2, 7)), ValueError, "inner module '1' got no mesh")
    with torch.device("meta"):
        module = Blocks()
    for block in module.blocks:
        sw.fully_shard(block)
    refused(
        lambda: sw.fully_shard(module)(batch(rank, 6, 7)),
        RuntimeError,
        "still on meta device: .'first.weight', 'first.bias'",
    )
    gather(None)


@on_every_rank()
def test_clipping_between_a_forward_and_its_backward_changes_nothing(rank, world_size):
    """Neither a mean that zero_grad() has dropped returns, nor does one that stands count twice."""

    def run(clips):
        module, losses = sharded(), []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(4):
            for number in range(1 + step % 2):
                loss = module(batch(rank, 6, 7, step=10 * step + number)).square().mean()
                if clips:
                    norm = sw.clip_grad_norm_(module, 1e6).item()
                    assert (norm == 0) is (number == 0), "no mean stands before the first backward of a step"
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert run(True) == run(False)
    gather(None)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@on_every_rank()
def test_a_parameter_that_two_units_share_trains_with_the_bits_of_stage_0(rank, world_size):
    model, module = reference(Tied), sharded(Tied)
    found, expected = (train(each, torch.optim.AdamW(each.parameters(), lr=1e-2), rank) for each in (module, model))
    assert found == expected and module.blocks[2].weight is module.blocks[0].weight
    assert_same_state(module, model.module.state_dict())
    gather(None)


# what hostile programs do --------------------------------------------------------------------------------------------------


@on_every_rank()
def test_a_gradient_that_a_program_keeps_keeps_its_values(rank, world_size):
    module = sharded(Blocks)

    def gradients(step):
        module(batch(rank, 6, 7, step=step)).square().mean().backward()
        return [p.grad for p in module.parameters()]

    kept = gradients(0)
    values = [each.to_local().clone() for each in kept]
    module.zero_grad()
    later = gradients(1)
    assert all(bits_equal(each.to_local(), value) for each, value in zip(kept, values))
    assert not all(bits_equal(one.to_local(), two.to_local()) for one, two in zip(kept, later))
    for parameter, each in zip(module.parameters(), kept):
        parameter.grad = each
    torch.optim.SGD(module.parameters(), lr=1.0).step()  # on what was set
    expected = built(Blocks).state_dict()
    for (name, p), value in zip(module.named_parameters(), values):
        assert bits_equal(p.to_local().detach(), rows_of(expected[name], rank, world_size) - value), name
    module = sharded(Blocks)
    gradients(0)
    module.double().float()  # exchanges the gradients' memory
    module.zero_grad()
    fresh = sharded(Blocks)
    fresh(batch(rank, 6, 7, step=1)).square().mean().backward()
    assert all(bits_equal(one.to_local(), p.grad.to_local()) for one, p in zip(gradients(1), fresh.parameters()))
    gather(None)


def late(rank, world_size):
    return lambda *_: time.sleep(0.2 if rank == world_size - 1 else 0)


def in_a_forward_alone(module, x, nap):
    handles = [block.register_forward_pre_hook(nap) for block in module.blocks]
    return module(x).sum().item(), handles


def in_a_backward_of_inputs(module, x, nap):
    handles = [block.register_full_backward_hook(nap) for block in module.blocks]
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x)
    return gradient.abs().sum().item(), handles


def frozen(module, x, nap):
    module.requires_grad_(False)
    return in_a_backward_of_inputs(module, x, nap)


@pytest.mark.parametrize("reads", [in_a_forward_alone, in_a_backward_of_inputs, frozen])
@on_every_rank(at_least=2)
def test_a_write_does_not_meet_what_a_late_rank_reads(rank, world_size, reads):
    """No round follows; each rank writes as soon as it may, the last one is late."""
    module, x = sharded(Blocks), batch(0, 6, 7).requires_grad_()
    expected, handles = reads(module, x, lambda *_: None)
    for each in handles:
        each.remove()
    found, handles = reads(module, x, late(rank, world_size))
    with torch.no_grad():
        for value in module.state_dict().values():
            value.to_local().zero_()
    assert found == expected
    gather(None)


@on_every_rank()
def test_the_flag_counts_as_the_backward_runs(rank, world_size):
    module, model = sharded(Blocks), reference(Blocks)
    model(batch(rank, 6, 7)).square().mean().backward()
    module.set_requires_gradient_sync(False)
    loss = module(batch(rank, 6, 7)).square().mean()
    module.set_requires_gradient_sync(True)
    loss.backward()
    whole = sw.full_gradients(model)
    assert all(bits_equal(value, whole[name]) for name, value in sw.full_gradients(module).items())
    module.zero_grad()
    with module.no_sync():
        with module.no_sync():
            pass
        loss = module(batch(rank, 6, 7)).square().mean()
        loss.backward()
    assert all(p.grad is None for p in module.parameters())
    module.zero_grad()
    module(batch(rank, 6, 7)).square().mean().backward()
    assert all(p.grad is not None for p in module.parameters())
    gather(None)


@on_every_rank()
def test_odd_moments(rank, world_size):
    """A first run in inference mode, zero_grad() between a forward and its backward, each rank's own buffers, copies."""
    module, model, x = sharded(Blocks), reference(Blocks), batch(rank, 6, 7)
    with torch.inference_mode():
        module(x)
    for step in range(2):
        for each in (module, model):
            loss = each(batch(rank, 6, 7, step=step)).square().mean()
            each.zero_grad()
            loss.backward()
    whole = sw.full_gradients(model)
    assert all(bits_equal(value, whole[name]) for name, value in sw.full_gradients(module).items())
    norm = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 7))
    norm[0].running_mean.fill_(rank)
    sw.fully_shard(norm)(x)
    expected = nn.BatchNorm1d(7)
    expected.running_mean.fill_(rank)
    expected(x)
    assert bits_equal(norm[0].running_mean, expected.running_mean)
    parameter = module.first.weight
    copied = copy.deepcopy(parameter)
    assert bits_equal(copied.to_local().detach(), parameter.to_local().detach())
    assert copied.to_local().data_ptr() != parameter.to_local().data_ptr() or not copied.to_local().numel()
    gather(None)
