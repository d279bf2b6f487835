"""The GPU part of `shardwright doctor`: findings of the driver and NCCL. A missing GPU is not an error."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from .libraries import driver_findings, nccl_findings, nvrtc_findings
from .machine import Finding, Machine, checked, guarded
from .settings import settings_findings
from .topology import topology_findings

_SHM_LEAST_BYTES = 1 << 30
_NOFILE_LEAST = 4096

_SECTIONS = {
    "CUDA driver": driver_findings,
    "NCCL": nccl_findings,
    "NVRTC": nvrtc_findings,
    "settings": settings_findings,
    "topology": topology_findings,
    "limits": lambda machine: _limits(),
}


def findings(machine: Machine | None = None) -> list[Finding]:
    """Return all findings in printing order. Tests pass a simulated `machine`."""
    machine = machine or Machine()
    return [finding for name, section in _SECTIONS.items() for finding in guarded(name, section(machine))]


def _limits() -> Iterator[Finding]:
    try:
        shm = os.statvfs("/dev/shm")
        size = shm.f_frsize * shm.f_blocks
        fix = "use docker run --ipc=host or --shm-size=8g: NCCL uses /dev/shm between GPUs of one host"
        yield checked("/dev/shm", f"{size >> 20} MiB", size < _SHM_LEAST_BYTES, "slow", fix)
    except OSError as error:
        yield Finding("/dev/shm", str(error), "slow", "mount a tmpfs there")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    fix = "set ulimit -l unlimited on hosts with InfiniBand, which registers memory"
    yield checked("memlock", "unlimited" if unlimited else f"{locked >> 10} KiB", not unlimited, "note", fix)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    fix = f"set ulimit -n {_NOFILE_LEAST} or more: large groups open many sockets"
    yield checked(
        "nofile", "unlimited" if unlimited else str(files), not unlimited and files < _NOFILE_LEAST, "note", fix
    )
