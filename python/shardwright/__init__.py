"""Shardwright: data-parallel training on a pure-C engine.

    import shardwright as sw
    model, optimizer = sw.wrap(model, optimizer)

The import starts no thread, opens no connection and does not import torch. Submodules load at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._engine import CheckpointError, CommError, CommTimeoutError, Error, NewerCheckpointError

if TYPE_CHECKING:
    from . import checkpoint, elastic, hooks, optim
    from ._version import __version__
    from .checkpoint import Checkpointer, load, save, save_pretrained
    from .checkpoint.survive import steps, survive
    from .comm.process_group import init_process_group
    from .description import describe, stats
    from .fsdp1 import FullyShardedDataParallel
    from .integrations import deepspeed
    from .integrations.meta_loading import meta_loading
    from .observe.metrics import metrics
    from .observe.trace import trace
    from .optim.clip_grad import clip_grad_norm_, local_norms
    from .optim.diloco import DiLoCo
    from .optim.scale_lr import scale_lr
    from .options.compressors import Bf16, Fp16, Int4, Int8, PowerSGD
    from .options.options import Options
    from .options.precision import Precision
    from .parallel.activations import checkpoint_units
    from .parallel.composition.pipeline import PipelineStage
    from .parallel.ddp import DistributedDataParallel
    from .parallel.fully_shard import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
    from .parallel.headroom import headroom
    from .parallel.sync_batch_norm import SyncBatchNorm
    from .parallel.unit_calls import compile_units
    from .parameters.materialize import materialize
    from .pretrained import load_pretrained
    from .streaming import Sharding, iter_full_parameters, sharding
    from .wrapping import (
        average_gradients,
        full_gradients,
        full_optimizer_state_dict,
        full_parameters,
        full_state_dict,
        load_full_optimizer_state_dict,
        load_full_state_dict,
        shard_optimizer,
        unwrap,
        wrap,
    )

__all__ = [
    "Bf16",
    "CheckpointError",
    "Checkpointer",
    "CommError",
    "CommTimeoutError",
    "DiLoCo",
    "DistributedDataParallel",
    "Error",
    "FSDPModule",
    "Fp16",
    "FullyShardedDataParallel",
    "Int4",
    "Int8",
    "NewerCheckpointError",
    "Options",
    "PipelineStage",
    "PowerSGD",
    "Precision",
    "Sharding",
    "SyncBatchNorm",
    "__version__",
    "average_gradients",
    "checkpoint",
    "checkpoint_units",
    "clip_grad_norm_",
    "compile_units",
    "deepspeed",
    "describe",
    "elastic",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_parameters",
    "full_state_dict",
    "fully_shard",
    "headroom",
    "hooks",
    "init_process_group",
    "iter_full_parameters",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_pretrained",
    "local_norms",
    "materialize",
    "meta_loading",
    "metrics",
    "optim",
    "register_fsdp_forward_method",
    "save",
    "save_pretrained",
    "scale_lr",
    "shard_optimizer",
    "share_comm_ctx",
    "sharding",
    "stats",
    "steps",
    "survive",
    "trace",
    "unwrap",
    "wrap",
]

#: submodule -> the public names that it defines
_NAMES = {
    "_version": "__version__",
    "checkpoint": "Checkpointer load save save_pretrained",
    "checkpoint.survive": "steps survive",
    "comm.process_group": "init_process_group",
    "description": "describe stats",
    "fsdp1": "FullyShardedDataParallel",
    "integrations.meta_loading": "meta_loading",
    "observe.metrics": "metrics",
    "observe.trace": "trace",
    "optim.clip_grad": "clip_grad_norm_ local_norms",
    "optim.diloco": "DiLoCo",
    "optim.scale_lr": "scale_lr",
    "options.compressors": "Bf16 Fp16 Int4 Int8 PowerSGD",
    "options.options": "Options",
    "options.precision": "Precision",
    "parallel.activations": "checkpoint_units",
    "parallel.composition.pipeline": "PipelineStage",
    "parallel.ddp": "DistributedDataParallel",
    "parallel.fully_shard": "FSDPModule fully_shard register_fsdp_forward_method share_comm_ctx",
    "parallel.headroom": "headroom",
    "parallel.sync_batch_norm": "SyncBatchNorm",
    "parallel.unit_calls": "compile_units",
    "parameters.materialize": "materialize",
    "pretrained": "load_pretrained",
    "streaming": "iter_full_parameters Sharding sharding",
    "wrapping": "average_gradients full_gradients full_optimizer_state_dict full_parameters full_state_dict"
    " load_full_optimizer_state_dict load_full_state_dict shard_optimizer unwrap wrap",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("checkpoint", "deepspeed", "elastic", "hooks", "optim"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name)}")
    # Load all names of the submodule at once: its import has set its own name here, which hides a function of that
    # name.
    loaded = import_module(f"{__name__}.{_HOMES[name]}")
    globals().update({each: getattr(loaded, each) for each, home in _HOMES.items() if home == _HOMES[name]})
    return globals()[name]


def _near(name: str) -> str:
    if name.startswith("_"):  # such as a protocol that a library looks for
        return ""
    from .options.names import near

    return near(name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "checkpoint", "deepspeed", "elastic", "hooks", "optim"})
