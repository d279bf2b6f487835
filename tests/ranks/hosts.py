"""Teams whose ranks are spread over hosts. Each host is a network namespace of this machine (network.py).

A rank enters its host's namespaces and joins the group as a launcher's ranks do: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and rank 0 serves torch's store over TCP on host 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import network
import torch
import torch.distributed as dist
from harness import Teams

MASTER_PORT = 29500
#: of torch's own collectives; a body that waits for a dead host in one of them would wait as long
TORCH_TIMEOUT_S = 30.0


class Lab:
    """Ranks on hosts, in order: host 0 has the lowest.

    Attributes
    ----------
    team : Team
    network : network.Network
    """

    def __init__(self, teams: Teams, made: network.Network, ranks_per_host: Sequence[int], joined: bool) -> None:
        self.network = made
        self._host_of = [host for host, count in enumerate(ranks_per_host) for _ in range(count)]
        joins = []
        for rank, host in enumerate(self._host_of):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self._host_of)),
                "LOCAL_RANK": str(rank - self._host_of.index(host)),
                "LOCAL_WORLD_SIZE": str(ranks_per_host[host]),
                "MASTER_ADDR": made.address(0),
                "MASTER_PORT": str(MASTER_PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            joins.append((enter, {"namespaces": made.namespaces(host), "environment": environment, "joined": joined}))
        self.team = teams.fresh(len(joins), joins)

    def host_of(self, rank: int) -> int:
        return self._host_of[rank]

    def ranks_of(self, host: int) -> list[int]:
        return [rank for rank, place in enumerate(self._host_of) if place == host]

    def kill(self, host: int) -> None:
        """Kill all ranks of a host at once, as a power cut would."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in self.ranks_of(host):
                self.team.signal(rank, number)


def enter(
    rank: int, world_size: int, folder: str, namespaces: Sequence[str], environment: Mapping[str, str], joined: bool
) -> None:
    """Enter a rank's host, and join the default process group unless the body does so itself."""
    network.enter(namespaces)
    os.environ.update(environment)
    os.environ["SW_TEST_FOLDER"] = folder
    torch.set_num_threads(1)
    if joined:
        with unheard_stderr():
            dist.init_process_group("gloo", timeout=timedelta(seconds=TORCH_TIMEOUT_S))


@contextlib.contextmanager
def unheard_stderr() -> Iterator[None]:
    """Suppress torch's C++ warning that the hosts' addresses have no names."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def lab(teams: Teams, *ranks_per_host: int, rate: str | None = None, joined: bool = True) -> Iterator[Lab]:
    """Yield fresh ranks on fresh hosts; skip with the reason if hosts cannot be made."""
    with network.network(len(ranks_per_host), rate) as made:
        found = Lab(teams, made, ranks_per_host, joined)
        with found.team:
            yield found
