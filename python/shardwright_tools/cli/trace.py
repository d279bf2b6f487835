"""`shardwright trace --steps 5 -- torchrun ... program.py`: a trace of a few steps of an unchanged program."""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path

from .children import run_child, words_of
from .report import Nothing, guarded, show

EPILOG = """Examples:
  shardwright trace --steps 5 -- torchrun --nproc-per-node 2 program.py
  shardwright trace --merge trace.json     # parts of hosts that share no folder, copied beside trace.json

The program goes on after the traced steps. Open the file at https://ui.perfetto.dev or in chrome://tracing.
Exit codes: that of the program; 2 there is no trace, or the input is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, help="steps to record (default: %(default)s)")
    parser.add_argument(
        "--after", dest="skipped", type=int, default=2, help="steps to leave out first (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--merge", metavar="FILE", help="merge the parts beside FILE into it, and run nothing")
    parser.usage = "shardwright trace [options] -- torchrun ... program.py"


@guarded
def run(options: argparse.Namespace) -> int:
    from shardwright.observe.trace import VARIABLE
    from shardwright.observe.trace_merge import read_parts

    if options.merge is not None:
        return _merge(Path(options.merge).absolute())
    words = words_of(options.after, "trace")
    path = Path(options.output).absolute()
    if options.steps < 1 or options.skipped < 0:
        raise Nothing(f"--steps must be at least 1 and --after at least 0, got {options.steps} and {options.skipped}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise Nothing(f"--output {path}: there is no folder to write it to, or it cannot be written to")
    path.unlink(missing_ok=True)
    for part in path.parent.glob(f"{glob.escape(path.name)}.rank-*.part"):  # of an earlier trace
        part.unlink()
    code = run_child(words, {VARIABLE: f"{options.steps}:{options.skipped}:{path}"}, lambda: False)
    if path.exists():
        show(f"{path}: open it at https://ui.perfetto.dev or in chrome://tracing")
        return code or 0
    if read_parts(path):  # some rank ended without its part
        _merge(path)
        return code or 0
    raise Nothing(
        f"no trace: the program ended with code {code} and made no more than {options.skipped} steps of a module that "
        "sw.wrap returned"
    )


def _merge(path: Path) -> int:
    from shardwright.observe.trace_merge import PartError, merge_parts, read_parts

    try:
        parts = read_parts(path)
    except PartError as error:
        raise Nothing(str(error)) from None
    if not parts:
        raise Nothing(f"there are no parts of a trace ({path.name}.rank-*.part) beside {path}")
    merge_parts(path, len(parts), None)
    absent = sorted(set(range(parts[0]["world_size"])) - {part["rank"] for part in parts})
    show(f"{path}: {len(parts)} of {parts[0]['world_size']} ranks{f', without {absent}' if absent else ''}")
    return 0
