"""`shardwright why`: what each rank of a job does, from the accounts of its ranks and from /proc.

Nothing is asked of the ranks, so it works on ranks that hold the GIL, are stopped, or have died. Stacks come from py-spy if it is
installed, else from the signal that the engine registered for them, which C code answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.comm.account import STACKS, folders, is_running
from shardwright.observe.rings import AccountError, AccountFile, Head, Operation, Row

from .flight_recorder import write_traces
from .report import Nothing, guarded, print_report

EPILOG = """Examples:
  shardwright why                   the one job of this user on this host, else its last one
  shardwright why pid-4711          a job by its name; also the number of a rank's or the launcher's process
  shardwright why runs/a/account/run-7    a folder, for example of a dead job on another host

Exit codes: 0 the ranks are shown, 2 there is no such job."""
#: a wait turns every 20 ms; the clock may be late
_FRESH_NS = 2_000_000_000
#: a wait for a rank by its number in the job
_OF_JOB = 2**32 - 1
_STACK_S, _SPY_S = 2.0, 10.0
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or device",
    "R": "running",
    "S": "sleeping",
}
#: running jobs that an error names
_SHOWN = 8
_ELSEWHERE = "on another host"
#: major page faults a second that hold a rank, and the seconds in which they are counted
_SWAPS, _FAULTS_S = 50, 0.5
_PHASES = {"data": "between two steps", "save": "in a save"}


@dataclasses.dataclass
class Rank:
    """A rank as its account shows it. `waits`: it is in a wait for peers; `state`: of its process, "gone" if it has ended."""

    path: Path
    head: Head
    operations: list[Operation]
    rows: list[Row]
    state: str
    now_ns: int
    groups: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)
    stack: list[str] = dataclasses.field(default_factory=list)
    major_faults: float = 0.0  # a second, while this command looked

    @property
    def number(self) -> int:
        return self.head.rank

    @property
    def name(self) -> str:
        return f"rank {self.head.rank} (pid {self.head.pid} on host {self.head.host})"

    @property
    def last_ns(self) -> int:
        """Return the time of the last thing that it noted."""
        head = self.head
        ops = [max(each.posted_ns, each.done_ns) for each in self.operations[-1:]]
        return max([head.clock_ns, head.phase_begun_ns, head.wait_turn_ns, head.call_begun_ns, head.reason_ns, *ops])

    @property
    def waits(self) -> bool:
        if not self.open_operations:  # a save waits for its writers, and looks ten times a second
            return self.head.phase == "save" and self.now_ns - self.head.wait_turn_ns < _FRESH_NS // 4
        is_last = self.head.wait_turn_ns > 0 and self.last_ns - self.head.wait_turn_ns < _FRESH_NS // 4
        return is_last and (self.state == "gone" or self.now_ns - self.head.wait_turn_ns < _FRESH_NS)

    @property
    def awaited(self) -> int:
        """Return the rank that its last wait is for, by its number in the job; -1 if it is not known."""
        number, group = self.head.wait_rank, self.head.wait_group
        ranks: Sequence[int] = self.groups[group - 1][1] if 0 < group <= len(self.groups) else ()
        if group == _OF_JOB or not self.groups:
            ranks = range(self.head.world_size)
        elif group == 0 and len(self.groups) == 1:
            ranks = self.groups[0][1]
        return ranks[number] if 0 <= number < len(ranks) else -1

    @property
    def waited_s(self) -> float:
        return (max(self.now_ns, self.head.wait_turn_ns) - self.head.wait_begun_ns) * 1e-9

    @property
    def reason(self) -> str:
        """Return the error that ended its communicator, unless it has gone on since."""
        head = self.head
        return head.reason if head.reason_ns >= head.phase_begun_ns or self.state == "gone" else ""

    @property
    def operation(self) -> str:
        """Return the collective that it is in, "" for none."""
        if not self.open_operations:
            return ""
        first = self.open_operations[0]
        ranks = self.groups[first.group - 1][1] if 0 < first.group <= len(self.groups) else []
        of = f" of ranks {', '.join(map(str, ranks))}" if 0 < len(ranks) < self.head.world_size else ""
        return f"{first.name}{of}"

    @property
    def open_operations(self) -> list[Operation]:
        """Return the collectives of which this rank has posted its part, and some other rank has not."""
        return [each for each in self.operations if not each.is_done]

    @property
    def place(self) -> str:
        """Return what part of the program it is in."""
        head = self.head
        inside = head.call or (
            _PHASES.get(head.phase) or f"in its {head.phase}" if head.steps else "before its first step"
        )
        return f"in {inside}" if head.call else inside

    def as_dict(self) -> dict[str, Any]:
        head = self.head
        return {
            **{
                "rank": head.rank,
                "pid": head.pid,
                "host": head.host,
                "state": self.state,
                "step": head.steps,
                "phase": head.phase,
            },
            **{"call": head.call, "waits": self.waits, "waited_s": round(self.waited_s, 3) if self.waits else 0.0},
            **{"collective": self.operation, "awaited_rank": self.awaited if self.waits else None},
            **{"reason": self.reason, "stack": self.stack},
        }

    def line(self) -> str:
        head = self.head
        doing = f"waits {self.waited_s:.1f} s in {self.operation or 'a wait'} for {rank_text(self.awaited)}"
        return f"rank {head.rank}  pid {head.pid}  {self.state}  step {head.steps}  {self.place}  {doing if self.waits else ''}".rstrip()


def rank_text(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "peers"


def _list(ranks: Sequence[Rank | int]) -> str:
    numbers = [each if isinstance(each, int) else each.number for each in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:16]))}{', ...' if len(numbers) > 16 else ''}"


# ---------------------------------------------------------------- finding a job


def job_folder(job: str | None) -> Path:
    """Return the folder of a job. Nothing, with a sentence, if there is none, or several."""
    if job is not None and os.path.isdir(job):
        return _checked(Path(job))
    jobs = [each for folder in folders() if _is_readable(folder) for each in folder.iterdir() if each.is_dir()]
    if job is not None:
        found = [
            each
            for each in jobs
            if job in (each.name, each.name.removeprefix("pid-")) or list(each.glob(f"rank-*.{job}"))
        ]
        if (
            not found
            and job.isdigit()
            and os.path.exists(f"/proc/{job}")
            and os.stat(f"/proc/{job}").st_uid != os.getuid()
        ):
            raise Nothing(f"process {job} belongs to another user: run shardwright why as that user")
        if not found:
            raise Nothing(f"there is no account of a job {job!r} in {', '.join(map(str, folders()))}")
        return _checked(found[0])
    running = {each: ranks for each in jobs if (ranks := _running(each))}
    live = sorted(running, key=lambda each: running[each][0].head.unix_ns, reverse=True)
    if len(live) > 1:
        shown = ", ".join(f"{each.name} ({_said(running[each])})" for each in live[:_SHOWN])
        older = f", or one of {len(live) - _SHOWN} older jobs" if len(live) > _SHOWN else ""
        raise Nothing(f"several jobs run here, and the name of one is needed: {shown}{older}")
    dead = sorted((each for each in jobs if list(each.glob("rank-*"))), key=lambda each: each.stat().st_mtime)
    if not live and not dead:
        raise Nothing(f"no job of this user runs here: there is no account in {', '.join(map(str, folders()))}")
    return (live or dead)[-1]


def _running(folder: Path) -> list[Rank]:
    """Return the ranks of a job that run on this host: of others an account does not tell. None of a version that is not read."""
    try:
        return [rank for rank in read_ranks(folder) if rank.state not in ("gone", _ELSEWHERE)]
    except Nothing:
        return []


def _said(ranks: Sequence[Rank]) -> str:
    """Return what tells one job from others: its program, ranks and step."""
    head = ranks[0].head
    try:
        words = Path(f"/proc/{head.pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it has ended
        words = []
    program = next((os.path.basename(each) for each in words if each.endswith(".py")), "")
    count = f"{head.world_size} rank{'s' if head.world_size > 1 else ''}"
    return f"{program + ', ' if program else ''}{count}, step {head.steps}"


def _is_readable(folder: Path) -> bool:
    """Return True for a folder that this user can read and no other one can have filled."""
    return (
        folder.is_dir()
        and os.access(folder, os.R_OK | os.X_OK)
        and folder.stat().st_uid == os.getuid()
        and not folder.stat().st_mode & 0o022
    )


def _checked(folder: Path) -> Path:
    if not _is_readable(folder):
        raise Nothing(f"{folder} belongs to another user: run shardwright why as that user")
    if not list(folder.glob("rank-*")):
        raise Nothing(f"{folder} has no account of a rank: the job has ended in order, or writes elsewhere")
    return folder


def read_ranks(folder: Path) -> list[Rank]:
    """Return the ranks by number: of each the newest account."""
    found: dict[int, Rank] = {}
    for path in folder.glob("rank-*"):
        if path.suffix == ".stacks":
            continue
        try:
            file = AccountFile(path)
        except FileNotFoundError:  # it has ended in order meanwhile
            continue
        except (AccountError, PermissionError) as error:
            raise Nothing(str(error)) from None
        head = file.head()
        rank = Rank(
            path, head, file.operations(200), file.rows(10), _state_of(head), time.monotonic_ns(), file.groups()
        )
        if head.rank not in found or found[head.rank].head.unix_ns < head.unix_ns:
            found[head.rank] = rank
        file.close()
    ended_ns = max((each.last_ns for each in found.values() if each.state == "gone"), default=0)
    for rank in found.values():
        rank.now_ns = ended_ns if rank.state == "gone" else rank.now_ns
    newest = max(found.values(), key=lambda each: each.head.unix_ns, default=None)
    return [  # ranks that an earlier start of the job had more are no part of this one
        found[number]
        for number in sorted(found)
        if newest is None or 0 in (newest.head.group, group := found[number].head.group) or group == newest.head.group
    ]


def _state_of(head: Head) -> str:
    if head.host != socket.gethostname():
        return _ELSEWHERE
    if not is_running(head.pid, head.start_ticks):
        return "gone"
    try:
        letter = Path(f"/proc/{head.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return _STATES.get(letter, "running")


def count_faults(ranks: Sequence[Rank]) -> None:
    """Count for half a second the pages that ranks which hold others read from disk."""
    held = [each for each in ranks if not each.waits and each.state not in ("gone", _ELSEWHERE)]
    if not held or len(held) == len(ranks):
        return
    before, begun_s = [_major_faults(each.head.pid) for each in held], time.monotonic()
    time.sleep(_FAULTS_S)
    for rank, count in zip(held, before):
        rank.major_faults = (_major_faults(rank.head.pid) - count) / (time.monotonic() - begun_s)


def _major_faults(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[9])
    except OSError:
        return 0


def _killed_for_memory(rank: Rank) -> str:
    """Return the kernel's word on a process that it killed for want of memory, "" if it has none or does not tell it."""
    try:
        kernel = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_STACK_S, errors="replace").stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    is_named = rank.head.host == socket.gethostname() and re.search(rf"Killed process {rank.head.pid}\b", kernel)
    return ": the kernel killed it for want of memory" if is_named else ""


# ---------------------------------------------------------------- stacks


def take_stack(rank: Rank) -> list[str]:
    """Return the stack of a rank's main thread, the innermost frame first; empty if it cannot be read."""
    if rank.state in ("gone", _ELSEWHERE):
        return []
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if spy is not None:
        command = [spy, "dump", "--nonblocking", "--pid", str(rank.head.pid)]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=True).stdout
            threads = re.split(r"^Thread ", text, flags=re.M)[1:]
            main = next(
                (each for each in threads if "MainThread" in each.partition("\n")[0]), threads[0] if threads else ""
            )
            return [f"{m[2]} in {m[1]}" for m in re.finditer(r"^    (\S+) \((.*:\d+)\)$", main, re.M)]
        except (OSError, subprocess.SubprocessError):
            pass
    return _ask_for_stack(rank)


def _ask_for_stack(rank: Rank) -> list[str]:
    """Send the signal that the engine registered, if the process has a handler for it and is not stopped."""
    number, path = rank.head.stack_signal, Path(f"{rank.path}.stacks")
    try:
        status = Path(f"/proc/{rank.head.pid}/status").read_text()
        caught = int(next(each for each in status.splitlines() if each.startswith("SigCgt:")).split()[1], 16)
        is_its_own = number == STACKS and os.stat(f"/proc/{rank.head.pid}").st_uid == path.stat().st_uid
        if not is_its_own or not caught >> (number - 1) & 1 or rank.state.startswith("stopped"):
            return []
        before = path.stat().st_size
        os.kill(rank.head.pid, number)
        end_s, text, last = time.monotonic() + _STACK_S, "", None
        while time.monotonic() < end_s and (not text or text != last):  # until it has written all
            time.sleep(0.05)
            text, last = path.read_text()[before:], text
    except (OSError, StopIteration):
        return []
    blocks = re.split(r"^(?=Current thread|Thread )", text, flags=re.M)
    main = next((each for each in blocks if each.startswith("Current thread")), "")
    return [f"{m[1]}:{m[2]} in {m[3]}" for m in re.finditer(r'^  File "(.*)", line (\d+) in (.*)$', main, re.M)]


# ---------------------------------------------------------------- the cause


def cause(ranks: Sequence[Rank]) -> tuple[str, str]:
    """Return the likely cause in one sentence, and what to do, which may be empty."""
    waiting = [each for each in ranks if each.waits]
    held = f"; {_for_whom(waiting)}" if waiting else ""
    for rank in sorted((each for each in ranks if each.reason), key=lambda each: each.head.reason_ns):
        if "died or exited" not in rank.reason or all(each.state == "gone" for each in ranks):
            return f"rank {rank.number} ended with: {rank.reason}", ""
    gone = [each for each in ranks if each.state == "gone" and not each.head.ended]
    if gone and len(gone) < len(ranks):
        last = gone[0]
        return (
            f"{last.name} has died {last.place}, without an error of the engine{_killed_for_memory(last)}{held}",
            "it was killed, or ended by os._exit(): look at the launcher's report and log, and at dmesg | grep -i oom",
        )
    for rank in ranks:
        if rank.state.startswith("stopped"):
            remedy = (
                f"kill -CONT {rank.head.pid} lets it go on"
                if rank.state == _STATES["T"]
                else "let the debugger continue it"
            )
            return f"{rank.name} is {rank.state}, {rank.place}{held}", remedy
    present = {each.number for each in ranks}
    absent = [number for number in range(ranks[0].head.world_size) if number not in present]
    joining = [each for each in ranks if each.head.steps == 0 and not each.operations and each.head.call]
    if absent and joining:
        return (
            f"{_list(absent)} of {ranks[0].head.world_size} did not come: no account on this host, and {_list(joining)} "
            f"{'are' if len(joining) > 1 else 'is'} {joining[0].place}",
            "look at its log and host, and whether all ranks have the same address, port and world size",
        )
    late = [each for each in ranks if not each.waits and each.state != "gone"]
    if gone and len(gone) == len(ranks):
        late = [each for each in ranks if not each.waits]
    if not waiting:
        return _no_wait(ranks), ""
    if not late:
        names = {each.number: each.operation for each in waiting}
        if len(set(names.values())) > 1:
            return (
                "ranks wait in different collectives: "
                + "; ".join(f"rank {n} in {name}" for n, name in list(names.items())[:8]),
                "every rank must make the same collective calls in the same order",
            )
        other = sorted({each.awaited for each in waiting} - present - {-1})
        return (
            f"all ranks here wait in {waiting[0].operation} for {f'{_list(other)} of another host' if other else 'one another'}",
            "look at that host and its network: shardwright why shows it there" if other else "",
        )
    awaited = {each.awaited for each in waiting}
    return _late(sorted(late, key=lambda each: each.number not in awaited), waiting)


def _for_whom(waiting: Sequence[Rank]) -> str:
    longest = max(waiting, key=lambda each: each.waited_s)
    have = "have" if len(waiting) > 1 else "has"
    return f"{_list(waiting)} {have} waited {longest.waited_s:.1f} s in {longest.operation or longest.place.removeprefix('in ')}"


def _no_wait(ranks: Sequence[Rank]) -> str:
    steps = [each.head.steps for each in ranks]
    if all(each.state == "gone" for each in ranks):
        return f"all ranks have ended without an error of the engine, at step {min(steps)}, {ranks[0].place}"
    rows = [row for each in ranks for row in each.rows]
    took = f", the last steps took {1e-6 * sum(row.total_ns for row in rows) / len(rows):.3g} ms" if rows else ""
    idle_s = min((each.now_ns - each.last_ns) * 1e-9 for each in ranks)
    return f"no rank waits for another: step {min(steps)}{took}, the last event {idle_s:.1f} s ago, {_list(ranks[:1])} {ranks[0].place}"


def _late(late: Sequence[Rank], waiting: Sequence[Rank]) -> tuple[str, str]:
    rank = late[0]
    text = "\n".join(rank.stack)
    at = f" at {rank.stack[0]}" if rank.stack else ""
    others = f" (and {_list(late[1:])})" if len(late) > 1 else ""
    tail = f"{others}; {_for_whom(waiting)}"
    is_or_was = "was" if rank.state == "gone" else "is"
    if rank.head.phase == "save":
        return (
            f"{rank.name} {is_or_was} in a save, {rank.place}{at}{tail}",
            "a save waits for the disk: look at its free space and speed",
        )
    if "torch/utils/data/" in text:
        return (
            f"{rank.name} waits for its data loader{at}{tail}",
            "look at the workers of its DataLoader and at its storage",
        )
    if rank.major_faults >= _SWAPS:
        return (
            f"{rank.name} swaps or reads mapped files: {rank.major_faults:,.0f} major page faults a second, {rank.place}{at}{tail}",
            "look at free memory (vmstat 1): a rank that swaps holds all others",
        )
    if rank.state == _STATES["D"]:
        return f"{rank.name} waits for a disk or device, {rank.place}{at}{tail}", ""
    if rank.state == "gone":
        return f"{rank.name} was {rank.place} when the ranks ended{tail}", ""
    own = "computes" if rank.state == "running" else "sleeps or waits in the program's own code"
    return (
        f"{rank.name} {own}, {rank.place}{at}{tail}",
        "every rank must come to each collective call: is this rank in another branch, an evaluation, a download?",
    )


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="a job's name, the number of a process of it, or a folder of accounts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--fr", metavar="DIR", help="write torch's flight-recorder traces of all ranks into this folder"
    )
    parser.add_argument("--no-stacks", action="store_true", help="send no signal, and read no process' memory")


@guarded
def run(options: argparse.Namespace) -> int:
    folder = job_folder(options.job)
    ranks = read_ranks(folder)
    if not ranks:
        raise Nothing(f"{folder} has no account of a rank any longer: the job has ended in order")
    count_faults(ranks)
    for rank in () if options.no_stacks else ranks:
        rank.stack = take_stack(rank)
    sentence, remedy = cause(ranks)
    shown = [each.as_dict() for each in ranks]
    lines = [sentence, *([f"  {remedy}"] if remedy else []), ""]
    if options.fr:
        lines += [write_traces(Path(options.fr), {each.number: each.path for each in ranks}), ""]
    lines += [f"job {folder.name}, {len(ranks)} of {ranks[0].head.world_size} ranks", *(each.line() for each in ranks)]
    for rank in ranks:
        if rank.stack:
            lines += ["", f"stack of rank {rank.number}, the innermost call first:"]
            lines += [f"  {each}" for each in rank.stack[:30]]
    print_report(options, {"ok": True, "cause": sentence, "remedy": remedy, "job": folder.name, "ranks": shown}, lines)
    return 0
