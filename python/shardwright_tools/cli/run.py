"""`shardwright run OPTIONS program.py`: run an unchanged accelerate or Trainer program on shardwright.

accelerate launch --multi_gpu --num_processes 2 -m shardwright run zero2 program.py
torchrun --nproc-per-node 2 -m shardwright run options.yaml program.py --its arguments
SHARDWRIGHT_OPTIONS=options.yaml accelerate launch --multi_gpu --num_processes 2 -m shardwright run program.py
"""

from __future__ import annotations

import argparse
import functools
import os

from .report import refuse

DESCRIPTION = __doc__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "zero2, or zero=3,compress=int8, or a .yaml or .json file of such options; optional with SHARDWRIGHT_OPTIONS"
    parser.add_argument("options", nargs="?", help=text)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="program.py or -m module, and its arguments")
    # parses a leading -m; behind options, `program` takes it
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from shardwright.integrations.settings import VARIABLE
    from shardwright.integrations.stock_programs import CannotRun, run_program

    refused = functools.partial(refuse, options, command="shardwright run: ")
    text, program = options.options or "", options.program
    if options.module is not None or text.endswith(".py"):  # no options: they come from the environment
        module = [] if options.module is None else ["-m", *options.module]
        text, program = os.environ.get(VARIABLE, ""), [*module, *([text] if text else []), *program]
        if not text:
            return refused(f"no options given: pass them before {program[0]}, as in `zero2`, or set {VARIABLE}")
    if not program or program == ["-m"]:
        return refused("no program given: pass one, as in `shardwright run zero2 program.py`")
    try:
        run_program(text, program)
    except CannotRun as error:
        return refused(str(error))
    return 0
