"""Laws of `.grad` and its accessors at zero >= 2, beyond those of the averages: docs/design/zero.md lists
them.
"""

import pytest
import torch
from harness import Stopwatch, gather, on_every_rank, same_everywhere
from internals import ShardedGradient
from models import Mlp
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
sliced_gradients = pytest.mark.parametrize("zero", [2, 3])


def wrap(zero, build=Mlp, **options):
    torch.manual_seed(0)
    module = build()
    return sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), zero=zero, **options)


def backward(model, rank, step=0):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def backed(model, rank):
    backward(model, rank)
    return model.parameters()


@sliced_gradients
@on_every_rank()
def test_inside_no_sync_it_is_a_local_tensor_or_keeps_the_local_sum_beside_its_slice(rank, world_size, zero):
    model, optimizer = wrap(zero)
    torch.manual_seed(0)
    alone = Mlp()
    parameters = list(model.parameters())
    with model.no_sync():
        backward(model, rank)
    backward(alone, rank)
    for mine, local in zip(parameters, alone.parameters(), strict=True):
        assert type(mine.grad) is torch.Tensor
        assert torch.equal(mine.grad, local.grad)
    backward(model, rank, 1)
    pieces = [p.grad.piece.clone() for p in parameters]
    with model.no_sync():
        backward(model, rank, 2)
    alone.zero_grad()
    backward(alone, rank, 2)
    for mine, local, piece in zip(parameters, alone.parameters(), pieces, strict=True):
        assert isinstance(mine.grad, ShardedGradient)
        assert torch.equal(mine.grad._pending, local.grad)
        assert torch.equal(mine.grad.piece, piece)
    gather(None)


@sliced_gradients
@on_every_rank()
def test_it_is_compared_as_the_tensor_that_torchs_wrapper_has(rank, world_size, zero):
    model, _ = wrap(zero)
    plain, _ = wrap(0)
    for each in (model, plain):
        backward(each, rank)
        with each.no_sync():  # adds to the average on this rank alone
            backward(each, rank, 1)
    for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole.grad, mine.grad) is True and torch.allclose(mine.grad, whole.grad + 1) is False
    for each in (model, plain):
        each.zero_grad(set_to_none=False)
        backward(each, rank, 2)
    for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, whole.grad) and not torch.equal(whole.grad + 1, mine.grad)
    gather(None)


READS = {
    "isnan": lambda g: torch.isnan(g).any(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "largest": lambda g: g.abs().max().item(),
    "mean": lambda g: (g.mean(), g.std(), g.sum(), g.var()),
    "power": lambda g: g.detach().pow(2).sum(),
    "copies": lambda g: (g.clone(), g.double(), g.cpu().numpy().sum(), g.tolist()),
    "counts": lambda g: ((g == 0).sum(), (g > 0).float().mean(), torch.count_nonzero(g), g.histc(5)),
    "order": lambda g: (g.median(), g.topk(2), g.argmax(), g.max(dim=0), torch.sort(g)),
}


def flat(answer):
    if isinstance(answer, (tuple, list)):
        return [each for item in answer for each in flat(item)]
    return [torch.as_tensor(answer)]


@sliced_gradients
@on_every_rank()
def test_what_is_logged_of_it_is_answered_from_the_whole(rank, world_size, zero):
    model, optimizer = wrap(zero)
    plain, _ = wrap(0)
    for each in (model, plain):
        backward(each, rank)
    for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
        for name, read in READS.items():
            for left, right in zip(flat(read(mine.grad)), flat(read(whole.grad)), strict=True):
                assert type(left) is torch.Tensor and torch.equal(left, right), name
    first = next(model.parameters()).grad
    for refused in (
        lambda: first + 1, lambda: first * 2, lambda: -first, lambda: first[0], lambda: first.view(-1), lambda: first.abs_()
    ):  # fmt: skip
        with pytest.raises(engine.Error, match="keeps a slice"):
            refused()
    optimizer.step()  # reads change nothing
    gather(None)


@on_every_rank()
def test_local_sums_on_a_accumulated_average_agree_to_rounding(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        model, _ = wrap(zero, bucket_cap_mb=0.001)
        backward(model, rank)
        for step in (1, 3):
            with model.no_sync():
                backward(model, rank, step)
            backward(model, rank, step + 1)
        found.append(list(sw.full_gradients(model).values()))
        gather(None)
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@sliced_gradients
@on_every_rank(at_least=2, spoils=True)
def test_a_norm_that_is_asked_on_one_rank_alone_is_named_on_all(rank, world_size, zero):
    model, optimizer = wrap(zero, timeout_s=20)
    backward(model, rank)
    with pytest.raises(
        engine.Error, match="norms of the gradients of Mlp.*hyperparameters of a step|hyperparameters.*norms"
    ):  # noqa: PT012
        if rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@on_every_rank(at_least=2, spoils=True)
@pytest.mark.parametrize("others", ["step", "read another", "go on"])
def test_a_gradient_that_one_rank_alone_reads_is_named_on_all(rank, world_size, others):
    model, optimizer = wrap(2 if others == "step" else 3, timeout_s=30)
    first, second = (p.grad for p in [*backed(model, rank)][:2])
    begun = Stopwatch()
    with pytest.raises(engine.Error) as caught:
        if rank == 0:
            first.mean()
        if others == "step":
            optimizer.step()
        elif others == "read another":
            second.mean()
        else:
            for step in range(1, 4):
                backward(model, rank, step)
    assert "the whole gradient of 0.weight of Mlp" in str(caught.value), caught.value
    assert begun.seconds() < 25  # at once, and not at the deadline


class Edges(nn.Module):
    """A model with parameters of 128 and of 132 bytes, and of a dtype without NaN."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Parameter(torch.arange(32.0)), nn.Parameter(torch.arange(33.0))
        self.whole_numbers = nn.Parameter(torch.arange(100), requires_grad=False)

    def forward(self, x):
        return x.sum() * (self.small.sum() + self.large.sum())


@on_every_rank()
def test_what_is_small_is_never_released(rank, world_size):
    model, optimizer = wrap(3, lambda: nn.Sequential(Edges()), share_parameters=False, units=Edges)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    edges = model.module[0]
    with pytest.raises(engine.Error, match=r"parameter '0\.large' is released"):
        edges.large.sum()
    assert torch.isfinite(edges.small).all()
    with pytest.raises(engine.Error, match=r"parameter '0\.whole_numbers' is released"):
        edges.whole_numbers.sum()
    assert torch.equal(sw.full_state_dict(model)["0.whole_numbers"], torch.arange(100))
    assert same_everywhere([edges.small.tolist()])
    gather(None)
