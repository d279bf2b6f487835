"""Law: an optimizer is one error on every rank, at every stage, if it would not train its module, was saved by another
class, or has hyperparameters that differ between ranks. At zero=0 this check adds no message to a step.
"""

import copy
import os
import tempfile

import internals
import numpy
import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
every_stage = pytest.mark.parametrize("zero", [0, 1, 2, 3])
one_copy = pytest.mark.parametrize("zero", [0])


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def wrap(zero, make=sgd, **options):
    torch.manual_seed(0)
    module = Mlp()
    return sw.wrap(module, make(module.parameters()), zero=zero, **options)


def backward(model, rank, step=0):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def train(model, optimizer, rank, steps=2):
    for step in range(steps):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def refused(call, match, kind=engine.Error):
    """Check that all ranks raise one sentence. On other ranks it is an Error, whatever the failing rank raises itself."""
    with pytest.raises((kind, engine.Error), match=match) as raised:
        call()
    assert same_everywhere(str(raised.value))
    return str(raised.value)


# made for something else ---------------------------------------------------------------------------------------------


@every_stage
@on_every_rank()
def test_made_before_the_module_had_memory(rank, world_size, zero):
    with torch.device("meta"):
        module = Mlp()
    optimizer = sgd(module.parameters())
    sw.materialize(module)
    refused(lambda: sw.wrap(module, optimizer, zero=zero), "meta device.*sw.materialize", ValueError)
    model = sw.wrap(module, zero=zero)  # nothing is left of it
    backward(model, rank)
    with pytest.raises(engine.Error, match=r"meta device.*sw.materialize"):
        optimizer.step()  # also where wrap has never seen it
    gather(None)


@every_stage
@on_every_rank()
def test_made_for_another_model(rank, world_size, zero):
    module, other = Mlp(), Mlp()
    match = "none of its 6 parameters is one of the wrapped Mlp" if zero == 0 else "is not one of the wrapped Mlp"
    refused(lambda: sw.wrap(module, sgd(other.parameters()), zero=zero), match, ValueError)
    model, optimizer = sw.wrap(module, sgd(module.parameters()), zero=zero)
    train(model, optimizer, rank)
    gather(None)


@every_stage
@on_every_rank(at_least=2)
def test_made_for_another_model_by_one_rank(rank, world_size, zero):
    module, other = Mlp(), Mlp()
    wrong = rank == world_size - 1
    given = sgd((other if wrong else module).parameters())
    refused(lambda: sw.wrap(module, given, zero=zero), "one of the wrapped Mlp", ValueError)
    model, optimizer = sw.wrap(module, sgd(module.parameters()), zero=zero)
    train(model, optimizer, rank)
    gather(None)


@on_every_rank()
def test_one_optimizer_of_two_modules(rank, world_size):
    first, second = Mlp(), Mlp()
    optimizer = sgd([*first.parameters(), *second.parameters()])
    models = [sw.wrap(each, optimizer)[0] for each in (first, second)]
    for step in range(2):
        for model in models:
            backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere([p.detach() for p in (*first.parameters(), *second.parameters())])


# made differently ----------------------------------------------------------------------------------------------------


@every_stage
@on_every_rank(at_least=2)
def test_what_differs_as_it_is_given_is_named(rank, world_size, zero):
    last = rank == world_size - 1
    for make, match in [
        (lambda p: sgd(p, lr=0.2 if last else 0.1), rf"group 0 has lr=0.1 on rank 0, lr=0.2 on rank {world_size - 1}"),
        (
            lambda p: torch.optim.Adam(p) if last else torch.optim.AdamW(p),
            "it has class=torch.optim.adamw.AdamW on rank 0",
        ),
        (
            lambda p: sgd(p, lr=numpy.float32(0.5 if last else 0.25)),
            rf"group 0 has lr=(np.float32\()?0.25\)? on rank 0, lr=(np.float32\()?0.5\)? on rank {world_size - 1}",
        ),
        (lambda p: sgd(reversed(list(p)) if last else list(p)), "group 0 holds other parameters on rank 0 and rank"),
        (lambda p: sgd([{"params": [each]} for each in p] if last else p), "group 0 holds other parameters"),
    ]:
        refused(lambda make=make: wrap(zero, make), f"ranks disagree about the optimizer: {match}")
    module = Mlp()
    given = (module,) if last else (module, sgd(module.parameters()))
    refused(lambda: sw.wrap(*given, zero=zero), "it has class=torch.optim.sgd.SGD on rank 0, class=no optimizer")
    model, optimizer = wrap(zero)
    train(model, optimizer, rank)
    gather(None)


@every_stage
@pytest.mark.parametrize("given", [True, False], ids=["given to wrap", "not given"])
@on_every_rank(at_least=2)
def test_a_learning_rate_that_comes_to_differ_is_named(rank, world_size, zero, given):
    if zero and not given:
        return  # a stock optimizer is refused there
    torch.manual_seed(0)
    module = Mlp()
    optimizer = sgd(module.parameters())
    if given:
        model, optimizer = sw.wrap(module, optimizer, zero=zero)
    else:
        model = sw.wrap(module)
    train(model, optimizer, rank)
    optimizer.param_groups[0]["lr"] = 0.1 / (rank + 1)

    def steps():
        train(model, optimizer, rank, 2)  # at zero=0 the backward after such a step tells

    sentence = refused(steps, r"ranks disagree about the optimizer: group 0 has lr=0.1 on rank 0, lr=0.05 on rank 1")
    assert ("begin again from a checkpoint" in sentence) == (zero == 0)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    train(model, optimizer, rank)  # each difference is told once
    gather(None)


@one_copy
@on_every_rank(at_least=2)
def test_several_optimizers_step_in_any_order(rank, world_size, zero):
    model = sw.wrap(Mlp())
    members = list(model.parameters())
    optimizers = [sgd(members[:2], lr=0.1), sgd(members[2:], lr=0.2)]
    for step in range(3):
        backward(model, rank, step)
        for each in optimizers if rank else reversed(optimizers):
            each.step()
            each.zero_grad()
    assert same_everywhere([p.detach() for p in members])
    gather(None)


@one_copy
@on_every_rank(at_least=2)
def test_a_difference_of_one_of_several_optimizers_is_named(rank, world_size, zero):
    model = sw.wrap(Mlp())
    members = list(model.parameters())
    optimizers = [sgd(members[:2], lr=0.1), sgd(members[2:], lr=0.2 + 0.1 * rank)]
    backward(model, rank)
    for each in optimizers:
        each.step()
    refused(lambda: backward(model, rank), r"ranks disagree about the optimizer: group 0 has lr=0.2 on rank 0, lr=0.3")


@one_copy
@on_every_rank(at_least=2)
def test_what_differed_in_an_earlier_step_is_told_all_the_same(rank, world_size, zero):
    model, optimizer = wrap(zero)
    train(model, optimizer, rank)
    backward(model, rank)
    optimizer.param_groups[0]["weight_decay"] = 0.1 * rank
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0
    optimizer.step()
    refused(
        lambda: backward(model, rank), "ranks disagree about the optimizer: it stepped with different hyperparameters"
    )


@one_copy
@on_every_rank()
def test_no_collective_is_added_to_a_step(rank, world_size, zero):
    def collectives():
        counts = sw.stats()["communicators"].values()
        return sum(c[name] for c in counts for name in ("all_reduce", "broadcast", "all_gather", "barrier"))

    model, optimizer = wrap(zero, bucket_cap_mb=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, rank)
    for step in range(3):
        before = collectives()
        train(model, optimizer, rank, 1)
        scheduler.step()
        assert collectives() - before == internals.reducer(model).bucket_count, step
    gather(None)


@one_copy
@on_every_rank(at_least=2)
def test_with_a_communication_hook_too(rank, world_size, zero):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model, optimizer = wrap(zero)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, optimizer, rank)
    optimizer.param_groups[0]["lr"] = 0.1 / (rank + 1)
    refused(lambda: train(model, optimizer, rank), "group 0 has lr=0.1 on rank 0, lr=0.05 on rank 1")


def trains_over_hosts(rank, world_size):
    model, optimizer = wrap(0)
    train(model, optimizer, rank)
    optimizer.param_groups[0]["lr"] = 0.1 / (rank + 1)
    with pytest.raises(engine.Error, match=r"group 0 has lr=0.1 on rank 0, lr=0.05 on rank 1"):
        train(model, optimizer, rank)


def test_over_hosts_too(hosts):
    with hosts(2, 1) as lab:
        lab.team.run(trains_over_hosts)


# saved by another class ----------------------------------------------------------------------------------------------


@every_stage
@on_every_rank()
def test_another_classs_state_is_not_loaded(rank, world_size, zero):
    for make, other in [
        (sgd, lambda p: torch.optim.AdamW(p, lr=1e-3)),
        (lambda p: torch.optim.AdamW(p), sgd),
        (lambda p: torch.optim.RMSprop(p), sgd),
        (lambda p: sw.optim.SGD(p, lr=0.1), lambda p: sw.optim.AdamW(p)),
        (lambda p: torch.optim.NAdam(p), lambda p: torch.optim.Adam(p)),
    ]:
        model, optimizer = wrap(zero, other)
        train(model, optimizer, rank)
        state = sw.full_optimizer_state_dict(model, optimizer)
        folder = gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]) + "/a")[0]
        sw.save(folder, model, optimizer)
        model, optimizer = wrap(zero, make)
        train(model, optimizer, rank)
        before = copy.deepcopy(optimizer.param_groups), sw.full_optimizer_state_dict(model, optimizer)
        name = type(make(Mlp().parameters())).__name__
        match = f"group 0 was saved by another optimizer than {name}: it has .* and lacks "
        refused(lambda o=optimizer, s=state: o.load_state_dict(s), match, ValueError)
        refused(lambda f=folder, m=model, o=optimizer: sw.load(f, m, o), match, engine.CheckpointError)
        after = sw.full_optimizer_state_dict(model, optimizer)
        assert str(optimizer.param_groups[0]["lr"]) == str(before[0][0]["lr"])
        for number, values in before[1]["state"].items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    assert bits_equal(value, after["state"][number][key])
        train(model, optimizer, rank)
        gather(None)


@every_stage
@on_every_rank()
def test_forms_of_one_class_load_one_anothers_state(rank, world_size, zero):
    def older(state):
        for group in state["param_groups"]:
            group.pop("fused", None)
            group.pop("decoupled_weight_decay", None)
            group["initial_lr"] = 0.5  # a scheduler's
        return state

    kinds = [
        lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        lambda p: torch.optim.AdamW([{"params": list(p), "name": "all"}], lr=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-3),
        lambda p: sw.optim.AdamW(p, lr=1e-3),
    ]
    for make in kinds:
        model, optimizer = wrap(zero, make)
        train(model, optimizer, rank, 1)
        state = older(sw.full_optimizer_state_dict(model, optimizer))
        for other in kinds:
            model, optimizer = wrap(zero, other)
            optimizer.load_state_dict(copy.deepcopy(state))
    gather(None)
