"""The parts of the check: their runs, limits and expected rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import _engine

#: tools of compute-sanitizer
SANITIZERS = ("memcheck", "racecheck", "initcheck")
ARMS = ("DDP", "FSDP2", "zero=0", "zero=3")
_STAGES = (0, 1, 2, 3)
_TRANSPORT = "SHARDWRIGHT_GPU_TRANSPORT"


@dataclass(frozen=True)
class Run:
    """A run: processes that execute one body.

    Attributes
    ----------
    body : str
        "file:function" of this package.
    cases : tuple of str
        Names of the rows that it must produce.
    ranks : int
    arguments, environment : mapping
    prefix : tuple of str
        A program that starts the process, such as a sanitizer. The run is skipped if it is not installed.
    dying : int or None
        The rank that a signal will kill.
    """

    body: str
    cases: tuple[str, ...]
    ranks: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    dying: int | None = None


@dataclass(frozen=True)
class Part:
    """Runs that share a limit, in seconds. `comparisons`: (case, peer, goal); the ratio of the values of case and peer
    should reach the goal."""

    name: str
    limit_s: float
    runs: tuple[Run, ...]
    comparisons: tuple[tuple[str, str, float], ...] = ()

    @property
    def cases(self) -> tuple[str, ...]:
        """Return the names of all rows that the part must produce."""
        own = tuple(case for run in self.runs for case in run.cases)
        return own + tuple(f"{case} beside {peer}" for case, peer, _ in self.comparisons)


def _sanitized(tool: str, is_quick: bool) -> Run:
    prefix = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
    return Run("correct:sanitized", (tool,), arguments={"tool": tool, "is_quick": is_quick}, prefix=prefix)


def _shared(ranks: int, way: str) -> Run:
    cases = tuple(f"{ranks} ranks, {way}, zero={zero}" for zero in _STAGES)
    return Run("correct:stages", cases, ranks, {"label": f"{ranks} ranks, {way}, "}, {_TRANSPORT: way})


def parts(*, is_quick: bool = False) -> tuple[Part, ...]:
    """Return all parts, in order. `is_quick`: use sizes that a simulated GPU runs in seconds."""
    size = {"is_quick": is_quick}
    kernels = tuple(_engine.device_kernel_cases())
    slots = {_TRANSPORT: "shm"}
    return (
        Part("machine", 60, (Run("correct:machine", ("versions", "GPU", "NCCL", "kernels", "doctor")),)),
        Part("kernels", 150, (Run("correct:kernels", kernels, arguments=size),)),
        Part("sanitizers", 90, tuple(_sanitized(tool, is_quick) for tool in SANITIZERS)),
        Part("stages", 120, (Run("correct:stages", tuple(f"zero={zero}" for zero in _STAGES)),)),
        Part("ranks on one GPU", 300, tuple(_shared(ranks, way) for ranks in (2, 3) for way in ("shm", "ipc"))),
        Part(
            "faults",
            60,
            (
                Run("faults:full_queue", ("full queue",), 2, environment=slots),
                Run("faults:killed_peer", ("killed peer",), 2, environment=slots, dying=1),
                Run("faults:interrupt", ("Ctrl-C",), 2, environment=slots),
            ),
        ),
        Part("bandwidth", 180, (Run("speed:bandwidths", BANDWIDTHS, arguments=size),)),
        Part(
            "training",
            360,
            tuple(Run("train:arm", (arm,), arguments={"name": arm, **size}) for arm in ARMS),
            () if is_quick else (("zero=0", "DDP", 1.0), ("zero=3", "FSDP2", 1.0)),
        ),
    )


#: rows of speed.py
BANDWIDTHS = (
    "copy",
    "PACK",
    "CAST to bfloat16",
    "CAST from bfloat16",
    "QUANTIZE 8 bits",
    "DECODE 8 bits",
    "NORM",
    "AdamW",
    "AdamW beside torch's",
    "copy to the host",
)
