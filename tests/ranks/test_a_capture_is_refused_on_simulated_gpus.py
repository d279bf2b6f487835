"""Law: a captured CUDA graph would replay our operations without their host code. So any call of ours inside a capture
is refused by name, before it enqueues anything or makes a driver call that would end the capture. Training then
continues as if the call had not been tried. The engine's background work (watching, freeing dropped objects) does not
end a capture on a stream of the program.
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import internals
import pytest
import torch
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

CASES: list[dict[str, Any]] = [
    {},
    {"deterministic": True},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"compress": sw.Int8(error_feedback=True)},
    {"zero": 2, "compress": sw.PowerSGD(2, min_compression_rate=1)},
    {"zero": 1, "offload": "cpu"},
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_a_capture_is_refused_and_leaves_nothing(
    teams: Any, world_size: int, paths: dict[str, str], number: int
) -> None:
    run(teams, world_size, paths, refused, number, policy=POLICIES[number % len(POLICIES)])


def refused(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    plain = trained(gpus, rank, CASES[number], tries=False)
    assert all(bits_equal(a, b) for a, b in zip(trained(gpus, rank, CASES[number], tries=True), plain, strict=True))


def trained(gpus: SimulatedGpus, rank: int, options: dict[str, Any], tries: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.1), bucket_cap_mb=0.001, **options)

    def expect(what: str, call: Any) -> None:
        if tries:
            with (
                gpus.capture(),
                pytest.raises((NotImplementedError, sw.Error), match=f"{what}: the stream is being captured"),
            ):
                call()

    for step in range(3):
        x = batch(rank, 6, 7, step=step)
        expect("a forward of Mlp", lambda: model(x))
        loss = model(x).square().mean()
        loss.backward()
        expect("a norm", lambda: sw.clip_grad_norm_(model, 1.0))
        expect("an optimizer's step", optimizer.step)
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in sw.full_state_dict(model).values()]


def test_an_evaluation_and_a_save_inside_a_capture(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, evaluated_and_saved)


def evaluated_and_saved(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in (0, 3):
        module = gpus.adopt_module(Mlp())
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.1), zero=zero)
        x = batch(rank, 6, 7)
        model(x).square().mean().backward()
        optimizer.step()
        if zero == 3:
            with gpus.capture(), torch.no_grad(), pytest.raises(NotImplementedError, match="a unit: the stream is"):
                model(x)
        with torch.no_grad():
            model(x)
        with sw.Checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
            with pytest.raises((NotImplementedError, sw.Error), match="(a save|a unit): the stream is being captured"):
                with gpus.capture():
                    checkpoints.save(1)
                checkpoints.wait()
            checkpoints.save(2)
            checkpoints.wait()


def test_a_capture_that_begins_between_forward_and_backward(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, between)


def between(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in (0, 2):
        module = gpus.adopt_module(Mlp())
        model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero)
        for step in range(3):
            loss = model(batch(rank, 6, 7, step=step)).square().mean()
            with gpus.capture(), pytest.raises(NotImplementedError, match="a backward: the stream is being captured"):
                loss.backward()
            model(batch(rank, 6, 7, step=step)).square().mean().backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_watching_thread_leaves_a_capture_alone(
    teams: Any, world_size: int, paths: dict[str, str], policy: str
) -> None:
    run(teams, world_size, paths, watched, policy=policy)


def watched(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(3):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with gpus.other_stream(), gpus.capture():  # the step's end has been marked, and nobody has seen it yet
            time.sleep(0.35)


@pytest.mark.parametrize("zero", (0, 2, 3))
def test_what_is_dropped_inside_a_capture_is_freed_without_ending_it(
    teams: Any, world_size: int, paths: dict[str, str], zero: int
) -> None:
    run(teams, world_size, paths, dropped, zero)


def dropped(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.1), zero=zero)
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    gpus.synchronize()
    with gpus.other_stream(), gpus.capture():
        del model, optimizer, module
        gc.collect()


@pytest.mark.parametrize("where", ("stream of the step", "another"))
def test_parameters_that_are_on_their_way_are_read_inside_a_capture(
    teams: Any, world_size: int, paths: dict[str, str], where: str
) -> None:
    run(teams, world_size, paths, read_inside, where)


def read_inside(gpus: SimulatedGpus, rank: int, world_size: int, where: str) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.1), zero=2)
    for step in range(2):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        with gpus.other_stream() if where == "another" else contextlib.nullcontext(), gpus.capture():
            addresses = [each.data_ptr() for each in module.parameters()]
            assert all(type(each) is torch.nn.Parameter for each in module.parameters())
        optimizer.zero_grad()
        assert all(addresses)
    whole = [value.clone() for value in sw.full_state_dict(model).values()]
    assert all(bits_equal(ours, theirs) for ours, theirs in zip(module.parameters(), whole, strict=True))


@pytest.mark.parametrize("result", (900, 901, 906, 907))
def test_a_query_that_a_capture_forbids_says_nothing_of_the_event(
    teams: Any, world_size: int, paths: dict[str, str], result: int
) -> None:
    run(teams, world_size, paths, forbidden, result)


def forbidden(gpus: SimulatedGpus, rank: int, world_size: int, result: int) -> None:
    module = gpus.adopt_module(Mlp())
    model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model(batch(rank, 6, 7)).square().mean().backward()
    comm = internals.reducer(model)._link.comm
    gpus.fail_call(2 if comm.describe()["transport"] == "nccl" else 1, result)
    comm.watch()
    assert gpus.failed_call() == "cuEventQuery"
    comm.watch()
    assert comm.is_alive
    model(batch(rank, 6, 7)).square().mean().backward()
