"""`shardwright ckpt import` and `export`: convert checkpoints from and to other formats (docs/coming-from.md)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from shardwright.options.name_map import NameMap
from shardwright.options.places import absolute_path

from .. import convert
from ..convert import READERS, WRITERS
from .report import Nothing, Progress, open_checkpoint, print_report, size_text

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHOWN = 20


def add_parsers(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add both commands; `add(name, action, text)` returns a new parser."""
    text = "convert a torch.distributed.checkpoint, DeepSpeed or Hugging Face checkpoint to ours"
    importing = add("import", run_import, text)
    importing.add_argument("source")
    importing.add_argument("output", help="a new folder, such as runs/a/step-000100")
    importing.add_argument("--from", dest="kind", choices=READERS[1:], help="format; default: detected from the files")
    importing.add_argument("--tag", help="tag of a DeepSpeed checkpoint; default: the one that its file `latest` names")
    importing.add_argument("--step", type=int, help="number of completed steps to record; default: the source's")
    text = "convert a checkpoint to another format; default: a model folder for from_pretrained"
    exporting = add("export", run_export, text)
    exporting.add_argument("checkpoint")
    exporting.add_argument("output", help="a new folder (with --to torch a new file)")
    exporting.add_argument("--to", choices=WRITERS[1:], default="hf", help="default: hf, which holds the model only")
    text = "a TOML or JSON file: `include`, a list of regular expressions, `rename`, a table {expression: replacement}"
    for each in (importing, exporting):
        each.add_argument("--dtype", choices=sorted(_DTYPES), help="cast the model's floating-point tensors")
        each.add_argument("--map", metavar="FILE", help=text)


def run_import(options: argparse.Namespace) -> int:
    if not os.path.lexists(options.source):
        raise Nothing(f"'{options.source}' does not exist")
    output = _output(options)
    contents = convert.read(os.path.abspath(options.source), kind=options.kind, tag=options.tag)
    if options.step is not None:
        contents.step = options.step
    return _write(options, contents, output, "shardwright")


def run_export(options: argparse.Namespace) -> int:
    from ..convert import folders

    path = open_checkpoint(options.checkpoint).path
    output = _output(options)
    return _write(options, folders.read_folder(path), output, options.to)


def _output(options: argparse.Namespace) -> str:
    try:
        output = absolute_path("output", options.output)
    except ValueError as error:
        raise Nothing(str(error)) from None
    if os.path.lexists(output):
        raise Nothing(f"'{options.output}' already exists: pass a new path")
    return output


def _write(options: argparse.Namespace, contents: Any, output: str, kind: str) -> int:
    import torch

    try:
        contents = contents.under(NameMap.from_file(options.map)) if options.map else contents
    except ValueError as error:
        raise Nothing(str(error)) from None
    contents = contents.cast(getattr(torch, _DTYPES[options.dtype])) if options.dtype else contents
    if not contents.model:
        source = getattr(options, "checkpoint", None) or options.source
        raise Nothing(f"'{source}' holds no model tensors, or the map selects none of them")
    total = sum(each.nbytes for each in contents.model.values()) if kind == "hf" else contents.nbytes
    progress = Progress(options, os.path.basename(output), total, "B")
    try:
        convert.write(contents, output, kind, progress.add)
    finally:
        progress.end()
    beside = [os.path.basename(path) for path in contents.beside] if kind in ("hf", "shardwright") else []
    found = {
        "output": options.output, "tensors": len(contents.model), "bytes": total, "copied": beside,
        "optimizer": contents.groups is not None and kind != "hf", "step": contents.step, "left_out": contents.left_out,
    }  # fmt: skip
    lines = [f"{options.output}: {len(contents.model)} tensors, {size_text(total)}"]
    lines[0] += f", optimizer state of {len(contents.state)} parameters" if found["optimizer"] else ""
    lines += [f"copied: {', '.join(beside)}"] if beside else []
    lines += [f"left out: {each}" for each in contents.left_out[:_SHOWN]]
    lines += [f"left out: {len(contents.left_out) - _SHOWN} more"] if len(contents.left_out) > _SHOWN else []
    print_report(options, found, lines)
    return 0
