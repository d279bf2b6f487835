"""Law: experts that fewer ranks have in common train at every stage as the whole model does in one process, with the same bits at every
stage; a norm counts each parameter once; states and checkpoints hold each expert once, and load over other ranks."""

import os
from pathlib import Path
from types import SimpleNamespace

import internals
import pytest
import torch
from expert_subjects import STEPS, backward, build, distributed, mesh_of, optimizer_of, oracle, train, wrapped
from harness import LONG, gather, in_turn, on_every_rank, same_everywhere
from internals import engine_of, whole_tensor
from oracle.fold import bits_equal
from peer import PEER, sw
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = (0, 1, 2, 3, "private", "by hand")
FEW = STEPS if LONG else 3


@on_every_rank(exactly=4)
def test_every_stage_has_the_bits_of_stage_0_and_the_values_of_one_process(rank, world_size):
    mesh = mesh_of(2)
    expected, expected_norms, _ = oracle(world_size, steps=FEW)
    first = None
    for stage in (0, *in_turn(STAGES[1:], 0)):
        model, optimizer = wrapped(mesh, stage)
        norms = train(model, optimizer, rank, FEW)
        found = sw.full_state_dict(model)
        assert norms == pytest.approx(expected_norms, rel=1e-5) and same_everywhere([norms, *found.values()]), stage
        first = first or (found, norms)
        assert norms == first[1], stage
        for name, value in expected.items():
            assert bits_equal(found[name], first[0][name]), (stage, name)
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (stage, name)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert bits_equal(found[name], value), name


def states(model, optimizer):
    return sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)["state"]


@on_every_rank(exactly=4)
def test_a_checkpoint_has_the_same_bytes_over_any_ranks_and_loads_there(rank, world_size):
    folder = Path(os.environ["SW_TEST_FOLDER"])
    splits = [(1, 2), ("private", 4), (0, 1), (3, None)]
    splits += [(0, 2), (2, 2), (3, 2), ("by hand", 2), (2, 1)] if LONG else []
    for number, (stage, ep) in enumerate(splits):
        if ep is None:  # experts are plain, and of all ranks
            model = build()
            model, optimizer = sw.wrap(model, optimizer_of(model), zero=stage)
        else:
            model, optimizer = wrapped(mesh_of(ep), stage)
        path = folder / f"experts-{number}"
        if number == 0:
            train(model, optimizer, rank, steps=2)
            kept, random = states(model, optimizer), torch.get_rng_state()
            _, _, expected = oracle(world_size, steps=2)
            for at, state in expected["state"].items():
                for key, value in state.items():
                    assert torch.allclose(kept[1][at][key], value, rtol=0, atol=1e-6), (at, key)
        elif stage == 0:
            first = any(engine.group.rank == 0 for engine in internals.replicas(model))
            sw.load_full_state_dict(model, kept[0] if first else None)
            whole = sw.full_optimizer_state_dict(model, optimizer)
            sw.load_full_optimizer_state_dict(model, optimizer, {**whole, "state": kept[1]})
        else:
            sw.load(folder / "experts-0", model, optimizer)
        found = states(model, optimizer)
        assert_equal(found[0], kept[0])
        assert found[1].keys() == kept[1].keys()
        for at, state in kept[1].items():
            assert_equal(found[1][at], state)
        torch.set_rng_state(random)
        sw.save(path, model, optimizer, step=2)
        for each in sorted(each for each in path.iterdir() if each.is_file()):
            first = folder / "experts-0" / each.name
            assert each.name == "MANIFEST.json" or each.read_bytes() == first.read_bytes(), (stage, ep, each.name)
    if ep is not None:
        return
    sw.load(folder / "experts-0", model, optimizer)
    train(model, optimizer, rank, steps=1, first=2)
    value = sw.full_state_dict(model)["layers.1.experts.up"]
    assert torch.allclose(value, oracle(world_size, steps=3)[0]["layers.1.experts.up"], rtol=0, atol=1e-6)


@on_every_rank(exactly=4)
def test_accumulation_overflow_and_experts_without_tokens(rank, world_size):
    mesh = mesh_of(2)
    expected = oracle(world_size, None, 2, times=3)[0]
    first = None
    for stage in (0, *in_turn(STAGES[1:], 3, of=5)):
        model, optimizer = wrapped(mesh, stage)
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                backward(model, 3 * step, rank)
            backward(model, 3 * step + 1, rank)
            backward(model, 3 * step + 2, rank)  # on top of an accumulated mean
            optimizer.step()
        found = sw.full_state_dict(model)
        first = first or found
        assert_equal(found, first)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (stage, name)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # one rank's overflow in an expert is one everywhere
    optimizer.zero_grad()
    backward(model, 9, rank)
    if rank == 3:
        gradients = (p.grad._local_tensor for p in model.parameters() if hasattr(p, "placements"))
        pieces = (each if type(each) is torch.Tensor else each.piece for each in gradients)
        next(each for each in pieces if each.numel()).view(-1)[0] = float("inf")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert gather(scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()) == [1.0] * world_size

    model, optimizer = wrapped(mesh, 2)  # the router sends all tokens to the experts of one rank
    with sw.full_parameters(model, writable=True), torch.no_grad():
        for layer in model.module.layers:
            layer.router.bias.copy_(torch.tensor([50.0, 40.0, 0.0, 0.0]))
    train(model, optimizer, rank, steps=2)
    assert same_everywhere([*sw.full_state_dict(model).values()])


@on_every_rank(exactly=4)
def test_what_cannot_be_is_one_sentence_on_all_ranks(rank, world_size):
    mesh = mesh_of(2)

    def told(text, groups, model=None, **options):
        with pytest.raises(Exception, match=text) as caught:
            sw.wrap(model or distributed(mesh), groups=groups, **options)
        assert len({each.split("could not wrap Model: ")[-1] for each in gather(str(caught.value))}) == 1

    group = mesh["dp_mod_ep"]
    three = torch.distributed.new_group([0, 1, 2] if rank < 3 else [3], use_local_synchronization=True)
    told(r"'layers.\*.expert' matches no parameter of Model: did you mean 'layers.1.exp", {"layers.*.expert": group})
    told("match parameter 'layers.0.experts.down': match it once", {"layers.*.experts": group, "*.down": mesh["ep"]})
    told(
        "parameter 'layers.0.experts.down' of 'layers' is a plain tensor.*distribute_tensor", {"layers": group}, build()
    )
    told(
        "ranks 0, 1 average 'layers.0.experts.down'.*ranks 0, 1 hold its shards.* 0, 1, 2, 3", {"*.experts": mesh["ep"]}
    )
    told("ranks 0, 1, 2 average .* and ranks 0, 1 hold its shards; together", {"*.experts": three})
    told(
        "ranks disagree about the wrapped Model: rank 0 has .*, ranks? 1",
        {"*.experts" if rank else "*.experts.up": group},
    )
    told("groups: 'nothing' matches no parameter", {"*.experts" if rank != 2 else "nothing": group})
    model = sw.wrap(distributed(mesh), groups={"*.experts": group})
    expert = model.module.layers[0].experts.up
    (found,) = torch.autograd.grad(expert.to_local().sum(), expert)  # 2 of 4 ranks average it, as compose.md says
    assert found.to_local().unique().tolist() == [0.5]
    with pytest.raises(TypeError, match="groups must be a dict"):
        sw.wrap(build(), groups=[group])
    with pytest.raises(NotImplementedError, match="join"):
        model.join()
    for state, error, text in (
        (None, TypeError, "state must be a dict with a state for each key of groups=, and for None"),
        ({"layers": None}, ValueError, r"must have the keys \['\*.experts', 'None'\], got \['layers'\]"),
    ):
        with pytest.raises(error, match=text):
            model.register_comm_hook(state, allreduce_hook)


@on_every_rank(exactly=4)
def test_a_communication_hook_averages_over_the_ranks_of_each_group(rank, world_size):
    mesh = mesh_of(2)
    expected = oracle(world_size, steps=2)[0]
    first, seen = None, []

    def hook(group, bucket):
        seen.append((torch.distributed.get_world_size(group), [p.shape for p in bucket.parameters()]))
        return allreduce_hook(group, bucket)

    for stage in (0, *in_turn(STAGES[1:], 1, of=3)):
        model, optimizer = wrapped(mesh, stage)
        owner = engine_of(model)
        keys = [layer.experts for layer in owner.module.layers] if stage == "by hand" else ["layers.*.experts"]
        groups = dict.fromkeys(keys, mesh["dp_mod_ep"].get_group())
        owner.register_hook(owner.states_of_parts({**groups, None: torch.distributed.group.WORLD}), hook)
        seen.clear()
        train(model, optimizer, rank, steps=2)
        assert {ranks for ranks, _ in seen} == {2, 4}
        assert all((ranks == 2) == (len(shape) == 3) for ranks, shapes in seen for shape in shapes)
        found = sw.full_state_dict(model)
        first = first or found
        assert_equal(found, first)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (stage, name)
    model, optimizer = wrapped(mesh, 1)
    model._register_builtin_comm_hook("ALLREDUCE")
    train(model, optimizer, rank, steps=2)
    assert_equal(sw.full_state_dict(model), first)


def beside_tensors(mesh, over, placements, is_parallel=True):
    """The model with its experts over the dimensions `over`, and two layers of the rest over 'tp'."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build()
    for layer in model.layers:
        layer.group = mesh["ep"].get_group()
        for name, parameter in list(layer.experts.named_parameters()):
            placed = distribute_tensor(parameter.detach(), mesh[over], placements)
            layer.experts.register_parameter(name, torch.nn.Parameter(placed))
    if is_parallel:
        plan = {
            "inlet": ColwiseParallel(output_layouts=Replicate()),
            "outlet": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    return model


@on_every_rank(exactly=4)
def test_experts_alone_are_refused_in_groups_and_train_over_the_ranks_of_their_group(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def alone(mesh, over, placements):
        model, value = torch.nn.Module(), torch.arange(12.0).view(4, 3)
        model.expert = torch.nn.Parameter(distribute_tensor(value, mesh[over], placements))
        model.gate = torch.nn.Parameter(torch.zeros(3), requires_grad=False)  # frozen: not averaged either
        model.forward = lambda x: (model.expert.to_local() * x).sum()
        return model, value

    beside = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_mod_ep", "ep", "tp"))
    mesh = mesh_of(2)
    for own, over, placements, ranks in (
        (
            beside,
            ("ep", "tp"),
            [Shard(0), Replicate()],
            beside["ep"],
        ),  # its mesh has ranks outside of those that average
        (mesh, ("ep",), [Shard(0)], None),
    ):
        model, _ = alone(own, over, placements)
        options = {"device_mesh": ranks, "groups": {"expert": own["dp_mod_ep"]}}
        with pytest.raises(sw.Error, match="groups: every parameter that requires a gradient is in groups, and ranks"):
            sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1, **options)
    model, value = alone(mesh, ("ep",), [Shard(0)])
    model, optimizer = sw.wrap(model, torch.optim.SGD([model.expert], lr=1.0), zero=2, device_mesh=mesh["dp_mod_ep"])
    model(1.0 + mesh.get_local_rank("dp_mod_ep")).backward()  # the mean of 1 and 2
    optimizer.step()
    assert torch.equal(sw.full_state_dict(model)["expert"], value - 1.5)


@on_every_rank(exactly=4)
def test_experts_beside_tensor_parallelism(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    folder = Path(os.environ["SW_TEST_FOLDER"])
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_mod_ep", "ep", "tp"))
    options = {"device_mesh": mesh["ep"], "groups": {"layers.*.experts": mesh["dp_mod_ep"]}}
    expected, norms, _ = oracle(2, steps=2)
    for zero in (0, 1, 2, 3) if LONG else (1, 3):
        model = beside_tensors(mesh, ("ep", "tp"), [Shard(0), Replicate()])
        model, optimizer = sw.wrap(model, optimizer_of(model), zero=zero, **options)
        assert train(model, optimizer, mesh.get_local_rank("ep"), steps=2) == pytest.approx(norms, rel=1e-5)
        found = sw.full_state_dict(model)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (zero, name)
        sw.save(folder / f"beside-{zero}", model, optimizer)
        whole = build()
        whole, optimizer = sw.wrap(whole, optimizer_of(whole), zero=1)
        sw.load(folder / f"beside-{zero}", whole, optimizer)
        assert_equal(sw.full_state_dict(whole), found)

    refused = (
        r"'layers.0.experts.down' .* on a mesh of dimension 'ep' .*: 2 ranks have the one, 4 the others; place both"
    )
    for over, placements, is_parallel, text in (
        ("ep", [Shard(0)], True, refused),
        (("ep", "tp"), [Shard(0), Replicate()], False, "are plain tensors: 4 ranks have the one, 2 the others"),
    ):
        with pytest.raises(sw.Error, match=text):
            sw.wrap(beside_tensors(mesh, over, placements, is_parallel), **options)


class Skipping(torch.nn.Module):
    """Experts that ranks of some columns leave out altogether."""

    def __init__(self, mesh, dtype):
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.inlet = torch.nn.Linear(4, 4)
        self.experts = torch.nn.Module()
        self.experts.up = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=dtype), mesh["ep"], [Shard(0)]))
        self.uses_experts = mesh.get_local_rank("ep") == 0

    def forward(self, x):
        x = self.inlet(x)
        return x @ self.experts.up.to_local().to(x.dtype).T if self.uses_experts else x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_every_rank(exactly=4)
def test_a_scaler_unscales_where_one_columns_experts_have_no_gradient(rank, world_size, stage):
    mesh = mesh_of(2)
    torch.manual_seed(0)
    model = Skipping(
        mesh, torch.bfloat16 if stage > 1 else torch.float32
    )  # a dtype that some ranks have no gradient of
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model, optimizer = sw.wrap(model, optimizer, zero=stage, groups={"experts": mesh["dp_mod_ep"]})
    before = sw.full_state_dict(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflows in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if overflows and rank == 2 else 1.0)).backward()
        assert (model.module.experts.up.grad is None) != model.module.uses_experts
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()
        assert gather(found) == [float(overflows)] * world_size
        scaler.step(optimizer)
        scaler.update()
        after = sw.full_state_dict(model)
        if not overflows:
            x = torch.nn.functional.linear(torch.ones(2, 4), before["inlet.weight"], before["inlet.bias"]).sum(0)
            expected = before["experts.up"].clone()
            expected[:2] -= 0.125 * x / 2  # two of four ranks contribute
            assert torch.allclose(
                after["experts.up"].float(), expected.float(), rtol=1e-2 if stage > 1 else 1e-5
            ) and same_everywhere([*after.values()])
            before = after
    assert_equal(after, before)


@on_every_rank(exactly=4)
def test_what_is_asked_of_the_wrapper_is_asked_of_all_its_engines(rank, world_size):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    mesh, whole = mesh_of(2), StateDictOptions(full_state_dict=True)
    for stage in (3, "private"):  # torch's functions
        model, optimizer = wrapped(mesh, stage)
        train(model, optimizer, rank, steps=1)
        expected = sw.full_state_dict(model)
        assert_equal(get_model_state_dict(model, options=whole), expected)
        doubled = {name: 2 * value for name, value in expected.items()}
        set_model_state_dict(model, dict(doubled), options=whole)
        assert_equal(sw.full_state_dict(model), doubled)

    with sw.Checkpointer(os.environ["SW_TEST_FOLDER"], model, optimizer, snapshot="lazy"):
        assert [len(each.access._before_writes) for each in internals.replicas(model)] == [1, 1]
    engines = internals.replicas(model)
    model.reducer._remove_autograd_hooks()
    assert all(each.retired for each in engines)

    model, optimizer = wrapped(mesh, "by hand")
    train(model, optimizer, rank, steps=1)
    expected = sw.full_state_dict(model)
    placed = distributed(mesh)  # FSDP2's other way to give a parameter a mesh

    def placement(parameter):
        from torch.distributed.tensor import Shard

        if not hasattr(parameter, "placements"):
            return Shard(parameter.dim() - 1)
        return SimpleNamespace(placement=Shard(1), mesh_info=SimpleNamespace(mesh=mesh["dp_mod_ep"]))

    for layer in placed.layers:
        sw.fully_shard(layer, shard_placement_fn=placement)
        layer.set_gradient_divide_factor(world_size)
    sw.fully_shard(placed, shard_placement_fn=placement)
    optimizer = sw.shard_optimizer(placed, optimizer_of(placed))
    assert [len(each.table.names) for each in engine_of(placed).replicas] == [8, 4]
    train(placed, optimizer, rank, steps=1)
    found = sw.full_state_dict(placed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # another dimension first in memory: products add up in another order
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    with pytest.raises(
        TypeError, match="must return None, a Shard or a ShardPlacementResult, got 3 for parameter 'weight'"
    ):
        sw.fully_shard(torch.nn.Linear(2, 2), shard_placement_fn=lambda parameter: 3)
    sw.full_state_dict(model)


@pytest.mark.parametrize("in_one_unit", [False, True])
@on_every_rank(exactly=4)
def test_fully_shard_trains_experts_as_fsdp2(rank, world_size, in_one_unit):
    """A mean is over the ranks of a parameter's own mesh by default. A unit may have parameters on two meshes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = mesh_of(2)
    over, own = mesh["dp_mod_ep", "ep"]._flatten("dp"), mesh["dp_mod_ep"]
    of_experts = ShardPlacementResult(placement=Shard(0), mesh_info=FSDPMeshInfo(own, shard_mesh_dim=0))

    def made(shard, factor):
        model = distributed(mesh)
        for layer in model.layers:
            if in_one_unit:
                shard(layer, mesh=over, shard_placement_fn=lambda p: of_experts if hasattr(p, "placements") else None)
            else:
                shard(layer.experts, mesh=own)
                shard(layer, mesh=over)
            if factor is not None:
                for each in (layer,) if in_one_unit else (layer, layer.experts):
                    each.set_gradient_divide_factor(factor)
                    each.set_force_sum_reduction_for_comms(True)  # gloo has no other operation for it
        shard(model, mesh=over)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    for factor in (None, world_size, 3.0):
        (theirs, optimizer), (ours, stepped) = made(fully_shard, factor), made(sw.fully_shard, factor)
        for step in range(3):
            losses = backward(ours, step, rank), backward(theirs, step, rank)
            assert losses[0] == pytest.approx(losses[1], rel=1e-6), (factor, step)
            for (name, p), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert p.placements == other.placements and p.device_mesh == other.device_mesh, name
                torch.testing.assert_close(p.grad.to_local(), other.grad.to_local(), rtol=1e-5, atol=1e-7, msg=name)
            for each in (stepped, optimizer):
                each.step()
                each.zero_grad()


@on_every_rank(exactly=4)
def test_a_deepspeed_engine_takes_all_its_engines_off(rank, world_size):
    mesh = mesh_of(2)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config["shardwright"] = {"groups": {"layers.*.experts": mesh["dp_mod_ep"]}, "share_parameters": False}
    model = distributed(mesh)
    engine, *_ = sw.deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    engines, expected = internals.replicas(engine.wrapped), sw.full_state_dict(engine.wrapped)
    engine.destroy()
    assert len(engines) == 2 and all(each.retired for each in engines)
    model.cpu()  # swaps DTensors
    assert_equal({name: whole_tensor(value) for name, value in model.state_dict().items()}, expected)
