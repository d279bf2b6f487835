"""The libraries section of the doctor: versions of the driver, of NCCL and of NVRTC in this process."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from typing import Any

from .machine import Finding, Machine, checked, read_text

_OLDEST_NCCL = (2, 14)
_DELETED = " (deleted)"


def driver_findings(machine: Machine) -> Iterator[Finding]:
    import torch
    from shardwright import _engine

    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    yield Finding("CUDA_VISIBLE_DEVICES", "unset" if visible is None else repr(visible))
    module = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", read_text(machine.proc_root / "driver" / "nvidia" / "version"))
    if module:
        yield Finding("NVIDIA kernel module", module.group())
    try:
        shown: dict[str, Any] = _engine.cuda_devices(machine.libcuda)
    except NotImplementedError as error:  # no driver, no GPU or an old driver: CPU training does not need them
        yield _no_gpus(machine, visible, str(error))
        return
    except Exception as error:
        fix = "check the driver with nvidia-smi, which must list the GPUs"
        yield Finding("CUDA driver", f"{type(error).__name__}: {error}", "bad", fix)
        return
    yield Finding("CUDA driver", "CUDA {}.{}".format(*shown["version"]))
    for ordinal, device in enumerate(shown["devices"]):
        name = f"{device['name']}, sm_{device['capability'][0]}{device['capability'][1]}"
        fix = "use another GPU: the kernels need compute capability 7.5 or higher"
        yield checked(f"GPU {ordinal}", name, device["capability"] < (7, 5), "bad", fix)
    if torch.version.cuda is None:
        value = f"{torch.__version__} is built without CUDA"
        yield Finding("torch", value, "note", "install a CUDA build of torch to use the GPUs")


def _no_gpus(machine: Machine, visible: str | None, why: str) -> Finding:
    version = _version(machine.libcuda, "cuDriverGetVersion")
    if version is None:
        return Finding("CUDA driver", why, "note", "not needed on a host without GPUs")
    value = f"CUDA {version // 1000}.{version % 1000 // 10}: {why}"
    if visible is not None:
        return Finding("CUDA driver", value, "note", "unset CUDA_VISIBLE_DEVICES to use the GPUs that it hides")
    fix = "not needed without GPUs; start a container with --gpus all to give it the host's GPUs"
    return Finding("CUDA driver", value, "note", fix)


def nccl_findings(machine: Machine) -> Iterator[Finding]:
    """Report the loaded NCCL libraries. Two in one process do not share communicators, so only one may be loaded."""
    maps = (machine.proc_root / "self" / "maps").read_bytes().decode(errors="backslashreplace")
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libnccl.so" in line}
    paths = sorted({path.removesuffix(_DELETED) for path in mapped})
    if not paths:
        yield Finding("NCCL", "not loaded", "note", "a CUDA build of torch loads it")
        return
    versions = {path: _nccl_version(path) for path in paths}
    found = ", ".join(f"{path} ({_dotted(version)})" for path, version in versions.items())
    old = [path for path, version in versions.items() if version is not None and version < _OLDEST_NCCL]
    if len(paths) > 1:
        fix = "load only one: uninstall the extra nvidia-nccl package, or correct LD_PRELOAD and LD_LIBRARY_PATH"
        yield Finding("NCCL", found, "bad", fix)
    elif any(path.endswith(_DELETED) for path in mapped):
        fix = "restart the program: the file was replaced after the program had loaded it"
        yield Finding("NCCL", f"{found}, replaced on disk since", "note", fix)
    else:
        fix = f"install {_dotted(_OLDEST_NCCL)} or newer: torch's wheels include it"
        yield checked("NCCL", found, bool(old), "bad", fix)


def nvrtc_findings(machine: Machine) -> Iterator[Finding]:
    """Report NVRTC, and if the driver can load the images that it compiles."""
    path = machine.nvrtc
    if path is None:
        import torch
        from shardwright.torch_compat.cuda import find_nvrtc, nvidia_folders

        path, _ = find_nvrtc(nvidia_folders(), torch.version.cuda)
    if path is None:
        yield Finding("NVRTC", "not searched: torch is built without CUDA", "note", "not needed without GPUs")
        return
    major, minor = ctypes.c_int(), ctypes.c_int()
    if not _ask(path, "nvrtcVersion", 0, ctypes.byref(major), ctypes.byref(minor)):
        fix = "install the nvidia-cuda-nvrtc package of torch's CUDA version: without it only packaged or cached kernels run"
        yield Finding("NVRTC", f"{path} cannot be loaded", "note", fix)
        return
    driver = _version(machine.libcuda, "cuDriverGetVersion")
    value = f"{path} ({major.value}.{minor.value})"
    if driver is None or major.value <= driver // 1000:
        yield Finding("NVRTC", value)
        return
    mend = f"install a driver for CUDA {major.value}, or a torch built for CUDA {driver // 1000}"
    if _ask(machine.libcuda, "cuInit", 0, 0) and _version(machine.libcuda, "cuDeviceGetCount"):
        yield Finding("NVRTC", value, "bad", f"{mend}: this driver cannot load the compiled kernels")
    else:  # a login node: no kernel is loaded here
        yield Finding("NVRTC", value, "note", f"not needed here; on GPU hosts with this driver, {mend}")


def _dotted(version: tuple[int, ...] | None) -> str:
    return "version unknown" if version is None else ".".join(map(str, version))


def _nccl_version(path: str) -> tuple[int, ...] | None:
    """Return the version of a loaded NCCL library; never load it."""
    number = _version(path, "ncclGetVersion", os.RTLD_NOLOAD)
    if number is None:
        return None
    major = 1000 if number < 10000 else 10000  # the encoding changed after 2.8
    return number // major, number % major // 100, number % 100


def _version(path: str, function: str, more: int = 0) -> int | None:
    """Return the int that a library function writes; None if the library or function is missing or the call fails."""
    number = ctypes.c_int()
    return number.value if _ask(path, function, more, ctypes.byref(number)) else None


def _ask(path: str, function: str, more: int, *arguments: Any) -> bool:
    try:
        return bool(getattr(ctypes.CDLL(path, mode=os.RTLD_NOW | more), function)(*arguments) == 0)
    except (OSError, AttributeError):
        return False
