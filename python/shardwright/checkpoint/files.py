"""save and load: one checkpoint at a path, written and read before the call returns."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from .partial import of_saves
from .peers import Peers, os_error
from .reading import agree_on, apply_together
from .retention import REPLACED
from .writing import Training, Writer, new_nonce

MAX_FILE_BYTES = 5_000_000_000
#: also as a pathlib.Path, which drops the second slash
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


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
    Collective. Every rank writes 1/W of the bytes. Each job, and each disjoint group of ranks such as a pipeline stage, needs a
    path of its own. Of saves to one path at one time the first to commit stays, and the others raise on all of their ranks.

    Examples
    --------
    >>> import tempfile, torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sw.save(folder + "/a", model, extra={"epoch": 3})
    ...     sw.load(folder + "/a", model)
    {'epoch': 3}
    """
    peers = Peers(module, process_group, usable_timeout(timeout_s))
    checked: list[tuple[str, Training]] = []

    def check() -> dict[str, Any]:
        options = check_options(max_file_bytes, timeout_s)
        checked.append((absolute_path("path", path), Training(module, optimizer, extra=extra)))
        name = os.path.basename(checked[0][0])
        return {"step": check_step(step), "max_file_bytes": options[0], "path": name, "overwrite": bool(overwrite)}

    peers.agree(check, "save()")
    ((folder, training),) = checked
    step, (max_file_bytes, timeout_s) = check_step(step), check_options(max_file_bytes, timeout_s)
    refusal, code, stale, replaces = "", None, [], ""
    if peers.rank == 0:
        try:
            CheckpointFolder.make(os.path.dirname(folder))
            replaces = CheckpointFolder.identity(folder)  # before the check: what comes after it is another save's
            refusal = why_not_there(folder, overwrite)
            stale = of_saves(*os.path.split(folder))
        except Exception as error:  # whatever it is, the others wait for word of it
            refusal = f"the folder for '{folder}' cannot be made: {in_words(error)}"
            code = getattr(error, "errno", None)
    refusal, code, nonce = peers.exchange([refusal, code, new_nonce()], f"save to {folder}")[0]
    if refusal:
        raise os_error(refusal, code)
    board = f"{folder}.{nonce}.board"  # not by the path alone: another save to it would read what these ranks say
    try:
        with contextlib.closing(
            Writer(
                peers, nonce, board, threads=2, direct=True, bandwidth=0, timeout_s=timeout_s, max_file_bytes=max_file_bytes
            )
        ) as writer:  # fmt: skip
            try:
                writer.begin(folder, step, training, stale=stale, replaces=replaces)
            finally:  # over hosts the others wait for a rank that could not begin
                writer.wait()
    finally:
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
    peers = Peers(module, process_group, usable_timeout(timeout_s))
    checked: list[tuple[str, Training]] = []

    def check() -> dict[str, Any]:
        check_timeout(timeout_s)
        checked.append((absolute_path("path", path), Training(module, optimizer)))
        return {"verify": bool(verify)}

    peers.agree(check, "load()")
    ((folder, training),) = checked
    reader, refusal = agree_on(folder, training, peers, verify=verify)
    if reader is None:
        raise CheckpointError(refusal)
    return apply_together(reader, peers, everything=False)


def in_words(error: Exception) -> str:
    """Return it in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def absolute_path(name: str, path: str | os.PathLike[str]) -> str:
    """`path` from the root on; ValueError on every rank for one that the engine cannot name."""
    given = os.fsdecode(path)
    if _SCHEME.match(given):
        raise ValueError(f"{name} must be a path of a mounted file system, got the address {given!r}")
    found = os.path.abspath(given)
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be UTF-8, got {os.fsencode(found)!r}") from None
    if "\0" in found:
        raise ValueError(f"{name} must have no zero byte, got {found!r}")
    return found


def why_not_there(folder: str, overwrite: bool) -> str:
    """Return why nothing can be saved to `folder`; "": it can."""
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


def integer(name: str, value: Any, low: int, high: int, legal: str) -> int:
    """`value` as an int, of whatever type of integers (numpy's too); ValueError for another, or one that is not in [low, high)."""
    try:
        found = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = low - 1
    if not low <= found < high:
        raise ValueError(f"{name} must be {legal}, got {value!r}")
    return found


def check_step(step: Any) -> int:
    """Raises ValueError for one that no manifest can hold."""
    return integer("step", step, 0, 2**53, "an integer in [0, 2**53)")


def check_options(max_file_bytes: Any, timeout_s: Any) -> tuple[int, float]:
    """Raises ValueError for a value out of range."""
    return integer("max_file_bytes", max_file_bytes, 1, 2**53, "an integer in [1, 2**53)"), check_timeout(timeout_s)


def usable_timeout(timeout_s: Any) -> float:
    """A time to wait for the others, which are to hear that it is none."""
    try:
        return check_timeout(timeout_s)
    except ValueError:
        return 1800.0


def check_timeout(timeout_s: Any) -> float:
    """Raises ValueError for what is no time to wait."""
    is_number = isinstance(timeout_s, (int, float)) or hasattr(timeout_s, "__float__")
    if not is_number or isinstance(timeout_s, (bool, str)) or not 0 < float(timeout_s) <= 1e9:
        raise ValueError(f"timeout_s must be in (0, 1e9] seconds, got {timeout_s!r}")
    return float(timeout_s)
