"""Restore: each rank checks the folder, the ranks agree, and only then do live tensors change."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._engine import CheckpointError, CheckpointFolder
from ...compress.state import reshard_state
from ...layout.local_parameters import local_of, part_of
from ...layout.memory import has_memory
from ...layout.shard_runs import memory_order
from ...optim.master_weights import kept_by
from ...optim.sharded import ShardedOptimizer
from ...options.name_map import NameMap
from ...parallel.agreement.optimizer_agreement import unlike_saved
from ...torch_compat.dtensor import is_dtensor
from .. import tree
from ..joined import compressors_of, members_of
from ..peers import whole_parameters
from ..rows import TENSORS, has_rows, read_line, rows_of
from ..slices import (
    Sliced,
    is_row_major,
    loads_slices,
    own_parameters,
    own_slices,
    placed_parts,
    replicas_of,
)
from ..state.composed import together
from ..state.content import (
    holds_shards,
    load_stateful,
    parameter_names,
    set_random_state,
    stateful_tree,
    try_random_state,
    unlike_stateful,
)
from ..state.names import dtype_name, model_tensors, stored_shape
from ..state.optimizer_extras import further_state, give_back, names_of, users_optimizer
from ..state.stored import Stored, stored_tensors
from ..training import Training
from .filling import Filler, Span
from .shares import Place, Shares, digest_of, in_own_order, is_in_place, places_of

_logger = logging.getLogger("shardwright")
_NAMES_SHOWN = 5
_STATEFUL = ("scheduler", "scaler", "user_state")
_STATE_KEYS = (*_STATEFUL, "model_extra_state", "extra")
_OWN_KEYS = ("random", "dataloader", "buffers")


class Mismatch(CheckpointError):
    """An error for a sound checkpoint of another model or optimizer."""


@dataclasses.dataclass
class _Targets:
    """The tensors that receive an optimizer's state, by their names in the folder."""

    new: dict[str, Any]  # Tensor or Sliced, not in use yet
    live: dict[str, torch.Tensor]  # tensors of the optimizer's current state

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: t.live[0] if isinstance(t, Sliced) else t for n, t in {**self.new, **self.live}.items()}


class Reader:
    """A reader of one checkpoint on one rank.

    The constructor reads the small files and compares them with the training. It changes nothing.

    Parameters
    ----------
    path : str
    folder : CheckpointFolder
    training : Training
    rank, world_size : int
    names : NameMap
        The tensors to take, and their names here.

    Raises
    ------
    CheckpointError
        The folder is not a sound checkpoint.
    Mismatch
        The checkpoint is sound and does not fit this model or optimizer.
    """

    def __init__(
        self,
        path: str,
        folder: CheckpointFolder,
        training: Training,
        rank: int,
        world_size: int,
        names: NameMap = NameMap(),
    ) -> None:
        self.path, self.folder = path, folder
        self.training, self._names = training, names
        self._filler = Filler(self.folder, rank, world_size)
        self._rows: dict[str, Stored] = {}
        self._found = model_tensors(training.model)
        self._state = self._check_tree("state.json", self._tree("state.json"), _STATE_KEYS)
        self._check_tensors("state.json", self._state, stored_tensors(self.folder, "state")[0])
        self._extra_state = self._renamed(self._state["model_extra_state"])
        for name in _STATEFUL:
            self._check_stateful(name, self._state)
        own = self._own_tree(rank) if self.folder.world_size == world_size else None
        self._own = None if own is None else self._check_own(f"ranks/ of rank {rank}", rank, own)
        self._model_reads = self._match_model()
        self._optimizer = self._match_optimizer() if training.optimizer is not None else None
        self._optimizer_targets: _Targets | None = None
        self._places: list[Place] = []
        self._has_new = False  # True after the new tensors that are not read in place were filled
        self.keeps_compressor = False
        """True if every rank restores the compressor state that it wrote"""

    # checks -----------------------------------------------------------------------------------------------------------

    def _tree(self, path: str) -> Any:
        try:
            return tree.loads(self.folder.read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"'{self.folder.path}/{path}' cannot be read as JSON: {error}") from None

    def _check_tree(self, name: str, body: Any, keys: Sequence[str]) -> dict[str, Any]:
        """Return `body`. Raise CheckpointError if it lacks a key or cannot be decoded, before a live tensor changes."""
        try:
            missing = [key for key in keys if key not in body]
            if missing:
                raise CheckpointError(f"it lacks '{missing[0]}'")
            _stand_in(body)
        except (MemoryError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(f"'{self.folder.path}', {name}: {_why_not_a_tree(error)}") from None
        return dict(body)

    def _check_tensors(self, name: str, body: Any, stored: Mapping[str, Stored]) -> None:
        """Raise CheckpointError if a tensor that a tree names is missing, before a live tensor changes."""
        missing = [each for each in tree.tensor_names(body) if each not in stored]
        if missing:
            raise CheckpointError(f"'{self.folder.path}', {name}: no file has the tensor '{missing[0]}' that it names")

    def _renamed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint's values under the names of this training."""
        try:
            return self._names.renamed(named)
        except ValueError as error:
            raise Mismatch(f"'{self.folder.path}': {error}") from None

    def _raise_mismatch(self, what: str, missing: list[str], left_over: list[str], wrong: list[str]) -> None:
        """Raise Mismatch if names are strict or something is wrong; else log missing and unexpected names."""
        if self._names.strict or wrong:
            _raise_mismatch(self.folder.path, what, missing, left_over, wrong)
        if missing:
            _logger.warning("%s: it lacks %s of the %s, which stay unchanged", self.folder.path, _some(missing), what)
        if left_over:
            _logger.info("%s: %s are not of the %s here", self.folder.path, _some(left_over), what)

    def _check_own(self, name: str, rank: int, own: Any) -> dict[str, Any]:
        """Return a rank's own tree. Compare its buffers with the model's."""
        if isinstance(own, dict) and isinstance(own.get("random"), dict) and not tree.has_numpy():
            own = {**own, "random": {**own["random"], "numpy": None}}  # no generator takes that state here
        body = self._check_tree(name, own, _OWN_KEYS)
        stored = self._own_stored(rank, body)
        self._check_tensors(name, body, stored)
        try:
            for buffer, node in self._renamed(body["buffers"]).items():
                found, live = stored[node["$tensor"]], self._found.buffers.get(buffer)
                if live is not None and self._names.takes(buffer) and not _fits(found, live):
                    raise ValueError(f"{buffer}: the checkpoint has {_text(found)}, the model {_text_of(live)}")
        except Exception as error:
            raise CheckpointError(f"'{self.folder.path}', {name}: {error or type(error).__name__}") from None
        self._check_stateful("dataloader", body)
        return body

    def _check_stateful(self, name: str, body: Mapping[str, Any]) -> None:
        unlike = unlike_stateful(getattr(self.training, name), _stand_in(body[name]), name)
        if unlike:
            raise Mismatch(f"'{self.folder.path}' does not fit this program: {unlike}")

    def _match_model(self) -> list[list[tuple[Stored, torch.Tensor]]]:
        """Plan the reads of the model, in turns: a tensor tied only in the checkpoint is read once per turn."""
        kept_tensors, kept_ties = stored_tensors(self.folder, "model")
        stored = self._renamed(kept_tensors)
        tied = {name: self._names.new(kept) for name, kept in self._renamed(kept_ties).items()}
        other_names: dict[str, list[str]] = {}
        for name, kept in self._found.tied.items():
            other_names.setdefault(kept, []).append(name)
        reads: list[dict[Stored, torch.Tensor]] = [{}]
        missing, wrong, used = [], [], set()
        for name, tensor in self._found.all().items():
            candidates = [name, *other_names.get(name, ())]
            if not any(map(self._names.takes, candidates)):
                continue
            candidates += [tied[n] for n in candidates if n in tied]
            place = next((n for n in candidates if n in stored), None)
            if place is None:
                missing.append(name)
                continue
            used |= {place, *candidates}
            found = stored[place]
            if not _fits(found, tensor):
                wrong.append(f"{name}: the checkpoint has {_text(found)}, the model {_text_of(tensor)}")
                continue
            _add_in_turn(reads, found, tensor)
        left_over = [name for name in stored if name not in used and self._names.takes(name)]
        if "dcp" not in self._state:  # dcp.save stores extra state under names of torch's planner
            extra, ours = self._extra_state, self._found.extras
            missing += [name for name in ours if name not in extra and self._names.takes(name)]
            left_over += [name for name in extra if name not in ours and self._names.takes(name)]
        self._raise_mismatch("model", missing, left_over, wrong)
        return [list(turn.items()) for turn in reads]

    def _match_optimizer(self) -> dict[str, Any]:
        if "optimizer.json" not in self.folder.files:
            raise Mismatch(f"'{self.folder.path}' was saved without an optimizer: load it without one")
        body = self._check_tree("optimizer.json", self._tree("optimizer.json"), ("groups", "state"))
        optimizer = self.training.optimizer
        names = parameter_names(optimizer, self._found)
        ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if not self._names.is_all:
            self._take_part(body, ours)
        all_ours, ours = ours, [list(filter(self._names.takes, group)) for group in ours]
        theirs = [group["params"] for group in body["groups"]]
        missing = sorted({n for group in ours for n in group} - {n for group in theirs for n in group})
        left_over = sorted({n for group in theirs for n in group} - {n for group in ours for n in group})
        wrong = []
        if not missing and not left_over and [sorted(g) for g in ours] != [sorted(g) for g in theirs]:
            place = {name: number for number, group in enumerate(theirs) for name in group}
            moved = next(
                (
                    f"'{n}' is in group {place[n]} there, in group {i} here"
                    for i, g in enumerate(ours)
                    for n in g
                    if place[n] != i
                ),
                "",
            )
            wrong.append(
                f"parameter groups of {[len(g) for g in theirs]} parameters in the checkpoint, of {[len(g) for g in ours]} here: {moved}"
            )
        unlike = [unlike_saved(users_optimizer(each), part["groups"]) for each, part in self._parts(body)]
        wrong += [each for each in unlike if each is not None]
        self._raise_mismatch("optimizer", missing, left_over, wrong)
        stored, _ = stored_tensors(self.folder, "optimizer")
        wanted = tree.tensor_names([body["groups"], body["state"], body.get("further")])
        _raise_mismatch(self.folder.path, "optimizer's state", [n for n in wanted if n not in stored], [], [])
        self._match_further(body)
        body["stored"] = stored if self._names.is_all else {name: stored[name] for name in wanted}
        for group, members in zip(body["groups"], all_ours):
            group["params"] = members if not self._names.is_all else group["params"]
        return body

    def _take_part(self, body: dict[str, Any], ours: list[list[str]]) -> None:
        """Rename the optimizer's parameters in `body`, and drop those not selected. Without `strict`, groups that
        differ in the parameters common to both sides lose their options."""
        takes = self._names.takes
        body["groups"] = [
            {**group, "params": [name for name in map(self._names.new, group["params"]) if takes(name)]}
            for group in body["groups"]
        ]
        mine = {name for group in ours for name in group if takes(name)}
        body["state"] = {n: each for n, each in self._renamed(body["state"]).items() if takes(n)}
        if not self._names.strict:
            both = mine & {name for group in body["groups"] for name in group["params"]}
            body["state"] = {n: each for n, each in body["state"].items() if n in both}
            if [both & set(group) for group in ours] != [both & set(group["params"]) for group in body["groups"]]:
                _logger.warning("%s has other parameter groups: their options stay unchanged", self.folder.path)
                body["groups"] = [{} for _ in ours]
            body["groups"] = [
                {**group, "params": [n for n in names if takes(n)]} for group, names in zip(body["groups"], ours)
            ]

    def _match_further(self, body: Mapping[str, Any]) -> None:
        """Compare the optimizer's further state_dict() keys. Log those that the checkpoint lacks: they stay unchanged."""
        kept = body.get("further", {})
        try:
            ours = names_of(self.training.optimizer, further_state(self.training.optimizer))
        except CheckpointError as error:
            if kept:
                raise Mismatch(f"'{self.folder.path}' cannot be restored: {error}") from None
            _logger.warning("%s: %s", self.folder.path, error)
            return
        kept = names_of(self.training.optimizer, kept)
        _raise_mismatch(self.folder.path, "optimizer", [], [key for key in kept if key not in ours], [])
        for key in ours:
            if key not in kept:
                _logger.warning(
                    "%s holds no '%s' of the optimizer's state_dict(): it stays unchanged", self.folder.path, key
                )

    # agreement --------------------------------------------------------------------------------------------------------

    def try_generators(self, rank: int) -> None:
        """Read the states of this rank's random generators and test them on other generators."""
        if self._own is None:
            return
        tensors = self._own_tensors(rank, self._own["random"])
        try:
            self._random = tree.decode(self._own["random"], tensors)
            try_random_state(self._random)
        except Exception as error:
            why = error or type(error).__name__
            raise CheckpointError(f"'{self.folder.path}', ranks/ of rank {rank}: {why}") from None

    def reads(self, rank: int, world_size: int) -> list[tuple[str, int, int]]:
        """Return (path, begin, bytes) of all reads after the constructor, which reads tensor lists and values."""
        slices: dict[int, Sliced] = {}
        if loads_slices(self.training.model):
            for replica in replicas_of(self.training.model):
                slices |= own_slices(replica)
        found: list[tuple[Stored, Any]] = [
            (stored, slices.get(id(target), target if is_dtensor(target) else None))
            for turn in self._model_reads
            for stored, target in turn
        ]
        if self._optimizer is not None:
            with torch.no_grad():
                targets, stored = self._targets(self._optimizer), self._optimizer["stored"]
            found += [(stored[name], target) for name, target in targets.new.items()]
            found += [(stored[name], None) for name in targets.live]
        found += self._state_reads()
        nodes: list[tuple[int, Any]] = []
        if self._own is not None:
            nodes.append((rank, [self._own["random"], self._own["buffers"], self._own["dataloader"]]))
        for name, state in compressors_of(self.training.model).items():
            debtors = [rank] if self.keeps_compressor else self._debtors(name, state)
            nodes += [(each, self._compressor_node(each, name)) for each in debtors]
        found += [(stored, None) for each, node in nodes for stored in self._own_stored(each, node).values()]
        return list(self._filler.ranges(found))

    def offer(self) -> str:
        """Choose the tensors that are read in place. Return a digest, equal on ranks that read the same ranges; "" for none."""
        live = [] if self._is_sliced() else list(self._model_reads[0])
        new: list[tuple[Stored, Any]] = []
        if self._optimizer is not None:
            with torch.no_grad():
                targets, stored = self._targets(self._optimizer), self._optimizer["stored"]
            new += [(stored[name], target) for name, target in targets.new.items()]
            live += [(stored[name], target) for name, target in targets.live.items()]
        self._places = places_of(new, live)
        return digest_of(self._places)

    def share(self, rank: int, rooms: Sequence[int], spare: Sequence[tuple[int, int]]) -> None:
        """Read the tensors in place together with the other ranks of this host, which offer() the same ranges.

        Parameters
        ----------
        rank : int
        rooms : sequence of int
            Bytes of each rank's `spare` memory.
        spare : sequence of (int, int)
            (address, nbytes) of memory that keeps old values of live tensors until take_back().
        """
        self._filler.share(Shares(self._places, rank, rooms), spare)

    def read_alone(self, rank: int, world_size: int, spare: Sequence[tuple[int, int]]) -> None:
        """Read the tensors in place on this rank alone, its share of the files first."""
        places = in_own_order(self._places, rank, world_size)
        self._filler.share(Shares(places, 0, [sum(nbytes for _, nbytes in spare)]), spare)

    def verify_share(self, rank: int, world_size: int, spans: Sequence[Span] | None = None) -> None:
        """Check this rank's share of all blocks, or those of `spans`.

        Fills new tensors now, and live tensors as far as spare memory can hold their old values, which take_back() restores.
        """
        self._filler.read_ahead()
        if self._optimizer is not None:
            new = self._targets(self._optimizer).new
            self._fill_optimizer(self._optimizer, {name: each for name, each in new.items() if not is_in_place(each)})
            self._has_new = True
        count = self.folder.block_count
        if spans is None:
            self._filler.verify(count * rank // world_size, count * (rank + 1) // world_size)
        else:
            self._filler.check(spans)

    @property
    def is_shared(self) -> bool:
        """Return True after share()."""
        return self._filler.is_shared

    def read_rest(self) -> None:
        """Read what remains of this rank's part of the tensors in place."""
        self._filler.read_rest()

    def trade(self, send: Callable[[int, list[tuple[int, int]]], None]) -> None:
        """Take the parts of the other ranks: see Filler.trade(). Collective."""
        self._filler.trade(send)

    def take_back(self) -> None:
        """Restore the values that live tensors had before verify_share()."""
        self._filler.take_back()

    # into the training ------------------------------------------------------------------------------------------------

    def apply(self, rank: int, world_size: int, *, everything: bool) -> Any:
        """Fill model and optimizer, and with `everything` the rest of the training. Return `extra`."""
        if not self.is_shared:
            self.read_rest()
        self._fill_model()
        if self._optimizer is not None:
            with torch.no_grad():
                self._apply_optimizer(self._optimizer)
        tensors = self._load_state()
        for name, module in self._found.extras.items():
            if name in self._extra_state and self._names.takes(name):  # a folder of dcp.save has no extra state
                module.set_extra_state(tree.decode(self._extra_state[name], tensors))
        if everything:
            for name in _STATEFUL:
                if getattr(self.training, name) is not None and self._state[name] is None:
                    _logger.warning("%s holds no state of the %s: it stays unchanged", self.folder.path, name)
                load_stateful(getattr(self.training, name), tree.decode(self._state[name], tensors), name)
        if self.folder.world_size == world_size:
            self._apply_own(rank, everything)
        elif everything and self.training.dataloader is not None:
            _logger.warning(
                "%s was written by %d ranks, these are %d: the dataloader and the random generators stay unchanged",
                self.folder.path, self.folder.world_size, world_size,
            )  # fmt: skip
        if everything:
            for name, state in compressors_of(self.training.model).items():
                self._apply_compressor(rank, name, state)
        return tree.decode(self._state["extra"], tensors)

    def _is_sliced(self) -> bool:
        """Return True at zero >= 1: live parameters may then be written in slices or in whole_parameters() only."""
        return any(replica.zero for replica in replicas_of(self.training.model))

    def _fill_model(self) -> None:
        replicas = replicas_of(self.training.model)
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if not loads_slices(self.training.model):
                with whole_parameters(self.training.model, writable=True):
                    for turn in self._model_reads:
                        self._filler.fill(turn)
                return
            slices: dict[int, Sliced] = {}
            for replica in replicas:
                slices |= stack.enter_context(own_parameters(replica))
            for turn in self._model_reads:
                self._filler.fill((stored, slices.get(id(target), target)) for stored, target in turn)

    def _load(self, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        tensors = {name: entry.empty() for name, entry in stored.items()}
        self._filler.fill((entry, tensors[name]) for name, entry in stored.items())
        return tensors

    def _load_state(self) -> dict[str, torch.Tensor]:
        """Read state.safetensors into new tensors."""
        stored, _ = stored_tensors(self.folder, "state")
        with torch.no_grad():
            reads = self._state_reads()
            self._filler.fill(reads)
        return {name: target for name, (_, target) in zip(stored, reads)}

    def _state_reads(self) -> list[tuple[Stored, torch.Tensor]]:
        """Return each tensor of state.safetensors and a new one to fill. A DTensor of this rank's user state gets its local part."""
        stored, _ = stored_tensors(self.folder, "state")
        live: dict[str, torch.Tensor] = {}
        if holds_shards(self.training.user_state):
            stateful_tree(self.training.user_state, "user_state", live)
        return [
            (
                entry,
                torch.empty_like(live[name])
                if is_dtensor(live.get(name)) and _fits(entry, live[name])
                else entry.empty(),
            )
            for name, entry in stored.items()
        ]

    def _parts(self, body: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each optimizer of the training with its part of `body`."""
        first, members = 0, members_of(self.training.optimizer)
        for each in members:
            part = {**body, "groups": body["groups"][first : first + len(each.param_groups)]}
            first += len(each.param_groups)
            if len(members) > 1:
                own = self._by_name(each)
                part["state"] = {name: values for name, values in body["state"].items() if name in own}
            yield each, part

    def _by_name(self, optimizer: Any) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
        """Map the name of each of an optimizer's parameters to (parameter, its group)."""
        names = parameter_names(self.training.optimizer, self._found)
        return {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}

    def _targets(self, body: Mapping[str, Any]) -> _Targets:
        """Return the tensors that receive the optimizer's state, chosen once."""
        if self._optimizer_targets is None:
            self._optimizer_targets = self._make_targets(body)
        return self._optimizer_targets

    def _make_targets(self, body: Mapping[str, Any]) -> _Targets:
        """Choose the tensors that receive the optimizers' state."""
        found = _Targets({}, {})
        for optimizer, part in self._parts(body):
            is_sliced = isinstance(optimizer, ShardedOptimizer)
            made = (self._sliced_targets if is_sliced else self._whole_targets)(part, optimizer)
            found = _Targets({**found.new, **made.new}, {**found.live, **made.live})
        more = tree.tensor_names(body.get("further"))
        return _Targets({**{name: body["stored"][name].empty() for name in more}, **found.new}, found.live)

    def _whole_targets(self, body: Mapping[str, Any], optimizer: Any) -> _Targets:
        """Choose the tensors of the current state that fit, and whole ones for the others."""
        wanted = tree.tensor_names([body["groups"], body["state"]])
        targets = _Targets({name: body["stored"][name].empty() for name in wanted}, {})
        live_state, by_name = optimizer.state, self._by_name(optimizer)
        for parameter_name, values in body["state"].items():
            parameter, _ = by_name[parameter_name]
            for key, node in values.items():
                live = live_state[parameter].get(key) if parameter in live_state else None
                name = node.get("$tensor") if isinstance(node, dict) else None
                if name and isinstance(live, torch.Tensor) and has_memory(live) and _fits(body["stored"][name], live):
                    targets.new.pop(name, None)
                    targets.live[name] = live
                elif name and is_dtensor(parameter) and is_state_slice(key, body["stored"][name], parameter):
                    targets.new[name] = torch.empty_like(parameter, dtype=body["stored"][name].torch_dtype)
        return targets

    def _sliced_targets(self, body: Mapping[str, Any], optimizer: ShardedOptimizer) -> _Targets:
        """Choose this rank's slices, and whole tensors for entries that are not sliced."""
        by_name = self._by_name(optimizer)
        slices: dict[str, Any] = {}
        held = {n: v for n, v in body["state"].items() if optimizer.held_run(by_name[n][0]) is not None}
        for parameter_name, values in held.items():
            parameter, _ = by_name[parameter_name]
            low, high = optimizer.held_run(parameter) or (0, 0)
            for key, node in values.items():
                name = node.get("$tensor") if isinstance(node, dict) else None
                stored = body["stored"].get(name)
                if (
                    name is not None
                    and stored is not None
                    and is_state_slice(key, stored, parameter)
                    and is_row_major(optimizer.layout_of(parameter))
                ):
                    memory = optimizer.empty_state(high - low, stored.torch_dtype)
                    parts = placed_parts(parameter, low, memory)
                    slices[name] = Sliced(stored.torch_dtype, tuple(parameter.shape), parts, (memory,))
        wanted = tree.tensor_names(body["groups"])
        wanted += [name for values in held.values() for name in tree.tensor_names(list(values.values()))]
        return _Targets({n: body["stored"][n].empty() for n in wanted if n not in slices} | slices, {})

    def _fill_optimizer(self, body: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
        self._filler.fill((body["stored"][name], target) for name, target in targets.items())

    def _apply_optimizer(self, body: Mapping[str, Any]) -> None:
        optimizer = self.training.optimizer
        targets = self._targets(body)
        self._fill_optimizer(
            body, {name: each for name, each in targets.new.items() if not self._has_new or is_in_place(each)}
        )
        self._fill_optimizer(body, targets.live)
        tensors = targets.tensors()
        if "further" in body:
            give_back(optimizer, tree.decode(body["further"], tensors))
        for each, part in self._parts(body):
            if isinstance(each, ShardedOptimizer):
                self._apply_sliced_optimizer(part, each, targets, tensors)
            else:
                self._apply_whole_optimizer(part, each, tensors)

    def _apply_whole_optimizer(
        self, body: Mapping[str, Any], optimizer: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        by_name = self._by_name(optimizer)
        state = {}
        for parameter_name, values in body["state"].items():
            parameter, group = by_name[parameter_name]
            decoded = {_key(parameter, optimizer, key): tree.decode(node, tensors) for key, node in values.items()}
            kept = kept_by(optimizer, parameter, together(decoded, parameter.shape))
            state[parameter] = {key: _on_device(value, key, parameter, group) for key, value in kept.items()}
        others = {} if self._names.is_all else dict(optimizer.state)
        optimizer.state.clear()
        optimizer.state.update({**others, **state})
        for group, saved in zip(optimizer.param_groups, body["groups"]):
            for key, node in saved.items():
                if key != "params":
                    _set_option(group, key, tree.decode(node, tensors))

    def _apply_sliced_optimizer(
        self,
        body: Mapping[str, Any],
        optimizer: ShardedOptimizer,
        targets: _Targets,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        by_name = self._by_name(optimizer)
        states = {}
        for parameter_name, values in body["state"].items():
            parameter, _ = by_name[parameter_name]
            run = optimizer.held_run(parameter)
            if run is None:
                continue
            state = {key: tree.decode(node, tensors) for key, node in values.items()}
            for key, value in state.items():
                name = values[key].get("$tensor") if isinstance(values[key], dict) else None
                if name is None or not is_state_slice(key, body["stored"][name], parameter):
                    continue
                if not isinstance(targets.new[name], Sliced):
                    value = part_of(local_of(parameter), value)
                    value = memory_order(value, optimizer.layout_of(parameter))[run[0] : run[1]].clone()
                state[key] = optimizer.as_held(parameter, value)
            states[parameter] = together(state, optimizer.layout_of(parameter).shape)
        positions = {n: position for position, n in enumerate(by_name)}
        groups = [
            {
                **{k: tree.decode(node, tensors) for k, node in g.items() if k != "params"},
                "params": [positions[n] for n in g["params"]],
            }
            for g in body["groups"]
        ]
        optimizer.load_held_state(groups, states, keep_others=not self._names.is_all)

    def _own_tree(self, rank: int) -> Any:
        """Return a rank's own tree; None in a folder of torch.distributed.checkpoint."""
        if has_rows(self.folder):
            return read_line(self.folder, rank)
        path = f"ranks/{rank:05d}.json"  # the format of the first release
        return self._tree(path) if path in self.folder.files else None

    def _own_stored(self, rank: int, body: Any) -> dict[str, Stored]:
        """Return where the tensors that a rank's tree names are stored."""
        names = tree.tensor_names(body)
        if has_rows(self.folder):
            self._rows = self._rows or stored_tensors(self.folder, TENSORS)[0]
            return rows_of(self._rows, rank, names)
        stored, _ = stored_tensors(self.folder, f"ranks/{rank:05d}")
        return {name: stored[name] for name in names if name in stored}

    def _own_tensors(self, rank: int, body: Any) -> dict[str, torch.Tensor]:
        """Read the tensors that a rank's tree names into new tensors."""
        return self._load(self._own_stored(rank, body))

    def _apply_own(self, rank: int, everything: bool) -> None:
        body = self._own
        if body is None:
            return
        tensors = self._own_tensors(rank, [body["buffers"], body["dataloader"] if everything else None])
        with torch.no_grad():
            for name, node in self._renamed(body["buffers"]).items():
                if name in self._found.buffers and self._names.takes(name):
                    self._found.buffers[name].copy_(tree.decode(node, tensors))
        if everything:
            load_stateful(self.training.dataloader, tree.decode(body["dataloader"], tensors), "dataloader")
            set_random_state(self._random)

    def look_at_compressor(self, rank: int, world_size: int) -> bool:
        """Return True if this rank wrote its compressor state itself: same world size, same rank among the hosts."""
        states = compressors_of(self.training.model)
        if not states or self.folder.world_size != world_size:
            return False
        nodes = {name: self._compressor_node(rank, name) for name in states}
        return all(
            own is None
            or (own["rank"], own["world_size"], own.get("split", ""))
            == (states[name].exchange.rank, states[name].exchange.world_size, states[name].split)
            for name, own in nodes.items()
        )

    def _apply_compressor(self, rank: int, name: str, state: Any) -> None:
        """Restore a compressor's state: this rank's own or, in another world, an equal share of all ranks' error."""
        debtors = [rank] if self.keeps_compressor else self._debtors(name, state)
        found = [self._compressor_of(each, name) for each in debtors]
        known = [each for each in found if each is not None]
        ours = {"kind": state.kind, "settings": state.settings()}
        is_another = any(each[key] != ours[key] for each in known for key in ours)
        is_of_parts = not self.keeps_compressor and any("parts" in each for each in known)
        if not known or len(known) < len(found) or is_another or is_of_parts:
            _logger.warning(
                "%s holds no state of this compressor, %s: its error starts at zero", self.folder.path, ours
            )
            state.forget()
        elif self.keeps_compressor:
            state.load_state_dict(known[0])
        else:
            share = reshard_state(known, state.exchange.rank, state.exchange.world_size)
            state.load_state_dict(share if state.exchange.takes_part else {**share, "parameters": {}})

    def _debtors(self, name: str, state: Any) -> list[int]:
        """Return the ranks that hold state of the same shards as this one: the lowest of each host."""
        places: dict[Any, int] = {}
        for each in range(self.folder.world_size):
            node = self._compressor_node(each, name)
            if node is not None and node.get("split", "") != state.split:
                continue
            places.setdefault(None if node is None else node["rank"], each)
        return list(places.values())

    def _compressor_node(self, rank: int, name: str) -> dict[str, Any] | None:
        """Return the tree of a rank's compressor state, of module `name` if there are several, without its tensors."""
        body = self._own_tree(rank)
        found = None if body is None else body.get("compressor")
        return found.get(name) if found is not None and name else found

    def _compressor_of(self, rank: int, name: str) -> dict[str, Any] | None:
        node = self._compressor_node(rank, name)
        return None if node is None else tree.decode(node, self._own_tensors(rank, node))


def _why_not_a_tree(error: Exception) -> str:
    """Return the reason why a tree cannot be decoded. The texts of Python's own errors say nothing to a user."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"it is not what a save writes ({type(error).__name__}: {error})"


def _stand_in(node: Any) -> Any:
    """Return the value of a tree with empty tensors in place of its tensors."""
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return tree.decode(node, dict.fromkeys(tree.tensor_names(node), empty))


def _add_in_turn(turns: list[dict[Stored, torch.Tensor]], stored: Stored, target: torch.Tensor) -> None:
    turn = next((t for t in turns if stored not in t), None)
    if turn is None:
        turns.append(turn := {})
    turn[stored] = target


def is_state_slice(key: str, stored: Stored, parameter: torch.Tensor) -> bool:
    """Return whether a sliced optimizer keeps only a slice of this entry."""
    shape = stored.shape if stored.complex_dtype is None else stored.shape[:-1]
    return key != "step" and shape == tuple(parameter.shape)


def _key(parameter: torch.Tensor, optimizer: Any, key: str) -> Any:
    """Return the key in the type of the live state's keys: the file holds strings."""
    return next((k for k in optimizer.state.get(parameter, {}) if str(k) == key), key)


def _on_device(value: Any, key: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    return value.to(parameter.device)


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    live = group.get(key)
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
        live.copy_(value)
    else:
        group[key] = value


def _fits(stored: Stored, tensor: torch.Tensor) -> bool:
    wanted = tensor.dtype if tensor.is_complex() else None
    return (
        stored.complex_dtype == wanted
        and list(stored.shape) == stored_shape(tensor)
        and stored.dtype == dtype_name("", tensor.dtype)
    )


def _text(stored: Stored) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def _text_of(tensor: torch.Tensor) -> str:
    return f"{dtype_name('', tensor.dtype)} {stored_shape(tensor)}"


def _raise_mismatch(path: str, what: str, missing: list[str], left_over: list[str], wrong: list[str]) -> None:
    parts = []
    if missing:
        parts.append(f"it lacks {_some(missing)}")
    if left_over:
        parts.append(f"it has {_some(left_over)}, which the {what} here lacks")
    if wrong:
        parts.append(
            "; ".join(wrong[:_NAMES_SHOWN])
            + (f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else "")
        )
    if parts:
        raise Mismatch(f"'{path}' does not fit the {what}: {'; '.join(parts)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_NAMES_SHOWN]) + more
