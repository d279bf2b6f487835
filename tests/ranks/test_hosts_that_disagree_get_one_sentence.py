"""Laws of disagreement between hosts: ranks of two hosts that wrap modules or come to collectives that differ all raise
sw.Error with one text that names both sides, and modules that differ do not spoil the group."""

import pytest
import torch
from harness import gather
from peer import PEER, engine, sw
from test_ranks_that_disagree_get_one_sentence import CASES, collective

pytestmark = pytest.mark.skipif(PEER == "torch", reason="the engine itself")


class Odd(torch.nn.Module):
    """Two layers; on the odd rank something about them is another."""

    def __init__(self, case):
        super().__init__()
        wide, names = 5 if case == "shape" else 4, ["first", "second"]
        if case == "name":
            names[1] = "other"
        if case == "order":
            names.reverse()
        for name in names:
            self.add_module(name, torch.nn.Linear(3, wide if name == "second" else 4))
        if case == "dtype":
            self.second.to(torch.float64)


DIFFERENCES = {
    "name": ("second", "other"),
    "shape": ("(4, 3)", "(5, 3)"),
    "dtype": ("float32", "float64"),
    "order": ("first", "second"),
}


def wraps_another(rank, world_size, case):
    module = Odd(case if rank == world_size - 1 else "")
    with pytest.raises(engine.Error) as raised:
        sw.DistributedDataParallel(module, timeout_s=10.0)
    texts = gather(str(raised.value))
    wrapped = sw.DistributedDataParallel(torch.nn.Linear(3, 3), timeout_s=10.0)  # and the group goes on
    wrapped(torch.ones(2, 3)).sum().backward()
    return texts


@pytest.mark.parametrize("case", DIFFERENCES)
def test_modules_that_differ_between_hosts_are_one_sentence(hosts, case):
    with hosts(2, 1) as lab:
        texts = lab.team.run(wraps_another, case=case)[0]
    assert texts == [texts[0]] * 3, texts
    assert "ranks 0, 1" in texts[0] and "rank 2" in texts[0], texts[0]
    for word in DIFFERENCES[case]:
        assert word in texts[0], texts[0]


def comes_to_another(rank, world_size, case):
    from shardwright.process_group import host_group

    difference, words = CASES[case]
    comm = host_group(torch.distributed.group.WORLD, 10.0).comm
    collective(comm)
    with pytest.raises(engine.Error) as raised:
        collective(comm, **(difference if rank == world_size - 1 else {}))
    texts = gather(str(raised.value))
    assert texts == [texts[0]] * world_size, texts
    for word in (*words, "rank 0", f"rank {world_size - 1}"):
        assert word in texts[0], (word, texts[0])


@pytest.mark.parametrize("case", ["op", "dtype", "count", "kind"])
def test_collectives_that_differ_between_hosts_are_one_sentence(hosts, case):
    with hosts(2, 1) as lab:
        lab.team.run(comes_to_another, case=case)
