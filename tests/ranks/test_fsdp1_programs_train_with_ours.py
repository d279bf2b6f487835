"""Law: programs of torch's FullyShardedDataParallel train, clip, save, load and edit parameters with ours in its place, with the
bits of stage 0, the losses of torch's class, and the bare module's names."""

import copy
import functools
import os
import shutil
import tempfile

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp import wrap as policies
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
TORCH = tuple(int(each) for each in torch.__version__.split(".")[:2])
FULL, SHARDED, LOCAL = (StateDictType[f"{name}_STATE_DICT"] for name in ("FULL", "SHARDED", "LOCAL"))
ALL = dcp_state.StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(7, 7), nn.ModuleList([Block(), Block()]), nn.Linear(7, 3)
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.offset


def built(seed=0):
    torch.manual_seed(seed)
    return Net()


def blocks_in(module):
    return isinstance(module, Block)


POLICIES = {
    "none": None,
    "transformer": functools.partial(policies.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(policies.size_based_auto_wrap_policy, min_num_params=100),
    "module": policies.ModuleWrapPolicy({Block}),
    "custom": policies.CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(m, Block) else False
    ),
    "lambda": functools.partial(policies.lambda_auto_wrap_policy, lambda_fn=blocks_in),
}


def sharded(policy="module", **options):
    return sw.FullyShardedDataParallel(built(), auto_wrap_policy=POLICIES[policy], **options)


def train(model, rank, steps=3, micro=1, max_norm=None, first=0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return advance(model, optimizer, rank, steps, micro, max_norm, first), optimizer


def advance(model, optimizer, rank, steps=3, micro=1, max_norm=None, first=0):
    found = []
    for step in range(first, first + steps):
        for number in range(micro):
            x = batch(rank, 6, 7, step=10 * step + number)
            if number < micro - 1:
                with model.no_sync():
                    loss = model(x).square().mean()
                    loss.backward()
            else:
                loss = model(x).square().mean()
                loss.backward()
            found.append(loss.item())
        if max_norm is not None:
            clip = getattr(model, "clip_grad_norm_", None)
            found.append(float(sw.clip_grad_norm_(model, max_norm) if clip is None else clip(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_same(state, whole):
    assert state.keys() == whole.keys()
    for name, value in state.items():
        assert type(value) is torch.Tensor and bits_equal(value.detach(), whole[name]), name


@pytest.mark.parametrize("policy", POLICIES)
@on_every_rank()
def test_a_policy_cuts_units_that_train_with_the_bits_of_stage_0(rank, world_size, policy):
    model = sw.wrap(built(), zero=0)
    expected, _ = train(model, rank)
    module = sharded(policy)
    units = sw.FullyShardedDataParallel.fsdp_modules(module)
    assert units[0] is module and isinstance(module, Net) and isinstance(module, sw.FullyShardedDataParallel)
    assert {type(each).__name__ for each in units[1:]} == ({"FSDPBlock"} if policy != "none" else set())
    assert sw.FullyShardedDataParallel.fsdp_modules(module, root_only=True) == [module]
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in built().named_parameters()]
    assert type(type(module)()) is Net
    found, _ = train(module, rank)
    assert found == expected
    assert_same(module.state_dict(), model.module.state_dict())
    gather(None)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_every_rank()
def test_strategies_clipping_and_micro_batches_have_the_bits_of_stage_0(rank, world_size, strategy):
    for options in ({"max_norm": 0.05}, {"micro": 3}):
        model = sw.wrap(built(), zero=0)
        expected, _ = train(model, rank, **options)
        module = sharded(sharding_strategy=ShardingStrategy[strategy])
        for each in sw.FullyShardedDataParallel.fsdp_modules(module):
            assert sw.fully_shard.state(each).reshard_after_forward is (strategy == "FULL_SHARD")
        assert train(module, rank, **options)[0] == expected
        assert_same(module.state_dict(), model.module.state_dict())
        if strategy == "NO_SHARD":
            assert all(p.to_local().numel() == p.numel() for p in module.parameters())
    gather(None)


@on_every_rank(exactly=4)
def test_hybrid_strategies_train_on_four_ranks(rank, world_size):
    model = sw.wrap(built(), zero=0)
    expected, _ = train(model, rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        module = sharded(sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
        found, _ = train(module, rank)
        assert found == pytest.approx(expected, rel=1e-6)
        assert module.first.weight.to_local().shape == ((4, 7) if rank % 2 == 0 else (3, 7))
        for name, value in module.state_dict().items():
            torch.testing.assert_close(value, model.module.state_dict()[name], rtol=1e-5, atol=1e-6)
    gather(None)


@on_every_rank(exactly=4)
def test_the_ranks_of_a_host_are_a_row_without_a_mesh(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        module = sharded(sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        assert module.first.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE must divide 4 ranks with .*HYBRID_SHARD, got 3"):
            sharded(sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    gather(None)


MIXED = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
OPTIONS = {
    "plain": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "copies": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed": {"mixed_precision": MIXED},
}


@pytest.mark.skipif(TORCH < (2, 8), reason="torch's class needs a reduce-scatter, which Gloo lacks in older torch")
@pytest.mark.parametrize("name", OPTIONS)
@on_every_rank(at_least=2)
def test_losses_and_states_are_those_of_torchs_class(rank, world_size, name):
    """Up to the rounding of another order of summands: 1e-6 in float32, and 2e-2 where bfloat16 has 8 bits."""
    made = []
    for kind in (fsdp.FullyShardedDataParallel, sw.FullyShardedDataParallel):
        options = {**OPTIONS[name], "use_orig_params": True, "device_id": torch.device("cpu")}
        model = kind(built(), auto_wrap_policy=POLICIES["module"], **options)
        losses, optimizer = train(model, rank, max_norm=0.05)
        with kind.state_dict_type(model, FULL):
            made.append((losses, model.state_dict(), kind.optim_state_dict(model, optimizer)))
    (expected, state, moments), (found, ours, our_moments) = made
    assert found == pytest.approx(expected, rel=2e-2 if name == "mixed" else 1e-6)
    assert list(ours) == list(state) and ours["first.weight"].shape == state["first.weight"].shape
    assert our_moments["state"].keys() == moments["state"].keys()
    for name, of in moments["state"].items():
        assert {key: value.shape for key, value in our_moments["state"][name].items()} == {
            k: v.shape for k, v in of.items()
        }
    gather(None)


@on_every_rank()
def test_state_dicts_of_every_form_load(rank, world_size):
    kind = sw.FullyShardedDataParallel
    module = sharded()
    _, optimizer = train(module, rank)
    whole = module.state_dict()
    expected = None
    for form, config, optimizers in (
        (FULL, fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True), fsdp.FullOptimStateDictConfig(rank0_only=True)),
        (FULL, None, None),
        (SHARDED, None, None),
        (LOCAL, None, None),
    ):  # fmt: skip
        with kind.state_dict_type(module, form, config, optimizers):
            assert kind.get_state_dict_type(module).state_dict_type is form
            state = module.state_dict()
            moments = None if form is LOCAL else kind.optim_state_dict(module, optimizer)
        assert kind.get_state_dict_type(module).state_dict_type is FULL
        if config is not None:
            assert (state == {}) is (moments == {}) is (rank > 0)
        else:
            assert state.keys() == whole.keys()
            assert isinstance(state["first.weight"], DTensor) is (form is SHARDED)
        if moments and form is FULL:
            assert moments["state"]["first.weight"]["exp_avg"].shape == (7, 7)
        other = sw.FullyShardedDataParallel(built(seed=1), auto_wrap_policy=POLICIES["module"])
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
        kind.set_state_dict_type(other, form, config, optimizers)
        other.load_state_dict(state)
        kind.set_state_dict_type(other, FULL)
        assert_same(other.state_dict(), whole)
        if moments is not None:
            kind.set_state_dict_type(other, form, config, optimizers)
            moments = copy.deepcopy(moments)  # torch's optimizers share the tensors that they load
            resumed.load_state_dict(kind.optim_state_dict_to_load(other, resumed, moments))
            before = advance(other, resumed, rank, first=7)
            expected = expected or before
            assert before == expected
    assert advance(module, optimizer, rank, first=7) == expected
    model = sw.wrap(built(), zero=0)
    _, optimizer_of_stage_0 = train(model, rank)
    advance(model, optimizer_of_stage_0, rank, first=7)
    full = kind.full_optim_state_dict(module, optimizer, rank0_only=False)
    for name, parameter in model.module.named_parameters():
        for key, value in full["state"][name].items():
            assert bits_equal(value, optimizer_of_stage_0.state[parameter][key]), (name, key)
    assert full["param_groups"][0]["params"][0] == "first.weight"
    assert isinstance(kind.sharded_optim_state_dict(module, optimizer)["state"]["first.weight"]["exp_avg"], DTensor)
    gather(None)


@on_every_rank()
def test_our_checkpoints_do_not_depend_on_the_form_in_force(rank, world_size):
    kind, path = sw.FullyShardedDataParallel, os.path.join(tempfile.gettempdir(), f"fsdp1-{os.getppid()}-{world_size}")
    module = sharded()
    _, optimizer = train(module, rank)
    whole = module.state_dict()
    only = fsdp.FullStateDictConfig(rank0_only=True)
    for form, config in ((FULL, only), (LOCAL, None)):
        kind.set_state_dict_type(module, form, config)
        for found in sw.full_state_dict(module), dcp_state.get_model_state_dict(module, options=ALL):
            assert_same(found, whole)
        sharded_state = dcp_state.get_model_state_dict(module)
        assert isinstance(sharded_state["first.weight"], DTensor)
        sw.save(path, module, optimizer, overwrite=True)
        other = sharded()
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
        sw.load(path, other, resumed)
        assert_same(other.state_dict(), whole)
        dcp_state.set_model_state_dict(other, dcp_state.get_model_state_dict(module))
        assert advance(other, resumed, rank, first=7) == advance(module, optimizer, rank, first=7)
        kind.set_state_dict_type(module, FULL)
        whole = module.state_dict()
    gather(None)
    if rank == 0:
        shutil.rmtree(path)


class Seen(nn.BatchNorm1d):
    def forward(self, x):
        self.dtypes = x.dtype, self.weight.dtype
        return super().forward(x)


@on_every_rank()
def test_batch_norms_keep_their_precision(rank, world_size):
    mixed = fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    kind = sw.FullyShardedDataParallel
    net = nn.Sequential(nn.Linear(7, 5), Seen(5), nn.Linear(5, 3))
    module = kind(net, auto_wrap_policy=policies.ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed)
    out = module(batch(rank, 6, 7))
    assert module[1].dtypes == (torch.float32, torch.float32) and module[1].running_mean.dtype is torch.float32
    assert out.dtype is torch.bfloat16
    gather(None)


@on_every_rank()
def test_modules_wrapped_by_hand_and_frozen_ones_train(rank, world_size):
    def made():
        net = built()
        net.first.requires_grad_(False)
        return net

    model = sw.wrap(made(), zero=0)
    expected, _ = train(model, rank, max_norm=0.05)
    net = made()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = sw.FullyShardedDataParallel(block)
    module = sw.FullyShardedDataParallel(net)
    assert train(module, rank, max_norm=0.05)[0] == expected
    assert_same(module.state_dict(), model.module.state_dict())
    module(batch(rank, 6, 7)).square().mean().backward()
    model(batch(rank, 6, 7)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    assert float(module.clip_grad_norm_(0.01, norm_type=float("inf"))) == pytest.approx(float(expected), rel=1e-6)
    gather(None)


@on_every_rank()
def test_whole_parameters_are_read_and_written(rank, world_size):
    module, whole = sharded(), built().state_dict()
    with sw.FullyShardedDataParallel.summon_full_params(module, writeback=False, rank0_only=True):
        assert_same(
            {n: p.detach() for n, p in module.named_parameters()}, {n: v for n, v in whole.items() if n != "offset"}
        )
    with sw.FullyShardedDataParallel.summon_full_params(module):
        with torch.no_grad():
            module.first.weight.fill_(2.0)
    assert bits_equal(module.state_dict()["first.weight"], torch.full((7, 7), 2.0))
    with sw.FullyShardedDataParallel.summon_full_params(module.blocks[1], writeback=False):
        assert type(module.blocks[1].inner.weight.data) is torch.Tensor and module.blocks[1].inner.weight.shape == (
            9,
            7,
        )

    def zero(each):
        if isinstance(each, nn.Linear):
            nn.init.zeros_(each.weight)

    assert module.apply(zero) is module
    assert not module.state_dict()["blocks.1.inner.weight"].any() and module.state_dict()["last.bias"].any()
    assert type(module.module) is Net and module.module.first is module.first and not hasattr(module.module, "module")
    gather(None)


@on_every_rank()
def test_values_may_come_from_rank_0(rank, world_size):
    module = sw.FullyShardedDataParallel(built(seed=rank), sync_module_states=True)
    assert_same(module.state_dict(), built(seed=0).state_dict())
    with torch.device("meta"):
        empty = Net()
    module = built() if rank == 0 else empty
    module = sw.FullyShardedDataParallel(
        module, sync_module_states=True, auto_wrap_policy=POLICIES["module"],
        param_init_fn=None if rank == 0 else lambda m: m.to_empty(device="cpu", recurse=False),
    )  # fmt: skip
    assert_same(module.state_dict(), built(seed=0).state_dict())
    gather(None)


@on_every_rank()
def test_mixed_precision_and_ignored_modules(rank, world_size):
    mixed = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    module = sharded(mixed_precision=mixed)
    seen = []
    module.blocks[0].inner.register_forward_pre_hook(lambda m, args: seen.append((args[0].dtype, m.weight.dtype)))
    out = module(batch(rank, 6, 7))
    assert out.dtype is module.offset.dtype is torch.bfloat16 and set(seen) == {(torch.bfloat16,) * 2}
    out.float().square().mean().backward()
    assert module.first.weight.dtype is module.first.weight.grad.dtype is torch.float32
    plain = built()
    module = sw.FullyShardedDataParallel(plain, ignored_modules=[plain.last], auto_wrap_policy=POLICIES["module"])
    assert not isinstance(module.last.weight, DTensor) and isinstance(module.first.weight, DTensor)
    module(batch(rank, 6, 7)).square().mean().backward()
    gather(None)


@on_every_rank(at_least=2)
def test_a_policy_gives_strategies_over_the_same_ranks(rank, world_size):
    policy = policies.CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.NO_SHARD} if isinstance(m, Block) else False
    )
    with pytest.raises(ValueError, match="must give Block a sharding_strategy over the ranks"):
        sw.FullyShardedDataParallel(built(), auto_wrap_policy=policy)
    gather(None)


@on_every_rank(at_least=2)
def test_what_is_not_taken_is_one_sentence(rank, world_size):
    kind = sw.FullyShardedDataParallel
    for options, sentence in (
        ({"sharding_strategy": "FULL_SHARD"}, "sharding_strategy must be a ShardingStrategy, got 'FULL_SHARD'"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision must be a MixedPrecision or None, got torch.bfloat16"),
        ({"cpu_offload": True}, "cpu_offload must be a CPUOffload or None, got True"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy must be a policy or a function, got 3"),
        ({"zero": 3}, "FullyShardedDataParallel: .*zero"),
        ({"shard_strategy": None}, "did you mean .*sharding_strategy"),
        (
            {"device_mesh": init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))},
            "must have 1 dimensions",
        ),
        (
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": torch.distributed.group.WORLD},
            "must be None with",
        ),
        ({"process_group": (None, None)}, "process_group must be a ProcessGroup or None, got a pair of groups"),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=sentence):
            kind(built(), **options)
    with pytest.raises(TypeError, match="module must be a torch.nn.Module, got list"):
        kind([])
    module = kind(built(), None, None, fsdp.CPUOffload(offload_params=True))
    with pytest.raises(NotImplementedError, match="register_comm_hook"):
        module.register_comm_hook(None, print)
    with kind.state_dict_type(module, LOCAL):
        wrong = {**module.state_dict(), "first.weight": torch.ones(8, 7)}
        with pytest.raises(ValueError, match="'first.weight' must have this rank's slice of"):
            module.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="nothing"):
        module.load_state_dict({**module.state_dict(), "nothing": torch.ones(1)})
    assert module.load_state_dict({"first.weight": torch.ones(7, 7)}, strict=False).missing_keys
    with pytest.raises(TypeError, match="state_dict_type must be a StateDictType, got 'full'"):
        kind.set_state_dict_type(module, "full")
    with pytest.raises(RuntimeError, match="state_dict_config must be a ShardedStateDictConfig"):
        kind.set_state_dict_type(module, SHARDED, fsdp.FullStateDictConfig())
    with pytest.raises(NotImplementedError, match="rank0_only=True needs writeback=False"):
        with kind.summon_full_params(module, rank0_only=True):
            pass
    with pytest.raises(NotImplementedError, match="with_grads must be False, got True"):
        with kind.summon_full_params(module, with_grads=True):
            pass
    gather(None)
