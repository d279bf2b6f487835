"""Apply a checkpoint that fits and was read: what follows the verdict. An error here leaves a training that is loaded in part."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...compress.state import reshard_state
from ...formats import tree
from ...layout.local_parameters import local_of, part_of
from ...layout.shard_runs import memory_order
from ...optim import moments
from ...optim.master_weights import kept_by
from ...optim.sharded import ShardedOptimizer
from ...torch_compat.dtensor import is_dtensor
from ..peers import whole_parameters
from ..slices import Sliced, loads_slices, own_parameters, replicas_of
from ..state.composed import together
from ..state.content import load_stateful, set_random_state
from ..state.optimizer_extras import give_back
from .filling import Filler
from .fitting import STATEFUL, Fit, Read, into_new, is_state_slice

_logger = logging.getLogger("shardwright")


def tensors_of(reads: Mapping[str, Read]) -> dict[str, torch.Tensor]:
    """Return the tensors that reads have filled, by name."""
    return {n: target.live[0] if isinstance(target, Sliced) else target for n, (_, target) in reads.items()}


def apply(fit: Fit, filler: Filler, random: Any) -> Any:
    """Fill live tensors and set all other values; `random`: the states of this rank's generators. Return `extra`. Collective."""
    training = fit.training
    _fill_model(fit, filler)
    if fit.optimizer is not None:
        with torch.no_grad():
            filler.fill(fit.live.values())
            _apply_optimizer(fit)
    tensors = tensors_of(fit.state_reads)
    for name, module in fit.found.extras.items():
        if name in fit.extra_state and fit.names.takes(name):  # a folder of dcp.save has no extra state
            module.set_extra_state(tree.decode(fit.extra_state[name], tensors))
    if fit.everything:
        for name in STATEFUL:
            if getattr(training, name) is not None and fit.state[name] is None:
                _logger.warning("%s holds no state of the %s: it stays unchanged", fit.folder.path, name)
            load_stateful(getattr(training, name), tree.decode(fit.state[name], tensors))
    own = tensors_of(fit.own_reads)
    with torch.no_grad():
        for name, node in fit.own_buffers().items():
            fit.found.buffers[name].copy_(tree.decode(node, own))
    if fit.everything and fit.own is not None:
        load_stateful(training.dataloader, tree.decode(fit.own["dataloader"], own))
        set_random_state(random)
    elif fit.everything and fit.folder.world_size != fit.world_size and training.dataloader is not None:
        _logger.warning(
            "%s was written by %d ranks, these are %d: the dataloader and the random generators stay unchanged",
            fit.folder.path, fit.folder.world_size, fit.world_size,
        )  # fmt: skip
    for state, debts in fit.debts:
        _apply_compressor(fit, filler, state, debts)
    return tree.decode(fit.state["extra"], tensors)


def _fill_model(fit: Fit, filler: Filler) -> None:
    with torch.no_grad(), contextlib.ExitStack() as stack:
        slices: dict[int, Sliced] = {}
        if loads_slices(fit.training.model):
            for replica in replicas_of(fit.training.model):
                slices |= stack.enter_context(own_parameters(replica))
        else:
            stack.enter_context(whole_parameters(fit.training.model, writable=True))
        for turn in fit.model:
            filler.fill((stored, slices.get(id(target), target)) for stored, target in turn)


def _apply_optimizer(fit: Fit) -> None:
    assert fit.optimizer is not None
    tensors = tensors_of({**fit.new, **fit.live})
    if "further" in fit.optimizer:
        give_back(fit.training.optimizer, tree.decode(fit.optimizer["further"], tensors))
    for optimizer, body in fit.parts():
        (_apply_sliced if isinstance(optimizer, ShardedOptimizer) else _apply_whole)(fit, body, optimizer, tensors)


def _apply_whole(fit: Fit, body: Mapping[str, Any], optimizer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    by_name = fit.by_name(optimizer)
    state = {}
    for parameter_name, values in body["state"].items():
        parameter, group = by_name[parameter_name]
        live_keys = {str(key): key for key in optimizer.state.get(parameter, {})}  # the file holds strings
        decoded = {live_keys.get(key, key): tree.decode(node, tensors) for key, node in values.items()}
        kept = kept_by(optimizer, parameter, moments.readable(together(decoded, parameter.shape), parameter))
        on_host = () if group.get("capturable") or group.get("fused") else ("step",)
        state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and key not in on_host else value
            for key, value in kept.items()
        }
    others = {} if fit.names.is_all else dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update({**others, **state})
    for group, saved in zip(optimizer.param_groups, body["groups"]):
        for key, node in saved.items():
            if key == "params":
                continue
            live, value = group.get(key), tree.decode(node, tensors)
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
                live.copy_(value)
            else:
                group[key] = value


def _apply_sliced(
    fit: Fit, body: Mapping[str, Any], optimizer: ShardedOptimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    by_name, states = fit.by_name(optimizer), {}
    for parameter_name, values in body["state"].items():
        parameter, _ = by_name[parameter_name]
        run = optimizer.held_run(parameter)
        if run is None:
            continue
        state = {key: tree.decode(node, tensors) for key, node in values.items()}
        for key, value in state.items():
            name = values[key].get("$tensor") if isinstance(values[key], dict) else None
            if name is None or (moments.is_records(key, value) and isinstance(fit.new[name][1], Sliced)):
                continue
            if moments.is_records(key, value):
                layout = parameter if is_dtensor(parameter) else optimizer.layout_of(parameter)
                value = moments.placed(value, key, layout)
            elif not is_state_slice(key, body["stored"][name], parameter):
                continue
            if not isinstance(fit.new[name][1], Sliced):
                value = part_of(local_of(parameter), value)
                value = memory_order(value, optimizer.layout_of(parameter))[run[0] : run[1]].clone()
            state[key] = optimizer.as_held(parameter, value)
        states[parameter] = together(state, optimizer.layout_of(parameter).shape)
    positions = {n: position for position, n in enumerate(by_name)}
    groups = []
    for group in body["groups"]:
        options = {key: tree.decode(node, tensors) for key, node in group.items() if key != "params"}
        groups.append({**options, "params": [positions[name] for name in group["params"]]})
    optimizer.load_held_state(groups, states, keep_others=not fit.names.is_all)


def _apply_compressor(fit: Fit, filler: Filler, state: Any, debts: list[tuple[int, Any]]) -> None:
    """Restore a compressor's state: this rank's own or, in another world, an equal share of all ranks' error."""
    known = []
    for rank, node in debts:
        if node is not None:
            reads = into_new(fit.own_stored(rank, node))
            filler.fill(reads.values())
            known.append(tree.decode(node, tensors_of(reads)))
    ours = {"kind": state.kind, "settings": state.settings()}
    is_another = any(each[key] != ours[key] for each in known for key in ours)
    is_of_parts = not fit.keeps_compressor and any("parts" in each for each in known)
    if not known or len(known) < len(debts) or is_another or is_of_parts:
        _logger.warning("%s holds no state of this compressor, %s: its error starts at zero", fit.folder.path, ours)
        state.forget()
    elif fit.keeps_compressor:
        state.load_state_dict(known[0])
    else:
        share = reshard_state(known, state.exchange.rank, state.exchange.world_size)
        state.load_state_dict(share if state.exchange.takes_part else {**share, "parameters": {}})
