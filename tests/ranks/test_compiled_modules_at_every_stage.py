"""Law: with torch.compile of units, before or after wrapping, and of the whole wrapper, every stage has the bits of the
same compiled module at zero=0. fullgraph=True is an error that tells what to do.
"""

import pytest
import torch
from harness import LONG, gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from test_units_are_whole_only_while_they_run import Blocks, assert_released, steps
from torch import nn

pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.timeout(180)]
BACKENDS = ["aot_eager", "inductor"] if LONG else ["aot_eager"]
#: every rank compiles, for seconds
RANKS = None if LONG else 2


def trained(rank, how, backend, **stage):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Blocks(2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if how == "units before":
        for block in module.blocks:
            block.compile(backend=backend)
    model, optimizer = sw.wrap(module, optimizer, bucket_cap_mb=0.004, **stage)
    compiled = model
    if how == "units after":
        for block in module.blocks:
            block.compile(backend=backend)
    elif how == "forwards":
        for block in module.blocks:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    elif how == "whole":
        compiled = torch.compile(model, backend=backend)
    losses = steps(compiled, optimizer, rank, 2)
    torch._dynamo.reset()
    return model, (losses, sw.full_state_dict(model))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["units before", "units after", "forwards", "whole"])
@on_every_rank(exactly=RANKS, deadline_s=150)
def test_a_compiled_module_has_the_same_bits_at_every_stage(rank, world_size, how, backend):
    _, expected = trained(rank, how, backend, zero=0)
    stages = [{"zero": 3, "share_parameters": False}, *([{"zero": 1}, {"zero": 2}, {"zero": 3}] if LONG else [])]
    for stage in stages:
        model, found = trained(rank, how, backend, **stage)
        assert found[0] == expected[0]
        assert all(bits_equal(value, expected[1][name]) for name, value in found[1].items())
        if stage.get("share_parameters") is False:
            assert_released(model)
    gather(None)


@pytest.mark.parametrize("how", ["wrapper", "in place", "module"])
@on_every_rank(exactly=RANKS, deadline_s=150)
def test_a_full_graph_is_refused_with_what_to_do(rank, world_size, how):
    torch._dynamo.reset()
    module = Blocks(2)
    model = sw.wrap(module, zero=3, share_parameters=False, units=nn.Linear)
    inner = module if how == "module" else model
    if how == "in place":
        model.compile(backend="eager", fullgraph=True)
    else:
        inner = torch.compile(inner, backend="eager", fullgraph=True)
    with pytest.raises(engine.Error, match=r"fullgraph=True.*block\.forward = torch\.compile"):
        inner(batch(rank, 6, 7))
    torch._dynamo.reset()
    gather(None)
