"""Laws of the extension module where memory is short, and under sanitizers.

Each allocation of a call fails in turn, Python's own included. The call then raises an error that says so, never
CPython's SystemError, nothing crashes, and the same call succeeds afterwards. The same scenes run under the address,
undefined-behaviour and thread sanitizers in the long form, in which the extension is compiled for each.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shardwright
from test_csrc import BUILDERS
from test_fake_gpu import libraries, reference_kernels

ROOT = Path(__file__).resolve().parents[1]
SCENES = ROOT / "tests" / "bindings" / "scenes.py"
ENGINE = Path(shardwright.__file__).parent / "_engine.abi3.so"
LONG = os.environ.get("SW_TEST_LONG") == "1"
CC = os.environ.get("CC", "gcc")
#: In the quick form only each n-th allocation fails in scenes that take long, with n prime
QUICK_STRIDE = {"checkpoint": 11, "two_ranks": 7, "saver": 3, "units": 3, "gpu": 3}
NAMES = [
    *("communicator", "two_ranks", "stores", "reducer", "state_file", "optimizer", "checkpoint", "saver", "codecs"),
    "gpu",
]
SANITIZERS = {
    "address,undefined": (
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"},
    ),
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1:report_bugs=1:exitcode=66"}),
}


def run_scenes(
    engine: Path, folder: Path, words: list[str], preload: str, options: dict[str, str], seconds: float
) -> None:
    mode = BUILDERS["plain"].mode
    fakes = os.pathsep.join(map(str, (*libraries(mode).values(), reference_kernels(mode))))
    environment = {**os.environ, "LD_PRELOAD": preload, "PYTHONMALLOC": "malloc", "SW_FAKES": fakes, **options}
    command = [sys.executable, "-X", "faulthandler", str(SCENES), str(engine), str(folder), *words]
    if "libtsan" in preload and shutil.which("setarch"):
        command = ["setarch", platform.machine(), "-R", *command]  # its shadow memory has fixed addresses
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which(CC) is None or platform.libc_ver()[0] != "glibc":
        pytest.skip(f"no compiler {CC!r}, or a C library other than glibc")
    made = tmp_path_factory.mktemp("faults") / "faults.so"
    source = SCENES.with_name("faults_preload.c")
    subprocess.run([CC, "-O1", "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", str(made), str(source)], check=True)
    return str(made)


@pytest.mark.parametrize("scene", NAMES)
def test_each_allocation_fails_in_turn_and_the_caller_is_told(scene: str, faults: str, tmp_path: Path) -> None:
    stride = 1 if LONG else QUICK_STRIDE.get(scene, 1)
    run_scenes(ENGINE, tmp_path, ["faults", str(stride), scene], faults, {}, 300)


@pytest.mark.skipif(not LONG, reason="compiles the extension again: the long form (SW_TEST_LONG=1)")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
def test_scenes_are_clean_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    library, options = SANITIZERS[sanitizer]
    found = subprocess.run(
        [CC, f"-print-file-name={library}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"{CC} has no {library}")
    folder = ROOT / "build" / f"bindings-{sanitizer.split(',')[0]}"
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "build_ext",
        f"--build-temp={folder}/temp",
        f"--build-lib={folder}/lib",
    ]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "SW_SANITIZE": sanitizer})
    (engine,) = (folder / "lib").rglob("_engine.*so")
    run_scenes(engine, tmp_path, ["plain", "1"], found, options, 600)
