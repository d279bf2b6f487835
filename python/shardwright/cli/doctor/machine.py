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
    """One value, its meaning and, if something is wrong, one line with the fix.

    `verdict` is "ok", "note" (worth knowing), "slow" (works, but costs time) or "bad" (will fail).
    """

    name: str
    value: str
    verdict: str = "ok"
    fix: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "value", "fix"):  # a byte that is no UTF-8 must not end the printing
            object.__setattr__(self, field, _printable(getattr(self, field)))


def run_command(words: list[str]) -> str:
    """Return the output of a program. Raise OSError if it is missing, fails, or does not end in time."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} did not end within {_COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="backslashreplace").strip().splitlines()
        raise OSError(f"{' '.join(words)}: exit {done.returncode}{': ' + said[-1] if said else ''}")
    return done.stdout.decode(errors="backslashreplace")


def nccl_confs() -> tuple[Path | None, Path]:
    """Return NCCL's files: the user's (None without a home) and the system's.

    NCCL asks passwd for the home, not HOME.
    """
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    except KeyError:  # a container whose user has only a number
        return None, Path("/etc/nccl.conf")
    return home, Path("/etc/nccl.conf")


@dataclasses.dataclass(frozen=True)
class Machine:
    """The places that the doctor inspects: this machine, or a test's replacement.

    Attributes
    ----------
    environment
        Environment variables of this process.
    sys_root, proc_root
        /sys and /proc.
    confs
        NCCL's files: the user's or None, and the system's.
    libcuda
        The driver's library, as the loader finds it.
    nvrtc
        The kernels' compiler; None: the one that the engine would use.
    command
        Runs a program and returns its output; raises OSError if it cannot.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    sys_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    confs: tuple[Path | None, Path] = dataclasses.field(default_factory=nccl_confs)
    libcuda: str = "libcuda.so.1"
    nvrtc: str | None = None
    command: Callable[[list[str]], str] = run_command


def guarded(name: str, section: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a section. An exception in the section becomes one more finding."""
    found: list[Finding] = []
    try:
        found.extend(section)  # findings before an exception stay
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        found.append(Finding(name, said, "note", "the section ended early: fix the cause that it names, or report it"))
    return found


def read_text(path: Path) -> str:
    """Return the text of a system file, stripped, whatever its bytes are; empty if it cannot be read."""
    try:
        return path.read_bytes().decode(errors="backslashreplace").strip()
    except OSError:
        return ""


def _printable(text: str) -> str:
    """Escape characters that cannot be encoded (a name in an environment of another encoding)."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
