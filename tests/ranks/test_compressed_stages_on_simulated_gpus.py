"""Law: compressors keep the promises of zero=2 and 3 between GPUs (test_compressed_gradients_at_every_stage, body for
body): the bits of the naive compressor, also on an accumulated mean. Over meshes of two dimensions they have the bits of
zero=0.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import test_compressed_gradients_at_every_stage as at_every_stage
import torch
from compressed_on_gpus import Trained, running_out_of_the_mean, steps
from harness import LONG, gather, in_turn
from internals import auto_compression
from models import Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


def at_least_two(test: Any) -> Any:
    test.at_least = 2
    return test


def on_four(test: Any) -> Any:
    test.exactly = 4
    return test


PROMISES: list[tuple[str, dict[str, Any]]] = [
    *[("gradients_are_the_naive_compressor_s", {"name": n, "zero": z}) for n in ("int8", "int4") for z in (2, 3)][
        :: 1 if LONG else 3
    ],
    *(
        ("a_resumed_state_goes_on_with_the_same_bits", {"name": name, "zero": zero})
        for name, zero in in_turn([("powersgd", 2), ("powersgd", 3)], 1)
    ),
    ("a_accumulated_average_is_not_compressed_again", {"name": "int4"}),
    *(("local_sums_and_unused_parameters_are_as_at_stage_0", {"name": n}) for n in in_turn(("int8", "powersgd"), 0)),
    *(("values_that_are_not_finite_leave_no_trace", {"name": n}) for n in in_turn(("int4", "powersgd"), 1)),
    *(("norms_and_low_precision_are_as_at_stage_0", {"name": n}) for n in in_turn(("int8", "powersgd"), 1)),
    *(
        ("complex_gradients_are_compressed_as_pairs", {"name": n, "dtype": torch.complex64})
        for n in in_turn(("int4", "powersgd"), 0)
    ),
]


@pytest.mark.parametrize("number", range(len(PROMISES)), ids=lambda n: "-".join(map(str, PROMISES[n][1].values())))
def test_promises_of_the_cpu(teams: Any, world_size: int, paths: dict[str, str], number: int) -> None:
    run(teams, world_size, paths, keep, number, policy=POLICIES[number % len(POLICIES)])


def keep(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    name, given = PROMISES[number]
    wrap = sw.wrap

    def wrapped(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        return wrap(gpus.adopt_module(module), *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sw, "wrap", wrapped)
        getattr(at_every_stage, f"test_{name}").body(rank, world_size, **given)


@at_least_two
def test_gradients_that_one_rank_cleared_alone_are_named_a_step_later(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, cleared_alone, policy="on demand")


def cleared_alone(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    wrapped, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=2, compress=sw.Int4())
    with pytest.raises(sw.Error, match="ranks cleared different gradients of Mlp"):
        for step in range(50):
            wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
            if rank == 0 or step % 2:
                wrapped.zero_grad()
    gather(None)


@pytest.mark.parametrize(("zero", "nth"), [(2, 5), (2, 19), (3, 8), (3, 9), (3, 31)])
def test_a_call_of_the_driver_that_fails_is_named(
    teams: Any, world_size: int, paths: dict[str, str], zero: int, nth: int
) -> None:
    run(teams, 1, paths, failing_call, zero, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, zero: int, nth: int) -> None:
    for compress in (sw.Int4(), sw.PowerSGD(2, min_compression_rate=1)):
        module = gpus.adopt_module(Mlp())
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), compress=compress, zero=zero)
        gpus.fail_call(nth, 999)
        with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
            steps(model, optimizer, rank)
        gpus.fail_call(0, 0)


COMPRESSORS: dict[str, Any] = {
    "fp16": sw.Fp16(),
    "bf16": sw.Bf16(),
    "int8": sw.Int8(block=32),
    "int4": sw.Int4(),
    "powersgd": sw.PowerSGD(2, min_compression_rate=1),
    "powersgd of halves": sw.PowerSGD(2, min_compression_rate=1, wire_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", in_turn([*COMPRESSORS], 1))
def test_the_mean_may_be_over_ranks_that_still_train(
    teams: Any, world_size: int, paths: dict[str, str], name: str
) -> None:
    run(teams, world_size, paths, over_those_that_train, name, policy=POLICIES[len(name) % len(POLICIES)])


def over_those_that_train(gpus: SimulatedGpus, rank: int, world_size: int, name: str) -> None:
    builds = [Mlp, lambda: Mlp().to(torch.bfloat16)]
    for build in builds if LONG else builds[list(COMPRESSORS).index(name) // 2 % 2 :][:1]:
        options = {"build": build, "bucket_cap_mb": 25}
        with gpus.torch_on_cpu():
            expected = Trained(gpus, rank, COMPRESSORS[name], running_out_of_the_mean, **options)
        found = Trained(gpus, rank, COMPRESSORS[name], running_out_of_the_mean, **options)
        found.assert_equals(expected, name, same_bytes=False)


def mesh(shape: tuple[int, int]) -> DeviceMesh:
    count = shape[0] * shape[1]
    return DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize("zero", [2, 3])
@on_four
def test_rows_of_a_mesh(teams: Any, world_size: int, paths: dict[str, str], zero: int) -> None:
    run(teams, world_size, paths, rows, zero)


def rows(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    """Train on a mesh, where a slice has two owners."""
    for compress in in_turn((sw.Int8(block=32), sw.PowerSGD(2, min_compression_rate=1)), zero):
        with gpus.torch_on_cpu():
            expected = Trained(gpus, rank, compress, steps)
        found = Trained(gpus, rank, compress, steps, zero=zero, device_mesh=mesh((2, 2)))
        found.assert_equals(expected, f"{compress} zero={zero}", same_bytes=False)


def test_auto_is_none_and_logs_it(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, auto)


def auto(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    lines: list[str] = []
    with mock.patch.object(auto_compression._logger, "info", lambda text, *given: lines.append(text % given)):
        model = sw.wrap(gpus.adopt_module(Mlp()), compress="auto")
    said = "compress='auto': none, because nothing is measured between GPUs: see docs/design/compress.md"
    assert lines == [said] * (rank == 0)
    assert "compress" not in sw.stats()["models"][-1] and model.compression_state is None
