"""The parts of torch.cuda that the engine uses, and the places of the libraries that torch ships."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .._engine import DeviceComm
from ..options.places import cache_folder
from . import autograd


class CudaRuntime:
    """The functions of torch.cuda that the engine uses."""

    #: True if a thread watches the communicator
    watches = True

    def __init__(self) -> None:
        self.kernels: dict[int, DeviceComm] = {}  # launchers by GPU, for steps on tensors outside of any wrapper

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a GPU."""
        return tensor.device.type == "cuda"

    def stages(self, tensor: torch.Tensor) -> bool:
        """Return whether the CUDA driver can copy from the tensor: torch also calls other vendors' GPUs cuda."""
        return self.holds(tensor) and torch.version.cuda is not None

    def ordinal(self, tensor: torch.Tensor) -> int:
        """The GPU's number, as the driver counts in this process."""
        index = tensor.device.index
        return torch.cuda.current_device() if index is None else index

    def current_stream(self, ordinal: int) -> int:
        """Return the address of the stream that torch enqueues on now, in this thread."""
        return autograd.raw_stream(ordinal)

    def stream_reader(self, ordinal: int) -> Callable[[], int]:
        """Return current_stream(ordinal) as a callable without a Python frame: it is called at every gradient."""
        return autograd.stream_reader(ordinal)

    def zeros(self, numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Allocate memory for a bucket, on the GPU of `like`, with torch's allocator."""
        return torch.zeros(numel, dtype=dtype, device=like.device)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor without elements on a GPU."""
        return torch.empty(0, dtype=torch.float32, device=device)

    def moved(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values on the GPU of `like`."""
        return tensor.to(like.device)

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over GPU memory that the engine owns and torch has just written."""
        return tensor

    def backend(self, group: Any) -> Any:
        """Return torch's own backend for GPU tensors of a process group. Raise RuntimeError if it has none."""
        return group._get_backend(torch.device("cuda"))

    def communicator(self, backend: Any, ordinal: int) -> int:
        """Return the address of a backend's communicator for a GPU, 0 before it exists; RuntimeError after its end."""
        with torch.cuda.device(ordinal):
            address: int = backend._comm_ptr()
        return address

    def make_room(self, ordinal: int) -> None:
        """Free unused GPU memory of torch's allocator after an allocation of the engine failed."""
        with torch.cuda.device(ordinal):
            torch.cuda.empty_cache()

    def libraries(self) -> dict[str, str | None]:
        """Arguments of DeviceComm: the paths of the driver, NCCL and the kernel images."""
        nvrtc, builtins = find_nvrtc(nvidia_folders(), torch.version.cuda)
        return {"packaged": _image_folder(), "cache": _cache_folder(), "nvrtc": nvrtc, "builtins": builtins}


#: A test puts a stand-in here, for simulated GPUs.
runtime: Any = CudaRuntime()


def nvidia_folders() -> list[Path]:
    """Return where pip puts NVIDIA's libraries, and where a toolkit does."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(part) for part in (spec.submodule_search_locations or ())] if spec is not None else []
    return [*folders, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]


def find_nvrtc(folders: Iterable[Path], cuda_version: str | None) -> tuple[str | None, str | None]:
    """Return (compiler, its companion library) for torch's CUDA version; bare names if no file is found."""
    major = (cuda_version or "").split(".")[0]
    name = "libnvrtc.so.11.2" if major == "11" else f"libnvrtc.so.{major}"  # the name from 11.2 to 11.8
    for folder in folders if major else ():
        for pattern in (f"*/lib/{name}", f"lib/{name}", f"lib64/{name}"):
            for path in sorted(folder.glob(pattern)):
                return str(path), nvrtc_companion(path)
    return (name if major else None), None


def nvrtc_companion(path: Path) -> str | None:
    """Return the library that the compiler loads by name; the loader may not search pip's folders for it."""
    return next((str(found) for found in sorted(path.parent.glob("libnvrtc-builtins.so.*"))), None)


def _image_folder() -> str | None:
    """Return the folder of images made ahead of time (`shardwright kernels --to`): SHARDWRIGHT_KERNELS, or ours."""
    own = Path(__file__).parents[1] / "images"
    return os.environ.get("SHARDWRIGHT_KERNELS") or (str(own) if own.is_dir() else None)


def _cache_folder() -> str | None:
    """Return the folder of compiled kernels, after making its parents; None for a user without a home."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):  # the engine then compiles at each start and reports the folders it tried
            os.makedirs(os.path.dirname(folder), exist_ok=True)
    return folder


def open_gpu(
    ordinal: int, libraries: dict[str, str | None], host: Any = None, beside: DeviceComm | None = None
) -> DeviceComm:
    """Open a GPU for this rank alone. If GPU memory is short, ask torch's allocator to free its unused blocks."""
    return DeviceComm(ordinal, host=host, make_room=lambda: runtime.make_room(ordinal), beside=beside, **libraries)


def place_of(tensor: torch.Tensor) -> tuple[DeviceComm, int] | None:
    """Return (the launcher of a tensor's GPU, torch's current stream there); None for a tensor on the CPU. Not collective."""
    if not runtime.holds(tensor):
        return None
    ordinal = runtime.ordinal(tensor)
    found = runtime.kernels.get(ordinal)
    if found is None:
        found = runtime.kernels[ordinal] = open_gpu(ordinal, runtime.libraries())
    return found, runtime.current_stream(ordinal)
