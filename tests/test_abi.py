"""Laws of foreign interfaces: each structure, number and signature that csrc declares by hand equals the real header's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import cuda_files
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "g++")
TORCH = Path(torch.__file__).parent / "include"
#: searched after torch's own: headers that a torch build with CUDA generates
GENERATED = ROOT / "tests" / "abi" / "generated"
CUDA = cuda_files.headers("cuda.h")
#: nccl.h and torch's CUDA headers include the runtime's headers. pip splits these over three packages, of which torch's
#: CUDA wheels
#: bring one, so the whole set is needed
RUNTIME = [
    folder
    for folder in cuda_files.headers("cuda_runtime.h")
    if all((folder / part).exists() for part in ("crt/host_defines.h", "nv/target"))
][:1]


def torch_includes() -> list[Path]:
    """Return the include folders of this torch, and of the tree's other environments."""
    others = sorted(ROOT.glob(".venv-torch-*/lib/python*/site-packages/torch/include"))
    others += sorted(cuda_files.HEADERS.glob("torch-*/torch/include"))
    roots = [Path(part) for part in os.environ.get("SW_TEST_CUDA", "").split(":") if part]
    named = [root.parent / "torch" / "include" for root in roots]
    return list({path.resolve(): path for path in (TORCH, *others, *named) if path.is_dir()}.values())


def cases() -> list[tuple[str, tuple[Path, ...]]]:
    """Return (assertions, include folders) for every set of headers on the machine."""
    found: list[tuple[str, tuple[Path, ...]]] = [("abi_cuda", (folder,)) for folder in CUDA]
    found += [("abi_nvrtc", (folder,)) for folder in cuda_files.headers("nvrtc.h")]
    found += [("abi_nccl", (folder, *RUNTIME)) for folder in cuda_files.headers("nccl.h") if RUNTIME]
    found += [("abi_dlpack", (folder,)) for folder in torch_includes()]
    with_cuda = [folder for folder in torch_includes() if (folder / "c10/cuda/CUDAStream.h").exists()]
    found += [("abi_torch", (folder, *RUNTIME, GENERATED)) for folder in with_cuda if RUNTIME]
    return found


def name_of(case: tuple[str, tuple[Path, ...]]) -> str:
    return f"{case[0]}-{case[1][0]}"


def compile_assertions(
    source: Path, includes: tuple[Path, ...], before: Path = ROOT / "csrc"
) -> subprocess.CompletedProcess[str]:
    folders = [word for folder in includes for word in ("-isystem", str(folder))]
    own = [f"-I{before}", "-Icsrc", "-Itests/abi"]
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", *own, *folders, str(source)]
    plain = {**os.environ, "LC_ALL": "C"}  # messages with plain ASCII quotes
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=plain)


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_declarations_by_hand_equal_the_headers(case: tuple[str, tuple[Path, ...]]) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler {COMPILER!r} on this machine")
    done = compile_assertions(ROOT / "tests" / "abi" / f"{case[0]}.cpp", case[1])
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("header", ["cuda.h", "nvrtc.h", "nccl.h"])
def test_the_header_is_on_this_machine(header: str) -> None:
    if not cuda_files.headers(header):
        pytest.skip(f"{header} is in no folder that tests/cuda_files.py looks at. {cuda_files.why_missing()}")


def test_every_file_is_compared_if_its_headers_exist() -> None:
    """Check that no header set is skipped. torch's wheel contains its CUDA headers, and so does the CPU wheel."""
    compared = {name for name, _ in cases()}
    if not RUNTIME or not all(map(cuda_files.headers, ("cuda.h", "nvrtc.h", "nccl.h"))):
        pytest.skip(cuda_files.why_missing())
    assert compared == {path.stem for path in (ROOT / "tests" / "abi").glob("*.cpp")}


def test_headers_that_cannot_be_fetched_are_named_and_are_no_error(tmp_path: Path) -> None:
    wanted = tmp_path / "abi.txt"
    wanted.write_text("# none of it exists\nnvidia-nccl-cu13==0.0.0\n")
    command = [sys.executable, str(ROOT / "tests" / "abi" / "headers.py"), str(tmp_path / "headers"), str(wanted)]
    nowhere = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=nowhere)
    assert done.returncode == 1 and "nvidia-nccl-cu13==0.0.0: ERROR: No matching distribution" in done.stdout
    assert (tmp_path / "headers" / "missing.txt").read_text().startswith("nvidia-nccl-cu13==0.0.0: ERROR")
    with zipfile.ZipFile(tmp_path / "nvidia_nccl_cu13-0.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nvidia/nccl/include/nccl.h", "#define NCCL 0\n")
        wheel.writestr("nvidia/nccl/lib/libnccl.so.2", "large")
        wheel.writestr("nvidia_nccl_cu13-0.0.0.dist-info/METADATA", "Name: nvidia-nccl-cu13\nVersion: 0.0.0\n")
        wheel.writestr("nvidia_nccl_cu13-0.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    for _ in range(2):  # the second call finds the file
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=nowhere)
        assert done.returncode == 0, done.stdout + done.stderr
        (tmp_path / "nvidia_nccl_cu13-0.0.0-py3-none-any.whl").unlink(missing_ok=True)
    fetched = tmp_path / "headers" / "nvidia-nccl-cu13-0.0.0" / "nvidia" / "nccl"
    assert [path.name for path in fetched.rglob("*") if path.is_file()] == ["nccl.h"]
    assert not (tmp_path / "headers" / "missing.txt").exists()


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
