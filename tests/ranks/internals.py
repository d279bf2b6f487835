"""What tests of ranks read inside the package: the only file here that imports more than public names.

`from internals import NAME` imports a name of HOMES from its submodule, at the first use. A file that moves changes its
line here and no test.
"""

from __future__ import annotations

import importlib
from typing import Any

#: name -> the submodule that has it, or is it
HOMES = {
    "Board": "comm.board",
    "CheckpointSaver": "_engine",
    "Content": "checkpoint.state.content",
    "DevicePowerSGDState": "compress.device_exchange",
    "Directory": "checkpoint.folder.directory",
    "DirectoryLock": "checkpoint.folder.retention",
    "Engine": "parallel.engine",
    "Exchange": "_engine",
    "Filler": "checkpoint.restore.filling",
    "HostGroup": "comm.process_group",
    "Image": "checkpoint.memory.image",
    "Launch": "comm.launch",
    "Line": "comm.rendezvous",
    "ModuleHook": "parameters.unshard_schedule",
    "Peers": "checkpoint.peers",
    "PowerSGDState": "compress.state",
    "Recompute": "parallel.activations",
    "Regroup": "comm.regroup",
    "Rendezvous": "comm.rendezvous",
    "ShardedGradient": "gradients.sharded_gradient",
    "Sliced": "checkpoint.slices",
    "Slicing": "layout.shard_mesh",
    "Stored": "formats.stored",
    "Table": "checkpoint.memory.image",
    "UnitSchedule": "parameters.unshard_schedule",
    "VARIABLE": "backend.transport",
    "Writer": "checkpoint.writing",
    "_Guarded": "parameters.read_guard",
    "_Region": "parallel.activations",
    "_Units": "parameters.building",
    "_digest": "parallel.agreement.steppers",
    "_engine": "_engine",
    "_engine_check": "_engine_check",
    "AccountFile": "observe.rings",
    "PHASES": "observe.rings",
    "account": "comm.account",
    "goodput": "observe.goodput",
    "param_table": "layout.param_table",
    "row_of": "observe.rings",
    "waits": "comm.waits",
    "watch": "observe.watch",
    "trace_merge": "observe.trace_merge",
    "trace": "observe.trace",
    "agreeing": "checkpoint.restore.agreeing",
    "applying": "checkpoint.restore.applying",
    "attempt": "comm.attempt",
    "attempt_store": "comm.attempt",
    "auto_compression": "parallel.auto_compression",
    "autograd": "torch_compat.autograd",
    "budget": "checkpoint.memory.budget",
    "children": "comm.rendezvous",
    "choose_transport": "backend.transport",
    "client": "checkpoint.memory.client",
    "content": "checkpoint.state.content",
    "cuda": "torch_compat.cuda",
    "cuda_backend": "parallel.backends.cuda_backend",
    "dcp": "checkpoint.dcp",
    "device_link": "backend.device_link",
    "model_folder": "checkpoint.model_folder",
    "device_staging": "checkpoint.device_staging",
    "engine_of": "parallel.engine",
    "files": "checkpoint.files",
    "filling": "checkpoint.restore.filling",
    "find_hosts": "comm.rendezvous",
    "fitting": "checkpoint.restore.fitting",
    "gradient_view": "layout.views",
    "guardian": "checkpoint.memory.guardian",
    "host_group": "comm.process_group",
    "internals": "torch_compat.internals",
    "calls": "checkpoint.calls",
    "leave": "comm.regroup",
    "own_member": "comm.board",
    "spares": "comm.spares",
    "inventory": "checkpoint.inventory",
    "is_finite": "parallel.agreement.replica_check",
    "join_modules": "checkpoint.joined",
    "live_replicas": "parallel.replica",
    "local": "checkpoint.memory.local",
    "master_weights": "optim.master_weights",
    "meta_loading": "integrations.meta_loading",
    "mirror": "checkpoint.remote.mirror",
    "offload": "optim.offload",
    "os_error": "checkpoint.peers",
    "partial": "checkpoint.folder.partial",
    "process_group": "comm.process_group",
    "regroup": "comm.regroup",
    "rendezvous": "comm.rendezvous",
    "resolve_group": "comm.process_group",
    "restoring": "checkpoint.memory.restoring",
    "retention": "checkpoint.folder.retention",
    "slot_part_bytes": "_engine",
    "plan": "plan",
    "sharded_groups": "parameters.sharded_groups",
    "stored_tensors": "formats.places",
    "step_gathers": "parameters.step_gathers",
    "tier": "checkpoint.memory.tier",
    "transport": "backend.transport",
    "views": "layout.views",
    "whole_parameters": "checkpoint.peers",
    "whole_tensor": "layout.local_parameters",
    "wire": "comm.wire",
    "wrapping": "wrapping",
    "writing": "checkpoint.writing",
    "writes_in_parts": "integrations.wrappers",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"shardwright.{HOMES[name]}")
    return home if home.__name__.rpartition(".")[2] == name else getattr(home, name)


def replicas(model: Any) -> Any:
    """Return the replicas of a wrapped module, or of fully_shard's outermost one. Collective if it makes them."""
    engine = getattr(model, "_engine", None)
    return (__getattr__("engine_of")(model) if engine is None else engine).replicas


def replica(model: Any) -> Any:
    """Return the first replica of a wrapped module. Collective if it makes them."""
    return replicas(model)[0]


def reducer(model: Any) -> Any:
    """Return the reducer of a wrapped module's first replica."""
    return replica(model).reducer


def comm(model: Any) -> Any:
    """Return the communicator of host ranks under a wrapped module."""
    return replica(model).group.comm


def link(model: Any) -> Any:
    """Return the link to the GPUs of a wrapped module's ranks."""
    return replica(model).link
