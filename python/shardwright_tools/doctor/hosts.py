"""`shardwright doctor --hosts`, started on each host by a launcher: links between hosts by pair, versions and clocks.

torchrun --nnodes 3 --nproc-per-node 1 --rdzv-endpoint host0:29500 --rdzv-backend c10d -m shardwright doctor --hosts

One process of each host takes part. Pairs of hosts that have none in common are timed at the same time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 120.0
_PINGS, _SIZES = 40, (1 << 16, 1 << 20, 1 << 23, 1 << 23, 1 << 23)
#: a transfer that took longer is large enough
_LONG_S = 0.2
#: a link is slow below this part of the fastest one's bandwidth, or above so many times the quickest one's latency and so much more
_SLOW, _LATE, _LATE_S = 0.5, 5.0, 2e-3
#: seconds between two hosts' clocks, above which checkpoints' times and logs mislead
_CLOCK_S = 0.5


@dataclasses.dataclass(frozen=True)
class Host:
    """A host: its name and addresses' namespace, the rank that speaks for it, its versions."""

    name: str
    key: str
    rank: int
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Link:
    """A pair of hosts: seconds for the half of the quickest round trip, bytes a second in the slower direction, and the clocks' difference."""

    first: str
    second: str
    latency_s: float
    bytes_per_s: float
    clock_s: float

    def __str__(self) -> str:
        return f"{self.first} - {self.second}: {self.latency_s * 1e6:,.0f} us, {self.bytes_per_s * 8 / 1e9:.3g} Gbit/s"


def run(options: argparse.Namespace) -> int:
    """Meet the other processes, measure, and print on rank 0. Return 0, 1 if something was found, 2 if they cannot meet."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return _refuse(
            options, f"--hosts needs a launcher that starts it on each host, as in\n{(__doc__ or '').split(chr(10))[2]}"
        )
    if os.environ["WORLD_SIZE"] == "1":
        return _refuse(
            options,
            f"the world is of one: this launcher on {socket.gethostname()} met no other. All hosts need the same --nnodes, "
            "--rdzv-endpoint (a name or address that each of them reaches) and --rdzv-id",
        )
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        found = examine()
    except (RuntimeError, ValueError) as error:
        return _refuse(
            options,
            f"the hosts cannot reach one another: {str(error).splitlines()[0]}; look for a firewall between them, and set "
            "GLOO_SOCKET_IFNAME to the interface that they share",
        )
    rank = dist.get_rank()
    dist.destroy_process_group()
    hosts, links, findings = found
    if rank == 0:
        if options.json:
            made = {
                "hosts": [dataclasses.asdict(each) for each in hosts],
                "links": [dataclasses.asdict(each) for each in links],
            }
            print(json.dumps({"ok": not findings, **made, "findings": findings}, indent=2))
        else:
            print("\n".join([*map(str, links), *(findings or ["ok: no slow link, one version of all, clocks agree"])]))
    return 1 if findings else 0


def _refuse(options: argparse.Namespace, sentence: str) -> int:
    print(json.dumps({"ok": False, "error": sentence}, indent=2) if options.json else f"shardwright doctor: {sentence}")
    return 2


def examine() -> tuple[list[Host], list[Link], list[str]]:
    """Measure all pairs of hosts. Collective over torch's default group, which must be gloo; all ranks return the same."""
    import torch.distributed as dist

    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, _own())
    hosts: dict[str, Host] = {}
    for each in ranks:
        hosts.setdefault(each.key, each)
    order = list(hosts.values())
    mine = order.index(ranks[dist.get_rank()]) if ranks[dist.get_rank()] in order else -1
    own: list[tuple[int, int, Link]] = []
    for pairs in rounds(len(order)):
        for first, second in pairs:
            if mine in (first, second):
                link = _time(order, first, second, leads=mine == first)
                own += [] if link is None else [(first, second, link)]
        dist.barrier()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    links = [link for _, _, link in sorted((each for some in every for each in some), key=lambda each: each[:2])]
    return order, links, findings_of(order, links)


def _own() -> Host:
    import torch
    import torch.distributed as dist
    from shardwright._version import __version__

    try:
        key = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        key = socket.gethostname()
    versions = {"torch": torch.__version__, "shardwright": __version__, "Python": platform.python_version()}
    return Host(socket.gethostname(), key, dist.get_rank(), versions)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of `count` hosts: each pair once, and no host twice in a round."""
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]))
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _time(order: Sequence[Host], first: int, second: int, *, leads: bool) -> Link | None:
    """Time a pair; the first host leads, and returns the link."""
    import torch
    import torch.distributed as dist

    peer = order[second if leads else first].rank
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    trips, clocks = [], []
    for _ in range(_PINGS):
        if leads:
            begun_s, begun_ns = time.perf_counter(), time.time_ns()
            dist.send(word, peer)
            dist.recv(word, peer)
            trips.append(time.perf_counter() - begun_s)
            clocks.append((trips[-1], (int(word) - begun_ns) * 1e-9 - trips[-1] / 2))
        else:
            dist.recv(word, peer)
            word.fill_(time.time_ns())
            dist.send(word, peer)
    rates = []
    for sends in (leads, not leads):
        rates.append(_rate(peer, sends=sends, leads=leads))
    if not leads:
        return None
    return Link(order[first].name, order[second].name, min(trips) / 2, min(rates), min(clocks)[1])


def _rate(peer: int, *, sends: bool, leads: bool) -> float:
    """Return bytes a second of one direction, by the leader's clock: larger and larger buffers, until one takes long."""
    import torch
    import torch.distributed as dist

    word, rate = torch.zeros(1, dtype=torch.int64, device="cpu"), 0.0
    for size in _SIZES:
        data = torch.zeros(size, dtype=torch.uint8, device="cpu")
        begun_s = time.perf_counter()
        if sends:
            dist.send(data, peer)
            dist.recv(word, peer)
        else:
            dist.recv(data, peer)
            dist.send(word, peer)
        took_s = time.perf_counter() - begun_s
        rate = max(rate, size / took_s)
        if _agreed(took_s > _LONG_S, peer, leads=leads):
            break
    return rate


def _agreed(value: bool, peer: int, *, leads: bool) -> bool:
    """Return the leader's value on both."""
    import torch
    import torch.distributed as dist

    word: torch.Tensor = torch.tensor([int(value)], dtype=torch.int64, device="cpu")
    if leads:
        dist.send(word, peer)
    else:
        dist.recv(word, peer)
    return bool(word)


def findings_of(hosts: Sequence[Host], links: Sequence[Link]) -> list[str]:
    """Return a sentence for each thing that is wrong."""
    found = []
    if len(hosts) < 2:
        found.append(
            f"all ranks are on one host, {hosts[0].name}: start a launcher on each host with the same --rdzv-endpoint"
        )
    for name in hosts[0].versions if hosts else ():
        by_version: dict[str, list[str]] = {}
        for each in hosts:
            by_version.setdefault(each.versions[name], []).append(each.name)
        if len(by_version) > 1:
            most = max(by_version, key=lambda version: len(by_version[version]))
            for version, names in by_version.items():
                if version != most:
                    found.append(
                        f"{', '.join(names)}: {name} {version}, and {most} on {', '.join(by_version[most][:4])}: install the same"
                    )
    found += _slow(links)
    for link in links:
        if hosts and link.first == hosts[0].name and abs(link.clock_s) > _CLOCK_S:
            found.append(
                f"{link.second}: its clock is {abs(link.clock_s):.1f} s {'ahead of' if link.clock_s > 0 else 'behind'} "
                f"{link.first}'s: set it by NTP"
            )
    return found


def _slow(links: Sequence[Link]) -> Iterator[str]:
    """Name slow links; a host all of whose links are slow is named instead of them. One link has none to compare with."""
    if len(links) < 2:
        return
    best, quickest = max(each.bytes_per_s for each in links), min(each.latency_s for each in links)

    def is_slow(link: Link) -> bool:
        is_late = link.latency_s > _LATE * quickest and link.latency_s - quickest > _LATE_S
        return link.bytes_per_s < _SLOW * best or is_late

    slow = [each for each in links if is_slow(each)]
    for name in sorted({name for each in slow for name in (each.first, each.second)}):
        own = [each for each in links if name in (each.first, each.second)]
        if (
            len(own) > 1
            and all(map(is_slow, own))
            and any(name not in (each.first, each.second) for each in links if not is_slow(each))
        ):
            yield f"{name}: all its links are slow, at most {max(e.bytes_per_s for e in own) * 8 / 1e9:.3g} of {best * 8 / 1e9:.3g} Gbit/s"
            slow = [each for each in slow if each not in own]
    for each in slow:
        yield f"the link {each} is slow; the best has {best * 8 / 1e9:.3g} Gbit/s, the quickest {quickest * 1e6:,.0f} us"
