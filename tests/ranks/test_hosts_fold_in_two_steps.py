"""Law: over several hosts the average is the fold inside each host, then over hosts in order. One host gives the flat
fold.

Ranks of one machine are told their host, so that only the map differs from one host. (Separate hosts:
test_hosts_train_as_one.py.)
"""

import contextlib

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import gather, on_every_rank, same_everywhere
from internals import Line, find_hosts, process_group, wire
from oracle.fold import bits_equal, fold
from oracle.hosts import fold_over_hosts

MAPS = {"2+1": [0, 0, 1], "1+2": [0, 1, 1], "1+1+1": [0, 1, 2], "crosswise": [0, 1, 0], "one host": [0, 0, 0]}
every_map = pytest.mark.parametrize("shape", MAPS)


@contextlib.contextmanager
def on_hosts(host_of):
    """A process group whose ranks are told these hosts, with blocks in the form that travels between hosts."""
    group = dist.new_group(range(len(host_of)))
    usual = wire.Wire.slow_bytes_per_s
    process_group._forced_hosts, wire.Wire.slow_bytes_per_s = host_of, 0
    try:
        yield group
    finally:
        process_group._forced_hosts, wire.Wire.slow_bytes_per_s = None, usual


def hosts_of(shape, world_size):
    return [*MAPS[shape], *[max(MAPS[shape])] * (world_size - 3)]


def sample(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank + 1)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)
    real = dtype if not dtype.is_complex else torch.view_as_real(torch.empty(0, dtype=dtype)).dtype
    values = torch.randn(numel * (2 if dtype.is_complex else 1), generator=generator) * 10.0 ** (rank % 3)
    if numel > 9:
        values[3], values[5], values[7] = float("nan"), float("inf"), -0.0
    values = values.to(real)
    return torch.view_as_complex(values.view(-1, 2)) if dtype.is_complex else values


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64]


@every_map
@on_every_rank(at_least=3)
def test_private_memory_is_folded_inside_hosts_and_then_over_them(rank, world_size, shape):
    host_of = hosts_of(shape, world_size)
    with on_hosts(host_of) as group:
        comm = process_group.host_group(group, 20).comm
    for dtype in DTYPES:
        for op in ("sum", "mean", "min", "max"):
            if (op == "mean" and not dtype.is_floating_point) or (op in ("min", "max") and dtype.is_complex):
                continue
            for numel in (1, 33, 50_001):
                data = sample(rank, numel, dtype)
                contributions = gather(data)
                comm.all_reduce(data.data_ptr(), numel, str(dtype).split(".")[1], op)
                assert bits_equal(data, fold_over_hosts(contributions, host_of, op)), (dtype, op, numel)
                if shape == "one host":
                    assert bits_equal(data, fold(contributions, op)), (dtype, op, numel)


class Net(torch.nn.Module):
    """A model with two layers in use, one that only rank 0 uses, and one that no rank uses."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.first, self.idle = (
            torch.nn.Linear(70, 900, dtype=dtype),
            torch.nn.Linear(900, 130, dtype=dtype),
            torch.nn.Linear(130, 130, dtype=dtype),
            torch.nn.Linear(130, 5, dtype=dtype),
        )

    def forward(self, x, with_first=False):
        x = self.b(torch.relu(self.a(x)))
        return self.first(x) if with_first else x


def clear(parameters):
    for name, p in parameters.items():
        p.grad = p.grad if name.startswith("idle") else None


def batch(rank, step, dtype=torch.float32):
    return torch.randn(8, 70, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


@pytest.mark.parametrize("transport", ["auto", "staged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@every_map
@on_every_rank(at_least=3)
def test_gradients_are_averaged_over_hosts_and_unused_ones_keep_their_bits(rank, world_size, shape, dtype, transport):
    host_of = hosts_of(shape, world_size)
    with on_hosts(host_of) as group:
        model = sw.wrap(Net(dtype), process_group=group, bucket_cap_mb=0.3, timeout_s=20, transport=transport)
    accumulated = torch.full_like(model.module.idle.weight, float(rank) + 0.3)
    model.module.idle.weight.grad = accumulated.clone()
    for step in range(3):
        x, with_first = batch(rank, step, dtype), rank == 0 and step > 0
        parameters = dict(model.module.named_parameters())
        clear(parameters)
        with model.no_sync():
            model(x, with_first).float().square().sum().backward()
        alone = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        clear(parameters)
        model(x, with_first).float().square().sum().backward()
        everyone = gather(alone)
        for name, p in parameters.items():
            if name.startswith("idle"):
                continue
            if not any(name in theirs for theirs in everyone):
                assert p.grad is None, name
                continue
            contributions = [theirs.get(name, torch.zeros_like(p)) for theirs in everyone]
            assert bits_equal(p.grad, fold_over_hosts(contributions, host_of, "mean")), (name, step)
    assert bits_equal(model.module.idle.weight.grad, accumulated) and model.module.idle.bias.grad is None


@on_every_rank(at_least=3)
def test_each_rank_gets_every_ranks_bytes_and_the_roots(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        comm = process_group.host_group(group, 20).comm
    for size in (0, 1, 1016, 1017, 200_000):
        mine = bytes([rank + 1]) * (size + rank)
        assert comm.all_gather_bytes(mine) == [bytes([r + 1]) * (size + r) for r in range(world_size)], size
    for root in range(world_size):
        data = torch.full((70_000,), float(rank))
        comm.broadcast([(data.data_ptr(), data.numel() * 4)], root)
        assert (data == root).all()
        comm.barrier()


@every_map
@on_every_rank(at_least=3)
def test_hosts_that_disagree_get_one_sentence(rank, world_size, shape):
    with on_hosts(hosts_of(shape, world_size)) as group:
        comm = process_group.host_group(group, 10).comm
    data = torch.ones(40 + (rank == world_size - 1))
    with pytest.raises(sw.Error, match="ranks disagree on collective") as caught:
        comm.all_reduce(data.data_ptr(), data.numel(), "float32", "sum", "a step")
    assert "rank 0 came with" in str(caught.value) and f"rank {world_size - 1} came with" in str(caught.value)
    assert same_everywhere(str(caught.value))


@on_every_rank(at_least=3)
def test_a_rank_that_leaves_or_aborts_is_named_on_other_hosts(rank, world_size):
    for how in ("close", "abort"):
        with on_hosts(hosts_of("2+1", world_size)) as group:
            found = process_group.host_group(group, 10)
        found.comm.barrier()
        if rank == 1:
            found.comm.abort("a reason of its own") if how == "abort" else found.close()
        else:
            with pytest.raises(sw.CommError, match="rank 1") as caught:
                found.comm.barrier()
            assert caught.value.rank == 1 and (how == "close" or "a reason of its own" in str(caught.value))
        assert (found.name in sw.stats()["communicators"]) == (rank != 1 or how == "abort")  # and no error
        gather(None)


@on_every_rank(at_least=3)
def test_bytes_between_hosts_are_the_least_and_counted(rank, world_size):
    host_of = hosts_of("2+1", world_size)
    torch.manual_seed(0)
    with on_hosts(host_of) as group:
        model = sw.wrap(torch.nn.Linear(1500, 1500), process_group=group, bucket_cap_mb=4)
        comm = process_group.host_group(group, 20).comm
        hosts = process_group.host_group(group, 20).host_map()
    model(torch.ones(1, 1500)).sum().backward()
    before = comm.stats()
    model(torch.ones(1, 1500)).sum().backward()
    after = comm.stats()
    gradient_bytes = sum(p.numel() for p in model.parameters()) * 4
    for way in ("wire_bytes_sent", "wire_bytes_received"):
        assert gradient_bytes <= after[way] - before[way] <= 1.02 * gradient_bytes  # 2 (H - 1) / H, H = 2
    assert list(hosts) == ["host 0", "host 1"] and hosts["host 0"].endswith("ranks 0, 1")


@on_every_rank(at_least=3)
def test_what_hosts_cannot_do_is_a_named_error_on_all(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        with pytest.raises(NotImplementedError, match="gather='int8' runs inside one host"):
            module = torch.nn.Linear(3, 3)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            sw.wrap(module, optimizer, process_group=group, zero=3, share_parameters=False, gather="int8")
        with pytest.raises(NotImplementedError, match="needs one host"):
            process_group.host_group(group, 20).comm.arena(1000, "an arena")
    host_of = hosts_of("2+1", world_size)
    with on_hosts(host_of) as group:
        comm = process_group.host_group(group, 20).comm
    with pytest.raises(NotImplementedError, match="needs one host"):
        comm.arena(1000, "an arena")
    arena = comm.arena(1000, "an arena a host", of_hosts=True)
    for other in range(world_size):
        if host_of[other] == host_of[rank]:
            assert arena.tensor(0, "uint8", [1000], None, other) is not None
        else:
            with pytest.raises(ValueError, match=f"the part of rank {other} is on another host"):
                arena.tensor(0, "uint8", [1000], None, other)


@on_every_rank(at_least=3)
def test_compression_and_joined_ranks_work_over_hosts(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        model = sw.wrap(torch.nn.Linear(64, 64), process_group=group, compress=sw.Bf16())
        joined = sw.wrap(torch.nn.Linear(8, 8), process_group=group)
    model(torch.ones(4, 64) * (rank + 1)).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((64, 64), 4.0 * (world_size + 1) / 2), rtol=1e-2)
    with joined.join():
        for _ in range(2 + rank):
            joined(torch.ones(1, 8)).sum().backward()
            joined.zero_grad()
    assert same_everywhere(joined.module.weight.grad is None)


def test_ranks_of_one_place_share_a_host():
    def hosts(*places):
        return find_hosts([Line(rank, "", "a", place, 1, "0x1", "") for rank, place in enumerate(places)])

    assert hosts("x", "x", "x") == [0, 0, 0]
    assert hosts("x", "y", "y") == [0, 1, 1]
    assert hosts("x", "y", "x") == [0, 1, 0]
    assert hosts("", "y", "") == [0, 1, 0]
