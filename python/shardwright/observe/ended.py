"""Accounts of ranks that end in order, kept in the run's folder for `shardwright report`: without that folder they go."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from pathlib import Path

from ..comm import account


@functools.cache
def keep() -> None:
    """Let this rank's account stay as FOLDER/ended/rank-N when it ends: a hard link, so no byte is copied."""
    if os.environ.get(account.RUN_FOLDER):
        atexit.register(_link, os.getpid())  # runs before account.begin's, which removes the file


def _link(pid: int) -> None:
    path = account.own_file()
    if os.getpid() != pid or path is None:
        return
    with contextlib.suppress(OSError):  # a file system without links
        folder = Path(os.environ[account.RUN_FOLDER]).absolute() / "ended"
        account.own_folder(folder)
        kept = folder / f"rank-{account.own_rank()}"
        kept.unlink(missing_ok=True)
        os.link(path, kept)
