"""Law: sw.fully_shard on inner modules and then on the outermost one, with torch's own optimizers over its parameters,
which are DTensors, has the bits of stage 0, in place, under FSDP2's names."""

import copy

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from subjects_of_rows import assert_released
from test_units_are_whole_only_while_they_run import Block, Blocks, steps, wrap
from torch import nn
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


def sharded(**options):
    torch.manual_seed(0)
    module = Blocks()
    for block in module.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard(module, **{name: options[name] for name in ("precision",) if name in options})
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def accumulating(model, optimizer, rank):
    losses = []
    for step in range(3):
        with model.no_sync():
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
        losses += steps(model, optimizer, rank, 1)
    return losses


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("train", [steps, accumulating])
@on_every_rank()
def test_by_hand_as_by_wrap(rank, world_size, train, reshard_after_forward):
    model, optimizer = wrap(Blocks, 0)
    expected = train(model, optimizer, rank), sw.full_state_dict(model)
    module, optimizer = sharded(reshard_after_forward=reshard_after_forward)
    assert_released(module)
    assert train(module, optimizer, rank) == expected[0]
    assert sw.stats()["models"][-1]["units"] == 4
    found = sw.full_state_dict(module)
    assert found.keys() == expected[1].keys()
    assert all(bits_equal(value, expected[1][name]) for name, value in found.items())
    assert_released(module)


@on_every_rank()
def test_a_meta_module_is_filled_after_the_calls_as_with_torch(rank, world_size):
    def fill(module):
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.fill_(0.03 * number - 0.2)
                parameter.add_(0.01 * parameter.abs().cos())

    with torch.device("meta"):
        module = Blocks()
    twin = Blocks()
    fill(twin)
    found = []
    for each in (module, twin):
        for block in each.blocks:
            sw.fully_shard(block)
        sw.fully_shard(each)
        if each is module:
            fill(each.to_empty(device="cpu"))
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        found.append((steps(each, optimizer, rank, 3), sw.full_state_dict(each)))
    assert found[0][0] == found[1][0]
    assert all(bits_equal(value, found[1][1][name]) for name, value in found[0][1].items())
    assert_released(module)


@on_every_rank()
def test_the_class_is_a_subclass_that_is_not_copied(rank, world_size):
    module, optimizer = sharded()
    assert isinstance(module, Blocks) and isinstance(module.blocks[0], Block) and type(module).__name__ == "FSDPBlocks"
    assert sw.unwrap(module) is module
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(module)
    some = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    assert type(sw.fully_shard(some)[:1]) is nn.Sequential
    gather(None)


@on_every_rank()
def test_unshard_and_reshard(rank, world_size):
    module, optimizer = sharded()
    block = module.blocks[1]
    block.unshard()
    expected = sw.full_state_dict(module)
    assert bits_equal(block.wide.weight.detach(), expected["blocks.1.wide.weight"])
    block.reshard()
    assert_released(module)
    block.unshard()
    steps(module, optimizer, rank, 2)  # the next run reads it as it is, and then releases it
    assert_released(module)
    gather(None)


@pytest.mark.parametrize(
    "policy", [None, sw.Precision(torch.bfloat16, reduce_dtype=torch.float32)], ids=["none", "bfloat16"]
)
@on_every_rank()
def test_what_unshard_gathered_is_released_after_the_next_run_in_a_compute_dtype_too(rank, world_size, policy):
    expected = steps(*sharded(precision=policy), rank, 3)
    module, optimizer = sharded(precision=policy)
    for step, gathered in enumerate((module, module.blocks[1], module)):
        gathered.unshard()
        loss = module(batch(rank, 6, 7, step=step)).square().mean()
        if step == 2:
            for block in module.blocks:  # between forward and backward
                block.unshard()
        loss.backward()
        assert [type(p.grad) for p in module.parameters()] == [DTensor] * len([*module.parameters()])
        assert_released(module)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1e3)
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss.detach()) == expected[step]
    gather(None)


@on_every_rank()
def test_clipping_and_norms(rank, world_size):
    model, optimizer = wrap(Blocks, 0)
    module, sliced = sharded()
    for each, made in ((model, optimizer), (module, sliced)):
        each(batch(rank, 6, 7)).square().mean().backward()
    assert sw.clip_grad_norm_(model, 0.01) == sw.clip_grad_norm_(module, 0.01)
    whole, full = sw.full_gradients(model), sw.full_gradients(module)
    assert all(bits_equal(full[name], value) for name, value in whole.items())
    gather(None)


@on_every_rank()
def test_precision_is_said_of_the_outermost_or_of_each(rank, world_size):
    torch.manual_seed(0)
    module = Blocks()
    policies = {"": "bf16", "blocks.1": sw.Precision(torch.float32, output_dtype=torch.bfloat16)}
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), precision=policies)
    expected = steps(model, optimizer, rank, 3), sw.full_state_dict(model)
    torch.manual_seed(0)
    module = Blocks()
    sw.fully_shard(module.blocks[0])
    sw.fully_shard(module.blocks[1], precision=policies["blocks.1"])
    sw.fully_shard(module, precision="bf16")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    assert steps(module, optimizer, rank, 3) == expected[0]
    found = sw.full_state_dict(module)
    assert all(bits_equal(value, expected[1][name]) for name, value in found.items())
    assert_released(module)
    x = batch(rank, 6, 7)
    with torch.no_grad():
        assert module(x).dtype == torch.bfloat16
        assert_released(module)
        with sw.full_parameters(module):
            assert bits_equal(model(x), module(x))
    with pytest.raises(ValueError, match="precision must be"):
        sw.fully_shard(Blocks(), precision="bf8")
    module = sw.fully_shard(Blocks(), precision=sw.Precision(reduce_dtype=torch.bfloat16))
    module(x).sum().backward()
    assert sw.stats()["models"][-1]["compress"] == "Bf16()"
    gather(None)


@on_every_rank()
def test_what_cannot_be_is_said(rank, world_size):
    module, _ = sharded()
    with pytest.raises(AssertionError, match="can only be applied to a module once.*already"):
        sw.fully_shard(module)
    with pytest.raises(ValueError, match="do not implement forward: ModuleList"):
        sw.fully_shard(module.blocks)
    with pytest.raises(engine.Error, match="outermost"):
        module.blocks[0].no_sync()
    marked = Blocks()
    sw.fully_shard(marked.blocks[1])
    for options in ({"zero": 2}, {"zero": 3, "share_parameters": False}):
        with pytest.raises(ValueError, match="'blocks.1', whose parameters are DTensors of rows"):
            sw.wrap(marked, **options)
    with pytest.raises(ValueError, match="units"):
        sw.wrap(Blocks(), zero=1, units=nn.Linear)
    with pytest.raises(TypeError, match="units"):
        sw.wrap(Blocks(), zero=3, units="some")
    gather(None)


# lists, and meshes ---------------------------------------------------------------------------------------------------


class Experts(Blocks):
    """A block whose parameters differ by rank, like experts."""

    def __init__(self):
        super().__init__()
        self.experts = Block()

    def run(self, x):
        return super().run(x) + self.experts(x)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@on_every_rank()
def test_a_list_of_modules_is_one_unit(rank, world_size, reshard_after_forward, tied):
    def build():
        torch.manual_seed(0)
        module = Blocks()
        if tied:
            module.blocks[2].wide.weight = module.blocks[1].wide.weight
        return module

    model, optimizer = wrap(build, 0)
    expected = steps(model, optimizer, rank), sw.full_state_dict(model)
    module = build()
    sw.fully_shard(module.blocks[0])
    pair = [module.blocks[1], module.blocks[2]]
    assert sw.fully_shard(pair, reshard_after_forward=reshard_after_forward) is pair
    sw.fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    assert_released(module)
    assert steps(module, optimizer, rank) == expected[0]
    assert sw.stats()["models"][-1]["units"] == 3
    found = sw.full_state_dict(module)
    assert all(bits_equal(value, expected[1][name]) for name, value in found.items())
    assert_released(module)
    pair[1].unshard()
    assert pair[0].wide.weight.norm() == found["blocks.1.wide.weight"].norm()
    pair[0].reshard()
    assert_released(module)
    gather(None)


@on_every_rank()
def test_lists_that_cannot_be(rank, world_size):
    module = Blocks()
    for modules, kind, match in [
        ([], ValueError, "different modules"),
        ([module.first, module.first], ValueError, "different modules"),
        ([module.blocks[0], module.blocks[0].wide], ValueError, "none of them inside another"),
        ([module.first, module.blocks], ValueError, "ModuleList"),
        ("first", TypeError, "or a list of such, got str"),
    ]:
        with pytest.raises(kind, match=match):
            sw.fully_shard(modules)
    sw.fully_shard([module.first, module.last])
    with pytest.raises(AssertionError, match="already"):
        sw.fully_shard([module.blocks[0], module.first])
    with pytest.raises(engine.Error, match="in a list, .* the outermost module"):
        module.first(torch.ones(2, 7))
    sw.fully_shard(module)(batch(rank, 6, 7)).sum().backward()
    assert sw.stats()["models"][-1]["units"] == 2
    gather(None)


def meshes(world_size):
    """Over all ranks, and over each rank alone."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("all", "own"))
    return mesh["all"], mesh["own"]


@on_every_rank()
def test_mesh_is_fsdp2s_name(rank, world_size):
    everybody, _ = meshes(world_size)
    model, optimizer = wrap(Blocks, 0)
    expected = steps(model, optimizer, rank)
    torch.manual_seed(0)
    module = Blocks()
    for block in module.blocks:
        sw.fully_shard(block, mesh=everybody)
    sw.fully_shard(module, mesh=everybody)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    assert steps(module, optimizer, rank) == expected
    module = Blocks()
    sw.fully_shard(module.blocks[0], mesh=everybody)  # the ranks that there are anyway
    sw.fully_shard(module)(batch(rank, 6, 7)).sum().backward()
    with pytest.raises(ValueError, match="mesh and device_mesh were both given"):
        sw.fully_shard(Blocks(), mesh=everybody, device_mesh=everybody)
    gather(None)


@pytest.mark.parametrize("odd", ["all", "last"])
@on_every_rank(at_least=2)
def test_an_inner_module_with_a_mesh_of_its_own_is_refused_on_all_ranks(rank, world_size, odd):
    everybody, own = meshes(world_size)
    module = Experts()
    other = odd == "all" or rank == world_size - 1
    sw.fully_shard(module.experts, mesh=own if other else everybody)
    sw.fully_shard(module, mesh=everybody)
    match = "inner module 'experts' names a device_mesh of other ranks than the outermost.*ignored_params"
    with pytest.raises((NotImplementedError, engine.Error), match=match) as raised:
        module(batch(rank, 6, 7))
    assert odd == "last" or same_everywhere(str(raised.value))
    module = Experts()
    sw.fully_shard(module.experts, ignored_params=[module.experts.wide.weight])
    sw.fully_shard(module)
    with pytest.raises(NotImplementedError, match=r"inner module 'experts' ignores parameter 'experts\.wide\.weight'"):
        module(batch(rank, 6, 7))
    gather(None)


@on_every_rank()
def test_an_inner_module_that_the_outermost_ignores_has_an_engine_of_its_own(rank, world_size):
    """Experts specific to each rank, in a model that all ranks share, compared with the same by hand."""
    everybody, own = meshes(world_size)

    def build():
        torch.manual_seed(0)
        module = Experts()
        with torch.no_grad():
            for p in module.experts.parameters():
                p.add_(0.01 * rank)
        return module

    plain = build()
    shared = [p for name, p in plain.named_parameters() if not name.startswith("experts")]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        plain(batch(rank, 6, 7, step=step)).square().mean().backward()
        for p in shared:
            p.grad = sum(gather(p.grad)[1:], gather(p.grad)[0]) / world_size
        optimizer.step()
        optimizer.zero_grad()
    module = build()
    for block in module.blocks:
        sw.fully_shard(block, mesh=everybody)
    sw.fully_shard(module.experts, mesh=own)
    sw.fully_shard(module, mesh=everybody, ignored_params=list(module.experts.parameters()))
    rest = [p for name, p in module.named_parameters() if not name.startswith("experts")]
    optimizers = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.AdamW(module.experts.parameters(), lr=1e-2)]
    assert sw.shard_optimizer(module, optimizers[0]) is optimizers[0]
    for step in range(3):
        module(batch(rank, 6, 7, step=step)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    with sw.full_parameters(module), sw.full_parameters(module.experts):
        for (name, mine), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)
        assert world_size == 1 or not same_everywhere([p.detach() for p in module.experts.parameters()])
        assert same_everywhere([p.detach() for p in module.blocks.parameters()])
    gather(None)
