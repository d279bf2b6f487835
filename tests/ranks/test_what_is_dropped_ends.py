"""Law: dropping a wrapped module drops all of it. Hooks, engine and memory end with the last reference, whatever
references exist inside.
"""

import gc
import weakref

import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="the engine's own")


def wrapped(zero, **options):
    module = Mlp()
    return sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, **options)


def sharded(**options):
    module = Mlp()
    sw.fully_shard(module[0], **options)
    sw.fully_shard(module, **options)
    return module, sw.shard_optimizer(module, torch.optim.SGD(module.parameters(), lr=0.1))


def hooked(zero):
    """A submodule has a hook of the program that references the wrapper."""
    model, optimizer = wrapped(zero)
    last = list(model.modules())[-1]
    last.register_forward_hook(lambda *_: None if model.training else None)
    return model, optimizer


FORMS = {
    **{f"zero={zero}": (wrapped, (zero,), {}) for zero in range(4)},
    **{f"zero={zero}, bf16": (wrapped, (zero,), {"precision": "bf16"}) for zero in (0, 3)},
    **{f"zero={zero}, a hook that knows the wrapper": (hooked, (zero,), {}) for zero in (0, 3)},
    "fully_shard": (sharded, (), {}),
    "fully_shard, bf16": (sharded, (), {"precision": "bf16"}),
    "compressed": (wrapped, (2,), {"compress": sw.Bf16()}),
}


@pytest.mark.parametrize("steps", ["backward", "forward alone", "none"])
@pytest.mark.parametrize("form", FORMS)
@on_every_rank()
def test_a_model_that_nobody_holds_is_gone(rank, world_size, form, steps):
    make, values, options = FORMS[form]
    torch.manual_seed(0)
    model, optimizer = make(*values, **options)
    if steps != "none":
        loss = model(batch(rank, 6, 7)).square().mean()
    if steps == "backward":
        loss.backward()
        optimizer.step()
    gather(None)
    held = [weakref.ref(each) for each in (model, *model.modules())]
    loss = None
    del model, optimizer
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    assert sw.describe().get("models", []) == []
    gather(None)


@pytest.mark.parametrize("precision", [None, "bf16"])
@on_every_rank()
def test_an_older_wrapper_that_ends_late_leaves_the_later_one_alone(rank, world_size, precision):
    """As where something, here a list, holds it for a while."""
    for options in ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}):
        ends = []
        for ends_late in (False, True):
            torch.manual_seed(0)
            module, older = Mlp(), []
            for k in range(3):
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
                model, optimizer = sw.wrap(module, optimizer, precision=precision, **options)
                for step in range(2):
                    model(batch(rank, 6, 7, step=2 * k + step)).square().mean().backward()
                    if ends_late:
                        older.clear()
                        gc.collect()
                    optimizer.step()
                    optimizer.zero_grad()
                older[:] = model, optimizer
            ends.append(sw.full_state_dict(model))
        assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items()), options
