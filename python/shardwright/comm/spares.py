"""Spares: processes of a job without a rank, which wait in sw.steps for the place of a lost one. docs/design/in_place.md has the design.

`shardwright rank` starts them, and gives all processes of one start of the ranks one folder. Rank 0 publishes there where its job
meets, and which program it runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any, NamedTuple

import torch

from .._engine import Error
from .._version import __version__
from .regroup import Board, Member

#: variables: the folder of this start of the ranks; this process's file, which says what it does; in a spare that waits, the same
START, SLOT, SPARE = "SHARDWRIGHT_START", "SHARDWRIGHT_SLOT", "SHARDWRIGHT_SPARE"
_LOOK_S = 0.02
#: loops of sw.steps and sw.survive that this process has begun: all ranks of a program begin the same ones
_begun = 0


class Job(NamedTuple):
    """A loop of sw.steps, as a spare must know it. `folder`: of its attempts. `runs`: versions, by what they are of."""

    folder: str
    members: list[Member]
    backend: str
    timeout_s: float
    runs: dict[str, str]


def is_waiting() -> bool:
    """Return True in a spare that has no rank's place yet."""
    return SPARE in os.environ


def seat() -> None:
    """Say that this spare has a rank's place from now on."""
    _note(os.environ.pop(SPARE), "runs")


def end_loop() -> None:
    """Say that this rank has ended its loop: a failure from now on is not a lost rank's."""
    if SLOT in os.environ:
        _note(os.environ[SLOT], "ended")


def _note(path: str, state: str) -> None:
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(state)
    os.replace(f"{path}.new", path)


def begin_loop(timeout_s: float) -> Job | None:
    """Count a loop. In a spare, wait for its ranks and return their job. Error: they are late, or run another program or torch."""
    global _begun
    _begun += 1
    if not is_waiting():
        if SLOT in os.environ:
            _note(os.environ[SLOT], "runs")
        return None
    loops, parent, until = _loops(), os.getppid(), time.monotonic() + timeout_s
    while not (said := loops.said()) or max(map(int, said)) < _begun:
        if os.getppid() != parent:
            raise SystemExit(0)  # what has started it has ended, and `shardwright rank` with it
        if time.monotonic() > until:
            raise Error(
                f"a spare, process {os.getpid()}, waited {timeout_s:g} s for the ranks of its job to come to sw.steps or sw.survive"
            )
        time.sleep(_LOOK_S)
    if max(map(int, said)) > _begun:  # the others have left this loop, and this process cannot come to theirs
        raise SystemExit(0)
    folder, members, *rest = said[str(_begun)]
    job = Job(folder, [Member(*each) for each in members], *rest)
    for name, own in _runs().items():
        if own != job.runs[name]:
            raise Error(
                f"a spare, process {os.getpid()}, has {name} {own}, and the ranks of its job have {job.runs[name]}: it cannot take "
                "the place of one"
            )
    return job


def can_come() -> bool:
    """Return True in the first loop of a program. Spares end with it, and a program that starts again does not come to a later one."""
    return _begun == 1


def publish(job: Job) -> None:
    """Tell the spares of this start, if there are any, where the ranks of this loop meet. On rank 0."""
    if START in os.environ:
        _loops().say(str(_begun), job._replace(runs=_runs()))


def _loops() -> Board:
    return Board(os.path.join(os.environ[START], "loops"))


def _runs() -> dict[str, str]:
    """Return what must be equal in a rank and in a spare."""
    path: Any = getattr(sys.modules["__main__"], "__file__", None)
    digest = "none"
    if path is not None and os.path.isfile(path):
        with open(path, "rb") as file:
            digest = f"{path} with SHA-256 {hashlib.sha256(file.read()).hexdigest()[:16]}"
    return {"torch": str(torch.__version__), "shardwright": __version__, "the program": digest}
