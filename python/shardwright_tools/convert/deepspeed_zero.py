"""Readers of DeepSpeed's checkpoints of ZeRO-1, 2 and 3, without DeepSpeed: they cut flat groups into parameters.

Stages 1 and 2: `param_slice_mappings` names the elements of each parameter in a rank's flat tensor. Without it, the
flat tensors of all ranks, concatenated, hold the parameters in the order of `param_shapes`. Stage 3: rank r holds
elements [r * c, (r + 1) * c) of each parameter, one parameter after another, with c = ceil(numel / ranks).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from shardwright._engine import CheckpointError
from shardwright.formats.unpickle import Placeholder, load_torch_file, without_placeholders

from .contents import MASTER, Contents, Lazy, lazily

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt\Z")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
#: keys in the model file that DeepSpeed adds and no reader needs
_OWN_KEYS = frozenset(
    ("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
    + ("data_sampler", "random_ltd", "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "ds_config", "ds_version")
    + ("universal_checkpoint_info", "num_experts", "autoep_layers", "ds_autoep_layers")
)  # fmt: skip


def deepspeed_folder(path: str, tag: str | None = None) -> str | None:
    """Return the folder of one DeepSpeed checkpoint: `path`, or the subfolder that `tag` or the file `latest` names."""
    if not os.path.isdir(path):
        return None
    if tag is None and any(MODEL.match(name) for name in os.listdir(path)):
        return path
    for name in ("latest", "latest_universal"):
        if tag is None and os.path.isfile(os.path.join(path, name)):
            with open(os.path.join(path, name), encoding="utf-8") as file:
                tag = file.read().strip()
    folder = path if tag is None else os.path.join(path, tag)
    if tag is not None and (os.path.basename(tag) != tag or not os.path.isdir(folder)):
        raise CheckpointError(f"'{path}' has no folder {tag!r}, the tag of its newest checkpoint")
    return folder if any(MODEL.match(name) for name in os.listdir(folder)) else None


def read_zero(folder: str) -> Contents:
    """Return the contents of a checkpoint that DeepSpeed's engine wrote at any ZeRO stage."""
    models, optimizers = files_of(folder, MODEL), files_of(folder, _OPTIMIZER)
    first = load_torch_file(models[0])
    contents = model_of(first, models[0])
    if not optimizers:
        contents.left_out += ["the optimizer's state: only ZeRO's files are read"] if first.get("optimizer") else []
        return contents
    states = [load_torch_file(path)["optimizer_state_dict"] for path in optimizers]
    counts = states[0].get("partition_count", len(states))
    if any(count != len(states) for count in (counts if isinstance(counts, list) else [counts])):
        raise CheckpointError(
            f"'{folder}' has {len(states)} files of optimizer state, for partitions of {counts} ranks"
        )
    is_stage_3 = "fp32_flat_groups" in states[0]
    of_groups = states[0].get("ds_zero_partition_groups") or []
    if any(isinstance(g, dict) and g.get("partition_count", len(states)) != len(states) for g in of_groups):
        raise CheckpointError(
            f"'{folder}' has experts that fewer ranks share: convert it with DeepSpeed's ds_to_universal"
        )
    base = [each["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"] for each in states]
    if isinstance(base[0], list):  # "elastic": a list of states, groups without options
        base = [
            {"state": dict(enumerate(each)), "param_groups": [{"params": [n]} for n in range(len(each))]}
            for each in base
        ]
    weights = [each["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"] for each in states]
    shapes = first["param_shapes"]
    if len(shapes) != len(weights[0]):
        raise CheckpointError(f"'{folder}' has {len(weights[0])} flat groups for {len(shapes)} groups of parameters")
    for number, names in enumerate(shapes):
        flat = [each[number] for each in weights]
        maps = [_fragments(each.get("param_slice_mappings"), number) for each in states]
        places = _of_stage_3(names, len(flat)) if is_stage_3 else _of_stage_2(names, flat, maps)
        for name, shape in names.items():
            found = sum(count for _, _, count in places.get(name, ()))
            if found != math.prod(shape) or any(first + count > flat[r].numel() for r, first, count in places[name]):
                raise CheckpointError(f"'{folder}': ranks hold {found} elements of '{name}', of shape {tuple(shape)}")
        _take_group(contents, names, places, flat, [each["state"].get(number, {}) for each in base])
    contents.groups = groups_of(base[0]["param_groups"], shapes, contents)
    if is_stage_3:
        _take_frozen(contents, [first, *map(load_torch_file, models[1:])])
    scaler = states[0].get("loss_scaler")
    has_state = isinstance(scaler, Placeholder) and isinstance(scaler.state, dict)
    scale = scaler.state.get("cur_scale") if has_state else None
    if scale is not None and states[0].get("dynamic_loss_scale"):
        contents.extra["loss_scale"] = float(scale)
    known = {*(first.get("frozen_param_shapes") or ()), *(name for names in shapes for name in names)}
    hollow = [name for name, each in contents.model.items() if each.shape == (0,) and name not in known]
    if is_stage_3 and hollow:
        raise CheckpointError(f"'{folder}': no file has the parameter '{hollow[0]}'")
    return contents


def files_of(folder: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the files of all ranks in rank order. Raise CheckpointError if model parallelism has also split them."""
    found = {match: os.path.join(folder, match[0]) for match in map(pattern.match, os.listdir(folder)) if match}
    if any(int(match[2]) for match in found) or any(name.startswith("layer_") for name in os.listdir(folder)):
        raise CheckpointError(
            f"'{folder}' was written with tensor or pipeline parallelism: convert it with DeepSpeed's ds_to_universal first"
        )
    ranks = sorted(found, key=lambda match: int(match[1] or 0))
    missing = next((n for n, match in enumerate(ranks) if int(match[1] or 0) != n), None)
    if missing is not None:
        raise CheckpointError(f"'{folder}' lacks the file of rank {missing} beside '{ranks[missing][0]}'")
    return [found[match] for match in ranks]


def model_of(first: Mapping[str, Any], path: str) -> Contents:
    """Return the contents of a model file, without the optimizer."""
    if not isinstance(first, dict) or not isinstance(first.get("module"), Mapping) or "param_shapes" not in first:
        raise CheckpointError(f"'{path}' is no model file of DeepSpeed with ZeRO: it lacks `module` or `param_shapes`")
    shared = dict(first.get("shared_params") or {})
    contents = Contents({}, tied={name: kept for name, kept in shared.items() if name in first["module"]})
    for name, value in first["module"].items():
        if isinstance(value, torch.Tensor):
            contents.model |= {} if name in shared else {name: Lazy.of(value)}
            continue
        value = without_placeholders(value, name, contents.left_out)
        if value is not None and not isinstance(value, Placeholder):
            contents.extra.setdefault("model_extra_state", {})[name] = value
    step = first.get("global_steps", 0)
    contents.step = step if isinstance(step, int) else 0
    more = {key: value for key, value in first.items() if key not in _OWN_KEYS and value is not None}
    contents.extra |= lazily(without_placeholders(more, "checkpoint", contents.left_out))
    return contents


#: parameter -> (rank, first element in that rank's flat tensor, elements), in the parameter's order
_Places = Mapping[str, Sequence[tuple[int, int, int]]]


def _fragments(mappings: Any, group: int) -> dict[str, tuple[int, int]] | None:
    """Return (first element, count) of each parameter in a rank's flat tensor; None if the file lacks the mapping."""
    if not isinstance(mappings, list) or group >= len(mappings):
        return None
    found = {}
    for name, address in mappings[group].items():
        fields = address.state if isinstance(address, Placeholder) else None
        if not isinstance(fields, dict) or not {"start", "numel"} <= fields.keys():
            return None
        found[name] = (int(fields["start"]), int(fields["numel"]))
    return found


def _of_stage_2(
    names: Mapping[str, Sequence[int]],
    flat: Sequence[torch.Tensor],
    maps: Sequence[Mapping[str, tuple[int, int]] | None],
) -> _Places:
    if all(each is not None for each in maps):
        return {n: [(r, *each[n]) for r, each in enumerate(maps) if each is not None and n in each] for n in names}
    places: dict[str, list[tuple[int, int, int]]] = {}
    end = 0
    for name, shape in names.items():
        first, end = end, end + math.prod(shape)
        begin = 0
        places[name] = []
        for rank, part in enumerate(flat):
            low, high = max(first, begin), min(end, begin + part.numel())
            if low < high:
                places[name].append((rank, low - begin, high - low))
            begin += part.numel()
    return places


def _of_stage_3(names: Mapping[str, Sequence[int]], world_size: int) -> _Places:
    places, at = {}, 0
    for name, shape in names.items():
        numel = math.prod(shape)
        share = -(-numel // world_size)
        places[name] = [(r, at, max(0, min(share, numel - r * share))) for r in range(world_size)]
        at += share
    return places


def _take_group(
    contents: Contents,
    names: Mapping[str, Sequence[int]],
    places: _Places,
    weights: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
) -> None:
    """Add a group's parameters, masters and state."""

    def cut(parts: Sequence[torch.Tensor], name: str, shape: tuple[int, ...]) -> Lazy:
        def read() -> torch.Tensor:
            found = [parts[rank].detach()[first : first + count] for rank, first, count in places[name]]
            return torch.cat(found).view(shape)

        return Lazy(parts[0].dtype, shape, read)

    for name, size in names.items():
        if name not in contents.model:
            raise CheckpointError(f"the checkpoint describes the parameter '{name}' and does not hold it")
        shape = tuple(size)
        state = contents.state[name] = {}
        take_weight(contents, name, cut(weights, name, shape))
        for key, value in states[0].items():
            if key != "step" and isinstance(value, torch.Tensor) and value.dim() == 1:
                of_ranks = [each[key] for each in states]
                # the flat tensors have padding at the end
                if all(mine.numel() >= each.numel() for mine, each in zip(of_ranks, weights)):
                    state[key] = cut(of_ranks, name, shape)
                    continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                state[key] = Lazy.of(value.reshape(()))
            elif isinstance(value, (int, float, bool)) or value is None:
                state[key] = value
            else:
                what = f"'{key}' of the optimizer's state of '{name}'"
                contents.left_out.append(f"{what}, of another form than its weights")


def take_weight(contents: Contents, name: str, whole: Lazy) -> None:
    """Take a parameter's float32 weights: as the parameter itself, or as its master."""
    low = contents.model[name]
    if low.dtype == whole.dtype:
        contents.model[name] = whole
        return
    contents.state[name][MASTER] = whole
    if low.shape != whole.shape:  # stage 3 keeps no low-precision weights
        contents.model[name] = whole.to(low.dtype)


def groups_of(
    groups: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]], contents: Contents
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with parameter names for flat group numbers. Parameters inherit a group's step."""
    found = []
    for number, group in enumerate(groups):
        flat = [n for n in group.get("params", ()) if isinstance(n, int) and n < len(shapes)] or [number]
        names = [name for n in flat for name in shapes[n]]
        options = without_placeholders({k: v for k, v in group.items() if k != "params"}, "group", contents.left_out)
        step = options.pop("step", None)
        for name in names if step is not None else ():
            contents.state.setdefault(name, {}).setdefault("step", lazily(step))
        found.append({**lazily(options), "params": names})
    return found


def _take_frozen(contents: Contents, of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Concatenate the parts of stage 3's frozen parameters."""
    for name, shape in (of_ranks[0].get("frozen_param_shapes") or {}).items():
        parts = [each["frozen_param_fragments"][name] for each in of_ranks]
        numel, shape = math.prod(shape), tuple(shape)

        def read(parts: Any = parts, numel: int = numel, shape: Any = shape) -> torch.Tensor:
            return torch.cat([part.reshape(-1) for part in parts])[:numel].view(shape)

        contents.model[name] = Lazy(parts[0].dtype, shape, read)
