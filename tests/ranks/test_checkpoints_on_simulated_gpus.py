"""Law: checkpoints of GPU state have the CPU's bytes at every stage, for any schedule, although training continues when
save() returns. The host waits once for each staging slot. A failed driver call is one sentence on every rank; training
and the next save continue.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from typing import Any
from unittest import mock

import internals
import pytest
import test_offloaded_state_has_the_same_bits as offloaded
import torch
from harness import gather, in_turn
from internals import Content, Filler, Sliced
from models import Mlp
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import manifest_entries, shared_folder
from test_stages_on_simulated_gpus import OnGpu, some
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = (0, 1, 2, 3)
OPTIMIZERS = {
    "sw.AdamW": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=False),
}


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    """A save never takes a GPU address for a host address: it says where its sources are, and a load gets slices on the
    host.
    """
    fill, sources = Filler.fill, Content.sources

    def on_gpu(address: int) -> bool:
        at = bisect.bisect(gpus._begins, address)
        return bool(at) and address < gpus._ends[at - 1]

    def checked_fill(self: Any, reads: Any) -> None:
        targets = list(reads)
        parts = [memory for _, target in targets if isinstance(target, Sliced) for _, memory in target.parts]
        assert not any(on_gpu(memory.data_ptr()) for memory in parts)
        fill(self, targets)

    def checked(list_sources: Any) -> Any:
        def listed(*given: Any) -> Any:
            found = list_sources(*given)
            assert all(each[5] for each in found if on_gpu(each[3]))
            return found

        return listed

    with mock.patch.object(Content, "sources", checked(sources)):
        with mock.patch.object(Filler, "fill", checked_fill):
            yield


class Subject(nn.Module):
    """A model of low precision, strides, a complex tensor, and buffers, one of them specific to this rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body = Mlp()
        self.low = nn.Linear(5, 9).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(9, 11).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("waves", torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("mine", torch.full((3,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(self.body(x).to(torch.bfloat16)).float() @ self.turned.t() + self.empty.sum()


def build(rank: int, name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = Subject(rank)
    return module, OPTIMIZERS[name](module.parameters())


def checkpointer(folder: str, model: Any, optimizer: Any, **options: Any) -> Any:
    """Use small files, and slots that hold one chunk each."""
    return sw.Checkpointer(folder, model, optimizer, max_file_bytes=1000, **options)


def go_on(model: Any, optimizer: Any, rank: int, steps: range) -> Any:
    """Return a function that overwrites all state."""
    return offloaded.train(model, optimizer, rank, steps)


@pytest.mark.parametrize(
    ("name", "policy", "snapshot"), some(itertools.product(OPTIMIZERS, POLICIES, ("copy", "lazy")), 5)
)
def test_every_stage_saves_and_takes_back_the_bytes_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], name: str, policy: str, snapshot: str
) -> None:
    run(teams, world_size, paths, every_stage, name, snapshot, policy=policy)


def every_stage(gpus: SimulatedGpus, rank: int, world_size: int, name: str, snapshot: str) -> None:
    folder = shared_folder(rank)
    with gpus.torch_on_cpu():
        model, optimizer = sw.wrap(*build(rank, name), broadcast_buffers=False)
        go_on(model, optimizer, rank, range(2))
        with checkpointer(folder + "/cpu", model, optimizer) as checkpoints:
            checkpoints.save(1)
        losses = go_on(model, optimizer, rank, range(2, 4))
    expected = manifest_entries(folder + "/cpu/step-000002")
    for zero in in_turn(STAGES, 2 * (name == "sw.AdamW") + (snapshot == "copy"), of=4):
        model, optimizer = OnGpu(gpus).wrap(*build(rank, name), zero=zero, bucket_cap_mb=0.001, broadcast_buffers=False)
        go_on(model, optimizer, rank, range(2))
        with checkpointer(f"{folder}/{zero}", model, optimizer, snapshot=snapshot) as checkpoints:
            for _ in range(4):
                checkpoints.save(1)
            assert go_on(model, optimizer, rank, range(2, 4)) == losses
            found = checkpoints._writer._staging.stats()
            assert found["batches"] == found["host_waits"] > 0
            assert max(gather(found["batches"])) > 3  # a slot is filled again
            assert checkpoints.progress["device_bytes"] == found["bytes_down"] > 0
        assert manifest_entries(f"{folder}/{zero}/step-000002") == expected, zero
        model, optimizer = OnGpu(gpus).wrap(*build(rank, name, seed=3), zero=zero, broadcast_buffers=False)
        with checkpointer(f"{folder}/{zero}", model, optimizer) as checkpoints:
            assert checkpoints.restore() == 2
        assert sw.unwrap(model).mine.tolist() == [rank] * 3
        assert go_on(model, optimizer, rank, range(2, 4)) == losses, zero


def test_rows_of_fully_shard_are_saved_with_the_bytes_of_the_cpu(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 3, paths, rows_saved)


def rows_saved(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    def built(seed: int) -> Mlp:
        torch.manual_seed(seed)
        return Mlp()

    folder = shared_folder(rank)
    with gpus.torch_on_cpu():
        plain = built(0)
        model, optimizer = sw.wrap(plain, OPTIMIZERS["torch.AdamW"](plain.parameters()))
        go_on(model, optimizer, rank, range(2))
        with checkpointer(folder + "/cpu", model, optimizer) as checkpoints:
            checkpoints.save(1)
        losses = go_on(model, optimizer, rank, range(2, 4))
    for seed in (0, 3):  # saved, then restored into other values
        module = gpus.adopt_module(built(seed))
        for each in module:
            if isinstance(each, nn.Linear):
                sw.fully_shard(each)
        sw.fully_shard(module, deterministic=True)
        optimizer = OPTIMIZERS["torch.AdamW"](module.parameters())
        go_on(module, optimizer, rank, range(2))
        with checkpointer(folder + "/rows", module, optimizer) as checkpoints:
            if seed:
                assert checkpoints.restore() == 2
            else:
                checkpoints.save(1)
        assert go_on(module, optimizer, rank, range(2, 4)) == losses, seed
    assert manifest_entries(f"{folder}/rows/step-000002") == manifest_entries(folder + "/cpu/step-000002")


def test_a_save_waits_for_slots_and_for_nothing_else(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, quiet, policy="late")


def quiet(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module, optimizer = build(rank, "sw.AdamW")
    module.turned.data = module.turned.data.contiguous()  # of others the values come by torch's own copy
    model, optimizer = OnGpu(gpus).wrap(module, optimizer)
    with checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
        for step in range(3):
            go_on(model, optimizer, rank, range(step, step + 1))
            before = internals.reducer(model).stats()["host_waits"]
            with mock.patch.object(gpus, "synchronize", wraps=gpus.synchronize) as synchronized:
                checkpoints.save(step)
            # ranks compare their buffers: those come down together
            assert synchronized.call_count == (world_size > 1)
            assert internals.reducer(model).stats()["host_waits"] == before
        assert checkpoints._writer._staging.stats()["pinned_bytes"] == 3 << 20


def test_lazy_saves_copy_what_is_on_the_gpu_at_once(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, lazy, policy="random")


def lazy(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    folder = shared_folder(rank)
    model, optimizer = OnGpu(gpus).wrap(*build(rank, "sw.AdamW"))
    go_on(model, optimizer, rank, range(1))
    values = [p.detach().clone() for p in model.parameters()]
    with checkpointer(folder, model, optimizer, snapshot="lazy") as checkpoints:
        checkpoints.save(0)
        with torch.no_grad():  # on the CPU this makes the save fail, or is warned of: it may hold both
            for parameter in model.parameters():
                parameter.mul_(2)
        go_on(model, optimizer, rank, range(1, 2))
        checkpoints.wait()
        checkpoints.restore()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values))


@pytest.mark.parametrize("nth", some(range(1, 21), 7))
def test_a_call_of_the_driver_that_fails_in_a_save_is_named_on_all(
    teams: Any, world_size: int, paths: dict[str, str], nth: int
) -> None:
    run(teams, world_size, paths, failing_call, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    folder = shared_folder(rank)
    model, optimizer = OnGpu(gpus).wrap(*build(rank, "sw.AdamW"))
    with checkpointer(folder, model, optimizer) as checkpoints:
        for step in range(3):
            go_on(model, optimizer, rank, range(step, step + 1))
            if step == 1 and rank == world_size - 1:
                gpus.fail_call(nth, 999)
            if step != 1:
                checkpoints.save(step)
                checkpoints.wait()
                continue
            with pytest.raises(sw.CheckpointError, match=r"CUDA_ERROR_UNKNOWN|\(999\)") as caught:
                checkpoints.save(step)  # all ranks hear here of what fails before they agree
                gpus.fail_call(0, 0)
                checkpoints.wait()
            gpus.fail_call(0, 0)
            said = gather(str(caught.value))
            assert len(set(said)) == 1 and (f"rank {world_size - 1}: " in said[0] or world_size == 1), said
        assert [n for n in (1, 2, 3) if os.path.exists(f"{folder}/step-{n:06d}/MANIFEST.json")] == [1, 3]
        assert checkpoints.restore() == 3


@pytest.mark.parametrize("has_buffers", [True, False])
def test_steps_go_from_the_gpu_into_memory(
    teams: Any, world_size: int, paths: dict[str, str], has_buffers: bool
) -> None:
    run(teams, world_size, paths, into_memory, has_buffers, policy="random")


def into_memory(gpus: SimulatedGpus, rank: int, world_size: int, has_buffers: bool) -> None:
    """Without buffers, each step after the first uses the addresses of the step before."""
    folder = shared_folder(rank)
    torch.manual_seed(0)
    module = Subject(rank) if has_buffers else Mlp()
    model, optimizer = OnGpu(gpus).wrap(module, OPTIMIZERS["sw.AdamW"](module.parameters()), broadcast_buffers=False)
    with checkpointer(folder, model, optimizer, memory_every=1) as checkpoints:
        for step in range(4):
            go_on(model, optimizer, rank, range(step, step + 1))
            assert not checkpoints.save(step, every=100)
            if step == 2:
                values = [p.detach().clone() for p in model.parameters()]
        assert checkpoints._memory.are_ready is not has_buffers
        assert checkpoints.progress["memory_step"] == 4 and checkpoints.progress["device_bytes"] > 0
        assert checkpoints.restore(step=3) == 3
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values))
