"""Law of uneven inputs where state is sliced: a rank that ran out contributes nothing and goes on updating its slices, so that losses,
parameters and optimizer state are those of stage 0 and of the naive loop in which every rank takes every step."""

import copy

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Heads, Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn
from torch.distributed.algorithms.join import Join

pytestmark = pytest.mark.skipif(PEER == "torch", reason="no peer has it")

ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731


def turns(rank):
    """Rank r has 2 + 2 r inputs."""
    return range(2 + 2 * rank)


def loss_of(model, rank, step):
    return model(batch(rank, 6, 7, step=step)).square().mean()


def plain(model, optimizer, rank):
    for step in turns(rank):
        yield loss_of(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_ours(model, optimizer, rank):
    for step in turns(rank):
        yield loss_of(model, rank, step)
        sw.clip_grad_norm_(model, 0.02)
        optimizer.step()
        optimizer.zero_grad()


def clipped_by_torch(model, optimizer, rank):
    for step in turns(rank):
        yield loss_of(model, rank, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()


def scaled_by_hand(model, optimizer, rank):
    for step in turns(rank):
        yield loss_of(model, rank, step)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
            parameter.grad.div_(3.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def accumulated_inside_no_sync(model, optimizer, rank):
    for step in turns(rank):
        with model.no_sync():
            yield loss_of(model, rank, step + 50)
        yield loss_of(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def accumulated_onto_the_average(model, optimizer, rank):
    for step in turns(rank):
        yield loss_of(model, rank, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def scheduled(model, optimizer, rank):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in turns(rank):
        yield loss_of(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def with_hyperparameters_of_every_kind(model, optimizer, rank):
    for step in turns(rank):
        yield loss_of(model, rank, step)
        optimizer.param_groups[0].update(betas=(0.8 + step / 100, 0.99), weight_decay=step / 10)
        optimizer.step()
        optimizer.zero_grad()


TRAININGS = [
    plain, clipped_by_ours, clipped_by_torch, scaled_by_hand, accumulated_inside_no_sync, accumulated_onto_the_average, scheduled,
    with_hyperparameters_of_every_kind,
]  # fmt: skip


def run(rank, world_size, zero, training, build=Mlp, optimizer=ADAMW, initial=True, join=None, **options):
    """Losses of this rank, parameters, and the whole optimizer state as the rank that trained longest has it."""
    torch.manual_seed(0)
    module = build()
    model, made = sw.wrap(module, optimizer(module.parameters()), zero=zero, **options)
    losses = []
    context = join([model]) if join else model.join(divide_by_initial_world_size=initial)
    with context:
        for loss in training(model, made, rank):
            loss.backward()
            losses.append(loss.item())
    state = copy.deepcopy(sw.full_optimizer_state_dict(model, made))
    with sw.full_parameters(model):
        parameters = [p.detach().clone() for p in module.parameters()]
    gather(None)
    return losses, parameters, gather(state)[-1]


def assert_same(found, expected, exact=True):
    def same(a, b):
        if not isinstance(a, torch.Tensor):
            return a == b
        return bits_equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-6)

    assert found[0] == expected[0] or not exact, (found[0], expected[0])
    assert all(same(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert found[2]["param_groups"] == expected[2]["param_groups"]
    assert found[2]["state"].keys() == expected[2]["state"].keys()
    for position, entry in expected[2]["state"].items():
        assert all(same(found[2]["state"][position][key], value) for key, value in entry.items()), position


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
@on_every_rank()
def test_every_training_has_the_bits_of_stage_0(rank, world_size, training):
    expected = run(rank, world_size, 0, training, bucket_cap_mb=0.001)
    assert same_everywhere([*expected[1]])
    for zero in (1, 2, 3):
        private = {"share_parameters": False, "units": nn.Linear} if zero == 3 else {"transport": "staged"}
        for options in ({"bucket_cap_mb": 0.001}, {}, private):
            found = run(rank, world_size, zero, training, **options)
            assert_same(found, expected, exact=training is not clipped_by_torch)
            assert same_everywhere([*found[1]])


@pytest.mark.parametrize("initial", [True, False], ids=["over all ranks", "over active ranks"])
@on_every_rank()
def test_the_naive_loop_has_the_same_bits(rank, world_size, initial):
    torch.manual_seed(0)
    naive = NaiveDataParallel(Mlp())
    optimizer = ADAMW(naive.module.parameters())
    for step in turns(world_size - 1):
        active = step in turns(rank)
        if active:
            loss_of(naive, rank, step).backward()
        naive.synchronise(active=active, over_active=not initial)
        optimizer.step()
        optimizer.zero_grad()
    for zero in (0, 1, 2, 3):
        found = run(rank, world_size, zero, plain, initial=initial, bucket_cap_mb=0.001)
        for mine, theirs in zip(found[1], naive.module.parameters(), strict=True):
            assert bits_equal(mine, theirs), zero
        for position, entry in optimizer.state_dict()["state"].items():
            assert all(bits_equal(found[2]["state"][position][key], value) for key, value in entry.items())


def some_heads(model, optimizer, rank):
    """What nobody uses any more keeps its gradient, cleared in both ways, or none."""
    for step in turns(rank):
        heads = "left" if step > 1 else "left right"
        yield model(batch(rank, 6, 7, step=step), heads)
        optimizer.step()
        if step != 2:
            optimizer.zero_grad(set_to_none=step == 3)


@on_every_rank()
def test_parameters_that_those_who_train_leave_unused(rank, world_size):
    expected = run(rank, world_size, 0, some_heads, build=Heads)
    for zero in (1, 2, 3):
        assert_same(run(rank, world_size, zero, some_heads, build=Heads, bucket_cap_mb=0.0005), expected)


@on_every_rank()
def test_a_scaler_of_torch_scales_and_skips_as_at_stage_0(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        torch.manual_seed(0)
        module = Mlp()
        model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=zero, bucket_cap_mb=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scales = []
        with model.join():
            for step in turns(rank):
                huge = 1e36 if step == 3 and rank == world_size - 1 else 1.0
                scaler.scale(loss_of(model, rank, step) * huge).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e4)  # far above: a norm alone
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        found.append((scales, [p.detach().clone() for p in module.parameters()]))
        gather(None)
    for zero, (scales, parameters) in enumerate(found):
        assert scales == found[0][0], zero
        assert all(bits_equal(a, b) for a, b in zip(parameters, found[0][1], strict=True)), zero


@on_every_rank()
def test_a_rank_without_any_input_and_training_afterwards(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        torch.manual_seed(0)
        module = Mlp()
        model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=zero)
        for turn in range(2):
            steps = 0 if rank == 0 and world_size > 1 else 2 + rank + turn
            with Join([model]) if turn else model.join():
                for step in range(steps):
                    loss_of(model, rank, 10 * turn + step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            model.zero_grad()
            if zero:  # at stage 0 the optimizers of ranks that ran out are behind
                loss_of(model, rank, 10 * turn + 9).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert same_everywhere([*module.parameters()])
                found.append((zero, turn, [p.detach().clone() for p in module.parameters()]))
        gather(None)
    for zero, turn, parameters in found:
        assert all(bits_equal(a, b) for a, b in zip(parameters, found[turn][2], strict=True)), (zero, turn)


@on_every_rank()
def test_closures_and_several_optimizers(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        torch.manual_seed(0)
        module = Mlp()
        lower, upper = [*module[0].parameters()], [*module[2].parameters(), *module[4].parameters()]
        model, one = sw.wrap(module, torch.optim.SGD(lower, lr=0.1, momentum=0.9), zero=zero)
        two = torch.optim.Adam(upper, lr=1e-2)
        two = sw.shard_optimizer(model, two) if zero else two
        losses = []
        with model.join():
            for step in turns(rank):

                def closure(step=step, model=model):
                    model.zero_grad()
                    loss = loss_of(model, rank, step)
                    loss.backward()
                    return loss

                losses.append(two.step(closure).item())
                if step % 2:
                    one.step()
        found.append((losses, [p.detach().clone() for p in module.parameters()]))
        gather(None)
    for zero, (losses, parameters) in enumerate(found):
        assert losses == found[0][0], zero
        assert all(bits_equal(a, b) for a, b in zip(parameters, found[0][1], strict=True)), zero


@on_every_rank()
def test_a_join_that_is_not_enabled_announces_nothing(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=2)
    with model.join(enable=False):
        loss_of(model, rank, 0).backward()
        sw.clip_grad_norm_(model, 0.02)
        optimizer.step()
    assert same_everywhere([*module.parameters()])
    gather(None)


@on_every_rank(at_least=2, spoils=True)
def test_ranks_that_come_to_different_things_are_told(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=2, timeout_s=20)
    with pytest.raises(
        sw.Error, match="ranks disagree inside join: rank 0 comes to clipping by the norm, rank 1 to a step"
    ):  # noqa: PT012
        with model.join():
            loss_of(model, rank, 0).backward()
            if rank == 0:
                sw.clip_grad_norm_(model, 0.02)
            optimizer.step()


@on_every_rank(at_least=2, spoils=True)
def test_several_modules_in_one_join_are_refused(rank, world_size):
    torch.manual_seed(0)
    models = [sw.wrap(module, ADAMW(module.parameters()), zero=1)[0] for module in (Mlp(), nn.Linear(7, 3))]
    with pytest.raises(NotImplementedError, match="join each by itself"):  # noqa: PT012
        with Join(models):
            for model in models:
                loss_of(model, rank, 0).backward()
