"""Lightning's checkpoints as folders of shardwright. Every rank writes its slices; for the Trainer in the background.

A folder holds the module and the optimizer as sw.save() writes them. All else that the Trainer or a Fabric program puts
into a checkpoint (loops, callbacks, schedules) becomes the folder's `extra`: plain values and tensors, which load
without executing code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from ..checkpoint import load, save
from ..checkpoint.files import PathSaver
from ..checkpoint.peers import Peers
from ..checkpoint.training import Training
from ..formats import tree
from ..parallel.ddp import DistributedDataParallel

_logger = logging.getLogger("shardwright")
_WEIGHTS, _OPTIMIZERS, _HPARAMS = "state_dict", "optimizer_states", "hyper_parameters"
#: key in the `extra` of a folder of Fabric: the program's state without module and optimizer
_REST = "fabric"


class Folders:
    """The saves of one fit, which do not overlap. `remove` removes the checkpoint at a path, of any form."""

    def __init__(self, wrapper: DistributedDataParallel, remove: Callable[[str], None]) -> None:
        self._wrapper, self._remove = wrapper, remove
        self._saver = PathSaver(Peers(wrapper), timeout_s=wrapper._engine.options.timeout_s)
        self._later: list[str] = []  # paths to remove once the running save is durable
        self._warned = False
        #: absolute path of the folder that is being written; "" for none
        self.writing = ""

    def begin(self, path: str, checkpoint: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        """Wait for the previous save, then begin to write `checkpoint` to `path`. Errors are equal on all ranks. Collective."""
        self.wait()
        rest = dict(checkpoint)
        weights, has_optimizer = rest.pop(_WEIGHTS, None), rest.pop(_OPTIMIZERS, None) is not None

        def make() -> Training:
            if weights:
                raise CheckpointError(
                    "a callback or on_save_checkpoint put weights into the checkpoint's state_dict, which a folder takes from "
                    "the module: give the strategy state_dict_type='full'"
                )
            kept = self._without_objects(rest)
            tree.encode(kept, "checkpoint", {})  # on every rank, so that all raise
            return Training(self._wrapper, optimizer if has_optimizer else None, extra=kept)

        self._saver.begin(path, make, step=int(rest.get("global_step", 0)), overwrite=True, replaces_file=True)
        self.writing = os.path.abspath(path)

    def _without_objects(self, rest: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint without hyper-parameters that are not plain values. A resumed run has its own."""
        if not isinstance(rest.get(_HPARAMS), dict):
            return rest
        plain, left = {}, []
        for name, value in rest[_HPARAMS].items():
            try:
                tree.encode(value, str(name), {})
                plain[name] = value
            except CheckpointError:
                left.append(repr(name))
        if left and not self._warned:
            self._warned = True
            _logger.warning("checkpoints leave out the hyper-parameters %s, no plain values", ", ".join(left))
        return {**rest, _HPARAMS: plain}

    def remove(self, path: str) -> None:
        """Remove the checkpoint at `path`, now or once the running save is durable."""
        if self.writing:
            self._later.append(path)
        else:
            self._remove(path)

    def wait(self, *, together: bool = True) -> None:
        """Wait for the running save; unless it failed, remove the checkpoints that waited. `together`: all ranks call it."""
        later, self._later = self._later, []
        try:
            self._saver.wait(together=together)
        finally:
            self.writing = ""
        for path in later:
            self._remove(path)

    def close(self, *, together: bool = True) -> None:
        try:
            self.wait(together=together)
        finally:
            self._saver.close(together=together)


def folder_at(path: Any) -> str | None:
    """Return the path of a shardwright checkpoint folder at `path`, which may be a link; None for anything else."""
    found = os.path.realpath(os.fspath(path))
    return found if CheckpointFolder.find(found) is not None else None


def load_folder(folder: str, module: torch.nn.Module, optimizer: Any, *, strict: bool) -> dict[str, Any]:
    """Fill module and optimizer; return the rest of the Trainer's checkpoint. Collective."""
    extra = load(folder, module, optimizer, strict=strict)
    if not isinstance(extra, dict) or "loops" not in extra:
        raise CheckpointError(f"'{folder}' was not written by Lightning's Trainer: load it with sw.load()")
    return {**extra, _WEIGHTS: {}, _OPTIMIZERS: []}


_Find = Callable[[Any], DistributedDataParallel | None]


def _split(state: Mapping[str, Any], wrapper_of: _Find) -> tuple[str, str]:
    """Return the keys of a program's module (wrapped ones win) and optimizer, or "". Raise TypeError for several."""
    modules = [key for key, each in state.items() if isinstance(each, torch.nn.Module)]
    modules = [key for key in modules if wrapper_of(state[key]) is not None] or modules
    optimizers = [key for key, each in state.items() if isinstance(each, torch.optim.Optimizer)]
    if len(modules) != 1 or len(optimizers) > 1:
        raise TypeError(
            "a folder holds one module and at most one optimizer, got "
            f"{len(modules)} modules and {len(optimizers)} optimizers: save each to a path of its own, or give FabricStrategy "
            "state_dict_type='full'"
        )
    return modules[0], optimizers[0] if optimizers else ""


def save_state(path: str, state: Mapping[str, Any], wrapper_of: _Find) -> None:
    """Write the state of a Fabric program to the folder `path`, which may hold an older checkpoint. Collective."""
    keys = _split(state, wrapper_of)
    rest = {key: each for key, each in state.items() if key not in keys}
    rest = {key: each.state_dict() if hasattr(each, "state_dict") else each for key, each in rest.items()}
    module = state[keys[0]]
    save(path, wrapper_of(module) or module, state.get(keys[1]), extra={_REST: rest}, overwrite=True)


def load_state(folder: str, state: Any, wrapper_of: _Find, *, strict: bool) -> dict[str, Any]:
    """Fill the state of a Fabric program, or one module; return the entries that the state does not name. Collective.

    If `strict` and the folder lacks keys of the state, raise KeyError once module and optimizer are filled.
    """
    if isinstance(state, torch.nn.Module):
        load(folder, wrapper_of(state) or state, strict=strict)
        return {}
    if not isinstance(state, dict) or not state:
        raise TypeError(
            "a folder is loaded into a module, or into a dict with one: pass it, or make a file of the folder with "
            "`shardwright ckpt export FOLDER FILE --to torch`"
        )
    keys = _split(state, wrapper_of)
    module = state[keys[0]]
    extra = load(folder, wrapper_of(module) or module, state.get(keys[1]), strict=strict)
    if not isinstance(extra, dict) or not isinstance(extra.get(_REST), dict):
        raise CheckpointError(f"'{folder}' was not written by Fabric: load it with sw.load()")
    rest = extra[_REST]
    missing = [key for key in state if key not in {*rest, *keys}]
    if strict and missing:
        raise KeyError(f"the checkpoint '{folder}' has no {missing[0]!r}: pass strict=False, or leave it out")
    for key, each in state.items():
        if key in rest and hasattr(each, "load_state_dict"):
            each.load_state_dict(rest.pop(key))
        elif key in rest:
            state[key] = rest.pop(key)
    return rest
