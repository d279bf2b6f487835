"""Over hosts a stage changes what is sliced, and no bit: losses, parameters and optimizer state are those of zero=0 over the same
map of hosts, whose gradients have an oracle of their own (test_hosts_fold_in_two_steps.py).

Ranks of this machine are told which host they are on; hosts that are apart: test_stages_over_hosts_that_are_apart.py.
"""

import copy

import pytest
import torch
from harness import LONG, gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, sw
from test_every_stage_has_the_same_bits import (
    OPTIMIZERS,
    PRIVATE,
    Odd,
    Outcome,
    accumulating_inside_no_sync,
    accumulating_onto_the_average,
    clipped_by_ours,
    failing_once,
    never_cleared,
    plain_steps,
    run,
    some_heads,
    stage,
)
from models import Heads, Mlp
from test_hosts_fold_in_two_steps import hosts_of, on_hosts

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = (1, 2, 3, PRIVATE)
MAPS = ("2+1", "crosswise", *(("1+2", "1+1+1", "one host") if LONG else ()))
every_map = pytest.mark.parametrize("shape", MAPS)


@every_map
@pytest.mark.parametrize(
    "training",
    [
        plain_steps,
        accumulating_inside_no_sync,
        accumulating_onto_the_average,
        never_cleared,
        clipped_by_ours,
        failing_once,
    ],
)
@on_every_rank(at_least=3)
def test_every_training_at_every_stage(rank, world_size, shape, training):
    with on_hosts(hosts_of(shape, world_size)) as group:
        whole = run(0, training, rank, bucket_cap_mb=0.001, process_group=group)
        for zero in STAGES:
            for cap in (0.001, 25):
                run(zero, training, rank, bucket_cap_mb=cap, process_group=group).assert_equals(whole, (zero, cap))
    assert same_everywhere([p.tolist() for p in whole.parameters])
