"""`shardwright completion SHELL`: a script that completes commands, options and their values, by shtab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from . import COMMANDS, parser_of

DESCRIPTION = "Print a script that completes commands, options and files in a shell. Needs shtab."
EPILOG = """bash:  shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright
zsh:   shardwright completion zsh > ~/.zfunc/_shardwright, with fpath+=~/.zfunc before compinit in ~/.zshrc
fish:  shardwright completion fish > ~/.config/fish/completions/shardwright.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        print("completion needs shtab: pip install 'shardwright[completion]'", file=sys.stderr)
        return 1
    parser = parser_of(COMMANDS)
    _offer_files(parser, shtab.FILE)
    print(shtab.complete(parser, options.shell))
    return 0


def _offer_files(parser: argparse.ArgumentParser, files: Mapping[str, Any]) -> None:
    """Complete files where an argument is any text."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _offer_files(each, files)
        elif action.nargs != 0 and action.choices is None and action.type is None:
            action.complete = files  # type: ignore[attr-defined]
