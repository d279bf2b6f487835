"""`shardwright doctor`: what it inspects, a file a section, and its command."""

from .command import add_parser

__all__ = ["add_parser"]
