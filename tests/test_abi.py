"""Laws of foreign interfaces: each structure, number and signature that csrc declares by hand is the one of the real
header. tests/abi/abi_*.cpp are files of static assertions; compiling one is the test, and nothing is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import cuda_files

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "g++")
TORCH = Path(torch.__file__).parent / "include"
CUDA = cuda_files.headers("cuda.h")


def torch_includes() -> list[Path]:
    """The include folders of this torch, and of the tree's other environments."""
    others = sorted(ROOT.glob(".venv-torch-*/lib/python*/site-packages/torch/include"))
    roots = [Path(part) for part in os.environ.get("SW_TEST_CUDA", "").split(":") if part]
    named = [root.parent / "torch" / "include" for root in roots]
    return list({path.resolve(): path for path in (TORCH, *others, *named) if path.is_dir()}.values())


def cases() -> list[tuple[str, tuple[Path, ...]]]:
    """(assertions, include folders) for every set of headers on the machine."""
    found: list[tuple[str, tuple[Path, ...]]] = [("abi_cuda", (folder,)) for folder in CUDA]
    found += [("abi_nvrtc", (folder,)) for folder in cuda_files.headers("nvrtc.h")]
    # nccl.h and torch's CUDA headers include the runtime's, which pip splits over two packages: the whole set is needed.
    runtime = [folder for folder in cuda_files.headers("cuda_runtime.h") if (folder / "crt/host_defines.h").exists()][
        :1
    ]
    found += [("abi_nccl", (folder, *runtime)) for folder in cuda_files.headers("nccl.h") if runtime]
    found += [("abi_dlpack", (folder,)) for folder in torch_includes()]
    with_cuda = [folder for folder in torch_includes() if (folder / "c10/cuda/impl/cuda_cmake_macros.h").exists()]
    found += [("abi_torch", (folder, *runtime)) for folder in with_cuda if runtime]
    return found


def name_of(case: tuple[str, tuple[Path, ...]]) -> str:
    return f"{case[0]}-{case[1][0]}"


def compile_assertions(
    source: Path, includes: tuple[Path, ...], before: Path = ROOT / "csrc"
) -> subprocess.CompletedProcess[str]:
    folders = [word for folder in includes for word in ("-isystem", str(folder))]
    own = [f"-I{before}", "-Icsrc", "-Itests/abi"]
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", *own, *folders, str(source)]
    plain = {**os.environ, "LC_ALL": "C"}  # messages without quotes that a terminal might not have
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=plain)


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_what_is_declared_by_hand_is_what_the_header_says(case: tuple[str, tuple[Path, ...]]) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler {COMPILER!r} on this machine")
    done = compile_assertions(ROOT / "tests" / "abi" / f"{case[0]}.cpp", case[1])
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("header", ["cuda.h", "nvrtc.h", "nccl.h"])
def test_the_header_is_on_this_machine(header: str) -> None:
    if not cuda_files.headers(header):
        pytest.skip(f"{header} is in no folder that tests/cuda_files.py looks at: see requirements/abi.txt")


def test_a_wrong_declaration_is_caught(tmp_path: Path) -> None:
    if not CUDA or shutil.which(COMPILER) is None:
        pytest.skip("no cuda.h or no C++ compiler on this machine")
    text = (ROOT / "csrc" / "device" / "cuda_abi.h").read_text()
    wrong = {
        "SW_CU_NOT_READY = 600": "SW_CU_NOT_READY = 601",
        "(int *count)": "(int *count, int more)",
        "cuMemHostAlloc, (void **memory, size_t bytes": "cuMemHostAlloc, (void **memory, int bytes",
    }
    for right, changed in wrong.items():
        assert text.count(right) == 1
        text = text.replace(right, changed)
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "cuda_abi.h").write_text(text)
    done = compile_assertions(ROOT / "tests" / "abi" / "abi_cuda.cpp", (CUDA[0],), before=tmp_path)
    assert done.returncode != 0
    for name in ("CUDA_ERROR_NOT_READY", "cuDeviceGetCount", "cuMemHostAlloc"):
        assert name in done.stderr
