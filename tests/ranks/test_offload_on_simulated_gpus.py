"""Law of offload="cpu" and offload="nvme:<folder>" on a GPU: losses, parameters, states and checkpoints have the bits
of the CPU at every stage, for any schedule. State lies in the chosen memory. A step waits once for each batch of
gradients and for nothing else. A failure is an error with a name."""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import test_offloaded_state_has_the_same_bits as offloaded
import torch
from harness import at_least_two, change, gather, in_turn, same_everywhere
from internals import offload as state_offload
from models import Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw
from test_stages_on_simulated_gpus import LONG, OnGpu, some
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
ALL = (0, 1, 2, 3)
OPTIMIZERS = offloaded.OPTIMIZERS


def small() -> None:
    """Force several batches in a step of a small model, in memory and in a file."""
    change(state_offload, SLOT_BYTES=1 << 10, BUFFER_BYTES=64 << 10)


def offload_to(kind: str, rank: int) -> str:
    return kind if kind == "cpu" else f"nvme:{offloaded.folder_of(rank)}"


class Small(offloaded.Mixed):
    """A model with every kind of parameter, all small, since the simulation compares all memory at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(20, 31))


def build(make: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = Small()
    return module, make(module.parameters())


def wrap(gpus: SimulatedGpus, made: Any, **options: Any) -> Any:
    module, optimizer = made
    return OnGpu(gpus).wrap(module, optimizer, **options)


@pytest.mark.parametrize(("name", "policy", "kind"), some(itertools.product(OPTIMIZERS, POLICIES, ("cpu", "nvme")), 7))
def test_every_stage_has_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], name: str, policy: str, kind: str
) -> None:
    run(teams, world_size, paths, every_stage, name, kind, policy=policy)


def every_stage(gpus: SimulatedGpus, rank: int, world_size: int, name: str, kind: str) -> None:
    small()
    with gpus.torch_on_cpu():
        model, optimizer = sw.wrap(*build(OPTIMIZERS[name]), clip_grad_norm=1.0)
        losses, expected = offloaded.train(model, optimizer, rank), offloaded.whole(model, optimizer)
    for zero in in_turn(ALL, len(name), of=4):
        for cap in (0.001, 25) if LONG else ((0.001, 25)[zero % 2],):
            given = {"zero": zero, "clip_grad_norm": 1.0, "offload": offload_to(kind, rank), "bucket_cap_mb": cap}
            model, optimizer = wrap(gpus, build(OPTIMIZERS[name]), **given)
            assert offloaded.train(model, optimizer, rank) == losses, given
            offloaded.assert_same(offloaded.whole(model, optimizer), expected, given)


@pytest.mark.parametrize(("kind", "policy"), list(zip(("cpu", "nvme"), POLICIES)))
def test_rows_of_fully_shard_have_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], kind: str, policy: str
) -> None:
    run(teams, world_size, paths, by_rows, kind, policy=policy)


def by_rows(gpus: SimulatedGpus, rank: int, world_size: int, kind: str) -> None:
    small()
    with gpus.torch_on_cpu():
        module, optimizer = offloaded.rows("AdamW")
        losses, expected = offloaded.train(module, optimizer, rank), offloaded.whole(module, optimizer)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        module = offloaded.Mixed()
        module.turned = nn.Parameter(module.turned.detach().contiguous())
        module = gpus.adopt_module(module)
        sw.fully_shard(module, offload=offload_to(kind, rank), deterministic=True)
        return module, sw.shard_optimizer(module, OPTIMIZERS["AdamW"](module.parameters()))

    module, optimizer = made(0)
    assert offloaded.train(module, optimizer, rank) == losses
    offloaded.assert_same(offloaded.whole(module, optimizer), expected, kind)
    place = Path(offloaded.folder_of(0, "rows")) / kind
    sw.save(place, module, optimizer, step=4)
    module, optimizer = made(1)
    sw.load(place, module, optimizer)
    offloaded.assert_same(offloaded.whole(module, optimizer), expected, f"{kind}, loaded")


@pytest.mark.parametrize(("zero", "policy", "kind"), some(itertools.product(ALL, POLICIES, ("cpu", "nvme")), 7))
def test_a_step_waits_for_gradients_and_for_nothing_else(
    teams: Any, world_size: int, paths: dict[str, str], zero: int, policy: str, kind: str
) -> None:
    run(teams, world_size, paths, quiet_steps, zero, kind, policy=policy)


def quiet_steps(gpus: SimulatedGpus, rank: int, world_size: int, zero: int, kind: str) -> None:
    small()
    gc.collect()
    model, optimizer = wrap(
        gpus, build(OPTIMIZERS["AdamW"]), zero=zero, offload=offload_to(kind, rank), bucket_cap_mb=0.01
    )
    store = getattr(optimizer, "_inner", optimizer).store.route
    before, moved = stats(model), store.stats()
    for step in range(4):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # masters are made from parameters, which are read
            gc.collect()
            before, moved = stats(model), store.stats()
    after, found = stats(model), store.stats()
    batches = found["batches"] - moved["batches"]
    assert after["host_waits"] - before["host_waits"] == batches >= 3 * 3
    assert after["allocations"] == before["allocations"]
    # float32: gradient and parameter down, parameter up; bfloat16 with a master: gradient and parameter down, parameter up
    module = sw.unwrap(model)
    wide, low = (sum(p.numel() for p in module.parameters() if p.dtype is d) for d in (torch.float32, torch.bfloat16))
    shares = 1 if zero == 0 else world_size
    moved_bytes = [sum(each) for each in zip(*gather([found[key] - moved[key] for key in ("bytes_down", "bytes_up")]))]
    assert moved_bytes == [
        3 * (world_size // shares) * (8 * wide + 4 * low),
        3 * (world_size // shares) * (4 * wide + 2 * low),
    ]


def test_moments_that_are_rounded_at_random_need_the_hosts_kernels(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, refused)


def refused(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in (0, 2):
        model, optimizer = wrap(gpus, build(OPTIMIZERS["AdamW bfloat16 moments"]), zero=zero)
        model(batch(rank, 6, 7)).square().mean().backward()
        with pytest.raises(ValueError, match="kernels of a GPU do not round at random.*offload="):
            optimizer.step()


def test_state_is_on_the_host_and_described(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, described)


def described(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    small()
    adopted = len(gpus._begins)
    model, optimizer = wrap(gpus, build(OPTIMIZERS["AdamW"]), zero=2, offload="cpu")
    found = sw.describe()["models"][-1]
    plain, _ = wrap(gpus, build(OPTIMIZERS["AdamW"]), zero=2)
    beside = sw.describe()["models"][-1]
    assert found["offload"] == "cpu" and found["offload_pinned_bytes"] == 3 * state_offload.SLOT_BYTES
    assert found["offload_threads"] >= 1
    assert found["planned_bytes"] + beside["optimizer_state_bytes"] == beside["planned_bytes"]
    offloaded.train(model, optimizer, rank, range(1))
    state = optimizer._inner.state.values()
    held = [t for each in state for key, t in each.items() if isinstance(t, torch.Tensor) and key != "step"]
    assert found["offload_bytes"] == sum(t.numel() * t.element_size() for t in held)
    assert not any(gpus.ranges(t, 1) for t in held) and len(gpus._begins) > adopted
    store = optimizer._inner.store
    for made in (store.zeros, store.empty):
        tensor = made(torch.empty(3, 5, device="meta").t(), torch.float32)
        assert tensor.device.type == "cpu" and tensor.stride() == (1, 5)
    folder = offloaded.folder_of(rank)
    in_file, optimizer = wrap(gpus, build(OPTIMIZERS["AdamW"]), zero=2, offload=f"nvme:{folder}")
    found = sw.describe()["models"][-1]
    assert found["offload"] == f"nvme:{folder}" and found["offload_threads"] >= 1
    assert found["offload_pinned_bytes"] == 3 * state_offload.SLOT_BYTES
    assert found["planned_bytes"] + beside["optimizer_state_bytes"] == beside["planned_bytes"]
    offloaded.train(in_file, optimizer, rank, range(1))
    assert found["offload_bytes"] == optimizer._inner.store.nbytes
    used = optimizer._inner.store._used
    held = [t for each in optimizer._inner.state.values() for key, t in each.items() if key != "step" and t.numel()]
    assert held and all(t.data_ptr() in used for t in held)


@pytest.mark.parametrize(("zero", "kind"), some(itertools.product(ALL, ("cpu", "nvme")), 5))
def test_states_are_saved_and_loaded(teams: Any, world_size: int, paths: dict[str, str], zero: int, kind: str) -> None:
    run(teams, world_size, paths, in_and_out, zero, kind)


def in_and_out(gpus: SimulatedGpus, rank: int, world_size: int, zero: int, kind: str) -> None:
    small()
    make = OPTIMIZERS["Adam amsgrad"]
    with gpus.torch_on_cpu():
        model, optimizer = sw.wrap(*build(make))
        losses, expected = offloaded.train(model, optimizer, rank), offloaded.whole(model, optimizer)
    model, optimizer = wrap(gpus, build(make), zero=zero, offload=offload_to(kind, rank))
    begun = offloaded.train(model, optimizer, rank, range(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weights, state = sw.full_state_dict(model), offloaded.whole(model, optimizer)[1]
    folder = gather(str(gpus.folder / "saved"))[0]
    sw.save(folder, model, optimizer)
    assert begun + offloaded.train(model, optimizer, rank, range(2, 4)) == losses
    offloaded.assert_same(offloaded.whole(model, optimizer), expected, zero)
    others = ((0, None), (1, "cpu"), (3, offload_to("nvme", rank)))
    for (other, offload), from_file in in_turn(list(itertools.product(others, (False, True))), zero, of=3):
        module, optimizer = build(make, seed=3)
        if not from_file:
            module.load_state_dict(weights)
        model, optimizer = wrap(gpus, (module, optimizer), zero=other, offload=offload)
        if from_file:
            sw.load(folder, model, optimizer)
        else:
            sw.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        assert begun + offloaded.train(model, optimizer, rank, range(2, 4)) == losses
        offloaded.assert_same(offloaded.whole(model, optimizer), expected, (zero, other))


def test_wrapping_again_keeps_the_state_on_the_host(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, wrapped_again)


def wrapped_again(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    small()
    make = OPTIMIZERS["AdamW"]
    with gpus.torch_on_cpu():
        model, optimizer = sw.wrap(*build(make))
        losses, expected = offloaded.train(model, optimizer, rank), offloaded.whole(model, optimizer)
    module, optimizer = build(make)
    model, optimizer = wrap(gpus, (module, optimizer), offload="cpu")
    begun = offloaded.train(model, optimizer, rank, range(1))
    for step, options in enumerate(({"offload": "cpu"}, {}), 1):
        model, optimizer = wrap(gpus, (module, optimizer), **options)
        begun += offloaded.train(model, optimizer, rank, range(step, step + 1))
        assert isinstance(optimizer.store, state_offload.StateStore) and optimizer.store.file is None
    begun += offloaded.train(model, optimizer, rank, range(3, 4))
    assert begun == losses
    offloaded.assert_same(offloaded.whole(model, optimizer), expected, "again")
    module, optimizer = build(make)
    with gpus.torch_on_cpu():  # the module moves to its GPU
        model, optimizer = sw.wrap(module, optimizer, offload=offload_to("nvme", rank))
        begun, file = offloaded.train(model, optimizer, rank, range(1)), optimizer.store.file
    for step in (1, 2):
        model, optimizer = wrap(gpus, (module, optimizer))
        begun += offloaded.train(model, optimizer, rank, range(step, step + 1))
        assert optimizer.store.file is file and optimizer.store.route is not None
    assert begun == losses[:3]


@pytest.mark.parametrize("zero", some((1, 2, 3), 2))
def test_the_scalers_factor_is_in_the_step(teams: Any, world_size: int, paths: dict[str, str], zero: int) -> None:
    run(teams, world_size, paths, scaled, zero, policy="late")


def scaled(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    small()

    def steps(model: Any, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(5):
            loss = model(batch(rank, 6, 7, step=step)).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 and rank == world_size - 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return offloaded.whole(model, optimizer), scaler.get_scale()

    with gpus.torch_on_cpu():
        expected, scale = steps(*sw.wrap(*build(OPTIMIZERS["AdamW"]), zero=zero, clip_grad_norm=0.5))
    given = {"zero": zero, "clip_grad_norm": 0.5, "offload": "cpu"}
    found, ours = steps(*wrap(gpus, build(OPTIMIZERS["AdamW"]), **given))
    assert ours == scale
    offloaded.assert_same(found, expected, zero)


@pytest.mark.parametrize(
    ("nth", "kind"), [*itertools.product([1, 3, 9] if LONG else [3], ("cpu", "nvme")), (60, "nvme")]
)
def test_a_call_of_the_driver_that_fails_in_a_step_is_named(
    teams: Any, world_size: int, paths: dict[str, str], nth: int, kind: str
) -> None:
    run(teams, 1, paths, failing_call, nth, kind)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int, kind: str) -> None:
    small()
    model, optimizer = wrap(gpus, build(OPTIMIZERS["AdamW"]), zero=1, offload=offload_to(kind, rank))
    offloaded.train(model, optimizer, rank, range(1))
    model(batch(rank, 6, 7)).square().mean().backward()
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        optimizer.step()
    gpus.fail_call(0, 0)
    if nth == 60:  # a part of the state has changed by then
        with pytest.raises(sw.Error, match="optimizer state is invalid, since an earlier step failed"):
            optimizer.step()


@at_least_two
def test_a_rank_whose_store_cannot_be_created_is_named_on_all(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, no_store)


def no_store(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module, optimizer = build(OPTIMIZERS["AdamW"])
    wrap(gpus, (module, None))  # opens the link
    change(state_offload, SLOT_BYTES=100 if rank == 1 else 1 << 10)
    with pytest.raises((sw.Error, ValueError), match="must be a positive multiple of 256, not 100"):
        wrap(gpus, (module, optimizer), offload="cpu")
    small()
    model, optimizer = wrap(gpus, (module, optimizer), offload="cpu")  # the same module, again
    offloaded.train(model, optimizer, rank, range(1))
    assert same_everywhere([p.detach() for p in module.parameters()])


def test_missing_features_are_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, refusals)


def refusals(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = gpus.adopt_module(Mlp())
    plain = torch.optim.AdamW(module.parameters(), lr=0.1)
    for zero in (0, 2):
        with pytest.raises(
            ValueError, match=r"of a module on a GPU needs an optimizer of sw.optim .* got torch.optim.adamw"
        ):
            sw.wrap(module, plain, zero=zero, offload="cpu")
    with pytest.raises(ValueError, match=r"of a module on a GPU needs an optimizer of sw.optim .* got none"):
        sw.wrap(module, offload="cpu")
    ours = sw.optim.AdamW(module.parameters(), lr=0.1)
    absent = f"{offloaded.folder_of(0)}/absent"
    with pytest.raises(ValueError, match="needs an optimizer of sw.optim .* got torch.optim.adamw"):
        sw.wrap(module, plain, zero=1, offload=f"nvme:{absent}")
    with pytest.raises(FileNotFoundError, match=f"offload to '{absent}' on rank 0"):
        sw.wrap(module, ours, zero=1, offload=f"nvme:{absent}")


def test_places_of_parameters_that_do_not_exist_are_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, with_places_of_parameters)


def with_places_of_parameters(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    made = build(OPTIMIZERS["AdamW"])
    in_file = {"zero": 3, "share_parameters": False, "offload": {"parameters": offload_to("nvme", rank)}}
    for options, error, sentence in (
        (in_file, NotImplementedError, "keeps parameters in a file, which is for modules on the CPU"),
        (
            {"zero": 3, "offload": {"parameters": "cpu"}},
            ValueError,
            "place of the optimizer's state.*got zero=3 and None",
        ),
        ({"zero": 2, "offload": {"parameters": "cpu", "optimizer": "cpu"}}, ValueError, "needs zero=3.*got zero=2"),
        ({"zero": 3, "offload": "cpu", "device": "cuda"}, ValueError, "parameters that stay in host memory"),
        ({"zero": 3, "offload": {"parameters": "cpu"}, "device": "cpu"}, ValueError, "must name a GPU"),
    ):
        with pytest.raises((error, sw.Error), match=sentence):
            wrap(gpus, made, **options)
    plain = torch.optim.AdamW(made[0].parameters())
    with pytest.raises(ValueError, match="needs an optimizer of sw.optim .* got torch.optim.adamw"):
        wrap(gpus, (made[0], plain), zero=3, offload={"parameters": "cpu", "optimizer": "cpu"})
    model, optimizer = wrap(gpus, made, zero=3, offload={"optimizer": "cpu"})
    offloaded.train(model, optimizer, rank)
