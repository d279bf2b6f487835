"""`shardwright rank -- COMMAND`: run one rank of torchrun, and outlive it when it dies, so that the others go on.

torchrun --no-python --nproc-per-node 8 shardwright rank -- python train.py

torchrun ends all ranks when one fails. This process stands between them: when its rank dies, it waits until the others have ended.
It then ends with 0 if one of these finished, else as its rank did. The program trains in sw.steps or sw.survive.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "torchrun --no-python ... shardwright rank -- COMMAND"


@guarded
def run(options: argparse.Namespace) -> int:
    words = words_of(options.after, "rank")
    for name in ("RANK", "WORLD_SIZE"):
        if name not in os.environ:
            raise Nothing(f"{name} is not set: torchrun --no-python ... shardwright rank -- COMMAND")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        raise Nothing(
            "the ranks are on several hosts, whose ends are not seen here: start them without `shardwright rank`"
        )
    return _outlive(words, rank, size, _folder())


def _folder() -> Path:
    """Return the folder of this start of this launcher's ranks."""
    from shardwright.comm.account import own_folder

    launcher = os.getppid()
    with open(f"/proc/{launcher}/stat", "rb") as file:
        started = file.read().rpartition(b")")[2].split()[19].decode()
    above = Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}"
    folder = above / f"ranks-{launcher}-{started}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    for each in (above, folder):
        own_folder(each)
    return folder


def _outlive(words: list[str], rank: int, size: int, folder: Path) -> int:
    """Run the command. Return 0 if it, or another rank after its death, succeeded; else its code."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    child = subprocess.Popen(words, preexec_fn=end_with_parent)
    asked: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        asked.append(number)
        child.send_signal(number)  # no effect once it has ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = child.wait()
    code = 128 - code if code < 0 else code
    _say(folder / f"ended-{rank}", code)
    if code and not asked:
        print(
            f"shardwright rank: rank {rank} ended with code {code}; this process waits for the others",
            file=sys.stderr,
            flush=True,
        )
        code = _await_others(folder, size, code, asked)
    _say(folder / f"left-{rank}", code)
    if len(list(folder.glob("left-*[0-9]"))) == size:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _say(path: Path, code: int) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(str(code))
    with contextlib.suppress(OSError):
        partial.replace(path)


def _await_others(folder: Path, size: int, code: int, asked: list[int]) -> int:
    """Wait until all ranks have ended, or the launcher asks for the end. Return 0 if one succeeded, else `code`."""
    while not asked:
        codes = [int(each.read_text()) for each in folder.glob("ended-*[0-9]")]
        if len(codes) == size:
            return 0 if 0 in codes else code
        time.sleep(_LOOK_S)
    return code
