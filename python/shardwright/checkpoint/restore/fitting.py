"""Fit: what a checkpoint's tensors and values are in this training. It reads lists and trees, and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._engine import CheckpointError, CheckpointFolder
from ...formats import tree
from ...formats.lazy import has_numpy
from ...layout.memory import has_memory
from ...optim import moments
from ...optim.sharded import ShardedOptimizer
from ...options.name_map import NameMap
from ...parallel.agreement.optimizer_agreement import unlike_saved
from ...torch_compat.dtensor import is_dtensor
from ..joined import compressors_of, members_of
from ..rows import TENSORS, has_rows, read_line, rows_of
from ..slices import Sliced, is_row_major, loads_slices, own_slices, placed_parts, replicas_of
from ..state.content import holds_shards, parameter_names, stateful_tree, unlike_stateful
from ..state.names import dtype_name, model_tensors, stored_shape
from ..state.optimizer_extras import further_state, names_of, some, users_optimizer
from ..state.stored import Stored, stored_tensors
from ..training import Training

_logger = logging.getLogger("shardwright")
STATEFUL = ("scheduler", "scaler", "user_state")
_STATE_KEYS = (*STATEFUL, "model_extra_state", "extra")
_OWN_KEYS = ("random", "dataloader", "buffers")
Read = tuple[Stored, Any]
"""(a stored tensor, the tensor or Sliced that receives it)"""


class Mismatch(CheckpointError):
    """An error for a sound checkpoint of another model or optimizer."""


class Fit:
    """The reads and trees of one checkpoint for one rank's training. `everything`: also the state of a Checkpointer."""

    def __init__(
        self,
        folder: CheckpointFolder,
        training: Training,
        rank: int,
        world_size: int,
        names: NameMap = NameMap(),
        everything: bool = False,
    ) -> None:
        self.folder, self.training, self.names, self.everything = folder, training, names, everything
        self.rank, self.world_size = rank, world_size
        self._rows: dict[str, Stored] = {}
        self.found = model_tensors(training.model)
        stored = stored_tensors(folder, "state")[0]
        self.state = self._checked("state.json", self._tree("state.json"), _STATE_KEYS, stored)
        self.extra_state = self._renamed(self.state["model_extra_state"])
        for name in STATEFUL:
            self._check_stateful(name, self.state)
        own = self._own_tree(rank) if folder.world_size == world_size else None
        self.own = None if own is None else self._check_own(own)
        self.model = self._match_model()  # in turns: a tensor tied only in the checkpoint is read once a turn
        self.optimizer = None if training.optimizer is None else self._match_optimizer()
        self.state_reads = self._state_reads(stored)
        self.own_reads: dict[str, Read] = {}
        if self.own is not None:
            wanted = ("random", "buffers", "dataloader") if everything else ("random", "buffers")
            self.own_reads = into_new(self.own_stored(rank, [self.own[key] for key in wanted]))
        #: reads of the optimizer's state, into tensors not in use yet and into the present state's
        self.new: dict[str, Read] = {}
        self.live: dict[str, Read] = {}
        if self.optimizer is not None:
            further = tree.tensor_names(self.optimizer.get("further"))
            self.new |= into_new({name: self.optimizer["stored"][name] for name in further})
            with torch.no_grad():
                for optimizer, part in self.parts():
                    self._add_state_reads(optimizer, part)
        self.debts: list[tuple[Any, list[tuple[int, Any]]]] = []  # of each compressor: (rank, tree) that it takes over
        self.keeps_compressor = False

    def reads(self) -> Iterator[Read]:
        """Yield all reads from now on."""
        slices: dict[int, Sliced] = {}
        if loads_slices(self.training.model):
            for replica in replicas_of(self.training.model):
                slices |= own_slices(replica)
        for turn in self.model:
            yield from ((stored, slices.get(id(target), target)) for stored, target in turn)
        for named in (self.new, self.live, self.state_reads, self.own_reads):
            yield from named.values()
        for _, debts in self.debts:
            for rank, node in debts:
                yield from ((stored, None) for stored in self.own_stored(rank, node).values())

    # trees ------------------------------------------------------------------------------------------------------------

    def _tree(self, path: str) -> Any:
        try:
            return tree.loads(self.folder.read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"'{self.folder.path}/{path}' cannot be read as JSON: {error}") from None

    def _checked(
        self, name: str, body: Any, keys: Sequence[str], stored: Mapping[str, Stored] | None = None
    ) -> dict[str, Any]:
        """Return a tree. Raise CheckpointError if it lacks a key or a tensor, or cannot be decoded."""
        where = f"'{self.folder.path}', {name}"
        try:
            missing = [key for key in keys if key not in body]
            if missing:
                raise CheckpointError(f"it lacks '{missing[0]}'")
            _stand_in(body)
        except (MemoryError, OSError):
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except Exception as error:  # Python's own texts say nothing to a user
            raise CheckpointError(f"{where}: it is not what a save writes ({type(error).__name__}: {error})") from None
        lacking = [] if stored is None else [each for each in tree.tensor_names(body) if each not in stored]
        if lacking:
            raise CheckpointError(f"{where}: no file has the tensor '{lacking[0]}' that it names")
        return dict(body)

    def _renamed(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint's values under the names of this training."""
        try:
            return self.names.renamed(named)
        except ValueError as error:
            raise Mismatch(f"'{self.folder.path}': {error}") from None

    def _check_stateful(self, name: str, body: Mapping[str, Any]) -> None:
        unlike = unlike_stateful(getattr(self.training, name), _stand_in(body[name]), name)
        if unlike:
            raise Mismatch(f"'{self.folder.path}' does not fit this program: {unlike}")

    def _state_reads(self, stored: Mapping[str, Stored]) -> dict[str, Read]:
        """Return the reads of state.safetensors. A DTensor of this rank's user state gets its local part."""
        live: dict[str, torch.Tensor] = {}
        if holds_shards(self.training.user_state):
            stateful_tree(self.training.user_state, "user_state", live)
        shards = {n: live[n] for n, each in stored.items() if is_dtensor(live.get(n)) and _fits(each, live[n])}
        return into_new(stored) | {name: (stored[name], torch.empty_like(each)) for name, each in shards.items()}

    # a rank's own values ----------------------------------------------------------------------------------------------

    def _own_tree(self, rank: int) -> Any:
        """Return a rank's own tree; None in a folder of torch.distributed.checkpoint."""
        if has_rows(self.folder):
            return read_line(self.folder, rank)
        path = f"ranks/{rank:05d}.json"  # the format of the first release
        return self._tree(path) if path in self.folder.files else None

    def own_stored(self, rank: int, body: Any) -> dict[str, Stored]:
        """Return where the tensors that a rank's tree names are stored."""
        names = tree.tensor_names(body)
        if has_rows(self.folder):
            self._rows = self._rows or stored_tensors(self.folder, TENSORS)[0]
            return rows_of(self._rows, rank, names)
        stored, _ = stored_tensors(self.folder, f"ranks/{rank:05d}")
        return {name: stored[name] for name in names if name in stored}

    def _check_own(self, own: Any) -> dict[str, Any]:
        """Return this rank's own tree. Compare its buffers with the model's."""
        name = f"ranks/ of rank {self.rank}"
        if isinstance(own, dict) and isinstance(own.get("random"), dict) and not has_numpy():
            own = {**own, "random": {**own["random"], "numpy": None}}  # no generator takes that state here
        body = self._checked(name, own, _OWN_KEYS)
        stored = self.own_stored(self.rank, body)
        self._checked(name, body, (), stored)
        try:
            for buffer, node in self._renamed(body["buffers"]).items():
                found, live = stored[node["$tensor"]], self.found.buffers.get(buffer)
                if live is not None and self.names.takes(buffer) and not _fits(found, live):
                    raise ValueError(_unlike(buffer, found, live))
        except Exception as error:
            raise CheckpointError(f"'{self.folder.path}', {name}: {error or type(error).__name__}") from None
        self._check_stateful("dataloader", body)
        return body

    def own_buffers(self) -> dict[str, Any]:
        """Return the trees of this rank's own buffers that the model takes."""
        buffers = {} if self.own is None else self._renamed(self.own["buffers"])
        return {n: node for n, node in buffers.items() if n in self.found.buffers and self.names.takes(n)}

    # compressors ------------------------------------------------------------------------------------------------------

    def has_own_compressor(self) -> bool:
        """Return True if this rank wrote its compressor state itself: same world size, same rank among the hosts."""
        states = compressors_of(self.training.model) if self.everything else {}
        if not states or self.folder.world_size != self.world_size:
            return False
        for name, state in states.items():
            own = self._compressor_node(self.rank, name)
            ours = state.exchange.rank, state.exchange.world_size, state.split
            if own is not None and (own["rank"], own["world_size"], own.get("split", "")) != ours:
                return False
        return True

    def choose_debts(self, keeps_compressor: bool) -> None:
        """Choose whose compressor error this rank takes over: its own, if all ranks wrote theirs, else an equal share of all."""
        self.keeps_compressor = keeps_compressor
        for name, state in compressors_of(self.training.model).items() if self.everything else ():
            ranks = [self.rank] if keeps_compressor else range(self.folder.world_size)
            debts: dict[Any, tuple[int, Any]] = {}
            for rank in ranks:
                node = self._compressor_node(rank, name)
                if keeps_compressor or node is None or node.get("split", "") == state.split:  # of the same shards
                    debts.setdefault(None if node is None else node["rank"], (rank, node))  # the lowest rank of a host
            self.debts.append((state, list(debts.values())))

    def _compressor_node(self, rank: int, name: str) -> dict[str, Any] | None:
        """Return the tree of a rank's compressor state, of module `name` if there are several, without its tensors."""
        found = (self._own_tree(rank) or {}).get("compressor")
        return found.get(name) if found is not None and name else found

    # the model --------------------------------------------------------------------------------------------------------

    def _raise_mismatch(self, what: str, missing: list[str], left_over: list[str], wrong: list[str]) -> None:
        """Raise Mismatch if names are strict or something is wrong; else log missing and unexpected names."""
        if self.names.strict or wrong:
            self._raise_all(what, missing, left_over, wrong)
        if missing:
            _logger.warning("%s: it lacks %s of the %s, which stay unchanged", self.folder.path, some(missing), what)
        if left_over:
            _logger.info("%s: %s are not of the %s here", self.folder.path, some(left_over), what)

    def _raise_all(self, what: str, missing: list[str], left_over: list[str] = [], wrong: list[str] = []) -> None:
        parts = []
        if missing:
            parts.append(f"it lacks {some(missing)}")
        if left_over:
            parts.append(f"it has {some(left_over)}, which the {what} here lacks")
        if wrong:
            parts.append(some(wrong, str, "; "))
        if parts:
            raise Mismatch(f"'{self.folder.path}' does not fit the {what}: {'; '.join(parts)}")

    def _match_model(self) -> list[list[Read]]:
        takes = self.names.takes
        kept_tensors, kept_ties = stored_tensors(self.folder, "model")
        stored = self._renamed(kept_tensors)
        tied = {name: self.names.new(kept) for name, kept in self._renamed(kept_ties).items()}
        unlike = self.names.unmatched([*stored, *tied, *self.extra_state, *self.found.all(), *self.found.tied])
        if unlike is not None:
            sentence = (
                f"'{self.folder.path}': include: {unlike!r} is found in no name of the checkpoint or of the model"
            )
            if self.names.strict:
                raise Mismatch(sentence)
            _logger.warning("%s", sentence)
        other_names: dict[str, list[str]] = {}
        for name, kept in self.found.tied.items():
            other_names.setdefault(kept, []).append(name)
        turns: list[dict[Stored, torch.Tensor]] = [{}]
        missing, wrong, used = [], [], set()
        for name, tensor in self.found.all().items():
            candidates = [name, *other_names.get(name, ())]
            if not any(map(takes, candidates)):
                continue
            candidates += [tied[n] for n in candidates if n in tied]
            place = next((n for n in candidates if n in stored), None)
            if place is None:
                missing.append(name)
                continue
            used |= {place, *candidates}
            found = stored[place]
            if not _fits(found, tensor):
                wrong.append(_unlike(name, found, tensor))
                continue
            if all(found in turn for turn in turns):
                turns.append({})
            next(turn for turn in turns if found not in turn)[found] = tensor
        left_over = [name for name in stored if name not in used and takes(name)]
        if "dcp" not in self.state:  # dcp.save stores extra state under names of torch's planner
            missing += [name for name in self.found.extras if name not in self.extra_state and takes(name)]
            left_over += [name for name in self.extra_state if name not in self.found.extras and takes(name)]
        self._raise_mismatch("model", missing, left_over, wrong)
        return [list(turn.items()) for turn in turns]

    # the optimizer ----------------------------------------------------------------------------------------------------

    def _match_optimizer(self) -> dict[str, Any]:
        """Return the optimizer's tree under the names of this training, with its tensors under "stored"."""
        if "optimizer.json" not in self.folder.files:
            raise Mismatch(f"'{self.folder.path}' was saved without an optimizer: load it without one")
        body = self._checked("optimizer.json", self._tree("optimizer.json"), ("groups", "state"))
        optimizer = self.training.optimizer
        names = parameter_names(optimizer, self.found)
        all_ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if not self.names.is_all:
            self._take_part(body, all_ours)
        ours = [list(filter(self.names.takes, group)) for group in all_ours]
        theirs = [group["params"] for group in body["groups"]]
        missing = sorted({n for group in ours for n in group} - {n for group in theirs for n in group})
        left_over = sorted({n for group in theirs for n in group} - {n for group in ours for n in group})
        wrong = []
        if not missing and not left_over and [sorted(g) for g in ours] != [sorted(g) for g in theirs]:
            place = {name: number for number, group in enumerate(theirs) for name in group}
            moved = [(n, i) for i, group in enumerate(ours) for n in group if place[n] != i]
            wrong.append(
                f"parameter groups of {[len(g) for g in theirs]} parameters in the checkpoint, of {[len(g) for g in ours]} here: "
                + "".join(f"'{n}' is in group {place[n]} there, in group {i} here" for n, i in moved[:1])
            )
        unlike = [unlike_saved(users_optimizer(each), part["groups"]) for each, part in self.parts(body)]
        wrong += [each for each in unlike if each is not None]
        self._raise_mismatch("optimizer", missing, left_over, wrong)
        stored, _ = stored_tensors(self.folder, "optimizer")
        wanted = tree.tensor_names([body["groups"], body["state"], body.get("further")])
        self._raise_all("optimizer's state", [n for n in wanted if n not in stored])
        self._match_further(body)
        body["stored"] = stored if self.names.is_all else {name: stored[name] for name in wanted}
        for group, members in zip(body["groups"], all_ours):
            group["params"] = members if not self.names.is_all else group["params"]
        return body

    def _take_part(self, body: dict[str, Any], ours: list[list[str]]) -> None:
        """Rename the optimizer's parameters in `body`, and drop those not selected; without `strict`, options of unlike groups."""
        takes = self.names.takes
        for group in body["groups"]:
            group["params"] = [name for name in map(self.names.new, group["params"]) if takes(name)]
        body["state"] = {n: each for n, each in self._renamed(body["state"]).items() if takes(n)}
        if self.names.strict:
            return
        mine = {name for group in ours for name in group if takes(name)}
        both = mine & {name for group in body["groups"] for name in group["params"]}
        body["state"] = {n: each for n, each in body["state"].items() if n in both}
        if [both & set(group) for group in ours] != [both & set(group["params"]) for group in body["groups"]]:
            _logger.warning("%s has other parameter groups: their options stay unchanged", self.folder.path)
            body["groups"] = [{} for _ in ours]
        for group, names in zip(body["groups"], ours):
            group["params"] = [name for name in names if takes(name)]

    def _match_further(self, body: Mapping[str, Any]) -> None:
        """Compare the optimizer's further state_dict() keys. Log those that the checkpoint lacks: they stay unchanged."""
        optimizer, kept = self.training.optimizer, body.get("further", {})
        try:
            ours = names_of(optimizer, further_state(optimizer))
        except CheckpointError as error:
            if kept:
                raise Mismatch(f"'{self.folder.path}' cannot be restored: {error}") from None
            _logger.warning("%s: %s", self.folder.path, error)
            return
        kept = names_of(optimizer, kept)
        self._raise_all("optimizer", [], [key for key in kept if key not in ours])
        unchanged = "%s holds no '%s' of the optimizer's state_dict(): it stays unchanged"
        for key in (key for key in ours if key not in kept):
            _logger.warning(unchanged, self.folder.path, key)

    def parts(self, body: Mapping[str, Any] | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each optimizer of the training with its part of the tree."""
        body = body or self.optimizer or {}
        first, members = 0, members_of(self.training.optimizer)
        for each in members:
            part = {**body, "groups": body["groups"][first : first + len(each.param_groups)]}
            first += len(each.param_groups)
            if len(members) > 1:
                own = self.by_name(each)
                part["state"] = {name: values for name, values in body["state"].items() if name in own}
            yield each, part

    def by_name(self, optimizer: Any) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
        """Map the name of each of an optimizer's parameters to (parameter, its group)."""
        names = parameter_names(self.training.optimizer, self.found)
        return {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}

    def _add_state_reads(self, optimizer: Any, body: Mapping[str, Any]) -> None:
        """Choose what receives an optimizer's state: the present tensors that fit, this rank's slices, or whole tensors."""
        by_name, stored = self.by_name(optimizer), body["stored"]
        is_sliced = isinstance(optimizer, ShardedOptimizer)
        self.new |= into_new({name: stored[name] for name in tree.tensor_names(body["groups"])})
        for parameter_name, values in body["state"].items():
            parameter, _ = by_name[parameter_name]
            run = optimizer.held_run(parameter) if is_sliced else None
            if is_sliced and run is None:  # another rank's
                continue
            for key, node in values.items():
                direct = node.get("$tensor") if isinstance(node, dict) else None
                self.new |= into_new({n: stored[n] for n in tree.tensor_names(node) if n != direct})
                if direct is None:
                    continue
                each = stored[direct]
                live = None if is_sliced or parameter not in optimizer.state else optimizer.state[parameter].get(key)
                is_cut = is_state_slice(key, each, parameter)
                if isinstance(live, torch.Tensor) and has_memory(live) and _fits(each, live):
                    self.live[direct] = each, live
                elif run is not None and is_cut and is_row_major(optimizer.layout_of(parameter)):
                    memory = optimizer.empty_state(run[1] - run[0], each.torch_dtype)
                    parts = placed_parts(parameter, run[0], memory)
                    self.new[direct] = each, Sliced(each.torch_dtype, tuple(parameter.shape), parts, (memory,))
                elif run is not None and reads_records(key, each, parameter, optimizer):
                    begin, end = moments.run(*run)
                    memory = optimizer.empty_state(end - begin, each.torch_dtype)
                    live = (memory.reshape(-1, moments.RECORD),)
                    self.new[direct] = each, Sliced(each.torch_dtype, each.torch_shape, ((begin, memory),), live)
                elif is_cut and not is_sliced and is_dtensor(parameter):
                    self.new[direct] = each, torch.empty_like(parameter, dtype=each.torch_dtype)
                else:
                    self.new |= into_new({direct: each})


def into_new(stored: Mapping[str, Stored]) -> dict[str, Read]:
    """Return the reads of tensors into new ones."""
    return {name: (each, each.empty()) for name, each in stored.items()}


def is_state_slice(key: str, stored: Stored, parameter: torch.Tensor) -> bool:
    """Return whether a sliced optimizer keeps only a slice of this entry."""
    return key != "step" and stored.torch_shape == tuple(parameter.shape)


def reads_records(key: str, stored: Stored, parameter: torch.Tensor, optimizer: ShardedOptimizer) -> bool:
    """Return whether a rank can read the blocks of int8 of its slice alone: they are in the order of its memory."""
    layout = optimizer.layout_of(parameter)
    shape = moments.blocks(layout.numel()), moments.RECORD
    is_plain = is_row_major(layout) and not is_dtensor(parameter)
    return key in moments.FORMS and is_plain and (stored.torch_dtype, stored.torch_shape) == (torch.uint8, shape)


def _stand_in(node: Any) -> Any:
    """Return the value of a tree with empty tensors in place of its tensors."""
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    return tree.decode(node, dict.fromkeys(tree.tensor_names(node), empty))


def _fits(stored: Stored, tensor: torch.Tensor) -> bool:
    wanted = tensor.dtype if tensor.is_complex() else None
    kind = stored.complex_dtype, list(stored.shape), stored.dtype
    return kind == (wanted, stored_shape(tensor), dtype_name("", tensor.dtype))


def _unlike(name: str, stored: Stored, tensor: torch.Tensor) -> str:
    here = f"{dtype_name('', tensor.dtype)} {stored_shape(tensor)}"
    return f"{name}: the checkpoint has {stored.dtype} {list(stored.shape)}, the model {here}"
