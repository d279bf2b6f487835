"""A restore on all ranks: what fits, what is read, and after a verdict of all ranks what is applied."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder, NewerCheckpointError
from ...formats import tree
from ...options.name_map import NameMap
from ..inventory import forget_tensors_of
from ..memory.restoring import Source
from ..peers import Peers
from ..rows import TENSORS
from ..slices import replicas_of
from ..state.content import try_random_state
from ..training import Training
from .applying import apply, tensors_of
from .filling import Filler, digest_of, is_in_place, places_of
from .fitting import Fit, Mismatch

SOUND, REJECTED, FATAL = "sound", "rejected", "fatal"


class Rejected(CheckpointError):
    """An error, equal on all ranks, for a checkpoint that one of them cannot read: another one may do."""

    __module__ = "shardwright"  # programs see a CheckpointError


Rejected.__name__ = Rejected.__qualname__ = "CheckpointError"


@contextlib.contextmanager
def rejected() -> Iterator[None]:
    """Make Rejected of a CheckpointError, which must be equal on all ranks."""
    try:
        yield
    except CheckpointError as error:
        raise Rejected(str(error)) from error


class Restore:
    """A checkpoint on one rank, from its lists to the training."""

    def __init__(self, path: str, fit: Fit, filler: Filler) -> None:
        self.path, self.fit, self.filler = path, fit, filler
        self.folder = fit.folder
        self.random: Any = None
        is_sliced = any(replica.zero for replica in replicas_of(fit.training.model))  # written in slices or whole only
        live = [*([] if is_sliced else fit.model[0]), *fit.live.values()]
        self.places = places_of([*fit.new.values(), *fit.state_reads.values()], live)

    def read(self, spans: Sequence[tuple[str, int, int]] | None, *, verify: bool) -> None:
        """Read what no live tensor loses by, try the generators and check this rank's share of the rest, or `spans`."""
        fit, filler = self.fit, self.filler
        if fit.own is not None:
            try:
                filler.fill(fit.own_reads.values())
                self.random = tree.decode(fit.own["random"], tensors_of(fit.own_reads))
                try_random_state(self.random)
            except Exception as error:
                why = error or type(error).__name__
                raise CheckpointError(f"'{self.folder.path}', ranks/ of rank {fit.rank}: {why}") from None
        filler.read_ahead()
        filler.fill(each for each in (*fit.new.values(), *fit.state_reads.values()) if not is_in_place(each[1]))
        count = self.folder.block_count
        if verify and spans is not None:
            filler.check(spans)
        elif verify:
            filler.verify(count * fit.rank // fit.world_size, count * (fit.rank + 1) // fit.world_size)


def agree_on(
    path: str,
    training: Training,
    peers: Peers,
    *,
    verify: bool,
    everything: bool = False,
    spare: Sequence[tuple[int, int]] = (),
    names: NameMap = NameMap(),
    source: Source | None = None,
) -> Restore:
    """Return what apply_together() takes once every rank finds `path` sound and fitting. Errors change no live tensor. Collective.

    `everything`: restore all that a Checkpointer saves, not only model and optimizer. `spare`: (address, nbytes) of memory that
    keeps old values of live tensors. `source`: the files, if they are in memory; `path` then only names the checkpoint.
    Rejected: a rank cannot read it. CheckpointError: a rank cannot use it, though it is sound or has a newer format.
    """
    forget_tensors_of(training)
    folder = _open_together(path, peers, source)
    made: list[Restore] = []
    arriving = None if source is None or source.is_whole else source
    room = sum(nbytes for _, nbytes in spare)
    keeps: Sequence[bool] = ()
    reads: list[tuple[str, int, int]] = []

    def fits() -> list[Any]:
        fit = Fit(folder, training, peers.rank, peers.world_size, names, everything)
        made.append(Restore(path, fit, Filler(folder, peers.rank, peers.world_size)))
        return ["" if source is not None else digest_of(made[0].places), room, fit.has_own_compressor()]

    def list_reads() -> None:
        made[0].fit.choose_debts(all(keeps))
        if arriving is not None:
            reads.extend(made[0].filler.ranges(made[0].fit.reads()))

    agree = functools.partial(_agree, peers, path)
    try:
        digests, rooms, keeps = zip(*agree(fits))
        is_shared = not peers.has_hosts and bool(digests[0]) and len({*digests}) == 1
        turn = (peers.rank, rooms) if is_shared else (0, (room,))
        made[0].filler.share(made[0].places, *turn, spare)
        agree(list_reads)
        spans = None
        if arriving is not None:
            with rejected():
                arriving.bring(reads)
            spans = arriving.share()
        agree(lambda: made[0].read(spans, verify=verify))
    except BaseException:
        for each in made:
            each.filler.take_back()
        raise
    return made[0]


def apply_together(restore: Restore, peers: Peers) -> Any:
    """Fill the training on every rank and return `extra`. All ranks raise CheckpointError if one fails. Collective."""
    _load_together(restore.path, peers, restore.filler.read_rest)
    restore.filler.trade(functools.partial(peers.send, label=f"parts of {restore.path}"))
    return _load_together(restore.path, peers, lambda: apply(restore.fit, restore.filler, restore.random))


def _load_together(path: str, peers: Peers, call: Callable[[], Any]) -> Any:
    done: list[Any] = []

    def load() -> None:
        try:
            done.append(call())
        except Exception as error:
            why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"'{path}' was loaded in part, and the training is not usable: {why}") from error

    peers.together(load, f"load of {path}", keeps=())
    return done[0]


def _open_together(path: str, peers: Peers, source: Source | None = None) -> CheckpointFolder:
    """Open the folder on rank 0 and send its catalog to all ranks. Collective."""
    catalog = b""
    found: list[CheckpointFolder] = []

    def read() -> str:
        nonlocal catalog
        if peers.rank:
            return ""
        found.append(CheckpointFolder(path) if source is None else source.open())
        shared = (each for each in found[0].files if not each.startswith("ranks/") or each.startswith(TENSORS))
        trees = ("state.json", "optimizer.json")
        catalog = found[0].catalog([each for each in shared if each in trees or each.endswith(".safetensors")])
        return found[0].path

    names = _agree(peers, path, read, f"opening {path}")
    catalog = peers.broadcast(catalog, f"catalog of {path}")
    folder = found[0] if found else CheckpointFolder.received(names[0], catalog)
    return folder if source is None else source.attach(folder)


#: transient errors of a process, a system or a mount: the folder may be sound, so they must not reject it
_OF_A_MOMENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)


def _agree(peers: Peers, path: str, look: Callable[[], Any], label: str = "") -> list[Any]:
    """Return look() (of JSON) of all ranks. Else all raise: Rejected for the folder's content, or CheckpointError. Collective."""
    mine: list[Any]  # kind, sentence, value
    try:
        mine = [SOUND, "", look()]
    except (Mismatch, NewerCheckpointError) as error:
        mine = [FATAL, str(error), None]
    except CheckpointError as error:
        mine = [FATAL if error.errno in _OF_A_MOMENT else REJECTED, str(error) + _instead(error, path), None]
    except Exception as error:
        kind = REJECTED if isinstance(error, (KeyError, TypeError)) else FATAL
        mine = [kind, f"'{path}': {type(error).__name__}: {error}", None]
    answers = peers.agreement(mine, label or f"verdict on {path}") or [mine] * peers.world_size
    for kind in (FATAL, REJECTED):
        for rank, (found, text, _) in enumerate(answers):
            if found == kind:
                sentence = text if peers.world_size == 1 else f"rank {rank}: {text}"
                raise CheckpointError(sentence) if kind == FATAL else Rejected(sentence)
    return [value for _, _, value in answers]


def _instead(error: CheckpointError, path: str) -> str:
    """Return the words about a path without a checkpoint: the folders in it that may be one."""
    if error.errno == errno.ENOTDIR and os.path.isfile(path):
        return f": '{path}' is a file, and a checkpoint is a folder; sw.load_pretrained reads a file of weights"
    if error.errno != errno.ENOENT or os.path.lexists(os.path.join(path, "MANIFEST.json")):
        return ""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    inside = [name for name in names if os.path.lexists(os.path.join(path, name, "MANIFEST.json"))]
    offer = "pass the path that was saved to"
    if inside:
        offer = f"pass one of the {len(inside)} in it, such as '{os.path.join(path, inside[-1])}'"
    return f": there is no checkpoint at '{path}', {offer}"
