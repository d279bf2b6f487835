"""Law: sw.optim.Muon trains at every stage with the bits of zero=0. Ranks have equal work, and a rank gets averaged
gradients of its own matrices alone.
"""

import copy

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_parameters": False, "units": nn.Linear},
]


class Words(nn.Module):
    """Embedding, matrices of two shapes, a stack of experts, norms and a head; some weights in 16 bits on request."""

    def __init__(self, low=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.norm = nn.LayerNorm(24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.wide = nn.Linear(24, 72)
        self.narrow = nn.Linear(72, 24)
        self.experts = nn.Parameter(torch.randn(3, 24, 24) / 5)
        self.head = nn.Linear(24, 11)
        if low:
            self.wide.to(torch.bfloat16)
            self.narrow.to(torch.bfloat16)

    def forward(self, words):
        x = self.norm(self.embedding(words))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = x + sum(x @ expert for expert in self.experts)
        x = x + self.narrow(torch.tanh(self.wide(x.to(self.wide.weight.dtype)))).float()
        return self.head(x)


def words(rank, step):
    return (batch(rank, 6, 5, step=step).abs() * 1000).long() % 11


def run(rank, zero, steps=4, made=None, low=False, **options):
    torch.manual_seed(0)
    module = Words(low)
    heights = lambda name, p: [8] * (p.shape[0] // 8) if name.startswith("wide") else None  # noqa: E731
    groups = sw.optim.muon_groups(module, rows=heights)
    optimizer = sw.optim.Muon(groups, lr=0.02, adamw_lr=1e-3) if made is None else made(module)
    model, optimizer = sw.wrap(module, optimizer, zero=zero, **options)
    losses = []
    for step in range(steps):
        with model.no_sync():
            nn.functional.cross_entropy(model(words(rank, 10 + step)).mean(1), words(rank, 10 + step)[:, 0]).backward()
        loss = nn.functional.cross_entropy(model(words(rank, step)).mean(1), words(rank, step)[:, 0])
        loss.backward()
        sw.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = gather(copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer)))[0] if zero else optimizer.state_dict()
    with sw.full_parameters(model):
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return losses, parameters, state, optimizer


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", STAGES, ids=str)
@on_every_rank()
def test_bits_are_those_of_zero_0(rank, world_size, options, low):
    expected = run(rank, 0, low=low)
    found = run(rank, low=low, **options)
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert bits_equal(found[1][name], value), name
    for number, state in expected[2]["state"].items():
        for key, value in state.items():
            assert bits_equal(found[2]["state"][number][key], value), (number, key)


@pytest.mark.parametrize("zero", [0, 2, 3])
@on_every_rank()
def test_matrices_have_the_bits_of_torchs_class(rank, world_size, zero):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch >= 2.9")

    def plain(kind):
        def made(module):
            for name, p in module.named_parameters():
                p.requires_grad_(p.dim() == 2 and not name.startswith(("embedding", "head")))
            return kind([p for p in module.parameters() if p.requires_grad], lr=0.02, momentum=0.9)

        return made

    expected, found = run(rank, 0, made=plain(torch.optim.Muon)), run(rank, zero, made=plain(sw.optim.Muon))
    again = run(rank, zero, made=plain(torch.optim.Muon))
    assert again[0] == expected[0]
    assert found[0] == expected[0]
    assert all(bits_equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("options", STAGES[1:], ids=str)
@on_every_rank(at_least=2)
def test_a_rank_gets_averaged_gradients_of_its_own_tensors_alone(rank, world_size, options):
    *_, optimizer = run(rank, steps=1, **options)
    owner = optimizer._owner
    own = [entry for entry in optimizer._entries if entry.piece is not None]
    received = sum(
        (entry.like.numel() - (high - low)) * entry.like.element_size()
        for entry in own
        for low, high in [entry.run(rank)]
    )
    assert owner.received_bytes == received
    assert sum(gather(sum(entry.like.numel() for entry in own))) == sum(e.like.numel() for e in optimizer._entries)


@on_every_rank(at_least=2)
def test_more_bytes_than_the_pages_hold_go_in_turns(rank, world_size):
    def trained(zero):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(1030, 1030), nn.Linear(1030, 700, bias=False))
        model, optimizer = sw.wrap(module, sw.optim.Muon(module, lr=0.02, ns_steps=1), zero=zero)
        for step in range(2):
            model(torch.ones(2, 1030) * (step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with sw.full_parameters(model):
            return [p.detach().clone() for p in module.parameters()]

    assert all(map(bits_equal, trained(2), trained(0)))


@on_every_rank()
def test_dtensors_of_fully_shard_are_stepped_on_as_whole_matrices(rank, world_size):
    def trained(wrap):
        torch.manual_seed(0)
        module = Words()
        module.layers[1] = nn.Sequential(nn.Linear(24, 1), nn.Linear(1, 24))  # fewer rows than ranks
        heights = lambda name, p: [36, 36] if name.startswith("wide") else None  # noqa: E731
        found, made = wrap(module, sw.optim.muon_groups, {"rows": heights})
        losses = []
        for step in range(3):
            loss = nn.functional.cross_entropy(found(words(rank, step)).mean(1), words(rank, step)[:, 0])
            loss.backward()
            made.step()
            made.zero_grad()
            losses.append(loss.item())
        return losses

    def in_place(module, groups, options):
        sw.fully_shard(module)
        return module, sw.optim.Muon(groups(module, **options), lr=0.02)

    def wrapped(module, groups, options):
        return sw.wrap(module, sw.optim.Muon(groups(module, **options), lr=0.02), zero=0)

    assert trained(in_place) == pytest.approx(trained(wrapped), rel=1e-5)


@on_every_rank()
def test_state_of_muon_stays_in_memory(rank, world_size):
    module = Words()
    with pytest.raises(
        ValueError, match=r"needs an optimizer of sw.optim \(AdamW, Adam or SGD\), got shardwright.optim.Muon"
    ):
        sw.wrap(module, sw.optim.Muon(module), zero=2, offload="nvme:/tmp")


@pytest.mark.parametrize("zero", [1, 2, 3])
@on_every_rank()
def test_a_group_that_is_added_later_trains(rank, world_size, zero):
    def late(zero):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        module[1].requires_grad_(False)
        groups = sw.optim.muon_groups(module[0])
        model, optimizer = sw.wrap(module, sw.optim.Muon(groups, lr=0.02, adamw_lr=1e-3), zero=zero)
        losses = []
        for step in range(4):
            if step == 2:
                module[1].requires_grad_(True)
                for group in sw.optim.muon_groups(module[1]):
                    optimizer.add_param_group(group)
            loss = model(batch(rank, 6, 8, step=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert late(zero) == late(0)
