"""Spares: processes of a job without a rank, which wait in sw.steps for the place of a lost one. docs/design/in_place.md has the design.

`shardwright rank` starts them, and gives all processes of one host, in one start of the ranks, one folder. Ranks publish there where
their job meets. Rank 0 says there which program it runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .._engine import Error
from .._version import __version__
from .board import JOB, Board, Member

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


def end_loop(state: str = "ended") -> None:
    """Say that this rank has ended its loop: a failure from now on is not a lost rank's. "done": a spare, as all ranks have."""
    if SLOT in os.environ:
        _note(os.environ[SLOT], state)


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
    while (job := _job(loops.said())) is None:
        if os.getppid() != parent:
            raise SystemExit(0)  # what has started it has ended, and `shardwright rank` with it
        if time.monotonic() > until:
            raise Error(
                f"a spare, process {os.getpid()}, waited {timeout_s:g} s for the ranks of its job to come to sw.steps or sw.survive"
            )
        time.sleep(_LOOK_S)
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


def _job(said: Mapping[str, str]) -> Job | None:
    """Return the job of this loop once its ranks have come. SystemExit(0): they have left it, and this process cannot come to theirs."""
    if max(map(int, said), default=0) > _begun:
        raise SystemExit(0)
    if not (folder := said.get(str(_begun))):
        return None
    try:
        found = Board(os.path.join(folder, JOB), is_far=True).said().get(str(_begun))
    except FileNotFoundError:
        raise Error(
            f"a spare, process {os.getpid()}, cannot wait in {folder}: a later start of the job has removed it"
        ) from None
    return found and Job(found[0], [Member(*each) for each in found[1]], *found[2:])


def publish(job: Job, rank: int) -> None:
    """Tell the spares of this host and start, if there are any, where the ranks of this loop meet; on rank 0 tell all spares the rest."""
    if rank == 0:
        Board(os.path.join(job.folder, JOB)).say(str(_begun), job._replace(runs=_runs()))
    if START in os.environ:
        _loops().say(str(_begun), job.folder)


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
