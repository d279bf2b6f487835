"""Law: the comparison of a card's kernels with their references (csrc_check/kernel_check.h) runs through the driver,
passes correct kernels, and names each wrong one. The simulated driver runs the kernels' own text, with the grids of a
card.
"""

from __future__ import annotations

from typing import Any

import pytest
from internals import _engine, _engine_check, cuda
from peer import PEER
from simulated_gpus import SimulatedGpus, run

pytestmark = [
    pytest.mark.skipif(PEER == "torch", reason="ours"),
    pytest.mark.timeout(180),
]  # a compiler of C++ runs first
#: cases of each kernel, spread over its table; fewer of those whose text is slow, a thread at a time
CASES, FEW = 8, {"orthonormalize": 2, "project": 3}


@pytest.fixture(scope="module")
def text() -> str:
    from test_fake_gpu import kernel_text

    return str(kernel_text())


def gpu() -> Any:
    return _engine.DeviceComm(0, **cuda.runtime.libraries())


def check(comm: Any, name: str, cases: int, strict: bool = False) -> dict[str, Any]:
    count = _engine_check.device_kernel_cases()[name]
    step = max(1, count // cases) | 1  # odd, so that every size comes
    found: dict[str, Any] = _engine_check.device_kernel_check(comm, name, 1, step, strict)
    return found


def test_the_text_agrees_with_every_reference(teams: Any, paths: dict[str, str], text: str) -> None:
    run(teams, 1, paths, every_kernel, text, policy="on demand")


def every_kernel(gpus: SimulatedGpus, rank: int, world_size: int, text: str) -> None:
    gpus.run_text(text)
    comm = gpu()
    assert len(_engine_check.device_kernel_cases()) >= 17
    for name in _engine_check.device_kernel_cases():
        found = check(comm, name, FEW.get(name, CASES))
        assert found["cases"] >= 2 and found["launches"] == 3 * found["cases"], (name, found)
        assert found["differences"] == 0 and found["sentences"] == [], (name, found)
        assert check(comm, name, 1, strict=True)["differences"] == 0, name
    with pytest.raises(ValueError, match="no kernel 'sort'"):
        _engine_check.device_kernel_check(comm, "sort")


def test_a_kernel_that_is_wrong_is_named(teams: Any, paths: dict[str, str], text: str) -> None:
    run(teams, 1, paths, each_spoiled, text, policy="eager")


def each_spoiled(gpus: SimulatedGpus, rank: int, world_size: int, text: str) -> None:
    comm = gpu()
    for number, name in enumerate(_engine_check.device_kernel_cases()):
        gpus.run_text(text, number)
        found = check(comm, name, min(4, FEW.get(name, 4)))
        assert found["differences"] > 0 and f"sw_{name}, case " in found["sentences"][0], (name, found)
    gpus.fail_next("cuLaunchKernel", 702)
    with pytest.raises(_engine.Error, match="cuLaunchKernel failed"):
        check(comm, "cast", 1)
