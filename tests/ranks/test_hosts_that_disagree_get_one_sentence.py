"""Laws of disagreement between hosts: if ranks of two hosts wrap different modules, come to different collectives or
run different backwards, all raise sw.Error with one text that names both sides, within 2 s of the last arrival. Modules
that differ leave the group usable.
"""

import time

import pytest
import torch
from harness import Stopwatch, gather
from models import Mlp
from peer import PEER, engine, sw
from test_every_shape_of_backward import a_forward_more, two_backwards_of_one_forward, two_micro_batches
from test_ranks_begin_with_one_model import DIFFERENCES
from test_ranks_that_disagree_get_one_sentence import CASES, collective

pytestmark = pytest.mark.skipif(PEER == "torch", reason="the engine itself")

AT_ONCE_S = 2.0
#: of ranks 0 and 1 on one host and 2 on another: beside who carries, alone on a host, who carries
every_odd_rank = pytest.mark.parametrize("odd", [2, 1, 0], ids=lambda rank: f"rank {rank}")


def one_sentence(action, late=0.0):
    """Return the text of all ranks, after a check that it is one and in time. `late`: seconds that this rank is late."""
    time.sleep(late)
    come = time.monotonic()
    with pytest.raises(engine.Error) as raised:
        action()
    said = time.monotonic()  # one clock for all: the hosts are of one machine
    texts, comes, saids = zip(*gather((str(raised.value), come, said)))
    assert texts == (texts[0],) * len(texts), texts
    assert max(saids) - max(comes) < AT_ONCE_S, (comes, saids)
    return texts[0]


def wraps_another(rank, world_size, difference):
    usual, odd, words = DIFFERENCES[difference]
    module = (odd if rank == world_size - 1 else usual)()
    text = one_sentence(lambda: sw.DistributedDataParallel(module, timeout_s=10.0))
    for word in ("ranks 0, 1", "rank 2", *words):
        assert word in text, (word, text)
    wrapped = sw.DistributedDataParallel(torch.nn.Linear(3, 3), timeout_s=10.0)  # and the group goes on
    wrapped(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_modules_that_differ_between_hosts_are_one_sentence(hosts, difference):
    with hosts(2, 1) as lab:
        lab.team.run(wraps_another, difference=difference)


def communicator():
    from internals import host_group

    return host_group(torch.distributed.group.WORLD, 10.0).comm


def comes_to_others(rank, world_size, odd):
    """Each case ends a communicator, and the next case makes another."""
    for difference, words in CASES.values():
        comm = communicator()
        collective(comm)
        given = difference if rank == odd else {}
        text = one_sentence(lambda comm=comm, given=given: collective(comm, **given), 0.1 if rank == odd else 0.0)
        for word in (*words, f"rank {odd}", "rank 1" if odd == 0 else "rank 0"):
            assert word in text, (word, text)
        with pytest.raises(engine.Error) as again:
            comm.barrier()
        assert text in str(again.value)
        begin = Stopwatch()
        comm.close()
        assert begin.seconds() < 0.6, "a carrier waited for one that had ended too"


@every_odd_rank
def test_collectives_that_differ_between_hosts_are_one_sentence(hosts, odd):
    with hosts(2, 1) as lab:
        lab.team.run(comes_to_others, odd=odd)


def broadcasts_and_asks_for_others(rank, world_size):
    memory = torch.ones(8)
    for root, size, words in ((rank // 2, 16, ("from rank 0", "from rank 1")), (0, 16 + rank // 2, ("16", "17"))):
        comm = communicator()
        text = one_sentence(lambda c=comm, r=root, s=size: c.broadcast([(memory.data_ptr(), s)], r))
        for word in (*words, "rank 0", "rank 2"):
            assert word in text, (word, text)
    comm = communicator()
    text = one_sentence(lambda: comm.arena(4096 * (1 + rank // 2), "gradients", of_hosts=True))
    for word in ("4096", "8192", "gradients"):
        assert word in text, (word, text)


def test_broadcasts_and_arenas_that_differ_between_hosts_are_one_sentence(hosts):
    with hosts(2, 1) as lab:
        lab.team.run(broadcasts_and_asks_for_others)


#: given the rank as seen from the odd one: 0 there
BACKWARDS = (two_backwards_of_one_forward, two_micro_batches, a_forward_more)


def goes_back_more_often(rank, world_size, odd, zero):
    for step in BACKWARDS:
        torch.manual_seed(0)
        module = Mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wrapped, optimizer = sw.wrap(module, optimizer, zero=zero, timeout_s=10.0)

        def train(step=step, wrapped=wrapped, optimizer=optimizer):
            for _ in range(2):
                step(wrapped, abs(rank - odd))
                optimizer.step()

        text = one_sentence(train)
        assert f"rank {odd}" in text and "backward" in text, text


@pytest.mark.parametrize("zero", [0, 2])
@every_odd_rank
def test_different_numbers_of_backwards_are_one_sentence(hosts, odd, zero):
    with hosts(2, 1) as lab:
        lab.team.run(goes_back_more_often, odd=odd, zero=zero)
