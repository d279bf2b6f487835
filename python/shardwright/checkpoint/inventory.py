"""Inventory: what a checkpoint holds, equal on all ranks: each tensor's name, dtype, shape and holders; and this rank's parts.

A rank drafts what it holds, and all ranks compare. A layout lasts until some rank's draft no longer fits it; then ranks
exchange names, dtypes and shapes. A save of the same tensors as the last one lists nothing anew (memory/repeated.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointPlan
from ..comm import account
from ..formats import tree
from ..torch_compat.dtensor import is_dtensor
from . import slices
from .device_staging import DeviceStaging
from .joined import compressors_of, members_of, sharded_of
from .memory.repeated import Repeated, optimizer_json
from .peers import Peers, averages_gradients, whole_parameters
from .rows import Rows, Structure, add_rows, dense, structure_of
from .samples import Samples, check_alike, digest, take_samples
from .slices import Entry, Sliced, describe_state, released_slices
from .state.content import (
    Content,
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

_logger = logging.getLogger("shardwright")
#: the first exchange of a save, in which any rank may refuse
FIRST = "replicated content of a save"
#: digest of the entries of a plan, and the plan
Planned = tuple[bytes, CheckpointPlan]


@dataclasses.dataclass
class Draft:
    """What one rank contributes to a save, before the ranks agree."""

    found: ModelTensors
    #: entries of sliced optimizers' state that this rank holds
    described: dict[int, dict[str, Entry]]
    #: tree and tensors of the rank's own state
    body: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    #: checksums of replicated tensors, and of buffers
    samples: Samples
    checksums: dict[str, int]
    #: id() of released parameters: their slices, and those that are saved whole
    released: dict[int, Sliced]
    passing: set[int]
    #: tree and tensors of state.json, on rank 0 and on ranks that hold DTensors of it
    state: tuple[dict[str, Any], dict[str, torch.Tensor]] | None
    repeated: Repeated | None

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
class Layout:
    """What the ranks hold together. Saves share it until the draft of some rank no longer fits."""

    #: entries of sliced optimizers' state on all ranks, and those of this rank
    described: dict[int, dict[str, Entry]]
    own: dict[int, dict[str, Entry]]
    rows: Rows
    #: the tensors of rank 0's state, if some are DTensors
    state: Structure | None
    planned: Planned | None = None
    #: the text of model.safetensors.index.json on rank 0
    index: bytes | None = None

    @property
    def has_values(self) -> bool:
        """Return True if some entries are not tensors: rank 0 gathers and writes them."""
        return any(how == slices.VALUE for keys in self.described.values() for how, _, _ in keys.values())

    def fits(self, draft: Draft) -> bool:
        if self.own != draft.described or not self.rows.fits(structure_of(draft.tensors), draft.line_bytes):
            return False
        if self.rows.rank == 0:
            return draft.state_structure() == self.state
        return all(entry in (self.state or ()) for entry in structure_of(draft.shards))


@dataclasses.dataclass
class Listed:
    """One save's plan and content. `own`: the files that rank 0 alone writes."""

    plan: CheckpointPlan
    shared: Content
    own: Content | None
    #: the draft whose sources the next save may use again, and the text of "state" in optimizer.json
    draft: Draft | None = None
    entries_text: bytes = b""
    #: known sources, packed
    sources: bytes | None = None


def plan_of(content: Content, last: Planned | None) -> Planned:
    """Return the plan of a content: the last one if it has the same entries."""
    entries = content.entries()
    mark = digest_of(entries)
    return last if last is not None and last[0] == mark else (mark, CheckpointPlan(*entries))


class Inventory:
    """One rank's inventory in a series of saves of a module and an optimizer."""

    def __init__(self, peers: Peers, staging: DeviceStaging, max_file_bytes: int) -> None:
        self.peers, self._staging, self._max_file_bytes = peers, staging, max_file_bytes
        self._boxes = slices.Boxes(peers.global_ranks, peers.replicas)
        self.layout: Layout | None = None
        #: the last save's sources; None before the first one, and once a load may have replaced its tensors
        self.last: Repeated | None = None
        _inventories.add(self)
        self._own_planned: Planned | None = None
        self._random: dict[str, Any] = {}  # content.random_state of the last step
        self._warned: set[str] = set()

    def agree(self, training: Training, step: int, opened: contextlib.ExitStack) -> Listed:
        """Return the content of a save. Collective, with one exchange while the layout fits. `opened` keeps parameters whole."""
        draft = self.draft(training, step, opened)
        if draft.repeated is not None and draft.repeated.layout is self.layout:
            return self._again(training, draft, draft.repeated)
        layouts = (layout for each in sharded_of(training.optimizer) for layout in each.layouts())
        gathers = not all(map(slices.is_row_major, layouts))
        assert self.layout is not None
        repeats = not (gathers or self.layout.has_values or draft.passing)
        return self.listed(draft, lambda: self.members(training, draft), repeats=repeats)

    def refuse(self, error: Exception) -> None:
        """Report a failure in place of agree(). All ranks raise it."""

        def fail() -> None:
            raise error

        self.peers.together(fail, FIRST)

    def repeat(self, step: int, training: Training) -> Listed | None:
        """Return the content of a step without agreement; None on an error, or if anything does not fit. Not collective."""
        last, layout = self.last, self.layout
        if last is None or layout is None or not last.needs_no_agreement or self._same(training) is None:
            return None
        try:
            held = last.rest(layout.rows, *self._own_tree(training), self._staging)
            if held is None or layout.planned is None:
                return None
            own = None
            if self.peers.rank == 0:
                state = _state_tree(training, last.found, step)
                own = self._own_files(state, last.optimizer_text(training), last.found)
            return Listed(layout.planned[1], held.content, own, sources=held.sources)
        except Exception:  # agree() then meets the same error, and raises it on all ranks
            return None

    def sources(self, training: Training, listed: Listed) -> list[Source]:
        """Return this rank's sources, and keep those of model and optimizer for the next save."""
        found = listed.shared.sources(listed.plan.needed(self.peers.rank, self.peers.world_size))
        if listed.draft is not None:
            of_save = listed.draft.found, listed.shared, found, listed.entries_text, listed.draft.released
            last = Repeated(training, self.layout, *of_save)
            self.last = last if last.is_usable else None
        return found

    def own_sources(self, listed: Listed) -> tuple[CheckpointPlan | None, list[Source]]:
        """Return the plan and the sources of rank 0's own files."""
        if listed.own is None:
            return None, []
        self._own_planned = plan_of(listed.own, self._own_planned)
        return self._own_planned[1], listed.own.sources()

    def draft(self, training: Training, step: int, opened: contextlib.ExitStack) -> Draft:
        """Return what this rank holds once all ranks agree. Collective."""
        released, passing = released_slices(training.model)
        if passing:
            opened.enter_context(whole_parameters(training.model, writable=False))
        return self.compare(lambda: self.find(training, step, released, passing), training)

    def compare(self, find: Callable[[], Draft], training: Training) -> Draft:
        """Return find()'s draft, with buffers unlike rank 0's in it; renew the layout if some rank's does not fit. Collective."""
        found: list[Draft] = []

        def describe() -> list[Any]:
            found.append(find())
            return [self._is_new(found[0]), digest(found[0].samples), digest(found[0].checksums)]

        are_new, samples, checksums = zip(*self.peers.together(describe, FIRST, keeps=()))
        (draft,) = found
        if len({*samples}) > 1:
            of_all = self.peers.exchange(draft.samples, "samples of replicated tensors")
            check_alike(of_all, is_averaged=averages_gradients(training.model))
        if len({*checksums}) > 1:
            first = self.peers.exchange(draft.checksums if self.peers.rank == 0 else None, "buffers of rank 0")[0]
            for name in (name for name, crc in draft.checksums.items() if first.get(name) != crc):
                draft.body["buffers"][name] = tree.encode(draft.found.buffers[name], f"buffer.{name}", draft.tensors)
            are_new = tuple(self.peers.exchange(self._is_new(draft), "layout of a checkpoint"))
        if any(are_new):
            self.layout = self._lay_out(draft)
        return draft

    def _is_new(self, draft: Draft) -> bool:
        return self.layout is None or self.layout.planned is None or not self.layout.fits(draft)

    def find(self, training: Training, step: int, released: dict[int, Sliced], passing: set[int]) -> Draft:
        """Return what this rank holds. Not collective."""
        last = None if passing else self._same(training, released)
        found = model_tensors(training.model) if last is None else last.found
        described = describe_state(training.optimizer) if last is None else last.layout.own
        self._look_for_more(training)
        body, tensors = self._own_tree(training)
        samples: Samples = {}
        checksums: dict[str, int] = {}
        if self.peers.world_size > 1:
            is_whole = not slices.is_sliced(training.model, training.optimizer)
            samples = take_samples(found, training.optimizer if is_whole else None)
            checksums = self._staging.checksums(found.buffers)
        state = None
        if self.peers.rank == 0 or holds_shards([training.user_state, training.extra]):
            state = _state_tree(training, found, step)
        return Draft(found, described, body, tensors, samples, checksums, released, passing, state, last)

    def _same(self, training: Training, released: dict[int, Sliced] = {}) -> Repeated | None:
        """Return the last save's sources if this rank has the same tensors; else forget them."""
        if self.last is not None and (self.last.layout is not self.layout or not self.last.fits(training, released)):
            self.last = None
        return self.last

    def forget(self, *_: Any) -> None:
        """Release the tensors of the last save. The next save lists all of them anew."""
        self.last = None

    def _own_tree(self, training: Training) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the tree and the tensors of this rank's own state, without buffers."""
        tensors: dict[str, torch.Tensor] = {}
        compressors = {name: state.state_dict() for name, state in compressors_of(training.model).items()}
        body = {
            "random": random_state(tensors, self._random),
            "dataloader": stateful_tree(training.dataloader, "dataloader", tensors),
            "compressor": tree.encode(compressors.get("", compressors or None), "compressor", tensors),
            "buffers": {},
        }
        return body, tensors

    def _look_for_more(self, training: Training) -> None:
        """Raise CheckpointError for optimizer state that a checkpoint cannot hold. Log attributes that may be state."""
        for each in members_of(training.optimizer):
            check_inside(each, training.user_state, training.extra)
            for name in unseen_attributes(each):
                if name not in self._warned:
                    self._warned.add(name)
                    _logger.warning(
                        "the optimizer's attribute '%s' has tensors that neither its state nor its state_dict() has: if they are "
                        "state, no checkpoint holds it",
                        name,
                    )

    def _lay_out(self, draft: Draft) -> Layout:
        """Make a layout of what all ranks hold. Collective."""
        state = draft.state_structure() if self.peers.rank == 0 else list(draft.shards) or None
        mine = [slices.compact(draft.described), structure_of(draft.tensors), draft.line_bytes, state]
        of_all = self.peers.exchange(mine, "sliced content of a save")
        state = of_all[0][3]
        for rank, (*_, theirs) in enumerate(of_all[1:], 1):
            odd = [name for name in theirs or () if name not in [each for each, *_ in state or ()]]
            if odd:
                raise CheckpointError(f"rank {rank} holds a part of '{odd[0]}' and rank 0 does not: it cannot be saved")
        described: dict[int, dict[str, Entry]] = {}
        for theirs, *_ in of_all:
            described |= slices.expand(theirs)
        rows = Rows.over([(structure, nbytes) for _, structure, nbytes, _ in of_all], self.peers.rank)
        state = None if state is None else [(n, d, list(s)) for n, d, s in state]
        return Layout(described, draft.described, rows, state)

    def _again(self, training: Training, draft: Draft, last: Repeated) -> Listed:
        """Return the content with model and optimizer of the last save. Not collective."""
        assert self.layout is not None and self.layout.planned is not None
        shared, own = self._with_own(Content([], self._staging, ahead=last), draft), None
        if self.peers.rank == 0:
            own = self._own_files(draft.state, last.optimizer_text(training), draft.found)
        return Listed(self.layout.planned[1], shared, own)

    def listed(
        self, draft: Draft, members: Callable[[], tuple[Content, dict[str, Any] | None]], *, repeats: bool
    ) -> Listed:
        """Return the content with the groups of members(). Collective if the layout is new or members() may gather state."""
        layout = self.layout
        assert layout is not None
        made: list[Listed] = []

        def make() -> int:
            content, body = members()
            shared = self._with_own(content, draft)
            planned = plan_of(shared, layout.planned)
            if planned is not layout.planned:
                layout.planned, layout.index = planned, None
            listed = Listed(planned[1], shared, None, draft if repeats else None)
            if self.peers.rank == 0:
                text = b""
                if body is not None:
                    listed.entries_text = tree.dumps(body["state"]).rstrip()
                    has_more = "further" in body
                    text = tree.dumps(body) if has_more else optimizer_json(body["groups"], listed.entries_text)
                listed.own = self._own_files(draft.state, text, draft.found)
            made.append(listed)
            return planned[1].digest

        if layout.planned is None or not repeats:
            digests = self.peers.together(make, "plan of a checkpoint")
            other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
            if other is not None:
                raise CheckpointError(
                    f"rank {other} would write other files than rank 0: names, shapes, dtypes or max_file_bytes differ"
                )
        else:
            make()
        self.last = None
        return made[0]

    def members(self, training: Training, draft: Draft) -> tuple[Content, dict[str, Any] | None]:
        """Return model and optimizer, and the tree of optimizer.json. Collective if state is gathered."""
        optimizer, layout, states = training.optimizer, self.layout, None
        assert layout is not None
        if sharded_of(optimizer):
            values: dict[int, dict[str, Any]] = {}
            if layout.has_values:
                held = list(slices.held_values(optimizer).items())
                answers = self.peers.exchange(held, "values of the optimizer's state")
                values = {number: each for of_rank in answers for number, each in of_rank}
            states = slices.sliced_state(optimizer, layout.described, values)
        model = model_group(draft.found, self._max_file_bytes)
        parameters = draft.found.parameters.items()
        model.tensors |= {n: draft.released[id(p)] for n, p in parameters if id(p) in draft.released}
        model.eager |= {n for n, p in parameters if id(p) in draft.passing}  # a lazy snapshot would read them too late
        content, body = Content([model], self._staging), None
        if optimizer is not None:
            group, body = optimizer_content(optimizer, draft.found, self._max_file_bytes, states)
            content.groups.append(group)
        content.slice_tensors(self._boxes)
        return content, body

    def _with_own(self, content: Content, draft: Draft) -> Content:
        """Add the rank's own rows, and the tensors of rank 0's state if some are DTensors."""
        assert self.layout is not None
        add_rows(content, self.layout.rows, tree.dumps(draft.body), draft.tensors)
        if self.layout.state is not None:
            held = draft.state[1] if draft.state is not None else {}
            parts = {n: self._part_of_state(held.get(n), dtype, shape) for n, dtype, shape in self.layout.state}
            content.groups.append(Group("state", parts, {"format": "pt"}, eager=frozenset(parts)))
        content.slice_tensors(self._boxes)
        return content

    def _part_of_state(self, tensor: torch.Tensor | None, dtype: str, shape: Sequence[int]) -> Any:
        """Return a DTensor unchanged; for any other tensor return a Sliced that rank 0 holds whole."""
        if tensor is not None and is_dtensor(tensor):
            return tensor
        parts = ((0, dense(tensor).reshape(-1)),) if tensor is not None and self.peers.rank == 0 else ()
        return Sliced(getattr(torch, dtype), tuple(shape), parts)

    def _own_files(self, state: Any, optimizer_text: bytes, found: ModelTensors) -> Content:
        """Return the content that rank 0 alone writes."""
        layout = self.layout
        assert layout is not None and layout.planned is not None
        body, tensors = state
        own = Content([Group("state", dict(tensors), {"format": "pt"})] if layout.state is None else [], self._staging)
        own.texts["state.json"] = tree.dumps(body)
        if optimizer_text:
            own.texts["optimizer.json"] = optimizer_text
        if layout.index is None:
            layout.index = model_index(layout.planned[1], list(found.all()))
        if layout.index:
            own.texts["model.safetensors.index.json"] = layout.index
        return own


_inventories: weakref.WeakSet[Inventory] = weakref.WeakSet()


def forget_tensors_of(training: Training) -> None:
    """Release what the last saves of a training keep alive, because a load is about to replace tensors of it."""
    for each in list(_inventories):
        if each.last is not None and each.last.is_of(training):
            each.forget()


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
    if account.tracker_runs:
        body["trackers"] = dict(account.tracker_runs)
    return body, tensors
