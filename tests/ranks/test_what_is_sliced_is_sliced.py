"""Laws of memory and misuse at zero >= 1: a rank holds what the plan says, a slice is never taken for the whole, and a
call that cannot work is one error on every rank.
"""

import copy

import internals
import pytest
import torch
from harness import gather, in_turn, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
every_stage = pytest.mark.parametrize("zero", [1, 2, 3])
sliced_gradients = pytest.mark.parametrize("zero", [2, 3])


def wrap(zero, build=Mlp, optimizer=None, **options):
    torch.manual_seed(0)
    module = build()
    made = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(module.parameters())
    return sw.wrap(module, made, zero=zero, **options)


def backward(model, rank, step=0):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def held_bytes(prefix):
    """Return the resident bytes of this process in mappings whose name begins with `prefix`."""
    total, counts = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and ":" not in words[0]:
                counts = len(words) > 5 and words[5].startswith(prefix)
            elif counts and words[0] == "Rss:":
                total += int(words[1]) * 1024
    return total


class Wide(nn.Sequential):
    """A model with 8 MiB of parameters."""

    def __init__(self):
        super().__init__(nn.Linear(7, 1024), *(nn.Linear(1024, 1024, bias=False) for _ in range(2)), nn.Linear(1024, 5))


@every_stage
@on_every_rank()
def test_a_rank_holds_a_share_of_the_state(rank, world_size, zero):
    model, optimizer = wrap(zero, build=Wide, bucket_cap_mb=1)
    backward(model, rank)
    optimizer.step()
    whole = sum(p.numel() for p in model.parameters())
    mine = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert sum(gather(mine)) == whole
    assert mine < whole / world_size * 1.3 + 128
    gather(None)


@sliced_gradients
@on_every_rank()
def test_gradients_are_a_ring_and_a_slice(rank, world_size, zero):
    model, _ = wrap(zero, build=Wide, bucket_cap_mb=1)
    for step in range(3):
        backward(model, rank, step)
        model.zero_grad()
    whole = sum(p.numel() for p in model.parameters()) * 4
    described = sw.describe()["models"][-1]
    ring = 3 * (4 << 20)  # a bucket holds the whole of the parameter that fills it
    assert described["gradient_bytes"] <= ring + whole / world_size * 1.05 + 4096
    if world_size > 1:
        assert all(p.grad is None for p in model.parameters())
    gather(None)


@on_every_rank(at_least=2)
def test_at_stage_3_the_host_has_one_copy(rank, world_size):
    before = held_bytes("/memfd:shardwright")
    model, optimizer = wrap(3, build=Wide)
    backward(model, rank)
    optimizer.step()
    marks = [p.data_ptr() for p in model.parameters()]
    assert len(set(marks)) == len(marks)
    weight = next(iter(model.parameters()))
    gather(None)
    if rank == 1:
        weight.data[0, 0] = 77.0
    gather(None)
    assert weight[0, 0].item() == 77.0
    assert held_bytes("/memfd:shardwright") > before
    gather(None)


@sliced_gradients
@on_every_rank()
def test_a_sliced_gradient_answers_norms_and_refuses_the_rest(rank, world_size, zero):
    whole, _ = wrap(0)
    model, optimizer = wrap(zero, bucket_cap_mb=0.001)
    backward(whole, rank)
    backward(model, rank)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad.shape == theirs.grad.shape and mine.grad.dtype == theirs.grad.dtype
        for order in (1, 2, 3.0, float("inf"), float("-inf"), 0):
            wanted = torch.linalg.vector_norm(theirs.grad, order)
            assert torch.allclose(torch.linalg.vector_norm(mine.grad, order), wanted, rtol=1e-6)
        assert torch.allclose(mine.grad.norm(), theirs.grad.norm(), rtol=1e-6)
    first = next(iter(model.parameters())).grad
    for misuse in (
        lambda: first + 1,
        lambda: first.view(-1),
        lambda: first[0],
        lambda: first.mul_(torch.ones(first.shape)),
        lambda: first.fill_(1),
        lambda: copy.deepcopy(first),
        lambda: first.add_(1),
        lambda: first.apply_(lambda x: x),  # torch's own reads memory that is not there
        lambda: first.map_(first, lambda x, y: x),
        lambda: torch.from_dlpack(first),
        lambda: setattr(first, "data", torch.zeros(first.shape)),
    ):
        with pytest.raises((engine.Error, RuntimeError, NotImplementedError)):
            misuse()
    with pytest.raises(engine.Error, match="full_gradients"):
        first.exp()
    assert "elements on this rank" in repr(first)
    before = sw.full_gradients(model)
    first.mul_(2)
    after = sw.full_gradients(model)
    assert bits_equal(next(iter(after.values())), next(iter(before.values())) * 2)
    gather(None)


@sliced_gradients
@on_every_rank()
def test_one_collective_gives_all_norms_of_a_round(rank, world_size, zero):
    model, _ = wrap(zero)
    comm = internals.comm(model)
    backward(model, rank)
    before = comm.stats()["all_gather"]
    first = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    asked = comm.stats()["all_gather"] - before
    again = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in model.parameters()]))
    assert torch.allclose(first, again, rtol=1e-6)
    assert comm.stats()["all_gather"] - before <= 2 * asked <= 8
    gather(None)


@every_stage
@on_every_rank()
def test_gradscaler_unchanged_skips_alike_on_every_rank(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        model, optimizer = wrap(stage, bucket_cap_mb=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(4):
            value = model(batch(rank, 6, 7, step=step)).square().mean()
            if step == 1 and rank == world_size - 1:
                value = value * float("inf")
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()] + [torch.tensor(scaler.get_scale())])
        gather(None)
    for mine, theirs in zip(*found, strict=True):
        assert bits_equal(mine, theirs)
        assert mine.isfinite().all()


@every_stage
@on_every_rank(at_least=2)
def test_hyperparameters_that_differ_are_named_on_every_rank(rank, world_size, zero):
    model, optimizer = wrap(zero)
    backward(model, rank)
    optimizer.param_groups[0]["lr"] = 0.5 if rank == 1 else 0.25
    with pytest.raises(engine.Error, match="lr=0.25 on rank 0, lr=0.5 on rank 1") as raised:
        optimizer.step()
    assert same_everywhere(str(raised.value))
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    gather(None)


def fail(optimizer, arguments, keywords):
    raise ValueError("on purpose")


@every_stage
@pytest.mark.parametrize(
    "options", [{}, {"partition": "tensor"}, {"share_parameters": False}], ids=["", "tensor", "private"]
)
@on_every_rank(at_least=2)
def test_a_rank_that_fails_in_its_step_is_news_to_all_and_the_next_step_is_clean(rank, world_size, zero, options):
    if "share_parameters" in options and zero < 3:
        return
    model, optimizer = wrap(zero, **options)
    for failing in ({1}, set(range(world_size))):
        backward(model, rank)
        if rank in failing:
            handle = optimizer._inner.register_step_pre_hook(fail)
            with pytest.raises(ValueError, match="on purpose"):
                optimizer.step()
            handle.remove()
        else:
            with pytest.raises(engine.Error, match="rank 1: the optimizer's step failed, .*: ValueError: on purpose"):
                optimizer.step()
        optimizer.zero_grad()
        with sw.full_parameters(model):
            assert same_everywhere([*model.parameters()])
        for step in range(2):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        with sw.full_parameters(model):
            assert same_everywhere([*model.parameters()])
    gather(None)


@every_stage
@on_every_rank(at_least=2, spoils=True)
def test_a_rank_that_is_interrupted_in_its_step_is_news_to_all(rank, world_size, zero):
    model, optimizer = wrap(zero)
    backward(model, rank)
    if rank == 1:

        def interrupt(*_):
            raise KeyboardInterrupt

        optimizer._inner.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    else:
        with pytest.raises(engine.CommError, match="rank 1 .*the optimizer's step was broken off: KeyboardInterrupt"):
            optimizer.step()


@every_stage
@on_every_rank()
def test_hyperparameters_out_of_range_end_a_step_and_not_the_training(rank, world_size, zero):
    model, optimizer = wrap(zero, optimizer=lambda p: sw.optim.AdamW(p, lr=1e-2))
    for lr in (1e-2, -1.0, 1e-2):
        optimizer.param_groups[0]["lr"] = lr
        before = [p.tolist() for p in model.parameters()]
        backward(model, rank)
        if lr < 0:
            with pytest.raises(ValueError, match="lr must be finite and at least 0, not -1"):
                optimizer.step()
        else:
            optimizer.step()
        assert (before == [p.tolist() for p in model.parameters()]) == (lr < 0)
        gather(None)
        optimizer.zero_grad()


@every_stage
@on_every_rank()
def test_what_cannot_be_is_refused(rank, world_size, zero):
    torch.manual_seed(0)
    module = Mlp()
    stock = torch.optim.SGD(module.parameters(), lr=0.1)
    model = sw.wrap(module, zero=zero)
    backward(model, rank)
    with pytest.raises(engine.Error, match="SGD steps on whole parameters"):
        stock.step()
    stranger = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not one of the wrapped Mlp"):
        sw.shard_optimizer(model, torch.optim.SGD([*module.parameters(), *stranger.parameters()], lr=0.1))
    with pytest.raises(ValueError, match="LBFGS steps on all parameters as one vector"):
        sw.shard_optimizer(model, torch.optim.LBFGS(module.parameters()))
    with pytest.raises(ValueError, match="LBFGS steps on all parameters as one vector"):
        sw.shard_optimizer(model, torch.optim.LBFGS(module.parameters()), partition="tensor")
    with pytest.raises(ValueError, match="partition must be"):
        sw.shard_optimizer(model, stock, partition="rows")
    optimizer = sw.shard_optimizer(model, stock)
    with pytest.raises(engine.Error, match="sliced already"):
        sw.shard_optimizer(model, optimizer)
    if world_size > 1:
        with pytest.raises(KeyError, match="param_groups"):  # a stock optimizer cannot take slices for the whole
            torch.optim.SGD(module.parameters(), lr=0.1).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    optimizer.step()
    module[0].weight.data = module[0].weight.data.clone()
    with pytest.raises(engine.Error, match="the data of parameter '0.weight' was replaced"):
        backward(model, rank)
    gather(None)


@on_every_rank()
def test_stages_out_of_range_are_refused(rank, world_size):
    for zero in (-1, 4, True, "2", None):
        with pytest.raises(ValueError, match="zero must be 0, 1, 2 or 3"):
            sw.wrap(nn.Linear(2, 2), zero=zero)
    with pytest.raises(engine.Error, match="zero >= 1"):
        model = sw.wrap(nn.Linear(2, 2))
        sw.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_every_rank(at_least=2)
def test_stages_that_differ_are_named(rank, world_size):
    with pytest.raises(engine.Error, match="zero") as raised:
        sw.wrap(nn.Linear(2, 2), zero=1 if rank else 2)
    assert same_everywhere(str(raised.value))


@sliced_gradients
@on_every_rank()
def test_a_gradient_that_is_not_averaged_yet_is_not_stepped_on(rank, world_size, zero):
    model, optimizer = wrap(zero)
    with model.no_sync():
        backward(model, rank)
    with pytest.raises(engine.Error, match="not averaged yet"):
        optimizer.step()


@every_stage
@on_every_rank()
def test_slices_come_back_at_the_same_rank(rank, world_size, zero):
    model, optimizer = wrap(zero)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    gather(None)
    finals = []
    for again in range(2):
        if again:
            model, optimizer = wrap(zero)
            with sw.full_parameters(model, writable=True):
                model.module.load_state_dict(weights)
            optimizer.load_state_dict(state)
        backward(model, rank, 5)
        optimizer.step()
        gather(None)
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(bits_equal(a, b) for a, b in zip(*finals, strict=True))
    gather(None)


@every_stage
@on_every_rank()
def test_parameters_are_written_inside_full_parameters(rank, world_size, zero):
    model, optimizer = wrap(zero)
    before = [p.detach().clone() for p in model.parameters()]
    with sw.full_parameters(model, writable=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert all(bits_equal(p, b * 2) for p, b in zip(model.parameters(), before, strict=True))
    backward(model, rank)
    optimizer.step()
    assert same_everywhere([*model.parameters()])
    gather(None)


@on_every_rank()
def test_shared_parameters_written_elsewhere_are_named(rank, world_size):
    model, _ = wrap(3)
    with torch.no_grad():
        model.module[2].bias.add_(1)
    with pytest.raises(engine.Error, match="'2.bias' was written to.*full_parameters"):
        backward(model, rank)
    gather(None)


@every_stage
@on_every_rank()
def test_a_parameter_unfrozen_later_is_stepped_on(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        torch.manual_seed(0)
        module = Mlp()
        module[2].requires_grad_(False)
        model, optimizer = sw.wrap(
            module, torch.optim.AdamW(module.parameters(), lr=1e-2), zero=stage, bucket_cap_mb=0.001
        )
        for step in range(4):
            if step == 2:
                module[2].requires_grad_(True)
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        gather(None)
        found.append([p.detach().clone() for p in module.parameters()])
    assert all(bits_equal(a, b) for a, b in zip(*found, strict=True))


@every_stage
@on_every_rank()
def test_closures_groups_and_step_hooks(rank, world_size, zero):
    found = []
    for stage in (0, zero):
        torch.manual_seed(0)
        module = Mlp()
        optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.9)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("user"))
        model, optimizer = sw.wrap(module, optimizer, zero=stage)
        optimizer.add_param_group({"params": [*module[2].parameters(), *module[4].parameters()], "lr": 0.05})

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            value = model(batch(rank, 6, 7)).square().mean()
            value.backward()
            return value

        values = [optimizer.step(closure).item() for _ in range(3)]
        assert calls == ["user"] * 3
        gather(None)
        found.append((values, [p.tolist() for p in module.parameters()]))
    assert found[0] == found[1]


@on_every_rank()
def test_whole_parameters_are_taken_and_norms_asked_of_this_rank_alone(rank, world_size):
    torch.manual_seed(3)
    state = {name: value.clone() for name, value in Mlp().state_dict().items()}
    stages = ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False})
    for stage in stages if world_size > 1 else in_turn(stages, 1):
        model, optimizer = wrap(build=Mlp, **stage)
        sw.load_full_state_dict(model, state)
        found = sw.full_state_dict(model)
        assert found.keys() == state.keys() and all(bits_equal(found[name], value) for name, value in state.items())
        with pytest.raises(sw.Error, match="the state lacks '0.weight'"):
            sw.load_full_state_dict(model, {})
        assert sw.local_norms(model) == {}
        backward(model, rank)
        mine = sw.local_norms(model) if rank == world_size - 1 else None
        mine = sw.local_norms(model) if mine is None else mine  # no peer is needed
        total = sum(value**2 for value in mine.values())
        total = sum(gather(total)) if stage["zero"] else total
        assert total**0.5 == pytest.approx(sw.clip_grad_norm_(model, 1e9).item(), rel=1e-6)
        optimizer.step()
        gather(None)


@on_every_rank()
def test_frozen_parameters_have_no_gradient_and_no_state_bytes(rank, world_size):
    frozen_bytes = 2 * 2048 * 2048 * 4
    stages = ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False})
    for stage in (
        None,
        *(stages if world_size > 1 else in_turn(stages, 1)),
    ):  # None: what torch itself takes at first use
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(7, 2048), *(nn.Linear(2048, 2048, bias=False) for _ in range(2)), nn.Linear(2048, 5)
        )
        for inner in (module[1], module[2]):
            inner.weight.requires_grad_(False)
            inner.adapter = nn.Parameter(torch.zeros(2048, 2))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        model, optimizer = (module, optimizer) if stage is None else sw.wrap(module, optimizer, **stage)
        before = held_bytes("")
        for step in range(2):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        assert module[1].weight.grad is None
        state = sum(v.nbytes for each in optimizer.state.values() for v in each.values() if torch.is_tensor(v))
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        assert state <= 2 * trained + 64
        if (
            stage is not None and stage["zero"] < 3
        ):  # there parameters themselves come and go, or are touched first by whoever reads them
            assert held_bytes("") - before < frozen_bytes / 4, (stage, held_bytes("") - before)
        gather(None)


@on_every_rank()
def test_what_is_given_wrongly_is_said_before_anything_changes(rank, world_size):
    module, other = Mlp(), nn.Linear(2, 2)
    places = [p.data_ptr() for p in module.parameters()]
    sgd = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.1)
    for options, kind, words in [
        ({"optimizer": sgd, "zero": 1}, ValueError, r"shape \(2, 2\) in group 0 is not one of the wrapped Mlp"),
        (
            {"optimizer": sgd, "clip_grad_norm": "1"},
            TypeError,
            "clip_grad_norm must be None or a number above 0, got '1'",
        ),
        (
            {"optimizer": sgd, "clip_grad_norm": True},
            TypeError,
            "clip_grad_norm must be None or a number above 0, got True",
        ),
        ({"zero": 1.0}, ValueError, "zero must be 0, 1, 2 or 3, got 1.0"),
        ({"zero": 3, "share_parameters": 0}, ValueError, "share_parameters must be 'auto', True or False, got 0"),
    ]:
        with pytest.raises(kind, match=words):
            sw.wrap(module, **options)
    with pytest.raises(ValueError, match="zero must be 0, 1, 2 or 3, got 5"):
        sw.DistributedDataParallel(module, zero=5)
    assert [p.data_ptr() for p in module.parameters()] == places
    gather(None)
