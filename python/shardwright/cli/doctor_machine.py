"""What the doctor looks at, and what it says of it: the words that its sections share."""

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
    """One value, what it means and, unless all is well, one line that mends it.

    `verdict` is "ok", "note" (worth knowing), "slow" (works, costs time) or "bad" (will fail).
    """

    name: str
    value: str
    verdict: str = "ok"
    fix: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "value", "fix"):  # a byte of the system's that is no UTF-8 must not end the printing
            object.__setattr__(self, field, _printable(getattr(self, field)))


def run_command(words: list[str]) -> str:
    """What a program of the machine's prints. OSError: it is not there, failed, or did not end in time."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]} did not end within {_COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="backslashreplace").strip().splitlines()
        raise OSError(f"{' '.join(words)}: exit {done.returncode}{': ' + said[-1] if said else ''}")
    return done.stdout.decode(errors="backslashreplace")


def nccl_confs() -> tuple[Path | None, Path]:
    """NCCL's files, the user's (None: the user has no home) and the system's. NCCL asks passwd for the home, not HOME."""
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    except KeyError:  # a container that runs under a number
        return None, Path("/etc/nccl.conf")
    return home, Path("/etc/nccl.conf")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where the doctor looks: this machine, or what a test puts in its place.

    Attributes
    ----------
    environment
        Variables of this process.
    sys_root, proc_root
        /sys and /proc.
    confs
        NCCL's files: the user's or None, and the system's.
    libcuda
        The driver's library, as the loader finds it.
    nvrtc
        The kernels' compiler; None: what the engine would take.
    command
        Runs a program and returns what it prints; OSError where it cannot.
    """

    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    sys_root: Path = Path("/sys")
    proc_root: Path = Path("/proc")
    confs: tuple[Path | None, Path] = dataclasses.field(default_factory=nccl_confs)
    libcuda: str = "libcuda.so.1"
    nvrtc: str | None = None
    command: Callable[[list[str]], str] = run_command


def guarded(name: str, section: Iterable[Finding]) -> list[Finding]:
    """The findings of a section; what ends it early is one more: a doctor reports what it meets, whatever it is."""
    found: list[Finding] = []
    try:
        found.extend(section)  # what came before an exception stays
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        found.append(
            Finding(name, said, "note", "the doctor could not look further there: mend what it names, or report it")
        )
    return found


def read_text(path: Path) -> str:
    """A file of the system's without the blanks around it, whatever its bytes are; empty where it cannot be read."""
    try:
        return path.read_bytes().decode(errors="backslashreplace").strip()
    except OSError:
        return ""


def _printable(text: str) -> str:
    """The same, with what cannot be encoded (a name in an environment of other bytes) as an escape."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
