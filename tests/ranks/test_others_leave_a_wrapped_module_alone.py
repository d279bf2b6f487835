"""Law: whatever else wraps, hooks, moves or loads a wrapped module does so rightly, or is refused with one sentence on
every rank at that very line."""

import importlib
import io
from multiprocessing.reduction import ForkingPickler

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from peer import batch
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

#: the package gives the function the module's name
composable = importlib.import_module("torch.distributed._composable.replicate")
STAGES = ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False, "units": torch.nn.Linear})


def wrapped(**options):
    torch.manual_seed(3)
    module = Mlp()
    return sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)


def train(model, optimizer, rank, step):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_every_rank()
def test_torchs_wrappers_are_refused_while_they_are_made(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    wrappers = (
        TorchDDP,
        lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
        lambda module: fully_shard(module, mesh=mesh),
        composable.replicate,
        lambda module: replicate_by_fsdp(module, mesh=mesh),
        sw.fully_shard,
    )
    for number, wrap in enumerate(wrappers):
        model, optimizer = wrapped(**STAGES[(number + world_size) % len(STAGES)])
        inside = (sw.unwrap(model),) * 2  # a refused call leaves no mark, on which torch's own would trip
        places = (model, torch.nn.Sequential(model), *inside) if number < 3 else (model,)
        for place in places:
            with pytest.raises(sw.Error, match="was given a .*wrapped already") as caught:
                wrap(place)
            assert same_everywhere(str(caught.value))
        train(model, optimizer, rank, 0)  # nothing was changed
        del model
    TorchDDP(torch.nn.Sequential(Mlp()))
    model, _ = wrapped()
    module = sw.unwrap(model)
    del model, _
    TorchDDP(module)  # no wrapper of ours is left


@on_every_rank()
def test_wrappers_of_torchs_inside_are_refused(rank, world_size):
    for inner in (composable.replicate, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))):
        with pytest.raises(sw.Error, match="beside which no other wrapper averages"):
            sw.wrap(torch.nn.Sequential(inner(Mlp())))


@on_every_rank()
def test_a_hook_behind_ours_reads_its_own_ranks_gradient(rank, world_size):
    """As torch's reducer does. The fold of a complete bucket overwrites `.grad`, and begins after such hooks."""
    model, _ = wrapped()
    plain, seen, nodes = Mlp(), {}, []
    plain.load_state_dict(sw.unwrap(model).state_dict())

    def watch(name, parameter):
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(lambda *_: seen.__setitem__(name, parameter.grad.clone()))
        nodes.append(node)

    for name, parameter in sw.unwrap(model).named_parameters():
        watch(name, parameter)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(batch(rank, 6, 7, step=step)).square().mean().backward()
        own = all(torch.equal(seen[name], p.grad) for name, p in plain.named_parameters())
        assert gather(own) == [True] * world_size


@on_every_rank()
def test_torchs_replicate_runs_our_class_with_keywords(rank, world_size):
    class Named(Mlp):
        def forward(self, *, inputs):
            return super().forward(inputs)

    kept, composable.DistributedDataParallel = composable.DistributedDataParallel, sw.DistributedDataParallel
    try:
        module = composable.replicate(Named())
        module(inputs=batch(rank, 6, 7)).square().mean().backward()
    finally:
        composable.DistributedDataParallel = kept
    assert same_everywhere([p.grad for p in module.parameters()])


@on_every_rank()
def test_memory_of_the_engine_goes_through_a_queue_as_a_copy(rank, world_size):
    for stage in STAGES[1:]:
        model, optimizer = wrapped(**stage)
        train(model, optimizer, rank, 0)
        with sw.full_parameters(model):
            state = sw.unwrap(model).state_dict()
            places = {
                name: value.data_ptr() for name, value in state.items() if "weight" in name
            }  # small ones are torch's
            data = bytes(ForkingPickler.dumps(state))
            assert all(sw.unwrap(model).state_dict()[name].data_ptr() == place for name, place in places.items())
            expected = sw.full_state_dict(model)
            for move in (sw.unwrap(model).share_memory, next(iter(state.values())).share_memory_):
                with pytest.raises(sw.Error, match="cannot move"):
                    move()
        got = ForkingPickler.loads(data)
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        train(model, optimizer, rank, 1)
        assert all(torch.equal(got[name], expected[name]) for name in places)


@on_every_rank()
def test_a_frozen_parameter_that_went_through_a_queue_trains_once_it_is_thawed(rank, world_size):
    ends = []
    for stage in (STAGES[1], *STAGES[1:]):  # the first one without a queue
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Linear(8, 8).requires_grad_(False))
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), **stage)
        with sw.full_parameters(model):
            if ends:
                ForkingPickler.dumps(module.state_dict())  # torch moves what lies in its own memory
        for step in range(4):
            module[1].requires_grad_(step > 1)
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(sw.full_state_dict(model))
    assert all(torch.equal(end[name], value) for end in ends for name, value in ends[0].items())


@on_every_rank()
def test_a_frozen_parameter_in_the_engines_memory_cannot_be_replaced(rank, world_size):
    """At zero=3 the engine has moved it, too."""
    for stage in STAGES[3:]:
        module = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Linear(8, 8).requires_grad_(False))
        model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), **stage)
        with pytest.raises(sw.Error, match="was replaced|is released"):
            module[1].weight.data = torch.zeros(8, 8)
            model(batch(rank, 6, 7))
        gather(None)


@on_every_rank()
def test_a_saved_state_dict_is_loaded_at_every_stage(rank, world_size):
    for stage in STAGES:
        model, optimizer = wrapped(**stage)
        train(model, optimizer, rank, 0)
        file = io.BytesIO()
        torch.save(sw.full_state_dict(model), file)
        train(model, optimizer, rank, 1)
        expected = sw.full_state_dict(model)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        named = {f"module.{name}": value for name, value in state.items()}
        module = sw.unwrap(model)
        first, child = next(module.named_children())
        inner = {n.removeprefix(f"{first}."): v for n, v in state.items() if n.startswith(f"{first}.")}
        for load, value in ((model, named), (module, state), (child, inner)):
            load.load_state_dict(value)
            found = sw.full_state_dict(model)
            same = [torch.equal(found[n], state[n]) for n in found if load is not child or n.startswith(f"{first}.")]
            assert all(same)
        model.load_state_dict(named)
        train(model, optimizer, rank, 1)
        found = sw.full_state_dict(model)
        assert all(torch.equal(found[n], expected[n]) for n in found)
        if stage.get("zero") == 3:
            with pytest.raises(sw.Error, match="leave assign out"):
                module.load_state_dict(state, assign=True)
    assert dist.get_world_size() == world_size


@on_every_rank()
def test_a_torchscript_submodule_is_right_or_named(rank, world_size):
    for stage in STAGES:
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.jit.script(torch.nn.Linear(7, 1)))
        if "units" in stage:
            with pytest.raises(NotImplementedError, match="submodule '1' is a TorchScript module"):
                sw.wrap(module, **stage)
            continue
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), **stage)
        for step in range(2):
            train(model, optimizer, rank, step)
        assert same_everywhere(list(sw.full_state_dict(model).values()))


@on_every_rank()
def test_a_wrapper_of_torchs_that_ignores_ours_averages_the_rest(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))

    def ddp(outer, ignored):
        ids = set(map(id, ignored))
        outer._ddp_params_and_buffers_to_ignore = [name for name, p in outer.named_parameters() if id(p) in ids]
        return TorchDDP(outer)

    wrappers = (
        ddp,
        lambda outer, ignored: FullyShardedDataParallel(
            outer, ignored_states=iter(ignored), device_id=torch.device("cpu")
        ),
        lambda outer, ignored: fully_shard(outer, mesh=mesh, ignored_params=set(ignored)),
    )
    for number, wrap in enumerate(wrappers):
        model, optimizer = wrapped(**STAGES[(number + world_size) % 4])
        ours, head = list(model.parameters()), torch.nn.Linear(5, 3)
        outer = torch.nn.Sequential(model, head)
        with pytest.raises(sw.Error, match="was given a .*wrapped already"):
            wrap(outer, ours[1:])
        outer = torch.nn.Sequential(model, head)
        whole = wrap(outer, ours)
        train(whole, optimizer, rank, 0)
        with sw.full_parameters(model):
            assert same_everywhere([p.detach() for p in ours])


@on_every_rank()
def test_a_wrapper_of_torchs_inside_whose_parameters_ours_ignores_averages_them(rank, world_size):
    for make in (TorchDDP, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))):
        torch.manual_seed(3)
        inner = make(Mlp())
        model = sw.wrap(torch.nn.Sequential(inner, torch.nn.Linear(5, 3)), ignored_params=list(inner.parameters()))
        model(batch(rank, 6, 7)).square().mean().backward()
        assert same_everywhere([p.grad for p in model.module[1].parameters()])
    inner = TorchDDP(Mlp())
    with pytest.raises(sw.Error, match="beside which no other wrapper averages"):
        sw.wrap(torch.nn.Sequential(inner), ignored_params=list(inner.parameters())[1:])


@on_every_rank()
def test_a_storage_of_ours_is_saved_as_torchs(rank, world_size):
    model, _ = wrapped(zero=1)
    storage = max((p.untyped_storage() for p in model.parameters()), key=lambda each: each.nbytes())
    assert type(storage) is not torch.UntypedStorage and torch.is_storage(storage)
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save([storage, storage], file, _use_new_zipfile_serialization=zipped)
        found, again = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert bytes(found.untyped()) == bytes(storage) and found.data_ptr() == again.data_ptr()
    gather(None)
