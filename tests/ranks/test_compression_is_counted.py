"""Law: bytes that a compressor sends are counted when they are sent, by step and bucket, and match its format. After
the second step it allocates nothing.
"""

import itertools

import internals
import pytest
import torch
from harness import on_every_rank
from models import Mlp
from peer import PEER, batch, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch counts nothing of it")

COMPRESSORS = [
    "Fp16()",
    "Bf16()",
    "Int8()",
    "Int4()",
    "PowerSGD(rank=2, min_compression_rate=1)",
    "PowerSGD(rank=2, min_compression_rate=1, wire_dtype=torch.bfloat16, error_dtype=torch.bfloat16)",
    "PowerSGD(rank=2, min_compression_rate=1, wire_dtype=torch.float16)",
]


def wrapped(zero, text, **options):
    torch.manual_seed(0)
    compress = eval(text, {**{name: getattr(sw, name) for name in sw.__all__}, "torch": torch}) if text else None
    return sw.wrap(Mlp(), zero=zero, compress=compress, **options)


def step(model, rank, number):
    model.zero_grad()
    model(batch(rank, 8, 7, step=number)).square().mean().backward()


def counts():
    return sw.stats()["models"][-1]


@pytest.mark.parametrize("text", ["", *COMPRESSORS])
@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_steps_and_buckets_add_up(rank, world_size, zero, text):
    model = wrapped(zero, text, bucket_cap_mb=0.001)
    seen, steps = [], []
    for number in range(3):
        step(model, rank, number)
        row = counts()
        assert row["step_wire_bytes"] == sum(row["bucket_wire_bytes"])
        assert len(row["bucket_wire_bytes"]) == internals.reducer(model).bucket_count
        seen.append(row["wire_bytes"])
        steps.append(row["step_wire_bytes"])
    assert seen == [*itertools.accumulate(steps)]
    assert steps[0] == steps[2] == steps[1]
    assert (seen[0] > 0) == (world_size > 1)


@on_every_rank(at_least=2)
def test_bytes_are_those_of_the_format(rank, world_size):
    numel = {}
    for zero, shots in ((0, 2), (2, 1)):
        for text, element_bytes in (("", 4), ("Bf16()", 2), ("Int8()", 1 + 4 / 256), ("Int4()", 0.5 + 4 / 64)):
            model = wrapped(zero, text)
            step(model, rank, 0)
            share = shots * (world_size - 1) / world_size
            found = counts()["step_wire_bytes"]
            padding = shots * (world_size - 1) * (5 * 260 + 64 * 4)  # partial blocks, cuts, alignment
            numel = sum(p.numel() for p in model.parameters())
            assert share * numel * element_bytes <= found <= share * numel * element_bytes + padding, (zero, text)


@pytest.mark.parametrize("text", COMPRESSORS)
@pytest.mark.parametrize("zero", [0, 2])
@on_every_rank()
def test_a_compressor_allocates_no_tensor_after_the_second_step(rank, world_size, zero, text):
    allocated = []
    for compress in ("", text):
        model = wrapped(zero, compress)
        for number in range(2):
            step(model, rank, number)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            for number in range(2, 4):
                step(model, rank, number)
        made = [e.cpu_memory_usage for e in profile.function_events if e.name == "[memory]" and e.cpu_memory_usage > 0]
        allocated.append(sum(made))
    assert allocated[1] <= allocated[0], allocated
