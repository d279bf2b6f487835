"""Law: a module of sw.fully_shard has every public method of torch's FSDPModule. What changes a gradient or an output does
so exactly as said; what only tunes FSDP2's own communication is accepted with one warning; the rest is one sentence."""

import copy
import inspect
import warnings

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def encode(self, x, scale=1.0):
        return torch.tanh(self.first(x)) * scale


def sharded(module=None, **options):
    module = Net() if module is None else module
    for each in (module.first, module.second):
        sw.fully_shard(each, **options)
    return sw.fully_shard(module, **options)


def backward(module, rank, world_size):
    module(batch(rank, 6, 5)).square().mean().backward()
    return {name: grad.clone() for name, grad in sw.full_gradients(module).items() if grad is not None}


def sums(world_size, rank):
    """Return each rank's own gradients, added in rank order."""
    module = Net()
    module(batch(rank, 6, 5)).square().mean().backward()
    own = gather({name: p.grad for name, p in module.named_parameters()})
    total = {name: grad.clone() for name, grad in own[0].items()}
    for each in own[1:]:
        for name, grad in each.items():
            total[name] += grad
    return total


@on_every_rank()
def test_gradients_are_the_sum_over_the_factor(rank, world_size):
    total = sums(world_size, rank)
    for factor in (1.0, world_size, 2.5, 4):
        module = sharded()
        for each in (module, module.first, module.second):
            each.set_gradient_divide_factor(factor)
        optimizer = sw.shard_optimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))
        found = backward(module, rank, world_size)
        for name, value in total.items():
            exact = value if factor == 1 else value * (1 / factor)
            if factor in (1, 4) or (factor == world_size):
                assert bits_equal(found[name], exact), (factor, name)
            else:
                torch.testing.assert_close(found[name], exact, rtol=1e-6, atol=1e-7)
        optimizer.zero_grad()


@on_every_rank()
def test_one_unit_has_its_own_factor_and_it_may_change(rank, world_size):
    total, module = sums(world_size, rank), sharded()
    optimizer = sw.shard_optimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for own in (8.0, 0.5, world_size):
        module.second.set_gradient_divide_factor(own)
        found = backward(module, rank, world_size)
        for name, value in total.items():
            factor = own if name.startswith("second") else world_size
            torch.testing.assert_close(found[name], value / factor, rtol=1e-6, atol=1e-7)
        optimizer.zero_grad()
    frozen = Net()
    frozen.second.requires_grad_(False)
    sharded(frozen)
    frozen.second.set_gradient_divide_factor(4.0)
    optimizer = sw.shard_optimizer(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
    backward(frozen, rank, world_size)
    optimizer.zero_grad()
    frozen.second.requires_grad_(True)
    found = backward(frozen, rank, world_size)
    torch.testing.assert_close(found["second.weight"], total["second.weight"] / 4, rtol=1e-6, atol=1e-7)
    with module.no_sync():
        module(batch(rank, 6, 5)).square().mean().backward()
    with pytest.raises(sw.Error, match="between micro-batches"):
        module.second.set_gradient_divide_factor(2.0)
    module.second.set_gradient_divide_factor(world_size)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite factor > 0, got"):
            module.set_gradient_divide_factor(wrong)


@on_every_rank()
def test_a_module_of_the_meta_device_and_ignored_names(rank, world_size):
    with torch.device("meta"):
        module = Net()
    for each in (module.first, module.second):
        sw.fully_shard(each)
        each.set_gradient_divide_factor(3.0)
    sw.fully_shard(module, init=True, ignored_params=["head.weight", "head.bias"])
    module.head.to_empty(device="cpu")
    torch.nn.init.zeros_(module.head.weight), torch.nn.init.zeros_(module.head.bias)
    module(batch(rank, 6, 5)).sum().backward()
    own = Net()
    torch.nn.init.zeros_(own.head.weight), torch.nn.init.zeros_(own.head.bias)
    assert module.head.bias.grad.eq(6).all()  # of this rank alone, and not scaled


@on_every_rank()
def test_a_registered_method_runs_as_a_forward(rank, world_size):
    plain, module = Net(), Net()
    plain.encode(batch(rank, 6, 5), scale=2.0).square().sum().backward()
    sharded(module)
    sw.register_fsdp_forward_method(module, "encode")
    sw.register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not sharded: nothing happens
    optimizer = sw.shard_optimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))
    output = module.encode(batch(rank, 6, 5), scale=2.0)
    assert bits_equal(output.detach(), plain.encode(batch(rank, 6, 5), scale=2.0).detach())
    output.square().sum().backward()
    own = gather(plain.first.weight.grad)
    expected = own[0].clone()
    for each in own[1:]:
        expected += each
    assert bits_equal(sw.full_gradients(module)["first.weight"], expected * (1 / world_size))
    optimizer.step()
    with pytest.raises(ValueError, match="Net has no method 'decode'"):
        sw.register_fsdp_forward_method(module, "decode")


@on_every_rank()
def test_what_only_tunes_is_accepted_with_one_warning(rank, world_size):
    module = sharded()
    sw.share_comm_ctx([module, module.first])
    calls = {
        "set_custom_all_gather": (None,),
        "set_custom_reduce_scatter": (None,),
        "set_force_sum_reduction_for_comms": (True,),
        "set_unshard_in_backward": (False,),
        "set_allocate_memory_from_process_group_for_comm": (True,),
        "set_symm_mem_for_comm": (),
        "set_reduce_scatter_max_input_buffers": (2,),
        "set_separate_reduce_scatter_group": (True,),
    }
    for name, arguments in calls.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            getattr(module, name)(*arguments)
            getattr(module.first, name)(*arguments)
        assert len(said) == 1 and f"{name}() has no effect on sw.fully_shard" in str(said[0].message), (name, said)
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # before torch 2.6
        return
    theirs = {name for name, each in inspect.getmembers(FSDPModule, inspect.isfunction) if not name.startswith("_")}
    assert {name for name in theirs if not hasattr(sw.FSDPModule, name)} == set()


@on_every_rank()
def test_parameters_that_no_rank_used_get_zeros_on_request(rank, world_size):
    class Choice(Net):
        def forward(self, x):
            return self.first(x) if rank else self.head(torch.zeros(len(x), 9))  # no rank runs `second`

    module = sharded(Choice())
    module.second.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for zeroes in (False, True, False):
        module.set_reduce_scatter_unused_params(zeroes)
        for _ in range(2):  # zeros add nothing
            module(batch(rank, 6, 5)).square().mean().backward()
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        unused, frozen = grads.pop("second.weight"), grads.pop("second.bias")
        assert (unused is not None) is zeroes and frozen is None
        assert world_size == 1 or None not in grads.values()
        if zeroes:
            assert not unused.full_tensor().any() and unused.placements == module.second.weight.placements
            assert not sw.full_gradients(module)["second.weight"].any()
        before = module.second.weight.full_tensor().clone()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        assert bits_equal(module.second.weight.full_tensor(), before)
        optimizer.zero_grad()
    module.set_reduce_scatter_unused_params(True, recurse=False)
    module(batch(rank, 6, 5)).square().mean().backward()
    assert module.second.weight.grad is None


@on_every_rank(exactly=4)
def test_a_hook_runs_on_its_stream_but_on_no_mesh_of_replicas(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    stream, seen = torch.cpu.Stream(), []
    module = sharded()
    module.set_all_reduce_hook(lambda flat: seen.append(torch.cpu.current_stream() is stream), stream=stream)
    backward(module, rank, world_size)
    assert seen == [True] and torch.cpu.current_stream() is not stream
    module = sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "slices")))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        module.set_all_reduce_hook(seen.append, stream=stream)


@on_every_rank()
def test_units_are_reset_after_an_exception(rank, world_size):
    class Fails(Net):
        fails = True

        def forward(self, x):
            if self.fails:
                self.first(x)
                raise KeyError("planted")
            return super().forward(x)

    module = sharded(Fails())
    optimizer = sw.shard_optimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(KeyError, match="planted"):
        module(batch(rank, 6, 5))
    module.reset_iter_state()
    Fails.fails = False
    found = backward(module, rank, world_size)
    total = sums(world_size, rank)
    assert all(bits_equal(found[name], value * (1 / world_size)) for name, value in total.items())
    optimizer.step()
    Fails.fails = True


@on_every_rank()
def test_a_module_without_trained_parameters_is_gathered(rank, world_size):
    expected = Net()
    frozen = Net().requires_grad_(False)
    sharded(frozen)
    x = batch(rank, 6, 5)
    for _ in range(2):
        assert bits_equal(frozen(x), expected(x).detach())
    assert sw.stats()["models"][-1]["units"] == 3
    state = sw.full_state_dict(frozen)
    assert all(bits_equal(value, state[name]) for name, value in expected.state_dict().items())


@on_every_rank(exactly=4)
def test_numbers_of_ranks_and_names_of_dimensions(rank, world_size):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "slices"))
    x, expected = batch(rank, 6, 5), Net()
    for number, whole in ((1, True), (2, False)):
        module = sharded(mesh=mesh, reshard_after_forward=number)
        assert bits_equal(module(x).detach(), expected(x).detach())
        module.first.reshard()
        assert sw.stats()["models"][-1]["units"] == 3
    with pytest.raises(ValueError, match="must be a divisor of 2, got 3"):
        sw.fully_shard(Net(), mesh=mesh, reshard_after_forward=3)
    with pytest.raises(TypeError, match="a number of ranks, got 'all'"):
        sw.fully_shard(Net(), mesh=mesh, reshard_after_forward="all")
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:
        return
    for dims in (
        DataParallelMeshDims(shard="slices", replicate="copies"),
        DataParallelMeshDims(shard=("copies", "slices")),
    ):
        module = sharded(mesh=mesh, dp_mesh_dims=dims)
        assert bits_equal(module(x).detach(), expected(x).detach())
    with pytest.raises(ValueError, match="dim name 'tp' not found in mesh.mesh_dim_names"):
        sw.fully_shard(Net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="tp"))
    copy.copy(mesh)
