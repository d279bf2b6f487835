"""Hosts, ranks, memory, links and peak rates, by name or by number with a unit."""

from __future__ import annotations

import dataclasses
import re

from .shape import PlanError

#: bus bandwidth of a collective inside a host or between hosts, GB/s per rank; what NCCL's tests report, not the wire's rate
LINKS = {
    "nvlink": 350.0,  # NVLink 4, 8 GPUs
    "nvlink3": 230.0,  # A100
    "pcie": 22.0,
    "shm": 6.0,  # CPU ranks of one host
    "8x400g": 320.0,  # one 400 Gbit/s adapter per GPU, 8 per host
    "8x200g": 160.0,
    "400g": 44.0,
    "200g": 22.0,
    "100g": 11.0,
    "25g": 2.8,
    "10g": 1.1,
    "1g": 0.11,
}
#: name -> (peak of dense matrix products in 16 bits, in float32 (TF32 where it exists); TFLOP/s; memory, GB; has bfloat16)
GPUS = {
    "b200": (2250.0, 1100.0, 180, True),
    "h200": (989.0, 495.0, 141, True),
    "h100": (989.0, 495.0, 80, True),
    "a100": (312.0, 156.0, 80, True),
    "a100-40": (312.0, 156.0, 40, True),
    "l40s": (362.0, 91.0, 48, True),
    "a10": (125.0, 31.0, 24, True),
    "4090": (165.0, 83.0, 24, True),
    "v100": (125.0, 15.7, 32, False),
    "t4": (65.0, 8.1, 16, False),
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?|)b?\s*$", re.IGNORECASE)


def bytes_of(text: str, what: str) -> int:
    """Return the bytes of "80GB", "24GiB" or "1.5e9"-like numbers without a unit."""
    found = _SIZE.match(text)
    value = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if not 1 <= value < 1e18:
        raise PlanError(f"{what} must be a size such as 80GB or 24GiB, got {text!r}")
    return round(value)


def count_of(text: str, what: str) -> int:
    """Return the number of "7B", "2T" or "300M", where B is 10^9."""
    cleaned = text.strip().replace("_", "").replace(",", "")
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}.get(cleaned[-1:].lower())
    try:
        value = float(cleaned[:-1]) * scale if scale else float(cleaned)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18 or value != round(value):
        raise PlanError(f"{what} must be a positive whole count such as 7B, 300M or 1000, got {text!r}")
    return round(value)


def link_of(text: str, what: str) -> float:
    """Return GB/s of a link's name, or of a number with a unit: 300GB/s or 100Gbit."""
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    found = re.match(r"^(\d+\.?\d*|\.\d+)\s*(gb/s|gbit(?:/s)?|gbps)$", name)
    value = float(found[1]) / (1 if found[2] == "gb/s" else 8) if found else 0.0
    if value <= 0:
        raise PlanError(f"{what} must be one of {', '.join(LINKS)}, or a rate such as 300GB/s or 100Gbit, got {text!r}")
    return value


def shown_bytes(count: float) -> str:
    """Return a count of bytes in decimal units, as memory of GPUs is sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The ranks to plan for."""

    hosts: int
    ranks: int  # per host
    memory: int  # bytes per rank
    inside: float  # GB/s of collectives inside a host, per rank
    between: float  # GB/s between hosts, per rank
    on_gpu: bool
    gpu: str | None = None
    peak: float | None = None  # TFLOP/s per rank; None: unknown, so no time is printed
    has_bf16: bool = True

    @property
    def world(self) -> int:
        return self.hosts * self.ranks
