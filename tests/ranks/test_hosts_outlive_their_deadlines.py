"""Law: a rank lives on after its wait has passed the deadline, whatever its carrier's thread still receives from other
hosts.
"""

import gc
import time

import pytest
import torch.distributed as dist
from harness import gather
from peer import PEER, engine

pytestmark = pytest.mark.skipif(PEER == "torch", reason="the engine itself")

#: ranks 0 and 1 own slice 0, 2 and 3 slice 1: what one host has, the other gets
OWNERS = ([0, 0, 1, 1], [0, 1, 0, 1])
GATHERED_BYTES = 4 << 20


def gives_up_in_the_middle(rank, world_size):
    """Slices take 0.8 s at 20 Mbit/s and have 0.3 s. Afterwards the operation's memory is freed."""
    from internals import host_group

    comm = host_group(dist.group.WORLD, 20.0).comm
    arena = comm.arena(GATHERED_BYTES, "parameters", of_hosts=True)
    gather(None)
    comm.timeout_s = 0.3
    with pytest.raises(engine.CommTimeoutError, match="all_gather"):
        comm.all_gather(arena, [(0, GATHERED_BYTES)], slices=OWNERS)
    del arena
    gc.collect()
    time.sleep(1.5)
    with pytest.raises(engine.CommTimeoutError):
        comm.barrier()
    return True


def test_a_gather_of_slices_that_is_given_up_harms_nobody(hosts):
    with hosts(2, 2, rate="20mbit") as lab:
        assert all(lab.team.run(gives_up_in_the_middle))
