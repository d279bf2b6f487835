"""Rates of links, memory and computing: the machine's table, or measured ones from a JSON file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from shardwright.options.mapping_files import read_mapping

from .machine import Machine
from .shape import PlanError

#: microseconds of a hop inside a host and between hosts: what NCCL's tuning assumes for a ring over NVLink and a network;
#: CPU ranks: a wait in shared memory, a message over TCP
_LATENCIES_US = {True: (3.4, 14.0), False: (5.0, 100.0)}
#: GB/s at which a rank copies memory, each byte counted once
_COPIES = {True: 1200.0, False: 8.0}
_FORM = '{"inside": {"latency_us": 5, "bandwidth_GBps": 9}, "between": {...}, "memory_GBps": 8, "cores": 2, "compute": {...}}'


@dataclasses.dataclass(frozen=True)
class Link:
    latency_us: float
    bandwidth: float  # GB/s
    cores: float = 0.0  # that a host's carrier keeps busy meanwhile


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates that the simulation divides by."""

    inside: Link
    between: Link
    memory: float
    cores: float | None = None  # of a host; None: one per rank
    compute: tuple[float, float, float] | None = None  # seconds of a forward, a backward, an optimizer's whole step
    turns: float = 1.0  # times as long, beyond fair turns, as ranks compute that are more than the cores


def rates_of(machine: Machine, path: str | None = None) -> Rates:
    """Return the machine's rates, replaced by those that a calibration file has."""
    within, beyond = _LATENCIES_US[machine.on_gpu]
    rates = Rates(Link(within, machine.inside), Link(beyond, machine.between), _COPIES[machine.on_gpu])
    if path is None:
        return rates
    try:
        found = read_mapping(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"--calibration {path}: {error}") from None
    known = {"inside", "between", "memory_GBps", "cores", "turns", "compute"} & found.keys()
    if not known:
        raise PlanError(
            f"--calibration {path} must be a JSON object such as {_FORM}, got keys {', '.join(map(str, found)) or 'none'}"
        )

    def number(
        fields: Mapping[str, Any], name: str, where: str, default: float | None = None, least: float = 0.0
    ) -> float:
        value = fields.get(name, default)
        legal = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not legal or not least <= value <= 1e9 or (value == 0 and name not in ("latency_us", "cores")):
            bound = "at least 0" if name in ("latency_us", "cores") else "above 0"
            raise PlanError(
                f"--calibration {path}: {where}{name} must be a number {bound} and at most 1e9, got {value!r}"
            )
        return float(value)

    def fields(name: str) -> Mapping[str, Any]:
        value = found[name]
        if not isinstance(value, Mapping):
            raise PlanError(f"--calibration {path}: {name} must be an object as in {_FORM}, got {value!r}")
        return value

    def link(name: str, default: Link) -> Link:
        if name not in known:
            return default
        of, where = fields(name), f"{name}."
        latency, bandwidth = number(of, "latency_us", where), number(of, "bandwidth_GBps", where)
        return Link(latency, bandwidth, number(of, "cores", where, 0.0))

    rates = dataclasses.replace(rates, inside=link("inside", rates.inside), between=link("between", rates.between))
    if "memory_GBps" in known:
        rates = dataclasses.replace(rates, memory=number(found, "memory_GBps", ""))
    if "cores" in known:
        rates = dataclasses.replace(rates, cores=number(found, "cores", "", least=0.01))
    if "turns" in known:
        rates = dataclasses.replace(rates, turns=number(found, "turns", ""))
    if "compute" in known:
        compute = fields("compute")
        seconds = [number(compute, f"{each}_s", "compute.") for each in ("forward", "backward", "optimizer")]
        rates = dataclasses.replace(rates, compute=(seconds[0], seconds[1], seconds[2]))
    return rates
