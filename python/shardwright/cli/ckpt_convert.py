"""`shardwright ckpt import` and `export`: other programs' checkpoints (docs/coming-from.md)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from .report import Nothing, Progress, open_checkpoint, print_report, size_text

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHOWN = 20


def add_parsers(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add both commands; `add` makes a parser of (name, action, text)."""
    from ..convert import READERS, WRITERS

    importing = add(
        "import", run_import, "write a checkpoint from one of torch.distributed.checkpoint, DeepSpeed or Hugging Face"
    )
    importing.add_argument("source")
    importing.add_argument("output", help="a folder that does not exist, such as runs/a/step-000100")
    importing.add_argument("--from", dest="kind", choices=READERS[1:], help="default: look at the files")
    importing.add_argument("--tag", help="of DeepSpeed's folder; default: what its file `latest` names")
    importing.add_argument("--step", type=int, help="completed steps; default: the source's")
    exporting = add(
        "export", run_export, "write a checkpoint in another program's form; default: the model for from_pretrained"
    )
    exporting.add_argument("checkpoint")
    exporting.add_argument("output", help="a folder, or for torch a file, that does not exist")
    exporting.add_argument("--to", choices=WRITERS[1:], default="hf", help="default: hf, the model alone")
    for each in (importing, exporting):
        each.add_argument("--dtype", choices=sorted(_DTYPES), help="cast the model's floating-point tensors")
        each.add_argument(
            "--map", metavar="FILE", help="TOML or JSON with `include`, a list, and `rename`, a table of expressions"
        )


def run_import(options: argparse.Namespace) -> int:
    """Write a checkpoint of our format."""
    from .. import convert

    if not os.path.lexists(options.source):
        raise Nothing(f"'{options.source}' does not exist")
    output = _output(options)
    contents = convert.read(os.path.abspath(options.source), kind=options.kind, tag=options.tag)
    if options.step is not None:
        contents.step = options.step
    return _write(options, contents, output, "shardwright")


def run_export(options: argparse.Namespace) -> int:
    """Write a checkpoint in another form."""
    from ..convert import folders

    path = open_checkpoint(options.checkpoint).path
    output = _output(options)
    return _write(options, folders.read_folder(path), output, options.to)


def _output(options: argparse.Namespace) -> str:
    from ..checkpoint.files import absolute_path

    try:
        output = absolute_path("output", options.output)
    except ValueError as error:
        raise Nothing(str(error)) from None
    if os.path.lexists(output):
        raise Nothing(f"'{options.output}' exists already: name a new one")
    return output


def _write(options: argparse.Namespace, contents: Any, output: str, kind: str) -> int:
    import torch

    from .. import convert
    from ..options.name_map import NameMap

    try:
        contents = contents.under(NameMap.from_file(options.map)) if options.map else contents
    except ValueError as error:
        raise Nothing(str(error)) from None
    contents = contents.cast(getattr(torch, _DTYPES[options.dtype])) if options.dtype else contents
    if not contents.model:
        raise Nothing(
            f"'{getattr(options, 'checkpoint', None) or options.source}' holds no model, or the map takes none of it"
        )
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
    lines[0] += f", with the optimizer's state of {len(contents.state)} parameters" if found["optimizer"] else ""
    lines += [f"copied: {', '.join(beside)}"] if beside else []
    lines += [f"left out: {each}" for each in contents.left_out[:_SHOWN]]
    lines += [f"left out: {len(contents.left_out) - _SHOWN} more"] if len(contents.left_out) > _SHOWN else []
    print_report(options, found, lines)
    return 0
