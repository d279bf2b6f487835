"""The topology section of the doctor: PCI slots of GPUs, links between GPUs, InfiniBand ports."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .machine import Finding, Machine, checked, read_text

_NVIDIA, _DISPLAY, _BRIDGE = "0x10de", "0x03", "0x0680"
_PAIRS_SHOWN = 4


def topology_findings(machine: Machine) -> Iterator[Finding]:
    """Report each GPU's PCI link and NUMA node, the links between GPUs, and InfiniBand ports."""
    gpus = switches = 0
    pci = machine.sys_root / "bus" / "pci" / "devices"
    for device in sorted(pci.iterdir()) if pci.is_dir() else []:
        vendor, kind = read_text(device / "vendor"), read_text(device / "class")
        switches += vendor == _NVIDIA and kind.startswith(_BRIDGE)
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            gpus += 1
            node, width = read_text(device / "numa_node"), read_text(device / "current_link_width")
            most = read_text(device / "max_link_width")
            fix = "reseat the card or check the slot: the link has fewer lanes than the card supports"
            value = f"NUMA node {node or '?'}, PCIe x{width or '?'} of x{most or '?'}"
            yield checked(f"PCI {device.name}", value, bool(width and most and width != most), "slow", fix)
    yield _links(machine, gpus, switches)
    for port in sorted((machine.sys_root / "class" / "infiniband").glob("*/ports/*")):
        state = read_text(port / "state")
        name, value = f"InfiniBand {port.parent.parent.name}:{port.name}", f"{state}, {read_text(port / 'rate')}"
        yield checked(name, value, "ACTIVE" not in state, "slow", "bring the port up, or exclude it with NCCL_IB_HCA")


def _links(machine: Machine, gpus: int, switches: int) -> Finding:
    """Report the links between GPUs from nvidia-smi; without it only the number of NVSwitches is known, from /sys."""
    name = "GPU links"
    in_proc = machine.proc_root / "driver" / "nvidia" / "gpus"
    gpus = max(gpus, len(list(in_proc.iterdir())) if in_proc.is_dir() else 0)
    if gpus < 2:
        return Finding(name, "not needed: one GPU" if gpus else "none: no NVIDIA GPU in /sys and /proc")
    try:
        pairs = _pairs(machine.command(["nvidia-smi", "topo", "-m"]))
        why = "nvidia-smi topo -m lists fewer than two GPUs"
    except OSError as error:
        pairs, why = {}, str(error)
    if not pairs:
        seen = f"{switches} NVSwitches in /sys" if switches else "no NVSwitch in /sys"
        return Finding(name, f"unknown ({why}); {seen}", "note", "install nvidia-smi to see them here")
    by_kind: dict[str, list[str]] = {}
    for pair, kind in pairs.items():
        by_kind.setdefault(kind, []).append(pair)
    shown = []
    for kind, each in sorted(by_kind.items()):
        more = len(each) - _PAIRS_SHOWN
        shown.append(f"{kind}: {', '.join(each[:_PAIRS_SHOWN])}{f' and {more} more pairs' if more > 0 else ''}")
    value = "; ".join(shown)
    if all(kind.startswith("NV") for kind in by_kind):
        return Finding(name, value)
    fix = "select GPUs that NVLink (NV) connects with CUDA_VISIBLE_DEVICES if there are enough: other pairs use PCIe"
    return Finding(name, value, "note", fix)


def _pairs(matrix: str) -> dict[str, str]:
    """Parse the matrix of `nvidia-smi topo -m`, a header and a row for each device, into {"0-1": "NV18"}."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    head = next((words for words in lines if words and words[0] == "GPU0" and "GPU1" in words), [])
    count = sum(1 for word in head if re.fullmatch(r"GPU\d+", word))
    pairs = {}
    for row in lines:
        if row and row is not head and re.fullmatch(r"GPU\d+", row[0]) and len(row) > count:
            own = int(row[0][3:])
            pairs.update({f"{own}-{other}": row[1 + other] for other in range(own + 1, count)})
    return pairs
