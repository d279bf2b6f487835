"""Shardwright: data-parallel training on a pure-C engine.

    import shardwright as sw
    model, optimizer = sw.wrap(model, optimizer)

The import starts no thread, opens no connection and does not import torch. Submodules load at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._engine import CheckpointError as CheckpointError
from ._engine import CommError as CommError
from ._engine import CommTimeoutError as CommTimeoutError
from ._engine import Error as Error
from ._engine import NewerCheckpointError as NewerCheckpointError

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import elastic as elastic
    from . import hooks as hooks
    from . import optim as optim
    from ._version import __version__ as __version__
    from .checkpoint import Checkpointer as Checkpointer
    from .checkpoint import load as load
    from .checkpoint import save as save
    from .checkpoint import save_pretrained as save_pretrained
    from .checkpoint.survive import steps as steps
    from .checkpoint.survive import survive as survive
    from .comm.process_group import init_process_group as init_process_group
    from .description import describe as describe
    from .description import stats as stats
    from .fsdp1 import FullyShardedDataParallel as FullyShardedDataParallel
    from .integrations import deepspeed as deepspeed
    from .integrations.meta_loading import meta_loading as meta_loading
    from .observe.metrics import metrics as metrics
    from .observe.trace import trace as trace
    from .optim.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from .optim.clip_grad import local_norms as local_norms
    from .optim.diloco import DiLoCo as DiLoCo
    from .optim.scale_lr import scale_lr as scale_lr
    from .options.compressors import Bf16 as Bf16
    from .options.compressors import Fp16 as Fp16
    from .options.compressors import Int4 as Int4
    from .options.compressors import Int8 as Int8
    from .options.compressors import PowerSGD as PowerSGD
    from .options.options import Options as Options
    from .options.precision import Precision as Precision
    from .parallel.activations import checkpoint_units as checkpoint_units
    from .parallel.composition.pipeline import PipelineStage as PipelineStage
    from .parallel.ddp import DistributedDataParallel as DistributedDataParallel
    from .parallel.fully_shard import FSDPModule as FSDPModule
    from .parallel.fully_shard import fully_shard as fully_shard
    from .parallel.fully_shard import register_fsdp_forward_method as register_fsdp_forward_method
    from .parallel.fully_shard import share_comm_ctx as share_comm_ctx
    from .parallel.headroom import headroom as headroom
    from .parallel.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from .parallel.unit_calls import compile_units as compile_units
    from .parameters.materialize import materialize as materialize
    from .pretrained import load_pretrained as load_pretrained
    from .streaming import Sharding as Sharding
    from .streaming import iter_full_parameters as iter_full_parameters
    from .streaming import sharding as sharding
    from .wrapping import average_gradients as average_gradients
    from .wrapping import full_gradients as full_gradients
    from .wrapping import full_optimizer_state_dict as full_optimizer_state_dict
    from .wrapping import full_parameters as full_parameters
    from .wrapping import full_state_dict as full_state_dict
    from .wrapping import load_full_optimizer_state_dict as load_full_optimizer_state_dict
    from .wrapping import load_full_state_dict as load_full_state_dict
    from .wrapping import shard_optimizer as shard_optimizer
    from .wrapping import unwrap as unwrap
    from .wrapping import wrap as wrap

#: submodule -> the public names that it defines
_NAMES = {
    "_engine": "CheckpointError CommError CommTimeoutError Error NewerCheckpointError",
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
_MODULES = ("checkpoint", "deepspeed", "elastic", "hooks", "optim")
__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
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
    return sorted({*globals(), *__all__})
