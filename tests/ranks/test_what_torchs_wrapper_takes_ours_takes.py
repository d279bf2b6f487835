"""Law: a program written for torch's DistributedDataParallel finds its arguments, attributes and behaviour: stateless
calls, nested wrappers, errors and warnings, logging data, profiler ranges, mixed_precision= and optimizers inside the
backward.

`make test-torch-suites` runs torch's own tests; these cover what they lack, for three ranks.
"""

import copy
import dataclasses
import gc
import pickle
import threading
import warnings
import weakref

import internals
import pytest
import torch
import torch.distributed as dist
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal, fold
from peer import PEER, batch, data_parallel, sw
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


def build():
    torch.manual_seed(0)
    return Mlp()


def loss_of(model, rank, step=0):
    return model(batch(rank, 6, 7, step=step)).square().mean()


def mean_gradients(rank, module, step=0):
    """Return the gradients that a round must leave, from every rank's gathered own."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    loss_of(alone, rank, step).backward()
    return [fold(list(each), "mean") for each in zip(*gather([p.grad for p in alone.parameters()]), strict=True)]


def assert_gradients(module, expected):
    wrong = [
        name
        for (name, p), each in zip(module.named_parameters(), expected, strict=True)
        if not bits_equal(p.grad, each)
    ]
    assert not wrong, wrong


# stateless calls


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_other_tensors_may_take_the_places_of_parameters_for_a_call(rank, world_size, zero):
    wrapped, optimizer = sw.wrap(module := build(), torch.optim.SGD(module.parameters(), lr=0.1), zero=zero)
    others = {name: (p.detach() + 1).requires_grad_() for name, p in wrapped.named_parameters()}
    x = batch(rank, 6, 7)
    with torch.no_grad():
        expected = torch.func.functional_call(module, {n.removeprefix("module."): p for n, p in others.items()}, x)
    found = torch.func.functional_call(wrapped, others, x)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(each.grad is not None for each in others.values())
    assert all(p.grad is None for p in module.parameters())
    given = {name: nn.Parameter(each.detach()) for name, each in others.items()}
    torch.func.functional_call(wrapped, given, x).sum().backward()
    assert all(each.grad is not None for each in given.values())
    loss_of(wrapped, rank).backward()
    optimizer.step()
    assert same_everywhere([p.detach() for p in sw.full_state_dict(wrapped).values()])


@on_every_rank()
def test_the_parameters_that_stay_in_place_are_averaged(rank, world_size):
    wrapped = data_parallel(build())
    name = next(name for name, _ in wrapped.named_parameters())
    other = wrapped.get_parameter(name).detach().clone().requires_grad_()
    torch.func.functional_call(wrapped, {name: other}, batch(rank, 6, 7)).square().mean().backward()
    assert other.grad is not None and wrapped.get_parameter(name).grad is None
    expected = mean_gradients(rank, wrapped.module)
    assert all(
        bits_equal(p.grad, each)
        for p, each in zip(wrapped.module.parameters(), expected, strict=True)
        if p.grad is not None
    )
    assert sum(p.grad is not None for p in wrapped.parameters()) == len(expected) - 1


@on_every_rank()
def test_a_parameter_that_was_replaced_is_still_named(rank, world_size):
    wrapped = data_parallel(build())
    wrapped.module[0].weight = nn.Parameter(wrapped.module[0].weight.detach().clone())
    with pytest.raises(sw.Error, match="'0.weight' was replaced"):
        wrapped(batch(rank, 6, 7))
    assert "'0.weight' was replaced" in wrapped._get_ddp_logging_data()["error"]


# arguments and attributes


@on_every_rank()
def test_arguments_of_torch_are_kept_under_its_names(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = data_parallel(build(), device_mesh=mesh, bucket_cap_mb_list=[1, 2])
        sw.wrap(build(), broadcast_buffers=False)
    assert not [each for each in caught if "broadcast_buffers" in str(each.message)]
    assert wrapped.device_mesh == mesh and not hasattr(data_parallel(build()), "device_mesh")
    assert wrapped.bucket_bytes_cap_list == [1 << 20, 2 << 20] and wrapped.bucket_bytes_cap == 2 << 20
    for given in ({"broadcast_buffers": False}, {"broadcast_buffers": True, "forward_sync_buffers": False}):
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            wrapped = data_parallel(build(), **given)
        assert wrapped.forward_sync_buffers is False
    loss_of(wrapped, rank).backward()
    assert_gradients(wrapped.module, mean_gradients(rank, wrapped.module))


@on_every_rank()
def test_a_second_hook_gets_torchs_sentence(rank, world_size):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped = data_parallel(build())
    wrapped.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once."):
        wrapped.register_comm_hook(None, allreduce_hook)
    found = wrapped._get_ddp_logging_data()
    assert found["comm_hook"] == "allreduce_hook" and found["has_error"] == 1 and "called once" in found["error"]


# wrappers inside


@on_every_rank()
def test_a_wrapper_may_be_wrapped_and_be_a_part_of_what_is_wrapped(rank, world_size):
    inner = data_parallel(build())
    outer = data_parallel(inner, static_graph=True)
    expected = mean_gradients(rank, inner.module)
    for model in (inner, outer):
        inner.zero_grad()
        loss_of(model, rank).backward()
        assert_gradients(inner.module, expected)
    with outer.no_sync():
        inner.zero_grad()
        loss_of(outer, rank).backward()
    is_mean = [bits_equal(p.grad, each) for p, each in zip(inner.module.parameters(), expected, strict=True)]
    assert is_mean == [world_size == 1] * len(expected)
    inner.zero_grad()
    torch.manual_seed(1)
    width = inner.module(torch.zeros(1, 7)).shape[1]
    around = nn.Sequential(inner, nn.Linear(width, 2))
    expected = mean_gradients(rank, nn.Sequential(inner.module, around[1]))
    inner.zero_grad()
    outer = data_parallel(around)
    loss_of(outer, rank).backward()
    assert_gradients(nn.Sequential(inner.module, around[1]), expected)
    with pytest.raises(NotImplementedError, match="holds wrappers beside other parameters"):
        outer.join()
    whole = data_parallel(inner)
    with whole.join():
        for step in range(rank + 1):
            loss_of(whole, rank, step).backward()
    with pytest.raises(sw.Error, match="wrapped already"):
        data_parallel(inner, zero=1)


@pytest.mark.parametrize(("inside", "around"), [(0, 2), (3, 1), (2, 3), (1, 0)])
@on_every_rank()
def test_above_zero_0_the_outermost_wrapper_has_all_parameters(rank, world_size, inside, around):
    def trained(wrapped_inside):
        torch.manual_seed(2)
        inner = nn.Sequential(nn.Linear(7, 6), nn.Tanh())
        before = inner[0].weight.detach().clone()
        options = {"share_parameters": False} if inside == 3 else {}  # released
        inner = data_parallel(inner, zero=inside, **options) if wrapped_inside else inner
        module = nn.Sequential(inner, nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        made = sw.wrap(module, optimizer, zero=around, clip_grad_norm=0.5)
        for step in range(3):
            made[1].zero_grad()
            with made[0].no_sync():
                loss_of(made[0], rank, step + 10).backward()
            loss_of(made[0], rank, step).backward()
            made[1].step()
        return inner, before, *made

    _, _, plain, plain_optimizer = trained(False)
    inner, before, outer, optimizer = trained(True)
    expected, found = sw.full_state_dict(plain), sw.full_state_dict(outer)
    assert [name.replace("0.module.", "0.") for name in found] == list(expected)
    assert all(bits_equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))
    states = [sw.full_optimizer_state_dict(*made)["state"] for made in ((plain, plain_optimizer), (outer, optimizer))]
    assert all(bits_equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(*(each.values() for each in states), strict=True))
    for use in (lambda: sw.full_gradients(inner), lambda: inner.no_sync().__enter__(), lambda: inner.join()):
        with pytest.raises(sw.Error, match="use the outermost wrapper"):
            use()
    again = data_parallel(sw.unwrap(outer), zero=around)  # what was taken over stays
    loss_of(again, rank).backward()
    assert not bits_equal(found["0.module.0.weight"], before)


@on_every_rank()
def test_wrappers_that_no_other_can_take_over_are_named(rank, world_size):
    inner = data_parallel(build(), zero=2)
    with pytest.raises(ValueError, match="no module is called 'nowhere'"):
        data_parallel(nn.Sequential(inner), zero=1, precision={"nowhere": "bf16"})
    loss_of(inner, rank).backward()  # has its parameters again
    assert same_everywhere(list(sw.full_gradients(inner).values()))
    stock = nn.parallel.DistributedDataParallel(nn.Linear(7, 5))
    low = data_parallel(nn.Linear(7, 5), precision="bf16")
    for inner, zero, sentence in ((stock, 0, "of torch's"), (stock, 1, "of torch's"), (low, 2, "with precision=")):
        with pytest.raises(sw.Error, match=sentence):
            data_parallel(nn.Sequential(inner, nn.Linear(5, 2)), zero=zero)
    loss_of(low, rank).backward()


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_outputs_of_a_static_graph_may_nest(rank, world_size, zero):
    @dataclasses.dataclass
    class Pair:
        left: torch.Tensor
        right: torch.Tensor

    class Nests(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(7, 3), nn.Linear(7, 3)

        def forward(self, x):
            left, right = self.left(x), self.right(x)
            return {"a": [left, {"b": (right, None)}], "pair": Pair(left, right)}

    torch.manual_seed(1)
    model = data_parallel(Nests(), static_graph=True, zero=zero)
    for step in range(2):
        model.zero_grad()
        found = model(batch(rank, 6, 7, step=step))
        (found["a"][0].square().mean() + found["a"][1]["b"][0].sum() + found["pair"].right.square().sum()).backward()
        assert same_everywhere(list(sw.full_gradients(model).values()))


@on_every_rank()
def test_the_state_of_torchs_powersgd_is_pickled_between_steps(rank, world_size):
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    wrapped = data_parallel(nn.Linear(7, 9))
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        loss_of(wrapped, rank, step).backward()
    kept = pickle.loads(pickle.dumps(state))
    assert kept.iter == 4 and kept.p_memory_dict.keys() == state.p_memory_dict.keys() and kept.error_dict


# when a backward synchronises


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_a_forward_inside_no_sync_has_a_local_backward(rank, world_size, zero):
    wrapped = data_parallel(build(), zero=zero)
    with wrapped.no_sync():
        loss = loss_of(wrapped, rank)
    loss.backward()
    assert wrapped._get_ddp_logging_data()["rounds"] == 0
    if zero == 0 and world_size > 1:
        assert not same_everywhere([p.grad for p in wrapped.parameters()])
    loss_of(wrapped, rank).backward()
    twice = [2 * each for each in mean_gradients(rank, wrapped.module)] if zero == 0 else None
    found = sw.full_gradients(wrapped)
    assert same_everywhere(list(found.values())) and wrapped._get_ddp_logging_data()["rounds"] == 1
    if twice is not None:
        assert all(torch.allclose(p, each) for p, each in zip(found.values(), twice, strict=True))
    wrapped.zero_grad()
    with wrapped.no_sync():
        local = loss_of(wrapped, rank)
    (local + loss_of(wrapped, rank)).backward()  # one of the two synchronises
    assert wrapped._get_ddp_logging_data()["rounds"] == 2
    with wrapped.no_sync():
        loss = loss_of(wrapped, rank)
    wrapped.reducer.prepare_for_backward([])  # accelerate's trigger_sync_in_backward
    loss.backward()
    assert wrapped._get_ddp_logging_data()["rounds"] == 3


# what tools read


@on_every_rank()
def test_the_logging_data_has_torchs_fields(rank, world_size):
    module = nn.Sequential(nn.Linear(7, 5).double(), nn.SyncBatchNorm(5), nn.Linear(5, 3).double())
    module[1] = nn.BatchNorm1d(5).double()
    wrapped = data_parallel(module, find_unused_parameters=True)
    wrapped._set_ddp_runtime_logging_sample_rate(2)
    for step in range(14):
        wrapped(batch(rank, 6, 7, step=step).double()).square().mean().backward()
        found = wrapped._get_ddp_logging_data()
        assert found["iteration"] == (step if step <= 10 or step % 2 == 0 else step - 1), (step, found["iteration"])
    assert found["world_size"] == world_size and found["rank"] == rank and found["backend_name"] == dist.get_backend()
    assert found["module_name"] == "Sequential" and found["dtypes"] == "double" and found["has_sync_bn"] == 0
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    assert found["total_parameter_size_bytes"] == size == sum(map(int, found["bucket_sizes"].split(", ")))
    assert (
        found["find_unused_parameters"] == 1 and found["gradient_as_bucket_view"] == 0 and found["output_device"] == -1
    )
    for kind in ("forward_compute", "backward_compute", "backward_comm"):
        assert found[f"{kind}_time"] > 0 and found[f"avg_{kind}_time"] > 0, kind
    times = [found[f"{kind}_time_{end}"] for kind in ("backward_compute", "backward_comm") for end in ("start", "end")]
    assert times == sorted(times) and found["forward_compute_time_start"] < times[0]
    assert "has_error" not in found
    with pytest.raises(ValueError, match="sample rate"):
        wrapped._set_ddp_runtime_logging_sample_rate(0)
    assert "sample rate" in wrapped._get_ddp_logging_data()["error"]


def profiled(step, *, steps=1, **options):
    """Return [(name, values)] of our profiler ranges in some steps, and each one's thread."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, **options
    ) as profile:
        for number in range(steps):
            step(number)
    ours = [event for event in profile.events() if event.name.startswith("shardwright:")]
    return [(event.name.partition(":")[2], event.kwinputs) for event in ours], [event.thread for event in ours], profile


@pytest.mark.parametrize("zero", range(4))
@on_every_rank()
def test_a_profile_has_a_range_for_each_bucket_unit_and_broadcast(rank, world_size, zero):
    model = nn.Sequential(nn.Linear(7, 500), nn.BatchNorm1d(500), nn.Linear(500, 5), nn.Linear(5, 3))
    more = {"share_parameters": False, "units": nn.Linear} if zero == 3 else {}
    wrapped = data_parallel(model, zero=zero, bucket_cap_mb=0.011, **more)
    loss_of(wrapped, rank).backward()
    wrapped.zero_grad()
    ranges, threads, profile = profiled(lambda step: loss_of(wrapped, rank, step).backward(), steps=2)
    replica = internals.replica(wrapped)
    buckets = replica.reducer.bucket_count
    kind = "reduce_scatter" if zero >= 2 else "all_reduce"
    assert buckets >= 2 and len(set(threads)) == 1
    found = [name for name, _ in ranges]
    assert (found.count(kind), found.count("wait"), found.count("end_of_round")) == (2 * buckets, 2 * buckets, 2)
    averaged = [values for name, values in ranges if name == kind][:buckets]
    assert [each["label"].startswith(f"bucket {i} of ") for i, each in enumerate(averaged)] == [True] * buckets
    numels = [replica.reducer.bucket_shape(i)[1] for i in range(buckets)]
    assert [each["numel"] for each in averaged] == numels
    assert [each["bytes"] for each in averaged] == [4 * each for each in numels]
    assert {(each["op"], each["dtype"]) for each in averaged} == {(kind, "float32")}
    buffers = next(values for name, values in ranges if name == "broadcast")
    assert buffers["bytes"] == 2 * 500 * 4 + 8 and buffers["dtype"] == "float32,int64"
    assert found.count("broadcast") == 2
    gathers = [values for name, values in ranges if name == "all_gather"]
    assert bool(gathers) is (zero == 3)
    if gathers:  # in forwards and in backwards
        assert len(gathers) >= 2 * 6 and gathers[0]["bytes"] == 4 * gathers[0]["numel"]
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["DistributedDataParallel.forward"] == 2
    if buckets > 2 and zero < 2:  # some leave during the backward
        ends = [event for event in profile.events() if event.name == "shardwright:end_of_round"]
        first = next(event for event in profile.events() if event.name == f"shardwright:{kind}")
        assert first.time_range.start < min(event.time_range.start for event in ends)
    with torch.no_grad():
        wrapped(torch.randn(3, 7))
    wrapped.zero_grad()
    loss_of(wrapped, rank).backward()  # without a profiler, nothing is traced
    assert not internals.replica(wrapped).gradients._is_traced


@on_every_rank()
def test_a_profile_has_the_ranges_of_hooks_on_every_thread(rank, world_size):
    wrapped = data_parallel(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), bucket_cap_mb=1e-4)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    ranges, _, _ = profiled(lambda step: loss_of(wrapped, rank, step).backward())
    labels = [values["label"] for name, values in ranges if name == "comm_hook"]
    assert labels == [f"allreduce_hook, bucket {i}" for i in range(internals.reducer(wrapped).bucket_count)]

    def work(step):
        runner = internals.replica(wrapped).hook_runner(None, default_hooks.allreduce_hook, is_ours=False)
        thread = threading.Thread(target=lambda: runner(0, False))
        thread.start()
        thread.join()

    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    ranges, _, _ = profiled(work, experimental_config=everywhere)
    assert [name for name, _ in ranges] == ["comm_hook"]


# mixed_precision=


@on_every_rank()
def test_torchs_mixed_precision_is_ours(rank, world_size):
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, affine=False))
    seen = []
    module[0].register_forward_hook(
        lambda layer, inputs, output: seen.append((layer.weight.dtype, inputs[0].dtype, output.dtype))
    )
    wrapped = data_parallel(module, mixed_precision=policy)
    plain = data_parallel(build(), precision=sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))
    other = data_parallel(build(), mixed_precision=policy)
    for model in (plain, other):
        loss_of(model, rank).backward()
    assert_gradients(other.module, [p.grad for p in plain.parameters()])
    loss_of(wrapped, rank).backward()
    assert seen == [(torch.bfloat16,) * 3]
    assert module[1].running_mean.dtype == torch.bfloat16 and wrapped.mixed_precision is policy
    assert all(p.dtype == p.grad.dtype == p._fp_param.dtype == torch.float32 for p in module.parameters())
    assert all(p._mp_param.dtype == torch.bfloat16 for p in module.parameters())
    with pytest.raises(ValueError, match="both given"):
        data_parallel(build(), mixed_precision=policy, precision="bf16")


# optimizers inside the backward


@pytest.mark.parametrize("first", [True, False])
@on_every_rank()
def test_an_optimizer_inside_the_backward_steps_on_the_mean(rank, world_size, first):
    from torch.distributed.optim import _apply_optimizer_in_backward

    plain = data_parallel(build())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.03)
    module = build()

    def apply():
        _apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.03})

    if first:
        apply()
    wrapped = data_parallel(module)
    if not first:
        apply()
    for step in range(3):
        for model in (plain, wrapped):
            if step == 1:
                with model.no_sync():
                    loss_of(model, rank, 9).backward()
            loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in module.parameters())
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters(), strict=True)), step


@on_every_rank()
def test_an_optimizer_inside_the_backward_is_refused_where_state_is_sliced(rank, world_size):
    from torch.distributed.optim import _apply_optimizer_in_backward

    wrapped = data_parallel(build(), zero=1)
    _apply_optimizer_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.03})
    with pytest.raises(sw.Error, match="steps inside the backward .* zero=1 .* ordinary optimizer"):
        wrapped(batch(rank, 6, 7))


# what is left alone


class _Odd(torch.Tensor):
    """A tensor without memory of its own, like a quantised weight."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3, 5), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls()
        raise AssertionError(f"an ignored tensor was asked for {function}")


@on_every_rank()
def test_a_sharded_tensor_and_a_subclass_may_be_ignored(rank, world_size):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    module = build()
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{each}/cpu" for each in range(world_size)])
    module.shard = nn.Parameter(sharded_tensor.rand(spec, 12, 5), requires_grad=False)
    module.odd = nn.Parameter(_Odd(), requires_grad=False)
    expected = mean_gradients(rank, build())
    for given in ({"ignored_params": ["shard", "odd"]}, {}):
        if not given:
            torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                module, ["shard", "odd"]
            )
        wrapped = data_parallel(module, **given)
        wrapped.zero_grad()
        loss_of(wrapped, rank).backward()
        assert_gradients(nn.ParameterList(p for p in module.parameters() if p.requires_grad), expected)


@on_every_rank()
def test_a_taken_wrapper_leaves_no_engine_and_raises_once_the_outer_one_has_ended(rank, world_size):
    inner = data_parallel(nn.Linear(7, 6), zero=1)
    engine = weakref.ref(internals.replica(inner))
    outer = data_parallel(nn.Sequential(inner, nn.Linear(6, 2)), zero=1)
    outer(batch(rank, 6, 7)).sum().backward()
    assert engine() is None
    core = sw.unwrap(outer)
    del outer
    gc.collect()
    with pytest.raises(sw.Error, match="the wrapper around this one.* has ended: wrap the module again"):
        core(batch(rank, 6, 7))


@on_every_rank()
def test_a_wrapper_that_cannot_be_made_gives_nested_ones_back(rank, world_size):
    torch.manual_seed(2)
    inner = data_parallel(nn.Linear(7, 6))
    around = data_parallel(nn.Sequential(inner, nn.Tanh()))
    with pytest.raises(ValueError):
        data_parallel(nn.Sequential(around, nn.Linear(6, 2)), zero=1, precision={"nowhere": "bf16"})
    around(batch(rank, 6, 7)).square().sum().backward()
    assert same_everywhere([inner.module.weight.grad])


@on_every_rank()
def test_a_copy_of_a_taken_wrapper_averages(rank, world_size):
    torch.manual_seed(2)
    inner = data_parallel(nn.Linear(7, 6))
    outer = data_parallel(nn.Sequential(inner, nn.Linear(6, 2)), zero=1)
    for made in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner)), copy.deepcopy(outer)):
        made(batch(rank, 6, 7)).square().sum().backward()
        assert same_everywhere([each.grad for each in made.parameters() if each.grad is not None])
