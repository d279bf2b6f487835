"""`shardwright rank -- COMMAND`: run one rank of torchrun, and outlive it when it dies, so that the others go on.

torchrun --no-python --nproc-per-node 8 shardwright rank --spares 1 -- python train.py

torchrun ends all ranks when one fails. This process stands between them: when its rank dies in sw.steps or sw.survive, it starts the
command again as a spare, which waits there for the place of a lost rank. It ends when no rank is left: with 0 if one has finished,
else as its own did. A spare runs as rank 0 of 1 until it has a place. A rank that fails after sw.steps fails the job.

On several hosts each has --spares of its own. A host that comes back, or a new one, joins the job that runs in a checkpoint directory:

shardwright rank --join DIRECTORY --spares 8 -- python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .children import words_of
from .report import Nothing, guarded

DESCRIPTION = __doc__
_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1
#: states of a process; "done": a spare has seen that all ranks ended their last step
_WAITS, _RUNS, _ENDED, _DONE, _LEFT = "waits", "runs", "ended", "done", "left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "torchrun --no-python ... shardwright rank [--spares K] [--restarts N] [--join DIRECTORY] -- COMMAND"
    parser.add_argument(
        "--spares", type=int, default=0, help="processes on each host that wait for the place of a lost rank (0)"
    )
    parser.add_argument(
        "--restarts", type=int, default=10, help="times that a lost rank is started again as a spare (10)"
    )
    parser.add_argument(
        "--join",
        metavar="DIRECTORY",
        help="start no rank, but spares of the job that runs with this checkpoint directory, at least one",
    )


@guarded
def run(options: argparse.Namespace) -> int:
    words = words_of(options.after, "rank")
    for name in ("spares", "restarts"):
        if getattr(options, name) < 0:
            raise Nothing(f"--{name} must be a number from 0, got {getattr(options, name)}")
    if options.join is not None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the number of threads changes bits
        folder, numbers = _folder(os.getpid()), [*range(max(options.spares, 1))]
        _join(options.join, folder)
        code = _outlive(
            [_Slot(words, folder, each, 0, options.restarts) for each in numbers], folder, len(numbers), True
        )
        shutil.rmtree(folder, ignore_errors=True)
        return code
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if name not in os.environ:
            raise Nothing(f"{name} is not set: torchrun --no-python ... shardwright rank -- COMMAND")
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    number, is_far = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), size < int(os.environ["WORLD_SIZE"])
    folder, count = _folder(os.getppid()), size + options.spares
    numbers = [number, *range(size, count)] if number == 0 else [number]
    code = _outlive([_Slot(words, folder, each, size, options.restarts) for each in numbers], folder, count, is_far)
    _write(folder / f"gone-{number}", str(code))
    if len(list(folder.glob("gone-*[0-9]"))) == size:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _folder(launcher: int) -> Path:
    """Return the folder of this start of this launcher's ranks on this host."""
    from shardwright.comm.account import own_folder

    with open(f"/proc/{launcher}/stat", "rb") as file:
        started = file.read().rpartition(b")")[2].split()[19].decode()
    above = Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}"
    folder = above / f"ranks-{launcher}-{started}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    for each in (above, folder):
        own_folder(each)
    return folder


def _join(directory: str, folder: Path) -> None:
    """Give the spares of this folder the job that runs in a checkpoint directory."""
    from shardwright.comm.board import ATTEMPTS, JOB, Board

    for jobs in sorted(Path(directory).glob(f"{ATTEMPTS}*/{JOB}"), key=lambda each: each.stat().st_mtime, reverse=True):
        for loop in Board(str(jobs)).said():
            Board(str(folder / "loops")).say(loop, str(jobs.parent))
            return
    raise Nothing(f"no job has come to sw.steps or sw.survive in {directory}: start its ranks first")


def _outlive(slots: list[_Slot], folder: Path, count: int, is_far: bool) -> int:
    """Run processes until all are over, or no rank of any runs. Return 0 if one of these succeeded; else the first code.

    The code of one that failed after its loop of sw.steps comes before both. `is_far`: ranks of other hosts may be left when none is
    here. Then spares go on to wait, and 0 is also the code of a host whose ranks came back and waited until the others had ended.
    """
    for each in slots:
        each.start(is_spare=each.number >= each.size)
    asked: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        asked.append(number)
        for each in slots:
            each.child.send_signal(number)  # no effect once it has ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hand_on)
    is_over = False
    while not all([each.look(is_over=is_over) for each in slots]):
        time.sleep(_LOOK_S)
        is_over = bool(asked) or not (_some_run(folder, count) or (is_far and _loops(folder)))
        for each in slots if is_over else ():
            each.end_waiting()
    code = next((each.code for each in slots if each.has_failed), slots[0].code)
    while code and not asked and _some_run(folder, count):
        time.sleep(_LOOK_S)
    if asked or any(each.has_failed for each in slots):
        return code
    ends = [_read(folder / f"slot-{each}") for each in range(count)]
    return 0 if "0" in ends or (is_far and set(ends[: slots[0].size]) == {_DONE}) else code


class _Slot:
    """A process of the command: a rank, or a spare until it takes a place. The file `slot-N` has its state, or its last code."""

    def __init__(self, words: list[str], folder: Path, number: int, size: int, restarts: int) -> None:
        self._words, self._folder, self.number, self.size = words, folder, number, size
        self._restarts, self._is_over, self.code = restarts, False, 0
        self.has_failed = False  # after its loop of sw.steps
        self._path = folder / f"slot-{number}"
        self._label = f"rank {os.environ['RANK']}" if number < size else f"spare {number}"

    def start(self, *, is_spare: bool) -> None:
        """Start the command."""
        libc, parent = ctypes.CDLL(None), os.getpid()

        def end_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        _write(self._path, _WAITS if is_spare else _RUNS)
        environment = {**os.environ, "SHARDWRIGHT_START": str(self._folder), "SHARDWRIGHT_SLOT": str(self._path)}
        if is_spare:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            environment |= {"SHARDWRIGHT_SPARE": str(self._path), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.child = subprocess.Popen(self._words, preexec_fn=end_with_parent, env=environment)

    def end_waiting(self) -> None:
        """End the process if it is a spare that waits."""
        if _read(self._path) == _WAITS:
            self.child.kill()

    def look(self, *, is_over: bool) -> bool:
        """Return True once the process has ended for good. Start it again as a spare if it was a rank that was lost."""
        code = self.child.poll()
        if self._is_over or code is None:
            return self._is_over
        code = 128 - code if code < 0 else code
        state = _read(self._path)
        was_rank = state in (_RUNS, _ENDED)
        self._tell()
        if was_rank or not self.size:
            self.code, self.has_failed = code, code != 0 and state == _ENDED
        if code and state == _RUNS and not is_over and _loops(self._folder) and self._restarts:
            self._restarts -= 1
            _say(f"{self._label} ended with code {code}, and is started again as a spare")
            self.start(is_spare=True)
            return False
        if code and not is_over:
            label = self._label if was_rank else f"spare {self.number}"
            _say(f"{label} ended with code {code}; this process waits for the others")
        _write(self._path, str(code) if was_rank else state if state == _DONE else _LEFT)
        self._is_over = True
        return True

    def _tell(self) -> None:
        """Tell ranks on other hosts that it has ended."""
        from shardwright.comm.board import tell_ended

        for loop in _loops(self._folder):
            with contextlib.suppress(OSError, ValueError):  # a later loop has removed it
                tell_ended(json.loads(loop.read_text()))


def _say(sentence: str) -> None:
    print(f"shardwright rank: {sentence}", file=sys.stderr, flush=True)


def _loops(folder: Path) -> list[Path]:
    """Return a file for each loop of sw.steps to which ranks have come; it has the folder of the loop's attempts."""
    return [each for each in (folder / "loops").glob("*") if "." not in each.name]


def _some_run(folder: Path, count: int) -> bool:
    """Return True while a rank runs, or has not been started yet."""
    return any(_read(folder / f"slot-{number}") in ("", _RUNS, _ENDED) for number in range(count))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    with contextlib.suppress(OSError):
        partial.replace(path)
