"""Law: after sw.compile_units every stage has the bits of the same compiled module alone, with sw.checkpoint_units before
or after it. Units of one class share one graph, and hooks run outside of it.
"""

import copy

import pytest
import torch
from harness import LONG, gather, in_turn, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from test_units_are_whole_only_while_they_run import Block, Blocks, assert_released, steps

pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.timeout(180)]
OPTIONS = {"backend": "inductor" if LONG else "aot_eager", "fullgraph": True}
STAGES = [{"zero": 3, "share_parameters": False}, {"zero": 1}, {"zero": 2}, {"zero": 3}]


def trained(rank, calls, *, sharded=False, **stage):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Blocks(4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    before, after = calls
    for call, options in before:
        call(module, **options)
    if sharded:
        for block in module.blocks:
            sw.fully_shard(block)
        model = sw.fully_shard(module, bucket_cap_mb=0.004)
        optimizer = sw.shard_optimizer(model, optimizer)
    else:
        model, optimizer = sw.wrap(module, optimizer, bucket_cap_mb=0.004, **stage)
    for call, options in after:
        assert call(model, **options) is model
    torch._dynamo.utils.counters.clear()
    losses = steps(model, optimizer, rank, 2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    return losses, sw.full_state_dict(model), graphs


@on_every_rank(exactly=None if LONG else 3, deadline_s=150)
def test_every_stage_has_the_same_bits_in_both_orders_of_calls(rank, world_size):
    compiles, recomputes = (sw.compile_units, OPTIONS), (sw.checkpoint_units, {"every": 2})
    expected = trained(rank, ((), [compiles]), zero=0)
    assert expected[2] == 1
    calls = [([compiles], [recomputes]), ((), [recomputes, compiles]), ([recomputes], [compiles]), ([compiles], ())]
    cases = [(each, calls[at]) for at, each in enumerate(STAGES)] + [({"sharded": True}, calls[1])]
    for stage, which in cases if LONG else in_turn(cases, world_size):
        losses, state, graphs = trained(rank, which, **stage)
        assert losses == expected[0]
        assert all(bits_equal(value, expected[1][name]) for name, value in state.items())
        assert graphs == (4 if "sharded" in stage else 1)  # fully_shard gives each unit a class
    gather(None)


@on_every_rank(exactly=1, deadline_s=150)
def test_misuse_is_a_sentence_and_copies_are_plain(rank, world_size):
    model, _ = sw.wrap(module := Blocks(), torch.optim.SGD(module.parameters(), lr=0.1), zero=3, share_parameters=False)
    sw.compile_units(model, **OPTIONS)
    with pytest.raises(engine.Error, match=r"'blocks\.0' is compiled already"):
        sw.compile_units(model)
    model(batch(rank, 6, 7)).sum().backward()
    assert_released(model)
    with sw.full_parameters(model):
        copied = copy.deepcopy(module)
        for p in copied.parameters():
            p.data.zero_()
        assert type(copied.blocks[0]) is Block and not copied(batch(rank, 6, 7)).any()
    own = Blocks()
    own.blocks[0].forward = own.blocks[1].forward
    with pytest.raises(engine.Error, match="this Block has its own"):
        sw.compile_units(own)
    policy = sw.checkpoint_units(Blocks(), policy=[torch.ops.aten.addmm.default])
    with pytest.raises(ValueError, match=r"checkpoint_units\(policy=\)"):
        sw.compile_units(policy)
    compiled = sw.compile_units(Blocks(), **OPTIONS)
    with pytest.raises(ValueError, match=r"checkpoint_units\(policy=\)"):
        sw.checkpoint_units(compiled, policy=[torch.ops.aten.addmm.default])
    torch._dynamo.reset()
