"""save() and load(): write or read one checkpoint at a path before the call returns."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any

from .._engine import CheckpointError, CheckpointFolder, Error
from ..comm.waits import on_every_rank
from ..options.name_map import NameMap, Rename
from ..options.names import offers_names
from ..options.places import absolute_path, address_of
from .folder.partial import make_folder, of_saves
from .folder.retention import REPLACED, discard
from .peers import Peers, told
from .pipeline import inventory_of, load_stages, peers_of
from .remote.store import Store, local_folder, on_first
from .restore.agreeing import agree_on, apply_together
from .training import Training
from .writing import Target, Writer, new_nonce

MAX_FILE_BYTES = 5_000_000_000


@offers_names
@on_every_rank("sw.save()")
def save(
    path: str | os.PathLike[str],
    module: Any,
    optimizer: Any = None,
    *,
    step: int = 0,
    extra: Any = None,
    process_group: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout_s: float = 1800.0,
    overwrite: bool = False,
    local_directory: str | os.PathLike[str] | None = None,
) -> None:
    """Write a checkpoint to the new folder `path`. It is durable when the call returns.

    Parameters
    ----------
    path : path-like, or an address of fsspec such as s3://bucket/run/a
        Neither `path` nor `path`.replaced, which readers try next, may exist. save() creates parent folders and removes
        remains of killed saves to `path`. For an address, save() writes a local folder; rank 0 uploads it, manifest
        last, and the local folder is removed.
    module : Module, list or dict of Module, PipelineStage or list of PipelineStage
        Plain, or wrapped by torch or by shardwright. Names in the checkpoint are those of the bare model, for several
        behind the key or the number of each. Or this
        rank's stages of a pipeline: one save holds the stages of all ranks, and their modules must have the whole
        model's names.
    optimizer : Optimizer, or list or dict of Optimizer, optional
        Several optimizers have no parameter in common. For stages: one optimizer per stage.
    step : int
        Completed steps, recorded in the manifest: checkpoint.step_of(path) returns them.
    extra : tree of plain values and tensors, optional
        Rank 0's value, which load() returns.
    process_group : ProcessGroup, optional
        Default: the module's, else the default group, else this rank alone. For stages: the ranks of all stages;
        default: the default group.
    max_file_bytes : int
        Bytes of tensors in one file; a larger tensor gets its own file.
    timeout_s : float
        Seconds after which the save fails if a rank is missing.
    overwrite : bool
        Replace a checkpoint at `path` once the new one is durable, in one step where the file system can exchange
        names. Only a folder that is empty, or holds nothing but a checkpoint of no newer version, is replaced. An
        address has no checkpoint while the new one is uploaded.
    local_directory : path-like, optional
        The folder to write for an address, shared by the hosts. Default: one below ~/.cache/shardwright.

    Raises
    ------
    CheckpointError
        On every rank, with the same message; `errno` is the system's error, if any. The failed save leaves no files.

    Notes
    -----
    Collective. Every rank writes 1/W of the bytes. Each job, and each group of ranks that saves by itself, needs its
    own path. If several save to one path at once, the first commit wins and the others raise on all of their ranks.

    Examples
    --------
    >>> import tempfile, torch, shardwright as sw
    >>> model = torch.nn.Linear(4, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sw.save(folder + "/a", model, extra={"epoch": 3})
    ...     sw.load(folder + "/a", model)
    {'epoch': 3}
    """
    peers = peers_of(module, process_group, usable_timeout(timeout_s))
    address = address_of(path)
    if address is not None:
        options = {"step": step, "extra": extra, "max_file_bytes": max_file_bytes}
        options |= {"process_group": process_group, "timeout_s": timeout_s}
        _save_remote(peers, address, local_directory, overwrite, lambda f: save(f, module, optimizer, **options))
        return
    make = functools.partial(Training, module, optimizer, extra=extra)
    saver = PathSaver(peers, max_file_bytes=max_file_bytes, timeout_s=timeout_s)
    try:
        try:
            saver.begin(path, make, step=step, overwrite=overwrite)
        finally:  # across hosts the other ranks wait for a rank that could not begin
            saver.wait()
    finally:
        saver.close()


class PathSaver:
    """Saves to paths that the caller chooses, one at a time, in the background of training. begin() checks the options."""

    def __init__(self, peers: Peers, *, max_file_bytes: Any = MAX_FILE_BYTES, timeout_s: Any = 1800.0) -> None:
        self._peers, self._options = peers, (max_file_bytes, timeout_s)
        self._writer: Writer | None = None
        self._board = ""

    def begin(
        self,
        path: str | os.PathLike[str],
        make: Callable[[], Training],
        *,
        step: int = 0,
        overwrite: bool = False,
        replaces_file: bool = False,
    ) -> None:
        """Snapshot make() and write it to `path`, after wait(). `replaces_file`: remove a file or a link there first. Collective."""

        def check() -> tuple[dict[str, Any], tuple[Any, ...]]:
            options = check_options(*self._options)
            folder = absolute_path("path", path)
            checked = folder, make(), *options
            name = os.path.basename(folder)
            if name.endswith(REPLACED):
                other = name.removesuffix(REPLACED)
                raise ValueError(
                    f"path must not end with '{REPLACED}', got {name!r}: a save to '{other}' moves what it replaces there"
                )
            compared = {"step": check_step(step), "max_file_bytes": options[0], "path": name}
            return compared | {"overwrite": bool(overwrite)}, checked

        folder, training, file_bytes, timeout_s = self._peers.agree(check, "save()")
        target = Target(folder)

        def prepare() -> str:
            nonlocal target
            with told(f"the folder for '{folder}' cannot be made"):
                make_folder(os.path.dirname(folder))
                if replaces_file and (os.path.islink(folder) or os.path.isfile(folder)):
                    os.unlink(folder)
                replaces = CheckpointFolder.identity(folder)  # before the check: a later folder is another save's
                refusal = why_not_there(folder, overwrite)
                target = Target(folder, replaces, of_saves(*os.path.split(folder)))
            if refusal:
                raise CheckpointError(refusal)
            return new_nonce()

        nonce = self._peers.first(prepare, f"save to {folder}")
        if self._writer is None:
            # the nonce keeps another save to the same path from reading these ranks' reports
            self._board = f"{folder}.{nonce}.board"
            self._writer = Writer(
                self._peers, nonce, self._board, threads=2, direct=True, bandwidth=0, timeout_s=timeout_s,
                max_file_bytes=file_bytes, inventory=functools.partial(inventory_of, training),
            )  # fmt: skip
        self._writer.begin(target, check_step(step), training)

    def wait(self, *, together: bool = True) -> None:
        """Wait until no save runs. Raise CheckpointError if it failed on some rank. `together`: all ranks call it."""
        if self._writer is not None:
            (self._writer.wait if together else self._writer.wait_alone)()

    def close(self, *, together: bool = True) -> None:
        """Cancel a running save and free all memory. Call wait() first. `together`: all ranks call it."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._board and together:
                self._peers.remove_board(self._board)


@offers_names
@on_every_rank("sw.load()")
def load(
    path: str | os.PathLike[str],
    module: Any,
    optimizer: Any = None,
    *,
    process_group: Any = None,
    verify: bool = True,
    timeout_s: float = 1800.0,
    strict: bool = True,
    include: str | Iterable[str] = (),
    rename: Rename = None,
    local_directory: str | os.PathLike[str] | None = None,
) -> Any:
    """Fill `module` and `optimizer` from the checkpoint at `path`, at any world size.

    Parameters
    ----------
    path : path-like, or an address of fsspec
        A folder that save() or a Checkpointer wrote. From an address rank 0 downloads it first.
    module, optimizer
        Objects with the shapes and dtypes that were saved. load() fills their tensors in place.
    process_group, timeout_s
        As in save().
    verify : bool
        Check every block of the folder before anything changes. False: check only the blocks that are read, as they are read.
    strict : bool
        False: log tensors that only the checkpoint or only `module` has, and leave them unchanged. Shapes and dtypes
        must always agree.
    include : regular expression or several, optional
        Load only the tensors of `module` with a name in which one of them matches. All others stay unchanged.
    rename : dict of str to str, or callable, optional
        Maps names in the checkpoint to names in `module`. In a dict, the first regular expression found in a name is
        replaced by its value; a callable takes the name. Optimizer state follows its parameter.
    local_directory : path-like, optional
        The folder for downloads from an address, shared by the hosts. Default: one below ~/.cache/shardwright.

    Returns
    -------
    The saved `extra`.

    Raises
    ------
    CheckpointError
        On every rank: a rank read a bad block, or a tensor is missing, unexpected or of another shape; the message
        names it.

    Notes
    -----
    Collective. Ranks share the verification; each then reads the bytes that it needs.
    """
    peers = peers_of(module, process_group, usable_timeout(timeout_s))
    address = address_of(path)
    if address is not None:
        options = {"process_group": process_group, "verify": verify, "timeout_s": timeout_s}
        options |= {"strict": strict, "include": include, "rename": rename}
        return _load_remote(peers, address, local_directory, lambda f: load(f, module, optimizer, **options))

    def check() -> tuple[dict[str, Any], tuple[str, Training, NameMap, float]]:
        seconds, training = check_timeout(timeout_s), Training(module, optimizer)
        names = training.names(include, rename, strict)
        folder = absolute_path("path", path)
        return {"verify": bool(verify), **names.describe()}, (folder, training, names, seconds)

    folder, training, names, seconds = peers.agree(check, "load()")
    if training.stages:
        return load_stages(folder, peers, training.stages, verify=verify, names=names, timeout_s=seconds)
    return apply_together(agree_on(folder, training, peers, verify=verify, names=names), peers)


def step_of(path: str | os.PathLike[str]) -> int:
    """Return the completed steps that a checkpoint records, on any one rank.

    Parameters
    ----------
    path : path-like, or an address of fsspec
        A folder that save() or a Checkpointer wrote.

    Raises
    ------
    CheckpointError
        No sound manifest is there.

    Examples
    --------
    >>> import tempfile, torch, shardwright as sw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sw.save(folder + "/a", torch.nn.Linear(4, 1), step=7)
    ...     sw.checkpoint.step_of(folder + "/a")
    7
    """
    address = address_of(path)
    if address is None:
        return int(CheckpointFolder(absolute_path("path", path)).step)
    manifest = Store(address).manifest("")
    if manifest is None:
        raise CheckpointError(f"'{address}' has no checkpoint")
    return int(manifest["step"])


def _save_remote(
    peers: Peers, address: str, chosen: str | os.PathLike[str] | None, overwrite: bool, write: Callable[[str], None]
) -> None:
    """Write a local folder and upload it. Collective."""

    def begin() -> str:
        if not overwrite and Store(address).manifest("") is not None:
            raise CheckpointError(
                f"'{address}' exists already: pass overwrite=True, save to another place, or remove it first"
            )
        return f"{local_folder(address, chosen)}.{new_nonce()}"

    folder = on_first(peers, begin, f"save to {address}")

    def send() -> None:
        Store(address).upload(folder, "")

    try:
        write(folder)
        on_first(peers, send, f"upload to {address}")
    finally:
        if peers.rank == 0:
            discard(folder)


def _load_remote(peers: Peers, address: str, chosen: str | os.PathLike[str] | None, read: Callable[[str], Any]) -> Any:
    """Download a checkpoint, load and remove it. Collective."""

    def fetch() -> str:
        folder = f"{local_folder(address, chosen)}.{new_nonce()}"
        Store(address).download("", folder)
        return folder

    folder = on_first(peers, fetch, f"download from {address}")
    try:
        return read(folder)
    finally:
        if peers.world_size > 1:
            with contextlib.suppress(Error):
                peers.exchange("", f"load from {address}")
        if peers.rank == 0:
            discard(folder)


def why_not_there(folder: str, overwrite: bool) -> str:
    """Return the reason why a save to `folder` is refused; "" if it is allowed."""
    if overwrite:
        try:
            CheckpointFolder.check_replaceable(folder)
        except CheckpointError as error:
            return str(error)
        return ""
    for taken in (folder, folder + REPLACED):  # a save that replaces a checkpoint renames it to REPLACED first
        if os.path.lexists(taken):
            return f"'{taken}' exists already: pass overwrite=True, save to another path, or remove it first"
    return ""


def integer(name: str, value: Any, low: int, high: int, legal: str) -> int:
    """Return `value`, of any integer type, as an int. Raise ValueError for another type or a value outside [low, high)."""
    try:
        found = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = low - 1
    if not low <= found < high:
        raise ValueError(f"{name} must be {legal}, got {value!r}")
    return found


def check_step(step: Any) -> int:
    """Return the step as an int. Raise ValueError for one outside [0, 2**53)."""
    return integer("step", step, 0, 2**53, "an integer in [0, 2**53)")


def check_options(max_file_bytes: Any, timeout_s: Any) -> tuple[int, float]:
    """Return both options. Raise ValueError for a value out of range."""
    return integer("max_file_bytes", max_file_bytes, 1, 2**53, "an integer in [1, 2**53)"), check_timeout(timeout_s)


def usable_timeout(timeout_s: Any) -> float:
    """Return timeout_s, or the default if it is invalid: ranks need a timeout to report the error to each other."""
    try:
        return check_timeout(timeout_s)
    except ValueError:
        return 1800.0


def check_timeout(timeout_s: Any) -> float:
    """Return timeout_s as a float. Raise ValueError unless it is in (0, 1e9]."""
    is_number = isinstance(timeout_s, (int, float)) or hasattr(timeout_s, "__float__")
    if not is_number or isinstance(timeout_s, (bool, str)) or not 0 < float(timeout_s) <= 1e9:
        raise ValueError(f"timeout_s must be in (0, 1e9] seconds, got {timeout_s!r}")
    return float(timeout_s)
