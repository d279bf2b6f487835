"""Laws of the GPU path on simulated GPUs: each tests/fake/test_*.c (but the kernels' text, which needs no driver) is
linked with the engine and runs on the fake libcuda.so.1 and libnccl.so.2. Only this file builds the fakes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from shardwright import _engine
from test_csrc import BUILDERS, CSRC, RUN_LIMIT_S, Builder, Mode, newest_header, run_checked
from test_layers import built_objects

ROOT = Path(__file__).resolve().parents[1]
FAKE = ROOT / "tests" / "fake"
TESTS = sorted(path for path in FAKE.glob("test_*.c") if path.stem != "test_kernel_text")
SHARED = [FAKE / "gpu_ranks.c"]
LIBRARIES = {
    "libcuda.so.1": ("sim_core.c", "sim_run.c", "fake_cuda.c", "fake_numbers.c", "fake_nvrtc.c", "sim_torch.c"),
    "libnccl.so.2": ("fake_nccl.c", "fake_nccl_arithmetic.c", "fake_nccl_files.c"),
}
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror")


def build_library(made: Path, command: Sequence[str], inputs: Iterable[Path]) -> Path:
    """Run `command` to make the file if it is missing or older than an input. Of several test processes one runs it."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(
            newest_header(), *(path.stat().st_mtime for path in (*FAKE.glob("*.[ch]"), Path(__file__), *inputs))
        )
        if not made.exists() or made.stat().st_mtime < newest:
            own = made.with_suffix(".new")
            run_checked([*command, "-o", str(own)])
            own.rename(made)
    return made


def libraries(mode: Mode) -> dict[str, Path]:
    """Build the fakes for a mode. The second library finds the first in its own folder."""
    folder = ROOT / "build" / "fake" / mode.name
    made: dict[str, Path] = {}
    for name, sources in LIBRARIES.items():
        files = [str(FAKE / source) for source in sources]
        beside = [*map(str, made.values()), "-Wl,-rpath,$ORIGIN"] if made else []
        own = ["-Icsrc", "-Icsrc_check", "-Itests/fake", f"-Wl,-soname,{name}"]
        command = [mode.compiler, *FLAGS, *WARNINGS, *mode.flags, *own, *files, *beside, "-ldl"]
        made[name] = build_library(folder / name, command, made.values())
    return made


def reference_kernels(mode: Mode) -> Path:
    """Build a library of the engine's host kernels, from the objects of `make build`."""
    layers = ("base", "platform", "tensor", "device", "kernels")
    objects = [made for source, made in built_objects().items() if source.relative_to(CSRC).parts[0] in layers]
    assert objects, "run `make build`"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-Icsrc", "-Icsrc_check", "-Itests/fake"]
    own = [FAKE / "reference_kernels.c", ROOT / "csrc_check" / "kernel_references.c"]
    sources = [*map(str, own), *map(str, objects)]
    command = [mode.compiler, *flags, *sources, "-lm", "-ldl"]
    return build_library(ROOT / "build" / "fake" / mode.name / "libkernels.so", command, [*own, *objects])


def kernel_text() -> Path:
    """Build a library of the device kernels' text, for simulations that run it; see tests/fake/cuda_text.hpp."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler {compiler!r} on this machine")
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Icsrc", "-fPIC", "-shared"]
    flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # a GPU traps on misalignment, too
    own = FAKE / "kernel_text.cpp"
    inputs = [own, FAKE / "cuda_text.hpp", *(CSRC / "kernels" / "cuda").glob("*.cu*")]
    return build_library(ROOT / "build" / "fake" / "libkerneltext.so", [compiler, *flags, str(own)], inputs)


def program(builder: Builder, test: Path) -> Path:
    made = [str(builder.compile(path)) for path in SHARED]
    return builder.program(test, [*made, "-ldl"])


def run_on_fakes(
    test: Path, mode: Mode, folder: Path, limit_s: float = RUN_LIMIT_S, strict: str = ""
) -> subprocess.CompletedProcess[str]:
    fakes = libraries(mode)
    command = [str(program(BUILDERS[mode.name], test)), *map(str, fakes.values()), str(folder)]
    plain = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    plain["SIM_STRICT"] = strict or plain.get("SIM_STRICT", "")
    options = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env={**plain, **options})


@pytest.mark.parametrize("mode", list(BUILDERS))
@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.stem)
def test_c_program_on_simulated_gpus_exits_with_zero(test: Path, mode: str, tmp_path: Path) -> None:
    if mode != "plain" and os.environ.get("SW_TEST_LONG") != "1":
        pytest.skip("long form only (SW_TEST_LONG=1)")
    if shutil.which(BUILDERS[mode].mode.compiler) is None:
        pytest.skip(f"no compiler {BUILDERS[mode].mode.compiler!r} on this machine")
    done = run_on_fakes(test, BUILDERS[mode].mode, tmp_path)
    assert done.returncode == 0, f"{test.stem} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-8000:]}"


@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.stem)
def test_it_does_so_where_a_driver_waits_in_the_worst_case(test: Path, tmp_path: Path) -> None:
    """See SIM_STRICT in tests/fake/sim.h; test_sim.c sets it itself."""
    if os.environ.get("SW_TEST_LONG") != "1" and test.stem != "test_device_units":
        pytest.skip("long form only (SW_TEST_LONG=1)")
    if shutil.which(BUILDERS["plain"].mode.compiler) is None:
        pytest.skip("no C compiler on this machine")
    done = run_on_fakes(test, BUILDERS["plain"].mode, tmp_path, strict="all")
    assert done.returncode == 0, f"{test.stem} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-8000:]}"


def test_a_driver_stays_loaded(tmp_path: Path) -> None:
    if shutil.which(BUILDERS["plain"].mode.compiler) is None:
        pytest.skip("no C compiler on this machine")
    own = shutil.copy(libraries(BUILDERS["plain"].mode)["libcuda.so.1"], tmp_path / "libcuda-own.so")
    assert _engine.cuda_devices(str(own))["devices"]
    assert str(own) in Path("/proc/self/maps").read_text()


def test_python_sees_the_devices_of_a_driver_by_its_path() -> None:
    if shutil.which(BUILDERS["plain"].mode.compiler) is None:
        pytest.skip("no C compiler on this machine")
    shown = _engine.cuda_devices(str(libraries(BUILDERS["plain"].mode)["libcuda.so.1"]))
    assert shown["version"] == (13, 0)
    assert shown["devices"][1] == {"name": "Simulated GPU 1", "capability": (9, 0), "multiprocessors": 4}
    with pytest.raises(NotImplementedError, match="/no/libcuda.so.1 cannot be used"):
        _engine.cuda_devices("/no/libcuda.so.1")
