"""Arguments of `shardwright config ds_config.json`. config_report.py does the work; only run() imports it, and torch."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any, text: str) -> None:
    """Add the command."""
    parser = commands.add_parser("config", help=text)
    parser.add_argument("file", nargs="?", help="the JSON file passed to deepspeed.initialize")
    parser.add_argument("--ranks", type=int, default=1, help="the number of ranks (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps of the run, for values 'auto' (default: %(default)s)"
    )
    parser.add_argument("--keys", action="store_true", help="print the support table of all keys in Markdown instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report. Return 1 if the configuration is refused."""
    from . import config_report

    return config_report.run(options)
