"""The settings section of the doctor: variables and files that NCCL, torch and the driver read.

NCCL parses its files literally. The name is all text before the first `=` and the value all text after it, including
blanks and trailing comments. Only a line that begins with `#` is a comment. The environment takes precedence over the
user's file (or NCCL_CONF_FILE in its place), and that over the system's. Names of network interfaces are checked
against /sys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .machine import Finding, Machine, checked

_PREFIXES = ("NCCL_", "TORCH_NCCL_")
_FEWEST_CONNECTIONS = 8
_LEAST_BUFFER_BYTES = 1 << 20
_FEWEST_CHANNELS = 4
_FEWEST_THREADS = 256


def _number(value: str) -> int | None:
    """Parse as C's strtoll with base 0, which skips leading blanks and ignores trailing text; None if no digit follows."""
    found = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|\d+)", value)
    if found is None:
        return None
    sign, digits = found.groups()
    octal = digits[0] == "0" and digits.isdigit()
    digits = re.match("[0-7]*", digits).group() if octal else digits  # type: ignore[union-attr]
    return int(sign + digits, 8 if octal else 0)


def _is_on(value: str) -> bool:
    return _number(value) not in (None, 0) or value.strip().lower() in ("y", "yes", "t", "true", "on")


def _is_off(value: str) -> bool:
    return _number(value) == 0


def _is_any(value: str) -> bool:
    return bool(value.strip())


def _one_of(*words: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in words


def _below(least: int) -> Callable[[str], bool]:
    """Match a positive number below `least`."""
    return lambda value: 0 < (_number(value) or 0) < least


class _Rule(NamedTuple):
    hurts: Callable[[str], bool]
    verdict: str
    fix: str


_HARMLESS = _Rule(lambda _: False, "ok", "")
_STOPS_HOST = "unset it: it makes the host wait in each collective"
_FEW_CHANNELS = "unset it: so few channels cannot saturate NVLink or several network cards"

#: harmful values by variable
_RULES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": _Rule(
        _below(_FEWEST_CONNECTIONS), "slow",
        f"unset it, or set {_FEWEST_CONNECTIONS} to 32: streams that share a hardware queue wait for one another, so collectives do not "
        "overlap the backward",
    ),
    "CUDA_LAUNCH_BLOCKING": _Rule(_is_on, "slow", "set it only for debugging: it makes the host wait for each kernel"),
    "CUDA_MODULE_LOADING": _Rule(_one_of("EAGER"), "note", "unset it: it loads all kernels of all libraries into GPU memory at the start"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _Rule(_is_any, "slow", "set it only for debugging: each allocation then synchronizes with the GPU"),
    "TORCH_DISTRIBUTED_DEBUG": _Rule(_one_of("DETAIL"), "slow", "set it to INFO outside of debugging: with DETAIL torch checks each collective by another one"),
    "TORCH_NCCL_BLOCKING_WAIT": _Rule(_is_on, "slow", _STOPS_HOST),
    "NCCL_ALGO": _Rule(_is_any, "slow", "unset it: NCCL then chooses an algorithm by size"),
    "NCCL_BLOCKING_WAIT": _Rule(_is_on, "slow", _STOPS_HOST),
    "NCCL_BUFFSIZE": _Rule(_below(_LEAST_BUFFER_BYTES), "slow", "unset it (4 MiB), or set 1 MiB or more: small buffers make many small messages"),
    "NCCL_CHECK_POINTERS": _Rule(_is_on, "slow", "set it only for debugging: each call then asks the driver about its pointers"),
    "NCCL_COMM_BLOCKING": _Rule(_is_on, "note", "unset it: creation under a deadline needs non-blocking communicators"),
    "NCCL_CUMEM_ENABLE": _Rule(_is_off, "note", "unset it: NVLink SHARP needs cuMem allocations"),
    "NCCL_DEBUG": _Rule(_one_of("TRACE", "INFO"), "note", "set it to WARN outside of debugging: the log grows with every communicator"),
    "NCCL_IB_DISABLE": _Rule(_is_on, "slow", "unset it on hosts with InfiniBand: it makes hosts communicate over TCP"),
    "NCCL_LAUNCH_MODE": _Rule(_one_of("GROUP"), "slow", "unset it: it makes the kernels of a process's GPUs wait for one another at each launch"),
    "NCCL_MAX_CTAS": _Rule(_below(_FEWEST_CHANNELS), "slow", _FEW_CHANNELS),
    "NCCL_MAX_NCHANNELS": _Rule(_below(_FEWEST_CHANNELS), "slow", _FEW_CHANNELS),
    "NCCL_MAX_NRINGS": _Rule(_below(_FEWEST_CHANNELS), "slow", _FEW_CHANNELS),
    "NCCL_NET": _Rule(_one_of("SOCKET"), "slow", "unset it on hosts with InfiniBand: it makes hosts communicate over TCP"),
    "NCCL_NET_GDR_LEVEL": _Rule(_one_of("0", "LOC"), "slow", "unset it: it keeps the network card from reading GPU memory"),
    "NCCL_NTHREADS": _Rule(_below(_FEWEST_THREADS), "slow", "unset it (512): so few threads cannot saturate NVLink"),
    "NCCL_NVLS_ENABLE": _Rule(_is_off, "slow", "unset it: it turns off reduction in NVSwitches (Hopper and later); other hosts lose nothing"),
    "NCCL_P2P_DISABLE": _Rule(_is_on, "slow", "unset it: it makes GPUs of one host communicate through host memory"),
    "NCCL_P2P_LEVEL": _Rule(_one_of("0", "LOC"), "slow", "unset it: it makes GPUs of one host communicate through host memory"),
    "NCCL_PROTO": _Rule(_is_any, "slow", "unset it: NCCL then chooses a protocol by size; any single one is slow for some sizes"),
    "NCCL_PXN_DISABLE": _Rule(_is_on, "note", "unset it on hosts with several network cards: it makes a GPU reach distant cards through the CPU"),
    "NCCL_SHM_DISABLE": _Rule(_is_on, "slow", "unset it: it makes ranks of one host communicate through the network"),
}  # fmt: skip


def settings_findings(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each misread line of NCCL's files, and one for each variable."""
    from shardwright.backend.transport import TRANSPORTS, VARIABLE

    settings = dict(machine.environment)
    for path in _conf_files(machine):
        yield from _read_conf(path, settings)
    names = _names_there(machine.sys_root)
    for name in sorted(settings):
        value = settings[name]
        if name in _CHECKS:
            yield Finding(name, value, *_CHECKS[name](value, names, settings))
        elif name == VARIABLE and value not in TRANSPORTS:
            yield Finding(name, value, "bad", f"one of {', '.join(TRANSPORTS)}")
        elif name == VARIABLE:
            fix = "unset it: NCCL, or slots in GPU memory, avoid the copy through the host"
            yield checked(name, value, value == "shm", "slow", fix)
        elif name.startswith(_PREFIXES) or name in _RULES:
            rule = _RULES.get(name, _HARMLESS)
            yield checked(name, value, rule.hurts(value), rule.verdict, rule.fix)


def _conf_files(machine: Machine) -> Iterator[Path]:
    own, system = machine.confs
    named = machine.environment.get("NCCL_CONF_FILE")
    if named:
        own = Path(named)
    if own is not None:
        yield own
    yield system


def _read_conf(path: Path, settings: dict[str, str]) -> Iterator[Finding]:
    """Read a configuration file into `settings` without overwriting; yield its misread lines."""
    try:
        text = path.read_bytes().decode(errors="backslashreplace")
    except FileNotFoundError:
        if settings.get("NCCL_CONF_FILE") == str(path):
            yield Finding(str(path), "does not exist", "bad", "unset NCCL_CONF_FILE, or set it to an existing file")
        return
    except OSError as error:
        fix = "make it readable by this user, or remove it: NCCL ignores it"
        yield Finding(str(path), error.strerror or str(error), "note", fix)
        return
    for number, line in enumerate(text.split("\n"), 1):
        name, separator, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fault = _fault_of_line(name, separator, value)
        if fault is not None:
            yield Finding(f"{path}:{number}", line.strip(), *fault)
        if separator and name == name.strip():
            settings.setdefault(name, value)


def _fault_of_line(name: str, separator: str, value: str) -> tuple[str, str] | None:
    """Return (verdict, fix) of a line that NCCL misreads, else None."""
    if not separator:
        return "note", "write NAME=value: NCCL ignores the line"
    if name != name.strip():
        return "bad", "remove the blanks around NAME: NCCL takes them as part of the name, so the line has no effect"
    if value != value.strip() or re.search(r"\s#", value):
        if _number(value) is not None:
            fix = "put the comment on its own line: NCCL takes it as part of the value, and reads only the number"
            return "note", fix
        return "bad", "remove blanks and comments after '=': NCCL takes them as part of the value"
    return None


class _Names(NamedTuple):
    """Interfaces and InfiniBand ports of this host as (name, port); port -1 matches any."""

    sockets: list[tuple[str, int]] | None
    cards: list[tuple[str, int]]


_Settings = dict[str, str]


def _names_there(sys_root: Path) -> _Names:
    net = sys_root / "class" / "net"
    sockets = [(path.name, -1) for path in sorted(net.iterdir()) if path.is_dir()] if net.is_dir() else None
    ports = sorted((sys_root / "class" / "infiniband").glob("*/ports/*"))
    return _Names(sockets, [(port.parent.parent.name, _number(port.name) or 0) for port in ports])


def _left_by(value: str, present: list[tuple[str, int]]) -> list[str]:
    """Return the names that NCCL selects for a list of prefixes; `=`: whole names, `^`: exclusions, `name:port`."""
    excludes, value = value.startswith("^"), value.removeprefix("^")
    whole, value = value.startswith("="), value.removeprefix("=")
    wanted = []
    for word in value.split(","):
        name, colon, port = word.partition(":")
        if name:
            wanted.append((name, (_number(port) or 0) if colon else -1))

    def fits(name: str, port: int) -> bool:
        return not wanted or any(
            (name == other if whole else name.startswith(other)) and (-1 in (port, wanted_port) or port == wanted_port)
            for other, wanted_port in wanted
        )

    return [name for name, port in present if fits(name, port) != excludes]


def _list(present: list[tuple[str, int]]) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in present)) or "none"


def _why_none(value: str) -> str:
    return "the value excludes all of them" if value.startswith("^") else "the value matches none of them"


_UNKNOWN = ("note", "not judged: /sys/class/net is missing")


def _check_socket(value: str, names: _Names, settings: _Settings) -> tuple[str, str]:
    if not value:
        return "ok", ""
    if names.sockets is None:
        return _UNKNOWN
    left = _left_by(value, names.sockets)
    if not left:
        return "bad", f"select an existing interface ({_list(names.sockets)}): {_why_none(value)}"
    if left == ["lo"] and len(names.sockets) > 1:
        fix = "only lo is selected, which reaches no other host: with several hosts use one of"
        return "note", f"{fix} {_list(names.sockets)}"
    return "ok", ""


def _check_whole(value: str, names: _Names, settings: _Settings) -> tuple[str, str]:
    """Check a variable of torch: a list of whole names, which must all exist."""
    if names.sockets is None:
        return _UNKNOWN if value else ("ok", "")
    for name in filter(None, value.split(",")):
        if (name, -1) not in names.sockets:
            return "bad", f"use an existing interface ({_list(names.sockets)}): {name!r} does not exist"
    return "ok", ""


def _check_card(value: str, names: _Names, settings: _Settings) -> tuple[str, str]:
    if not value or _left_by(value, names.cards):
        return "ok", ""
    if not names.cards:
        return "note", "unset it: this host has no InfiniBand port, so NCCL uses TCP"
    ports = ", ".join(f"{name}:{port}" for name, port in names.cards)
    return "slow", f"select an existing port ({ports}): {_why_none(value)}, so NCCL uses TCP"


def _check_out_of_band(value: str, names: _Names, settings: _Settings) -> tuple[str, str]:
    if not value:
        return "ok", ""
    if not _is_on(settings.get("NCCL_OOB_NET_ENABLE", "")):
        return "note", "set NCCL_OOB_NET_ENABLE=1 too, or unset it: alone it has no effect"
    present = [*names.cards, *(names.sockets or [])]
    if _left_by(value, present):
        return "ok", ""
    return "bad", f"select an existing device ({_list(present)})"


_CHECKS: dict[str, Callable[[str, _Names, _Settings], tuple[str, str]]] = {
    "GLOO_SOCKET_IFNAME": _check_whole,
    "NCCL_IB_HCA": _check_card,
    "NCCL_OOB_NET_IFNAME": _check_out_of_band,
    "NCCL_SOCKET_IFNAME": _check_socket,
    "TP_SOCKET_IFNAME": _check_whole,
}
