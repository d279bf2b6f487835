"""Law: all_reduce leaves the bits of oracle.fold.fold on every rank for any dtype, operation, size, memory and
instruction set. Sizes lie around one slot (128 KiB) and its ring of four.
"""

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal, fold
from peer import engine, host_comm

pytestmark = pytest.mark.skipif(engine is None, reason="the engine itself")

SLOT_BYTES = 128 * 1024
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
OPS = (
    dict.fromkeys(FLOATS, ("sum", "mean", "min", "max"))
    | dict.fromkeys(INTEGERS, ("sum", "min", "max"))
    | dict.fromkeys(COMPLEX, ("sum", "mean"))
)


def sizes(item_bytes):
    slot = SLOT_BYTES // item_bytes
    return [0, 1, 2, 7, 1023, slot - 1, slot, slot + 1, 4 * slot + 1, (3 << 20) // item_bytes + 13]


def contribution(rank, numel, dtype, seed=0):
    """Return a rank's contribution. Every rank can compute all of them, so the expected value needs no communication."""
    generator = torch.Generator().manual_seed(1009 * seed + rank + 1)
    torch_dtype = getattr(torch, dtype)
    if dtype in INTEGERS:
        limits = torch.iinfo(torch_dtype)
        return torch.randint(limits.min, limits.max, (numel,), generator=generator, dtype=torch_dtype)
    if dtype in COMPLEX:
        return torch.randn(numel, generator=generator, dtype=torch_dtype)
    values = torch.randn(numel, generator=generator)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, 6e4, 3e38])
    places = torch.randint(0, max(numel, 1), (numel // 50,), generator=generator)
    values[places] = special[torch.randint(0, len(special), (len(places),), generator=generator)]
    return values.to(torch_dtype)


def expected(world_size, numel, dtype, op, seed=0):
    return fold([contribution(rank, numel, dtype, seed) for rank in range(world_size)], op)


def private(tensor):
    return tensor.clone()


def in_arena(comm, nbytes):
    """Return a function that puts a tensor into an arena of `comm`."""
    arena = comm.arena(nbytes, "test")

    def place(tensor):
        capsule = arena.tensor(0, str(tensor.dtype).removeprefix("torch."), tensor.shape)
        return torch.utils.dlpack.from_dlpack(capsule).copy_(tensor)

    return place


def all_reduce(comm, tensor, op, label="all_reduce"):
    comm.all_reduce(tensor.data_ptr(), tensor.numel(), str(tensor.dtype).removeprefix("torch."), op, label)


@pytest.mark.parametrize("memory", ["arena", "private"])
@pytest.mark.parametrize("dtype", OPS)
@on_every_rank()
def test_every_dtype_operation_and_size_gives_the_oracles_bits(rank, world_size, dtype, memory):
    comm = host_comm(rank, world_size)
    place = in_arena(comm, 8 << 20) if memory == "arena" else private
    for seed, numel in enumerate(sizes(getattr(torch, dtype).itemsize)):
        for op in OPS[dtype]:
            tensor = place(contribution(rank, numel, dtype, seed))
            all_reduce(comm, tensor, op)
            assert bits_equal(tensor, expected(world_size, numel, dtype, op, seed)), (op, numel)
    comm.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "complex64", "int16"])
@on_every_rank()
def test_every_instruction_set_gives_the_same_bits(rank, world_size, dtype):
    comm = host_comm(rank, world_size)
    place = in_arena(comm, 1 << 20)
    assert "baseline" in engine.instruction_sets()
    try:
        for name in engine.instruction_sets():
            engine.force_instruction_set(name)
            assert engine.instruction_set() == name
            for numel in (1, 63, 4099, 40001):
                for op in OPS[dtype]:
                    tensor = place(contribution(rank, numel, dtype))
                    all_reduce(comm, tensor, op)
                    assert bits_equal(tensor, expected(world_size, numel, dtype, op)), (name, op, numel)
    finally:
        engine.force_instruction_set(None)
    comm.close()


@on_every_rank()
def test_memory_that_starts_anywhere_gives_the_same_bits(rank, world_size):
    comm = host_comm(rank, world_size)
    place = in_arena(comm, 1 << 20)
    for put in (place, private):
        for offset in (1, 3, 5):
            values = put(contribution(rank, 5000 + offset, "float32"))
            around = values[:offset].clone()
            all_reduce(comm, values[offset:], "mean")
            assert bits_equal(values[offset:], expected(world_size, 5000 + offset, "float32", "mean")[offset:])
            assert bits_equal(values[:offset], around)
    comm.close()


@on_every_rank(at_least=2)
def test_memory_may_lie_in_an_arena_on_one_rank_and_be_private_on_another(rank, world_size):
    comm = host_comm(rank, world_size)
    arena = in_arena(comm, 4 << 20)
    place = private if rank == 0 else arena
    for numel in (5, 40_001, 700_001):
        tensor = place(contribution(rank, numel, "float32"))
        all_reduce(comm, tensor, "sum")
        assert bits_equal(tensor, expected(world_size, numel, "float32", "sum")), numel
    comm.close()


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", "mean"), ("complex64", "max"), ("bool", "sum"), ("float32", "product")]
)
@on_every_rank()
def test_an_operation_that_has_no_meaning_is_refused_and_the_communicator_goes_on(rank, world_size, dtype, op):
    comm = host_comm(rank, world_size)
    tensor = torch.ones(16, dtype=torch.float64)
    with pytest.raises(ValueError, match=op):
        comm.all_reduce(tensor.data_ptr(), 4, dtype, op)
    all_reduce(comm, tensor, "sum")
    assert tensor.tolist() == [float(world_size)] * 16
    comm.close()


@on_every_rank()
def test_broadcast_leaves_the_roots_bytes_in_every_range(rank, world_size):
    comm = host_comm(rank, world_size)
    numels = [0, 1, 33, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 5 * SLOT_BYTES + 3]
    for root in range(world_size):
        tensors = [contribution(rank, numel, "uint8", root) for numel in numels]
        comm.broadcast([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], root)
        for tensor, numel in zip(tensors, numels, strict=True):
            assert bits_equal(tensor, contribution(root, numel, "uint8", root)), (root, numel)
    comm.broadcast([], 0)
    comm.close()


@on_every_rank()
def test_all_gather_returns_every_ranks_bytes_whatever_their_lengths(rank, world_size):
    comm = host_comm(rank, world_size)
    lengths = [0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 1_000_003]
    for shift in range(len(lengths)):
        data = [bytes([r + 1]) * lengths[(r + shift) % len(lengths)] for r in range(world_size)]
        assert comm.all_gather_bytes(data[rank]) == data
    comm.close()


@on_every_rank()
def test_no_rank_leaves_a_barrier_before_the_last_has_come(rank, world_size):
    import time

    comm = host_comm(rank, world_size)
    for turn in range(2 * world_size):
        if turn % world_size == rank:
            time.sleep(0.02)
        came = time.monotonic_ns()
        comm.barrier()
        left = time.monotonic_ns()
        assert left >= max(gather(came))
    comm.close()


@on_every_rank()
def test_hundreds_of_small_operations_in_a_row_never_mix(rank, world_size):
    comm = host_comm(rank, world_size)
    place = in_arena(comm, 1 << 20)
    for turn in range(300):
        tensor = torch.full((turn % 17 + 1,), float(rank + turn))
        if turn % 3 == 0:
            tensor = place(tensor)
        all_reduce(comm, tensor, "sum")
        assert tensor.eq(sum(r + turn for r in range(world_size))).all(), turn
        if turn % 5 == 0:
            assert comm.all_gather_bytes(b"%d" % (rank + turn)) == [b"%d" % (r + turn) for r in range(world_size)]
    assert comm.stats()["all_reduce"] == 300
    comm.close()


@on_every_rank()
def test_two_communicators_of_one_process_do_not_mix(rank, world_size):
    one, two = host_comm(rank, world_size, timeout_s=30.0), host_comm(rank, world_size, timeout_s=31.0)
    for turn in range(20):
        first, second = torch.full((3,), 1.0 + turn), torch.full((5,), 2.0)
        all_reduce(one, first, "sum")
        all_reduce(two, second, "max")
        assert first.eq((1.0 + turn) * world_size).all() and second.eq(2.0).all()
    one.close()
    two.barrier()
    two.close()
