"""The doctor's section on GPUs: what the driver and NCCL are told and what they find, each with a verdict and a fix.

Nothing here starts a GPU context but the driver's own device list, and nothing is an error on a machine without a GPU:
there the section says so and every verdict is ``ok`` or ``note``.
"""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NCCL_CONFS = ("/etc/nccl.conf", "~/.nccl.conf")
_SHM_LEAST_BYTES = 1 << 30
_NOFILE_LEAST = 4096


@dataclasses.dataclass(frozen=True)
class Finding:
    """One value, what it means and, unless all is well, one line that mends it.

    `verdict` is "ok", "note" (worth knowing), "slow" (works, costs time) or "bad" (will fail).
    """

    name: str
    value: str
    verdict: str = "ok"
    fix: str = ""


#: Variables known to hurt: name -> (values that do, or None for any; verdict; what to do)
_HURTING: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "NCCL_P2P_DISABLE": (("1",), "slow", "unset it: GPUs of one host then talk through host memory"),
    "NCCL_SHM_DISABLE": (("1",), "slow", "unset it: ranks of one host then talk through the network"),
    "NCCL_IB_DISABLE": (("1",), "slow", "unset it where there is InfiniBand: hosts then talk over TCP"),
    "NCCL_NET_GDR_LEVEL": (("0", "LOC"), "slow", "unset it: the network card then cannot reach GPU memory"),
    "NCCL_PROTO": (None, "slow", "unset it: NCCL then chooses per size; one protocol for all is slow for some sizes"),
    "NCCL_ALGO": (None, "slow", "unset it: NCCL then chooses per size"),
    "NCCL_BLOCKING_WAIT": (("1",), "slow", "unset it: each collective then stops the host"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "slow", "unset it: each collective then stops the host"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "slow", "unset it outside of debugging: each launch then stops the host"),
    "NCCL_DEBUG": (("TRACE", "INFO"), "note", "set it to WARN when all works: the log grows with every communicator"),
    "SHARDWRIGHT_GPU_TRANSPORT": (
        ("SHM",),
        "slow",
        "unset it: NCCL, or slots in the GPUs' memory, spare the way over the host",
    ),
    "NCCL_COMM_BLOCKING": (("1",), "note", "unset it: creation under a deadline needs non-blocking communicators"),
}


def findings(
    environment: Mapping[str, str] = os.environ,
    sys_root: Path = Path("/sys"),
    confs: tuple[str, ...] = NCCL_CONFS,
    maps: Path = Path("/proc/self/maps"),
) -> list[Finding]:
    """All findings, in the order they are printed. The arguments are what is looked at, for tests."""
    found = [*_driver(environment), *_nccl_libraries(maps)]
    settings = {**_conf_settings(environment, confs), **environment}  # the environment wins, as in NCCL
    found += _settings(settings)
    found += _interfaces(settings, sys_root)
    found += _topology(sys_root)
    found += _limits()
    return found


def _driver(environment: Mapping[str, str]) -> Iterator[Finding]:
    from .. import _engine

    visible = environment.get("CUDA_VISIBLE_DEVICES")
    yield Finding("CUDA_VISIBLE_DEVICES", "unset" if visible is None else repr(visible))
    try:
        shown: dict[str, Any] = _engine.cuda_devices()
    except NotImplementedError as error:  # no driver, no GPU, too old: the host's path is complete without
        hidden = "unset CUDA_VISIBLE_DEVICES to use the GPUs it hides" if visible == "" else ""
        yield Finding("CUDA driver", str(error), "note", hidden or "none needed on a machine without GPUs")
        return
    except Exception as error:
        yield Finding("CUDA driver", f"{type(error).__name__}: {error}", "bad", "run nvidia-smi: it must list the GPUs")
        return
    yield Finding("CUDA driver", "CUDA {}.{}".format(*shown["version"]))
    for ordinal, device in enumerate(shown["devices"]):
        name = f"{device['name']}, sm_{device['capability'][0]}{device['capability'][1]}"
        old = device["capability"] < (7, 5)
        yield Finding(
            f"GPU {ordinal}", name, "bad" if old else "ok", "the kernels need compute capability 7.5" if old else ""
        )


def _nccl_libraries(maps: Path) -> Iterator[Finding]:
    """The NCCLs that this process has loaded: two of them are two worlds, and one is enough."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return
    paths = sorted({line.split()[-1] for line in lines if "libnccl.so" in line})
    if len(paths) > 1:
        yield Finding(
            "NCCL", ", ".join(paths), "bad", "keep one: uninstall the extra nvidia-nccl package or LD_PRELOAD"
        )
    else:
        yield Finding(
            "NCCL",
            paths[0] if paths else "not loaded",
            "ok" if paths else "note",
            "" if paths else "torch loads it where it has CUDA",
        )


def _conf_settings(environment: Mapping[str, str], confs: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE lines of NCCL's files, the user's over the system's (NCCL_CONF_FILE replaces the user's)."""
    named = environment.get("NCCL_CONF_FILE")
    settings: dict[str, str] = {}
    for conf in (*confs[:1], named) if named else confs:
        try:
            lines = Path(conf).expanduser().read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, separator, value = line.split("#")[0].partition("=")
            if separator:
                settings[name.strip()] = value.strip()
    return settings


def _settings(settings: Mapping[str, str]) -> Iterator[Finding]:
    from ..device_transport import TRANSPORTS, VARIABLE

    for name in sorted(settings):
        if name in _HURTING:
            values, verdict, fix = _HURTING[name]
            if values is None or settings[name].upper() in values:
                yield Finding(name, settings[name], verdict, fix)
                continue
        if name == VARIABLE and settings[name] not in TRANSPORTS:
            yield Finding(name, settings[name], "bad", f"one of {', '.join(TRANSPORTS)}")
        elif name.startswith(("NCCL_", "TORCH_NCCL_", VARIABLE)) or name == "CUDA_LAUNCH_BLOCKING":
            yield Finding(name, settings[name])


def _interfaces(settings: Mapping[str, str], sys_root: Path) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME is a list of prefixes, ``=`` before it for whole names, ``^`` for all but these."""
    folder = sys_root / "class" / "net"
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = settings.get(variable)
        if not value or value.startswith("^"):
            continue
        whole = value.startswith("=") or variable.startswith("GLOO")
        for name in filter(None, value.lstrip("=").split(",")):
            if not any(name == other if whole else other.startswith(name) for other in present):
                yield Finding(
                    variable, value, "bad", f"name an interface that exists ({', '.join(present)}): {name!r} does not"
                )


def _topology(sys_root: Path) -> Iterator[Finding]:
    """NVIDIA's PCI functions with their NUMA node, and InfiniBand ports with their state."""
    pci = sys_root / "bus" / "pci" / "devices"
    for device in sorted(pci.iterdir()) if pci.is_dir() else []:
        vendor, kind = _read(device / "vendor"), _read(device / "class")
        if vendor == "0x10de" and kind.startswith("0x03"):
            node, width = _read(device / "numa_node"), _read(device / "current_link_width")
            most = _read(device / "max_link_width")
            narrow = bool(width and most and width != most)
            fix = "reseat the card or look at the slot: the link is narrower than the card allows" if narrow else ""
            value = f"NUMA node {node or '?'}, PCIe x{width or '?'} of x{most or '?'}"
            yield Finding(f"PCI {device.name}", value, "slow" if narrow else "ok", fix)
    for port in sorted((sys_root / "class" / "infiniband").glob("*/ports/*")):
        state = _read(port / "state")
        down = "ACTIVE" not in state
        name = f"InfiniBand {port.parent.parent.name}:{port.name}"
        fix = "bring the port up, or leave it out by NCCL_IB_HCA" if down else ""
        yield Finding(name, f"{state}, {_read(port / 'rate')}", "slow" if down else "ok", fix)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _limits() -> Iterator[Finding]:
    try:
        shm = os.statvfs("/dev/shm")
        size = shm.f_frsize * shm.f_blocks
        small = size < _SHM_LEAST_BYTES
        fix = "docker run --ipc=host or --shm-size=8g: NCCL between GPUs of one host needs it" if small else ""
        yield Finding("/dev/shm", f"{size >> 20} MiB", "slow" if small else "ok", fix)
    except OSError as error:
        yield Finding("/dev/shm", str(error), "slow", "mount a tmpfs there")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    fix = "" if unlimited else "ulimit -l unlimited where there is InfiniBand: it registers memory"
    yield Finding("memlock", "unlimited" if unlimited else f"{locked >> 10} KiB", "ok" if unlimited else "note", fix)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < _NOFILE_LEAST
    fix = f"ulimit -n {_NOFILE_LEAST} or more: large worlds open many sockets" if few else ""
    yield Finding(
        "nofile", "unlimited" if files == resource.RLIM_INFINITY else str(files), "note" if few else "ok", fix
    )
