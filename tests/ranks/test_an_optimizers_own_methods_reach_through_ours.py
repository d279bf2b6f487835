"""Law: a public method or attribute of the user's optimizer is there on ours, and what the method writes to parameters is
on all ranks, at every stage and with masters; a name that the user's optimizer lacks is not there.
"""

import collections
import copy
import gc
import pickle
import resource
import weakref

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


class Handling(Averaging):
    """An optimizer whose methods clear gradients and write to them."""

    def eval(self):
        super().eval()
        self.zero_grad()

    def clear_one(self):
        for p in self.param_groups[1]["params"]:
            p.grad = None

    def of_data(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.data.mul_(0.5)

    def double_one(self):
        for p in self.param_groups[1]["params"]:
            p.grad.mul_(2)

    def renew(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * -0.5

    def use(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad)


def made(kind, options, dtype):
    """An optimizer whose second group has one bias, which lies on one rank."""
    torch.manual_seed(0)
    module = Mlp().to(dtype)
    *others, last = module.parameters()
    optimizer = kind([{"params": others}, {"params": [last]}], lr=0.1)
    return (module, optimizer) if options is None else sw.wrap(module, optimizer, **options)


def backward(model, rank, step, dtype):
    model(batch(rank, 6, 7, step=step).to(dtype)).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", STAGES, ids=str)
@on_every_rank()
def test_what_a_method_does_to_gradients_is_on_every_rank(rank, world_size, options, dtype):
    model, optimizer = made(Handling, options, dtype)
    module, plain = made(Handling, None, dtype)
    for step, name in enumerate(("of_data", "double_one", "renew", "clear_one", "eval")):
        backward(model, rank, step, dtype)
        for p, gradient in zip(module.parameters(), sw.full_gradients(model).values()):
            p.grad = gradient.clone()
        if dtype is torch.float32:
            torch.nn.utils.get_total_norm([p.grad for p in sw.unwrap(model).parameters()])  # kept, at zero >= 2
        getattr(optimizer, name)()
        getattr(plain, name)()
        found, wanted = list(sw.full_gradients(model).values()), [p.grad for p in module.parameters()]
        assert [g is None for g in found] == [g is None for g in wanted], name
        assert all(g is None or torch.equal(g, w) for g, w in zip(found, wanted)), name
        if dtype is torch.float32 and wanted[0] is not None:
            held = [p.grad for p in sw.unwrap(model).parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([w for w in wanted if w is not None])
            assert torch.allclose(torch.nn.utils.get_total_norm(held), norm), name
        optimizer.step()
        optimizer.zero_grad()
        assert same_everywhere(whole(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", STAGES, ids=str)
@on_every_rank()
def test_a_method_runs_between_micro_batches(rank, world_size, options, dtype):
    model, optimizer = made(Averaging, options, dtype)
    other, reference = made(Averaging, {"zero": 0}, dtype)
    for step in range(3):
        for each, stepper in ((model, optimizer), (other, reference)):
            with each.no_sync():
                backward(each, rank, step, dtype)
            stepper.eval()
            backward(each, rank, step + 3, dtype)
            stepper.step()
            stepper.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(whole(model), whole(other)))


@pytest.mark.parametrize("options", STAGES[1:], ids=str)
@on_every_rank()
def test_between_micro_batches_a_method_may_clear_gradients_and_not_read_them(rank, world_size, options):
    model, optimizer = made(Handling, options, torch.float32)
    with model.no_sync():
        backward(model, rank, 0, torch.float32)
    with pytest.raises(sw.Error, match="is not averaged yet"):
        optimizer.use()
    optimizer.clear_one()
    *others, last = sw.unwrap(model).parameters()
    assert last.grad is None and all(p.grad is not None for p in others)
    optimizer.eval()
    assert all(p.grad is None for p in sw.unwrap(model).parameters())
    backward(model, rank, 1, torch.float32)
    optimizer.step()
    assert same_everywhere(whole(model))


def through_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle])
@on_every_rank()
def test_a_copy_forwards_too(rank, world_size, way):
    module, optimizer = made(Averaging, {"zero": 0}, torch.bfloat16)
    module, copied = way((sw.unwrap(module), optimizer))
    copied.rho = 0.25
    assert copied._inner.rho == 0.25 and copied.get_rho() == 0.25 and optimizer.rho == 0.5


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer and, as many that do, leaves out Optimizer.__init__(): none of torch's hooks are in it."""

    def __init__(self, inner):
        self.inner, self.state, self.defaults = inner, inner.state, inner.defaults
        self.param_groups, self.slow = inner.param_groups, []

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step()
        parameters = [p.data for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or [p.clone() for p in parameters]
        for slow, p in zip(self.slow, parameters):
            p.copy_(slow.lerp_(p, 0.5))


@on_every_rank()
def test_an_optimizer_without_torchs_hooks_steps_at_every_stage(rank, world_size, tmp_path):
    ends = []
    for options in STAGES:
        torch.manual_seed(0)
        module = Mlp()
        optimizer = Lookahead(torch.optim.AdamW(module.parameters(), lr=0.1))
        model, optimizer = sw.wrap(module, optimizer, **options)
        for step in range(3):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(whole(model))
        if options["zero"] == 0:
            sw.Checkpointer(tmp_path, model, optimizer).close()
            with pytest.raises(ValueError, match="needs an optimizer that takes step hooks, and Lookahead does not"):
                sw.wrap(Mlp(), Lookahead(torch.optim.SGD(module.parameters(), lr=0.1)), clip_grad_norm=1.0)
    assert all(torch.equal(a, b) for end in ends for a, b in zip(ends[0], end))
    assert same_everywhere(ends[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_every_rank()
def test_state_that_is_assigned_replaces_the_old_one(rank, world_size, dtype):
    """`optimizer.state = defaultdict(dict)` is how programs make an optimizer forget."""
    ends = []
    for options in ({"zero": 0}, *STAGES):
        torch.manual_seed(0)
        module = Mlp().to(dtype)
        model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=0.1), **options)
        for step in range(4):
            model(batch(rank, 6, 7, step=step).to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and not ends:
                optimizer.state.clear()
            elif step == 1:
                optimizer.state = collections.defaultdict(dict)
                assert not optimizer.state
                if options["zero"] and world_size > 1:
                    with pytest.raises(sw.Error, match="given state of whole parameters"):
                        optimizer.state = {p: {} for p in module.parameters()}
        ends.append(whole(model))
    assert all(torch.equal(a, b) for end in ends for a, b in zip(ends[0], end))


class Ascending(torch.optim.SGD):
    """SGD with the first step of SAM, which takes a norm over all tensors."""

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad / norm)


@pytest.mark.parametrize("options", STAGES[:5], ids=str)
@on_every_rank()
def test_a_method_that_takes_a_norm_of_slices_raises(rank, world_size, options):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, Ascending(module.parameters(), lr=0.1), **options)
    model(batch(rank, 6, 7)).square().mean().backward()
    if options["zero"] and world_size > 1:
        before = whole(model)
        with pytest.raises(sw.Error, match="of a slice.*use zero=0 for this optimizer"):
            optimizer.first_step()
        assert all(torch.equal(a, b) for a, b in zip(before, whole(model)))
    else:
        optimizer.first_step()
    optimizer.zero_grad()
    model(batch(rank, 6, 7)).square().mean().backward()
    optimizer.step()
    assert same_everywhere(whole(model))


DRIFTS = r"'Centres.weight' of shape \(3,\).*drift apart: wrap one"


class Centres(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("averages", [False, True])
@on_every_rank()
def test_a_parameter_that_no_wrapper_averages_is_named(rank, world_size, averages):
    torch.manual_seed(0)
    module, loss = Mlp(), Centres()
    model, optimizer = sw.wrap(module, torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.1))

    def backward(step):
        (model(batch(rank, 6, 7, step=step)).square().mean() * loss.weight.sum() * (rank + 1)).backward()

    for step in range(3):
        if step == 0 or averages or world_size == 1:
            backward(step)
        else:  # the digest of the first step's gradients travels with the next round
            with pytest.raises(sw.Error, match=DRIFTS) as raised:
                backward(step)
            assert same_everywhere(str(raised.value))
            break
        if averages:
            torch.distributed.all_reduce(loss.weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", ["scaler skips", "frozen", "no gradient", "in a later step"])
@on_every_rank()
def test_a_rank_that_alone_skips_or_freezes_is_told_and_none_hangs(rank, world_size, case):
    """Law: the check makes no exchange of its own, so a rank that skips a step alone misses none."""
    torch.manual_seed(0)
    module, loss = Mlp(), Centres()
    model, optimizer = sw.wrap(module, torch.optim.SGD([*module.parameters(), *loss.parameters()], lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss.weight.requires_grad_(case != "frozen" or rank != 1)

    def step(number):
        factor = loss.weight.sum() if case != "no gradient" else 1.0
        if case == "in a later step" and number < 2:
            factor = 1.0
        elif case == "in a later step":
            factor = factor * (rank + 1)
        scaler.scale(model(batch(rank, 6, 7, step=number)).square().mean() * factor).backward()
        if case == "scaler skips":
            loss.weight.grad.fill_(float("inf") if rank == 1 else 2.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    if case == "no gradient" or world_size == 1:
        for number in range(4):
            step(number)
        assert world_size == 1 or same_everywhere(whole(model))
        return
    told = "backward 2 of step 1.*call .*optimizer.step.. on every rank" if case == "scaler skips" else DRIFTS
    with pytest.raises(sw.Error, match=told) as raised:
        for number in range(4):
            step(number)
    assert number == (3 if case == "in a later step" else 1)
    assert same_everywhere(str(raised.value))


@on_every_rank(at_least=2)
def test_the_first_of_two_optimizers_with_such_parameters_is_named(rank, world_size):
    torch.manual_seed(0)
    module, drifting, alike = Mlp(), Centres(), Centres()
    model, optimizer = sw.wrap(module, torch.optim.SGD([*module.parameters(), *drifting.parameters()], lr=0.1))
    second = torch.optim.SGD([*list(module.parameters())[:1], *alike.parameters()], lr=0.1)
    with pytest.raises(sw.Error, match=DRIFTS):
        for number in range(2):
            factor = drifting.weight.sum() * (rank + 1)
            (model(batch(rank, 6, 7, step=number)).square().mean() * factor).backward()
            alike.weight.grad = torch.ones_like(alike.weight)
            optimizer.step()
            second.step()
    held = weakref.ref(drifting.weight)
    del drifting, optimizer, factor
    gc.collect()
    assert held() is None  # the check keeps no parameter of another module


def test_a_digest_of_a_gradient_takes_no_memory_per_element():
    """Law: the digest reads the gradient's bytes in place. One of 64 MiB may not raise the peak by half of that."""
    from internals import _digest

    gradient = torch.ones(1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = _digest(gradient)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < gradient.nbytes / 2
    gradient[-1] = 2
    assert first != _digest(gradient) and _digest(torch.zeros(3)) == 0 and _digest(None) == 0
