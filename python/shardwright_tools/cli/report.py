"""Common parts of the commands: output as text or JSON, exit codes, progress."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from shardwright._engine import CheckpointError, CheckpointFolder
from shardwright.options.places import check_encodable

EPILOG = "Exit codes: 0 success, 1 a checkpoint is damaged or different, 2 usage error or no checkpoint found."
_PATHS = ("directory", "folder", "path", "checkpoint", "first", "second", "source", "output", "map")


class Nothing(Exception):
    """No checkpoint was found; exit code 2."""


def encoded(text: str) -> str:
    """Escape what the terminal's encoding lacks."""
    return text.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8")


def guarded(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return an action whose errors are sentences and exit codes."""

    @functools.wraps(action)
    def run(options: argparse.Namespace) -> int:
        try:
            for name in _PATHS:
                check_encodable(name, getattr(options, name, None) or "")
        except ValueError as error:
            return refuse(options, str(error))
        try:
            return action(options)
        except (Nothing, CheckpointError, OSError) as error:
            return refuse(options, str(error), 2 if isinstance(error, Nothing) else 1)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            sentence = "this command needs torch, which is not installed here; ls, inspect, verify and prune do not"
            print(sentence, file=sys.stderr)
            return 2

    return run


def refuse(options: argparse.Namespace, sentence: str, code: int = 2, command: str = "") -> int:
    """Print why a command does nothing, as JSON too if asked for. Return the exit code."""
    if getattr(options, "json", False):
        print(json.dumps({"ok": False, "error": sentence}, indent=2))
    print(f"{command}{printable(sentence)}", file=sys.stderr)
    return code


def shortened(value: Any, most: int) -> str:
    """Return a plain value as JSON, cut to `most` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else text[: most - 3] + "..."


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the rows as lines with aligned columns, those numbered in `right` to the right; the last one as it is."""
    widths = [max(map(len, column)) for column in zip(*rows)][:-1]
    aligned = [[f"{c:{'>' if i in right else '<'}{w}}" for i, (c, w) in enumerate(zip(row, widths))] for row in rows]
    return ["  ".join([*cells, row[-1]]).rstrip() for cells, row in zip(aligned, rows)]


def show(text: str) -> None:
    """Print to stdout. A reader that has left (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again as it ends


def print_report(options: argparse.Namespace, found: Any, lines: Sequence[str]) -> None:
    show(json.dumps(found, indent=2) if options.json else "\n".join(map(printable, lines)))


def printable(line: str) -> str:
    """Escape control characters: names come from files, and must not control the terminal."""
    return encoded("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))


class Progress:
    """A progress bar on stderr if it is a terminal: tqdm's if tqdm is installed, else a percentage."""

    def __init__(self, options: argparse.Namespace, label: str, total: int, unit: str = "") -> None:
        self._is_shown = not options.json and sys.stderr.isatty()
        self._label, self._total, self._done = printable(label), total, 0
        self._bar: Any = None
        if self._is_shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            form = "{desc}: {percentage:.0f} % |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
            self._bar = tqdm(
                total=max(1, total), desc=self._label, unit=unit or " blocks", unit_scale=bool(unit), unit_divisor=1024,
                bar_format=form, leave=False, file=sys.stderr,
            )  # fmt: skip

    def add(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._is_shown:
            percent = 100 * self._done // max(1, self._total)
            print(f"\r{self._label}: {percent} %", end="", file=sys.stderr)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr)


def size_text(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def open_checkpoint(path: str) -> Any:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"the name {path!a} is not UTF-8 to Python: rename it, or set PYTHONUTF8=1") from None
    if CheckpointFolder.find(path) is None:
        raise Nothing(f"'{path}' is not a checkpoint: it has no MANIFEST.json")
    return CheckpointFolder(path)
