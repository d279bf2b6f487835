"""Law: over several hosts of GPUs a fold adds a host's ranks in rank order, then hosts in order: at every stage the bits
of CPU ranks on the same hosts, whatever the sizes of hosts and the order of their ranks. With L ranks a host a rank sends
n / L of a bucket's n bytes to the other of two hosts, half of it for slices. A rank that fails inside an exchange is
named on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import internals
import pytest
import torch
import torch.distributed as dist
from compressed_on_gpus import accumulating, running_out
from harness import LONG, gather, in_turn
from internals import _engine, process_group
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

#: the host of each rank; of one size, and of several
MAPS = {
    "2 x 2": [0, 0, 1, 1],
    "in turns": [0, 1, 0, 1],
    "3 + 1": [0, 0, 0, 1],
    "2 x 4": [0, 0, 0, 0, 1, 1, 1, 1],
}
#: what makes means folds
FOLDS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "sums": {"deterministic": True, "reduce": "sum"},
    "fp16": {"compress": sw.Fp16()},
    "bf16": {"compress": sw.Bf16()},
    "int8": {"compress": sw.Int8(block=32)},
}
#: use bytes and tags of a step, through a ring
BESIDE = 128


@contextlib.contextmanager
def on_hosts(host_of: list[int]) -> Iterator[dict[str, Any]]:
    """Options of a wrapper whose ranks are told these hosts."""
    group = dist.new_group(range(len(host_of)))
    process_group._forced_hosts = host_of
    try:
        yield {"process_group": group, "timeout_s": 60}
    finally:
        process_group._forced_hosts = None


def plain(model: Any, optimizer: Any, rank: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(2):
        model(batch(rank, 6, 7, step=step).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(
    gpus: SimulatedGpus, rank: int, host_of: list[int], scene: Any, dtype: torch.dtype, **options: Any
) -> tuple[list[torch.Tensor], float, int]:
    """Return parameters, the bytes that the last backward sent to other hosts, and the bytes of all buckets."""
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp().to(dtype))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    with on_hosts(host_of) as hosts:
        if options.pop("mesh", False):
            mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
            hosts = {"device_mesh": mesh, "timeout_s": 60}
        model, optimizer = sw.wrap(module, optimizer, bucket_cap_mb=0.001, **hosts, **options)
    scene(model, optimizer, rank)
    reducer = internals.reducer(model)
    size = sum(reducer.bucket_shape(bucket)[1] for bucket in range(reducer.bucket_count)) * dtype.itemsize
    parameters = [value.clone() for value in sw.full_state_dict(model).values()]
    gpus.synchronize()
    before = gpus.sent_across()
    optimizer.zero_grad()
    model(batch(rank, 6, 7).to(dtype)).float().square().mean().backward()
    gpus.synchronize()
    return parameters, gpus.sent_across() - before, size


SCENES: list[tuple[str, str, Any, torch.dtype]] = [
    *(("2 x 2", name, plain, torch.float32) for name in FOLDS),
    ("2 x 2", "deterministic", plain, torch.bfloat16),
    ("2 x 2", "bf16", plain, torch.bfloat16),
    ("2 x 2", "deterministic", accumulating, torch.float32),
    ("2 x 2", "bf16", accumulating, torch.float32),
    ("2 x 2", "deterministic", running_out, torch.float32),
    ("in turns", "deterministic", accumulating, torch.float32),
    ("3 + 1", "deterministic", accumulating, torch.float32),
    ("3 + 1", "fp16", plain, torch.float32),
    ("2 x 4", "deterministic", plain, torch.float32),
    ("2 x 4", "bf16", plain, torch.float32),
    ("3 + 1", "int8", plain, torch.float32),
]


@pytest.mark.parametrize(
    "number", range(len(SCENES)), ids=lambda n: ", ".join(map(str, (*SCENES[n][:2], SCENES[n][3])))
)
def test_every_stage_has_the_bits_of_cpu_ranks_on_the_same_hosts(
    teams: Any, paths: dict[str, str], number: int
) -> None:
    run(teams, len(MAPS[SCENES[number][0]]), paths, compare, number, policy=POLICIES[number % len(POLICIES)])


def compare(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    shape, name, scene, dtype = SCENES[number]
    host_of, options = MAPS[shape], FOLDS[name]
    gpus.set_node(host_of[rank])
    with gpus.torch_on_cpu():
        cpu = {key: value for key, value in options.items() if key != "deterministic"}
        expected = {zero: trained(gpus, rank, host_of, scene, dtype, zero=zero, **cpu) for zero in (0, 2)}
    for zero in (0, 1, 2, 3) if LONG or world_size == 4 else in_turn((0, 2), number):
        found, sent, size = trained(gpus, rank, host_of, scene, dtype, zero=zero, **options)
        assert all(bits_equal(a, b) for a, b in zip(found, expected[zero // 2 * 2][0], strict=True)), zero
        if "x" not in shape or scene is not plain or dtype != torch.float32 or "int" in name:
            continue
        crossing = size / (1 if "compress" not in options else 2) / (world_size // 2)
        gathered = size / 2 / (world_size // 2) if zero == 3 else 0  # units, in the backward
        crossing = crossing / 2 if zero >= 2 else crossing
        assert crossing <= sent <= crossing + 2 * gathered + BESIDE, (zero, sent, crossing, size)


@pytest.mark.parametrize("shape", ["2 x 2", "2 x 4"])
def test_each_record_crosses_once_in_each_direction(teams: Any, paths: dict[str, str], shape: str) -> None:
    run(teams, len(MAPS[shape]), paths, records, shape)


def records(gpus: SimulatedGpus, rank: int, world_size: int, shape: str) -> None:
    """The other host gets a slice of the records of one bucket, and then of the result."""
    gpus.set_node(MAPS[shape][rank])
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    with on_hosts(MAPS[shape]) as hosts:
        model = sw.wrap(module, compress=sw.Int8(block=32), **hosts)
    gpus.synchronize()
    before = gpus.sent_across()
    model(batch(rank, 6, 7)).square().mean().backward()
    gpus.synchronize()
    each = -(-sum(-(-p.numel() // 32) for p in module.parameters()) // world_size)
    sent = gpus.sent_across() - before
    assert 0 <= sent - 2 * each * _engine.block_record_bytes(32, 8) <= BESIDE, (sent, each)


def test_powersgd_exchanges_between_all_ranks_wherever_they_are(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, low_rank)


def low_rank(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in (0, 1, 2, 3):
        found = []
        for host_of in ([0, 0, 0, 0], MAPS["2 x 2"], MAPS["3 + 1"]):
            compress = sw.PowerSGD(2, min_compression_rate=1)
            gpus.set_node(host_of[rank])
            found.append(trained(gpus, rank, host_of, plain, torch.float32, zero=zero, compress=compress)[0])
        assert all(bits_equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True)), zero


def test_a_mesh_across_hosts_has_the_bits_of_zero_0(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, on_a_mesh)


def on_a_mesh(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """Rows of the mesh are hosts, and lie across them: each slice has two owners."""
    for host_of in ([0, 0, 1, 1], [0, 1, 0, 1]):
        expected = trained(gpus, rank, host_of, plain, torch.float32, deterministic=True)[0]
        gpus.set_node(host_of[rank])
        found = trained(gpus, rank, host_of, plain, torch.float32, deterministic=True, zero=2, mesh=True)[0]
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True)), host_of


@pytest.mark.parametrize("call", ("ncclSend", "ncclRecv"))
def test_a_rank_that_fails_inside_an_exchange_is_named_on_all(teams: Any, paths: dict[str, str], call: str) -> None:
    run(teams, 4, paths, failing, call)


def failing(gpus: SimulatedGpus, rank: int, world_size: int, call: str) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    with on_hosts(MAPS["2 x 2"]) as hosts:
        model = sw.wrap(module, compress=sw.Bf16(), bucket_cap_mb=0.001, **hosts)
    model(batch(rank, 6, 7)).square().mean().backward()
    gather(None)
    with pytest.raises(sw.Error) as caught:
        if rank == 3:
            gpus.fail_next(call, 3)
            model(batch(rank, 6, 7)).square().mean().backward()
        internals.link(model).host.barrier("what hosts do")
    said = gather(str(caught.value))
    assert all("NCCL on rank 3 of 4" in text for text in said), said


def test_rows_of_many_small_parameters_fold_over_uneven_hosts(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, many_rows)


def many_rows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The lone rank of a host folds three pieces, each with a chunk of every parameter, on means that stand."""
    host_of = MAPS["3 + 1"]
    gpus.set_node(host_of[rank])

    def rows(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = gpus.adopt_module(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12))))
        with on_hosts(host_of) as hosts:
            mesh = DeviceMesh.from_group(hosts["process_group"], "cpu")
            sw.fully_shard(module, mesh=mesh, timeout_s=60, **options)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for step in range(2):
                for part in range(3):
                    x = batch(rank, 6, 4, step=10 * step + part)
                    (module(x) if part != 1 else module[6:](x)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [value.clone() for value in sw.full_state_dict(module).values()]

    with gpus.torch_on_cpu():
        expected = rows()
    assert all(map(bits_equal, rows(deterministic=True), expected))
