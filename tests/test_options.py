"""Laws of options: each is validated before anything is created, and an option without effect is refused."""

import gc
import weakref

import pytest
import shardwright as sw
import torch


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"reduce": "avg", "compress": sw.Int8()}, ValueError, "reduce must be"),
        ({"compress": "x", "reduce": "sum"}, TypeError, "compress must be"),
        ({"compress": sw.Int8(), "reduce": "sum"}, NotImplementedError, "computes the mean"),
        ({"precision": 17}, ValueError, "precision must be"),
        ({"precision": {"": 17}}, ValueError, r"precision\[''\] must be"),
        ({"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm must be above 0, got"),
        ({"zero": 4}, ValueError, "zero must be 0, 1, 2 or 3"),
        ({"units": "size"}, ValueError, "units is of zero=3"),
    ],
)
def test_a_value_out_of_range_is_named(given, kind, words):
    with pytest.raises(kind, match=words):
        sw.Options(**given)


def test_clipping_needs_the_optimizer():
    with pytest.raises(ValueError, match=r"clip_grad_norm=1.0 needs the optimizer"):
        sw.wrap(torch.nn.Linear(3, 3), clip_grad_norm=1.0)


@pytest.mark.parametrize("option", [{"clip_grad_norm": 1.0}, {"partition": "tensor"}])
def test_an_option_of_wrap_is_refused_where_it_has_no_effect(option):
    with pytest.raises(TypeError, match="is no option of DistributedDataParallel"):
        sw.DistributedDataParallel(torch.nn.Linear(3, 3), **option)
    with pytest.raises(TypeError, match="is no option of fully_shard"):
        sw.fully_shard(torch.nn.Linear(3, 3), **option)


def test_a_stage_is_no_option_of_fully_shard():
    with pytest.raises(TypeError, match="zero is no option of fully_shard"):
        sw.fully_shard(torch.nn.Linear(3, 3), zero=2)


def refused():
    module = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="LBFGS is not known"):
        sw.wrap(module, torch.optim.LBFGS(module.parameters()), zero=1)
    return weakref.ref(module)


def test_a_refusal_keeps_no_module_alive():
    """A traceback holds its frames. A frame that held the exception would form a circle, and live until a collection."""
    refused()  # what torch imports at first use holds frames, too
    gc.collect()
    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()
