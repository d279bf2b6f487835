"""sw.optim against torch: the bits of its fused kernels, its state dicts both ways, its errors and protocols.

Tests that compare bits use sizes that are multiples of 16, because torch's own kernels use other arithmetic in a scalar
tail, which has its own test. Oracles are torch.optim with fused=True, fused=False, or a few lines of double arithmetic.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as sw
import torch
from shardwright import _engine
from torch import Tensor

STEPS = 26
SHAPES = [(64, 48), (32,), (16, 3, 5), (4096,)]
HALVES = [torch.bfloat16, torch.float16]

needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's fused kernels have other bits without FMA",
)


def parameters(
    dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def set_gradients(step: int, *models: list[Tensor], dtype: torch.dtype | None = None) -> None:
    """Set the same gradients on all models, with magnitudes that change from step to step."""
    for index in range(len(models[0])):
        generator = torch.Generator().manual_seed(1000 * step + index)
        like = models[0][index]
        grad = torch.randn(like.shape, generator=generator).mul_(10.0 ** (-step % 4)).to(dtype or like.dtype)
        for model in models:
            model[index].grad = grad.clone()


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


def assert_same_with(isa: str, train: Callable[[], list[Tensor]]) -> None:
    """Check that train() returns the same bits on an instruction set as on the best one."""
    best = train()
    _engine.force_instruction_set(isa)
    try:
        forced = train()
    finally:
        _engine.force_instruction_set(None)
    for a, b in zip(forced, best, strict=True):
        assert_same_bits(a, b)


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        assert_same_bits(p.detach(), q.detach())
        assert set(ours.state[p]) == set(theirs.state[q])
        for key, value in theirs.state[q].items():
            assert_same_bits(ours.state[p][key], value)


ADAM_OPTIONS = [
    {"weight_decay": wd, "amsgrad": amsgrad, "maximize": maximize, "betas": betas, "lr": 1e-2}
    for wd, amsgrad, maximize, betas in itertools.product(
        (0.0, 0.03), (False, True), (False, True), ((0.9, 0.995), (0.3, 0.9))
    )
]
SGD_OPTIONS = [
    {
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "maximize": maximize,
        "weight_decay": wd,
        "lr": 1e-2,
    }
    for momentum, dampening, nesterov, maximize, wd in itertools.product(
        (0.0, 0.9), (0.0, 0.1), (False, True), (False, True), (0.0, 0.03)
    )
    if not nesterov or (momentum and not dampening)
]


def ids(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items() if key != "lr")


@needs_vectors
@pytest.mark.parametrize("options", ADAM_OPTIONS, ids=ids)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_adam_has_the_bits_of_torchs_fused(name: str, options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    a, b = getattr(sw.optim, name)(ours, **options), getattr(torch.optim, name)(theirs, **options, fused=True)
    for step in range(STEPS):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    assert_same_state(a, b)
    assert not torch.equal(ours[0], parameters()[0])


@needs_vectors
@pytest.mark.parametrize("options", SGD_OPTIONS, ids=ids)
def test_sgd_has_the_bits_of_torchs_fused(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    a, b = sw.optim.SGD(ours, **options), torch.optim.SGD(theirs, **options, fused=True)
    for step in range(STEPS):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    assert_same_state(a, b)
    assert not torch.equal(ours[0], parameters()[0])


@needs_vectors
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_without_masters_halves_have_torchs_bits_and_dtypes(name: str, dtype: torch.dtype) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.03, "eps": 1e-4}
    ours, theirs = parameters(dtype), parameters(dtype)
    a = getattr(sw.optim, name)(ours, **options, master=False)
    b = getattr(torch.optim, name)(theirs, **options, fused=True)
    for step in range(STEPS):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    assert_same_state(a, b)


@pytest.mark.parametrize("isa", _engine.instruction_sets())
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_every_instruction_set_gives_the_same_bits(name: str, isa: str) -> None:
    def train() -> list[Tensor]:
        ps = parameters(shapes=[(1001,), (33, 7)])
        options: dict[str, Any] = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {"amsgrad": True}
        optimizer = getattr(sw.optim, name)(ps, lr=1e-2, weight_decay=0.1, **options)
        for step in range(5):
            set_gradients(step, ps)
            optimizer.step()
        return [p.detach() for p in ps]

    assert_same_with(isa, train)


def ulps(a: Tensor, b: Tensor) -> int:
    """Return the largest distance in units of the last place between float32 tensors with equal signs."""
    return int((a.detach().view(torch.int32).long() - b.detach().view(torch.int32).long()).abs().max())


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_torchs_scalar_tail_is_a_unit_away_at_most_after_one_step(name: str) -> None:
    for numel in range(1, 16):
        ours, theirs = parameters(shapes=[(numel,)], seed=numel), parameters(shapes=[(numel,)], seed=numel)
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        a, b = (
            getattr(sw.optim, name)(ours, lr=1e-3, **options),
            getattr(torch.optim, name)(theirs, lr=1e-3, **options, fused=True),
        )
        set_gradients(0, ours, theirs)
        a.step()
        b.step()
        assert ulps(ours[0], theirs[0]) <= 1


# ---- against mathematics ---------------------------------------------------------------------------------------------


def naive_adamw(p: Tensor, grads: list[Tensor], lr: float, wd: float) -> Tensor:
    """Compute the paper's formulas in float64."""
    p, m, v = (
        p.detach().double().clone(),
        torch.zeros_like(p, dtype=torch.float64),
        torch.zeros_like(p, dtype=torch.float64),
    )
    for t, g in enumerate((grad.double() for grad in grads), 1):
        p = p * (1 - lr * wd)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return p


def test_adamw_follows_the_paper_in_double() -> None:
    (p,) = parameters(shapes=[(777,)])
    start, grads = p.detach().clone(), []
    optimizer = sw.optim.AdamW([p], lr=1e-3, weight_decay=0.1)
    for step in range(STEPS):
        set_gradients(step, [p])
        assert p.grad is not None
        grads.append(p.grad.clone())
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), naive_adamw(start, grads, 1e-3, 0.1), rtol=2e-6, atol=2e-6)


# ---- masters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_a_master_trains_in_float32_and_the_parameter_is_its_rounding(name: str, dtype: torch.dtype) -> None:
    halves = parameters(dtype)
    wide = [p.detach().float().requires_grad_() for p in halves]
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {"weight_decay": 0.01}
    a, b = getattr(sw.optim, name)(halves, lr=1e-3, **options), getattr(sw.optim, name)(wide, lr=1e-3, **options)
    for step in range(STEPS):
        set_gradients(step, halves)
        for p, q in zip(halves, wide):
            assert p.grad is not None
            q.grad = p.grad.float()
        a.step()
        b.step()
        for p, q in zip(halves, wide):
            assert_same_bits(a.state[p]["master"], q.detach())
            assert_same_bits(p.detach(), q.detach().to(dtype))


def test_small_updates_are_lost_without_a_master_and_kept_with_one() -> None:
    results = {}
    for master in (True, False):
        p = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
        optimizer = sw.optim.SGD([p], lr=1e-3, master=master)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        results[master] = p[0].item()
    assert results[False] == 1.0
    assert abs(results[True] - 0.98) < 0.004


def test_a_master_follows_a_parameter_that_other_code_wrote() -> None:
    p = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    optimizer = sw.optim.SGD([p], lr=2.0**-10)
    p.grad = torch.ones_like(p)
    optimizer.step()
    kept = optimizer.state[p]["master"].clone()
    with torch.no_grad():
        p.copy_(p.clone())  # the same values: the master keeps its unrounded value
    optimizer.step()
    assert_same_bits(optimizer.state[p]["master"], kept - 2.0**-10)
    with torch.no_grad():
        p.fill_(8.0)
    optimizer.step()
    assert_same_bits(optimizer.state[p]["master"], torch.full((64,), 8.0 - 2.0**-10))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", [sw.optim.SGD, torch.optim.SGD], ids=["ours", "torch's"])
def test_each_element_that_other_code_wrote_wins_over_its_master(kind: Any, dtype: torch.dtype) -> None:
    """A NaN and -0 are told from what is equal to them as numbers; the swap of an average in and out changes nothing."""
    module = torch.nn.Linear(1, 6, bias=False).to(dtype)
    module.weight.data.copy_(torch.tensor([1.0, 1.0, 0.0, 1.0, float("nan"), float("nan")])[:, None])
    optimizer = kind(module.parameters(), lr=1.0)
    optimizer = optimizer if kind is sw.optim.SGD else sw.wrap(module, optimizer)[1]
    p = module.weight
    p.grad = torch.zeros_like(p)
    optimizer.step()
    master = optimizer.state[p]["master"]
    master[:2] += 2.0**-20  # rounded off
    swapped = p.data.clone()
    p.data.zero_()
    p.data.copy_(swapped)
    p.data[1], p.data[2], p.data[3], p.data[4] = 3.0, -0.0, float("nan"), 2.0
    optimizer.step()
    expected = torch.tensor([1.0 + 2.0**-20, 3.0, -0.0, float("nan"), 2.0, float("nan")])[:, None]
    found = optimizer.state[p]["master"]
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(found[~found.isnan()], expected[~expected.isnan()])
    assert torch.equal(p[~p.isnan()].float(), expected.to(dtype)[~expected.isnan()].float())


def test_gradients_of_another_dtype_are_taken() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch binds a gradient's dtype to its parameter's")
    p = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    q = torch.ones(64, requires_grad=True)
    p.grad_dtype = torch.float32
    p.grad = q.grad = torch.linspace(-1, 1, 64)
    a, b = sw.optim.AdamW([p]), sw.optim.AdamW([q])
    a.step()
    b.step()
    assert_same_bits(a.state[p]["master"], q.detach())


# ---- state dicts -----------------------------------------------------------------------------------------------------


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = pickle.loads(pickle.dumps(state))
    return loaded


@needs_vectors
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours to torch", "torch to ours"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_state_dicts_interchange_with_torch_in_mid_training(name: str, ours_first: bool) -> None:
    options: dict[str, Any] = {
        "lr": 1e-2,
        "weight_decay": 0.01,
        **({"momentum": 0.9} if name == "SGD" else {"amsgrad": True}),
    }

    def make(is_ours: bool, ps: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = (
            getattr(sw.optim, name)(ps, **options) if is_ours else getattr(torch.optim, name)(ps, **options, fused=True)
        )
        return made

    moved, reference = parameters(), parameters()
    first, second = make(ours_first, moved), make(not ours_first, moved)
    whole = make(False, reference)
    for step in range(10):
        set_gradients(step, moved, reference)
        if step == 5:
            second.load_state_dict(through_bytes(first.state_dict()))
            second.param_groups[0]["fused"] = True  # a group carries its writer's choice, None in ours
        (first if step < 5 else second).step()
        whole.step()
        for p, q in zip(moved, reference):
            assert_same_bits(p.detach(), q.detach())


def test_our_groups_and_state_have_torchs_keys() -> None:
    for name in ("AdamW", "Adam", "SGD"):
        dicts = []
        for module, options in ((sw.optim, {}), (torch.optim, {"fused": True})):
            ps = parameters()
            optimizer = getattr(module, name)(ps, lr=0.1, **options)
            set_gradients(0, ps)
            optimizer.step()
            dicts.append(optimizer.state_dict())
        ours, theirs = dicts
        assert ours["param_groups"][0].keys() == theirs["param_groups"][0].keys()
        assert {k: v.keys() for k, v in ours["state"].items()} == {k: v.keys() for k, v in theirs["state"].items() if v}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masters_and_float32_moments_survive_a_state_dict(dtype: torch.dtype) -> None:
    ps, qs = parameters(dtype), parameters(dtype)
    a, b = sw.optim.AdamW(ps, lr=1e-3), sw.optim.AdamW(qs, lr=1e-3)
    for step in range(3):
        set_gradients(step, ps)
        a.step()
    with torch.no_grad():
        for p, q in zip(ps, qs):
            q.copy_(p)
    b.load_state_dict(through_bytes(a.state_dict()))
    for p, q in zip(ps, qs):
        assert b.state[q]["exp_avg"].dtype is torch.float32 and b.state[q]["master"].dtype is torch.float32
    for step in range(3, 6):
        set_gradients(step, ps, qs)
        a.step()
        b.step()
    for p, q in zip(ps, qs):
        assert_same_bits(a.state[p]["master"], b.state[q]["master"])
        assert_same_bits(p.detach(), q.detach())


def test_torchs_half_state_loads_and_ours_loads_into_torch() -> None:
    ps, qs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    ours, theirs = sw.optim.AdamW(ps), torch.optim.AdamW(qs, fused=True)
    set_gradients(0, ps, qs)
    theirs.step()
    ours.load_state_dict(through_bytes(theirs.state_dict()))
    ours.step()
    theirs.load_state_dict(through_bytes(ours.state_dict()))
    theirs.step()
    assert float(theirs.state[qs[0]]["step"]) == 2 + 1
    assert theirs.state[qs[0]]["exp_avg"].dtype is torch.bfloat16


def test_a_users_load_hook_runs() -> None:
    (p,) = parameters(torch.bfloat16, shapes=[(16,)])
    optimizer = sw.optim.AdamW([p])
    set_gradients(0, [p])
    optimizer.step()
    saved = optimizer.state_dict()

    def double(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        given["state"] = {0: {**given["state"][0], "exp_avg": given["state"][0]["exp_avg"] * 2}}
        return given

    optimizer.register_load_state_dict_pre_hook(double)
    expected = saved["state"][0]["exp_avg"] * 2
    optimizer.load_state_dict(saved)
    assert_same_bits(optimizer.state[p]["exp_avg"], expected)


def test_deepcopy_and_pickle_keep_the_choice_of_masters() -> None:
    for clone in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        optimizer: Any = clone(
            sw.optim.SGD([torch.ones(8, dtype=torch.bfloat16, requires_grad=True)], lr=0.1, master=False)
        )
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert not optimizer.state.get(p) and p[0].item() < 1.0


# ---- protocols -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_closure_runs_with_gradients_and_its_loss_is_returned(name: str) -> None:
    p = torch.ones(8, requires_grad=True)
    optimizer = getattr(sw.optim, name)([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8.0
    assert p[0].item() < 1.0


def test_schedulers_hooks_groups_and_unused_parameters() -> None:
    used, unused, late = (torch.ones(16, requires_grad=True) for _ in range(3))
    optimizer = sw.optim.AdamW([{"params": [used], "lr": 0.5, "weight_decay": 0.0}, {"params": [unused]}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    used.grad = torch.ones_like(used)
    optimizer.step()
    scheduler.step()
    assert calls == ["post"] and used[0].item() == pytest.approx(0.5) and unused[0].item() == 1.0
    assert not optimizer.state[unused]
    optimizer.step()
    assert used[0].item() == pytest.approx(0.5)
    optimizer.add_param_group({"params": [late], "lr": 0.25, "weight_decay": 0.0})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert late[0].item() == pytest.approx(0.75)


def test_autograd_sees_the_write() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.ones(8, dtype=dtype, requires_grad=True)
        optimizer = sw.optim.SGD([p], lr=0.1)
        loss = (p * p).sum()
        p.grad = torch.ones_like(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler_skips_overflows_and_unscales(fused: bool | None) -> None:
    p, q = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
    ours, plain = sw.optim.AdamW([p], lr=0.1, fused=fused), sw.optim.AdamW([q], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale((p * torch.linspace(-1, 1, 64)).sum()).backward()
    scaler.step(ours)
    scaler.update()
    q.grad = torch.linspace(-1, 1, 64)
    plain.step()
    assert_same_bits(p.detach(), q.detach())
    before = p.detach().clone()
    p.grad = torch.full_like(p, math.inf)
    scaler.step(ours)
    scaler.update()
    assert_same_bits(p.detach(), before)
    assert float(ours.state[p]["step"]) == 1 and scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("master", [True, False])
def test_layouts_may_differ_between_parameter_and_gradient(master: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.arange(24.0).reshape(2, 3, 2, 2).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
        q = p.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        grad = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
        p.grad, q.grad = torch.empty_like(p).copy_(grad), grad.clone()
        p.grad = grad.clone()  # contiguous, where the parameter is channels_last
        a, b = sw.optim.AdamW([p], master=master), sw.optim.AdamW([q], master=master)
        for _ in range(2):
            a.step()
            b.step()
        assert_same_bits(p.detach().contiguous(), q.detach())
        assert p.is_contiguous(memory_format=torch.channels_last)
        contiguous = {k: {n: t.contiguous() for n, t in s.items()} for k, s in a.state_dict()["state"].items()}
        a.load_state_dict({**a.state_dict(), "state": contiguous})
        a.step()
        b.step()
        assert_same_bits(p.detach().contiguous(), q.detach())


def test_empty_and_scalar_parameters() -> None:
    ps = [
        torch.zeros(0, requires_grad=True),
        torch.ones((), requires_grad=True),
        torch.ones(3, 0, 2, requires_grad=True),
    ]
    for name in ("AdamW", "SGD"):
        optimizer = getattr(sw.optim, name)(ps, lr=0.1)
        set_gradients(0, ps)
        before = ps[1].item()
        optimizer.step()
        assert ps[1].item() != before


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: sw.optim.AdamW([torch.zeros(2, dtype=torch.float64, requires_grad=True)]),
            "parameter 0 of group 0 .*not float64",
        ),
        (
            lambda: sw.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], 0.1),
            "not complex64; torch.optim.SGD",
        ),
        (lambda: sw.optim.Adam(parameters(), foreach=True), "foreach=True is not supported"),
        (lambda: sw.optim.AdamW(parameters(), fused=False), "fused=False is not supported"),
        (lambda: sw.optim.AdamW(parameters(), capturable=True), "capturable=True"),
        (lambda: sw.optim.SGD(parameters(), differentiable=True), "differentiable=True"),
        (lambda: sw.optim.AdamW(parameters(), betas=(1.0, 0.9)), "beta"),
        (lambda: sw.optim.SGD(parameters(), lr=-1.0), "learning rate"),
    ],
)
def test_unsupported_options_are_refused_at_creation(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_refused_group_is_not_added() -> None:
    optimizer = sw.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameter 0 of group 1 must be float32"):
        optimizer.add_param_group({"params": [torch.zeros(2, dtype=torch.float64, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_a_sparse_gradient_is_refused_before_anything_is_written(name: str) -> None:
    first, table = torch.ones(4, requires_grad=True), torch.ones(5, 2, requires_grad=True)
    optimizer = getattr(sw.optim, name)([first, table], lr=0.1)
    torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    first.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"grads\[1\] must be a dense tensor, not torch.sparse_coo"):
        optimizer.step()
    assert first[0].item() == 1.0


class Storageless(torch.Tensor):
    """A gradient with a shape but no memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on a gradient without memory")


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_gradient_without_memory_is_refused(name: str) -> None:
    p = torch.ones(4, requires_grad=True)
    p.grad = torch.Tensor._make_wrapper_subclass(Storageless, (4,), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"has no gradient|must be a dense tensor|memory"):
        getattr(sw.optim, name)([p], lr=0.1).step()
    assert p[0].item() == 1.0


def test_hyperparameters_changed_to_nonsense_are_refused_by_name() -> None:
    (p,) = parameters(shapes=[(4,)])
    optimizer = sw.optim.AdamW([p])
    p.grad = torch.ones(4)
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="adam_step: lr must be finite and at least 0, not nan"):
        optimizer.step()


def engine_adam(**changes: Any) -> list[int]:
    lists: dict[str, Any] = {name: [torch.ones(4)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    lists |= {"max_exp_avg_sqs": None, "steps": [torch.zeros(())], "copies": None}
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
    given = {**lists, **options, **changes}
    positional = [given.pop(name) for name in lists]
    return _engine.adam_step(*positional, **given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"grads": []}, "grads must have one tensor a parameter, 1, not 0"),
        (
            {"grads": [torch.ones(5)]},
            r"grads\[0\] must have the shape of its parameter, torch.Size\(\[4\]\), not torch.Size\(\[5\]\)",
        ),
        (
            {"grads": [torch.ones(4, dtype=torch.float64)]},
            r"grads\[0\] must be float32, bfloat16 or float16, not torch.float64",
        ),
        ({"grads": [torch.ones(4, dtype=torch.int32)]}, "not torch.int32"),
        (
            {"exp_avg_sqs": [torch.ones(4).bfloat16()]},
            r"exp_avg_sqs\[0\] must have the dtype of exp_avgs, float32, not bfloat16",
        ),
        ({"params": [torch.ones(8)[::2]]}, r"params\[0\] must cover its memory"),
        ({"steps": [torch.ones(2)]}, r"steps\[0\] must be one float32 or float64"),
        ({"steps": [torch.tensor(-1.0)]}, r"steps\[0\] must be at least 0, not -1.0"),
        ({"grad_scale": math.inf}, "grad_scale must be finite, not inf"),
        ({"beta2": 1.5}, r"beta2 must be in \[0, 1\), not 1.5"),
    ],
)
def test_the_engine_names_the_wrong_tensor(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine_adam(**changes)


def test_the_engine_reports_layouts_and_leaves_everything_as_it_was() -> None:
    p, g = torch.ones(2, 3), torch.ones(3, 2).t()
    steps = [torch.zeros(())]
    changes = {
        "params": [p],
        "grads": [g],
        "exp_avgs": [torch.zeros(2, 3)],
        "exp_avg_sqs": [torch.zeros(2, 3)],
        "steps": steps,
    }
    assert engine_adam(**changes) == [0]
    assert torch.equal(p, torch.ones(2, 3)) and steps[0].item() == 0
    assert engine_adam(**{**changes, "grads": [g.contiguous()]}) == []
    assert steps[0].item() == 1


def test_the_gradient_factor_is_one_multiplication() -> None:
    a, b = torch.ones(33), torch.ones(33)
    grad = torch.randn(33, generator=torch.Generator().manual_seed(3))
    for p, g, scale in ((a, grad, 0.37), (b, grad * 0.37, 1.0)):
        zeros = {name: [torch.zeros(33)] for name in ("exp_avgs", "exp_avg_sqs")}
        engine_adam(params=[p], grads=[g], grad_scale=scale, **zeros)
    assert_same_bits(a, b)


class Opaque(torch.Tensor):
    """A tensor class without DLPack's exchange table, like every tensor of older torch."""

    __dlpack_c_exchange_api__ = None


def test_without_the_exchange_table_tensors_are_read_by_their_methods() -> None:
    results = []
    for kind in (torch.Tensor, Opaque):
        p, g = torch.ones(4, 6).as_subclass(kind), torch.linspace(-1, 1, 24).reshape(4, 6).as_subclass(kind)
        state = {name: [torch.zeros(4, 6).as_subclass(kind)] for name in ("exp_avgs", "exp_avg_sqs")}
        assert (
            engine_adam(params=[p], grads=[g], copies=[torch.zeros(4, 6).bfloat16().as_subclass(kind)], **state) == []
        )
        results.append(p.as_subclass(torch.Tensor))
    assert_same_bits(*results)
    with pytest.raises(ValueError, match=r"grads\[0\] must be a dense tensor, not torch.sparse_coo"):
        engine_adam(params=[torch.ones(4).as_subclass(Opaque)], grads=[torch.ones(4).to_sparse()])


# ---- the norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_norm_is_that_of_the_exact_sum(dtype: torch.dtype) -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (0, 1, 100, 5000)]
    exact = math.fsum(float(x) ** 2 for t in tensors for x in t) if dtype is not torch.float64 else None
    found = sw.optim.global_norm(tensors)
    if exact is not None:  # the squares are exact in double, fsum rounds their sum once
        assert found == math.sqrt(exact)
    assert found == pytest.approx(math.sqrt(sum(float(t.double().square().sum()) for t in tensors)), rel=1e-14)


def test_the_norm_does_not_depend_on_cut_order_or_ranks() -> None:
    x = torch.randn(10007, generator=torch.Generator().manual_seed(7)) * torch.logspace(-20, 18, 10007)
    whole = sw.optim.global_norm([x])
    for world in (2, 3, 5, 7):
        pieces = list(x.chunk(world))
        assert sw.optim.global_norm(pieces[::-1]) == whole
        sums = [_engine.norm_sum([piece]) for piece in pieces]
        assert _engine.norm_value(sums) == whole
        words = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.int64) for one in sums]).sum(0)
        assert _engine.norm_value([words.numpy().tobytes()]) == whole


def test_the_norm_of_any_strides() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    whole = sw.optim.global_norm([x])
    assert sw.optim.global_norm([x.t()]) == whole == sw.optim.global_norm([x[:, ::2], x[:, 1::2]])
    assert sw.optim.global_norm([torch.tensor(2.0).expand(3, 3)]) == 6.0
    with pytest.raises(ValueError, match=r"tensors\[0\] must cover its memory"):
        _engine.norm_sum([x[:, ::2]])


def test_the_norm_of_nan_and_infinity() -> None:
    assert sw.optim.global_norm([torch.tensor([1.0, math.inf])]) == math.inf
    assert math.isnan(sw.optim.global_norm([torch.tensor([-math.inf]), torch.tensor([math.nan])]))
    assert sw.optim.global_norm([]) == 0.0
    assert sw.optim.global_norm([torch.full((4,), 3e38)]) == 2 * float(torch.tensor(3e38))


def test_norm_errors_name_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"tensors\[1\] must be float32.* not torch.int64"):
        sw.optim.global_norm([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"tensors\[0\] must be a dense tensor, not torch.sparse_coo"):
        sw.optim.global_norm([torch.ones(2).to_sparse()])
    with pytest.raises(ValueError, match="a sum must be the 1112 bytes"):
        _engine.norm_value([b"short"])


def test_state_that_could_not_be_allocated_is_allocated_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make memory, or the disk of offload=, run out between the two moments of a parameter."""
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
        optimizer = sw.optim.AdamW(parameters, lr=0.1)
        if fails:
            like, calls = optimizer._state_like, []

            def last_fails(p: torch.Tensor, like: Any = like, calls: list[int] = calls) -> torch.Tensor:
                calls.append(1)
                if len(calls) == 4:
                    raise MemoryError("no more")
                return like(p)

            monkeypatch.setattr(optimizer, "_state_like", last_fails)
            for p in parameters:
                p.grad = torch.ones_like(p)
            with pytest.raises(MemoryError):
                optimizer.step()
        for _ in range(2):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
        found.append([p.detach().clone() for p in parameters])
    assert all(map(torch.equal, *found))


def test_clipping_takes_one_parameter_as_torch_does() -> None:
    """The parameter is clipped, not its rows. Rows have no gradients, so clipping them would clip nothing."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert sw.clip_grad_norm_(parameter, 1.0) == 5.0
    assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]) * (1.0 / (5.0 + 1e-6)))


def test_clipping_takes_gradients_of_any_strides() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.ones(2, 6)[:, ::2]
    assert sw.clip_grad_norm_([parameter], 1.0) == torch.tensor(6.0).sqrt()
    assert torch.equal(parameter.grad, torch.ones(2, 3) * (1.0 / (6.0**0.5 + 1e-6)))
