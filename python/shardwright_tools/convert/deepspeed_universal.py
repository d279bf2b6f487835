"""DeepSpeed's universal checkpoints: a folder for each parameter, `zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt`.

The reader accepts any names of state. The writer produces the files that DeepSpeed's engine loads with `{"checkpoint":
{"load_universal": true}}`: the folders, a model file, and the optimizer's options for flat groups.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from typing import Any

import torch
from shardwright._engine import CheckpointError
from shardwright.formats.unpickle import load_torch_file

from .contents import MASTER, Contents, Lazy, durable_file, lazily, replaced
from .deepspeed_zero import MODEL, groups_of, model_of, take_weight
from .folders import Progress

_FP32, _PARAM, _STEP = "fp32", "param", "step"
#: allowed names of parameters and of their state, which become names of folders and files
_NAME = re.compile(r"[\w-][\w.-]*")
_OPTIMIZER_STATE = "optimizer_state.pt"
#: the release of DeepSpeed that these files follow
_VERSION = "0.14.0"


def read_universal(folder: str) -> Contents:
    path = os.path.join(folder, sorted(filter(MODEL.match, os.listdir(folder)))[0])
    first = load_torch_file(path)
    contents = model_of(first, path)
    zero = os.path.join(folder, "zero")
    shapes = first["param_shapes"]
    for names in shapes:
        for name, shape in names.items():
            _check_name("parameter", name)
            _take_parameter(contents, os.path.join(zero, name), name, tuple(shape))
    options = os.path.join(zero, _OPTIMIZER_STATE)
    groups = load_torch_file(options).get("param_groups") if os.path.isfile(options) else None
    contents.groups = groups_of(groups or [{"params": list(range(len(shapes)))}], shapes, contents)
    return contents


def _take_parameter(contents: Contents, folder: str, name: str, shape: tuple[int, ...]) -> None:
    if not os.path.isfile(os.path.join(folder, f"{_FP32}.pt")) or name not in contents.model:
        raise CheckpointError(f"'{folder}' lacks the float32 weights of '{name}'")
    state = contents.state[name] = {}
    for file in sorted(os.listdir(folder)):
        key, ending = os.path.splitext(file)
        if ending != ".pt":
            continue
        body = load_torch_file(os.path.join(folder, file))
        value = body.get(_PARAM) if isinstance(body, dict) else body
        if key == _STEP or not isinstance(value, torch.Tensor):
            state[key] = lazily(value)
        elif value.numel() == 1 and shape != tuple(value.shape) and not shape:
            state[key] = Lazy.of(value.reshape(()))
        else:
            state[key] = Lazy.of(value.reshape(shape))
    take_weight(contents, name, state.pop(_FP32))


def write_universal(contents: Contents, output: str, progress: Progress) -> None:
    """Write a folder with one tag and the file `latest_universal`, in the form that DeepSpeed's engine loads."""
    if contents.groups is None:
        raise CheckpointError("the checkpoint has no optimizer, which DeepSpeed's universal form needs")
    tag = f"global_step{contents.step}"
    folder = os.path.join(output, tag)
    shapes = []
    for group in contents.groups:
        for name in group["params"]:
            if name not in contents.model:
                raise CheckpointError(f"the optimizer has the parameter '{name}', which the model lacks")
            _check_name("parameter", name)
        shapes.append(OrderedDict((name, torch.Size(contents.model[name].shape)) for name in group["params"]))
        for name in group["params"]:
            _write_parameter(contents, os.path.join(folder, "zero", name), name, progress)
    groups = [
        {**{k: v for k, v in replaced(group, lambda each: each.read()).items() if k != "params"}, "params": [number]}
        for number, group in enumerate(contents.groups)
    ]
    steps = [values.get(_STEP, 0) for values in contents.state.values()] or [0]
    state = {0: {_STEP: replaced(steps[0], lambda each: each.read())}}  # stage 3 reads the step here
    options = {
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }
    _save(options, os.path.join(folder, "zero", _OPTIMIZER_STATE))
    _write_model(contents, folder, shapes)
    with durable_file(os.path.join(output, "latest_universal")) as file:
        file.write(tag.encode())


def _check_name(kind: str, name: Any) -> None:
    """Raise CheckpointError unless `name` is a valid file name that cannot leave its folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(f"the {kind} {name!r} cannot be the name of a file: use letters, digits, _, - and .")


def _write_parameter(contents: Contents, folder: str, name: str, progress: Progress) -> None:
    os.makedirs(folder)
    state = dict(contents.state.get(name, {}))
    weight = contents.wide(name)
    state.pop(MASTER, None)
    step = state.pop(_STEP, None)
    if step is not None:
        _save(step.read() if isinstance(step, Lazy) else step, os.path.join(folder, f"{_STEP}.pt"))
    for key in state:
        _check_name(f"optimizer state of '{name}',", key)
    if _FP32 in state:
        raise CheckpointError(
            f"the optimizer state of '{name}' has the key '{_FP32}', the name of the weights' own file"
        )
    for key, value in {_FP32: weight, **state}.items():
        if isinstance(value, Lazy):
            memory = value.read()
            is_part = memory.nbytes != memory.untyped_storage().nbytes()
            _save({_PARAM: memory.clone() if is_part else memory}, os.path.join(folder, f"{key}.pt"))
            progress(value.nbytes)


def _write_model(contents: Contents, folder: str, shapes: list[Any]) -> None:
    """Write the model file under both names that stages use. Trained parameters are placeholders in it."""
    trained = {name for names in shapes for name in names}
    module = OrderedDict(
        (name, torch.empty(0, dtype=each.dtype, device="cpu") if name in trained else each.read())
        for name, each in contents.model.items()
    )
    module |= {name: module[kept] for name, kept in contents.tied.items()}
    body = {
        "module": module, "buffer_names": [], "optimizer": None, "param_shapes": shapes, "frozen_param_shapes": None,
        "frozen_param_fragments": None, "shared_params": dict(contents.tied), "lr_scheduler": None, "data_sampler": None,
        "random_ltd": None, "sparse_tensor_module_names": [], "skipped_steps": 0, "global_steps": contents.step,
        "global_samples": 0, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {}, "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }  # fmt: skip
    _save(body, os.path.join(folder, "mp_rank_00_model_states.pt"))
    other = os.path.join(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    try:
        os.link(os.path.join(folder, "mp_rank_00_model_states.pt"), other)
    except OSError:  # a file system without hard links
        _save(body, other)


def _save(value: Any, path: str) -> None:
    with durable_file(path) as file:
        torch.save(value, file)
