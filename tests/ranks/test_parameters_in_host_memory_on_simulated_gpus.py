"""Law of offload={"parameters": "cpu"} on a GPU: losses, parameters, states and checkpoints have the bits of slices on the
GPU, for any schedule, prefetch, precision and accumulation. The GPU has only the places of units and what is never
released. A gather takes each rank's slice alone over the bus.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from typing import Any

import internals
import pytest
import test_offload_on_simulated_gpus as on_gpus
import test_offloaded_state_has_the_same_bits as offloaded
import torch
from harness import LONG
from models import Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from test_a_module_is_built_in_slices import Block, Model, init, on_meta, train
from test_stages_on_simulated_gpus import some
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
OPTIMIZERS = offloaded.OPTIMIZERS
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"units": nn.Linear},
    "bf16": {"units": nn.Linear, "precision": {"body": "bf16"}},
    "ahead": {"units": nn.Linear, "prefetch": 2},
    "at once": {"units": nn.Linear, "prefetch": 0},
    "kept": {"units": nn.Linear, "reshard_after_forward": False},
    "one unit": {},
}


def home(kind: str, rank: int) -> dict[str, str]:
    return {"parameters": "cpu", "optimizer": on_gpus.offload_to(kind, rank)}


def begin(gpus: SimulatedGpus, rank: int, name: str = "AdamW", kind: str = "cpu", seed: int = 0, **options: Any) -> Any:
    on_gpus.small()
    return on_gpus.wrap(gpus, on_gpus.build(OPTIMIZERS[name], seed), zero=3, offload=home(kind, rank), **options)


@pytest.mark.parametrize(("name", "policy", "form"), some(itertools.product(OPTIMIZERS, POLICIES, FORMS), 19))
def test_slices_in_host_memory_have_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], name: str, policy: str, form: str
) -> None:
    run(teams, world_size, paths, same_bits, name, form, policy=policy)


def same_bits(gpus: SimulatedGpus, rank: int, world_size: int, name: str, form: str) -> None:
    options = {"clip_grad_norm": 1.0, **FORMS[form]}
    with gpus.torch_on_cpu():
        built = on_gpus.build(OPTIMIZERS[name])
        model, optimizer = sw.wrap(*built, zero=3, share_parameters=False, deterministic=True, **options)
        losses, expected = offloaded.train(model, optimizer, rank), offloaded.whole(model, optimizer)
    for kind in ("cpu", "nvme") if LONG else (("cpu", "nvme")[len(name) % 2],):
        model, optimizer = begin(gpus, rank, name, kind, **options)
        assert offloaded.train(model, optimizer, rank) == losses, (form, kind)
        offloaded.assert_same(offloaded.whole(model, optimizer), expected, (form, kind))


def test_one_rank_has_the_bits_too(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, 1, paths, same_bits, "AdamW", "bf16", policy="late")


def test_only_slices_cross_the_bus_and_a_step_copies_nothing(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, counted)


def counted(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    model, optimizer = begin(gpus, rank, units=nn.Linear)
    described = sw.describe()["models"][-1]
    store, memory = optimizer.store.route, internals.replica(model).parameters()
    assert described["parameters_home"] == "cpu: pinned host memory"
    assert 0 < memory.home_bytes == described["parameter_bytes"] - memory._kept.bytes_held
    on_gpu = described["unit_bytes"] + memory._kept.bytes_held
    on_gpu += described["gradient_bytes"] - internals.reducer(model).home_bytes
    assert described["planned_bytes"] == on_gpu
    offloaded.train(model, optimizer, rank, range(1))
    before, moved = memory._units.stats(), store.stats()
    offloaded.train(model, optimizer, rank, range(1, 3))
    after, found = memory._units.stats(), store.stats()
    gathered = after["gathered_bytes"] - before["gathered_bytes"]
    assert (after["home_bytes"] - before["home_bytes"]) * world_size == gathered > 0
    small = sum(p.nbytes for p in sw.unwrap(model).parameters() if 0 < p.nbytes <= 128)
    assert found["bytes_up"] - moved["bytes_up"] <= 2 * small
    assert found["bytes_down"] - moved["bytes_down"] <= 2 * small


def test_states_go_out_and_in(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, states, policy="late")


def states(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """Checkpoints, whole states, written parameters and loaded weights, against slices on the GPU."""
    found = []
    for place in ("cpu", home("cpu", rank)):
        on_gpus.small()
        folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"saved-{place == 'cpu'}")
        model, optimizer = on_gpus.wrap(gpus, on_gpus.build(OPTIMIZERS["AdamW"]), zero=3, offload=place)
        offloaded.train(model, optimizer, rank, range(2))
        sw.save(folder, model, optimizer)
        weights, state = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)
        losses = offloaded.train(model, optimizer, rank, range(2, 4))
        sw.load(folder, model, optimizer)
        assert offloaded.train(model, optimizer, rank, range(2, 4)) == losses
        with sw.full_parameters(model, writable=True), torch.no_grad():
            for each in sw.unwrap(model).parameters():
                each.mul_(2)
        sw.load_full_state_dict(model, weights)
        sw.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
        assert offloaded.train(model, optimizer, rank, range(2, 4)) == losses
        sw.load_pretrained(model, weights)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append((losses, offloaded.train(model, optimizer, rank, range(4, 6)), offloaded.saved_bytes(folder)))
        ends = offloaded.whole(model, optimizer)
        found[-1] += (ends,)
    assert found[0][:3] == found[1][:3]
    offloaded.assert_same(found[1][3], found[0][3], "states")


def test_units_are_recomputed_and_accumulated_and_frozen_ones_rest(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, accumulating, policy="on demand")


def accumulating(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    found = []
    for place in ("cpu", home("cpu", rank)):
        on_gpus.small()
        torch.manual_seed(2)
        module = Model(12, layers=3)
        module.blocks[1].requires_grad_(False)
        sw.checkpoint_units(module)
        optimizer = sw.optim.AdamW(module.parameters(), lr=1e-2)
        model, optimizer = on_gpus.wrap(gpus, (module, optimizer), zero=3, units=Block, offload=place)
        losses = []
        for step in range(3):
            for micro in range(2):
                with model.no_sync() if micro == 0 and step else contextlib.nullcontext():
                    loss = model(batch(rank, 6, 7, step=2 * step + micro)).square().mean()
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(model(batch(rank, 6, 7)).sum().item())
        module.blocks[1].requires_grad_(True)
        losses += train(model, optimizer, rank)
        found.append((losses, offloaded.whole(model, optimizer)))
    assert found[0][0] == found[1][0]
    offloaded.assert_same(found[1][1], found[0][1], "accumulating")


def test_a_deepspeed_program_with_offload_param(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, of_deepspeed)


def of_deepspeed(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    losses: list[float] = []
    cpu = {"device": "cpu", "pin_memory": True}
    for places in ({}, {"offload_param": cpu, "offload_optimizer": cpu}):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 6,
            "zero_optimization": {"stage": 3, **places},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        }
        module = Mlp() if places else gpus.adopt_module(Mlp())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: bool(places))
            engine, *_ = sw.deepspeed.initialize(model=module, config=config)
        for step in range(3):
            loss = engine(batch(rank, 6, 7, step=step)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert sw.describe()["models"][-1]["parameters_home"] == "cpu: pinned host memory"
    assert losses[:3] == losses[3:]


def test_rows_of_fully_shard_are_refused(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, by_rows)


def by_rows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = gpus.adopt_module(Model(12, layers=3))
    sw.fully_shard(module, units=Block, offload=home("cpu", rank))
    with pytest.raises((NotImplementedError, sw.Error), match="with fully_shard on a GPU is not supported"):
        module(batch(rank, 6, 7))


#: how a model that no GPU could hold gets its values
BUILDS = ("module", "init", "weights")


@pytest.mark.parametrize(("build", "policy"), list(zip(BUILDS, POLICIES)))
def test_a_model_larger_than_the_gpu_is_built_and_trained(
    teams: Any, world_size: int, paths: dict[str, str], build: str, policy: str
) -> None:
    for ranks in (1, world_size) if build == "init" else (world_size,):
        run(teams, ranks, paths, larger, build, policy=policy)


def large() -> Model:
    return Model(40, layers=24)


def larger(gpus: SimulatedGpus, rank: int, world_size: int, build: str) -> None:
    on_gpus.small()
    torch.manual_seed(5)
    folder = os.path.join(offloaded.folder_of(rank, "weights"), "model")
    options = {"zero": 3, "units": Block, "deterministic": True}
    with gpus.torch_on_cpu():
        module = sw.materialize(on_meta(large), init=init)
        nbytes = sum(p.nbytes for p in module.parameters())
        values = copy.deepcopy(module.state_dict())
        model, optimizer = sw.wrap(
            module, sw.optim.AdamW(module.parameters(), lr=1e-2), **{**options, "share_parameters": False}
        )
        sw.save_pretrained(model, folder)
        losses, expected = train(model, optimizer, rank), offloaded.whole(model, optimizer)
    gpus.limit_bytes = gpus.adopted_bytes + gpus.memory_in_use() + nbytes // 4
    torch.manual_seed(5)
    given = {"init": {"init": init}, "weights": {"weights": folder}, "module": {}}[build]
    module = on_meta(large) if given else large()
    if not given:
        module.load_state_dict(values)
    optimizer = sw.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = sw.wrap(module, optimizer, offload=home("cpu", rank), device="cuda:0", **given, **options)
    assert train(model, optimizer, rank) == losses
    gpus.limit_bytes = 0  # these are whole on the GPU
    offloaded.assert_same(offloaded.whole(model, optimizer), expected, build)
