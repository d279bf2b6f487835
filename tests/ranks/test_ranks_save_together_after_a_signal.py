"""Law of save_on: after a signal on any rank all ranks save the same step and end with code 0. Without a signal nothing
changes.
"""

import os
import signal
import tempfile

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = [{"zero": 0}, {"zero": 2}, {"zero": 3, "share_parameters": False, "units": nn.Linear}, {"zero": 3}, None]
SIGNALLED = {"one rank": lambda rank, world_size: rank == world_size - 1, "all ranks": lambda rank, world_size: True}


def subject(options):
    torch.manual_seed(0)
    module = Mlp()
    made = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if options is None:  # torch's own wrapper
        return torch.nn.parallel.DistributedDataParallel(module), made
    return sw.wrap(module, made, **options)


def step(model, optimizer, rank, number):
    model(batch(rank, 6, 7, step=number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    with sw.full_parameters(model):
        return [p.detach().clone() for p in model.module.parameters()]


def folder_of_all():
    return gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0]


@pytest.mark.parametrize("signalled", SIGNALLED)
@on_every_rank()
def test_all_ranks_save_one_step_and_end(rank, world_size, signalled):
    for options in STAGES:
        folder, before = folder_of_all(), signal.getsignal(signal.SIGTERM)
        model, optimizer = subject(options)
        last = -1
        with (
            pytest.raises(SystemExit) as caught,
            sw.Checkpointer(folder, model, optimizer, save_on=(signal.SIGTERM,)) as saver,
        ):
            for last in range(9):
                if last == 3 and SIGNALLED[signalled](rank, world_size):
                    os.kill(os.getpid(), signal.SIGTERM)
                step(model, optimizer, rank, last)
                assert not saver.save(last, every=100)
        assert caught.value.code == 0 and last == 3, (options, last)
        assert signal.getsignal(signal.SIGTERM) == before
        expected = whole(model) if options is not None else [p.detach().clone() for p in model.module.parameters()]
        again, optimizer = subject(options)
        with sw.Checkpointer(folder, again, optimizer) as saver:
            assert saver.restore() == 4 and same_everywhere(saver.steps())
        found = whole(again) if options is not None else list(again.module.parameters())
        assert all(map(bits_equal, [p.detach() for p in found], expected)), options
        gather(None)


@on_every_rank()
def test_a_signal_saves_whatever_on_busy_is(rank, world_size):
    for on_busy in ("skip", "raise"):
        folder = folder_of_all()
        model, optimizer = subject(STAGES[0])
        with (
            pytest.raises(SystemExit),
            sw.Checkpointer(
                folder, model, optimizer, on_busy=on_busy, save_on=(signal.SIGTERM,), bandwidth_bytes_per_s=100_000
            ) as saver,
        ):
            step(model, optimizer, rank, 0)
            assert saver.save(0)
            os.kill(os.getpid(), signal.SIGTERM)
            step(model, optimizer, rank, 1)
            saver.save(1)
        with sw.Checkpointer(folder, model, optimizer) as saver:
            assert saver.steps() == [1, 2]


@on_every_rank()
def test_a_signal_beside_joined_ranks_is_heard(rank, world_size):
    """Between ranks that train the save comes at once, without an error; at the end of a join, where one rank trains,
    after it.
    """
    if world_size == 1:
        return
    last = world_size - 1
    for at in (1, 2 * last) if world_size > 2 else (2 * last,):
        model, optimizer = subject(STAGES[0])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        with sw.Checkpointer(folder_of_all(), model, optimizer, save_on=(signal.SIGTERM,)) as saver:
            with model.join():
                for number in range(2 * rank + 1):
                    if rank == last and number == at:
                        os.kill(os.getpid(), signal.SIGTERM)
                    step(model, optimizer, rank, number)
                    scheduler.step()
            assert same_everywhere(saver._stop.is_agreed) and saver._stop.is_agreed is (at == 1)
            optimizer.param_groups[0]["lr"] = 1e-3
            for number in range(2):
                step(model, optimizer, rank, number)
            assert saver._stop.is_agreed
        gather(None)


@on_every_rank()
def test_a_request_beside_other_hyperparameters_still_names_those(rank, world_size):
    if world_size == 1:
        return
    model, optimizer = subject(STAGES[0])
    with sw.Checkpointer(folder_of_all(), model, optimizer, save_on=(signal.SIGTERM,)):
        step(model, optimizer, rank, 0)
        optimizer.param_groups[0]["lr"] = 0.5 if rank else 0.1
        step(model, optimizer, rank, 1)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(engine.Error, match=r"ranks disagree about the optimizer: group 0 has lr=0\.1"):
            step(model, optimizer, rank, 2)


@on_every_rank()
def test_wrong_signals_are_one_sentence(rank, world_size):
    model, optimizer = subject(STAGES[0])
    folder = folder_of_all()
    for given, kind, text in (
        ((signal.SIGKILL,), ValueError, "save_on has SIGKILL, which no program can handle"),
        ((4711,), ValueError, "save_on has 4711, which is not a signal"),
        ("SIGTERM", TypeError, "save_on must be a collection of signals"),
    ):
        with pytest.raises(kind, match=text):
            sw.Checkpointer(folder, model, optimizer, save_on=given)
    given = (signal.SIGTERM,) if rank == 0 else ()
    if world_size > 1:
        with pytest.raises((engine.Error, ValueError), match="save_on"):
            sw.Checkpointer(folder, model, optimizer, save_on=given)
