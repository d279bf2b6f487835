"""Law: under a policy a module with DTensors computes like one whose parameters are cast by hand, beside tensor
parallelism and with experts in groups of their own. The stage changes no bit.
"""

import pytest
import torch
from composed_subjects import SUBJECTS, gathered, local, own, placed_as, whole_of
from harness import LONG, in_turn, on_every_rank, same_everywhere
from model_parallel_subjects import mesh_of, parallelized, tokens, with_loss_parallel
from oracle.fold import bits_equal, fold
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = (1, 2, 3, "private", "by hand")


class CastByHand(nn.Module):
    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, inputs):
        cast = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(
            self.module, cast, inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        )


def naive(subject, model, rank, steps, dtype):
    """Train with parameters cast by hand, and gradients gathered and folded. Return whole parameters."""
    engines = own(model).replicas
    places = {name: each.group for each in engines for name in each.table.names}
    module = subject.plain()
    by_hand = CastByHand(module, dtype)
    masters = [nn.Parameter(local(p).detach().clone()) for p in module.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(steps):
        module.zero_grad()
        subject.backward(by_hand, step, rank)
        for (name, parameter), master in zip(module.named_parameters(), masters, strict=True):
            group = places[name]
            factor = group.world_size / engines[0].group.world_size
            theirs = gathered(local(placed_as(parameter.grad, parameter)), group.torch_group)
            master.grad = fold([each * factor for each in theirs], "mean")
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), masters):
                local(parameter).copy_(master)
    return {name: whole_of(local(p).detach(), p) for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", SUBJECTS)
@on_every_rank(exactly=4)
def test_every_stage_is_the_naive_loop_that_casts(rank, world_size, kind):
    subject, steps = SUBJECTS[kind](), 3 if LONG else 2
    expected = None
    for stage in in_turn((0, *STAGES), [*SUBJECTS].index(kind)):
        model, optimizer = subject.wrapped(stage, precision="bf16")
        for step in range(steps):
            optimizer.zero_grad()
            subject.backward(model, step, rank)
            optimizer.step()
        found = sw.full_state_dict(model)
        expected = expected or naive(subject, model, rank, steps, torch.bfloat16)
        for name, value in expected.items():
            assert bits_equal(found[name], value), (stage, name)
        assert same_everywhere([*found.values()])

    model = subject.plain().to(torch.bfloat16)  # parameters become the masters of what they were
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"groups": {"layers.*.experts": subject.mesh["dp_mod_ep"]}} if kind == "experts" else {}
    options = options or {"device_mesh": subject.mesh["dp"]}
    model, optimizer = sw.wrap(model, optimizer, zero=2, precision="bf16", **options)
    subject.backward(model, 0, rank)
    optimizer.step()
    assert all(p.dtype == torch.float32 == local(p).dtype for p in model.parameters())
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@on_every_rank(exactly=4)
def test_a_scaler_unscales_sparse_gradients_beside_dtensors(rank, world_size):
    mesh = mesh_of(2, 2)
    model = sw.wrap(parallelized(mesh), device_mesh=mesh["dp"])
    beside = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.1)
    for _ in range(2):
        beside(torch.tensor([1, 1, 2])).sum().backward()  # equal indices, not coalesced
    with_loss_parallel(model, tokens(0, mesh.get_local_rank("dp")))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert beside.weight.grad.to_dense()[:, 0].tolist() == [0.0, 0.5, 0.25, 0.0, 0.0]
