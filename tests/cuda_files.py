"""Find NVIDIA's headers, compilers and libraries on this machine, in pip packages or in a toolkit's folder.

None of them is needed to build or to run the tests: a test that finds none skips and names what was missing. The
places, in order: the folders named in SW_TEST_CUDA (separated by colons), the `nvidia` packages of this Python, headers
that `make` fetched (tests/abi/headers.py), packages of the tree's other environments (`make test-torch`),
/usr/local/cuda.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: the interpreter's environment or, in another torch's, the tree's own
HEADERS = next((folder for folder in (Path(sys.prefix) / "headers",) if folder.is_dir()), ROOT / ".venv" / "headers")


def _roots() -> list[Path]:
    named = [Path(part) for part in os.environ.get("SW_TEST_CUDA", "").split(":") if part]
    spec = importlib.util.find_spec("nvidia")
    own = [Path(part) for part in (spec.submodule_search_locations or [])] if spec is not None else []
    others = sorted(ROOT.glob(".venv-torch-*/lib/python*/site-packages/nvidia"))
    fetched = sorted(HEADERS.glob("*/nvidia"))
    return [root for root in (*named, *own, *fetched, *others, Path("/usr/local/cuda")) if root.is_dir()]


def _find(patterns: tuple[str, ...]) -> list[Path]:
    """Return existing files, one for each real path, in the order of the roots."""
    found: dict[Path, Path] = {}
    for root in _roots():
        for pattern in patterns:
            for path in sorted(root.glob(pattern)):
                found.setdefault(path.resolve(), path)
    return list(found.values())


def headers(name: str) -> list[Path]:
    """Return the folders that hold the header `name`."""
    return [path.parent for path in _find((f"include/{name}", f"*/include/{name}"))]


def why_missing() -> str:
    """Return the message of `make` about headers that it could not fetch."""
    note = HEADERS / "missing.txt"
    return note.read_text().strip() if note.exists() else "`make test` fetches it: see requirements/abi.txt"


def nvrtc_libraries() -> list[tuple[Path, Path | None]]:
    """Return (compiler, companion) of each NVRTC found."""
    found = _find(("lib/libnvrtc.so.1*", "lib64/libnvrtc.so.1*", "*/lib/libnvrtc.so.1*"))
    return [(path, next(iter(sorted(path.parent.glob("libnvrtc-builtins.so.*"))), None)) for path in found]


def nccl_libraries() -> list[Path]:
    return _find(("lib/libnccl.so.2", "*/lib/libnccl.so.2"))


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
