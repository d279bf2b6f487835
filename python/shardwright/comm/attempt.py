"""A store for one start of the ranks, inside a launcher's store that outlives them.

torchrun's agents keep one TCPStore for a job, also over restarts of the workers. Keys of earlier workers stay in it,
and torch's Gloo reads the addresses of dead processes (pytorch issue 135712). So ranks make their group over a
PrefixStore with a new prefix. The restart count cannot be the prefix: each agent counts its own restarts, from 0 when
it joins.

Rank 0 draws the prefix. Each rank asks for it under its own number and accepts only the answer to that number, which
only a living rank 0 can write. Requests of dead ranks are answered too, without effect. Rank 0 goes on once all ranks
of this start have confirmed. Cost: four calls of the store a rank, 4 * W calls of rank 0, no message between ranks.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["attempt_store"]

_ROOM = "shardwright/attempts"
#: rank 0's pause between two reads of the store: the first and the longest
_LOOK_S = (0.001, 0.05)


def attempt_store(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return a store that only the ranks of this start use. Collective.

    Parameters
    ----------
    store : torch.distributed.Store
        A store that may hold keys of earlier starts of this job and of other world sizes.
    rank, world_size : int
    timeout_s : float

    Raises
    ------
    TimeoutError
        If some ranks did not come; rank 0's message names them.
    """
    room = dist.PrefixStore(_ROOM, store)
    name = _lead(room, world_size, timeout_s) if rank == 0 else _follow(room, rank, world_size, timeout_s)
    return dist.PrefixStore(f"{_ROOM}/{name}", store)


def _follow(room: Any, rank: int, world_size: int, timeout_s: float) -> str:
    number = room.add("asked", 1)
    room.set(f"ask/{number}", json.dumps([rank, world_size]))
    try:
        room.wait([f"answer/{number}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TimeoutError(
            f"joining: rank {rank} of {world_size} waited {timeout_s:g} s for rank 0: {str(error).splitlines()[0]}"
        ) from None
    name = room.get(f"answer/{number}").decode()
    room.delete_key(f"answer/{number}")
    room.set(f"came/{name}/{rank}", "1")
    room.add(f"came/{name}", 1)
    return str(name)


def _lead(room: Any, world_size: int, timeout_s: float) -> str:
    name = secrets.token_hex(8)
    known = room.add("done", 0)  # requests up to this number belong to starts in which all ranks came
    missing: set[int] = set()  # drawn numbers without a request yet; a dead rank never writes its own
    deadline_s, pause_s = time.monotonic() + timeout_s, _LOOK_S[0]
    while room.add(f"came/{name}", 0) < world_size - 1:
        asked = room.add("asked", 0)
        missing.update(range(known + 1, asked + 1))
        known = asked
        answered = [number for number in sorted(missing) if room.check([f"ask/{number}"])]
        for number in answered:
            missing.discard(number)
            _, their_size = json.loads(room.get(f"ask/{number}"))
            room.delete_key(f"ask/{number}")
            if their_size == world_size:
                room.set(f"answer/{number}", name)
        if time.monotonic() > deadline_s:
            absent = [str(rank) for rank in range(1, world_size) if not room.check([f"came/{name}/{rank}"])]
            raise TimeoutError(
                f"joining: rank 0 of {world_size} waited {timeout_s:g} s for rank {', '.join(absent[:8])}"
                + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
            )
        time.sleep(pause_s)
        pause_s = _LOOK_S[0] if answered else min(2 * pause_s, _LOOK_S[1])
    room.add("done", known - room.add("done", 0))
    return name
