"""`shardwright doctor`: check the engine on this host and report the settings that matter."""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from . import bench as bench_table
from . import gpu as gpu_report
from . import hosts

DESCRIPTION = __doc__
EPILOG = "Exit code 0: all checks passed; 1: one failed. Findings about GPUs do not change it."
_OLDEST_TORCH = (2, 4)


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check. `detail` is a fact if `ok`, else the error with its fix."""

    name: str
    ok: bool
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--bench", action="store_true", help="also time all_reduce by size, between ranks and GPUs")
    parser.add_argument(
        "--hosts", action="store_true", help="under a launcher on each host: time links, compare versions and clocks"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if all checks passed, else 1."""
    if options.hosts:
        return hosts.run(options)
    checks: list[Check] = []

    def run_check(name: str, check: Callable[[], Any]) -> Any:
        """Return the result of a check, whose text is its detail. Any failure is a finding, and returns None."""
        try:
            found = check()
        except Exception as error:
            checks.append(Check(name, False, f"{type(error).__name__}: {error}"))
            return None
        checks.extend([Check(name, True, found)] if isinstance(found, str) else [])
        return found

    for name, check in _CHECKS:
        run_check(name, check)
    loads = checks[0].ok
    description = run_check("description", _description) if loads else {}
    gpu = gpu_report.findings() if loads else []
    may_run = options.bench and all(check.ok for check in checks)
    bench: list[bench_table.Row] = (
        run_check("all_reduce between processes", bench_table.sweep) if may_run else []
    ) or []
    ok = all(check.ok for check in checks)
    found: dict[str, Any] = {"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}
    found["gpu"] = [dataclasses.asdict(finding) for finding in gpu]
    found |= {"bench": [row.as_json() for row in bench]} if options.bench else {}
    lines = [str(description), ""] if description else []
    lines += [f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}" for check in checks]
    for finding in gpu:
        fix = f" -> {finding.fix}" if finding.fix and finding.verdict != "ok" else ""
        lines.append(f"{finding.verdict:4} {finding.name}: {finding.value}{fix}")
    lines += map(str, bench)
    shown = json.dumps({**found, "description": description or {}}, indent=2, default=str)
    encoding = sys.stdout.encoding or "utf-8"  # which may lack characters of names
    print(shown if options.json else "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding))
    return 0 if ok else 1


def _description() -> Any:
    from shardwright.description import describe

    return describe()


def _engine_loads() -> str:
    from shardwright import _engine

    return f"instruction set {_engine.instruction_set()}"


def _engine_computes() -> str:
    from shardwright import _engine

    _engine.self_test()
    return "fold and all_reduce give the expected bits"


def _torch_is_new_enough() -> str:
    import torch

    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    found = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if found < _OLDEST_TORCH:
        raise RuntimeError(f"torch {torch.__version__} is older than {'.'.join(map(str, _OLDEST_TORCH))}: upgrade it")
    return str(torch.__version__)


def _memory_can_be_shared() -> str:
    with open(os.memfd_create("shardwright-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
        file.truncate(1 << 20)
    return "memfd_create works"


def _peers_can_be_watched() -> str:
    with open(os.memfd_create("shardwright-doctor", os.MFD_CLOEXEC), "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    return "a byte of a memfd can be locked, so peers can detect the death of a rank"


def _platform_is_known() -> str:
    if sys.platform != "linux":
        raise RuntimeError(f"{sys.platform} is not supported: the engine runs on Linux only")
    return os.uname().machine


def _ranks_can_restart() -> str:
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with --rdzv-backend c10d each start of torchrun has a store of its own"
    return (
        "supported for groups of sw.wrap and sw.init_process_group; an elastic job (--nnodes MIN:MAX), or a program that calls "
        "torch.distributed.init_process_group itself, needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d (docs/launch.md)"
    )


_CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("engine loads", _engine_loads),
    ("platform", _platform_is_known),
    ("torch", _torch_is_new_enough),
    ("engine computes", _engine_computes),
    ("shared memory", _memory_can_be_shared),
    ("watching peers", _peers_can_be_watched),
    ("restarts by torchrun", _ranks_can_restart),
)
