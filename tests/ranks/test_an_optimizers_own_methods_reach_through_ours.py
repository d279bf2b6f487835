"""Law: a public method or attribute of the user's optimizer is there on ours, and what the method writes to parameters is
on all ranks, at every stage and with masters; a name that the user's optimizer lacks is not there.
"""

import pytest
import torch
from harness import on_every_rank, same_everywhere
from models import Mlp
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [
    {"zero": 0},
    {"zero": 1, "partition": "flat"},
    {"zero": 2, "partition": "flat"},
    {"zero": 3, "partition": "flat"},
    {"zero": 3, "partition": "flat", "share_parameters": False, "units": torch.nn.Linear},
    {"zero": 3, "partition": "tensor"},
]


class Averaging(torch.optim.SGD):
    """SGD whose eval() moves parameters to an average, and whose train() moves them back, as schedule-free's do."""

    rho = 0.5

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", torch.zeros_like(p)).lerp_(p.detach(), 0.25)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], self.rho)

    @torch.no_grad()
    def replace(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data * 2

    def get_rho(self):
        return self.rho

    def fail(self):
        raise ArithmeticError("a failure of this method")


def whole(model):
    with sw.full_parameters(model):
        return [p.detach().clone() for p in sw.unwrap(model).parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", STAGES, ids=str)
@on_every_rank()
def test_what_a_method_writes_is_published(rank, world_size, options, dtype):
    torch.manual_seed(0)
    module, oracle = Mlp().to(dtype), None
    plain = {k: v for k, v in options.items() if k not in ("zero", "partition", "share_parameters", "units")}
    model, optimizer = sw.wrap(module, Averaging(module.parameters(), lr=0.1), **options)
    torch.manual_seed(0)
    other = Mlp().to(dtype)
    oracle, reference = sw.wrap(other, Averaging(other.parameters(), lr=0.1), zero=0, **plain)
    optimizer.rho = reference.rho = 0.75
    assert optimizer.get_rho() == 0.75
    for step in range(3):
        for each, stepper in ((model, optimizer), (oracle, reference)):
            each(batch(rank, 6, 7, step=step).to(dtype)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        for name in ("eval", "replace") if step == 1 else ("eval",):
            getattr(optimizer, name)()
            getattr(reference, name)()
        found = whole(model)
        assert all(torch.equal(a, b) for a, b in zip(found, whole(oracle)))
        assert same_everywhere(found)


@pytest.mark.parametrize("options", STAGES[:4], ids=str)
@on_every_rank()
def test_names_are_as_on_the_users_optimizer(rank, world_size, options):
    torch.manual_seed(0)
    module = Mlp()
    inner = Averaging(module.parameters(), lr=0.1)
    inner._step_supports_amp_scaling = True
    _, optimizer = sw.wrap(module, inner, **options)
    assert all(hasattr(optimizer, name) for name in ("eval", "replace", "rho", "get_rho", "defaults"))
    assert not any(hasattr(optimizer, name) for name in ("train", "swap_swa_sgd", "grad_scale", "found_inf"))
    if options["zero"]:
        assert not hasattr(optimizer, "_step_supports_amp_scaling")  # ours unscales before it steps
    with pytest.raises(ArithmeticError, match="a failure of this method"):
        optimizer.fail()


class Centres(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("averages", [False, True])
@on_every_rank()
def test_a_parameter_that_nobody_averages_is_named(rank, world_size, averages):
    torch.manual_seed(0)
    module, loss = Mlp(), Centres()
    model, optimizer = sw.wrap(module, torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.1))
    for step in range(2):
        (model(batch(rank, 6, 7, step=step)).square().mean() * loss.weight.sum() * (rank + 1)).backward()
        if averages:
            torch.distributed.all_reduce(loss.weight.grad)
        if averages or world_size == 1:
            optimizer.step()
        else:
            with pytest.raises(sw.Error, match=r"'Centres.weight' of shape \(3,\).*drift apart: wrap one") as raised:
                optimizer.step()
            assert same_everywhere(str(raised.value))
        optimizer.zero_grad()
