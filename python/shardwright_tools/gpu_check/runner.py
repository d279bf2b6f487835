"""Runs the parts in order, each under its time limit, and writes the report after each run."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..interrupts import delayed
from .plan import Part, Run, count_kept, limit_s, parts
from .report import BAD, REPORT, Row, least, row, table, write

_POLL_S = 0.05
#: seconds between the request to end a process and its kill
_GRACE_S = 2.0
#: what compute-sanitizer says where it cannot work at all
_REFUSALS = ("Device not supported", "not supported on this", "Failed to initialize", "Unable to find the injection")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Return 0: no row is wrong; 1: one is wrong, failed or cut; 2: wrong usage; 3: no GPU."""
    names = [part.name for part in parts()]
    about = "Check and time a GPU: a table and two reports."
    parser = argparse.ArgumentParser(prog="shardwright gpu-check", description=about)
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="where gpu-report.json and .html go")
    listed = f"of {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=listed)
    parser.add_argument("--within", type=_seconds, metavar="SECONDS", help="end by then: the last parts get less time")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="run what the report in --to lacks")
    parser.add_argument("--quick", action="store_true", help="small sizes, whose times mean nothing")
    parser.add_argument("--place", default="place:gpu", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    report = options.to / REPORT
    if options.goes_on and not report.exists():
        parser.error(f"--continue needs {report}, which an earlier check writes")
    before = json.loads(report.read_text()) if options.goes_on else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends started processes, as Ctrl-C does
    options.to.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts(is_quick=options.quick) if part.name in options.only]
    rows = run_parts(chosen, options.to, options.place, options.within, before)
    print(table(rows))
    if any(each["status"] in BAD for each in rows):
        return 1
    return 3 if all(each["status"] == "skipped" for each in rows) else 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return value


def run_parts(
    chosen: Sequence[Part],
    to: Path,
    place: str = "place:gpu",
    within_s: float | None = None,
    before: dict[str, Any] | None = None,
) -> list[Row]:
    """Run the parts that `before`, an earlier report, lacks. Return all rows, which the reports in `to` hold so far."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    about = {"begun": now, "host": platform.node(), "system": platform.platform(), "python": platform.python_version()}
    rows: list[Row] = [each for each in (before or {}).get("rows", ()) if each["status"] != "cut"]
    done = {part.name for part in chosen if set(part.cases) <= {r["case"] for r in rows if r["part"] == part.name}}
    chosen = [part for part in chosen if part.name not in done]
    left = {part.name for part in chosen}
    rows = [each for each in rows if each["part"] not in left]
    write(to, about, rows)
    end = time.monotonic() + (math.inf if within_s is None else within_s)
    kept = chosen[: count_kept(chosen, math.inf if within_s is None else within_s)]
    for k, part in enumerate(chosen):
        most_s = limit_s(kept[k:], end - time.monotonic()) if k < len(kept) else 0.0
        rows += _rows_of_part(part, most_s, to, place, lambda found: write(to, about, [*rows, *found]))
        write(to, about, rows)
    return rows


def _rows_of_part(part: Part, most_s: float, to: Path, place: str, publish: Callable[[list[Row]], None]) -> list[Row]:
    """Run one part and return its rows. Calls publish(rows so far) as rows arrive."""
    end, rows = time.monotonic() + most_s, list[Row]()

    def named(found: Sequence[Row]) -> list[Row]:
        return [{"part": part.name, **each} for each in found]

    for run in part.runs:
        shown = f"{', '.join(run.cases[:4])}{' ...' if len(run.cases) > 4 else ''}"
        print(f"{part.name}: {shown}" if most_s else f"{part.name}: no time is left for it", flush=True)
        found = rows_of(run, end - time.monotonic(), to, place, lambda found: publish(rows + named(found)))
        rows += named(found)
        publish(rows)
    return rows + named(compare(part, rows))


def compare(part: Part, rows: Sequence[Row]) -> list[Row]:
    values = {each["case"]: each["value"] for each in rows if each["part"] == part.name}
    made = []
    for case, peer, goal in part.comparisons:
        title = f"{case} beside {peer}"
        if values.get(case) and values.get(peer):
            made.append(least(title, values[case] / values[peer], "times as fast", goal))
        else:
            made.append(row(title, "skipped", note="one of them has no figure"))
    return made


def _read(folder: Path) -> list[Row]:
    """Return the rows that a run has written. Ignores a last line that is incomplete."""
    file = folder / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rows_of(run: Run, limit_s: float, to: Path, place: str, publish: Callable[[list[Row]], None]) -> list[Row]:
    """Run the processes of one run and return a row for each case, also after a failure. Call publish(rows so far)."""
    if run.prefix and shutil.which(run.prefix[0]) is None:
        return [row(case, "skipped", note=f"{run.prefix[0]} is not installed") for case in run.cases]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        is_cut, codes = _processes(run, limit_s, folder, to, place, publish)
        found = _read(folder)
        skipped = folder / "skipped"
        if is_cut:
            status = "cut"
            note = f"not done within {limit_s:.0f} s" if limit_s > 0 else "no time was left; --continue runs it"
        elif skipped.exists():
            status, note = "skipped", skipped.read_text()
        else:
            status, note = "failed", _last_words(folder, codes, run)
            if run.prefix and any(each in note for each in _REFUSALS):
                status, note = "skipped", f"refused by the machine: {note}"
        there = {each["case"] for each in found}
        missing = [row(case, status, note=note) for case in run.cases if case not in there]
        expected = [-signal.SIGKILL if rank == run.dying else 0 for rank in range(run.ranks)]
        if not missing and not is_cut and codes != expected:  # it failed after its last row
            missing = [row(f"end of {run.cases[-1]}", "failed", note=_last_words(folder, codes, run))]
    return [*found, *missing]


def _processes(
    run: Run, limit_s: float, folder: Path, to: Path, place: str, publish: Callable[[list[Row]], None]
) -> tuple[bool, list[int]]:
    """Return True if the limit passed first, and the exit code of each rank."""
    end = time.monotonic() + max(limit_s, 0.0)
    environment = {**os.environ, **run.environment, "SHARDWRIGHT_GPU_CHECK_TO": str(to.resolve())}
    started: list[subprocess.Popen[bytes]] = []
    own: dict[str, Any] = {"stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
    try:
        for rank in range(run.ranks if limit_s > 0 else 0):
            spec = {"body": run.body, "rank": rank, "ranks": run.ranks, "arguments": dict(run.arguments)}
            spec |= {"folder": str(folder), "place": place}
            command = [*run.prefix, sys.executable, "-m", f"{__package__}.child", json.dumps(spec)]
            with open(folder / f"output-{rank}", "wb") as output, delayed():
                started.append(subprocess.Popen(command, stdout=output, **own))
        found = []
        while any(each.poll() is None for each in started) and time.monotonic() < end:
            time.sleep(_POLL_S)
            found, before = _read(folder), len(found)
            if len(found) > before:
                publish(found)
        is_cut = not started or any(each.poll() is None for each in started)
    finally:  # also for Ctrl-C
        _end(started)
    return is_cut, [each.returncode for each in started]


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """End the running processes and their children: each process leads its own group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = [each for each in started if each.poll() is None]
        for each in left:
            os.killpg(each.pid, sign)
        until = time.monotonic() + _GRACE_S
        while any(each.poll() is None for each in left) and time.monotonic() < until:
            time.sleep(_POLL_S)


def _last_words(folder: Path, codes: Sequence[int], run: Run) -> str:
    """Return how the first failed rank ended, and the last non-empty line of its output."""
    for rank, code in enumerate(codes):
        if code == 0 or (rank == run.dying and code == -signal.SIGKILL):
            continue
        output = (folder / f"output-{rank}").read_text(errors="replace").strip().splitlines()
        errors = [line for line in output if "error" in line.lower()] or output or [""]
        return f"rank {rank} ended with {code}: {errors[-1].strip()}"
    return "the process ended without a row"
