"""Law of check_every: a parameter that differs on one rank, or a gradient that is not finite on one rank, is an error
on all ranks that names both rank and parameter, before a checked step. A run without a fault has the bits of one
without the check.
"""

import copy
import os
import tempfile

import internals
import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from internals import is_finite
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = {
    "0": {"zero": 0},
    "0 compressed": {"zero": 0, "transport": "staged", "compress": sw.Fp16() if sw else None},
    "1": {"zero": 1, "bucket_cap_mb": 0.001},
    "2": {"zero": 2},
    "3 private": {"zero": 3, "share_parameters": False, "units": nn.Linear},
    "3": {"zero": 3},
}


def wrapped(options, dtype=torch.float32, every=2, kind=torch.optim.AdamW):
    torch.manual_seed(0)
    module = Mlp().to(dtype)
    return sw.wrap(module, kind(module.parameters(), lr=1e-2), check_every=every, **options)


def step(model, optimizer, rank, number):
    model(batch(rank, 6, 7, step=number).to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    with sw.full_parameters(model):
        return [p.detach().clone() for p in sw.unwrap(model).parameters()]


def flip_a_bit(parameter, index):
    """Flip one bit of one value without torch's knowledge."""
    parameter.data.view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1 << 3)


@pytest.mark.parametrize("stages", [("0", "0 compressed", "1", "2")], ids=["all"])
@on_every_rank()
def test_a_flipped_bit_is_named_before_the_next_checked_step(rank, world_size, stages):
    if world_size == 1:
        return
    for options in map(STAGES.__getitem__, stages):
        model, optimizer = wrapped(options)
        for number in range(3):
            step(model, optimizer, rank, number)
        parameter = dict(sw.unwrap(model).named_parameters())["2.weight"]
        bad, at = 1, 0 if options["zero"] == 0 else parameter.numel() - 1
        if rank == bad:
            flip_a_bit(parameter, at)
        if options["zero"] == 0:
            step(model, optimizer, rank, 3)  # is not checked; at zero >= 1 it would publish the owner's value
        else:
            internals.replica(model).check._steps += 1
        with pytest.raises(
            engine.Error,
            match="the replicas of Mlp differ 4 steps after the start of these ranks: parameter '2.weight'",
        ) as caught:
            step(model, optimizer, rank, 4)
        if world_size > 2:
            agree = world_size - 1
            assert f"of rank {bad} has other values than on {agree} ranks, which agree" in str(caught.value), options
        else:
            assert "of rank 0 and of rank 1 have other values" in str(caught.value)
        assert same_everywhere(str(caught.value))
        gather(None)


@pytest.mark.parametrize("stages", [tuple(STAGES)], ids=["all"])
@on_every_rank()
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(rank, world_size, stages):
    bad = world_size - 1
    for options in map(STAGES.__getitem__, stages):
        model, optimizer = wrapped(options)
        for number in range(2):
            step(model, optimizer, rank, number)
        x = batch(rank, 6, 7, step=2)
        x[3, 2] = float("nan") if rank == bad else x[3, 2]
        model(x).square().mean().backward()
        with pytest.raises(
            engine.Error,
            match=rf"Mlp, 2 steps after the start of these ranks: the averaged .* finite: rank {bad} brought .*'0.weight'",
        ) as caught:
            optimizer.step()
        assert same_everywhere(str(caught.value)), options
        optimizer.zero_grad()
        step(model, optimizer, rank, 3)  # the next batch is sound, and training goes on
        assert same_everywhere(whole(model)) and all(p.isfinite().all() for p in whole(model)), options
        gather(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_every_rank()
def test_a_check_of_a_sound_run_changes_no_bit(rank, world_size, dtype):
    for options in STAGES.values():
        found = []
        for every in (None, 1):
            model, optimizer = wrapped(options, dtype, every)
            for number in range(3):
                with model.no_sync():
                    model(batch(rank, 6, 7, step=7 + number).to(dtype)).sum().backward()
                step(model, optimizer, rank, number)
            found.append(whole(model))
        assert all(map(bits_equal, *found)), options
        gather(None)


@on_every_rank()
def test_overflowed_losses_that_a_scaler_skips_are_no_error(rank, world_size):
    for options in (STAGES["0"], STAGES["2"]):
        model, optimizer = wrapped(options, every=1)
        before = whole(model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(batch(rank, 6, 7)).square().mean() * (float("inf") if rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(map(bits_equal, whole(model), before)), options
        step(model, optimizer, rank, 1)
        assert same_everywhere(whole(model)), options
        gather(None)


@on_every_rank()
def test_hyperparameters_that_differ_are_still_named_as_such(rank, world_size):
    model, optimizer = wrapped(STAGES["0"], every=1)
    step(model, optimizer, rank, 0)
    optimizer.param_groups[0]["lr"] = 0.5 if rank == 0 else 0.1
    step(model, optimizer, rank, 1)
    if world_size > 1:
        with pytest.raises(engine.Error, match="ranks disagree about the optimizer: group 0 has lr=0.5"):
            step(model, optimizer, rank, 2)


@on_every_rank()
def test_a_sound_run_goes_on_after_an_uneven_join(rank, world_size):
    for options in (STAGES["0"], STAGES["1"]):
        model, optimizer = wrapped(options, kind=torch.optim.SGD)  # of AdamW joined ranks keep other moments
        for _ in range(2):
            with model.join():
                for number in range(2 + rank):
                    step(model, optimizer, rank, number)
            for number in range(3):
                step(model, optimizer, rank, number)
        assert same_everywhere(whole(model)), options
        gather(None)


@on_every_rank()
def test_optimizers_of_one_round_are_checked_together(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model = sw.wrap(module, zero=1, check_every=2)
    parts = [list(module[0].parameters()), list(module[2].parameters())]
    optimizers = [sw.shard_optimizer(model, torch.optim.SGD(part, lr=0.1)) for part in parts]
    for bad in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch(rank, 6, 7, step=bad)).square().mean()
        (loss + module[2].bias.sum() * (float("nan") if bad == 2 else 0.0)).backward()
        optimizers[0].step()
        if bad < 2:
            optimizers[1].step()
    with pytest.raises(engine.Error, match=r"Mlp, 2 steps after .* rank 0 brought that of parameter '2\.bias'"):
        optimizers[1].step()


@pytest.mark.parametrize("zero", [0, 1])
@on_every_rank()
def test_optimizers_that_step_in_turns_are_all_checked(rank, world_size, zero):
    """Each counts its own steps. Otherwise, with an even check_every, one of two would never step in a checked one."""
    torch.manual_seed(0)
    module = Mlp()
    model = sw.wrap(module, zero=zero, check_every=2)
    parts = [list(module[0].parameters()), list(module[2].parameters())]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    optimizers = [sw.shard_optimizer(model, each) if zero else each for each in optimizers]

    def turn(number, bad=False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch(rank, 6, 7, step=number)).square().mean()
        (loss + module[2].bias.sum() * (float("nan") if bad and rank == world_size - 1 else 0.0)).backward()
        optimizers[number % 2].step()

    for number in range(5):
        turn(number)
    with pytest.raises(
        engine.Error, match=rf"averaged gradient .* rank {world_size - 1} brought that of parameter '2\.bias'"
    ):
        turn(5, bad=True)  # the third step of the second optimizer


@pytest.mark.parametrize("zero", [0, 1])
@on_every_rank()
def test_a_gradient_that_is_not_finite_beside_a_joined_rank_holds_no_rank_up(rank, world_size, zero):
    model, optimizer = wrapped({"zero": zero}, every=1, kind=torch.optim.SGD)
    with model.join():
        for number in range(2 if rank == 0 else 4):
            x = batch(rank, 6, 7, step=number)
            x[0, 0] = float("nan") if number == 3 and rank == 1 else x[0, 0]
            model(x).square().mean().backward()
            if zero == 0 and number == 3 and world_size > 1:
                with pytest.raises(engine.Error, match="averaged gradient is not finite: rank") as caught:
                    optimizer.step()
                assert ("rank 1 brought those of '0.weight'" in str(caught.value)) is (rank == 1), str(caught.value)
            else:
                optimizer.step()
            optimizer.zero_grad()
    gather(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@on_every_rank()
def test_finite_values_whose_sum_overflows_are_finite(rank, world_size, dtype):
    largest = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    assert bool(is_finite(largest)) and not bool(is_finite(largest * 2))


@on_every_rank()
def test_a_save_never_stores_replicas_that_differ(rank, world_size):
    for options in (STAGES["0"], STAGES["1"]):
        model, optimizer = wrapped(options, every=100)
        with sw.Checkpointer(gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0], model, optimizer) as saver:
            step(model, optimizer, rank, 0)
            saver.save(0)
            step(model, optimizer, rank, 1)
            if rank == 0:
                flip_a_bit(sw.unwrap(model)[0].weight, 5)
            if world_size > 1:
                with pytest.raises(engine.Error, match="the replicas of Mlp differ 2 steps after .* '0.weight'"):
                    saver.save(1)
                assert saver.steps() == [1]
        gather(None)


@pytest.mark.parametrize("kept", [None, 1], ids=["disk", "memory"])
@on_every_rank()
def test_a_save_never_stores_optimizer_state_that_differs(rank, world_size, kept):
    """A flipped gradient bit changes moments. With a small learning rate no parameter shows it for many steps."""
    model, optimizer = wrapped(STAGES["0"], every=100)
    folder = gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0]
    with sw.Checkpointer(folder, model, optimizer, memory_every=kept) as saver:
        step(model, optimizer, rank, 0)
        saver.save(0)
        saver.wait()
        step(model, optimizer, rank, 1)
        bad = world_size - 1
        if rank == bad:
            flip_a_bit(optimizer.state[sw.unwrap(model)[2].weight]["exp_avg"], 5)
        assert same_everywhere(whole(model))
        if world_size > 1:
            words = "the replicas of Mlp differ 2 steps after .* the optimizer's state for parameter '2.weight' of rank"
            with pytest.raises(engine.Error, match=words) as caught:
                saver.save(1, every=1 if kept is None else 7)  # memory takes each step, the disk not this one
            assert world_size == 2 or f"of rank {bad} has other values than on {bad} ranks" in str(caught.value)
            assert same_everywhere(str(caught.value)) and saver.steps() == [1]
            assert saver.restore() == 1
            step(model, optimizer, rank, 1)
            assert saver.save(1, every=1)
            assert same_everywhere([each["exp_avg"].sum().item() for each in optimizer.state.values()])


@on_every_rank()
def test_optimizer_state_that_a_join_left_unequal_is_saved(rank, world_size):
    model, optimizer = wrapped(STAGES["0"], every=100)
    with sw.Checkpointer(gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0], model, optimizer) as saver:
        with model.join():
            for number in range(2 + rank):
                step(model, optimizer, rank, number)
        assert saver.save(0)


@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_a_copy_is_checked_and_a_bad_value_refused(rank, world_size, zero):
    for value in (0, True, 1.5, "2"):
        with pytest.raises(ValueError, match="check_every must be None or a number of steps, at least 1"):
            sw.wrap(Mlp(), zero=zero, check_every=value)
    model, optimizer = wrapped({"zero": zero}, every=1)
    step(model, optimizer, rank, 0)
    state = copy.deepcopy(sw.full_state_dict(model))
    sw.load_full_state_dict(model, state)
    step(model, optimizer, rank, 1)
    assert same_everywhere(whole(model))
