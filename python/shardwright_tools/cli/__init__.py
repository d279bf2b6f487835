"""The command line, `shardwright <command>`. Exit codes: 0 success, 1 a check failed, 2 usage error."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Container, Sequence
from typing import Any, NoReturn

__all__ = ["main"]

#: name -> its module, which is imported if the command is called, and its line of help. A module has add_arguments(parser),
#: run(options), which returns the exit code, and may have DESCRIPTION and EPILOG
COMMANDS = {
    "plan": (".plan_command", "choose a configuration by memory and time, and print how to start it"),
    "why": (".why", "say where each rank of a job is, and why it hangs"),
    "top": (".top", "show what each rank of a job does, as a live table"),
    "trace": (".trace", "record a few steps of all ranks of a program, for Perfetto"),
    "report": (".page", "write one HTML page of a run"),
    "scale": (".scale", "time 1, 2, 4, ... ranks of a program, and say what costs the rest"),
    "doctor": ("..doctor.command", "check the engine on this host"),
    "ckpt": (".ckpt", "inspect, verify, convert and prune checkpoints"),
    "kernels": (".kernels", "compile the GPU kernels ahead of time"),
    "config": (".config", "translate a DeepSpeed configuration to sw.wrap"),
    "rank": (".rank", "run one rank of torchrun, and outlive it when it dies"),
    "run": (".run", "run an unchanged accelerate or transformers.Trainer program on shardwright"),
    "chaos": (".chaos", "run a training job under injected faults and report their cost"),
    "completion": (".completion", "print what completes these commands in a shell"),
}


class _Parser(argparse.ArgumentParser):
    """An argument parser that also prints a usage error as JSON if --json was given."""

    arguments: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if "--json" in _Parser.arguments:
            print(json.dumps({"ok": False, "error": message}, indent=2))
        super().error(message)


class _Version(argparse.Action):
    """Print the version. The distribution's metadata, which has it, takes as long to import as all else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from shardwright._version import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


def parser_of(called: Container[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of those that are called."""
    parser = _Parser(prog="shardwright", description="Data-parallel training on a pure-C engine.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        if name in called:
            found = importlib.import_module(module, __name__)
            own = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
            own.description, own.epilog = getattr(found, "DESCRIPTION", None), getattr(found, "EPILOG", None)
            own.set_defaults(run=getattr(found, "run", None), parser=own)  # actions of ckpt have their own
            found.add_arguments(own)
        else:
            commands.add_parser(name, help=text)
    commands.add_parser("gpu-check", help="check and time a GPU, in fifteen minutes or less")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["gpu-check"]:  # a program of its own, which uses the doctor of this one
        from ..gpu_check.runner import main as check

        sys.argv[1:] = arguments[1:]
        try:
            return check()
        except KeyboardInterrupt:
            return 130
    _Parser.arguments = arguments
    parser = parser_of(arguments[:1])
    words, program = list(arguments), []
    if (
        words[:1] in (["plan"], ["trace"], ["scale"], ["rank"]) and "--" in words
    ):  # argparse would give a program's options to the command
        at = words.index("--")
        words, program = words[:at], words[at + 1 :]
    options = parser.parse_args(words)
    options.words, options.after = words, program
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130  # as a shell says
