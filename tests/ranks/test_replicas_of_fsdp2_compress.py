"""Law: with torch's FSDP2 on a mesh of two dimensions, the all-reduce of replicas is compressed. Each slice becomes the
naive compressor's mean over replicas of the mean over the shards, and replicas stay bitwise equal."""

import pytest
import torch
import torch.distributed as dist
from harness import gather, on_every_rank
from models import Mlp
from oracle.compression import block_mean, half_mean
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [
    pytest.mark.skipif(PEER == "torch", reason="torch has none of it"),
    pytest.mark.skipif(not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"), reason="an older torch"),
]


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = torch.nn.Linear(7, 4), torch.nn.Linear(7, 4)

    def forward(self, x):
        return self.used(x)


COMPRESSORS = {
    "bf16": sw.Bf16(),
    "int8": sw.Int8(block=32),
    "int4": sw.Int4(block=32),
    "powersgd": sw.PowerSGD(rank=2, warmup_steps=1, min_compression_rate=1),
    "powersgd of halves": sw.PowerSGD(rank=2, min_compression_rate=1, wire_dtype=torch.bfloat16),
}


def mesh_of_four():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def made(compress, mesh=None):
    mesh = mesh or mesh_of_four()
    torch.manual_seed(0)
    model = Mlp()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fsdp.fully_shard(layer, mesh=mesh["shard"])
    fsdp.fully_shard(model, mesh=mesh["shard"])
    return model, sw.hooks.compress_all_reduce(model, compress, mesh["replicate"])


def backward(model, rank, step):
    model(batch(rank, 8, 7, step=step)).square().mean().backward()


def gradients_of_all(model, rank, step):
    """Return each rank's gradients of the whole model with these parameters, by parameter."""
    plain = Mlp()
    plain.load_state_dict({n: p.detach().full_tensor() for n, p in model.named_parameters()})
    backward(plain, rank, step)
    return [list(each) for each in zip(*gather([p.grad for p in plain.parameters()]))]


def shard_means(ranks):
    return [(ranks[2 * replica] + ranks[2 * replica + 1]) / 2 for replica in range(2)]


def own_rows(whole, rank):
    rows = -(-whole.shape[0] // 2)
    return whole[rank % 2 * rows : (rank % 2 + 1) * rows]


@pytest.mark.parametrize("name", ["bf16", "int8"])
@on_every_rank(exactly=4)
def test_it_is_the_naive_compressor_of_the_slices(rank, world_size, name):
    means = {"bf16": lambda s: half_mean(s, torch.bfloat16), "int8": lambda s: block_mean(s, 32, 127)}
    model, compression = made(COMPRESSORS[name])
    for step in range(2):
        everyone = gradients_of_all(model, rank, step)
        model.zero_grad()
        backward(model, rank, step)
        for (n, p), ranks in zip(model.named_parameters(), everyone):
            slices = [own_rows(mean, rank) for mean in shard_means(ranks)]
            if slices[0].numel():
                assert bits_equal(p.grad.to_local(), means[name](slices).view_as(slices[0])), (n, step)
    assert compression.wire_bytes > 0


@pytest.mark.parametrize("name", ["int4", "powersgd", "powersgd of halves"])
@on_every_rank(exactly=4)
def test_the_error_is_fed_back(rank, world_size, name):
    model, compression = made(COMPRESSORS[name])
    parameters = dict(model.named_parameters())
    got = {n: torch.zeros(p.to_local().shape, dtype=torch.float64) for n, p in parameters.items()}
    wanted = {n: torch.zeros_like(t) for n, t in got.items()}
    for step in range(6):
        everyone = gradients_of_all(model, rank, step)
        model.zero_grad()
        backward(model, rank, step)
        for (n, p), ranks in zip(parameters.items(), everyone):
            got[n] += p.grad.to_local()
            wanted[n] += own_rows(sum(ranks).double() / 4, rank)
    state = compression.state
    assert state.iter == 6
    entries = state.state_dict()["parameters"]
    owed = state.errors() if "powersgd" in name else {n: e["error"] for n, e in entries.items()}
    assert owed and set(owed) <= set(parameters)
    for n, others in ((n, [theirs.get(n) for theirs in gather(owed)]) for n in parameters):
        replicas = [others[other] for other in (rank % 2, rank % 2 + 2) if others[other] is not None]
        mean = sum(each.double().view_as(got[n]) for each in replicas) / 2 if replicas else 0.0
        assert torch.allclose(got[n] + mean, wanted[n], atol=1e-5), n


@on_every_rank(exactly=4)
def test_replicas_train_with_the_same_bits_and_resume(rank, world_size):
    mesh = mesh_of_four()
    found = []
    for cut in (8, 4):
        model, compression = made(COMPRESSORS["powersgd"], mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(8):
            if step == cut:
                saved = compression.state.state_dict()
                whole = {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()}
                model, compression = made(COMPRESSORS["powersgd"], mesh)
                with torch.no_grad():
                    for n, p in model.named_parameters():
                        p.to_local().copy_(own_rows(whole[n], rank))
                compression.state.load_state_dict(saved)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = model(batch(rank, 8, 7, step=step % 2)).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
        locals_ = gather([p.to_local().detach().clone() for p in model.parameters()])
        assert all(bits_equal(a, b) for a, b in zip(locals_[rank % 2], locals_[rank % 2 + 2]))
        assert sum(losses[-2:]) < 0.8 * sum(losses[:2]), losses
        found.append(locals_[rank])
    assert all(bits_equal(a, b) for a, b in zip(*found))


@on_every_rank(exactly=4)
def test_misuse_is_named(rank, world_size):
    mesh = mesh_of_four()
    with pytest.raises(sw.Error, match="torch's fully_shard was called on no module here"):
        sw.hooks.compress_all_reduce(Mlp(), sw.Bf16(), mesh["replicate"])
    native = Mlp()
    fsdp.fully_shard(native, mesh=mesh)
    with pytest.raises(sw.Error, match=r"give fully_shard only the sharded dimension, mesh\['shard'\]"):
        sw.hooks.compress_all_reduce(native, sw.Bf16(), mesh["replicate"])
    with pytest.raises(TypeError, match="compress must be sw.Fp16.*, got 'bf16'"):
        sw.hooks.compress_all_reduce(native, "bf16", mesh["replicate"])
    half = Half()
    fsdp.fully_shard(half, mesh=mesh["shard"])
    sw.hooks.compress_all_reduce(half, sw.PowerSGD(rank=1, min_compression_rate=0), mesh["replicate"].get_group())
    with pytest.raises(sw.Error, match="a parameter got none in this backward, and the compressor cannot tell which"):
        half(batch(rank, 3, 7)).sum().backward()
    dist.barrier()
