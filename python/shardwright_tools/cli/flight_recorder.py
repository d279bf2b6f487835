"""Accounts of a job as traces of torch's flight recorder, which `python -m torch.distributed.flight_recorder.fr_trace DIR` reads.

A trace lists a rank's last collectives; fr_trace compares the ranks, and names those that did not come to one. A rank that left no
account has an empty trace.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.observe.rings import AccountFile, Operation

from .report import Nothing

#: of torch's format, and the name before a rank's number that torch's own dumps have
_VERSION, _PREFIX = "2.10", "nccl_trace_rank_"
#: our collective -> torch's name of it, and the world size's power in the numbers of elements in and out
_NAMES = {
    "barrier": ("gloo:all_reduce_barrier", 0, 0),
    "all_reduce": ("gloo:all_reduce", 0, 0),
    "reduce_scatter": ("gloo:_reduce_scatter_base", 1, 0),
    "all_gather": ("gloo:_all_gather_base", 0, 1),
    "broadcast": ("gloo:broadcast", 0, 0),
}


def write_traces(folder: Path, paths: Mapping[int, Path]) -> str:
    """Write a trace for each rank of these accounts' groups. Return a sentence. Nothing, with one, if the folder cannot be written."""
    groups: dict[int, list[int]] = {}
    found: dict[int, list[tuple[int, Operation]]] = {}
    clocks = {}
    for rank, path in paths.items():
        file = AccountFile(path)
        own, head = file.groups(), file.head()
        groups.update(own)
        clocks[rank] = head.unix_ns - head.clock_ns
        found[rank] = [(own[each.group - 1][0], each) for each in file.operations(10**9) if 0 < each.group <= len(own)]
        file.close()
    begins = _begins(found)
    for rank in {rank for ranks in groups.values() for rank in ranks}:
        found.setdefault(rank, [])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, operations in found.items():
            kept = [(group, each) for group, each in operations if each.number >= begins[group]]
            entries = [
                _entry(number, group, groups[group], each, clocks[rank]) for number, (group, each) in enumerate(kept)
            ]
            mine = {_name(group): _config(group, ranks) for group, ranks in groups.items() if rank in ranks}
            trace = {"version": _VERSION, "pg_config": mine, "pg_status": {}, "entries": entries}
            (folder / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(trace, protocol=2))
    except OSError as error:
        raise Nothing(f"why: --fr must be a folder that can be written, got {str(folder)!r}: {error}") from None
    return f"{len(found)} traces lie in {folder}: python -m torch.distributed.flight_recorder.fr_trace {folder}"


def _begins(found: Mapping[int, list[tuple[int, Operation]]]) -> dict[int, int]:
    """Return for each group the first collective that every rank's ring still has: fr_trace compares from the first entry on."""
    firsts: dict[int, dict[int, int]] = {}
    for rank, operations in found.items():
        for group, each in operations:
            firsts.setdefault(group, {}).setdefault(rank, each.number)
    return {group: max(by_rank.values()) for group, by_rank in firsts.items()}


def _name(group: int) -> str:
    return f"{group:016x}"


def _config(group: int, ranks: list[int]) -> dict[str, str]:
    return {"name": _name(group), "desc": f"shardwright group of {len(ranks)}", "ranks": str(ranks)}


def _entry(record: int, group: int, ranks: list[int], operation: Operation, unix_ns: int) -> dict[str, Any]:
    kind, before, after = _NAMES.get(operation.kind, _NAMES["barrier"])
    size = operation.size_bytes if before == after else -(-operation.size_bytes // len(ranks))
    done_ns = operation.done_ns + unix_ns if operation.is_done else None
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (_name(group), _config(group, ranks)["desc"]),
        "collective_seq_id": operation.number,
        "p2p_seq_id": 0,
        "op_id": operation.number,
        "profiling_name": kind,
        "time_created_ns": operation.posted_ns + unix_ns,
        "input_sizes": [[size * len(ranks) ** before]],
        "output_sizes": [[size * len(ranks) ** after]],
        "input_dtypes": ["Byte"],
        "output_dtypes": ["Byte"],
        "state": "completed" if operation.is_done else "started",
        "time_discovered_started_ns": operation.posted_ns + unix_ns,
        "time_discovered_completed_ns": done_ns,
        "retired": operation.is_done,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": operation.label, "filename": "shardwright", "line": 0}],
    }
