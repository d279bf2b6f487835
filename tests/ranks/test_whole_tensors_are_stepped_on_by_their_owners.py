"""Law of partition="tensor": an optimizer that reads whole tensors trains at zero >= 1 with the bits of zero=0. One
rank keeps each tensor's state, and ranks hold about equal amounts.
"""

import copy
import os
import pathlib

import pytest
import torch
from harness import gather, in_turn, on_every_rank, same_everywhere
from models import Heads, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


class TrustRatio(torch.optim.Optimizer):
    """A third-party optimizer: momentum scaled by the ratio of the tensor's norm to its update's, with extra state of
    odd form.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "trust": True})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                state["columns"] = p.grad.abs().sum(0) if p.dim() > 1 else p.grad.abs()
                state["steps"] = state.get("steps", 0) + 1
                ratio = p.norm() / (state["momentum"].norm() + 1e-6) if group["trust"] else 1.0
                p.sub_(group["lr"] * ratio * state["momentum"])
        return loss


OPTIMIZERS = {
    "TrustRatio": lambda parameters: TrustRatio(parameters, lr=1e-2),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2)


def loss_of(model, rank, step):
    return model(batch(rank, 6, 7, step=step)).square().mean()


def plain(model, optimizer, rank):
    for step in range(4):
        yield loss_of(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def accumulated_and_clipped(model, optimizer, rank):
    for step in range(6):
        with model.no_sync():
            yield loss_of(model, rank, 10 + step)
        yield loss_of(model, rank, step)
        sw.clip_grad_norm_(model, 0.02)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def onto_the_average(model, optimizer, rank):
    for step in range(6):
        yield loss_of(model, rank, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def scaled(model, optimizer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(4):
        yield scaler.scale(loss_of(model, rank, step) * (1e38 if step == 1 else 1.0))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def uneven(model, optimizer, rank):
    with model.join():
        for step in range(2 + 2 * rank):
            yield loss_of(model, rank, step)
            sw.clip_grad_norm_(model, 0.02)
            optimizer.step()
            optimizer.zero_grad()


def some_heads(model, optimizer, rank):
    for step, heads in enumerate(["left right", "left", "left", "right"]):
        yield model(batch(rank, 6, 7, step=step), heads if step % 2 else heads.split()[rank % len(heads.split())])
        optimizer.step()
        if step != 1:
            optimizer.zero_grad()


class Odd(nn.Module):
    """A model with frozen, tied, scalar, empty, transposed and low-precision tensors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.again = nn.Linear(13, 13)
        self.tied = nn.Linear(13, 13)
        self.again.weight = self.tied.weight
        self.low = nn.Linear(13, 5).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(13, 11).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.turned.t() @ self.turned
        x = self.again(self.tied(torch.tanh(self.frozen(x))))
        return self.low(x.to(torch.bfloat16)).float() * self.scalar + self.empty.sum()


def run(rank, zero, training, optimizer, build=Mlp, **options):
    torch.manual_seed(0)
    module = build()
    model, made = sw.wrap(module, optimizer(module.parameters()), zero=zero, partition="tensor", **options)
    losses = []
    for loss in training(model, made, rank):
        loss.backward()
        losses.append(loss.item())
    state = gather(copy.deepcopy(sw.full_optimizer_state_dict(model, made)))[-1]
    with sw.full_parameters(model):
        parameters = [p.detach().clone() for p in module.parameters()]
    gather(None)
    return losses, parameters, state


def assert_same(found, expected, what=None):
    def same(a, b):
        return bits_equal(a, b) if isinstance(a, torch.Tensor) else a == b

    assert found[0] == expected[0], (what, found[0], expected[0])
    assert all(map(same, found[1], expected[1])), what
    assert found[2]["param_groups"] == expected[2]["param_groups"], what
    assert found[2]["state"].keys() == expected[2]["state"].keys(), what
    for position, entry in expected[2]["state"].items():
        assert found[2]["state"][position].keys() == entry.keys()
        assert all(same(found[2]["state"][position][key], value) for key, value in entry.items()), (what, position)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("training", [plain, accumulated_and_clipped, onto_the_average, scaled, uneven])
@on_every_rank()
def test_every_training_has_the_bits_of_stage_0(rank, world_size, training, optimizer):
    make = OPTIMIZERS[optimizer]
    expected = run(rank, 0, training, make)
    for zero in (1, 2, 3):
        other = {"transport": "staged"} if zero < 3 else {"share_parameters": False, "units": nn.Linear}
        for options in in_turn(({"bucket_cap_mb": 0.001}, other), zero + [*OPTIMIZERS].index(optimizer)):
            found = run(rank, zero, training, make, **options)
            assert_same(found, expected, (zero, options))
            assert same_everywhere([*found[1]])


@pytest.mark.parametrize(("build", "training"), [(Odd, plain), (Odd, onto_the_average), (Heads, some_heads)])
@on_every_rank()
def test_every_kind_of_parameter(rank, world_size, build, training):
    make = OPTIMIZERS["TrustRatio"]
    expected = run(rank, 0, training, make, build)
    stages = [(zero, {"bucket_cap_mb": 0.001}) for zero in (1, 2, 3)] + [(3, {"share_parameters": False})]
    for zero, options in in_turn(stages, int(training is plain)):
        assert_same(run(rank, zero, training, make, build, **options), expected, (zero, options))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@on_every_rank()
def test_muon_on_matrices_beside_adamw_on_the_rest(rank, world_size):
    found, stages = [], in_turn((1, 2, 3), 0)
    for zero in (0, *stages):
        torch.manual_seed(0)
        module = Mlp()
        matrices = [p for p in module.parameters() if p.dim() == 2]
        model, muon = sw.wrap(module, torch.optim.Muon(matrices, lr=1e-2), zero=zero, partition="tensor")
        rest = torch.optim.AdamW([p for p in module.parameters() if p.dim() != 2], lr=1e-2)
        rest = sw.shard_optimizer(model, rest) if zero else rest
        losses = []
        for step in range(4):
            loss = loss_of(model, rank, step)
            loss.backward()
            muon.step()
            rest.step()
            model.zero_grad()
            losses.append(loss.item())
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, muon))
        found.append((losses, [p.detach().clone() for p in module.parameters()], state))
        gather(None)
    for zero, other in zip(stages, found[1:], strict=True):
        assert_same(other, found[0], zero)


@on_every_rank()
def test_tensors_are_balanced_and_their_state_is_kept_once(rank, world_size):
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(16, 8 + 3 * i, bias=i % 2 == 0) for i in range(12)])
    total = sum(p.numel() for p in module.parameters())
    largest = max(p.numel() for p in module.parameters())
    optimizer = torch.optim.Adafactor(module.parameters()) if "Adafactor" in OPTIMIZERS else None
    optimizer = optimizer or TrustRatio(module.parameters(), lr=0.1)
    _, optimizer = sw.wrap(module, optimizer, zero=2, partition="tensor")
    owned = [[index for index in range(18) if optimizer.run(index, r) != (0, 0)] for r in range(world_size)]
    assert sorted(index for each in owned for index in each) == list(range(18))
    sizes = [p.numel() for p in module.parameters()]
    loads = [sum(sizes[index] for index in each) for each in owned]
    assert max(loads) <= total / world_size + largest, loads
    assert same_everywhere(owned)
    gather(None)


@on_every_rank()
def test_state_goes_between_stages_and_partitions(rank, world_size):
    """Two steps, a load of the whole state at another stage, and two more steps have the bits of four. A rank's own
    state loads at its place.
    """
    make = OPTIMIZERS["AdamW"]
    expected = run(rank, 0, plain, make)
    pairs = [(1, 0), (2, 3), (0, 2), (3, 1)]
    for first, second in pairs if world_size > 1 else in_turn(pairs, 0):
        torch.manual_seed(0)
        module = Mlp()
        model, optimizer = sw.wrap(module, make(module.parameters()), zero=first, partition="tensor")
        steps = plain(model, optimizer, rank)
        losses = []
        for _ in range(2):
            loss = next(steps)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if first:
            own = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(own)
        weights = copy.deepcopy(module.state_dict())
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
        gather(None)
        module = Mlp()
        module.load_state_dict(weights)
        partition = "flat" if second == 1 else "tensor"
        model, optimizer = sw.wrap(module, make(module.parameters()), zero=second, partition=partition)
        sw.load_full_optimizer_state_dict(model, optimizer, state)
        for step in (2, 3):
            loss = loss_of(model, rank, step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
        found = (losses, [p.detach().clone() for p in module.parameters()], state)
        gather(None)
        assert_same(found, expected, (first, second))


@on_every_rank()
def test_groups_that_come_later_and_an_optimizer_that_has_state(rank, world_size):
    found, stages = [], in_turn((1, 2, 3), 1)
    for zero in (0, *stages):
        torch.manual_seed(0)
        module = Mlp()
        optimizer = TrustRatio(module[0].parameters(), lr=1e-2)
        module(batch(0, 6, 7)).square().mean().backward()
        optimizer.step()
        module.zero_grad()
        model, optimizer = sw.wrap(module, optimizer, zero=zero, partition="tensor")
        optimizer.add_param_group({"params": [*module[2].parameters(), *module[4].parameters()], "lr": 1e-3})
        losses = []
        for loss in plain(model, optimizer, rank):
            loss.backward()
            losses.append(loss.item())
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, optimizer))
        found.append((losses, [p.detach().clone() for p in module.parameters()], state))
        gather(None)
    for zero, other in zip(stages, found[1:], strict=True):
        assert_same(other, found[0], zero)


@on_every_rank(at_least=2)
def test_ranks_whose_gradients_differ_in_presence_are_told(rank, world_size):
    torch.manual_seed(0)
    module = Mlp()
    model, optimizer = sw.wrap(module, TrustRatio(module.parameters(), lr=1e-2), zero=2, partition="tensor")
    loss_of(model, rank, 0).backward()
    if rank == 1:
        module[0].weight.grad = None
    with pytest.raises(sw.Error, match="ranks disagree about the gradients of a step: parameters without a gradient"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    optimizer.step()
    assert same_everywhere([*module.parameters()])
    gather(None)


def saved_bytes(folder):
    files = [each for kind in ("model", "optimizer") for each in pathlib.Path(folder).rglob(f"{kind}*")]
    return {each.name: each.read_bytes() for each in files}


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name in ("AdamW", "Adafactor", "TrustRatio")])
@on_every_rank()
def test_checkpoints_have_the_bytes_of_stage_0_and_are_resumed(rank, world_size, optimizer):
    make, expected = OPTIMIZERS[optimizer], None
    stages = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}]
    for number, stage in enumerate([stages[0], *in_turn(stages[1:], [*OPTIMIZERS].index(optimizer) // 2)]):
        folder = os.path.join(os.environ["SW_TEST_FOLDER"], f"tensor-{optimizer}-{number}")
        losses = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            module = Mlp() if optimizer == "Adafactor" else Odd()  # torch's has no step for what is empty
            model, made = sw.wrap(module, make(module.parameters()), partition="tensor", **stage)
            if seed == 0:
                for step in range(2):
                    loss_of(model, rank, step).backward()
                    made.step()
                    made.zero_grad()
                sw.save(folder, model, made, step=2)
            else:
                sw.load(folder, model, made)
            losses.append([])
            for step in (2, 3):
                loss = loss_of(model, rank, step)
                loss.backward()
                made.step()
                made.zero_grad()
                losses[-1].append(loss.item())
            gather(None)
        assert losses[0] == losses[1], stage
        expected = expected or saved_bytes(folder)
        assert saved_bytes(folder) == expected, stage
        gather(None)
