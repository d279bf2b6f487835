"""The parts of the check: their runs, limits and expected rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright import _engine_check

#: tools of compute-sanitizer
SANITIZERS = ("memcheck", "racecheck", "initcheck")
ARMS = ("DDP", "FSDP2", "zero=0", "zero=3", "zero=0, masters", "zero=3, prefetch=2", "zero=0, buckets of 100 MB")
_STAGES = (0, 1, 2, 3)
#: what carries bytes between ranks of one card. NCCL does so from 2.30 on; one rank alone runs none of its threads
WAYS = ("nccl", "shm", "ipc")
_TRANSPORT = "SHARDWRIGHT_GPU_TRANSPORT"


@dataclass(frozen=True)
class Run:
    """Processes that execute one body, "file:function" of this package, and must produce the rows `cases`."""

    body: str
    cases: tuple[str, ...]
    ranks: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # a program that starts the process; the run is skipped if it is not installed
    dying: int | None = None  # the rank that a signal will kill


@dataclass(frozen=True)
class Part:
    """Runs that share a limit, and comparisons (case, peer, goal): case / peer should reach the goal."""

    name: str
    limit_s: float  # the longest that the runs may take in all
    runs: tuple[Run, ...]
    comparisons: tuple[tuple[str, str, float], ...] = ()
    least_s: float = 20.0  # what a warm machine needs; with less the part does not start

    @property
    def cases(self) -> tuple[str, ...]:
        own = tuple(case for run in self.runs for case in run.cases)
        return own + tuple(f"{case} beside {peer}" for case, peer, _ in self.comparisons)


def _sanitized(tool: str, is_quick: bool) -> Run:
    # API errors are reported by default: optional functions that a driver lacks, and queries of host pointers
    api_errors = ("--report-api-errors", "no") if tool == "memcheck" else ()
    prefix = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *api_errors)
    return Run("correct:sanitized", (tool,), arguments={"tool": tool, "is_quick": is_quick}, prefix=prefix)


def _shared(ranks: int, way: str) -> Run:
    cases = tuple(f"{ranks} ranks, {way}, zero={zero}" for zero in _STAGES)
    environment = {_TRANSPORT: way, **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if way == "nccl" else {})}
    return Run("correct:shared", cases, ranks, {"label": f"{ranks} ranks, {way}, "}, environment)


def parts(*, is_quick: bool = False) -> tuple[Part, ...]:
    """Return all parts, the most valuable first. `is_quick`: use sizes that a simulated GPU runs in seconds."""
    size = {"is_quick": is_quick}
    kernels = tuple(_engine_check.device_kernel_cases())
    slots = {_TRANSPORT: "shm"}
    return (
        # torch's libraries come from a cold disk, and NVRTC compiles the kernels: outside of the other limits
        Part("cold start", 240, (Run("correct:warm", ("torch", "kernels' image")),)),
        Part("machine", 180, (Run("correct:machine", ("versions", "GPU", "NCCL", "kernels", "doctor")),)),
        Part("kernels", 150, (Run("correct:kernels", kernels, arguments=size),)),
        Part("stages", 120, (Run("correct:stages", tuple(f"zero={zero}" for zero in _STAGES)),)),
        Part(
            "bandwidth",
            180,
            (
                Run("speed:bandwidths", BANDWIDTHS, arguments=size),
                Run("speed:large", tuple(f"{name} above 4 GiB" for name in LARGE), arguments=size),
            ),
            least_s=30,
        ),
        Part(
            "training",
            360,
            tuple(Run("train:arm", (arm,), arguments={"name": arm, **size}) for arm in ARMS),
            () if is_quick else (("zero=0", "DDP", 1.0), ("zero=3", "FSDP2", 1.0)),
            least_s=90,
        ),
        Part("promises", 90, (Run("promises:promises", PROMISES),)),
        Part("ranks on one GPU", 240, tuple(_shared(n, way) for way in WAYS for n in (2, 3)), least_s=60),
        Part(
            "faults",
            150,
            (
                Run("faults:full_queue", ("full queue",), 2, size, slots),
                Run("faults:killed_peer", ("killed peer",), 2, size, slots, dying=1),
                Run("faults:interrupt", ("Ctrl-C",), 2, size, slots),
            ),
            least_s=60,
        ),
        Part("sanitizers", 90, tuple(_sanitized(tool, is_quick) for tool in SANITIZERS), least_s=30),
    )


def count_kept(chosen: Sequence[Part], within_s: float) -> int:
    """Return how many parts have their least time if all end within `within_s` seconds; the last ones are dropped."""
    kept = len(chosen)
    while kept and sum(part.least_s for part in chosen[:kept]) > within_s:
        kept -= 1
    return kept


def limit_s(kept: Sequence[Part], left_s: float) -> float:
    """Return the seconds that kept[0] may take: its limit, unless the parts behind it need some of it."""
    spare_s = left_s - sum(part.least_s for part in kept[1:])
    return min(kept[0].limit_s, max(kept[0].least_s, spare_s))


#: rows of speed.py
BANDWIDTHS = (
    *("copy", "PACK", "CAST to bfloat16", "CAST from bfloat16", "QUANTIZE 8 bits", "DECODE 8 bits", "NORM", "AdamW"),
    *("AdamW beside torch's", "copy to the host"),
)
#: kernels that are compared on one array above 4 GiB
LARGE = ("PACK", "FOLD of 8 slices", "CAST", "NORM", "AdamW")
#: rows of promises.py
PROMISES = (
    *("save and load", "offload", "GradScaler", "checkpoint_units", "side stream", "compiled blocks", "no host wait"),
    "capture refused",
)
