"""Law: on GPUs, too, sw.fully_shard cuts parameters, gradients and states as torch.chunk cuts dimension 0, uneven rows
and empty chunks included, and torch's own optimizers over the DTensors have the bits of zero=0. On a mesh with replicas
a rank's rows are those of its place in the row. Ranks that leave parameters unused, that add backwards up, or whose
gradients are sparse have the same bits. Nothing races or leaks. The memory in which slices arrive is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LONG
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from subjects_of_rows import assert_released, rows_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
BF16, F64 = torch.bfloat16, torch.float64


class Odd(nn.Module):
    """Parameters of 2, 5, 11 and 13 rows, in three dtypes; `left` is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.left = nn.Linear(7, 2), nn.Linear(7, 5)
        self.wide, self.deep = nn.Linear(7, 13), nn.Linear(13, 5, dtype=F64)
        self.short = nn.Linear(7, 11, bias=False, dtype=BF16)
        self.table = nn.Embedding(11, 7, sparse=True)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = x + self.table(torch.arange(len(x), device=x.device))
        total = self.few(x).square().sum() + self.deep(torch.tanh(self.wide(x)).double()).square().sum()
        total = total + self.short(x.to(BF16)).float().square().sum()
        return total + self.left(x).square().sum() if left else total


def made(gpus: SimulatedGpus) -> Odd:
    torch.manual_seed(0)
    return gpus.adopt_module(Odd())


def cut(module: Odd, **options: Any) -> Odd:
    for each in (module.wide, module.deep):
        sw.fully_shard(each, **options)
    return sw.fully_shard(module, sparse_gradients="dense", **options)


def train(model: Any, optimizer: Any, rank: int, turns: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return losses, and copies of the last gradients. Each of `turns` backwards of a step adds to what stands."""
    losses: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for step in range(3):
        with model.no_sync():
            model(batch(rank, 6, 7, step=step), step == rank).backward()
        for turn in range(turns):
            loss = model(batch(rank, 6, 7, step=9 * turn + step), turn == 0 and rank == 0)
            loss.backward()
            losses.append(loss.detach().clone())
        grads = [each.grad for each in model.parameters()]
        gradients = [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in grads]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def compare(gpus: SimulatedGpus, rank: int, at: int, ranks: int, mesh: Any = None, deterministic: bool = True) -> None:
    """Train at zero=0 and with rows, of which this rank has chunk `at` of `ranks`."""
    turns = 2 if deterministic else 1  # NCCL's sum, to which a mean is added, has other bits than one of sums with it
    plain = made(gpus)
    model = sw.wrap(plain, sparse_gradients="dense", device_mesh=mesh, deterministic=deterministic)
    losses, gradients = train(model, torch.optim.AdamW(plain.parameters(), lr=2**-7), rank, turns)
    module = cut(made(gpus), mesh=mesh, deterministic=deterministic)
    found, rows = train(module, torch.optim.AdamW(module.parameters(), lr=2**-7), rank, turns)
    assert_released(module)
    assert all(bits_equal(a, b) for a, b in zip(found, losses, strict=True)), (found, losses)
    for (name, sharded), whole, mine, gradient in zip(
        module.named_parameters(), plain.parameters(), rows, gradients, strict=True
    ):
        assert bits_equal(sharded.to_local().detach(), rows_of(whole.detach(), at, ranks)), name
        assert bits_equal(mine, rows_of(gradient, at, ranks)), f"the gradient of {name}"


CASES = [(ranks, policy) for ranks in (2, 3, 4) for policy in POLICIES]


@pytest.mark.parametrize(("ranks", "policy"), CASES if LONG else CASES[::5])
def test_rows_have_the_bits_of_zero_0(teams: Any, paths: dict[str, str], ranks: int, policy: str) -> None:
    run(teams, ranks, paths, by_rows, policy=policy)


def by_rows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    compare(gpus, rank, rank, world_size)


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_of_a_mesh_are_those_of_a_place_in_the_row(teams: Any, paths: dict[str, str], deterministic: bool) -> None:
    run(teams, 4, paths, on_a_mesh, deterministic)


def on_a_mesh(gpus: SimulatedGpus, rank: int, world_size: int, deterministic: bool) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicate", "shard"))
    compare(gpus, rank, rank % 2, 2, mesh, deterministic)


@pytest.mark.parametrize("reduced", [BF16, torch.float16, None])
def test_units_and_means_in_16_bits(teams: Any, paths: dict[str, str], reduced: torch.dtype | None) -> None:
    run(teams, 3, paths, in_16_bits, reduced)


def in_16_bits(gpus: SimulatedGpus, rank: int, world_size: int, reduced: torch.dtype | None) -> None:
    def trained(model: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for step in range(3):
            loss = model(batch(rank, 6, 7, step=step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    torch.manual_seed(0)
    plain, module = gpus.adopt_module(Mlp()), gpus.adopt_module(Mlp())
    module.load_state_dict(plain.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduced)
    precision = sw.Precision(param_dtype=BF16, reduce_dtype=reduced)
    model = sw.wrap(plain, precision=precision, deterministic=True)
    losses = trained(model, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    for each in module:
        if isinstance(each, nn.Linear):
            sw.fully_shard(each, mp_policy=policy)
    sw.fully_shard(module, mp_policy=policy, deterministic=True)
    found = trained(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    assert all(bits_equal(a, b) for a, b in zip(found, losses, strict=True)), (found, losses)
    for sharded, whole in zip(module.parameters(), plain.parameters(), strict=True):
        assert bits_equal(sharded.to_local().detach(), rows_of(whole.detach(), rank, world_size))


def test_units_are_whole_side_by_side_and_their_memory_is_said(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 3, paths, side_by_side)


def side_by_side(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(nn.Sequential(*(nn.Linear(7, 7) for _ in range(4))))
    whole = {name: value.detach().clone() for name, value in module.named_parameters()}
    for each in module:
        sw.fully_shard(each)
    sw.fully_shard(module)
    for each in module:  # which have two places in turn
        each.unshard()
    for name, value in module.named_parameters():
        assert not isinstance(value, DTensor) and bits_equal(value.detach(), whole[name]), name
    for each in module:
        each.reshard()
    assert_released(module)
    # A unit is 49 and 7 elements; its slices are chunks of 3 rows, each on 128 bytes.
    unit, beside = 256 + 128, world_size * (128 + 128)
    assert sw.describe()["models"][-1]["unit_bytes"] == 2 * unit + beside
    values = [value.full_tensor() for value in module.parameters()]
    assert all(bits_equal(value, expected) for value, expected in zip(values, whole.values(), strict=True))


def test_a_unit_stays_with_a_number_of_ranks_until_its_backward(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, staying_near, policy="random")


def staying_near(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The gathers of a backward stay inside a node, with the bits of a gather over all; without the number they do not."""
    gpus.set_node(rank // 2)
    results: dict[Any, Any] = {}
    crossed: dict[Any, list[float]] = {}
    for precision in (None, "bf16"):
        for reshard in (False, True, 2):
            torch.manual_seed(0)
            module = gpus.adopt_module(nn.Sequential(*(nn.Linear(7, 7) for _ in range(6))))
            for each in module[:5]:
                sw.fully_shard(each, reshard_after_forward=reshard, precision=precision, deterministic=True)
            sw.fully_shard(module, precision=precision, deterministic=True)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            sent, losses = [], []
            for step in range(3):
                for number in range(2):
                    module.set_requires_gradient_sync(number == 1)
                    loss = module(batch(rank, 6, 7, step=2 * step + number)).float().square().mean()
                    gpus.synchronize()
                    before = gpus.sent_across()
                    loss.backward()
                    gpus.synchronize()
                    sent.append(gpus.sent_across() - before)
                    losses.append(loss.detach().clone())
                with torch.no_grad():
                    module(batch(rank, 6, 7, step=step))
                optimizer.step()
                optimizer.zero_grad()
            results[precision, reshard] = [*losses, *(p.to_local().detach().clone() for p in module.parameters())]
            crossed[precision, reshard] = sent
            near = sw.stats(module)["models"][0]["near_gathers"]
            assert (near > 0) == (reshard == 2), (reshard, near)
        for reshard in (True, 2):
            pairs = zip(results[precision, reshard], results[precision, False], strict=True)
            assert all(bits_equal(a, b) for a, b in pairs), (precision, reshard)
        for all_ranks, stays, whole in zip(*(crossed[precision, each] for each in (True, 2, False)), strict=True):
            assert abs(stays - whole) <= 64 and all_ranks - stays > 400, crossed  # 64: use bytes and tags


def test_a_unit_of_a_row_stays_with_a_number_of_its_ranks(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, staying_near_in_a_row)


def staying_near_in_a_row(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(1, 4), mesh_dim_names=("dp", "fsdp"))
    found = []
    for reshard in (True, 2):
        module = made(gpus)
        for each in (module.wide, module.deep):
            sw.fully_shard(each, mesh=mesh["fsdp"], reshard_after_forward=reshard, deterministic=True)
        sw.fully_shard(module, mesh=mesh["fsdp"], sparse_gradients="dense", deterministic=True)
        found.append(train(module, torch.optim.AdamW(module.parameters(), lr=2**-7), rank, 2))
    assert all(bits_equal(a, b) for a, b in zip(*(each[0] + each[1] for each in found), strict=True))
    with pytest.raises(ValueError, match="must be a divisor of 4, got 3"):
        sw.fully_shard(made(gpus), reshard_after_forward=3)


def test_a_full_card_names_the_bucket_of_a_sum_that_stays_in_rows(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, no_room_for_sums)


def no_room_for_sums(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicate", "shard"))
    module = gpus.adopt_module(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5)))
    sw.fully_shard(module[0], mesh=mesh)
    sw.fully_shard(module, mesh=mesh)
    module(batch(rank, 6, 7)).square().mean().backward()
    module.zero_grad()
    module.set_requires_all_reduce(False)
    loss = module(batch(rank, 6, 7)).square().mean()
    gpus.limit_memory(gpus.memory_in_use() + 1)
    told = r"no memory for a row's sum of bucket \d of .*, (0|1)\.\w+ to (0|1)\.\w+: cuMemAlloc_v2 failed for \d+ bytes"
    with pytest.raises(MemoryError, match=told):
        loss.backward()
    gpus.limit_memory(0)
