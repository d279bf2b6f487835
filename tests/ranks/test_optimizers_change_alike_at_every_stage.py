"""Law: a change to an optimizer between its steps (added groups, loaded state, frozen parameters, saved full state) has
the outcome of stage 0 at every stage, bit for bit."""

import copy
import os

import pytest
import torch
from harness import gather, in_turn, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = [
    {"zero": 0},
    {"zero": 1, "bucket_cap_mb": 0.001},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "units": nn.Linear},
]

FEW = [STAGES[0], STAGES[1], STAGES[4]]


def turned(at):
    """Return stage 0 and the others whose turn it is."""
    return [STAGES[0], *in_turn(STAGES[1:], at)]


def train(model, optimizer, rank, steps):
    for step in steps:
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    with sw.full_parameters(model):
        return [p.detach().clone() for p in sw.unwrap(model).parameters()]


def assert_bits(found, expected, what):
    assert all(map(bits_equal, found, expected)), what
    assert same_everywhere(found), what


def takes_names():
    """Return True if this torch's optimizers take named parameters."""
    try:
        return "param_names" in torch.optim.SGD(nn.Linear(1, 1).named_parameters(), lr=0.1).param_groups[0]
    except TypeError:
        return False


@pytest.mark.parametrize("form", ["generator", "names", "one"])
@on_every_rank()
def test_groups_are_added_in_every_form_that_torch_accepts(rank, world_size, form):
    if form == "names" and not takes_names():
        return
    expected = None
    for options in turned(int(form == "names")):
        torch.manual_seed(0)
        module = Mlp()
        first = module[0].named_parameters() if form == "names" else module[0].parameters()
        model, optimizer = sw.wrap(module, torch.optim.AdamW(first, lr=1e-2), **options)
        last = module[4]
        added = {"generator": last.parameters(), "names": last.named_parameters(), "one": last.weight}[form]
        optimizer.add_param_group({"params": added, "lr": 1e-3})
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1 if form == "one" else 2]
        train(model, optimizer, rank, range(3))
        expected = expected or whole(model)
        assert_bits(whole(model), expected, options)
        gather(None)


@on_every_rank()
def test_a_group_that_the_users_class_refuses_is_not_added(rank, world_size):
    for options in turned(1):
        module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5).double())
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module[0].parameters()), **options)
        with pytest.raises(ValueError, match="must be float32, bfloat16 or float16, not float64"):
            optimizer.add_param_group({"params": module[1].parameters()})
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [module[0].weight]})
        if options["zero"]:
            with pytest.raises(ValueError, match=r"shape \(3, 2\) in group 1 is not one of the wrapped Sequential"):
                optimizer.add_param_group({"params": nn.Linear(2, 3).parameters()})
        assert len(optimizer.param_groups) == 1
        gather(None)


class Small(nn.Sequential):
    """A model with parameters of at most 128 bytes, which are never released, and larger ones."""

    def __init__(self):
        super().__init__(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("partition", ["auto", "tensor"])
@pytest.mark.parametrize("at", ["between steps", "before the first step"])
@on_every_rank()
def test_parameters_frozen_later_are_stepped_on_while_they_have_a_gradient(rank, world_size, at, partition):
    """Like torch: momentum and weight decay continue while zero_grad leaves zeros."""
    expected = None
    for options in turned(int(partition == "tensor")):
        torch.manual_seed(0)
        module = Small()
        made = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        model, optimizer = sw.wrap(module, made, partition=partition, **options)
        for step in range(4):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            if step == (0 if at == "before the first step" else 2):
                module[2].requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():  # as the next forward reads them
            loss = model(batch(rank, 6, 7)).sum().item()
        found = [torch.tensor(loss), *whole(model)]
        expected = expected or found
        assert all(map(bits_equal, found, expected)) and same_everywhere(found[1:]), options
        gather(None)


@pytest.mark.parametrize("partition", ["auto", "tensor"])
@on_every_rank()
def test_a_gradient_older_than_the_wrapper_on_a_frozen_parameter_is_named(rank, world_size, partition):
    for options in in_turn(STAGES[1:], int(partition == "auto")):
        torch.manual_seed(0)
        module = Small()
        made = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module(batch(rank, 6, 7)).sum().backward()
        module[2].requires_grad_(False)
        model, optimizer = sw.wrap(module, made, partition=partition, **options)
        model(batch(rank, 6, 7)).square().mean().backward()
        text = r"parameter '2.weight' is frozen and has a gradient|gradient of this rank that is not averaged"
        with pytest.raises(sw.Error, match=text):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rank, range(1))
        assert same_everywhere(whole(model)), options
        gather(None)


class Shared(nn.Module):
    """Parameters that are views of one memory: columns side by side, consecutive rows, and, on request, one twice."""

    def __init__(self, overlap):
        super().__init__()
        columns, rows = torch.randn(7, 16), torch.randn(64)
        self.left, self.right = nn.Parameter(columns[:, :8]), nn.Parameter(columns[:, 8:])
        self.first, self.second = nn.Parameter(rows[:8]), nn.Parameter(rows[8:16])
        self.last = nn.Parameter(rows[15:23] if overlap else rows[16:24])
        self.register_buffer("seen", columns[0, 7:9] if overlap is None else torch.zeros(2))

    def forward(self, x):
        return (x @ self.left) * (x @ self.right) + self.first + self.second + self.last


@on_every_rank()
def test_parameters_over_the_same_memory_are_refused_and_adjacent_ones_are_not(rank, world_size):
    """In separate memory they would silently become two parameters, and train differently from zero=0."""
    expected = None
    for options in turned(0):
        torch.manual_seed(0)
        module = Shared(False)
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=1e-3), **options)
        train(model, optimizer, rank, range(3))
        expected = expected or whole(model)
        assert_bits(whole(model), expected, options)
        for overlap, names in ((True, "'second' and 'last'"), (None, "'left' and 'seen'")):
            if options["zero"]:
                with pytest.raises(sw.Error, match=f"{names} are two tensors over the same memory"):
                    sw.wrap(Shared(overlap), **options)
        gather(None)


MAKERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "masters": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "no masters": lambda p: sw.optim.AdamW(p, lr=1e-2, master=False),
}


def low(seed=0):
    torch.manual_seed(seed)
    return Mlp().to(torch.bfloat16)


def train_low(model, optimizer, rank, steps):
    for step in steps:
        model(batch(rank, 6, 7, step=step).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def facts(model, optimizer):
    state = sw.full_optimizer_state_dict(model, optimizer)["state"]
    dtypes = {key: str(value.dtype) for entry in state.values() for key, value in entry.items()}
    return whole(model), dtypes


@pytest.mark.parametrize("how", ["full", "before wrapping", "checkpoint"])
@pytest.mark.parametrize("second", MAKERS)
@on_every_rank()
def test_state_with_and_without_masters_loads_alike(rank, world_size, second, how):
    """With masters, state is float32 from then on; without them it has the parameters' dtype."""
    for first in in_turn([*MAKERS], [*MAKERS].index(second) + 1):
        go_from(rank, first, second, how)


def go_from(rank, first, second, how):
    source = low()
    optimizer = MAKERS[first](source.parameters())
    train_low(source, optimizer, 0, range(2))
    weights, state = source.state_dict(), optimizer.state_dict()
    folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"{first}-{second}")
    if how == "checkpoint":
        wrapped = sw.wrap(source, optimizer)
        train_low(*wrapped, rank, range(2, 3))
        sw.save(folder, *wrapped, step=3)
    expected = None
    for options in FEW:
        module = low(1)
        module.load_state_dict(weights)
        optimizer = MAKERS[second](module.parameters())
        if how == "before wrapping":
            optimizer.load_state_dict(copy.deepcopy(state))
        model, optimizer = sw.wrap(module, optimizer, **options)
        if how == "full":
            sw.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        elif how == "checkpoint":
            sw.load(folder, model, optimizer)
        train_low(model, optimizer, rank, range(3, 5))
        found = facts(model, optimizer)
        expected = expected or found
        assert found[1] == expected[1], options
        kept = {"torch.bfloat16"} if second == "no masters" else {"torch.float32"}
        assert {dtype for key, dtype in found[1].items() if key != "step"} == kept
        assert ("master" in found[1]) == (second != "no masters")
        assert_bits(found[0], expected[0], options)
        gather(None)


@pytest.mark.parametrize("kind", [int, torch.Tensor.long])
@on_every_rank()
def test_counts_of_steps_of_older_formats_load_at_every_stage(rank, world_size, kind):
    makers = (torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad, sw.optim.AdamW)
    for make in in_turn(makers, int(kind is int)):
        load_older(rank, make, kind)


def load_older(rank, make, kind):
    torch.manual_seed(0)
    source = Mlp()
    optimizer = make(source.parameters(), lr=1e-2)
    train(source, optimizer, 0, range(2))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = kind(entry["step"])
    expected = None
    for options in FEW:
        module = copy.deepcopy(source)
        model, optimizer = sw.wrap(module, make(module.parameters(), lr=1e-2), **options)
        sw.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        train(model, optimizer, rank, range(2, 4))
        expected = expected or whole(model)
        assert_bits(whole(model), expected, options)
        gather(None)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD])
@on_every_rank()
def test_scalars_beside_masters_are_loaded_unchanged(rank, world_size, make):
    """Loading a state just saved changes nothing; torch's own loading would round it to the parameters' dtype."""
    for options in FEW:
        found = []
        for reloads in (False, True):
            module = low()
            model, optimizer = sw.wrap(module, make(module.parameters(), lr=1e-2), **options)
            train_low(model, optimizer, rank, range(2))
            if reloads:
                state = sw.full_optimizer_state_dict(model, optimizer)
                sw.load_full_optimizer_state_dict(model, optimizer, state)
            train_low(model, optimizer, rank, range(2, 4))
            found.append(whole(model))
        assert_bits(found[1], found[0], options)
        gather(None)


@pytest.mark.parametrize("what", ["optimizer first", "model first", "optimizer alone"])
@pytest.mark.parametrize("name", ["torch", "masters"])
@on_every_rank()
def test_loading_an_older_state_is_alike_at_every_stage_and_full_states_are_copies(rank, world_size, name, what):
    expected = None
    for options in turned(int(name == "masters")):
        module = low()
        model, optimizer = sw.wrap(module, MAKERS[name](module.parameters()), **options)
        train_low(model, optimizer, rank, range(3))
        weights, state = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)
        train_low(model, optimizer, rank, range(3, 5))
        if what == "model first":
            sw.load_full_state_dict(model, weights)
        sw.load_full_optimizer_state_dict(model, optimizer, state)
        if what == "optimizer first":
            sw.load_full_state_dict(model, weights)
        train_low(model, optimizer, rank, range(5, 7))
        expected = expected or whole(model)
        assert_bits(whole(model), expected, options)
        gather(None)


@on_every_rank()
def test_groups_changed_behind_the_wrappers_back_are_named(rank, world_size):
    """Schedulers would change one optimizer's groups, while the other steps with its own."""
    for options in turned(1):
        for change in ("load", "add"):
            module = low()
            inner = torch.optim.AdamW(module[0].parameters(), lr=1e-2)
            state = copy.deepcopy(inner.state_dict())
            model, optimizer = sw.wrap(module, inner, **options)
            inner.load_state_dict(state) if change == "load" else inner.add_param_group(
                {"params": module[2].parameters()}
            )
            model(batch(rank, 6, 7).to(torch.bfloat16)).sum().backward()
            with pytest.raises(sw.Error, match="no longer has the groups of the one that it returned"):
                optimizer.step()
            gather(None)


@pytest.mark.parametrize("by", ["two models", "sub-groups"])
@on_every_rank()
def test_two_models_and_sub_groups_train_alike_at_every_stage(rank, world_size, by):
    """Two models in turn, of which one steps every other time; even and odd ranks apart."""
    groups = [torch.distributed.new_group(range(parity, world_size, 2)) for parity in (0, 1) if parity < world_size]
    group = groups[rank % 2] if by == "sub-groups" else None
    expected = None
    for options in turned(int(group is None)):
        torch.manual_seed(rank % 2 if group is not None else 0)
        modules = [Mlp(), Mlp()]
        made = [
            sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), process_group=group, **options)
            for module in modules
        ]
        for step in range(4):
            for which, (model, optimizer) in enumerate(made):
                model(batch(rank, 6, 7, step=step)).square().mean().backward()
                if which == 0 or step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        found = [tensor for model, _ in made for tensor in whole(model)]
        expected = expected or found
        assert all(map(bits_equal, found, expected)), options
        gather(None)


@on_every_rank()
def test_a_learning_rate_in_a_tensor_belongs_to_the_optimizer_alone(rank, world_size):
    """Schedulers write into it; a saved or loaded state keeps its own."""
    for options in turned(0):
        torch.manual_seed(0)
        module = Mlp()
        made = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.5), foreach=False)
        model, optimizer = sw.wrap(module, made, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = sw.full_optimizer_state_dict(model, optimizer)
        train(model, optimizer, rank, range(1))
        scheduler.step()
        assert float(state["param_groups"][0]["lr"]) == 0.5, options
        for _ in range(2):
            sw.load_full_optimizer_state_dict(model, optimizer, state)
            assert float(optimizer.param_groups[0]["lr"]) == 0.5, options
            train(model, optimizer, rank, range(1, 2))
            scheduler.step()
        assert float(state["param_groups"][0]["lr"]) == 0.5, options
        gather(None)


@on_every_rank()
def test_hooks_of_states_and_steps_run_at_every_stage(rank, world_size):
    """Hooks of the wrapper's optimizer run; step hooks also if they were registered before wrapping."""
    for options in turned(1):
        module, called = low(), []
        made = torch.optim.AdamW(module.parameters(), lr=1e-2)
        made.register_step_pre_hook(lambda *_: called.append("before wrapping: step"))
        model, optimizer = sw.wrap(module, made, **options)
        optimizer.register_step_pre_hook(lambda *_: called.append("step"))
        optimizer.register_step_post_hook(lambda *_: called.append("stepped"))
        optimizer.register_state_dict_pre_hook(lambda *_: called.append("state"))
        optimizer.register_state_dict_post_hook(lambda _, made: {**made, "mine": 7})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, given: called.append(given["mine"]) or {k: v for k, v in given.items() if k != "mine"}
        )
        optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
        train_low(model, optimizer, rank, range(1))
        optimizer.load_state_dict(optimizer.state_dict())
        assert called == ["step", "before wrapping: step", "stepped", "state", 7, "loaded"], options
        gather(None)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank()
def test_ranks_that_clip_by_other_norms_are_refused(rank, world_size, zero):
    module = torch.nn.Linear(3, 3)
    norm = 0.5 if rank else None
    with pytest.raises(
        engine.Error, match=r"ranks disagree about the optimizer: it has clip_grad_norm=None on rank 0.*=0\.5"
    ):
        sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, clip_grad_norm=norm)
