"""The command line: `shardwright <command>`. Exit codes: 0 all is well, 1 a check failed, 2 wrong usage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    from . import ckpt, doctor

    parser = argparse.ArgumentParser(prog="shardwright", description="Data-parallel training on a pure-C engine.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    doctor.add_parser(commands)
    ckpt.add_parser(commands)
    options = parser.parse_args(arguments)
    return int(options.run(options))
