"""save_pretrained: a model as a folder of safetensors that transformers reads, written by all ranks from their slices.

A plan maps each stored tensor to a place in a file, and each rank writes the byte ranges that it holds (format.md has
the bytes of the files). The new folder is made beside the old one, whose other files and folders it takes along. Then
the two exchange names, so that a kill leaves one or the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from stat import S_IMODE
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder, CheckpointPlan
from ..comm.waits import on_every_rank
from ..formats.hugging_face import bytes_of_size, kept_name, reverse, reversed_names, write_config
from ..formats.range_writer import RangeWriter
from ..options.names import offers_names
from ..options.places import absolute_path
from ..parallel.engine import needed_engine
from ..parameters.whole_reads import Reads, check_plain, named_whole, shaped
from ..streaming import check_readable
from ..torch_compat.adapters import Made, has_adapters, merged_names
from ..torch_compat.internals import buffers_of_state, unstored_by_transformers
from .folder.partial import LOCK, is_alive, lock_file, logger, make_folder
from .folder.retention import discard
from .peers import Peers, in_words, os_error, told
from .slices import Sliced, is_row_major
from .state.content import MODEL_METADATA, Group, model_index

_CALL = "save_pretrained"
#: files that a save replaces or removes; it takes others along that it does not write
_OF_A_MODEL = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|" + LOCK)
#: exchange two names; False where the file system cannot
exchange = CheckpointFolder.exchange


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor of the folder. `sources`: what it is made of; `receiver`: the rank that makes it; -1: ranks write slices."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    receiver: int = -1


@offers_names
@on_every_rank("sw.save_pretrained()")
def save_pretrained(
    module: torch.nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    merge_lora: bool = False,
) -> None:
    """Write a wrapped module's weights as a folder that transformers' from_pretrained() and sw.load_pretrained read. Collective.

    Parameters
    ----------
    module : Module
        A wrapped module, at any stage. Of a transformers model the folder has config.json and generation_config.json,
        and names and tensors are those before the conversions with which from_pretrained() loads them.
    folder : path-like
        A folder that all ranks see, to which one job saves at a time. It may exist: its weights are replaced, and the files that the save writes; other files,
        folders and its mode stay.
    max_shard_size : int or str
        Bytes of tensors in one file of safetensors, or a text such as "5GB" or "500MiB". A larger tensor has its own.
    dtype : torch.dtype, optional
        Cast floating-point tensors to it.
    merge_lora : bool
        True to write the base model of a peft module, with its active LoRA adapters added to the weights.

    Raises
    ------
    CheckpointError, ValueError, TypeError
        On all ranks, with one sentence: for arguments that are not legal or differ between ranks, DTensors, groups=,
        conversions that cannot be reversed, and errors of the disk (`errno`). `folder` is then as it was.

    Notes
    -----
    The bytes do not depend on the world size and the stage. They are durable when the call returns. A kill at any moment
    leaves the old folder or the new one; where the file system cannot exchange two names, the old one may be left under
    the name `folder`.replaced. The next save removes what a killed one left.

    Memory: 16 MiB a rank, and on one rank a tensor that is converted, merged or not row-major. Each rank writes the slices
    that it has, or its part of what all have. The space of the old folder and the new one is needed at once.
    """
    engine = needed_engine(_CALL, module)
    replicas, bare, peers = list(engine.replicas), engine.module, Peers(module)
    writer = _Writer(bare, replicas, peers)

    def check() -> tuple[dict[str, Any], tuple[str, CheckpointPlan]]:
        most, place = bytes_of_size(max_shard_size), os.path.realpath(absolute_path("folder", folder))
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
        if not can_be_replaced(place):
            raise ValueError(
                f"folder must be no mount and not hold the working directory: it is renamed, got '{place}'"
            )
        check_readable(replicas, _CALL)
        writer.list_tensors(dtype, merge_lora)
        plan = writer.make_plan(most)
        return {"folder": os.path.basename(place), "plan": plan.digest}, (place, plan)

    place, plan = peers.agree(check, "save_pretrained()")
    for replica in replicas:
        replica.access.before_reads()
    folder_of = _Folder(place)
    try:
        texts = {"model.safetensors.index.json": model_index(plan, [each.name for each in writer.tensors])}
        folder_of.nonce = peers.first(lambda: folder_of.create(plan, texts, writer, dtype), f"folder for {place}")
        peers.together(lambda: writer.write(plan, folder_of.partial), f"weights of {type(bare).__name__}")
        peers.first(folder_of.commit, f"commit of {place}")
    except BaseException as error:
        if not isinstance(error, Exception) and peers.is_alive:  # an interrupt of this rank only
            replicas[0].group.comm.abort(f"save_pretrained: rank {peers.rank}: {error!r}")
        if peers.rank == 0:
            folder_of.abandon()
        raise


def can_be_replaced(place: str) -> bool:
    """Return whether a folder can change its name: it is no mount, and this process does not work in it."""
    inside = os.path.join(os.path.realpath(os.getcwd()), "").startswith(os.path.join(place, ""))
    return not (inside or os.path.ismount(place))


class _Writer:
    """The tensors of the folder, and this rank's parts of them."""

    def __init__(self, bare: Any, replicas: Sequence[Any], peers: Peers) -> None:
        self.bare, self._replicas, self._peers = bare, replicas, peers
        self._reads = Reads(replicas)
        self.tensors: list[_Stored] = []
        self._named: dict[str, torch.Tensor] = {}
        self._made: dict[str, Made] = {}
        self._last: tuple[Sequence[str], dict[str, torch.Tensor]] = (), {}

    def list_tensors(self, dtype: torch.dtype | None, merge_lora: bool) -> None:
        """List the tensors of the folder. Not collective."""
        bare = self.bare
        if has_adapters(bare) and not merge_lora:
            raise ValueError(
                "the module has peft's adapters: merge_lora=True writes the merged model; for the adapters alone call the module's own "
                "save_pretrained() inside sw.full_parameters(model)"
            )
        named = named_whole(bare, remove_duplicate=False)
        for prefix, each in bare.named_modules(remove_duplicate=False):
            named |= {f"{prefix}.{n}" if prefix else n: b for n, b in buffers_of_state(each).items()}
        check_plain(named, _CALL)
        self._named, self._made = named, {name: Made(name) for name in named}
        if merge_lora:
            self._made = merged_names(bare, named)
            self.bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
        names_of: dict[int, list[str]] = {}
        for name, made in self._made.items():
            names_of.setdefault(id(named[made.base]), []).append(name)
        kept = {kept_name(self.bare, names) for names in names_of.values()}
        like = {n: self._like(n) for n in self._made if n in kept and n not in unstored_by_transformers(self.bare)}
        whole: dict[Sequence[str], int] = {}
        for name, stored in reversed_names(self.bare, like).items():
            to = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
            (first, *_), receiver = stored.sources, -1
            if not stored.is_same or self._made[first].adapters or not is_row_major(like[first]):
                receiver = whole.setdefault(stored.sources, len(whole)) % self._peers.world_size
            self.tensors.append(_Stored(name, to, stored.shape, stored.sources, receiver))

    def _like(self, name: str) -> torch.Tensor:
        return self._reads.like(self._named[self._made[name].base])

    def make_plan(self, most: int) -> CheckpointPlan:
        shapes = {each.name: Sliced(each.dtype, each.shape, ()) for each in self.tensors}
        return CheckpointPlan([Group("model", shapes, MODEL_METADATA, max_file_bytes=most).plan_entry()], [])

    def write(self, plan: CheckpointPlan, folder: str) -> None:
        """Write this rank's parts, durably. Collective if reads of whole tensors are."""
        writer, failure, windows = RangeWriter(), None, self._windows()
        try:
            for path, _, _, pieces in plan.files():
                is_open = False
                for number, begin, _ in pieces:
                    each = self.tensors[number]
                    for low, values in self._parts(each, windows[number]):
                        if failure is not None or not values.numel():
                            continue
                        try:
                            if not is_open:
                                writer.open(os.path.join(folder, path))
                                is_open = True
                            writer.write(begin + low * each.dtype.itemsize, values, each.dtype)
                        except Exception as error:  # reads may be collective: go on
                            failure = error
            if failure is None:
                writer.finish()
        except OSError as error:
            failure = error
        finally:
            writer.end()
            self._last = (), {}
        if failure is not None:
            why = in_words(failure) if isinstance(failure, OSError) else str(failure)
            raise os_error(f"'{folder}' could not be written: {why}", getattr(failure, "errno", None)) from failure

    def _windows(self) -> list[tuple[int, int]]:
        """Return [low, high) of the elements that this rank writes of each tensor that all ranks hold: its part of all bytes."""
        rank, count = self._peers.rank, self._peers.world_size
        sources = [self._source(each) for each in self.tensors]
        shared = [
            s is not None and self._reads.place(s)[0] is not None and not self._reads.is_released(s) for s in sources
        ]
        sizes = [
            like.numel() * like.dtype.itemsize if is_in else 0
            for like, is_in in zip(map(self._elements, self.tensors), shared)
        ]
        total, at, found = sum(sizes), 0, []
        edges = total * rank // count, total * (rank + 1) // count
        for each, size in zip(self.tensors, sizes):
            item = self._elements(each).dtype.itemsize
            low, high = (-(-min(max(edge - at, 0), size) // item) for edge in edges)
            found.append((low, high))
            at += size
        return found

    def _source(self, each: _Stored) -> torch.Tensor | None:
        """Return the tensor of which ranks write slices; None for one that a rank makes."""
        return self._named[self._made[each.sources[0]].base] if each.receiver < 0 else None

    def _elements(self, each: _Stored) -> torch.Tensor:
        return self._like(each.sources[0])

    def _parts(self, each: _Stored, window: tuple[int, int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat values) of what this rank writes of a tensor."""
        source = self._source(each)
        if source is None:
            made = self._whole(each)
            if made is not None:
                yield 0, made.contiguous().view(-1)
            return
        replica, _ = self._reads.place(source)
        if replica is None:
            yield from [(0, source.detach().reshape(-1))] if self._peers.rank == 0 else ()
        elif self._reads.is_released(source):
            low, piece = self._reads.own(source)
            row, rows = replica.slicing.replica_of_rank[replica.slicing.rank], max(replica.slicing.replica_of_rank) + 1
            first, end = piece.numel() * row // rows, piece.numel() * (row + 1) // rows
            yield low + first, piece[first:end]
        else:
            yield window[0], source.detach().reshape(-1)[window[0] : window[1]]

    def _whole(self, each: _Stored) -> torch.Tensor | None:
        """Return a tensor that one rank makes of whole ones, on that rank. Collective if reads are."""
        is_mine = each.receiver == self._peers.rank
        if self._last[0] != each.sources and (is_mine or self._reads.sends):
            needed = [name for of in each.sources for name in self._made[of].sources]
            tensors = [self._named[name] for name in needed]
            flat = dict(zip(needed, self._reads.gather(tensors)))
            whole = {name: shaped(values, self._reads.like(self._named[name])) for name, values in flat.items()}
            self._last = each.sources, self._convert(each, whole) if is_mine else {}
        return self._last[1].get(each.name) if is_mine else None

    def _convert(self, each: _Stored, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sources = {}
        for name in each.sources:
            base, *factors = self._made[name].sources
            self._made[name].add(whole[base], [whole[factor] for factor in factors])
            sources[name] = whole[base]
        made = reverse(self.bare, sources)
        if each.name not in made or tuple(made[each.name].shape) != each.shape:
            raise CheckpointError(f"transformers reverses {sorted(sources)} to other tensors than '{each.name}'")
        return made


class _Folder:
    """The new folder beside the old one, on rank 0. `nonce`: what create() returned there."""

    def __init__(self, place: str) -> None:
        self._place, self.nonce = place, ""
        self._lock = -1

    @property
    def partial(self) -> str:
        return f"{self._place}.{self.nonce}.model"

    def create(
        self, plan: CheckpointPlan, texts: Mapping[str, bytes], writer: _Writer, dtype: torch.dtype | None
    ) -> str:
        """Make the folder with all files at full size and with their disk space. Return the nonce."""
        with told(f"'{self._place}' cannot be written"):
            make_folder(os.path.dirname(self._place))
            if os.path.lexists(self._place) and not os.path.isdir(self._place):
                raise CheckpointError(f"'{self._place}' is no folder")
            self._clean()
            self.nonce = f"d{secrets.token_hex(12)}"
            os.mkdir(self.partial, 0o700 if os.path.isdir(self._place) else 0o777)
            if os.path.isdir(self._place):
                _own_alike(self._place, self.partial)
            self._lock = os.open(os.path.join(self.partial, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(CheckpointError):  # a file system without locks
                lock_file(self._lock, self.partial)
            plan.create_files(self.partial)
            for name, text in texts.items():
                if text:
                    with open(os.path.join(self.partial, name), "wb") as file:
                        file.write(text)
            write_config(writer.bare, dtype, self.partial)
        return self.nonce

    def commit(self) -> None:
        """Take the other files of the old folder along, and let the new one have its name."""
        with told(f"'{self._place}' cannot be replaced"):
            if os.path.isdir(self._place):
                self._take_along()
            for name in os.listdir(self.partial):
                path = os.path.join(self.partial, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    CheckpointPlan.sync(path)
            CheckpointFolder.sync(self.partial)
            self._exchange()
            try:
                CheckpointFolder.sync(os.path.dirname(self._place))
            except CheckpointError:  # the new name may not outlive a power cut
                if os.path.lexists(self.partial):
                    self._exchange()
                raise

        try:
            if os.path.isdir(self.partial):
                _bring_new(self._place, self.partial)
                _bring_back(self._place, self.partial)
            _remove_replaced(self.partial)
        except (OSError, CheckpointError) as error:  # the new folder is complete; the next save tries again
            logger.warning("'%s' could not be removed: %s", self.partial, in_words(error))
        self._end()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._place, LOCK))

    def _take_along(self) -> None:
        """Link other files of the old folder into the new one; symbolic links lead to where its folders will be."""
        lock = os.path.join(self._place, LOCK)  # so that a killed save's old folder is known to be dead
        with contextlib.suppress(OSError):
            try:
                os.link(os.path.join(self.partial, LOCK), lock)
            except OSError:  # a file system without links
                open(lock, "ab").close()
        for entry in os.scandir(self._place):
            new = os.path.join(self.partial, entry.name)
            if _OF_A_MODEL.fullmatch(entry.name) or os.path.lexists(new):
                continue
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), new)
            elif entry.is_dir():
                os.symlink(os.path.join("..", os.path.basename(self.partial), entry.name), new)
            else:
                try:
                    os.link(entry.path, new)
                except OSError:
                    shutil.copy2(entry.path, new)

    def _exchange(self) -> None:
        if not os.path.lexists(self._place):
            os.rename(self.partial, self._place)
        elif not exchange(self.partial, self._place):
            replaced = f"{self._place}.replaced"
            os.rename(self._place, replaced)
            os.rename(self.partial, self._place)
            os.rename(replaced, self.partial)

    def _clean(self) -> None:
        """Remove what killed saves left beside the folder, once its own folders are out of it."""
        parent, name = os.path.split(self._place)
        ours = re.compile(re.escape(name) + r"\.d[0-9a-f]{24}\.model")
        dead = [os.path.join(parent, each) for each in filter(ours.fullmatch, os.listdir(parent))]
        replaced = f"{self._place}.replaced"
        if os.path.isdir(replaced) and not os.path.lexists(self._place):
            os.rename(replaced, self._place)
        elif os.path.lexists(os.path.join(replaced, LOCK)):  # the old folder, not the user's of that name
            if os.listdir(self._place):
                dead.append(replaced)
            else:  # a program made it since
                os.rename(replaced, self._place)
        for path in dead:
            if is_alive(path) is not True:  # one job at a time saves to a folder
                if os.path.isdir(self._place):
                    if path == replaced:
                        _bring_new(self._place, path)
                    _bring_back(self._place, path)
                _remove_replaced(path)

    def abandon(self) -> None:
        """Remove the new folder."""
        self._end()
        if self.nonce and os.path.isdir(self.partial):
            _remove_replaced(self.partial)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._place, LOCK))

    def _end(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _own_alike(old: str, new: str) -> None:
    """Give a new folder the mode of the old one, and its owner and group as far as the system allows."""
    stat = os.stat(old)
    for owner, group in ((-1, stat.st_gid), (stat.st_uid, -1)):
        with contextlib.suppress(OSError):
            os.chown(new, owner, group)
    os.chmod(new, S_IMODE(stat.st_mode) | 0o700)


def _bring_back(folder: str, old: str) -> None:
    """Move folders of the old folder to the new one, each in place of the link that led to it."""
    leads = re.compile(r"\.\./" + re.escape(os.path.basename(folder)) + r"\.d[0-9a-f]{24}\.model/")
    for entry in [each for each in os.scandir(old) if each.is_dir(follow_symlinks=False)]:
        link = os.path.join(folder, entry.name)
        if not os.path.lexists(link):
            os.rename(entry.path, link)
        elif os.path.islink(link) and leads.match(os.readlink(link)) and not exchange(link, entry.path):
            os.unlink(link)
            os.rename(entry.path, link)
    CheckpointFolder.sync(folder)


def _bring_new(folder: str, old: str) -> None:
    """Take along files that came into the old folder after its names were read."""
    for entry in [each for each in os.scandir(old) if not each.is_dir(follow_symlinks=False)]:
        new = os.path.join(folder, entry.name)
        if not _OF_A_MODEL.fullmatch(entry.name) and not os.path.lexists(new):
            os.rename(entry.path, new)


def _remove_replaced(path: str) -> None:
    """Remove a folder of which only files and links are left; one that still has folders stays."""
    if os.path.isdir(path) and not any(entry.is_dir(follow_symlinks=False) for entry in os.scandir(path)):
        discard(path)
