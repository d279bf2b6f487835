"""`shardwright scale -- torchrun --nproc-per-node 8 program.py`: the speed of 1, 2, 4, ... ranks, and what costs the rest."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shardwright.comm.account import RUN_FOLDER
from shardwright.observe import verdict

from .children import run_child, words_of
from .page import RankOfRun, accounts_of
from .report import Nothing, columns, guarded, printable, show

EPILOG = """The program must train until it is ended, or for long enough; it is ended by SIGTERM after the time of each count. Each
rank's batch stays as it is, so the efficiency of n ranks is their steps per second over those of one rank.

Exit codes: 0 all counts ran, 2 the input is wrong, or a count made no step."""
_OPTION = re.compile(r"(--nproc[-_]per[-_]node)(?:=(.*))?")
#: the first steps, in which memory is made, do not count
_WARM = 3
_LEAST = 0.8


@dataclasses.dataclass(frozen=True)
class Speed:
    """The result for one count of ranks."""

    ranks: int
    steps: int
    steps_per_s: float
    efficiency: float
    account: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps of each count (default: %(default)s)")
    parser.add_argument(
        "--start-seconds", type=float, default=600.0, help="until the first step (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, help="of a rank in a step: print tokens per second, too")
    parser.add_argument("--json", action="store_true")
    parser.usage = "shardwright scale [options] -- torchrun --nproc-per-node N ... program.py"


def counts_of(words: Sequence[str]) -> tuple[list[int], int, bool]:
    """Return the counts 1, 2, 4, ... to the command's own, the place of the option, and whether its value is in it."""
    for at, word in enumerate(words):
        found = _OPTION.fullmatch(word)
        if found:
            value = found[2] if found[2] is not None else (words[at + 1] if at + 1 < len(words) else "")
            if not (value.isascii() and value.isdigit() and len(value) < 7 and int(value) > 0):
                raise Nothing(f"{found[1]} must be a number of ranks, the largest to try, got {value!r}")
            most = int(value)
            counts = [1 << n for n in range(most.bit_length()) if 1 << n <= most]
            return counts + [most] * (counts[-1] != most), at, found[2] is not None
    raise Nothing(f"{words[0]} has no --nproc-per-node N before the program: N is the largest number of ranks to try")


def with_ranks(words: Sequence[str], at: int, is_inside: bool, ranks: int) -> list[str]:
    name = words[at].partition("=")[0]
    return [*words[:at], f"{name}={ranks}", *words[at + (1 if is_inside else 2) :]]


@guarded
def run(options: argparse.Namespace) -> int:
    words = words_of(options.after, "scale")
    if not (0 < options.seconds < 1e9 and 0 < options.start_seconds < 1e9) or (
        options.tokens is not None and options.tokens < 1
    ):
        raise Nothing("--seconds, --start-seconds and --tokens must be above 0")
    counts, at, is_inside = counts_of(words)
    found: list[Speed] = []
    for ranks in counts:
        found.append(_measure(with_ranks(words, at, is_inside, ranks), ranks, options, found[0] if found else None))
        if not options.json:
            _show(found, options.tokens)
    if options.json:
        show(json.dumps({"ok": True, "counts": [dataclasses.asdict(each) for each in found]}, indent=2))
    return 0


def _measure(words: Sequence[str], ranks: int, options: argparse.Namespace, one: Speed | None) -> Speed:
    with tempfile.TemporaryDirectory(prefix="sw-scale-") as name:
        folder, begun_s, first_s = Path(name), time.monotonic(), 0.0

        def is_over() -> bool:
            nonlocal first_s
            if not first_s and any(each.head.steps > _WARM for each in accounts_of(folder)[0]):
                first_s = time.monotonic()
            now_s = time.monotonic()
            return now_s - first_s > options.seconds if first_s else now_s - begun_s > options.start_seconds

        with open(folder / "log", "w+b") as log:
            code = run_child(words, {RUN_FOLDER: name}, is_over, log)
            log.seek(0)
            printed = log.read().decode(errors="replace").strip().splitlines()
        found = accounts_of(folder)[0]
    lowest = found[0].rows[_WARM:] if found else []
    if code or not lowest or lowest[-1].ended_ns <= lowest[0].begun_ns:
        how = f"after {options.start_seconds:g} s" if code is None else f"with code {code}"
        errors = [line for line in printed if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
        raise Nothing(
            f"{ranks} rank{'s' * (ranks > 1)} ended {how}, {len(lowest)} steps after the first {_WARM} of a module that sw.wrap returned"
            f"{f'; the first error: {errors[0]}' if errors else ''}"
        )
    rate = len(lowest) / ((lowest[-1].ended_ns - lowest[0].begun_ns) * 1e-9)
    efficiency = rate / one.steps_per_s if one else 1.0
    return Speed(ranks, len(lowest), rate, efficiency, _why(found) if efficiency < _LEAST else [])


def _why(found: Sequence[RankOfRun]) -> list[str]:
    """Return what the account says of a count that scales badly."""
    rows = found[0].rows[_WARM:]
    said = [verdict.line(rows, None, None, None)]
    own = {each.head.rank: {row.step: row.own_ns for row in each.rows} for each in found}
    steps = sorted(set.intersection(*map(set, own.values())))
    for rank, (ratio, _) in verdict.slow_ranks({r: [each[s] for s in steps] for r, each in own.items()}).items():
        said.append(f"rank {rank} is slow: its own time is {ratio:.2f} times that of the others")
    if verdict.bound(rows)[0] == "data":
        said.append(verdict.DATA_REMEDY)
    cores = len(os.sched_getaffinity(0))
    if len(found) > cores:
        said.append(f"{len(found)} ranks share {cores} cores")
    return said


def _show(found: Sequence[Speed], tokens: int | None) -> None:
    """Print the newest row, below the heads if it is the first."""
    rows = [["ranks", "steps/s", *(["tokens/s"] if tokens else []), "efficiency", ""]]
    for each in found:
        rate = [f"{each.steps_per_s * each.ranks * tokens:,.0f}"] if tokens else []
        rows.append([str(each.ranks), f"{each.steps_per_s:.3g}", *rate, f"{100 * each.efficiency:.0f} %", ""])
    lines = columns(rows, range(len(rows[0])))
    for line in lines if len(found) == 1 else lines[-1:]:
        show(line)
    for said in found[-1].account:
        show(printable(f"  {said}"))
