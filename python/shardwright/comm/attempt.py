"""A store for one start of the ranks, inside a launcher's store that outlives them. docs/design/in_place.md has the design.

Rank 0 draws a prefix. Each rank asks for it under its own number and accepts only the answer to that number, which only
a living rank 0 can write. All go on once all ranks of this start have confirmed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .._engine import CommError
from .rendezvous import not_come
from .waits import START_S, Wait

_LATE = "joining: "
_ROOM = "shardwright/attempts"
#: the longest pause of another rank
_FOLLOW_S = 0.2
#: seconds that rank 0 gives the others to hear of a failure
_HEARD_S = 1.0
#: seconds by which the other ranks wait longer than rank 0
_LATER_S = 2.0
#: rank 0's pause between two reads of the store: the first and the longest
_LOOK_S = (0.001, 0.05)


def attempt_store(store: Any, rank: int, world_size: int, timeout_s: float, failure: str = "") -> Any:
    """Return a store that only the ranks of this start use, inside one that may hold keys of earlier starts. Collective.

    `failure`: why this rank cannot go on, a CommError on all ranks. TimeoutError names ranks that did not come.
    """
    room = dist.PrefixStore(_ROOM, store)
    if rank == 0:
        name = _lead(room, world_size, timeout_s, failure)
    else:
        name = _follow(room, rank, world_size, timeout_s, failure)
    return dist.PrefixStore(f"{_ROOM}/{name}", store)


def _follow(room: Any, rank: int, world_size: int, timeout_s: float, failure: str) -> str:
    number = room.add("asked", 1)
    room.set(f"ask/{number}", json.dumps([rank, world_size]))
    wait = Wait(START_S)
    _await(room, f"answer/{number}", wait, rank, world_size, timeout_s, lambda: "rank 0, which has not come")
    name = room.get(f"answer/{number}").decode()
    room.delete_key(f"answer/{number}")
    if failure:
        room.set(f"failed/{name}", f"rank {rank} of {world_size} on host {socket.gethostname()} cannot join: {failure}")
    room.set(f"came/{name}/{rank}", "1")
    room.add(f"came/{name}", 1)
    # rank 0 waits as long, and can name the absent ranks
    _await(room, f"all/{name}", wait, rank, world_size, timeout_s + _LATER_S, lambda: _published(room, name))
    reason = room.get(f"all/{name}").decode()
    room.add(f"heard/{name}", 1)
    if reason:
        raise (TimeoutError if reason.startswith(_LATE) else CommError)(reason)
    return str(name)


def _await(
    room: Any, key: str, wait: Wait, rank: int, world_size: int, timeout_s: float, awaited: Callable[[], str]
) -> None:
    """Return once the key is there. Polls: torch's own wait is silent, and prints lines of its own when it ends."""
    pause_s = _LOOK_S[0]
    try:
        while not room.check([key]):
            if wait.waited_s >= timeout_s:
                raise TimeoutError(
                    f"joining: rank {rank} of {world_size} waited {timeout_s:g} s for {awaited()}; "
                    f"the deadline was {timeout_s:g} s"
                )
            wait.look(
                lambda s: (
                    f"joining: rank {rank} of {world_size} has waited {s:.1f} s for {awaited()}; the deadline is {timeout_s:g} s"
                )
            )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _FOLLOW_S)
    except RuntimeError as error:  # the store has ended
        raise TimeoutError(
            f"joining: rank {rank} of {world_size} lost the store of rank 0 or torchrun: {str(error).splitlines()[0]}"
        ) from None


def _tell(room: Any, name: str, failure: str) -> None:
    """Tell the failure to the ranks that have come, and wait a moment: the store may end with this process."""
    room.set(f"all/{name}", failure)
    answers = room.add(f"came/{name}", 0)
    wait = Wait(None)
    while wait.waited_s < _HEARD_S and room.add(f"heard/{name}", 0) < answers:
        time.sleep(_LOOK_S[1])


def _published(room: Any, name: str) -> str:
    """Return rank 0's list of absent ranks, at most as old as its last line."""
    return (
        room.get(f"absent/{name}").decode() if room.check([f"absent/{name}"]) else "rank 0 and the ranks it waits for"
    )


def _absent(room: Any, name: str, world_size: int) -> str:
    """Return the absent ranks, and publish them. On rank 0 alone: every rank's own look would make W * W calls."""
    absent = [rank for rank in range(1, world_size) if not room.check([f"came/{name}/{rank}"])]
    text = not_come(absent) if absent else "rank 0"
    room.set(f"absent/{name}", text)
    return text


def _lead(room: Any, world_size: int, timeout_s: float, failure: str) -> str:
    name = secrets.token_hex(8)
    known = room.add("done", 0)  # requests up to this number belong to starts in which all ranks came
    missing: set[int] = set()  # drawn numbers without a request yet; a dead rank never writes its own
    wait, pause_s = Wait(START_S), _LOOK_S[0]
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
        if wait.waited_s > timeout_s:
            absent = _absent(room, name, world_size)
            failure = f"{_LATE}rank 0 of {world_size} waited {timeout_s:g} s for {absent}"
            with contextlib.suppress(RuntimeError):
                _tell(room, name, failure)
            raise TimeoutError(failure)
        wait.look(
            lambda s: (
                f"joining: rank 0 of {world_size} has waited {s:.1f} s for {_absent(room, name, world_size)}; the deadline is {timeout_s:g} s"
            )
        )
        time.sleep(pause_s)
        pause_s = _LOOK_S[0] if answered else min(2 * pause_s, _LOOK_S[1])
    if failure:
        failure = f"rank 0 of {world_size} on host {socket.gethostname()} cannot join: {failure}"
    elif room.check([f"failed/{name}"]):
        failure = room.get(f"failed/{name}").decode()
    if failure:
        _tell(room, name, failure)
        raise CommError(failure)
    room.set(f"all/{name}", "")
    room.add("done", known - room.add("done", 0))
    return name
