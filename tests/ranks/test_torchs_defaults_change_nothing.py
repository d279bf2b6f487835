"""Law: torch's default device and dtype affect only tensors that the program makes. The engine's tensors lie where its
parameters lie, or on the host, in the dtype of its arithmetic. Training has the same bits under any defaults.

The default device here is "meta", on which a needed value would be lost. With torch.set_default_device("cuda") it would
be on a GPU, and the host's engine would get its address.
"""

import contextlib

import pytest
import torch
from harness import LONG, gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

#: ours: those of torch's that count their steps in a tensor make it on the default device where they step themselves
ADAMW = lambda parameters: sw.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
SGD = lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=False)  # noqa: E731
TRAININGS = {
    "zero=0": (ADAMW, {}),
    "zero=1": (ADAMW, {"zero": 1}),
    "zero=2": (SGD, {"zero": 2}),
    "zero=3": (ADAMW, {"zero": 3}),
    "released": (ADAMW, {"zero": 3, "share_parameters": False}),
    "whole tensors": (ADAMW, {"zero": 3, "partition": "tensor"}),
    "bf16": (ADAMW, {"zero": 2, "precision": "bf16"}),
    "offload": (ADAMW, {"zero": 1, "offload": "cpu"}),
    "clipped": (ADAMW, {"zero": 1, "clip_grad_norm": 0.1}),
    "halves": (ADAMW, {"compress": lambda: sw.Fp16()}),
    "blocks": (ADAMW, {"zero": 2, "compress": lambda: sw.Int8(error_feedback=True)}),
    "blocks of 4 bits": (ADAMW, {"zero": 2, "compress": lambda: sw.Int4()}),
    "PowerSGD": (ADAMW, {"compress": lambda: sw.PowerSGD(2, min_compression_rate=0)}),
}
#: others of the quick form go the same ways
LONG_ALONE = {"zero=1", "blocks of 4 bits"}


@contextlib.contextmanager
def defaults(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def train(rank, module, inputs, folder, optimizer_of, compress=None, **options):
    """Return losses, parameters and moments of a training with accumulation, clipping, norms, and a checkpoint that
    another wrapper loads.
    """
    if compress is not None:
        options["compress"] = compress()
    first, second = module
    model, optimizer = sw.wrap(first, optimizer_of(first.parameters()), **options)
    losses = []

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())

    for x in inputs[:3]:
        step(x)
        losses.append(sw.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    sw.save(folder, model, optimizer, step=3)
    model, optimizer = sw.wrap(second, optimizer_of(second.parameters()), **options)
    sw.load(folder, model, optimizer)
    with model.no_sync():
        step(inputs[3])
    step(inputs[4])
    losses.extend(sw.full_gradients(model)[name] for name in ("0.weight", "4.bias"))
    optimizer.step()
    with sw.Checkpointer(f"{folder} by steps", model, optimizer) as saves:
        saves.save(0)
        saves.wait()
        assert saves.restore() == 1
    state = sw.full_optimizer_state_dict(model, optimizer)["state"]
    return losses, [*sw.full_state_dict(model).values()], [each for entry in state.values() for each in entry.values()]


@pytest.mark.parametrize("name", [name for name in TRAININGS if LONG or name not in LONG_ALONE])
@on_every_rank()
def test_a_training_has_the_same_bits(rank, world_size, name):
    optimizer_of, options = TRAININGS[name]
    inputs = [batch(rank, 6, 7, step=step) for step in range(5)]
    folder, found = shared_folder(rank), []
    for number, (device, dtype) in enumerate((("cpu", torch.float32), ("meta", torch.bfloat16))):
        torch.manual_seed(0)
        modules = Mlp(), Mlp()
        with defaults(device, dtype):
            found.append(train(rank, modules, inputs, f"{folder}/{number}", optimizer_of, **options))
        gather(None)
    for expected, other in zip(*found, strict=True):
        for a, b in zip(expected, other, strict=True):
            assert b.device.type == "cpu" and bits_equal(a, b)


@on_every_rank(at_least=2)
def test_local_steps_batch_norm_and_join_do_not_ask_for_them(rank, world_size):
    inputs, found = [batch(rank, 6, 7, step=step) for step in range(4)], []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        torch.manual_seed(0)
        module, normed, third = Mlp(), nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), Mlp()
        with defaults(device, dtype):
            outer = sw.DiLoCo(module, SGD(module.parameters()), every=2)
            for step in range(4):
                module(inputs[step]).square().mean().backward()
                outer.step()
                outer.zero_grad()
            normed = sw.wrap(sw.SyncBatchNorm.convert_sync_batchnorm(normed))
            normed(inputs[0]).square().mean().backward()
            uneven, optimizer = sw.wrap(third, ADAMW(third.parameters()))
            with uneven.join():
                for step in range(1 + rank):
                    uneven(inputs[step]).square().mean().backward()
                    optimizer.step()
        found.append([p.detach() for p in (*module.parameters(), *third.parameters(), *normed.module.buffers())])
        gather(None)
    assert all(bits_equal(a, b) for a, b in zip(*found, strict=True))
