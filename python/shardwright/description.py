"""describe() and stats(): environment, choices with their reasons, and counters, ready to paste into a bug report."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from . import _engine
from ._version import __version__
from .comm.launch import VARIABLES
from .comm.process_group import describe_group, live_groups
from .observe.rings import row_of
from .options.checks import offload_kinds
from .parallel.replica import live_replicas
from .plan import memory_plan
from .wrapping import unwrap

_VARIABLES = (
    *(*VARIABLES, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "ACCELERATE_USE_CPU"),
    *("SHARDWRIGHT_TRANSPORT", "SHARDWRIGHT_GPU_TRANSPORT", "SHARDWRIGHT_KERNELS", "LD_PRELOAD"),
)


class Description(dict[str, Any]):
    """A nested dictionary that prints as an indented block."""

    def __str__(self) -> str:
        return "\n".join(_lines(self, 0))


def describe() -> Description:
    """Return versions, processor, limits, communicators, models and the environment variables that matter.

    Takes less than 10 ms and does not communicate.
    """
    return Description(
        versions=_versions(),
        machine=_machine(),
        limits=_engine.host_limits(),
        torch_distributed=describe_group(),
        communicators={f"{g.name}": {**g.comm.describe(), "hosts": g.host_map()} for g in live_groups()},
        models=[_model(replica) for replica in live_replicas()],
        checkpointers=_checkpointers(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def _checkpointers() -> list[dict[str, Any]]:
    module = sys.modules.get(f"{__package__}.checkpoint.checkpointer")
    return [] if module is None else [each.describe() for each in module.live_checkpointers()]


def stats(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return counters since creation: `communicators` by group name, `models` in wrapping order; and `step`, the account of
    this rank's last step in seconds by phase (docs/observing.md), None before it. Does not communicate.

    Parameters
    ----------
    model : Module, optional
        A wrapped module, the module inside it, or an engine of deepspeed.initialize(). Counters are then its own and
        those of its groups; a module with groups= has several rows in `models`. Error if it was never wrapped, or its
        counters ended with a later wrapper.
    """
    groups, models = live_groups(), list(live_replicas())
    if model is not None:
        wrapped = model.__dict__.get("wrapped", model)  # of a DeepSpeedEngine
        bare = unwrap(wrapped)
        models = [r for r in models if r.wraps(bare)]
        if not models:
            raise _engine.Error(
                f"stats needs a module that is wrapped, or has run inside fully_shard, got {type(bare).__name__}: pass the module "
                "that sw.wrap returned, or call stats() for all modules"
            )
        groups = [g for g in groups if any(r.group is g for r in models)]
    row = _engine.account_row()
    return {
        "step": None if row is None else row_of(row).as_dict(),
        "communicators": {g.name: g.comm.stats() for g in groups},
        "models": [{"module": r.label, **r.stats()} for r in models],
    }


def _versions() -> dict[str, str]:
    libc, libc_version = platform.libc_ver()
    return {
        "shardwright": __version__,
        "torch": str(torch.__version__),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        libc or "libc": libc_version or "unknown",
        "kernel": platform.release(),
    }


def _machine() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "architecture": platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "torch_threads": torch.get_num_threads(),
        "instruction_sets": ", ".join(_engine.instruction_sets()),
        "instruction_set_in_force": _engine.instruction_set(),
    }


def processor_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _model(replica: Any) -> dict[str, Any]:
    reducer = replica.reducer
    return {
        "module": replica.label,
        "group": replica.group.name,
        "zero": replica.zero,
        **({"replicas": len(replica.slicing.rows())} if replica.slicing.is_replicated else {}),
        "parameters": len(replica.table.parameters),
        "buckets": reducer.bucket_count,
        "gradient_bytes": reducer.planned_bytes,
        **({"compress": replica.compression[0]} if replica.compression else {}),
        **replica.parameter_plan(),
        **memory_plan(replica),
        **_offload(replica),
        **({"write_guard": replica.access.write_guard} if replica.access.write_guard else {}),
        **({} if replica.backend.capabilities.rank_order_only else {"deterministic": replica.deterministic}),
        "transport": reducer.transport,
        "transport_reason": reducer.transport_reason,
    }


def _offload(replica: Any) -> dict[str, Any]:
    """Return where the optimizer state lies, or {} if `offload` was not given."""
    stores = list(replica.stores)
    if stores:
        return stores[0].describe() | {"offload_bytes": sum(store.nbytes for store in stores)}
    kind = offload_kinds(replica.options.offload)[1]
    if kind is None:
        return {}
    if kind == "cpu" and replica.backend.capabilities.state_is_there:
        return {"offload": "cpu: no effect, optimizer state is in host memory already"}
    return {"offload": f"{kind}: no optimizer of this model is sliced or wrapped yet"}


def _lines(value: Mapping[str, Any], depth: int) -> list[str]:
    lines: list[str] = []
    for key, item in value.items():
        lead = f"{'  ' * depth}{str(key).replace('_', ' ')}:"
        if isinstance(item, Mapping) and item:
            lines += [lead, *_lines(item, depth + 1)]
        elif isinstance(item, (list, tuple)) and item and all(isinstance(entry, Mapping) for entry in item):
            lines.append(lead)
            for number, entry in enumerate(item):
                lines += [f"{'  ' * (depth + 1)}{number}:", *_lines(entry, depth + 2)]
        else:
            lines.append(f"{lead} {_plain(item)}")
    return lines


def _plain(item: Any) -> str:
    if item is None:
        return "unlimited or unknown"
    if isinstance(item, (Mapping, list, tuple)):
        return ", ".join(map(str, item)) if item else "none"
    return str(item)
