"""Law: with gather="int8" computation at zero=3 reads float32 parameters as blocks of 8-bit integers. Everything else
is exact: slices, the optimizer's steps, and whole and saved parameters.
"""

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal, fold
from peer import PEER, batch, sw
from test_units_are_whole_only_while_they_run import Blocks, assert_released

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

BLOCK = 32


def wrap(gather="int8", make=Blocks, **options):
    torch.manual_seed(0)
    module = make()
    optimizer = sw.optim.AdamW(module.parameters(), lr=1e-2)
    return sw.wrap(module, optimizer, zero=3, share_parameters=False, gather=gather, **options)


def rounded(parameter):
    """Return the parameter decoded from its records, whose blocks are counted from the parameter's start."""
    if parameter.numel() * 4 <= 128 or parameter.dtype != torch.float32:
        return parameter.clone()  # never released, or not encoded
    flat = torch.nn.functional.pad(parameter.flatten(), (0, -parameter.numel() % BLOCK)).view(-1, BLOCK)
    most = flat.abs().amax(1, keepdim=True)
    scale = most / 127
    codes = (flat * (127 / most)).round().nan_to_num(0)
    return (scale * codes).flatten()[: parameter.numel()].view_as(parameter)


class Naive:
    """A naive form: whole float32 masters; forwards and backwards on rounded copies; the engine's own AdamW."""

    def __init__(self, make=Blocks):
        torch.manual_seed(0)
        self.module, self.running = make(), make()
        self.optimizer = sw.optim.AdamW(self.module.parameters(), lr=1e-2)

    def step(self, rank, step):
        with torch.no_grad():
            for master, seen in zip(self.module.parameters(), self.running.parameters()):
                seen.copy_(rounded(master))
                seen.grad = None
        loss = self.running(batch(rank, 6, 7, step=step)).square().mean()
        loss.backward()
        for master, seen in zip(self.module.parameters(), self.running.parameters()):
            master.grad = fold(gather(seen.grad), "mean")
        self.optimizer.step()
        return float(loss.detach())


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_every_rank()
def test_it_is_the_naive_one(rank, world_size, reshard_after_forward):
    model, optimizer = wrap(reshard_after_forward=reshard_after_forward)
    naive = Naive()
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(rank, 6, 7, step=step)).square().mean()
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == naive.step(rank, step), step
    assert_released(model.module)
    found = sw.full_state_dict(model)
    for name, expected in naive.module.state_dict().items():
        assert bits_equal(found[name], expected), name


@on_every_rank()
def test_full_parameters_reads_exact_values_that_are_rounded_again_after(rank, world_size):
    model, _ = wrap()
    torch.manual_seed(0)
    plain, seen = Blocks(), Blocks()
    x = batch(0, 6, 7)
    with torch.no_grad():
        for a, b in zip(seen.parameters(), plain.parameters()):
            a.copy_(rounded(b))
        for turn in range(2):
            assert bits_equal(model(x), seen(x)), turn
            with sw.full_parameters(model):
                assert all(bits_equal(a.detach(), b.detach()) for a, b in zip(model.parameters(), plain.parameters()))
                with sw.full_parameters(model):
                    assert bits_equal(model(x), plain(x))
        with sw.full_parameters(model, writable=True):
            for p in model.parameters():
                p.mul_(3)
        for a, b in zip(seen.parameters(), plain.parameters()):
            a.copy_(rounded(b * 3))
        assert bits_equal(model(x), seen(x))
    stats = sw.stats()["models"][-1]
    assert stats["gathered_bytes"] > 0 and same_everywhere([type(p).__mro__[1].__name__ for p in model.parameters()])


@on_every_rank()
def test_a_third_of_the_bytes_is_read(rank, world_size):
    counts = {}
    for kind in (None, "int8"):
        model, _ = wrap(kind, lambda: torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 32)))
        before = sw.stats()["models"][-1]["gathered_bytes"]
        with torch.no_grad():
            model(torch.ones(2, 96))
        counts[kind] = sw.stats()["models"][-1]["gathered_bytes"] - before
    assert 0.28 * counts[None] <= counts["int8"] <= 0.29 * counts[None]


@on_every_rank()
def test_other_dtypes_travel_unchanged(rank, world_size):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(40, 24, dtype=torch.bfloat16))  # noqa: E731
    model, optimizer = wrap(make=make)
    other, plain = wrap(None, make)
    for m, o in ((model, optimizer), (other, plain)):
        m(batch(rank, 3, 40, dtype=torch.bfloat16)).float().square().mean().backward()
        o.step()
    assert all(bits_equal(a, b) for a, b in zip(sw.full_state_dict(model).values(), sw.full_state_dict(other).values()))


@on_every_rank(at_least=2)
def test_values_that_are_not_finite_reach_every_rank(rank, world_size):
    model, _ = wrap()
    with sw.full_parameters(model, writable=True), torch.no_grad():
        next(p for p in model.parameters() if p.numel() > 32).view(-1)[3] = float("inf")
    with torch.no_grad():
        assert bool(model(batch(0, 6, 7)).isnan().any())


@on_every_rank()
def test_misuse_is_named(rank, world_size):
    module = Blocks()
    with pytest.raises(ValueError, match="gather must be None or 'int8', got 'int4'"):
        sw.wrap(module, zero=3, share_parameters=False, gather="int4")
    with pytest.raises(ValueError, match="gather='int8' needs share_parameters=False, got 'auto'"):
        sw.wrap(module, zero=3, gather="int8")
    with pytest.raises(ValueError, match="^gather= requires zero=3, got zero=2"):
        sw.wrap(module, zero=2, gather="int8")
    with pytest.raises(ValueError, match="^share_parameters= requires zero=3, got zero=2"):
        sw.wrap(module, zero=2, share_parameters=False, gather="int8")
    model, _ = wrap()
    seen = []

    def asks(*_):
        with pytest.raises(sw.Error, match="computes with rounded ones"), sw.full_parameters(model):
            pass
        seen.append(True)

    handle = model.module.register_forward_pre_hook(asks)
    with torch.no_grad():
        model(batch(0, 6, 7))
    handle.remove()
    assert seen
    gather(None)
