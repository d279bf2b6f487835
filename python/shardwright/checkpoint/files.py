"""save and load: one checkpoint at a path, written and read before the call returns."""

from __future__ import annotations

import os
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from .partial import of_saves
from .peers import Peers, os_error
from .reading import agree_on, apply_together
from .retention import REPLACED
from .writing import Training, Writer

MAX_FILE_BYTES = 5_000_000_000


def save(
    path: str | os.PathLike[str],
    module: torch.nn.Module,
    optimizer: Any = None,
    *,
    step: int = 0,
    extra: Any = None,
    process_group: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout_s: float = 1800.0,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint to the new folder `path`, durable when this returns.

    Parameters
    ----------
    path : path-like
        Must not exist, nor `path`.replaced, which is where readers look for it if nothing is there; its parent folders are made. What
        killed saves to it have left is removed.
    module : Module
        Plain, or wrapped by torch or by shardwright: names in the checkpoint are the bare model's.
    optimizer : Optimizer, optional
    step : int
        Completed steps, recorded in the manifest.
    extra : tree of plain values and tensors, optional
        load() returns it. Rank 0's is stored.
    process_group : ProcessGroup, optional
        Default: the module's, else the default group, else this rank alone.
    max_file_bytes : int
        Of tensors in one file; a larger tensor has a file of its own.
    timeout_s : float
        Seconds until the save is given up, if a rank does not come.
    overwrite : bool
        Whether a checkpoint at `path` is replaced once the new one is durable, in one step where the file system can exchange names.
        Only an empty folder or a checkpoint alone in its folder is ever replaced, and none of a newer version.

    Raises
    ------
    CheckpointError
        On every rank, with the same sentence. `errno` is set where the system refused something. Nothing is left behind.

    Notes
    -----
    Collective. Every rank writes 1/W of the bytes.

    Examples
    --------
    >>> import tempfile, torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sw.save(folder + "/a", model, extra={"epoch": 3})
    ...     sw.load(folder + "/a", model)
    {'epoch': 3}
    """
    folder = absolute_path("path", path)
    check_options(max_file_bytes, timeout_s)
    check_step(step)
    peers = Peers(module, process_group, timeout_s)
    refusal, code, stale = "", None, []
    if peers.rank == 0:
        try:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            refusal = why_not_there(folder, overwrite)
            stale = of_saves(*os.path.split(folder))
        except OSError as error:
            refusal, code = f"the folder for '{folder}' cannot be made: {error.strerror}", error.errno
    refusal, code = peers.exchange([refusal, code], f"save to {folder}")[0]
    if refusal:
        raise os_error(refusal, code)
    board = f"{folder}.board"
    writer = Writer(
        peers, board, threads=2, direct=True, bandwidth=0, timeout_s=timeout_s, max_file_bytes=max_file_bytes
    )
    try:
        try:
            writer.begin(folder, step, Training(module, optimizer, extra=extra), stale=stale)
        finally:  # over hosts the others wait for a rank that could not begin
            writer.wait()
    finally:
        writer.close()
        peers.remove_board(board)


def load(
    path: str | os.PathLike[str],
    module: torch.nn.Module,
    optimizer: Any = None,
    *,
    process_group: Any = None,
    verify: bool = True,
    timeout_s: float = 1800.0,
) -> Any:
    """Fills `module` and `optimizer` from the checkpoint at `path`, whatever the world size that wrote it.

    Parameters
    ----------
    path : path-like
        A folder that save() or a Checkpointer wrote.
    module, optimizer
        Of the shapes and dtypes that were saved. Tensors are filled in place.
    process_group, timeout_s
        As in save().
    verify : bool
        Check every block of the folder before anything is changed. What is read is checked in any case.

    Returns
    -------
    The `extra` that was saved.

    Raises
    ------
    CheckpointError
        On every rank: a block that is bad for one rank, or a tensor that is missing, left over or of another shape, named.

    Notes
    -----
    Collective. Ranks share the verification; each then reads what it needs.
    """
    folder = absolute_path("path", path)
    peers = Peers(module, process_group, timeout_s)
    reader, why = agree_on(folder, Training(module, optimizer), peers, verify=verify)
    if reader is None:
        raise CheckpointError(why)
    return apply_together(reader, peers, everything=False)


def absolute_path(name: str, path: str | os.PathLike[str]) -> str:
    """`path` from the root on; ValueError on every rank for one that the engine cannot name."""
    found = os.path.abspath(os.fsdecode(path))
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be UTF-8, got {os.fsencode(found)!r}") from None
    if "\0" in found:
        raise ValueError(f"{name} must have no zero byte, got {found!r}")
    return found


def why_not_there(folder: str, overwrite: bool) -> str:
    """Why nothing can be saved to `folder`; "": it can."""
    if overwrite:
        try:
            CheckpointFolder.check_replaceable(folder)
        except CheckpointError as error:
            return str(error)
        return ""
    for taken in (folder, folder + REPLACED):  # a checkpoint that is being replaced has the other name
        if os.path.lexists(taken):
            return f"'{taken}' exists already: save to another path, or remove it first"
    return ""


def check_step(step: int) -> None:
    """Raises ValueError for one that no manifest can hold."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
        raise ValueError(f"step must be an integer in [0, 2**53), got {step!r}")


def check_options(max_file_bytes: int, timeout_s: float) -> None:
    """Raises ValueError for a value out of range."""
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or not 1 <= max_file_bytes < 2**53:
        raise ValueError(f"max_file_bytes must be an integer in [1, 2**53), got {max_file_bytes!r}")
    if not 0 < timeout_s <= 1e9:
        raise ValueError(f"timeout_s must be in (0, 1e9] seconds, got {timeout_s!r}")
