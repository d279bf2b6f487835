"""A restore on all ranks: rank 0 reads the lists, each rank its bytes; live tensors change only after agreement."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..._engine import CheckpointError, CheckpointFolder, NewerCheckpointError
from ...options.name_map import NameMap
from ..memory.repeated import forget_tensors_of
from ..memory.restoring import Source
from ..peers import Peers
from ..rows import TENSORS
from ..training import Training
from .reading import Mismatch, Reader

SOUND, REJECTED, FATAL = "sound", "rejected", "fatal"
#: files of a folder that rank 0 reads for all ranks
_SMALL = ("state.json", "optimizer.json")


def agree_on(
    path: str,
    training: Training,
    peers: Peers,
    *,
    verify: bool,
    spare: Sequence[tuple[int, int]] = (),
    names: NameMap = NameMap(),
    source: Source | None = None,
) -> tuple[Reader | None, str]:
    """Return (reader, "") if every rank finds `path` sound and fitting. Collective.

    If some rank cannot read it, return (None, reason) and leave live tensors unchanged. `spare`: see Reader.verify_share.
    `source`: the files, if they are in memory; `path` then only names the checkpoint.

    Raises
    ------
    CheckpointError
        A rank cannot use a checkpoint that is sound or has a newer format. All ranks raise the same message.
    """
    forget_tensors_of(training)
    folder, refusal = _open_together(path, peers, source)
    if folder is None:
        return None, refusal
    made: list[Reader] = []
    is_sound = False
    offers: list[str] = []
    ranges: list[tuple[str, int, int]] = []
    arriving = None if source is None or source.is_whole else source

    def look() -> None:
        made.append(Reader(path, folder, training, peers.rank, peers.world_size, names))
        offers.append(made[0].offer())

    def check() -> None:
        made[0].try_generators(peers.rank)
        if verify:
            made[0].verify_share(peers.rank, peers.world_size, None if arriving is None else arriving.share())

    def agree(call: Callable[[], None]) -> str:
        mine = _verdict_of(call, path)
        return _hear(peers.agreement(mine, f"verdict on {path}") or [mine], peers)

    try:
        refusal = agree(look)
        if not refusal:
            _share(made[0], offers[0] if source is None else "", spare, peers)
        if arriving is not None and not refusal:
            _agree_on_compressor(made[0], peers)
            refusal = agree(lambda: ranges.extend(made[0].reads(peers.rank, peers.world_size)))
            refusal = refusal or arriving.bring(ranges)
        refusal = refusal or agree(check)
        is_sound = not refusal
    finally:
        if made and not is_sound:
            made[0].take_back()
    return (made[0], "") if is_sound else (None, refusal)


def _open_together(path: str, peers: Peers, source: Source | None = None) -> tuple[CheckpointFolder | None, str]:
    """Open the folder on rank 0 and send its catalog to all ranks. Return (folder, "") or (None, reason). Collective."""
    catalog = b""
    found: list[CheckpointFolder] = []

    def read() -> None:
        nonlocal catalog
        found.append(CheckpointFolder(path) if source is None else source.open())
        headers = [each for each in found[0].files if each.endswith(".safetensors") and not _is_of_one_rank(each)]
        catalog = found[0].catalog([*(name for name in _SMALL if name in found[0].files), *headers])

    verdict = _verdict_of(read, path) if peers.rank == 0 else _SOUND
    verdict, name = peers.exchange([verdict, found[0].path if found else path], f"opening {path}")[0]
    refusal = _hear([verdict], peers)
    if refusal:
        return None, refusal
    catalog = peers.broadcast(catalog, f"catalog of {path}")
    folder = found[0] if found else CheckpointFolder.received(name, catalog)
    return (folder if source is None else source.attach(folder)), ""


def _is_of_one_rank(path: str) -> bool:
    return path.startswith("ranks/") and not path.startswith(TENSORS)


_SOUND = [SOUND, ""]
#: transient errors of a process, a system or a mount: the folder may be sound, so they must not reject it
_OF_A_MOMENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)


def _verdict_of(look: Callable[[], None], path: str) -> list[str]:
    """Call look() and return its outcome for the other ranks: [kind, sentence]."""
    try:
        look()
    except (Mismatch, NewerCheckpointError) as error:
        return [FATAL, str(error)]
    except CheckpointError as error:
        return [FATAL if error.errno in _OF_A_MOMENT else REJECTED, str(error) + _instead(error, path)]
    except (KeyError, TypeError) as error:
        return [REJECTED, f"'{path}': {type(error).__name__}: {error}"]
    except Exception as error:
        return [FATAL, f"'{path}': {type(error).__name__}: {error}"]
    return _SOUND


def _instead(error: CheckpointError, path: str) -> str:
    """Return the words about a path without a checkpoint: the folders in it that may be one."""
    if error.errno != errno.ENOENT or os.path.lexists(os.path.join(path, "MANIFEST.json")):
        return ""
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    inside = [name for name in names if os.path.lexists(os.path.join(path, name, "MANIFEST.json"))]
    offer = (
        f"pass one of the {len(inside)} in it, such as '{os.path.join(path, inside[-1])}'"
        if inside
        else "pass the path that was saved to"
    )
    return f": there is no checkpoint at '{path}', {offer}"


def _hear(verdicts: Sequence[Sequence[str]], peers: Peers) -> str:
    """Return the reason to pass over the folder; "" if all ranks find it sound. Raise CheckpointError for a FATAL verdict."""
    for kind in (FATAL, REJECTED):
        for rank, (found, text) in enumerate(verdicts):
            if found == kind:
                sentence = text if peers.world_size == 1 else f"rank {rank}: {text}"
                if kind == FATAL:
                    raise CheckpointError(sentence)
                return sentence
    return ""


def _share(reader: Reader, offer: str, spare: Sequence[tuple[int, int]], peers: Peers) -> None:
    """Decide whether each rank reads its part of the tensors for all ranks, or all of them itself. Collective on one host.

    `offer`: the digest of its ranges; "" if they are not on a disk.
    """
    mine: list[Any] = [offer, sum(nbytes for _, nbytes in spare)]
    told = [mine] if peers.has_hosts else peers.exchange(mine, f"ranges of {reader.path}")
    if len(told) > 1 and offer and all(each[0] == offer for each in told):
        reader.share(peers.rank, [each[1] for each in told], spare)
    else:
        reader.read_alone(peers.rank, peers.world_size, spare)


def _agree_on_compressor(reader: Reader, peers: Peers) -> None:
    """Decide whether every rank restores the compressor state that it wrote itself. Collective."""
    same = peers.together(lambda: reader.look_at_compressor(peers.rank, peers.world_size), "owner of compressor")
    reader.keeps_compressor = all(same)


def apply_together(reader: Reader, peers: Peers, *, everything: bool) -> Any:
    """Fill the training on every rank and return `extra`. All ranks raise CheckpointError if one fails. Collective."""
    extra = None
    if everything:
        try:
            _agree_on_compressor(reader, peers)
        except BaseException:
            reader.take_back()
            raise

    def apply() -> None:
        nonlocal extra
        extra = reader.apply(peers.rank, peers.world_size, everything=everything)

    if reader.is_shared:
        _load_together(reader, peers, reader.read_rest)
        reader.trade(functools.partial(peers.send, label=f"parts of {reader.path}"))
    _load_together(reader, peers, apply)
    return extra


def _load_together(reader: Reader, peers: Peers, call: Callable[[], None]) -> None:
    """Call call() on every rank. All ranks raise CheckpointError if one fails. Collective."""
    failure = ""
    try:
        call()
    except Exception as error:
        failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    for rank, text in enumerate(peers.exchange(failure, f"load of {reader.path}")):
        if text:
            where = "" if peers.world_size == 1 else f"rank {rank}: "
            raise CheckpointError(f"{where}'{reader.path}' was loaded in part, and the training is not usable: {text}")
