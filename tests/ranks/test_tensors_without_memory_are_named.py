"""Law: a tensor without memory of its own (a wrapper subclass such as torchao's quantised weights, a fake or meta
tensor, one with freed storage) is one sentence that names it, on all ranks, wherever the engine would take its address.
It never crashes.
"""

import copy
import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import gather, on_every_rank, same_everywhere
from models import Heads
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._python_dispatch import return_and_correct_aliasing

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WITHOUT_MEMORY = r"without memory of its own \(its data_ptr\(\) is 0\)"


class Codes(torch.Tensor):
    """A quantised tensor like torchao's, with 8-bit codes and a scale as inner tensors."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, strides=codes.stride(), dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, tensor):
        scale = tensor.abs().amax() / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def value(self):
        return self.codes * self.scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("detach", "alias", "contiguous", "_to_copy", "clone", "empty_like"):
            made = cls(args[0].codes.clone(), args[0].scale.clone())
            return return_and_correct_aliasing(function, args, kwargs or {}, made) if name != "empty_like" else made
        if name == "copy_" and isinstance(args[0], cls):
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = [each.value() if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor):
    with FakeTensorMode():
        return torch.empty(tensor.shape)


KINDS = {"wrapper": lambda tensor: Codes.of(tensor), "freed": freed, "fake": fake}
STAGES = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "units": nn.Linear},
]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_stage = pytest.mark.parametrize("options", STAGES, ids=["0", "1", "2", "3", "private"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.base, self.last = nn.Linear(7, 40), nn.Linear(40, 40), nn.Linear(40, 5)

    def forward(self, x):
        return self.last(torch.tanh(self.base(torch.tanh(self.first(x)))))


def net(kind=None, second=None):
    """A layer with a quantised base weight, which does not train; with `second` also a quantised buffer."""
    torch.manual_seed(0)
    module = Net()
    if kind is not None:
        module.base.weight = nn.Parameter(KINDS[kind](module.base.weight.detach()), requires_grad=False)
    if second is not None:
        module.register_buffer("table", KINDS[second](torch.randn(40, 40)))
    return module


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def sgd(module):
    return torch.optim.SGD(trained(module), lr=0.1, momentum=0.9)


def step(model, optimizer, rank, number=0):
    model(batch(rank, 6, 7, step=number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def named(call, words, kind=engine.Error):
    with pytest.raises(kind, match=words) as raised:
        call()
    assert same_everywhere(str(raised.value))


@every_kind
@every_stage
@on_every_rank()
def test_at_wrap_on_all_ranks(rank, world_size, options, kind):
    named(lambda: sw.wrap(net(kind), **options), rf"parameter 'base.weight' is a .*{WITHOUT_MEMORY}.*ignored_params")
    named(lambda: sw.wrap(net(None, kind), **options), rf"buffer 'table' is a .*{WITHOUT_MEMORY}")
    with pytest.raises(engine.Error, match="base.weight' is a"):
        sw.wrap(net(kind) if rank == world_size - 1 else net(), **options)  # on one rank alone
    model, optimizer = sw.wrap(module := net(), sgd(module), **options)  # and the ranks go on
    step(model, optimizer, rank)
    gather(None)


@every_stage
@on_every_rank()
def test_under_precision_and_by_hand(rank, world_size, options):
    named(lambda: sw.wrap(net("wrapper"), precision="bf16", **options), f"base.weight' is a .*{WITHOUT_MEMORY}")
    if options.get("share_parameters") is False:
        named(lambda: sw.fully_shard(net("wrapper")), rf"weight' is a .*{WITHOUT_MEMORY}.*ignored_params")


@every_stage
@on_every_rank()
def test_two_of_them_are_left_as_they_are_by_ignored_params(rank, world_size, options):
    def build():
        module = net("wrapper")
        module.first.weight = nn.Parameter(KINDS["wrapper"](module.first.weight.detach()), requires_grad=False)
        return module

    module = build()
    model, optimizer = sw.wrap(module, sgd(module), ignored_params=["base.weight", "first.weight"], **options)
    for number in range(2):
        step(model, optimizer, rank, number)
    assert bits_equal(module.base.weight.value(), build().base.weight.value())
    with sw.full_parameters(model):
        assert same_everywhere([p.detach() for p in trained(module)])
    named(
        lambda: sw.load_full_state_dict(model, sw.full_state_dict(model)),
        f"load_full_state_dict: 'base.weight' is a .*{WITHOUT_MEMORY}",
    )
    mine = {
        name: value for name, value in sw.full_state_dict(model).items() if name not in ("base.weight", "first.weight")
    }
    assert len(sw.load_full_state_dict(model, mine, strict=False).missing_keys) == 2
    with tempfile.TemporaryDirectory() as folder:
        place = gather(folder)[0]
        named(
            lambda: sw.save(f"{place}/a", model, optimizer, step=1),
            f"first.weight.*{WITHOUT_MEMORY}",
            engine.CheckpointError,
        )
        gather(None)


@every_kind
@every_stage
@on_every_rank()
def test_buffers_that_become_such_later(rank, world_size, options, kind):
    module = net()
    module.register_buffer("table", torch.ones(40, 40))
    model, optimizer = sw.wrap(module, sgd(module), **options)
    step(model, optimizer, rank)
    module.table = KINDS[kind](torch.ones(40, 40))
    named(lambda: step(model, optimizer, rank, 1), f"buffers of Net: .*{WITHOUT_MEMORY}")


@every_stage
@on_every_rank()
def test_gradients_of_such_a_class(rank, world_size, options):
    """If a round finds a tensor whose memory cannot be read, torch copies it."""
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        module = Heads()
        model, optimizer = sw.wrap(module, sgd(module), **options)
        with model.no_sync():
            model(batch(rank, 6, 7), "right").backward()
        codes = Codes.of(torch.arange(33.0).view(3, 11) + rank)
        module.right.weight.grad = codes if wraps else codes.value()
        model(batch(rank, 6, 7, step=1), "left").backward()
        optimizer.step()
        with sw.full_parameters(model):
            found.append([p.detach().clone() for p in module.parameters()])
    assert all(bits_equal(a, b) for a, b in zip(*found))
    gather(None)


@pytest.mark.parametrize("kind", KINDS)
def test_in_our_optimizers_and_norms(kind):
    plain = nn.Parameter(torch.ones(8, 8))
    lacking = KINDS[kind](torch.ones(8, 8))
    plain.grad = torch.ones(8, 8)
    optimizer = sw.optim.AdamW([plain], lr=0.1)
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        kept = optimizer.state[plain][key]
        optimizer.state[plain][key] = lacking
        with pytest.raises(ValueError, match="must be a (tensor with memory of its own|dense tensor)"):
            optimizer.step()
        optimizer.state[plain][key] = kept
    optimizer.step()
    with pytest.raises(ValueError, match="must be a (tensor with memory of its own|dense tensor)"):
        sw.optim.global_norm([lacking])


def save_and_wait(checkpoints):
    with checkpoints:
        checkpoints.save(1)
        checkpoints.wait()


@every_kind
@on_every_rank()
def test_in_checkpoints(rank, world_size, kind):
    module = nn.Sequential(nn.Linear(7, 40), nn.Linear(40, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = sw.wrap(module, optimizer)
    model(batch(rank, 6, 7)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        place = gather(folder)[0]
        sw.save(f"{place}/sound", model, optimizer, step=1)
        lacking = KINDS[kind](torch.ones(40, 7))
        for number, save in enumerate(
            [
                lambda path: sw.save(path, model, optimizer, step=1, extra={"a": lacking}),
                lambda path: save_and_wait(sw.Checkpointer(path, model, optimizer, user_state={"a": lacking})),
                lambda path: dcp.save({"model": {"a": lacking}}, storage_writer=sw.checkpoint.StorageWriter(path)),
            ]
        ):
            with pytest.raises((Exception, CheckpointException), match=f"'.*' is a .*{WITHOUT_MEMORY}"):
                save(f"{place}/{number}")
            gather(None)
        weight = module[0].weight
        state = optimizer.state[weight]["momentum_buffer"]
        optimizer.state[weight]["momentum_buffer"] = lacking
        named(
            lambda: sw.save(f"{place}/state", model, optimizer, step=1),
            f"momentum_buffer.0.weight.*{WITHOUT_MEMORY}",
            engine.CheckpointError,
        )
        sw.load(f"{place}/sound", model, optimizer)  # state is made anew
        assert bits_equal(optimizer.state[weight]["momentum_buffer"], state)
        weight.data = freed(weight.data)
        for call in (
            lambda: sw.save(f"{place}/model", model, optimizer, step=1),
            lambda: sw.load(f"{place}/sound", model, optimizer),
        ):
            named(call, f"0.weight.*{WITHOUT_MEMORY}", engine.CheckpointError)
        gather(None)


def test_what_runs_under_functorch_and_fake_tensors():
    """A module with released units whose outputs have no memory."""
    module = sw.fully_shard(nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 5)))
    x = torch.randn(4, 7)
    with torch.no_grad():
        expected = module(x)
        assert torch.allclose(torch.func.vmap(module)(x), expected, atol=1e-6)
    assert copy.deepcopy(expected).shape == (4, 5)
