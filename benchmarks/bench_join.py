"""Benchmark of joining: time until W ranks of one host have joined and passed a barrier, against torch's Gloo group of
these ranks.

Both arms meet through the same kind of store, one TCPStore in rank 0, and begin at the same time on every rank. A
sample ends when the slowest rank has passed the barrier. Only `HostComm` is measured. `sw.wrap` reads addresses from
torch's group instead of the store, so a program that has such a group pays for both.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import common
import torch.distributed as dist
from shardwright._engine import HostComm

WORLDS = (2, 4, 8, 16, 32, 64, 128, 192)
QUICK_WORLDS = (2, 8, 32)
#: largest ratio to Gloo's time, if there is a goal
GOALS = {64: 1.0}
DEADLINE_S = 120.0
#: seconds between the last rank's arrival and the common start of a sample
HEAD_START_S = 0.1


def join_ours(store: Any, rank: int, world_size: int) -> HostComm:
    comm = HostComm(rank, world_size, timeout_s=DEADLINE_S, host="here")
    store.set(f"address {rank}", comm.address)
    if rank == 0:
        addresses = [store.get(f"address {r}").decode() for r in range(world_size)]
        store.set("all", " ".join([secrets.token_bytes(16).hex(), *addresses]))
    secret, *addresses = store.get("all").decode().split(" ")
    comm.connect(addresses, bytes.fromhex(secret), ["here"] * world_size)
    comm.barrier("joined")
    return comm


def join_gloo(store: Any, rank: int, world_size: int) -> Any:
    group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=DEADLINE_S))
    group.barrier().wait()
    return group


ARMS: dict[str, Callable[[Any, int, int], Any]] = {"ours": join_ours, "gloo": join_gloo}


def run_rank(rank: int, world_size: int, rounds: int, port: int, met: Any, begin: Any, seconds: Any) -> None:
    """Join `rounds` times per arm. seconds[(turn * arms + arm) * world_size + rank] is this rank's time."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=DEADLINE_S))
    for turn in range(rounds):
        for index, join in enumerate(ARMS.values()):
            met.wait()
            if rank == 0:
                begin.value = time.monotonic() + HEAD_START_S
            met.wait()
            time.sleep(max(0.0, begin.value - time.monotonic()))
            joined = join(dist.PrefixStore(f"{turn} {index}", store), rank, world_size)
            seconds[(turn * len(ARMS) + index) * world_size + rank] = time.monotonic() - begin.value
            met.wait()
            if isinstance(joined, HostComm):
                joined.close()
            del joined
    met.wait()


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def measure(world_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's time, by arm and round."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwright._engine"])
    met, begin = context.Barrier(world_size), context.Value("d")
    seconds = context.Array("d", rounds * len(ARMS) * world_size)
    shared = (free_port(), met, begin, seconds)
    ranks = [context.Process(target=run_rank, args=(r, world_size, rounds, *shared)) for r in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(common.TIMEOUT_S)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            raise SystemExit(f"a rank of {world_size} ended with {process.exitcode}")
    return {
        name: [
            max(seconds[(turn * len(ARMS) + index) * world_size + r] for r in range(world_size))
            for turn in range(rounds)
        ]
        for index, name in enumerate(ARMS)
    }


def main() -> None:
    report, quick = common.begin("join", __doc__)
    for world_size in QUICK_WORLDS if quick else WORLDS:
        rounds = 3 if quick or world_size > 64 else 7
        times = measure(world_size, rounds)
        ours, gloo = (statistics.median(times[name]) for name in ARMS)
        report.add(
            f"join W={world_size}",
            "ms",
            ours * 1e3,
            gloo * 1e3,
            "torch Gloo",
            goal=GOALS.get(world_size),
            samples=rounds,
            ours_best=min(times["ours"]) * 1e3,
            peer_best=min(times["gloo"]) * 1e3,
            ours_ms_a_rank=ours * 1e3 / world_size,
            peer_ms_a_rank=gloo * 1e3 / world_size,
        )


if __name__ == "__main__":
    main()
