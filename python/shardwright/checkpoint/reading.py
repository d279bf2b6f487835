"""From a folder back into a training: first everything is looked at, then ranks agree, then live tensors are touched."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from ..compression_state import reshard_state
from ..data_parallel import DistributedDataParallel
from ..parameter_memory import memory_order
from ..sharded_optimizer import ShardedOptimizer
from . import tree
from .content import load_stateful, parameter_names, set_random_state
from .names import dtype_name, model_tensors, plain, stored_shape
from .peers import Peers, has_passing_parameters, whole_parameters
from .slices import Sliced, is_dtensor, is_row_major, own_parameters, slice_of_dtensor
from .stored import Stored, stored_tensors
from .writing import Training

_logger = logging.getLogger("shardwright")
_NAMES_SHOWN = 5
_THREADS, _RUN_BLOCKS, _BLOCK_BYTES = 2, 16, 1 << 20


class Mismatch(CheckpointError):
    """The checkpoint is sound, and of another model or optimizer."""


class Reader:
    """One checkpoint, read by one of several ranks.

    Making it reads what is small and compares it with the training; nothing is changed.

    Raises
    ------
    CheckpointError
        The folder is no sound checkpoint.
    Mismatch
        It is, but of something else.
    """

    def __init__(self, path: str, training: Training) -> None:
        self.folder = CheckpointFolder(path)
        self.training = training
        self._found = model_tensors(training.model)
        self._state = self._tree("state.json")
        self._reads: list[tuple[Stored, torch.Tensor]] = []
        self._model_reads = self._match_model()
        self._optimizer = self._match_optimizer() if training.optimizer is not None else None

    # what is there ----------------------------------------------------------------------------------------------------

    def _tree(self, path: str) -> Any:
        try:
            return tree.loads(self.folder.read_bytes(path))
        except ValueError as error:
            raise CheckpointError(f"'{self.folder.path}/{path}' is no JSON: {error}") from None

    def _match_model(self) -> list[tuple[Stored, torch.Tensor]]:
        stored, tied = stored_tensors(self.folder, "model")
        other_names: dict[str, list[str]] = {}
        for name, kept in self._found.tied.items():
            other_names.setdefault(kept, []).append(name)
        reads, missing, wrong, used = [], [], [], set()
        for name, tensor in self._found.all().items():
            candidates = [name, *other_names.get(name, ())]
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
            reads.append((found, tensor))
        left_over = [name for name in stored if name not in used]
        _raise_mismatch(self.folder.path, "model", missing, left_over, wrong)
        return reads

    def _match_optimizer(self) -> dict[str, Any]:
        if "optimizer.json" not in self.folder.files:
            raise Mismatch(f"'{self.folder.path}' was saved without an optimizer: load it without one")
        body = self._tree("optimizer.json")
        optimizer = self.training.optimizer
        names = parameter_names(optimizer, self._found)
        ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in body["groups"]]
        missing = sorted({n for group in ours for n in group} - {n for group in theirs for n in group})
        left_over = sorted({n for group in theirs for n in group} - {n for group in ours for n in group})
        wrong = []
        if not missing and not left_over and [sorted(g) for g in ours] != [sorted(g) for g in theirs]:
            wrong.append(
                f"parameter groups of {[len(g) for g in theirs]} parameters in the checkpoint, of {[len(g) for g in ours]} here"
            )
        _raise_mismatch(self.folder.path, "optimizer", missing, left_over, wrong)
        stored, _ = stored_tensors(self.folder, "optimizer")
        wanted = tree.tensor_names(body["groups"]) + tree.tensor_names(body["state"])
        _raise_mismatch(self.folder.path, "optimizer's state", [n for n in wanted if n not in stored], [], [])
        body["stored"] = stored
        return body

    # agreement --------------------------------------------------------------------------------------------------------

    def verify_share(self, rank: int, world_size: int) -> None:
        """Checks this rank's share of all blocks of the folder."""
        count = self.folder.block_count
        first, end = count * rank // world_size, count * (rank + 1) // world_size
        runs = [(at, min(at + _RUN_BLOCKS, end)) for at in range(first, end, _RUN_BLOCKS)]
        with ThreadPoolExecutor(_THREADS) as pool:  # one waits for the disk while another sums up
            list(pool.map(lambda run: self.folder.verify(*run), runs))

    # into the training ------------------------------------------------------------------------------------------------

    def apply(self, rank: int, world_size: int, *, everything: bool) -> Any:
        """Fills the training; returns `extra`. `everything`: beyond model and optimizer, too."""
        self._fill_model()
        if self._optimizer is not None:
            with torch.no_grad():
                self._apply_optimizer(self._optimizer)
        tensors = self._load_all("state")
        for name, module in self._found.extras.items():
            if name in self._state["model_extra_state"]:
                module.set_extra_state(tree.decode(self._state["model_extra_state"][name], tensors))
        if everything:
            for name in ("scheduler", "scaler", "user_state"):
                load_stateful(getattr(self.training, name), tree.decode(self._state[name], tensors), name)
        if self.folder.world_size == world_size:
            self._apply_own(rank, everything)
        if everything:
            self._apply_compressor(rank, world_size)
        return tree.decode(self._state["extra"], tensors)

    def _fill_model(self) -> None:
        model = getattr(self.training.model, "_orig_mod", self.training.model)
        with torch.no_grad():
            in_slices = isinstance(model, DistributedDataParallel) and model._engine().zero
            if not in_slices or has_passing_parameters(model):
                with whole_parameters(model, writable=True):
                    self._fill(self._model_reads)
                return
            with own_parameters(model) as slices:
                self._fill((stored, slices.get(id(target), target)) for stored, target in self._model_reads)

    def _fill(self, reads: Iterable[tuple[Stored, Any]]) -> None:
        """Reads into tensors, or the slices that are held of them."""
        by_file: dict[str, list[tuple[int, int, int]]] = {}
        landed = []
        for stored, target in reads:
            if not stored.nbytes:
                continue
            if isinstance(target, Sliced) or is_dtensor(target):
                sliced = target if isinstance(target, Sliced) else slice_of_dtensor(target)
                ranges = sliced.ranges()
                landed.append(functools.partial(_land_slice, sliced))
            else:
                memory = plain(target)
                ranges = [(0, stored.nbytes, memory.data_ptr())]
                landed.append(functools.partial(_land, target, memory))
            by_file.setdefault(stored.path, []).extend((stored.begin + b, n, address) for b, n, address in ranges)
        runs = [(path, run) for path, entries in by_file.items() for run in _runs(sorted(entries))]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda each: self.folder.read(*each), runs))
        for land in landed:
            land()

    def _load_all(self, prefix: str) -> dict[str, torch.Tensor]:
        """New tensors with the values of files `prefix`*.safetensors."""
        stored, _ = stored_tensors(self.folder, prefix)
        tensors = {name: entry.empty() for name, entry in stored.items()}
        self._fill((entry, tensors[name]) for name, entry in stored.items())
        return tensors

    def _apply_optimizer(self, body: Mapping[str, Any]) -> None:
        optimizer = self.training.optimizer
        names = parameter_names(optimizer, self._found)
        by_name = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
        if isinstance(optimizer, ShardedOptimizer):
            self._apply_sliced_optimizer(body, optimizer, by_name)
            return
        tensors = {name: entry.empty() for name, entry in body["stored"].items()}
        self._prefer_live(body, by_name, tensors)
        self._fill((body["stored"][name], tensor) for name, tensor in tensors.items())
        state = {}
        for parameter_name, values in body["state"].items():
            parameter, group = by_name[parameter_name]
            decoded = {_key(parameter, optimizer, key): tree.decode(node, tensors) for key, node in values.items()}
            state[parameter] = {key: _on_device(value, key, parameter, group) for key, value in decoded.items()}
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, body["groups"]):
            for key, node in saved.items():
                if key != "params":
                    _set_option(group, key, tree.decode(node, tensors))

    def _prefer_live(
        self, body: Mapping[str, Any], by_name: Mapping[str, Any], tensors: dict[str, torch.Tensor]
    ) -> None:
        """State that is there and fits is filled in place; state of a DTensor is sliced as it is."""
        live_state = self.training.optimizer.state
        for parameter_name, values in body["state"].items():
            parameter, _ = by_name[parameter_name]
            for key, node in values.items():
                live = live_state[parameter].get(key) if parameter in live_state else None
                name = node.get("$tensor") if isinstance(node, dict) else None
                if name and isinstance(live, torch.Tensor) and _fits(body["stored"][name], live):
                    tensors[name] = live
                elif name and is_dtensor(parameter) and is_state_slice(key, body["stored"][name], parameter):
                    tensors[name] = torch.empty_like(parameter, dtype=body["stored"][name].torch_dtype)

    def _apply_sliced_optimizer(
        self, body: Mapping[str, Any], optimizer: ShardedOptimizer, by_name: Mapping[str, Any]
    ) -> None:
        """Reads this rank's slices, and whole what is no slice."""
        targets: dict[str, Any] = {}
        for parameter_name, values in body["state"].items():
            parameter, _ = by_name[parameter_name]
            run = optimizer.held_run(parameter)
            for key, node in values.items():
                name = node.get("$tensor") if isinstance(node, dict) else None
                stored = body["stored"].get(name)
                if run is None or stored is None or not is_state_slice(key, stored, parameter):
                    continue
                if is_row_major(optimizer.layout_of(parameter)):
                    memory = torch.empty(run[1] - run[0], dtype=stored.torch_dtype)
                    targets[name] = Sliced(stored.torch_dtype, tuple(parameter.shape), ((run[0], memory),), (memory,))
        wanted = tree.tensor_names(body["groups"])
        held = {n: v for n, v in body["state"].items() if optimizer.held_run(by_name[n][0]) is not None}
        wanted += [name for values in held.values() for name in tree.tensor_names(list(values.values()))]
        tensors = {name: body["stored"][name].empty() for name in wanted if name not in targets}
        self._fill((body["stored"][name], target) for name, target in {**tensors, **targets}.items())
        tensors |= {name: target.live[0] for name, target in targets.items()}
        states = {}
        for parameter_name, values in held.items():
            parameter, _ = by_name[parameter_name]
            state = {key: tree.decode(node, tensors) for key, node in values.items()}
            for key, value in state.items():
                name = values[key].get("$tensor") if isinstance(values[key], dict) else None
                if name and name not in targets and is_state_slice(key, body["stored"][name], parameter):
                    low, high = optimizer.held_run(parameter) or (0, 0)
                    value = memory_order(value, optimizer.layout_of(parameter))[low:high].clone()
                if name and is_state_slice(key, body["stored"][name], parameter):
                    state[key] = optimizer.as_held(parameter, value)
            states[parameter] = state
        positions = {n: position for position, n in enumerate(by_name)}
        groups = [
            {
                **{k: tree.decode(node, tensors) for k, node in g.items() if k != "params"},
                "params": [positions[n] for n in g["params"]],
            }
            for g in body["groups"]
        ]
        optimizer.load_held_state(groups, states)

    def _apply_own(self, rank: int, everything: bool) -> None:
        stem = f"ranks/{rank:05d}"
        if f"{stem}.json" not in self.folder.files:  # written through torch.distributed.checkpoint
            return
        body = self._tree(f"{stem}.json")
        tensors = self._load_all(stem)
        with torch.no_grad():
            for name, node in body["buffers"].items():
                if name in self._found.buffers:
                    self._found.buffers[name].copy_(tree.decode(node, tensors))
        if everything:
            load_stateful(self.training.dataloader, tree.decode(body["dataloader"], tensors), "dataloader")
            set_random_state(tree.decode(body["random"], tensors))

    def _apply_compressor(self, rank: int, world_size: int) -> None:
        """What a compressor remembers: this rank's own, or at another world size an equal share of what all ranks' owe."""
        model = getattr(self.training.model, "_orig_mod", self.training.model)
        state = getattr(model, "compression_state", None)
        if state is None:
            return
        ranks = [rank] if self.folder.world_size == world_size else range(self.folder.world_size)
        found = [self._compressor_of(each) for each in ranks]
        known = [each for each in found if each is not None]
        ours = {"kind": state.kind, "settings": state.settings()}
        if len(known) < len(found) or any(each[key] != ours[key] for each in known for key in ours):
            _logger.warning(
                "%s holds no state of this compressor, %s: it begins with nothing owed", self.folder.path, ours
            )
            return
        state.load_state_dict(known[0] if len(known) == 1 == len(ranks) else reshard_state(known, rank, world_size))

    def _compressor_of(self, rank: int) -> dict[str, Any] | None:
        stem = f"ranks/{rank:05d}"
        node = self._tree(f"{stem}.json").get("compressor") if f"{stem}.json" in self.folder.files else None
        return None if node is None else tree.decode(node, self._load_all(stem))


def is_state_slice(key: str, stored: Stored, parameter: torch.Tensor) -> bool:
    """Whether a sliced optimizer keeps a slice of this entry, and not the whole of it."""
    shape = stored.shape if stored.complex_dtype is None else stored.shape[:-1]
    return key != "step" and shape == tuple(parameter.shape)


def _runs(entries: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """(begin, bytes, address), ascending, cut at multiples of _RUN_BLOCKS blocks: no block is read by two runs."""
    size = _RUN_BLOCKS * _BLOCK_BYTES
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for begin, nbytes, address in entries:
        at = begin
        while at < begin + nbytes:
            end = min(begin + nbytes, (at // size + 1) * size)
            runs.setdefault(at // size, []).append((at, end - at, address + at - begin))
            at = end
    return list(runs.values())


def _land(target: torch.Tensor, memory: torch.Tensor) -> None:
    """What was read into `memory` to `target`, which it is an alias of, or a copy."""
    if memory.data_ptr() != target.data_ptr() or target.is_conj() or target.is_neg():
        target.copy_(torch.view_as_complex(memory) if target.is_complex() else memory)
    else:
        torch.autograd.graph.increment_version(target)


def _land_slice(sliced: Sliced) -> None:
    for each in sliced.live:
        if sliced.copy is not None:
            each.copy_(sliced.copy)
        torch.autograd.graph.increment_version(each)


def _key(parameter: torch.Tensor, optimizer: Any, key: str) -> Any:
    """State keys are strings in torch's optimizers; one that was none keeps its type where the live state shows it."""
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


# as a group -------------------------------------------------------------------------------------------------------------

SOUND, REJECTED, FATAL = "sound", "rejected", "fatal"


def agree_on(path: str, training: Training, peers: Peers, *, verify: bool) -> tuple[Reader | None, str]:
    """(reader, "") if every rank finds `path` sound and fitting; (None, why) if some rank cannot read it. Collective.

    Raises
    ------
    CheckpointError
        It is sound, but some rank cannot use it: the same sentence on every rank.
    """
    reader, verdict = None, [SOUND, ""]
    try:
        reader = Reader(path, training)
        verdict = [SOUND, reader.folder.nonce]
        if verify:
            reader.verify_share(peers.rank, peers.world_size)
    except Mismatch as error:
        verdict = [FATAL, str(error)]
    except (CheckpointError, KeyError, TypeError) as error:
        verdict = [
            REJECTED,
            f"{error}" if isinstance(error, CheckpointError) else f"'{path}': {type(error).__name__}: {error}",
        ]
    except Exception as error:
        verdict = [FATAL, f"'{path}': {type(error).__name__}: {error}"]
    verdicts = peers.exchange(verdict, f"verdict on {path}")
    for kind in (FATAL, REJECTED):
        for rank, (found, text) in enumerate(verdicts):
            if found == kind:
                sentence = text if peers.world_size == 1 else f"rank {rank}: {text}"
                if kind == FATAL:
                    raise CheckpointError(sentence)
                return None, sentence
    if len({nonce for _, nonce in verdicts}) > 1:
        return None, f"ranks see different checkpoints at '{path}'"
    return reader, ""


def apply_together(reader: Reader, peers: Peers, *, everything: bool) -> Any:
    """Fills every rank's training, and returns `extra`; CheckpointError on every rank if it went wrong on one. Collective."""
    extra, failure = None, ""
    try:
        extra = reader.apply(peers.rank, peers.world_size, everything=everything)
    except Exception as error:
        failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    for rank, text in enumerate(peers.exchange(failure, f"load of {reader.folder.path}")):
        if text:
            where = "" if peers.world_size == 1 else f"rank {rank}: "
            raise CheckpointError(
                f"{where}'{reader.folder.path}' was loaded in part, the training is not usable: {text}"
            )
    return extra
