"""Law: the functions of torch.distributed.checkpoint.state_dict work at every stage as for the module and optimizer of
one process: whole tensors under the bare module's names. Calling them for an optimizer that has not stepped changes
nothing.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3 shared": {"zero": 3},
    "3 private": {"zero": 3, "share_parameters": False},
    "3 whole tensors": {"zero": 3, "partition": "tensor", "share_parameters": False},
}
every_stage = pytest.mark.parametrize("stage", STAGES)


def wrap(stage, seed=0, dtype=torch.float32, kind=torch.optim.AdamW):
    torch.manual_seed(seed)
    module = Mlp().to(dtype)
    return sw.wrap(module, kind(module.parameters(), lr=1e-2), **STAGES[stage])


def steps(model, optimizer, rank, first, count, dtype=torch.float32):
    for step in range(first, first + count):
        model(batch(rank, 6, 7, step=step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(state):
    """Return the leaves of a nested state dict by path."""
    if isinstance(state, dict):
        return {(str(k), *path): v for k, each in state.items() for path, v in flat(each).items()}
    if isinstance(state, (list, tuple)):
        return {(str(k), *path): v for k, each in enumerate(state) for path, v in flat(each).items()}
    return {(): state}


def assert_same(found, expected):
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        same = bits_equal(found[path], value) if isinstance(value, torch.Tensor) else found[path] == value
        assert same, path


def expected_of(model, optimizer):
    """Return the two state dicts of the bare module, by name."""
    names = [name for name, _ in sw.unwrap(model).named_parameters()]
    state = sw.full_optimizer_state_dict(model, optimizer)
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return sw.full_state_dict(model), {
        "state": {names[i]: each for i, each in state["state"].items()},
        "param_groups": groups,
    }


@every_stage
@on_every_rank()
def test_states_go_out_and_in(rank, world_size, stage):
    model, optimizer = wrap(stage)
    steps(model, optimizer, rank, 0, 2)
    expected = expected_of(model, optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    assert_same((weights, state), expected)
    for name, value in get_model_state_dict(model).items():
        assert type(value) in (torch.Tensor, torch.nn.Parameter) and not value.requires_grad, name

    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_state_dict(model, optimizer, options=on_first)
    assert_same(found, expected if rank == 0 else ({}, {}))
    in_one = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=in_one))
    assert all(isinstance(value, (torch.Tensor, int, float, tuple, bool, type(None))) for value in flattened.values())

    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ways = [
        lambda *both: set_state_dict(*both, model_state_dict=dict(weights), optim_state_dict=copy.deepcopy(state)),
        lambda a, b: (
            set_model_state_dict(a, dict(weights) if rank == 0 else {}, options=from_first),
            set_optimizer_state_dict(a, b, copy.deepcopy(state) if rank == 0 else {}, options=from_first),
        ),
        lambda a, b: (
            set_model_state_dict(a, dict(weights), options=StateDictOptions(full_state_dict=True)),
            set_optimizer_state_dict(a, b, flattened, options=in_one),
        ),
    ]
    others = [wrap(stage, seed=7 + number) for number in range(len(ways))]
    for way, other in zip(ways, others):
        way(*other)
        assert_same(expected_of(*other), expected)
    for each in ((model, optimizer), *others):
        steps(*each, rank, 2, 1)
    for other in others:
        assert_same(expected_of(*other), expected_of(model, optimizer))
    gather(None)


@every_stage
@on_every_rank()
def test_an_optimizer_that_has_not_stepped_gives_a_state_to_load_into(rank, world_size, stage):
    folder = shared_folder(rank) + "/a"
    model, optimizer = wrap(stage)
    steps(model, optimizer, rank, 0, 2)
    expected = expected_of(model, optimizer)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=sw.checkpoint.StorageWriter(folder))

    asked, plain = wrap(stage, seed=1), wrap(stage, seed=1)
    state = {"model": get_model_state_dict(asked[0]), "optim": get_optimizer_state_dict(*asked)}
    assert flat(state["optim"]).keys() == flat(expected[1]).keys()
    if stage != "0":  # torch keeps the state that it has made
        steps(*asked, rank, 0, 1)
        steps(*plain, rank, 0, 1)
        assert_same(expected_of(*asked), expected_of(*plain))
    dcp.load(state, storage_reader=sw.checkpoint.StorageReader(folder))
    set_state_dict(*asked, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same(expected_of(*asked), expected)
    sw.load(folder, *plain)
    assert_same(expected_of(*plain), expected)
    gather(None)


@pytest.mark.parametrize("stage", ["0", "1", "3 private"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, sw.optim.AdamW] if PEER != "torch" else [])
@on_every_rank()
def test_masters_are_part_of_the_state(rank, world_size, stage, kind):
    made = [wrap(stage, seed, torch.bfloat16, kind) for seed in (0, 1)]
    template = get_optimizer_state_dict(*made[1])
    steps(*made[0], rank, 0, 2, torch.bfloat16)
    weights, state = copy.deepcopy(get_state_dict(*made[0]))
    assert all(entry["master"].dtype is torch.float32 for entry in state["state"].values())
    assert flat(template).keys() == flat(state).keys()
    set_state_dict(*made[1], model_state_dict=weights, optim_state_dict=state)
    for each in made:
        steps(*each, rank, 2, 1, torch.bfloat16)
    assert_same(get_state_dict(*made[1]), get_state_dict(*made[0]))
    gather(None)
