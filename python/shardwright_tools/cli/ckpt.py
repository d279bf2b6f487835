"""`shardwright ckpt`: list, inspect, verify, compare, convert and prune checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from shardwright._engine import CheckpointError, CheckpointFolder
from shardwright.checkpoint.folder import retention
from shardwright.checkpoint.folder.retention import DAMAGED, REPLACED, SOUND

from . import ckpt_convert
from .report import EPILOG, Nothing, Progress, guarded, open_checkpoint, print_report, shortened, size_text

DESCRIPTION = __doc__
_PROGRESS_BLOCKS = 256
_BLOCK_BYTES, _READERS = 1 << 20, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="commands", dest="action", required=True)

    def add(name: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, epilog=EPILOG)
        made.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        made.set_defaults(run=guarded(action))
        return made

    listing = add("ls", run_ls, "list the checkpoints of a directory, oldest first (reads manifests only)")
    listing.add_argument("directory")
    inspecting = add("inspect", run_inspect, "show the contents of a checkpoint")
    inspecting.add_argument("checkpoint")
    inspecting.add_argument("--tensors", action="store_true", help="also list every tensor")
    text = "read and check every block of one checkpoint, or of all checkpoints in a directory"
    verifying = add("verify", run_verify, text)
    verifying.add_argument("path")
    comparing = add("diff", run_diff, "list the tensors and values in which two checkpoints differ")
    comparing.add_argument("first")
    comparing.add_argument("second")
    comparing.add_argument("--model", action="store_true", help="compare the model only")
    ckpt_convert.add_parsers(add)
    pruning = add("prune", run_prune, "remove checkpoints that no rule keeps and the left-overs of interrupted saves")
    pruning.add_argument("directory")
    pruning.add_argument("--keep-last", type=_count, metavar="N", help="keep the N newest checkpoints")
    pruning.add_argument("--keep-every", type=_count, metavar="N", help="keep the steps that are multiples of N")
    pruning.add_argument("--keep-best", type=_count, metavar="N", help="keep the N checkpoints with the best metric")
    text = "which metric is better, the smallest or the largest; default: min, as in Checkpointer"
    pruning.add_argument("--best", choices=("min", "max"), default="min", help=text)
    text = (
        "first read every block, so that no rule counts a damaged checkpoint; default: check manifests and sizes only"
    )
    pruning.add_argument("--verify", action="store_true", help=text)
    pruning.add_argument("--yes", action="store_true", help="remove them; default: print what would be removed")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _checkpoints(directory: str) -> list[str]:
    if not os.path.isdir(directory):
        raise Nothing(f"'{directory}' is not a directory")
    steps = [kept.path for kept in retention.list_checkpoints(directory)]
    for name in sorted(os.listdir(directory)):  # others may have any name, such as a tag of DeepSpeed's
        path = os.path.join(directory, name)
        is_left_over = name.startswith(".") or name.endswith((".partial", ".trash", REPLACED))
        if path not in steps and not is_left_over and os.path.lexists(os.path.join(path, "MANIFEST.json")):
            steps.append(path)
    return steps


def _number_in(path: str) -> int:
    """Return the step in a name such as step-000100 or global_step100."""
    match = re.search(r"(\d{1,15})(?:\.replaced)?$", path)
    return int(match[1]) if match else 0


def _summary(path: str) -> dict[str, Any]:
    try:
        folder = open_checkpoint(path)
    except CheckpointError as error:
        return {"path": path, "ok": False, "error": str(error)}
    size = sum(folder.files.values())
    return {
        "path": path, "ok": True, "step": folder.step, "bytes": size, "files": len(folder.files),
        "world_size": folder.world_size, "metric": folder.metric, "nonce": folder.nonce,
    }  # fmt: skip


def run_ls(options: argparse.Namespace) -> int:
    found = [_summary(path) for path in _checkpoints(options.directory)]
    found.sort(key=lambda each: each.get("step", _number_in(each["path"])))
    if not found and CheckpointFolder.find(options.directory) is not None:
        remedy = f"use `shardwright ckpt inspect {options.directory}`"
        raise Nothing(f"'{options.directory}' is a checkpoint, not a directory of checkpoints: {remedy}")
    left = retention.all_left_overs(options.directory) + retention.replaced_ones(options.directory)
    lines = []
    for each in found:
        name = os.path.basename(each["path"])
        if not each["ok"]:
            lines.append(f"{name}  DAMAGED: {each['error']}")
            continue
        metric = "" if each["metric"] is None else f"  metric {each['metric']:g}"
        size = f"{size_text(each['bytes']):>10}  {each['files']} files"
        lines.append(f"{name}  {size}  by {each['world_size']} ranks{metric}")
    lines += [f"{os.path.basename(path)}  (left over, not a checkpoint)" for path in left]
    print_report(options, {"checkpoints": found, "left_over": left}, lines or ["no checkpoints"])
    return 0 if all(each["ok"] for each in found) else 1


def _stored_tensors(folder: Any, prefixes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found = {}
    for path in folder.files:
        if path.startswith(prefixes) and path.endswith(".safetensors"):
            _, entries = folder.tensors(path)
            for name, dtype, shape, begin, nbytes in entries:
                found[f"{path.split('-0')[0].removesuffix('.safetensors')}:{name}"] = {
                    "file": path, "dtype": dtype, "shape": list(shape), "begin": begin, "nbytes": nbytes,
                }  # fmt: skip
    return found


def run_inspect(options: argparse.Namespace) -> int:
    folder = open_checkpoint(options.checkpoint)
    found = _summary(options.checkpoint) | {"files": folder.files}
    tensors = _stored_tensors(folder, ("model", "optimizer", "state", "ranks/"))
    found["tensors"] = tensors if options.tensors else len(tensors)
    lines = [
        f"step {folder.step}, {size_text(sum(folder.files.values()))} in {len(folder.files)} files, {len(tensors)} tensors, "
        f"written by {folder.world_size} ranks, save {folder.nonce}"
        + ("" if folder.metric is None else f", metric {folder.metric:g}")
    ]
    lines += [f"  {size_text(size):>10}  {path}" for path, size in folder.files.items()]
    if options.tensors:
        lines += [f"  {t['dtype']:>7} {t['shape']!s:<18} {name}" for name, t in tensors.items()]
    print_report(options, found, lines)
    return 0


def _verify(path: str, options: argparse.Namespace) -> dict[str, Any]:
    try:
        folder = open_checkpoint(path)
        total = folder.block_count
        progress = Progress(options, os.path.basename(path), total)
        blocks = [
            (name, begin, min(_BLOCK_BYTES, nbytes - begin), 0, 0)  # into no memory: checked alone
            for name, nbytes in folder.files.items()
            for begin in range(0, nbytes, _BLOCK_BYTES)
        ]
        try:
            for first in range(0, total, _PROGRESS_BLOCKS):
                some = blocks[first : first + _PROGRESS_BLOCKS]
                folder.load(some, _READERS)
                progress.add(len(some))
        finally:
            progress.end()
    except CheckpointError as error:
        return {"path": path, "ok": False, "error": str(error)}
    return {"path": path, "ok": True, "step": folder.step, "blocks": total, "bytes": sum(folder.files.values())}


def run_verify(options: argparse.Namespace) -> int:
    paths = _checkpoints(options.path) if CheckpointFolder.find(options.path) is None else [options.path]
    if not paths:
        raise Nothing(f"'{options.path}' holds no checkpoint")
    found = [_verify(path, options) for path in paths]
    lines = [
        f"{'ok     ' if each['ok'] else 'DAMAGED'} {each['path']}: "
        + (f"{each['blocks']} blocks, {size_text(each['bytes'])}" if each["ok"] else each["error"])
        for each in found
    ]
    print_report(options, {"ok": all(each["ok"] for each in found), "checkpoints": found}, lines)
    return 0 if all(each["ok"] for each in found) else 1


def _values(folder: Any, entry: dict[str, Any]) -> Any:
    import torch

    memory = torch.empty(entry["nbytes"], dtype=torch.uint8, device="cpu")
    if entry["nbytes"]:
        folder.load([(entry["file"], entry["begin"], entry["nbytes"], memory.data_ptr(), 0)])
    return memory


def _leaves(node: Any, name: str) -> dict[str, Any]:
    """Flatten a JSON tree to {dotted name: plain value}, without its tensors."""
    if isinstance(node, dict) and "$tensor" in node:
        return {}
    if isinstance(node, (dict, list)) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {place: leaf for key, value in items for place, leaf in _leaves(value, f"{name}.{key}").items()}
    return {name: node}


def _plain_values(folder: Any) -> dict[str, Any]:
    """Return the values of optimizer, scheduler, scaler, user state and `extra` that are not tensors."""
    from shardwright.formats import tree

    found: dict[str, Any] = {}
    for path in ("optimizer.json", "state.json"):
        if path in folder.files:
            body = tree.loads(folder.read_bytes(path))
            for key in ("dcp", "step"):  # names of torch's planner and the number of this checkpoint are not state
                body.pop(key, None)
            for key, node in body.items():
                found |= _leaves(node, f"{path.removesuffix('.json')}.{key}")
    return found


def run_diff(options: argparse.Namespace) -> int:
    import torch

    prefixes = ("model",) if options.model else ("model", "optimizer", "state")
    folders = [open_checkpoint(options.first), open_checkpoint(options.second)]
    first, second = (_stored_tensors(folder, prefixes) for folder in folders)
    differing = []
    progress = Progress(options, "diff", sum(entry["nbytes"] for name, entry in first.items() if name in second))
    for name in first:
        if name in second:
            a, b = first[name], second[name]
            if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
                why = f"{a['dtype']} {a['shape']} against {b['dtype']} {b['shape']}"
                differing.append({"tensor": name, "why": why})
            elif not torch.equal(x := _values(folders[0], a), y := _values(folders[1], b)):
                differing.append({"tensor": name, "why": f"{int((x != y).sum())} of {a['nbytes']} bytes"})
            progress.add(a["nbytes"])
    progress.end()
    only = [sorted(set(first) - set(second)), sorted(set(second) - set(first))]
    values = [{} if options.model else _plain_values(folder) for folder in folders]
    other_values = []
    for name in values[0]:
        if name in values[1] and json.dumps(values[0][name]) != json.dumps(values[1][name]):
            before, after = (shortened(json.dumps(each[name], ensure_ascii=False), 60) for each in values)
            other_values.append({"value": name, "why": f"{before} against {after}"})
    for mine, names, others in ((0, only[0], 1), (1, only[1], 0)):
        names += [name for name in values[mine] if name not in values[others]]
    found = {
        "equal": not (differing or other_values or any(only)),
        "differing": differing,
        "differing_values": other_values,
        "only_first": only[0],
        "only_second": only[1],
    }
    lines = [f"differs: {each['tensor']}: {each['why']}" for each in differing]
    lines += [f"differs: {each['value']}: {each['why']}" for each in other_values]
    lines += [f"only in {path}: {name}" for path, names in zip((options.first, options.second), only) for name in names]
    count = f"equal: {len(first)} tensors" + ("" if options.model else f", {len(values[0])} plain values")
    print_report(options, found, lines or [count])
    return 0 if found["equal"] else 1


def run_prune(options: argparse.Namespace) -> int:
    if options.keep_last is None and options.keep_every is None and options.keep_best is None:
        raise Nothing("no rule given: pass --keep-last, --keep-every or --keep-best")
    if not os.path.isdir(options.directory):
        raise Nothing(f"'{options.directory}' is not a directory")
    # The lock excludes a running Checkpointer. It is a file, and a preview must write nothing.
    lock = retention.DirectoryLock(options.directory) if options.yes else None
    try:
        goes, left, stays = _to_prune(options)
        if options.yes:
            _prune(options, goes, left)
    finally:
        if lock is not None:
            lock.release()
    done = "removed" if options.yes else "would remove"
    names = [*goes, *left]
    lines = [f"{done} {path}" for path in names] or ["nothing to remove"]
    lines += [f"kept {each['path']}: {each['error']}" for each in stays]
    if names and not options.yes:
        lines.append("run again with --yes to remove them")
    print_report(options, {"removed": options.yes, "checkpoints": goes, "left_over": left, "stays": stays}, lines)
    return 0


def _to_prune(options: argparse.Namespace) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Return the checkpoints to remove, the left-overs to remove, and {path, error} of folders that must stay."""
    kept = retention.removable_ones(retention.list_checkpoints(options.directory, look=True))
    if options.verify:
        found = {k.path: _verify(k.path, options) for k in kept if k.state == SOUND}
        kept = [k if found.get(k.path, {}).get("ok", True) else dataclasses.replace(k, state=DAMAGED) for k in kept]
    rules = {name: getattr(options, name) for name in ("keep_last", "keep_every", "keep_best")}
    goes: list[str] = []
    left = retention.all_left_overs(options.directory)
    stays: list[dict[str, Any]] = []
    to_go = {k.path for k in retention.to_retire(kept, **rules, largest=options.best == "max")}
    for path in [*(k.path for k in kept if k.path in to_go), *retention.replaced_ones(options.directory)]:
        try:
            CheckpointFolder.check_removable(path)
            (goes if path in to_go else left).append(path)
        except CheckpointError as error:
            stays.append({"path": path, "error": str(error)})
    for each in kept:
        if each.path not in to_go and each.state not in (SOUND, retention.ABANDONED):
            why = "damaged, but a rule keeps it or too few sound checkpoints are newer"
            if each.state != DAMAGED:
                why = str(_summary(each.path).get("error", "could not be read"))
            stays.append({"path": each.path, "error": why})
    return goes, left, stays


def _prune(options: argparse.Namespace, goes: Sequence[str], left: Sequence[str]) -> None:
    progress = Progress(options, os.path.basename(os.path.normpath(options.directory)), len(goes) + len(left))
    if any(path.endswith(REPLACED) for path in left):
        CheckpointFolder.sync(options.directory)  # the folders that replaced them must be durable before they go
    for path in [*left, *goes]:  # left-overs first: an earlier prune may have left a name needed here
        if path in goes or path.endswith(REPLACED):  # a half-removed folder must not be taken for a checkpoint
            os.rename(path, f"{path}.prune.trash")
            path = f"{path}.prune.trash"
        CheckpointFolder.remove(path)
        progress.add(1)
    progress.end()
