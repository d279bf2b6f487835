"""The machine that the doctor inspects, and the findings that its sections return."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_COMMAND_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """An inspected value, a verdict (ok, note, slow: it costs time, or bad: it will fail) and, unless ok, a fix."""

    name: str
    value: str
    verdict: str = "ok"
    fix: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "value", "fix"):  # a byte that is not UTF-8 must not make print() fail
            object.__setattr__(self, field, _printable(getattr(self, field)))


def checked(name: str, value: str, is_wrong: bool, verdict: str, fix: str) -> Finding:
    """Return a finding whose verdict and fix apply if `is_wrong`."""
    return Finding(name, value, verdict, fix) if is_wrong else Finding(name, value)


def run_command(words: list[str]) -> str:
    """Return the output of a program. Raise OSError if it is missing, fails or times out."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} did not end within {_COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        output = (done.stderr or done.stdout).decode(errors="backslashreplace").strip().splitlines()
        raise OSError(f"{' '.join(words)}: exit {done.returncode}{': ' + output[-1] if output else ''}")
    return done.stdout.decode(errors="backslashreplace")


def nccl_confs() -> tuple[Path | None, Path]:
    """Return NCCL's configuration files: the user's, found by passwd like NCCL does, or None, and the system's."""
    system = Path("/etc/nccl.conf")
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf", system
    except KeyError:  # a container whose user id is not in passwd
        return None, system


@dataclasses.dataclass(frozen=True)
class Machine:
    """The sources that the doctor reads; tests replace them."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    sys_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    #: NCCL's configuration files: the user's (or None) and the system's
    confs: tuple[Path | None, Path] = dataclasses.field(default_factory=nccl_confs)
    libcuda: str = "libcuda.so.1"
    nvrtc: str | None = None  # a path; None: the one that the engine uses
    command: Callable[[list[str]], str] = run_command


def guarded(name: str, section: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a section. An exception in the section becomes one more finding."""
    found: list[Finding] = []
    try:
        found.extend(section)  # keeps the findings before an exception
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        fix = "the section is incomplete: fix the cause of this error, or report a bug"
        found.append(Finding(name, text, "note", fix))
    return found


def read_text(path: Path) -> str:
    """Return the stripped text of a system file, with invalid bytes escaped; "" if it cannot be read."""
    try:
        return path.read_bytes().decode(errors="backslashreplace").strip()
    except OSError:
        return ""


def _printable(text: str) -> str:
    """Escape surrogates, which stand for bytes of environment variables that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
