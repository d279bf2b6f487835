"""Writer: one rank's part in a series of saves, from agreement on the content to the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .._engine import CheckpointError, CheckpointPlan, CheckpointSaver, CommError, Error
from ..comm.failures import PEER_LOST
from ..comm.waits import Wait
from ..torch_compat.dtensor import is_dtensor
from . import tree
from .device_staging import DeviceStaging
from .folder.partial import is_abandoned
from .joined import compressors_of, members_of, sharded_of
from .memory.repeated import Last, Repeated, optimizer_json
from .memory.tier import MemoryTier
from .peers import Peers, averages_gradients, os_error, whole_parameters
from .rows import Rows, Structure, add_rows, dense, structure_of
from .samples import Samples, check_alike, digest, take_samples
from .slices import (
    VALUE,
    Boxes,
    Entry,
    Sliced,
    compact,
    describe_state,
    expand,
    held_bytes,
    held_values,
    is_row_major,
    is_sliced,
    loads_slices,
    released_slices,
    sliced_state,
)
from .state.content import (
    Content,
    Entries,
    Group,
    Source,
    digest_of,
    holds_shards,
    model_group,
    model_index,
    optimizer_content,
    random_state,
    stateful_tree,
)
from .state.names import ModelTensors, model_tensors
from .state.optimizer_extras import check_inside, unseen_attributes
from .training import Training

logger = logging.getLogger("shardwright")
_POLL_S, _ROUND_S = 0.1, 0.5
#: seconds for which a save goes on after a rank was lost: its outcome may still arrive; or cannot, as far as this rank knows
_GRACE_S, _HURRIED_S = 5.0, 0.2
#: the same if a rank of another host was lost: its peers there report it, unless it was alone
_FAR_S = 0.5
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
#: limit of the names kept for messages; beyond it a lazy save reports a changed tensor by its position in a file
_NAMES_KEPT_BYTES = 4 << 20


@dataclasses.dataclass
class _Draft:
    """The content that one rank contributes to a save, before the ranks agree.

    Attributes
    ----------
    found : ModelTensors
    described : dict
        The entries of a sliced optimizer's state that this rank holds.
    body, tensors
        The tree and the tensors of the rank's own state.
    samples, checksums
        Checksums of replicated tensors, and of buffers.
    released, passing
        Slices of released parameters, and the released parameters that are saved whole; both keyed by id().
    state : (tree, tensors), optional
        The content of state.json, on rank 0 and on ranks that hold DTensors of it.
    repeated : Repeated, optional
        The sources of model and optimizer from the last save, if the training still has the same tensors.
    """

    found: ModelTensors
    described: dict[int, dict[str, Entry]]
    body: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    samples: Samples
    checksums: dict[str, int]
    released: dict[int, Sliced]
    passing: set[int]
    state: tuple[dict[str, Any], dict[str, torch.Tensor]] | None
    repeated: Repeated | None = None

    @property
    def line_bytes(self) -> int:
        return len(tree.dumps(self.body))

    @property
    def shards(self) -> dict[str, torch.Tensor]:
        """The DTensors in the state."""
        return {n: t for n, t in self.state[1].items() if is_dtensor(t)} if self.state is not None else {}

    def state_structure(self) -> list[tuple[str, str, list[int]]] | None:
        """Describe all tensors in the state; None unless some are DTensors."""
        return structure_of(self.state[1]) if self.shards else None  # type: ignore[index]


@dataclasses.dataclass
class _Layout:
    """The layout that saves share until the training of some rank no longer fits it.

    Attributes
    ----------
    described : dict
        The entries of a sliced optimizer's state on all ranks.
    rows : Rows
    has_values : bool
        True if some entries are not tensors: rank 0 gathers and writes them.
    state : Structure, optional
        The tensors of rank 0's state, if some are DTensors.
    own : dict
        This rank's part of `described`.
    digest : bytes
        Digest of the plan's arguments, which take more memory than the plan.
    index : bytes, optional
        The text of model.safetensors.index.json on rank 0.
    """

    described: dict[int, dict[str, Entry]]
    rows: Rows
    has_values: bool
    state: Structure | None
    own: dict[int, dict[str, Entry]]
    digest: bytes = b""
    plan: CheckpointPlan | None = None
    index: bytes | None = None

    def fits(self, draft: _Draft) -> bool:
        return (
            self.own == draft.described
            and self.rows.fits(structure_of(draft.tensors), draft.line_bytes)
            and self._fits_state(draft)
        )

    def _fits_state(self, draft: _Draft) -> bool:
        if self.rows.rank == 0:
            return draft.state_structure() == self.state
        return all(entry in (self.state or ()) for entry in structure_of(draft.shards))


@dataclasses.dataclass
class Ready:
    """The content of one step on a rank: its sources, rank 0's own files, and the owner of their memory."""

    sources: list[Source] | bytes
    own: Content | None
    held: Content


class Writer:
    """A rank's part in saves, one save at a time. The constructor is collective: ranks agree on nonce and channel.

    `nonce`: new_nonce() of rank 0, the prefix of the nonces of all saves. `board`: path of the file through which ranks
    of several hosts report failures; each Writer needs its own. None: this Writer cannot save.
    """

    def __init__(
        self,
        peers: Peers,
        nonce: str,
        board: str | None,
        *,
        threads: int,
        direct: bool,
        idle_io: bool = False,
        bandwidth: int,
        timeout_s: float,
        max_file_bytes: int,
    ) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._max_file_bytes = max_file_bytes
        self._nonce_prefix = nonce
        self._number = self._kept = 0
        self.last = Last()
        self._draft: _Draft | None = None  # the draft of content that is not yet in `last`
        self._entries_text = b""  # the text of "state" in optimizer.json, on rank 0
        self._planned: tuple[Entries, CheckpointPlan] | None = None  # of rank 0's own files in memory
        self._random: dict[str, Any] = {}  # content.random_state of the last step
        self._held: Content | None = None
        self._target = "", ""  # folder and nonce of the last save
        self._has_lost_host = False
        self._spoiled = ""  # the reason why the beginning save must be cancelled
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._staging = DeviceStaging()
        self._boxes = Boxes(peers.global_ranks, peers.replicas)
        self._layout: _Layout | None = None
        self._warned: set[str] = set()
        self._board = board
        channel: tuple[Any, ...] = (0, 1)
        if board is not None:
            channel = (peers.rank, peers.world_size, *peers.channel(board, self._nonce_prefix))
        self._saver = CheckpointSaver(
            *channel,
            threads=threads,
            direct=direct,
            idle_io=idle_io,
            bandwidth=bandwidth,
        )
        if board is not None:
            peers.check_board(board, self._nonce_prefix)

    def begin(
        self,
        folder: str,
        step: int,
        training: Training,
        *,
        lazy: bool = False,
        metric: float | None = None,
        stale: Sequence[str] = (),
        retired: Sequence[str] = (),
        replaces: str = "",
    ) -> None:
        """Take the snapshot and start writing. Every rank calls begin() or refuse() at the same steps.

        Parameters
        ----------
        replaces : str
            On rank 0: CheckpointFolder.identity(folder) at the start of the save. The commit fails if the identity has
            changed.

        Raises
        ------
        CheckpointError
            On all ranks, for a failure before the agreement. Other ranks raise a later failure in their next save() or
            wait().
        """
        assert self._board is not None
        try:
            self._peers.renew_board(self._board, self._nonce_prefix)
        except CheckpointError as error:
            self.refuse(error)
        self._number += 1
        has_agreed = False
        try:
            slices, passing = released_slices(training.model)
            with whole_parameters(training.model, writable=False) if passing else contextlib.nullcontext():
                content, own, plan = self._agree(training, step, slices, passing)
                has_agreed = True
                sources = self._sources(training, content, plan)
                self._start(folder, step, content, sources, own, plan, lazy, metric, stale, retired, replaces)
        except BaseException as error:
            sentence = str(error)
            if not isinstance(error, CheckpointError):
                sentence = f"'{folder}' could not be saved: {type(error).__name__}: {error}"
            self._give_up(_tellable(sentence))
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if has_agreed and self._peers.world_size > 1:  # the others raise the same message later
                sentence = f"rank {self._peers.rank}: {sentence}"
            elif isinstance(error, CheckpointError):
                raise
            raise os_error(sentence, getattr(error, "errno", None)) from error

    def repeat(self, step: int, training: Training) -> Ready | None:
        """Return this rank's content of a step without agreement. Needs the tensors of the last step that keep()
        copied, and other state that fits the layout; else, or on any error, returns None. Not collective."""
        last, layout = self.last.value, self._layout
        if (
            last is None
            or layout is None
            or layout.plan is None
            or last.layout is not layout
            or not last.needs_no_agreement
            or not last.fits(training)
        ):
            return None
        try:
            held = last.rest(layout.rows, *self._own_tree(training), self._staging)
            if held is None:
                return None
            own = None
            if self._peers.rank == 0:
                optimizer_text = last.optimizer_text(training)
                own = self._own_files(_state_tree(training, last.found, step), layout, optimizer_text, last.found)
            return Ready(held.sources, own, held.content)
        except Exception:  # keep() then meets the same error, and its agreement raises it on all ranks
            return None

    def keep(self, step: int, training: Training, tier: MemoryTier, ready: Ready | None) -> None:
        """Copy this rank's share into memory that outlives the rank. Call on all ranks, after tier.is_due().

        Parameters
        ----------
        ready : Ready, optional
            The result of repeat(), if all ranks have one; it makes the agreement unnecessary.

        Raises
        ------
        CheckpointError
            On all ranks, for a failure before the agreement. A later failure ends the tier.
        """
        self._kept += 1
        nonce = f"{self._nonce_prefix}m{_base36(self._kept)}"
        if ready is not None:
            self._put(step, nonce, training, tier, ready)
            return
        slices, passing = released_slices(training.model)
        with whole_parameters(training.model, writable=False) if passing else contextlib.nullcontext():
            content, own, plan = self._agree(training, step, slices, passing)
            sources = self._sources(training, content, plan)
            self._put(step, nonce, training, tier, Ready(sources, own, content))

    def _put(self, step: int, nonce: str, training: Training, tier: MemoryTier, ready: Ready) -> None:
        assert self._layout is not None and self._layout.plan is not None
        own = None if ready.own is None else (self._own_plan(ready.own), ready.own.sources())

        def share() -> tuple[int, bool]:
            held = held_bytes(training.model, training.optimizer, self._peers.world_size)
            return held, loads_slices(training.model)

        tier.put(step, nonce, self._layout, self._layout.plan, ready.sources, own, share, self._staging.for_saver())

    def _own_plan(self, own: Content) -> CheckpointPlan:
        """Return the plan of rank 0's own files, the last one if they have the same names and sizes."""
        entries = own.entries()
        if self._planned is None or self._planned[0] != entries:
            self._planned = entries, CheckpointPlan(*entries)
        return self._planned[1]

    def _give_up(self, reason: str) -> None:
        """Abandon a save that is being started. Its threads may already read memory that this writer keeps alive."""
        if self.is_busy:
            self._saver.cancel(reason)
            with contextlib.suppress(CheckpointError, MemoryError):  # the caller raises the first error
                self.wait_alone()
        else:
            self._saver.fail(self._number, reason)
        self._held, self._versions = None, []

    def warm(self, training: Training, *, lazy: bool) -> None:
        """Fault in the staging memory of the first save, in the background and without communication."""
        nbytes = held_bytes(training.model, training.optimizer, self._peers.world_size)
        self._saver.warm(nbytes // 2 if lazy else nbytes)  # a lazy save writes most chunks from live memory

    def refuse(self, error: Exception) -> NoReturn:
        """Report a failure in the agreement, so that no rank begins this save. All ranks raise the same sentence; a rank
        with a wrong argument raises its own ValueError."""
        self._number += 1
        try:
            self._hear(None, error)
        except CheckpointError:
            if isinstance(error, CheckpointError):
                raise
        except Exception as lost:  # the own error is the cause to report
            raise error from lost
        raise error

    def _start(
        self,
        folder: str,
        step: int,
        shared: Content,
        sources: list[Source],
        own: Content | None,
        plan: CheckpointPlan,
        lazy: bool,
        metric: float | None,
        stale: Sequence[str],
        retired: Sequence[str],
        replaces: str,
    ) -> None:
        self._held, self._spoiled = shared if lazy else None, ""
        self._target = folder, self._nonce_prefix + _base36(self._number)
        plan.trim(self._peers.rank, self._peers.world_size, _NAMES_KEPT_BYTES if lazy else 0)
        self._saver.begin(
            folder=folder,
            nonce=self._target[1],
            replaces=replaces,
            number=self._number,
            step=step,
            metric=metric,
            shared=plan,
            shared_sources=sources,
            own=None if own is None else own.plan(),
            own_sources=[] if own is None else own.sources(),
            lazy=lazy,
            stale=list(stale),
            retired=list(retired),
            timeout_s=self._timeout_s,
            device=self._staging.for_saver(),
        )
        if self._spoiled:
            self._saver.cancel(_tellable(self._spoiled))
        if lazy:
            live = [(n, t) for g in shared.all_groups() for n, t in g.tensors.items() if n not in g.eager]
            watched = [(n, each) for n, t in live for each in (t.live if isinstance(t, Sliced) else (t,))]
            self._versions = [(n, each, each._version) for n, each in watched if not self._staging.takes(each)]

    def _sources(self, training: Training, content: Content, plan: CheckpointPlan) -> list[Source]:
        """Return this rank's sources, and cache those of model and optimizer for the next save."""
        sources = content.sources(plan.needed(self._peers.rank, self._peers.world_size))
        draft, self._draft = self._draft, None
        if draft is not None:
            last = Repeated(training, self._layout, draft.found, content, sources, self._entries_text, draft.released)
            self.last.value = last if last.is_usable else None
        return sources

    # agreement ----------------------------------------------------------------------------------------------------------

    def _agree(
        self, training: Training, step: int, released: dict[int, Sliced], passing: set[int]
    ) -> tuple[Content, Content | None, CheckpointPlan]:
        """Return the shared content, rank 0's own content, and the plan of the shared content. Collective.

        Costs one exchange while the layout fits all ranks, and 1 us per tensor while this rank has the same tensors.
        Otherwise ranks exchange descriptions of the state that they hold.
        """
        draft, failure = None, None
        try:
            draft = self._find(training, step, released, passing)
        except Exception as error:
            failure = error
        is_new = self._hear(draft, failure, averages_gradients(training.model))
        assert draft is not None
        if is_new or self._layout is None:
            self._layout = self._lay_out(draft)
        return self._content(training, draft, self._layout)

    def _find(self, training: Training, step: int, released: dict[int, Sliced], passing: set[int]) -> _Draft:
        last, optimizer = self._last_fitting(training, released, passing), training.optimizer
        found = model_tensors(training.model) if last is None else last.found
        described = {} if last is None else last.layout.own
        if last is None:
            described = describe_state(optimizer)
        if optimizer is not None:
            self._look_for_more(training)
        body, tensors = self._own_tree(training)
        samples: Samples = {}
        checksums: dict[str, int] = {}
        if self._peers.world_size > 1:
            samples = take_samples(found, None if is_sliced(training.model, optimizer) else optimizer)
            checksums = self._staging.checksums(found.buffers)
        state = None
        if self._peers.rank == 0 or holds_shards([training.user_state, training.extra]):
            state = _state_tree(training, found, step)
        return _Draft(found, described, body, tensors, samples, checksums, released, passing, state, last)

    def _last_fitting(self, training: Training, released: dict[int, Sliced], passing: set[int]) -> Repeated | None:
        """Return the last save's sources if, judging by this rank alone, they fit this save; else None."""
        last = self.last.value
        if last is None or last.layout is not self._layout or passing or not last.fits(training, released):
            self.last.value = last = None
        return last

    def _own_tree(self, training: Training) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the tree and the tensors of this rank's own state, without buffers."""
        tensors: dict[str, torch.Tensor] = {}
        body = {
            "random": random_state(tensors, self._random),
            "dataloader": stateful_tree(training.dataloader, "dataloader", tensors),
            "compressor": tree.encode(_compressor_state(training.model), "compressor", tensors),
            "buffers": {},
        }
        return body, tensors

    def _hear(self, draft: _Draft | None, failure: Exception | None, is_averaged: bool = False) -> bool:
        """Return True if the training of some rank does not fit the layout. Collective.

        A failure on one rank raises on all; so do replicated tensors that differ between ranks, unless `is_averaged`.
        Buffers that differ from rank 0's become part of the rank's own content.
        """
        reason = "" if failure is None else str(failure) or type(failure).__name__
        mine = [reason, False, 0, 0]
        if draft is not None:
            mine = [reason, self._is_new(draft), digest(draft.samples), digest(draft.checksums)]
        answers = self._peers.agreement(mine, "replicated content of a save")
        self._peers.raise_first([why for why, *_ in answers or [mine]], failure)
        assert draft is not None
        if answers is None:
            return bool(mine[1])
        _, are_new, samples, checksums = zip(*answers)
        if len({*samples}) > 1:
            check_alike(self._peers.exchange(draft.samples, "samples of replicated tensors"), is_averaged=is_averaged)
        if len({*checksums}) == 1:
            return any(are_new)
        first = self._peers.exchange(draft.checksums if self._peers.rank == 0 else None, "buffers of rank 0")[0]
        for name in (name for name, crc in draft.checksums.items() if first.get(name) != crc):
            draft.body["buffers"][name] = tree.encode(draft.found.buffers[name], f"buffer.{name}", draft.tensors)
        return self._peers.agreement(self._is_new(draft), "layout of a checkpoint") is not None or self._is_new(draft)

    def _is_new(self, draft: _Draft) -> bool:
        return self._layout is None or self._layout.plan is None or not self._layout.fits(draft)

    def _lay_out(self, draft: _Draft) -> _Layout:
        """Make a layout from the descriptions of all ranks. Collective."""
        state = draft.state_structure() if self._peers.rank == 0 else list(draft.shards) or None
        mine = [compact(draft.described), structure_of(draft.tensors), draft.line_bytes, state]
        of_all = self._peers.exchange(mine, "sliced content of a save")
        state = of_all[0][3]
        for rank, (*_, theirs) in enumerate(of_all[1:], 1):
            odd = [name for name in theirs or () if name not in [each for each, *_ in state or ()]]
            if odd:
                raise CheckpointError(f"rank {rank} holds a part of '{odd[0]}' and rank 0 does not: it cannot be saved")
        described: dict[int, dict[str, Entry]] = {}
        for theirs, *_ in of_all:
            described |= expand(theirs)
        has_values = any(how == VALUE for keys in described.values() for how, _, _ in keys.values())
        own = Rows.over([(structure, nbytes) for _, structure, nbytes, _ in of_all], self._peers.rank)
        state = None if state is None else [(n, d, list(s)) for n, d, s in state]
        return _Layout(described, own, has_values, state, draft.described)

    def _content(
        self, training: Training, draft: _Draft, layout: _Layout
    ) -> tuple[Content, Content | None, CheckpointPlan]:
        if draft.repeated is not None and draft.repeated.layout is layout and layout.plan is not None:
            return *self._repeated_content(training, draft, layout, draft.repeated), layout.plan
        optimizer, is_new = training.optimizer, layout.plan is None
        made: list[tuple[Content, Content | None]] = []

        def make() -> int:
            states = None
            if sharded_of(optimizer):
                states = sliced_state(optimizer, layout.described, self._values(optimizer, layout))
            content, optimizer_tree = self._shared_content(training, draft, states, layout)
            entries = content.entries()
            digest = digest_of(entries)
            if layout.plan is None or layout.digest != digest:
                layout.digest, layout.plan, layout.index = digest, CheckpointPlan(*entries), None
            made.append((content, self._own_content(draft, layout, optimizer_tree)))
            return layout.plan.digest

        # with an unchanged layout make() gathers nothing, so a failure here leaves no other rank waiting
        gathers = not all(is_row_major(layout) for each in sharded_of(optimizer) for layout in each.layouts())
        if is_new or gathers or layout.has_values:
            digests = self._peers.together(make, "plan of a checkpoint")
            if any(each != digests[0] for each in digests):
                other = next(rank for rank, each in enumerate(digests) if each != digests[0])
                raise CheckpointError(
                    f"rank {other} would write other files than rank 0: names, shapes, dtypes or max_file_bytes differ"
                )
        else:
            make()
        assert layout.plan is not None
        self.last.value, self._draft = None, None if gathers or layout.has_values or draft.passing else draft
        return *made[0], layout.plan

    def _repeated_content(
        self, training: Training, draft: _Draft, layout: _Layout, last: Repeated
    ) -> tuple[Content, Content | None]:
        """Build the content from the last save's sources of model and optimizer, without communication."""
        rest = Content([], self._staging, ahead=last)
        add_rows(rest, layout.rows, tree.dumps(draft.body), draft.tensors)
        self._add_state(rest, draft, layout)
        rest.slice_tensors(self._boxes)
        if self._peers.rank:
            return rest, None
        assert draft.state is not None
        return rest, self._own_files(draft.state, layout, last.optimizer_text(training), draft.found)

    def _values(self, optimizer: Any, layout: _Layout) -> dict[int, dict[str, Any]]:
        """Gather the non-tensor entries of the optimizer's state on rank 0. Collective if the layout has any."""
        if not layout.has_values:
            return {}
        told = self._peers.gather(list(held_values(optimizer).items()), "values of the optimizer's state")
        return {number: values for each in told for number, values in each}

    def _shared_content(
        self, training: Training, draft: _Draft, states: Any, layout: _Layout
    ) -> tuple[Content, dict[str, Any] | None]:
        model = model_group(draft.found, self._max_file_bytes)
        parameters = draft.found.parameters.items()
        model.tensors |= {n: draft.released[id(p)] for n, p in parameters if id(p) in draft.released}
        model.eager |= {n for n, p in parameters if id(p) in draft.passing}  # a lazy snapshot would read them too late
        shared = Content([model], self._staging)
        optimizer_tree = None
        if training.optimizer is not None:
            group, optimizer_tree = optimizer_content(training.optimizer, draft.found, self._max_file_bytes, states)
            shared.groups.append(group)
        add_rows(shared, layout.rows, tree.dumps(draft.body), draft.tensors)
        self._add_state(shared, draft, layout)
        shared.slice_tensors(self._boxes)
        return shared, optimizer_tree

    def _add_state(self, content: Content, draft: _Draft, layout: _Layout) -> None:
        """Add the tensors of rank 0's state to the shared content, if some are DTensors."""
        if layout.state is not None:
            held = draft.state[1] if draft.state is not None else {}
            parts = {n: self._part_of_state(held.get(n), dtype, shape) for n, dtype, shape in layout.state}
            content.groups.append(Group("state", parts, {"format": "pt"}, eager=frozenset(parts)))

    def _part_of_state(self, tensor: torch.Tensor | None, dtype: str, shape: Sequence[int]) -> Any:
        """Return a DTensor unchanged; for any other tensor return a Sliced that rank 0 holds whole."""
        if tensor is not None and is_dtensor(tensor):
            return tensor
        mine = tensor is not None and self._peers.rank == 0
        parts = ((0, dense(tensor).reshape(-1)),) if mine and tensor is not None else ()
        return Sliced(getattr(torch, dtype), tuple(shape), parts)

    def _look_for_more(self, training: Training) -> None:
        """Raise CheckpointError for optimizer state that a checkpoint cannot hold. Log attributes that may be state."""
        for each in members_of(training.optimizer):
            check_inside(each, training.user_state, training.extra)
        for name in (name for each in members_of(training.optimizer) for name in unseen_attributes(each)):
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "the optimizer's attribute '%s' has tensors that neither its state nor its state_dict() has: if they are "
                    "state, no checkpoint holds it",
                    name,
                )

    def _own_content(self, draft: _Draft, layout: _Layout, optimizer_tree: dict[str, Any] | None) -> Content | None:
        """Return the content that rank 0 alone writes; None on other ranks."""
        if self._peers.rank:
            return None
        assert draft.state is not None
        optimizer_text, self._entries_text = b"", b""
        if optimizer_tree is not None and "further" not in optimizer_tree:
            self._entries_text = tree.dumps(optimizer_tree["state"]).rstrip()
            optimizer_text = optimizer_json(optimizer_tree["groups"], self._entries_text)
        elif optimizer_tree is not None:
            optimizer_text = tree.dumps(optimizer_tree)
        return self._own_files(draft.state, layout, optimizer_text, draft.found)

    def _own_files(self, state: Any, layout: _Layout, optimizer_text: bytes, found: ModelTensors) -> Content:
        body, tensors = state
        own = Content([Group("state", dict(tensors), {"format": "pt"})] if layout.state is None else [], self._staging)
        own.texts["state.json"] = tree.dumps(body)
        if optimizer_text:
            own.texts["optimizer.json"] = optimizer_text
        if layout.index is None:
            layout.index = model_index(layout.plan, list(found.all()))
        if layout.index:
            own.texts["model.safetensors.index.json"] = layout.index
        return own

    # outcome ----------------------------------------------------------------------------------------------------------

    def protect(self) -> None:
        """Copy what a lazy snapshot has not read yet, before a write to it. Never raises: wait() reports a failure."""
        if self._held is None:
            return
        try:
            self._cancel_if_changed()
            self._saver.protect()
            self._held = None
        except (CheckpointError, MemoryError) as error:
            logger.warning("the save under way failed: %s", error)
            self._spoiled = f"the state that optimizer.step() overwrites could not be copied: {error}"
            self._saver.cancel(_tellable(self._spoiled))  # another thread that is starting the save reads _spoiled

    def _cancel_if_changed(self) -> None:
        """Cancel a lazy save if anything but the optimizer's step wrote to its tensors: it may mix old and new."""
        changed = next((name for name, tensor, version in self._versions if tensor._version != version), None)
        self._versions = []
        if changed is not None and self.is_busy:
            self._saver.cancel(
                f"'{changed}' was changed before the optimizer's step, while it was being saved: use snapshot='copy'"
            )
        elif changed is not None:
            logger.warning(
                "'%s' was changed outside the optimizer's step since the last save with snapshot='lazy' began. That save has ended; if "
                "the change came before its end, it holds values of two moments: use snapshot='copy', or wait() before the change",
                changed,
            )

    @property
    def is_busy(self) -> bool:
        return bool(self._saver.progress()["busy"])

    def wait(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait until no save runs. Collective over several hosts, because only an exchange detects a dead rank there.

        `is_hurried`: see wait_alone().

        Raises
        ------
        CheckpointError
            The save failed on some rank. All ranks raise the same sentence, once for each save.
        """
        self._cancel_if_changed()
        failure: CheckpointError | None = None
        over, of_all = False, [False]
        while self._peers.has_hosts and not all(of_all):
            try:
                over = over or self._saver.wait(_ROUND_S)
            except CheckpointError as error:
                over, failure = True, error
            try:
                of_all = self._peers.exchange(over, "waiting for a checkpoint")
            except Error as error:  # a rank died or made a different collective call; the outcome may still arrive
                self._has_lost_host = type(error) is CommError and self._peers.dead_rank is None
                break
        if failure is not None:
            raise failure
        self.wait_alone(is_hurried)

    def wait_alone(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait as wait() does, without communication. `is_hurried`: returns True if a launcher is ending this rank;
        shortens the wait for an outcome after a peer has died."""
        lost_at: float | None = None
        wait: Wait | None = None
        while not self._saver.wait(_POLL_S):
            if lost_at is None and not self._peers.is_alive:
                lost_at = time.monotonic()
            if lost_at is not None and time.monotonic() - lost_at > self._grace_s(is_hurried):
                reason = self._peers.end_reason
                self._saver.cancel(_tellable(f"{PEER_LOST} while the checkpoint was written{reason and ': ' + reason}"))
            unwritten = self._saver.unwritten()
            if self._peers.rank not in unwritten:  # it waits for others, and does not work any more
                wait = wait or self._peers.wait()
                wait.look(functools.partial(self._waits_for, unwritten))
        self._held = None

    def _grace_s(self, is_hurried: Callable[[], bool]) -> float:
        """Return how long to wait for an outcome after a peer was lost: briefly if none can come.

        A rank that died before it had written takes the save with it; so does rank 0, which decides. The outcome of
        others, and a verdict given before, may still arrive."""
        dead = self._peers.dead_rank
        is_lost = dead is not None and (dead in self._saver.unwritten() or (dead == 0 and not self._peers.has_hosts))
        if is_lost or is_hurried() or is_abandoned(*self._target):
            return _HURRIED_S
        return _FAR_S if self._has_lost_host else _GRACE_S

    def _waits_for(self, unwritten: Sequence[int], waited_s: float) -> str:
        peers = self._peers
        awaited = f"{peers.names_of(unwritten)} to write" if unwritten else f"{peers.names_of([0])} to commit"
        if not unwritten and peers.has_hosts:
            awaited = "the other hosts to write, or for " + awaited
        return (
            f"rank {peers.rank} has waited {waited_s:.1f} s in the save to '{self._target[0]}' for {awaited}; "
            f"the deadline of the save is {self._timeout_s:g} s"
        )

    def progress(self) -> dict[str, int]:
        return {**self._saver.progress(), "device_bytes": self._staging.stats().get("bytes_down", 0)}

    def spare(self) -> list[tuple[int, int]]:
        """Return (address, nbytes) of staging memory that is free until the next save."""
        return self._saver.spare()

    def close(self) -> None:
        """Cancel a running save and free all memory. Call wait() first."""
        self._held = None
        self._saver.close()
        self._staging.close()


def new_nonce() -> str:
    return secrets.token_hex(12)


def _compressor_state(model: Any) -> dict[str, Any] | None:
    """Return the state of the model's compressor on this rank, of several modules by name; None without a compressor."""
    found = {name: state.state_dict() for name, state in compressors_of(model).items()}
    return found.get("", found or None)


def _state_tree(training: Training, found: ModelTensors, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the tree of state.json and its tensors."""
    tensors: dict[str, torch.Tensor] = {}
    body = {
        "step": step,
        "scheduler": stateful_tree(training.scheduler, "scheduler", tensors),
        "scaler": stateful_tree(training.scaler, "scaler", tensors),
        "user_state": stateful_tree(training.user_state, "user_state", tensors),
        "model_extra_state": {
            n: tree.encode(m.get_extra_state(), f"model.{n}", tensors) for n, m in found.extras.items()
        },
        "extra": tree.encode(training.extra, "extra", tensors),
    }
    return body, tensors


def _tellable(reason: str) -> str:
    """Return the reason as valid UTF-8 for the engine: it may quote a name that is not valid UTF-8."""
    return reason.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _base36(number: int) -> str:
    digits = _BASE36[number % 36]
    while number := number // 36:
        digits = _BASE36[number % 36] + digits
    return "n" + digits
