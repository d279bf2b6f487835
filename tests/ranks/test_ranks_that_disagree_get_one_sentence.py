"""Law: when ranks come to different collectives, all of them raise sw.Error with one text that names both sides, within
2 s of the last arrival. The communicator repeats that text from then on.
"""

import threading
import time

import pytest
import torch
from harness import Stopwatch, gather, on_every_rank
from peer import engine, host_comm, sw

pytestmark = pytest.mark.skipif(engine is None, reason="the engine itself")

#: what the odd rank does, and words of both sides that the sentence must hold
CASES = {
    "op": (dict(op="max"), ("sum", "max")),
    "dtype": (dict(dtype="float64", numel=8), ("float32", "float64")),
    "count": (dict(numel=15), ("16", "15")),
    "label": (dict(label="bucket 4"), ("bucket 3", "bucket 4")),
    "kind": (dict(kind="barrier"), ("all_reduce", "barrier")),
    "large": (dict(numel=1 << 20), ("16", "1048576")),
}


def collective(comm, kind="all_reduce", numel=16, dtype="float32", op="sum", label="bucket 3"):
    memory = torch.ones(max(numel, 16), dtype=torch.float64)
    if kind == "barrier":
        comm.barrier(label)
    else:
        comm.all_reduce(memory.data_ptr(), numel, dtype, op, label)


@pytest.mark.parametrize("case", CASES)
@on_every_rank(at_least=2)
def test_what_differs_is_named_with_both_sides_on_every_rank(rank, world_size, case):
    difference, words = CASES[case]
    odd = world_size - 1
    comm = host_comm(rank, world_size, timeout_s=20)
    collective(comm)
    if rank == odd:
        time.sleep(0.2)
    start = Stopwatch()
    with pytest.raises(engine.Error) as raised:
        collective(comm, **(difference if rank == odd else {}))
    seconds = start.seconds()
    assert seconds < 2.2
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size
    for word in (*words, "rank 0", f"rank {odd}"):
        assert word in texts[0], (word, texts[0])
    for _ in range(2):
        with pytest.raises(engine.Error) as again:
            comm.barrier()
        assert texts[0] in str(again.value)
    comm.close()


@on_every_rank(at_least=2)
def test_roots_of_a_broadcast_that_differ_are_named(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=20)
    memory = torch.ones(4)
    with pytest.raises(engine.Error) as raised:
        comm.broadcast([(memory.data_ptr(), 16)], 0 if rank == 0 else 1)
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size and "from rank 0" in texts[0] and "from rank 1" in texts[0]


@on_every_rank(at_least=2)
def test_lengths_of_a_broadcast_that_differ_are_named(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=20)
    memory = torch.ones(8)
    with pytest.raises(engine.Error) as raised:
        comm.broadcast([(memory.data_ptr(), 16 if rank == 0 else 20)], 0)
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size and "16" in texts[0] and "20" in texts[0]


@on_every_rank(at_least=2)
def test_an_abort_reaches_every_rank_with_its_reason(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=20)
    comm.barrier()
    start = Stopwatch()
    if rank == 0:
        comm.abort("the data is bad on line 7")
    with pytest.raises(engine.CommError, match="the data is bad on line 7"):
        for _ in range(2):
            comm.barrier()
    assert start.seconds() < 2


@on_every_rank()
def test_who_asks_an_ended_communicator_for_the_reason_is_no_second_user(rank, world_size):
    """Call from a second thread beside the program's, like the thread that watches a GPU."""
    comm = host_comm(rank, world_size, timeout_s=20)
    comm.abort("the data is bad on line 7")
    answers = []

    def ask():
        for _ in range(100):
            with pytest.raises(engine.Error) as raised:
                comm.barrier()
            answers.append("the data is bad on line 7" in str(raised.value))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [True] * 300
    gather(None)


@on_every_rank(at_least=2)
def test_a_rank_that_leaves_is_named_where_it_is_waited_for(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=20)
    comm.barrier()
    if rank == 1:
        comm.close()
        comm.close()
        with pytest.raises(engine.Error):
            comm.barrier()
    else:
        with pytest.raises(engine.CommError) as raised:
            comm.barrier()
        assert raised.value.rank == 1 and "rank 1" in str(raised.value)
    gather(None)
    comm.close()


@on_every_rank(at_least=2)
def test_sizes_of_an_arena_that_differ_are_named(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=20)
    with pytest.raises(engine.Error) as raised:
        comm.arena(4096 if rank == 0 else 8192, "gradients")
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size
    assert "4096" in texts[0] and "8192" in texts[0] and "gradients" in texts[0]


@on_every_rank(at_least=2)
def test_a_wrong_secret_is_not_let_in(rank, world_size):
    import socket

    comm = engine.HostComm(rank, world_size, timeout_s=3)
    addresses, hosts = gather(comm.address), gather(socket.gethostname())
    secret = gather(b"0123456789abcdef")[0]
    with pytest.raises(engine.Error):
        comm.connect(addresses, b"another secret!!" if rank == 1 else secret, hosts)


@on_every_rank(at_least=2)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(rank, world_size):
    comm = host_comm(rank, world_size, timeout_s=1.0)
    comm.barrier()
    if rank != 1:
        start = Stopwatch()
        with pytest.raises(engine.CommTimeoutError) as raised:
            comm.barrier("evaluation")
        assert start.elapsed() > 0.8 and start.seconds() < 3
        assert isinstance(raised.value, TimeoutError) and raised.value.rank == 1
        assert "rank 1" in str(raised.value) and "evaluation" in str(raised.value)
    gather(None)


@on_every_rank(at_least=2)
def test_a_slow_rank_is_a_warning_and_nothing_more(rank, world_size):
    lines = []
    comm = host_comm(rank, world_size, timeout_s=30, warn_after_s=0.3, log=lines.append)
    comm.barrier()
    if rank == 1:
        time.sleep(1.0)
    comm.barrier("evaluation")
    comm.barrier()
    if rank != 1:
        assert any("rank 1" in line for line in lines), lines
        assert len(lines) <= 3
    gather(None)
    comm.close()


def named(name):
    """A linear layer under a name that is not ASCII, and so long that it is cut."""
    module = torch.nn.Module()
    module.add_module(name, torch.nn.Linear(3, 3))
    module.forward = getattr(module, name).forward
    return module


@on_every_rank(at_least=2, spoils=True)
def test_names_of_any_language_are_quoted(rank, world_size):
    torch.manual_seed(0)
    models = [sw.DistributedDataParallel(named(name)) for name in ("обратное_распространение", "逆伝播" * 12)]
    with pytest.raises(engine.Error) as raised:
        models[rank % 2](torch.ones(2, 3)).sum().backward()
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size
    assert "обратное" in texts[0] and "逆伝播" in texts[0]


@pytest.mark.parametrize("case", ["frozen", "lazy", "shared"])
@on_every_rank(at_least=2)
def test_a_module_that_one_rank_alone_cannot_wrap_is_news_to_all(rank, world_size, case):
    module = torch.nn.Linear(3, 3)
    if rank == 1 and case == "frozen":
        module.requires_grad_(False)
    elif rank == 1 and case == "lazy":
        module = torch.nn.LazyLinear(3)
    other = sw.DistributedDataParallel(torch.nn.Linear(2, 2)) if case == "shared" else None
    if rank == 1 and case == "shared":
        module.register_parameter("stolen", other.module.weight)
    start = Stopwatch()
    with pytest.raises(engine.Error) as raised:
        sw.DistributedDataParallel(module, timeout_s=20)
    assert start.seconds() < 2
    texts = gather(str(raised.value))
    assert all(f"rank 1 could not wrap Linear: {texts[1]}" == text for r, text in enumerate(texts) if r != 1), texts
    wrapped = sw.DistributedDataParallel(torch.nn.Linear(3, 3))  # and the group goes on
    wrapped(torch.ones(2, 3)).sum().backward()


@on_every_rank(at_least=2)
def test_deadlines_that_differ_are_named(rank, world_size):
    sw.DistributedDataParallel(torch.nn.Linear(3, 3), timeout_s=20)
    with pytest.raises(engine.Error, match="timeout_s") as raised:
        sw.DistributedDataParallel(torch.nn.Linear(3, 3), timeout_s=20 if rank else 30)
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size
