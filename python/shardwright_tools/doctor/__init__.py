"""`shardwright doctor`: the command, and one file for each section of its report."""

from .command import add_parser

__all__ = ["add_parser"]
