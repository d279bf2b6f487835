"""Law: third-party optimizers have the bits of zero=0, which are those of one process, at every stage; those that sum over
all parameters train at zero=0 alone.
"""

import importlib
import importlib.util

import pytest
import torch
from harness import on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [{"zero": 1}, {"zero": 2}, {"zero": 3, "share_parameters": False, "units": nn.Linear}]
EXACT = {
    "lion_pytorch.Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "schedulefree.AdamWScheduleFree": {"lr": 1e-2, "warmup_steps": 2},
    "schedulefree.SGDScheduleFree": {"lr": 0.1},
    "schedulefree.RAdamScheduleFree": {"lr": 1e-2},
    "pytorch_optimizer.SOAP": {"lr": 1e-2, "precondition_frequency": 2},
    "pytorch_optimizer.Shampoo": {"lr": 1e-2},
}
REFUSED = "prodigyopt.Prodigy dadaptation.DAdaptAdam dadaptation.DAdaptSGD dadaptation.DAdaptLion".split()


def installed(names):
    """Return names as parameters, of which those of absent packages are skipped."""
    packages = {name: name.partition(".")[0] for name in names}
    absent = {name for name, package in packages.items() if importlib.util.find_spec(package) is None}
    skips = {name: [pytest.mark.skip(f"{packages[name]} is not installed")] for name in absent}
    return [pytest.param(name, marks=skips.get(name, [])) for name in names]


def class_of(name):
    package, kind = name.split(".")
    return getattr(importlib.import_module(package), kind)


def train(rank, name, options, zero, **how):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = class_of(name)(module.parameters(), **options)
    model, optimizer = sw.wrap(module, optimizer, zero=zero, **how)
    getattr(optimizer, "train", lambda: None)()
    for step in range(5):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "eval", lambda: None)()
    with sw.full_parameters(model):
        return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("name", installed(EXACT))
@on_every_rank()
def test_bits_are_those_of_zero_0(rank, world_size, name):
    expected = train(rank, name, EXACT[name], 0)
    for how in STAGES:
        assert all(map(bits_equal, train(rank, name, EXACT[name], **how), expected)), how


@pytest.mark.parametrize("name", installed(REFUSED))
@on_every_rank(at_least=2)
def test_sums_over_all_parameters_train_at_zero_0_alone(rank, world_size, name):
    train(rank, name, {"lr": 1.0}, 0)
    for how in STAGES:
        with pytest.raises(ValueError, match="cannot be sliced, since its step size is a sum over all parameters"):
            train(rank, name, {"lr": 1.0, "fsdp_in_use": True}, **how)
