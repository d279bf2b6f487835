"""Law: optimizer state in a registered wrapper subclass, such as torchao's 8-bit moments, is saved as its inner
tensors. The bytes are the same at every stage, and any other stage loads them with the same bits. State that cannot be
saved is an error of one sentence, never a crash.
"""

import os

import pytest
import torch
from harness import on_every_rank
from models import Mlp
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


class Coded(torch.Tensor):
    """A tensor of codes and one scale, like torchao's OptimState8bit."""

    @staticmethod
    def __new__(cls, codes, scale, signed, dtype=torch.float32):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes, scale, signed, dtype=torch.float32):
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size=None, outer_stride=None):
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of codes")


class CodedMomentum(torch.optim.Optimizer):
    kind = Coded

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    codes = torch.full_like(p, 128, dtype=torch.uint8)
                    state.update(step=torch.tensor(0.0), moment=self.kind(codes, torch.ones(1), True))
                moment = (state["moment"].codes.float() - 128) * state["moment"].scale * 0.5 + p.grad
                state["moment"].scale.copy_(moment.abs().max() / 100 + 1e-9)
                state["moment"].codes.copy_((moment / state["moment"].scale + 128).round().clamp(0, 255))
                state["step"] += 1
                p.sub_(group["lr"] * moment)


class Unregistered(CodedMomentum):
    kind = type("Unregistered", (Coded,), {})


def begin(zero, kind=CodedMomentum, partition="tensor"):
    torch.manual_seed(zero)
    module = Mlp()
    model, optimizer = sw.wrap(
        module, kind(module.parameters()), zero=zero, **({"partition": partition} if zero else {})
    )
    return model, optimizer


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()


def values(model):
    return [*sw.full_state_dict(model).values()]


def bytes_of(folder):
    names = sorted(name for name in os.listdir(folder) if name.startswith("optimizer"))
    return {name: open(f"{folder}/{name}", "rb").read() for name in names}


@on_every_rank()
def test_inner_tensors_are_the_entries_at_every_stage(rank, world_size):
    folder = shared_folder(rank)
    with torch.serialization.safe_globals([Coded]):
        for zero in (0, 1, 3):
            model, optimizer = begin(zero)
            sw.load_full_state_dict(model, dict(zip(sw.full_state_dict(model), values(begin(0)[0]))))
            train(model, optimizer, rank, range(2))
            if not zero:
                held, copied = (
                    optimizer.state[model.module[0].weight]["moment"],
                    sw.full_optimizer_state_dict(model, optimizer),
                )
                assert torch.equal(copied["state"][0]["moment"].codes, held.codes)
                assert copied["state"][0]["moment"].codes.data_ptr() != held.codes.data_ptr()
            sw.save(f"{folder}/{zero}", model, optimizer)
            assert bytes_of(f"{folder}/{zero}") == bytes_of(f"{folder}/0"), zero
            again = begin((zero + 2) % 4)
            sw.load(f"{folder}/{zero}", *again)
            for each in ((model, optimizer), again):
                train(*each, rank, range(2, 4))
            assert all(torch.equal(a, b) for a, b in zip(values(model), values(again[0]), strict=True)), zero
        assert b"moment.codes.0.weight" in bytes_of(f"{folder}/0")["optimizer.json"]
        if world_size > 1:
            sliced = begin(2, partition="flat")
            train(*sliced, rank, range(1))
            with pytest.raises(sw.CheckpointError, match="is a Coded over a slice.*partition='tensor'"):
                sw.save(f"{folder}/flat", *sliced)
    with pytest.raises(sw.CheckpointError, match="'moment' of the optimizer's state is a .*Coded: import its package"):
        sw.load(f"{folder}/0", *begin(0))
    for zero in (0, 1):
        unknown = begin(zero, Unregistered)
        train(*unknown, rank, range(1))
        with pytest.raises(sw.CheckpointError, match="without memory of its own"):
            sw.save(f"{folder}/unknown", *unknown)
