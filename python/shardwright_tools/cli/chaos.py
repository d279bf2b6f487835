"""`shardwright chaos --plan FILE -- COMMAND`: run a training job under injected faults and report the cost of each.

shardwright chaos --plan plan.toml -- torchrun --nproc-per-node 3 --max-restarts 9 train.py --folder /tmp/run-{run}

The plan lists faults by rank and step, asks for random faults drawn from a seed, or both:

    seed = 1
    random = { count = 100, ranks = 3, steps = 200, kinds = ["kill", "stop", "slow"], seconds = 2.0 }
    [[fault]]
    kind = "kill"
    rank = 1
    step = 7

The job must call Checkpointer.restore() at its start and save() in each step: these calls tell which step runs. A command
that contains {run} runs twice, first without faults ({run} becomes "reference"), then with them ("faults"). The two runs use
different folders, and their final parameters are compared bit for bit. The command must allow as many restarts as the
plan has faults.

"Detected" is the time from the fault to the first error that a rank reports. It is empty if the launcher ended the ranks
before any reported one. "Restarted" is the time from the fault to the first step after the restart. Both are empty if
another fault fired first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ..chaos import KINDS, MODULE, OBSERVERS, PLAN_NAME, SOCKET_NAME, VARIABLE, Fault, Plan, mark_of, read_plan
from ..interrupts import delayed

DESCRIPTION = f"{__doc__}\nKinds of faults:\n" + "\n".join(f"  {kind:6} {what}" for kind, what in KINDS.items())
EPILOG = "Exit code 0: the job succeeded, and its final parameters equal the reference run's if there was one."
_RUN = "{run}"
_POLL_S = 0.05
_END_S = 40.0  # longer than the 30 s that torchrun gives its workers
_MESSAGE_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", required=True, help="a .toml or .json file")
    parser.add_argument("--report", help="also write the report to this file as JSON")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of each run (default: %(default)s)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- torchrun ... program.py")


def run(options: argparse.Namespace) -> int:
    """Run the job and print the report. Return 0 if the job succeeded."""
    words = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not words:
        return _refuse("no command given: pass one, as in `shardwright chaos --plan FILE -- torchrun ... train.py`")
    try:
        plan = read_plan(options.plan)
    except ValueError as error:
        return _refuse(str(error))
    if shutil.which(words[0]) is None:  # before the first run, which may take hours
        return _refuse(f"the command {words[0]!r} was not found, or is not executable")
    if options.report and not os.path.isdir(os.path.dirname(os.path.abspath(options.report))):
        return _refuse(f"--report {options.report}: there is no folder to write it to: make it first")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinding ends the run
    reference = None
    if any(_RUN in word for word in words):
        reference = Run(Plan(()), words, "reference").watch(options.timeout)
        if reference.code:
            return _refuse(f"the command failed without faults: exit code {reference.code}")
    report = report_of(plan, Run(plan, words, "faults").watch(options.timeout), reference)
    if options.report:
        with open(options.report, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    print("\n".join(lines_of(report)))
    return 0 if report["code"] == 0 and report["state_equal"] is not False else 1


def _refuse(sentence: str) -> int:
    print(f"shardwright chaos: {sentence}", file=sys.stderr)
    return 2


@dataclasses.dataclass
class Result:
    """The outcome of one run. `events`: the ranks' reports in order of time. `code`: None after the timeout."""

    events: list[dict[str, Any]]
    code: int | None
    seconds: float
    marks: frozenset[int] = frozenset()  # numbers of the faults that fired; a killed rank may report none


class Run:
    """One run of the command `words`, in which `name` replaces "{run}"."""

    def __init__(self, plan: Plan, words: Sequence[str], name: str) -> None:
        self._plan, self._words, self._name = plan, [word.replace(_RUN, name) for word in words], name
        self._events: list[dict[str, Any]] = []
        self._pidfds: dict[int, int] = {}
        self._later: list[tuple[float, Any]] = []  # (time, action)

    def watch(self, timeout_s: float) -> Result:
        with tempfile.TemporaryDirectory(prefix="sw-chaos-") as folder, contextlib.ExitStack() as closing:
            with open(os.path.join(folder, PLAN_NAME), "w", encoding="utf-8") as file:
                json.dump([dataclasses.asdict(fault) for fault in self._plan.faults], file)
            listener = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            listener.bind(os.path.join(folder, SOCKET_NAME))
            listener.setblocking(False)
            begin_s = time.monotonic()
            observers = ",".join(filter(None, [os.environ.get(OBSERVERS), MODULE]))
            process: subprocess.Popen[bytes] | None = None
            try:
                with delayed():
                    process = subprocess.Popen(self._words, env={**os.environ, VARIABLE: folder, OBSERVERS: observers})
                while process.poll() is None and time.monotonic() - begin_s < timeout_s:
                    self._receive(listener)
                code = process.poll()
            finally:
                if process is not None:
                    self._finish(process)
                self._receive(listener)
                for _, act in self._later:
                    act()
                for pidfd in self._pidfds.values():
                    os.close(pidfd)
            marks = frozenset(n for n in range(len(self._plan.faults)) if os.path.exists(mark_of(folder, n)))
        ordered = sorted(self._events, key=lambda event: event["time"])
        return Result(ordered, code, time.monotonic() - begin_s, marks)

    def _receive(self, listener: socket.socket) -> None:
        select.select([listener], [], [], _POLL_S)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(json.loads(listener.recv(_MESSAGE_BYTES)))
        now_s = time.monotonic()
        due = [act for at_s, act in self._later if at_s <= now_s]
        self._later = [each for each in self._later if each[0] > now_s]
        for act in due:
            act()

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        pid = event["pid"]
        if event["event"] == "start":
            self._forget_ended(pid)
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[pid] = os.pidfd_open(pid)
        elif event["event"] == "fault" and event["kind"] == "stop":
            self._later.append((time.monotonic() + event["seconds"], lambda: self._signal(pid, signal.SIGCONT)))
        elif event["event"] == "fault" and event["kind"] == "cut":
            down, up = (each.replace("{rank}", str(event["rank"])) for each in self._plan.link)
            subprocess.run(shlex.split(down), check=False)
            restore = functools.partial(subprocess.run, shlex.split(up), check=False)
            self._later.append((time.monotonic() + event["seconds"], restore))

    def _forget_ended(self, begins: int) -> None:
        """Close the pidfds of ended ranks, and a stale pidfd under the pid `begins` of a new rank."""
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        for pid, pidfd in list(self._pidfds.items()):
            if pidfd in ended or pid == begins:
                os.close(self._pidfds.pop(pid))

    def _signal(self, pid: int, number: int) -> None:
        if pid in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[pid], number)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Terminate the command, then kill each rank that it left running, through its pidfd."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self._pidfds:
            self._signal(pid, signal.SIGKILL)


def report_of(plan: Plan, result: Result, reference: Result | None) -> dict[str, Any]:
    """Return the report: the outcome of the run and a row for each fault."""
    rows = []
    for number, fault in enumerate(plan.faults):
        fired = next((e for e in result.events if e["event"] == "fault" and e["number"] == number), None)
        rows.append(_row(fault, fired, result.events))
        rows[-1]["fired"] = fired is not None or number in result.marks
    equal = None if reference is None or result.code is None else _digests(result) == _digests(reference) != {}
    starts = {(e["rank"], e["attempt"]) for e in result.events if e["event"] == "start"}
    return {
        "code": result.code,
        "seconds": round(result.seconds, 3),
        "reference_seconds": None if reference is None else round(reference.seconds, 3),
        "starts": max((sum(rank == own for rank, _ in starts) for own, _ in starts), default=0),
        "state_equal": equal,
        "faults": rows,
    }


def _row(fault: Fault, fired: dict[str, Any] | None, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": fault.kind, "rank": fault.rank, "step": fault.step, "fired": fired is not None}
    if fired is None:
        return row
    after = [event for event in events if event["time"] > fired["time"]]
    later = [event for event in events if event["event"] == "fault" and event["time"] > fired["time"]]
    until = later[0]["time"] if later else float("inf")
    restart = next((event for event in after if event["event"] == "start" and event["time"] < until), None)
    detected = next((event for event in after if event["event"] == "error"), None)
    if detected is not None and detected["time"] < (until if restart is None else restart["time"]):
        row |= {
            "detected_s": round(detected["time"] - fired["time"], 3),
            "by": detected["rank"],
            "error": detected["message"],
        }
    if restart is not None:
        back = next((e for e in after if e["event"] == "restored" and e["time"] > restart["time"]), None)
        first = next((e for e in after if e["event"] == "stepping" and e["time"] > restart["time"]), None)
        before = [e["step"] + 1 for e in events if e["event"] == "step" and e["time"] <= restart["time"]]
        row["started_s"] = round(restart["time"] - fired["time"], 3)
        if first is not None:
            row["restarted_s"] = round(first["time"] - fired["time"], 3)
        if back is not None:
            last = [e for e in events if e["event"] in ("step", "restored") and e["time"] <= fired["time"]]
            reached = max((e["step"] + (e["event"] == "step") for e in last[-8:]), default=0) if before else 0
            row["steps_lost"] = max(0, reached - back["step"])
    return row


def _digests(result: Result) -> dict[int, Any]:
    return {event["rank"]: event["digest"] for event in result.events if event["event"] == "end"}


def lines_of(report: dict[str, Any]) -> list[str]:
    lines = [f"{'fault':6} {'rank':>4} {'step':>6}  {'detected':>9} {'restarted':>10} {'steps lost':>10}"]
    for row in report["faults"]:
        cells = [f"{row[key]:.2f} s" if key in row else "-" for key in ("detected_s", "restarted_s")]
        text = f"{cells[0]:>9} {cells[1]:>10} {row.get('steps_lost', '-'):>10}"
        text = text if row["fired"] else "did not happen: the job never reached the step"
        lines.append(f"{row['kind']:6} {row['rank']:4} {row['step']:6}  {text}")
    code = "stopped at the timeout" if report["code"] is None else f"exit code {report['code']}"
    lines.append(f"{code}; {report['starts']} starts; {report['seconds']:.1f} s")
    why = "the command did not end" if report["code"] is None else "the command does not contain {run}"
    verdict = {None: f"not compared: {why}", True: "equal", False: "NOT EQUAL"}[report["state_equal"]]
    lines.append(f"final parameters: {verdict}")
    return lines
