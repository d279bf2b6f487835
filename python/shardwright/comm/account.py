"""The file of this rank's account of steps: where it lies, and when it goes. docs/design/account.md.

The account itself is the engine's (csrc/comm/account.c); shardwright/observe reads the files.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import logging
import multiprocessing.process
import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._engine import account_end, account_fail, account_met, account_open, account_row, account_stack_signal

_logger = logging.getLogger("shardwright")

#: the variable that names the folder of a run; the account lies in its folder `account`
RUN_FOLDER = "SHARDWRIGHT_RUN_FOLDER"
#: what writes Python's stacks to a file; a real-time signal that programs seldom use
STACKS = signal.SIGRTMIN + 9
#: so many dead jobs are kept, this long
_KEPT, _KEPT_S = 16, 7 * 24 * 3600.0

#: ranks that a group in the account can name, and where an account has its host's name (csrc/comm/account.h)
_RANKS, _HOST = 1024, slice(72, 136)
#: a file of ours: its process
_FILE = re.compile(r"\.?rank-\d+\.(\d+)(?:\.stacks)?")

_file: Path | None = None
_of: tuple[int, int] | None = None
_stacks: Any = None
_met: tuple[int, str] = (0, "")  # the size and name of the group that leads this rank's account
#: files of this rank that died in earlier starts of the job, for rank 0 alone; observe/goodput.py reads and removes them
earlier: list[Path] = []
#: the runs of trackers that this job's checkpoints hold: the tracker's name and the run's id, on rank 0
tracker_runs: dict[str, str] = {}
#: True from a Checkpointer's beginning to its restore(), which tells the runs that go on
awaits_runs = False
#: steps of the training before the first one of this account
steps_before = 0


def folders() -> list[Path]:
    """Return the folders in which accounts of this user's jobs may lie, the first one first."""
    given, runtime = os.environ.get(RUN_FOLDER), os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(given).absolute() / "account"] if given else []
    if runtime and os.path.isdir(runtime):
        found.append(Path(runtime) / "shardwright")
    return [*found, Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}"]


def job_name() -> str:
    """Return the name of this rank's job, equal on the ranks of a host: the launcher's number, or its process."""
    run, job = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("SLURM_JOB_ID")
    if run != "none":
        return f"run-{''.join(c if c.isalnum() or c in '._-' else '_' for c in run)[:80]}"
    if job is not None and "SLURM_STEP_ID" in os.environ:
        return f"slurm-{job}.{os.environ['SLURM_STEP_ID']}"
    return f"pid-{os.getppid() if _of is not None and _of[1] > 1 else os.getpid()}"


def own_rank() -> int | None:
    """Return this process' rank among all; None before it met any."""
    return None if _of is None else _of[0]


def own_world_size() -> int:
    return 1 if _of is None else _of[1]


def own_file() -> Path | None:
    return _file


def go_on_from(step: int, runs: Mapping[str, str]) -> None:
    """Count steps on from a restored one, and go on with its trackers' runs, instead of those of another checkpoint."""
    global steps_before, awaits_runs
    row = account_row()
    steps_before = step - (0 if row is None else int.from_bytes(row[:8], sys.byteorder))
    tracker_runs.clear()
    tracker_runs.update(runs)
    awaits_runs = False


def state_of(pid: int, start_ticks: int) -> str:
    """Return the letter for the state of the process that started at these ticks (/proc/PID/stat), such as T; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[0] if int(fields[19]) == start_ticks and fields[0] not in "ZX" else ""


def is_running(pid: int, start_ticks: int) -> bool:
    """Return True if the process that started at these ticks still runs; a zombie does not."""
    return state_of(pid, start_ticks) != ""


def own_folder(path: Path) -> None:
    """Make a folder of mode 0700 if there is none. OSError if it is a link, another user's, or open to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{path} is not a folder of this user that no other can write to")


def begin(rank: int, world_size: int) -> None:
    """Put the account of this rank into a file, once; without one it stays in memory, which a debug line says."""
    global _of
    if _of == (rank, world_size):
        return
    is_first, _of = _of is None, (rank, world_size)
    if is_first:
        atexit.register(_end, os.getpid())
        if multiprocessing.process.parent_process() is not None:  # a forked one ends without atexit
            multiprocessing.util.Finalize(None, _end, args=(os.getpid(),), exitpriority=0)
    why = ""
    try:
        for folder in folders():
            try:
                own_folder(folder)
                _open(folder, rank, world_size)
                return
            except (OSError, MemoryError, ValueError) as error:
                why = why or str(error)
    except OSError as error:  # there is no folder for temporary files
        why = str(error)
    _logger.debug("the account of steps has no file, so `shardwright why` will not see rank %d: %s", rank, why)


def met(name: str, ranks: Sequence[int]) -> int:
    """Note a group of global ranks that this rank has joined; by the largest and newest one peers know one another's accounts.

    Returns its number in the account; 0: too many are kept.
    """
    global _met
    leads = len(ranks) >= _met[0]
    if leads:
        _met = len(ranks), name
    bits = sum(1 << rank for rank in ranks if rank < _RANKS)
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return account_met(word, bits.to_bytes(_RANKS // 8, "little"), leads)


def left(name: str) -> None:
    """Note that this rank has left a group in order: if it leads the account, no rank waits for this one any longer."""
    global _met
    if name == _met[1]:
        _met = 0, ""
        account_end()


def _open(folder: Path, rank: int, world_size: int) -> None:
    global _file
    job = folder / job_name()
    own_folder(job)
    for old in job.glob(f"rank-{rank}.*"):  # of an earlier start of this job
        pid, of = old.name.split(".")[1], old.with_suffix("") if old.suffix == ".stacks" else old
        if of == _file or (pid != str(os.getpid()) and os.path.exists(f"/proc/{pid}")):
            continue
        if of.exists() and _host_of(of) != socket.gethostname():  # its process cannot be seen here
            continue
        if rank == 0 and old.suffix != ".stacks" and pid != str(os.getpid()):
            earlier.extend({old} - set(earlier))
        else:
            old.unlink(missing_ok=True)
    path = job / f"rank-{rank}.{os.getpid()}"
    hidden = job / f".{path.name}"  # until it is whole
    hidden.unlink(missing_ok=True)
    account_open(str(hidden), rank, world_size, socket.gethostname())
    hidden.replace(path)
    if _file is not None and _file != path:
        _remove(_file)
    _file = path
    _register_stacks(path)
    if rank == 0:
        _sweep(folder)


def _register_stacks(path: Path) -> None:
    """Let a signal write the stacks of all threads beside the account: in C, so also while the GIL is held."""
    global _stacks
    if _stacks is None and signal.getsignal(STACKS) is not signal.SIG_DFL:
        return  # the program uses it
    before, _stacks = _stacks, open(f"{path}.stacks", "w", opener=_private)  # noqa: SIM115, it stays open
    faulthandler.register(STACKS, file=_stacks, all_threads=True)
    account_stack_signal(STACKS)
    if before is not None:
        before.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _sweep(folder: Path) -> None:
    """Remove what dead jobs left behind, but the newest."""
    dead = []
    for job in folder.iterdir():
        with contextlib.suppress(OSError):
            files = list(job.iterdir()) if job.name.startswith(("run-", "slurm-", "pid-")) else []
            pids = [_FILE.fullmatch(each.name) for each in files]
            hosts = {_host_of(each) for each in files if each.suffix != ".stacks"}
            changed_s = max([job.stat().st_mtime, *(each.stat().st_mtime for each in files)])
            if hosts - {socket.gethostname()} and time.time() - changed_s < _KEPT_S:
                continue  # another host's processes cannot be seen here, but what they write each step
            if hosts and all(pids) and not any(os.path.exists(f"/proc/{each[1]}") for each in pids if each):
                dead.append((job.stat().st_mtime, job))
    for number, (changed_s, job) in enumerate(sorted(dead, reverse=True)):
        if number >= _KEPT or time.time() - changed_s > _KEPT_S:
            shutil.rmtree(job, ignore_errors=True)


def _host_of(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(_HOST.stop)[_HOST].partition(b"\0")[0].decode("utf-8", "replace")


def _remove(path: Path) -> None:
    for each in (path, Path(f"{path}.stacks")):
        with contextlib.suppress(OSError):
            each.unlink()
    with contextlib.suppress(OSError):  # other ranks' files are in it
        path.parent.rmdir()


def _end(pid: int) -> None:
    """Remove the file at an end in order; an error of the engine, or an exception that ends the process, keeps it."""
    if os.getpid() == pid:
        note_error()
        if account_end() and _file is not None:
            for each in (*earlier, _file):
                _remove(each)


def note_error() -> None:
    """Keep the exception that ends this process, if one does, as the account's error."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        with contextlib.suppress(Exception):  # an error without a text ends no process otherwise than before
            text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
            account_fail(text.replace("\0", "\\0"))


def _begin_again() -> None:
    """In a forked child: the file, its signal and the rank are its parent's."""
    global _file, _of, _stacks, _met
    if _stacks is not None:
        faulthandler.unregister(STACKS)
        _stacks.close()
    _file = _of = _stacks = None
    _met = 0, ""
    earlier.clear()


os.register_at_fork(after_in_child=_begin_again)
