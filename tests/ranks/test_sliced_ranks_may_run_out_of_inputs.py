"""Law of uneven inputs with sliced state: a rank without inputs contributes nothing and continues to update its slices.
Losses, parameters and optimizer state are those of stage 0, and of the naive loop in which every rank takes every step.
"""

import copy
import os

import pytest
import torch
from harness import gather, in_turn, on_every_rank, same_everywhere
from internals import Writer
from models import Heads, Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn
from torch.distributed.algorithms.join import Join

pytestmark = pytest.mark.skipif(PEER == "torch", reason="no peer has it")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731


def turns(rank):
    """Return the inputs of a rank: 2 + 2 * rank of them."""
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
    """Return this rank's losses, the parameters, and the whole optimizer state of the rank that trained longest."""
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
        for options in in_turn(({"bucket_cap_mb": 0.001}, private, {}), zero + TRAININGS.index(training), of=3):
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
    for zero in in_turn((0, 1, 2, 3), int(initial)):
        found = run(rank, world_size, zero, plain, initial=initial, bucket_cap_mb=0.001)
        for mine, theirs in zip(found[1], naive.module.parameters(), strict=True):
            assert bits_equal(mine, theirs), zero
        for position, entry in optimizer.state_dict()["state"].items():
            assert all(bits_equal(found[2]["state"][position][key], value) for key, value in entry.items())


def some_heads(model, optimizer, rank):
    """A parameter that no rank uses any more keeps its gradient (cleared in either way), or has none."""
    for step in turns(rank):
        heads = "left" if step > 1 else "left right"
        yield model(batch(rank, 6, 7, step=step), heads)
        optimizer.step()
        if step != 2:
            optimizer.zero_grad(set_to_none=step == 3)


@on_every_rank()
def test_parameters_that_those_who_train_leave_unused(rank, world_size):
    expected = run(rank, world_size, 0, some_heads, build=Heads)
    for zero in in_turn((1, 2, 3), 0):
        assert_same(run(rank, world_size, zero, some_heads, build=Heads, bucket_cap_mb=0.0005), expected)


@on_every_rank()
def test_a_scaler_of_torch_scales_and_skips_as_at_stage_0(rank, world_size):
    found = []
    for zero in (0, *in_turn((1, 2, 3), 1)):
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
    for zero in (0, *in_turn((1, 2, 3), 0)):
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
    for zero in (0, *in_turn((1, 2, 3), 0)):
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
        sw.Error, match="ranks disagree inside join: rank 0 comes to clipping by the norm of Mlp, rank 1 to a step"
    ):  # noqa: PT012
        with model.join():
            loss_of(model, rank, 0).backward()
            if rank == 0:
                sw.clip_grad_norm_(model, 0.02)
            optimizer.step()


@on_every_rank(at_least=2, spoils=True)
def test_a_gradient_that_one_rank_alone_reads_inside_a_join_is_told(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=2, timeout_s=20)
    with pytest.raises(
        sw.Error,
        match="inside join: rank 0 comes to a read of a whole gradient of Mlp, rank 1 to a step of an optimizer",
    ):  # noqa: PT012
        with model.join():
            loss_of(model, rank, 0).backward()
            if rank == 0:
                module[0].weight.grad.mean()
            optimizer.step()


@on_every_rank(at_least=2)
def test_what_is_read_of_gradients_inside_a_join_is_that_of_stage_0(rank, world_size):
    found = []
    for zero in (0, 2, 3):
        torch.manual_seed(0)
        module = Mlp()
        model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=zero, bucket_cap_mb=0.001)
        reads = []
        with model.join():
            for step in turns(rank):
                loss_of(model, rank, step).backward()
                for parameter in module.parameters():
                    parameter.grad.mul_(0.5)
                    reads += [parameter.grad.mean().item(), parameter.grad.abs().max().item(), parameter.grad.tolist()]
                if zero and step == 0:
                    with pytest.raises(sw.Error, match=r"full_gradients is collective, and inside join .* ran out"):
                        sw.full_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
        found.append(reads)
        gather(None)
    assert found[1] == found[0] and found[2] == found[0]


STAGES = [(1, 1), (2, 3), (0, 2), (3, 0)]


def one_step(model, optimizer, rank, step, losses):
    width = 7 if isinstance(model.module, Mlp) else 6
    with torch.no_grad():
        model(batch(rank, 6, width))
    value = model(batch(rank, 6, 7, step=step)[..., :width]).square().mean()
    value.backward()
    losses.append(value.item())
    sw.clip_grad_norm_(model, 0.05)
    optimizer.step()
    optimizer.zero_grad()


def two_modules(rank, stages, together, private=False):
    """Two models, each with its own forward, backward and step, the second every other time; in one Join, or in two in
    turn.
    """
    torch.manual_seed(0)
    modules = [Mlp(), nn.Linear(6, 3)]
    options = [{"share_parameters": False, "units": nn.Linear} if private and zero == 3 else {} for zero in stages]
    pairs = [
        sw.wrap(module, ADAMW(module.parameters()), zero=zero, bucket_cap_mb=0.001, **more)
        for module, zero, more in zip(modules, stages, options)
    ]
    losses = [[], []]
    if together:
        with Join([model for model, _ in pairs]):
            for step in turns(rank):
                for which in range(1 + step % 2):
                    one_step(*pairs[which], rank, step, losses[which])
    else:
        for which in range(2):
            with Join([pairs[which][0]]):
                for step in turns(rank):
                    if which == 0 or step % 2:
                        one_step(*pairs[which], rank, step, losses[which])
    found = []
    for model, _ in pairs:
        with sw.full_parameters(model):
            found += [p.detach().clone() for p in model.parameters()]
    assert same_everywhere([p.tolist() for p in found])
    states = [copy.deepcopy(sw.full_optimizer_state_dict(*pair)["state"]) for pair in pairs]
    gather(None)
    return losses, found, gather(states)[-1]


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
@pytest.mark.parametrize("stages", STAGES)
@on_every_rank()
def test_several_modules_in_one_join_have_the_bits_of_stage_0_one_after_the_other(rank, world_size, stages, private):
    losses, parameters, states = two_modules(rank, (0, 0), together=False)
    mine = two_modules(rank, stages, together=True, private=private)
    assert mine[0] == losses
    assert all(bits_equal(a, b) for a, b in zip(mine[1], parameters, strict=True))
    for theirs, expected in zip(mine[2], states, strict=True):
        for position, entry in expected.items():
            assert all(bits_equal(theirs[position][key], value) for key, value in entry.items())


@on_every_rank()
def test_several_modules_in_one_join_have_the_bits_of_the_naive_loop(rank, world_size):
    torch.manual_seed(0)
    pairs = [(naive, ADAMW(naive.module.parameters())) for naive in map(NaiveDataParallel, (Mlp(), nn.Linear(6, 3)))]
    for step in turns(world_size - 1):
        for naive, optimizer in pairs[: 1 + step % 2]:
            if step in turns(rank):
                x = batch(rank, 6, 7, step=step)
                naive(x if naive is pairs[0][0] else x[..., :6]).square().mean().backward()
            naive.synchronise(active=step in turns(rank), over_active=False)
            torch.nn.utils.clip_grad_norm_(naive.module.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    _, parameters, _ = two_modules(rank, (2, 3), together=True)
    expected = [p for naive, _ in pairs for p in naive.module.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(parameters, expected, strict=True))


@on_every_rank(at_least=2, spoils=True)
def test_forwards_of_several_modules_before_one_backward_are_named_once_a_rank_has_joined(rank, world_size):
    torch.manual_seed(0)
    lower, upper = (
        sw.wrap(module, ADAMW(module.parameters()), zero=1, timeout_s=20)[0] for module in (Mlp(), nn.Linear(5, 3))
    )
    with pytest.raises(sw.Error, match="a forward begins before the backward of the last forward of Mlp"):  # noqa: PT012
        with Join([lower, upper]):
            for step in turns(rank):
                upper(lower(batch(rank, 6, 7, step=step))).square().mean().backward()


@on_every_rank()
def test_a_join_that_begins_with_a_module_of_torch_is_refused(rank, world_size):
    torch.manual_seed(0)
    ours = sw.wrap(Mlp(), zero=1)
    theirs = nn.parallel.DistributedDataParallel(nn.Linear(7, 3))
    with pytest.raises(NotImplementedError, match="begins with a module that shardwright wrapped"):  # noqa: PT012
        with Join([theirs, ours]):
            ours(batch(rank, 6, 7))
    theirs._join_config = ours._join_config = type(ours._join_config).construct_disabled_join_config()
    gather(None)


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_a_forward_without_gradients_inside_a_join_has_no_round(rank, world_size, zero):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=zero, timeout_s=20)
    with model.join():
        for step in turns(rank):
            with torch.no_grad():
                model(batch(rank, 6, 7))
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same_everywhere([p.tolist() for p in module.parameters()])
    gather(None)


@pytest.mark.parametrize("zero", [1, 2, 3])
@on_every_rank(at_least=2)
def test_a_lazy_save_has_read_a_slice_before_a_rank_without_inputs_steps_on_it(rank, world_size, zero):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, ADAMW(module.parameters()), zero=zero)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    slices = [state["exp_avg"] for state in optimizer.state.values()]
    read, protect = [], Writer.protect

    def reading(writer, *_):
        read.append([each.clone() for each in slices])
        protect(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "protect", reading)  # the Checkpointer takes it once
        saves = sw.Checkpointer(
            os.path.join(os.environ["SW_TEST_FOLDER"], f"lazy-{zero}"), model, optimizer, snapshot="lazy"
        )
    with saves:
        saved = [each.clone() for each in slices]
        saves.save(0)
        with model.join():
            for step in range(rank * 2):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(read) == 2 * (world_size - 1) + 1  # steps, and the end of the join
        assert all(map(bits_equal, read[0], saved))
        saves.wait()
    gather(None)
