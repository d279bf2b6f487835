"""The doctor on libraries: the versions of the driver, of NCCL and of the kernels' compiler in this process."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from typing import Any

from .machine import Finding, Machine, read_text

_OLDEST_NCCL = (2, 14)
_DELETED = " (deleted)"


def driver_findings(machine: Machine) -> Iterator[Finding]:
    """Report the driver and the GPUs that it shows."""
    import torch

    from ... import _engine

    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    yield Finding("CUDA_VISIBLE_DEVICES", "unset" if visible is None else repr(visible))
    yield from _kernel_driver(machine)
    try:
        shown: dict[str, Any] = _engine.cuda_devices(machine.libcuda)
    except NotImplementedError as error:  # no driver, no GPU, or too old: the host path works without
        yield _no_gpus(machine, visible, str(error))
        return
    except Exception as error:
        yield Finding("CUDA driver", f"{type(error).__name__}: {error}", "bad", "run nvidia-smi: it must list the GPUs")
        return
    yield Finding("CUDA driver", "CUDA {}.{}".format(*shown["version"]))
    for ordinal, device in enumerate(shown["devices"]):
        name = f"{device['name']}, sm_{device['capability'][0]}{device['capability'][1]}"
        old = device["capability"] < (7, 5)
        fix = "use another GPU: the kernels need compute capability 7.5" if old else ""
        yield Finding(f"GPU {ordinal}", name, "bad" if old else "ok", fix)
    if torch.version.cuda is None:
        yield Finding(
            "torch", f"{torch.__version__} has no CUDA", "note", "install a torch built for CUDA to use the GPUs"
        )


def _kernel_driver(machine: Machine) -> Iterator[Finding]:
    """Report the version of the kernel module, if it is loaded."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", read_text(machine.proc_root / "driver" / "nvidia" / "version"))
    if found:
        yield Finding("NVIDIA kernel module", found.group())


def _no_gpus(machine: Machine, visible: str | None, why: str) -> Finding:
    version = _version(machine.libcuda, "cuDriverGetVersion")
    if version is None:
        return Finding("CUDA driver", why, "note", "none needed on a machine without GPUs")
    value = f"CUDA {version // 1000}.{version % 1000 // 10}: {why}"
    if visible is not None:
        return Finding("CUDA driver", value, "note", "unset CUDA_VISIBLE_DEVICES to use the GPUs it hides")
    return Finding("CUDA driver", value, "note", "none needed without GPUs; a container is given them by --gpus all")


def nccl_findings(machine: Machine) -> Iterator[Finding]:
    """Report the loaded NCCL libraries: two of them are two separate worlds, and one is enough."""
    maps = (machine.proc_root / "self" / "maps").read_bytes().decode(errors="backslashreplace")
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libnccl.so" in line}
    paths = sorted({path.removesuffix(_DELETED) for path in mapped})
    if not paths:
        yield Finding("NCCL", "not loaded", "note", "torch loads it if it has CUDA")
        return
    versions = {path: _nccl_version(path) for path in paths}
    said = ", ".join(f"{path} ({_dotted(version)})" for path, version in versions.items())
    old = [path for path, version in versions.items() if version is not None and version < _OLDEST_NCCL]
    if len(paths) > 1:
        yield Finding(
            "NCCL",
            said,
            "bad",
            "keep one: uninstall the extra nvidia-nccl package, or mend LD_PRELOAD and LD_LIBRARY_PATH",
        )
    elif any(path.endswith(_DELETED) for path in mapped):
        yield Finding(
            "NCCL",
            f"{said}, replaced since",
            "note",
            "restart the program: the file was replaced after it had been loaded",
        )
    elif old:
        yield Finding(
            "NCCL", said, "bad", f"install {'.'.join(map(str, _OLDEST_NCCL))} or newer: torch's own wheels have it"
        )
    else:
        yield Finding("NCCL", said)


def nvrtc_findings(machine: Machine) -> Iterator[Finding]:
    """Report the compiler of the kernels, and if the driver can load its output."""
    path = machine.nvrtc
    if path is None:
        import torch

        from ...torch_compat.cuda import find_nvrtc, nvidia_folders

        path, _ = find_nvrtc(nvidia_folders(), torch.version.cuda)
    if path is None:
        yield Finding("NVRTC", "not searched: this torch has no CUDA", "note", "none needed without GPUs")
        return
    found = _two_numbers(path, "nvrtcVersion")
    if found is None:
        fix = "pip install the nvidia-cuda-nvrtc of torch's CUDA: without it only packaged or cached kernels run"
        yield Finding("NVRTC", f"{path} cannot be loaded", "note", fix)
        return
    driver = _version(machine.libcuda, "cuDriverGetVersion")
    value = f"{path} ({_dotted(found)})"
    if driver is None or found[0] <= driver // 1000:
        yield Finding("NVRTC", value)
        return
    mend = f"install a driver for CUDA {found[0]}, or a torch for CUDA {driver // 1000}"
    if _shows_gpus(machine.libcuda):
        yield Finding("NVRTC", value, "bad", f"{mend}: this driver cannot load its kernels")
    else:  # a login node: nothing is loaded here
        yield Finding("NVRTC", value, "note", f"none needed here; on hosts whose GPUs have this driver, {mend}")


def _dotted(version: tuple[int, ...] | None) -> str:
    return "version unknown" if version is None else ".".join(map(str, version))


def _nccl_version(path: str) -> tuple[int, ...] | None:
    """Return the version of a library that is loaded already."""
    number = _version(path, "ncclGetVersion", os.RTLD_NOLOAD)
    if number is None:
        return None
    major = 1000 if number < 10000 else 10000  # 2.8 and older numbered versions differently
    return number // major, number % major // 100, number % 100


def _version(path: str, function: str, more: int = 0) -> int | None:
    """Call a function that writes one int. Return None if the library or function is missing, or it fails."""
    number = ctypes.c_int()
    return number.value if _ask(path, function, more, ctypes.byref(number)) else None


def _shows_gpus(libcuda: str) -> bool:
    return _ask(libcuda, "cuInit", 0, 0) and bool(_version(libcuda, "cuDeviceGetCount"))


def _two_numbers(path: str, function: str) -> tuple[int, int] | None:
    major, minor = ctypes.c_int(), ctypes.c_int()
    return (major.value, minor.value) if _ask(path, function, 0, ctypes.byref(major), ctypes.byref(minor)) else None


def _ask(path: str, function: str, more: int, *arguments: Any) -> bool:
    try:
        return bool(getattr(ctypes.CDLL(path, mode=os.RTLD_NOW | more), function)(*arguments) == 0)
    except (OSError, AttributeError):
        return False
