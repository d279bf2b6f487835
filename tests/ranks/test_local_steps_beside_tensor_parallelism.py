"""Law: replicas of a module with DTensors take local steps and average their changes like whole models in one process,
with the same bits at every stage.
"""

import copy

import pytest
import torch
from harness import LONG, gather, on_every_rank, same_everywhere
from model_parallel_subjects import build, loss_of, optimizer_of, parallelized, tokens, with_loss_parallel
from oracle.fold import bits_equal
from peer import PEER, sw
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STEPS, EVERY = 6, 3


def outer(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def oracle(replicas, shards):
    """Train the replicas in this process, each on the batches of its `shards` ranks."""
    models = [build() for _ in range(replicas)]
    inner = [optimizer_of(model) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    outside = outer(anchors)
    for step in range(STEPS):
        for number, (model, optimizer) in enumerate(zip(models, inner)):
            optimizer.zero_grad()
            for shard in range(shards):
                (loss_of(model, tokens(step, number * shards + shard)) / shards).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for anchor, *theirs in zip(anchors, *(model.parameters() for model in models)):
                    anchor.grad = sum(anchor - each for each in theirs) / replicas
                outside.step()
                for anchor, *theirs in zip(anchors, *(model.parameters() for model in models)):
                    for each in theirs:
                        each.copy_(anchor)
    return copy.deepcopy(models[0].state_dict())


def trained(mesh, stage, place, wire="float32"):
    model = parallelized(mesh)
    optimizer = optimizer_of(model)
    if stage == 0:
        model, optimizer = sw.wrap(model, optimizer, device_mesh=mesh["replicate"])
        trainer = sw.DiLoCo(model, optimizer, every=EVERY, wire=wire)
    else:
        private = {"share_parameters": False} if stage == "private" else {}
        zero = 3 if stage == "private" else stage
        model, optimizer = sw.wrap(model, optimizer, zero=zero, device_mesh=mesh["shard"], **private)
        both = mesh["replicate", "shard"]
        trainer = sw.DiLoCo(model, optimizer, every=EVERY, device_mesh=both, wire=wire)
    for step in range(STEPS):
        trainer.zero_grad()
        with_loss_parallel(model, tokens(step, place))
        trainer.step()
    return sw.full_state_dict(model), model, trainer


def check(replicas, shards, stages):
    mesh = init_device_mesh("cpu", (replicas, shards, 2), mesh_dim_names=("replicate", "shard", "tp"))
    place = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
    expected, first = oracle(replicas, shards), None
    for stage in stages:
        found, *kept = trained(mesh, stage, place)
        assert same_everywhere([*found.values()]), stage
        first = first or found
        for name, value in found.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), (stage, name)
            assert bits_equal(value, first[name]), (stage, name)
    return mesh, place, kept


@on_every_rank(exactly=4)
def test_local_steps_are_those_of_whole_models(rank, world_size):
    mesh, place, (_model, trainer) = check(2, 1, (0, 1, 2, 3, "private") if LONG else (0, 2, "private"))
    for wire in ("bf16", "int8") if LONG else ("int8",):
        assert same_everywhere([*trained(mesh, 2, place, wire)[0].values()])

    def told(text, call):
        with pytest.raises(Exception, match=text) as caught:
            call()
        assert len({each.split("DiLoCo: ")[-1] for each in gather(str(caught.value))}) == 1

    if rank == 1:  # a shard of one rank: no rank writes its parameters
        next(iter(trainer._tensors)).view(-1)[:1] = float("nan")
    told("is not finite on some rank", trainer.synchronise)
    model = parallelized(mesh)
    told("'embedding.weight' is a DTensor.*wrap the model", lambda: sw.DiLoCo(model, optimizer_of(model), every=2))
    model, optimizer = sw.wrap(model, optimizer_of(model), device_mesh=mesh["replicate"])
    told("every must be an integer", lambda: sw.DiLoCo(model, optimizer, every=2 if rank != 3 else 0))
    lion = type("Lion", (torch.optim.SGD,), {})
    told("steps on shards here", lambda: sw.DiLoCo(model, optimizer, every=2, outer=lambda p: lion(p, lr=1.0)))


@pytest.mark.skipif(not LONG, reason="8 ranks")
@on_every_rank(exactly=8)
def test_rows_of_two_take_local_steps(rank, world_size):
    check(2, 2, (1, 2, 3, "private"))
