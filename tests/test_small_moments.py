"""Moments of AdamW in bfloat16 and in blocks of int8: their bits, their decay, their records, and state dicts both ways."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import shardwright as sw
import torch
from oracle import moments as oracle
from shardwright import _engine
from shardwright.optim import moments
from test_optim import assert_same_bits, assert_same_with, parameters, set_gradients
from torch import Tensor

SMALL: list[Any] = [torch.bfloat16, "int8"]


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("isa", _engine.instruction_sets())
def test_random_rounding_has_the_same_bits_on_every_instruction_set(isa: str, master: bool, dtype: Any) -> None:
    def train() -> list[Tensor]:
        ps = [*parameters(shapes=[(1001,)]), *parameters(torch.bfloat16, shapes=[(33, 7), (3, 400)])]
        optimizer = sw.optim.AdamW(ps, lr=1e-2, master=master, state_dtype=dtype)
        for step in range(3):
            set_gradients(step, ps)
            optimizer.step()
        return [value for p in ps for value in (p.detach(), *optimizer.state[p].values())]

    assert_same_with(isa, train)


@pytest.mark.parametrize("dtype", SMALL)
def test_a_second_moment_without_gradients_decays_as_in_float32(dtype: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(1 << 14))
    small, wide = (sw.optim.AdamW([p], betas=(0.9, 0.999), state_dtype=each) for each in (dtype, torch.float32))
    for optimizer in (small, wide):
        p.grad = 1.0 + torch.arange(p.numel()) % 8  # blocks of several magnitudes
        optimizer.step()
        p.grad.zero_()
        for _ in range(1000):
            optimizer.step()
    held = small.state[p]["exp_avg_sq"]
    found = held.float() if dtype is torch.bfloat16 else oracle.decoded(held, "exp_avg_sq", p.numel())
    for low in range(8):
        mine, other = (each[low::8].double().mean().item() for each in (found, wide.state[p]["exp_avg_sq"]))
        assert mine == pytest.approx(other, rel=0.01 if dtype is torch.bfloat16 else 0.04)  # 5 deviations of the mean


def test_a_weight_without_a_master_keeps_small_updates_on_average() -> None:
    def moved(**options: Any) -> float:
        p = torch.nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
        optimizer = sw.optim.AdamW([p], lr=1e-4, weight_decay=0, master=False, **options)
        p.grad = torch.ones_like(p)
        for _ in range(100):
            optimizer.step()
        return 1 - p.double().mean().item()

    assert moved() == 0  # to nearest
    assert moved(state_dtype=torch.float32) == pytest.approx(0.01, rel=0.05)


def test_small_moments_survive_copies_and_state_dicts() -> None:
    (p,), (q,) = parameters(shapes=[(100,)]), parameters(shapes=[(100,)])
    ours: Any = sw.optim.AdamW([p], state_dtype=torch.bfloat16, seed=3)
    set_gradients(0, [p], [q])
    ours.step()
    clone = pickle.loads(pickle.dumps(ours))
    (r,) = clone.param_groups[0]["params"]
    wide = sw.optim.AdamW([q], state_dtype=torch.float32)
    wide.load_state_dict(ours.state_dict())
    assert_same_bits(wide.state[q]["exp_avg_sq"], ours.state[p]["exp_avg_sq"].float())
    ours.load_state_dict(wide.state_dict())
    assert ours.state[p]["exp_avg_sq"].dtype is torch.bfloat16
    r.grad = p.grad
    ours.step()
    clone.step()
    assert_same_bits(clone.state[r]["exp_avg_sq"], ours.state[p]["exp_avg_sq"])


def test_a_model_trains_to_the_loss_of_float32_moments() -> None:
    def trained(dtype: torch.dtype) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
        optimizer = sw.optim.AdamW(model.parameters(), lr=3e-3, state_dtype=dtype)
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(300):
            x = torch.randn(32, 16, generator=generator)
            loss = torch.nn.functional.cross_entropy(model(x), x.sum(1).abs().long() % 16)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-100:]) / 100

    expected = trained(torch.float32)
    for dtype in SMALL:
        assert trained(dtype) == pytest.approx(expected, abs=0.01), dtype


@pytest.mark.parametrize("isa", _engine.instruction_sets())
def test_moments_of_int8_are_those_of_the_oracle(isa: str) -> None:
    def moments_of(optimizer: Any, p: Tensor) -> list[Tensor]:
        state = optimizer.state.get(p)
        return [oracle.decoded(state[key], key, p.numel()) if state else torch.zeros(p.numel()) for key in oracle.FORMS]

    def train() -> list[Tensor]:
        (first, p, q), found = parameters(shapes=[(5,), (1001,), (1001,)]), list[Tensor]()
        optimizer = sw.optim.AdamW([first, p], lr=1e-2, state_dtype="int8", seed=7)
        wide = sw.optim.AdamW([q], lr=1e-2)
        for step in range(1, 6):
            spread = torch.Generator().manual_seed(step)
            p.grad = torch.randn(1001, generator=spread) * torch.exp(5 * torch.randn(1001, generator=spread))
            for at, value in enumerate((float("nan"), float("inf"), 1e-30, 3e19, 1e-45, 0.0, -0.0)):
                p.grad[40 * at] = value if step == 3 else 0.1
            first.grad, q.grad = torch.ones_like(first), p.grad.clone()
            with torch.no_grad():
                q.copy_(p)
            m, v = moments_of(optimizer, p)
            wide.state[q] = {"step": torch.tensor(step - 1.0), "exp_avg": m, "exp_avg_sq": v}
            wide.step()
            optimizer.step()
            assert_same_bits(p.detach().nan_to_num(7), q.detach().nan_to_num(7))
            for key in oracle.FORMS:
                records = optimizer.state[p][key]
                assert torch.equal(records, oracle.encoded(wide.state[q][key], key, 7, 1, step)), (key, step)
                decoded = moments.decoded(records, key, 1001)
                again = moments.decoded(moments.encoded(decoded, key), key, 1001)
                for other in (oracle.decoded(records, key, 1001), again):
                    assert_same_bits(decoded.nan_to_num(7), other.nan_to_num(7))
                found.append(records)
        return found

    assert_same_with(isa, train)


def test_a_small_second_moment_of_int8_never_becomes_zero() -> None:
    p = torch.nn.Parameter(torch.zeros(64))
    optimizer = sw.optim.AdamW([p], lr=1e-3, weight_decay=0, state_dtype="int8")
    p.grad = torch.logspace(0, -15, 64)
    for _ in range(50):
        optimizer.step()
    assert p.abs().max().item() < 1.5 * 1e-3 * 50  # of a zero, lr * m / eps would be the step


def test_blocks_of_int8_take_two_bytes_a_parameter() -> None:
    (p,) = parameters(torch.bfloat16, shapes=[(128, 64)])
    optimizer = sw.optim.AdamW([p], master=False, state_dtype="int8")
    set_gradients(0, [p])
    optimizer.step()
    held = sum(value.nbytes for key, value in optimizer.state[p].items() if key != "step")
    assert held / p.numel() == 2 * 33 / 32 == sum(optimizer.state_nbytes(p, optimizer.param_groups[0])) / p.numel()


def test_blocks_of_int8_in_other_memory_orders_are_saved_decoded() -> None:
    (p,), (q,) = parameters(shapes=[(6, 50)]), parameters(shapes=[(6, 50)])
    p.data = p.data.t().contiguous().t()
    a, b = (sw.optim.AdamW([each], state_dtype="int8") for each in (p, q))
    set_gradients(0, [p], [q])
    a.step()
    saved = a.state_dict()["state"][0]
    assert a.state[p]["exp_avg"].dtype is torch.uint8
    assert saved["exp_avg"].shape == p.shape and saved["exp_avg"].dtype is torch.float32
    b.load_state_dict(a.state_dict())
    assert b.state[q]["exp_avg"].dtype is torch.uint8
    torch.testing.assert_close(
        moments.decoded(b.state[q]["exp_avg"], "exp_avg", 300).reshape(6, 50), saved["exp_avg"], rtol=2**-4, atol=1e-3
    )
    again = b.state_dict()["state"][0]["exp_avg"]
    a.load_state_dict(b.state_dict())
    torch.testing.assert_close(
        a.state_dict()["state"][0]["exp_avg"],
        moments.decoded(again, "exp_avg", 300).reshape(6, 50),
        rtol=2**-4,
        atol=1e-3,
    )


@pytest.mark.parametrize("is_turned", [False, True])
def test_torchs_own_class_takes_moments_of_int8(is_turned: bool) -> None:
    (p,), (q,) = parameters(shapes=[(6, 50)]), parameters(shapes=[(6, 50)])
    if is_turned:
        q.data = q.data.t().contiguous().t()
    narrow, plain = sw.optim.AdamW([p], state_dtype="int8"), torch.optim.AdamW([q])
    set_gradients(0, [p], [q])
    narrow.step()
    state = narrow.state_dict()
    sw.load_full_optimizer_state_dict(torch.nn.Module(), plain, state)
    for key in oracle.FORMS:
        assert_same_bits(plain.state[q][key], oracle.decoded(state["state"][0][key], key, 300).reshape(6, 50))
    plain.step()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][1:]
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 must have shape \(10, 33\), .*, not \(9, 33\)"):
        sw.load_full_optimizer_state_dict(torch.nn.Module(), plain, state)


def test_conversions_of_int8_ignore_the_default_device_and_are_cut_into_chunks() -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1)).square()
    records = moments.encoded(values, "exp_avg_sq")
    (p,) = parameters(shapes=[(1001,)])
    wide, narrow = sw.optim.AdamW([p]), sw.optim.AdamW([p], state_dtype="int8")
    set_gradients(0, [p])
    wide.step()
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(moments, "_CHUNK", 3)
        narrow.load_state_dict(wide.state_dict())
        again = moments.encoded(values, "exp_avg_sq"), moments.decoded(records, "exp_avg_sq", 1001)
        assert moments.encoded(values[:0], "exp_avg").shape == (0, 33)
    assert narrow.state[p]["exp_avg"].is_cpu and moments.decoded(records[:0], "exp_avg", 0).shape == (0,)
    assert torch.equal(again[0], records) and torch.equal(again[1], moments.decoded(records, "exp_avg_sq", 1001))


def test_options_of_small_moments_that_do_not_fit_are_refused() -> None:
    (p,) = parameters(shapes=[(4,)])
    with pytest.raises(
        ValueError, match="state_dtype must be torch.bfloat16, torch.float32 or 'int8', not torch.float16"
    ):
        sw.optim.AdamW([p], state_dtype=torch.float16)
    with pytest.raises(ValueError, match="amsgrad keeps a maximum"):
        sw.optim.AdamW([p], state_dtype=torch.bfloat16, amsgrad=True)
    with pytest.raises(ValueError, match="state_dtype must be .*, not int4"):
        sw.optim.AdamW([p], state_dtype="int4")
    optimizer = sw.optim.AdamW([p], state_dtype="int8")
    p.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(2, 33, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"exp_avgs\[0\] of uint8 must be 1 records of 33 bytes"):
        optimizer.step()
    with pytest.raises(ValueError, match="grads.* must be float32, bfloat16 or float16, not torch.uint8"):
        arguments = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0, "decoupled": True}
        states = [torch.zeros(4)], [torch.zeros(4)], None, [torch.zeros(())], None
        _engine.adam_step([p.detach()], [torch.zeros(4, dtype=torch.uint8)], *states, **arguments)
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\), not -1"):
        sw.optim.AdamW([p], seed=-1)


def test_records_are_what_the_format_says() -> None:
    """docs/format.md, in plain numbers."""

    def value(code: int, exponent: int, signed: bool) -> float:
        sign, c, first = (-1.0 if code >> 7 else 1.0, code & 127, -9) if signed else (1.0, code, -17)
        if c == (127 if signed else 255):
            return math.nan
        part = c * 2.0**first if c < 16 else (16 + c % 16) * 2.0 ** (c // 16 + first - 1)
        return sign * part * 2.0 ** (exponent - 127)

    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, exponents = (
            torch.arange(256, dtype=torch.uint8).reshape(8, 32),
            torch.full((8, 1), 130, dtype=torch.uint8),
        )
        found = moments.decoded(torch.cat([codes, exponents], 1), key, 256)
        expected = torch.tensor([value(code, 130, signed) for code in range(256)])
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
