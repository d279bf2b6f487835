"""Build and run the C tests: each tests/csrc/test_*.c with the engine sources that need no Python and the folder's
shared files. One shared file makes allocations fail in turn, hence --wrap.

The quick form runs mode plain: the shipped objects of `make build` if they are up to date, and the tests' own files at
-O1. `make asan-quick`, a part of CI's check, adds asan (address and undefined behaviour; the engine unoptimised to halve the
build time, the tests' own files at -O1) through SW_TEST_MODES. The long form (SW_TEST_LONG=1) optimises asan and adds tsan and clang. Objects are compiled once
per mode under build/csrc-tests, and again if they or a header change. The engine's objects form an archive, from which
a program links what it needs. A C test passes if it exits with 0.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
#: the comparison of kernels with their references, an extension of its own
CHECK = ROOT / "csrc_check"
C_TESTS = sorted((ROOT / "tests" / "csrc").glob("test_*.c"))
SHARED = sorted(set((ROOT / "tests" / "csrc").glob("*.c")) - set(C_TESTS))
WRAPPED = ["-Wl," + ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc", "mmap", "munmap"))]
LONG = os.environ.get("SW_TEST_LONG") == "1"
#: of the long form, which run all the same
ASKED_FOR = os.environ.get("SW_TEST_MODES", "").split(",")
#: the long form of a save that is cut at every call took 888 s beside other programs
RUN_LIMIT_S = 1800 if LONG or "aarch64" in ASKED_FOR else 170  # the emulator is slow


@dataclass(frozen=True)
class Mode:
    name: str
    flags: tuple[str, ...]
    compiler: str = os.environ.get("CC", "gcc")
    long: bool = False
    shipped: bool = False
    #: what runs a program of another processor
    emulator: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Return the folder of the mode's objects. The quick and the long form differ."""
        is_quick = "-O0" in self.flags or (self.shipped and not LONG)
        return ROOT / "build" / "csrc-tests" / f"{self.name}{'-quick' if is_quick else ''}"


SANITIZED = ("-g1", "-fno-omit-frame-pointer")
ASAN = (*SANITIZED, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: under sanitizers without optimisation: many functions made of few texts, which cost eight times as much to compile with it
LARGE = ("compress_baseline.c", "compress_avx2.c", "compress_avx512.c")
MODES = [
    Mode("plain", ("-g",), shipped=True),
    Mode("asan", ("-O1" if LONG else "-O0", *ASAN), long=True),
    Mode("tsan", ("-O1", *SANITIZED, "-fsanitize=thread"), long=True),
    Mode("clang", ("-g",), compiler=os.environ.get("SW_CLANG", "clang"), long=True),
    # musl gives a thread 128 KiB of stack if the program does not ask for more, as Alpine's python does
    Mode("musl", ("-g", "-Wl,-z,stack-size=0x100000"), compiler="musl-gcc", long=True),
    Mode(
        "aarch64",
        ("-g",),
        compiler="aarch64-linux-gnu-gcc",
        long=True,
        emulator=("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
    ),
]
#: programs that the emulator cannot run, with what it lacks
NOT_EMULATED = {
    "test_memory": "advice about pages: of madvise it takes MADV_DONTNEED alone",
    "test_shm": "counts of /proc/self/fd, which has the emulator's own descriptors, too",
}


@functools.cache
def shipped_setup() -> Any:
    """Return setup.py, so that the tested code is built like the shipped code."""
    spec = importlib.util.spec_from_file_location("shardwright_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shipped_flags() -> list[str]:
    return [*shipped_setup().BASE_FLAGS, *shipped_setup().STRICT_FLAGS]


def engine_sources() -> list[Path]:
    """Return all files without Python, those of the check of kernels among them."""
    engine = [path for path in CSRC.rglob("*.c") if path.relative_to(CSRC).parts[0] != "python"]
    return sorted([*engine, *(path for path in CHECK.glob("*.c") if path.name != "check_module.c")])


def shipped_object(compiler: str, source: Path) -> Path | None:
    """Return setup.py's object of an engine source for this compiler without sanitizers; None if it is out of date."""
    for flags in sorted(ROOT.glob("build/temp.*/*_engine.flags.txt")):
        made = (flags.parent / source.relative_to(ROOT)).with_suffix(".o")
        text = flags.read_text()
        if "-fsanitize" not in text and f"'{compiler}'" in text and not shipped_setup().is_old(made):
            return made
    return None


def run_checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@functools.cache
def newest_header() -> float:
    headers = [*CSRC.rglob("*.h"), *CHECK.glob("*.h"), *CSRC.rglob("*.cu*"), ROOT / "setup.py"]
    headers += [*(ROOT / "tests" / "csrc").glob("*.h"), Path(__file__)]
    return max(header.stat().st_mtime for header in headers)


def compile_object(mode: Mode, source: Path, folder: Path, command: list[str]) -> Path:
    made = folder / source.relative_to(ROOT).with_suffix(".o")
    newest = max(path.stat().st_mtime for path in (ROOT / "setup.py", Path(__file__)))  # which have the flags
    if shipped_setup().is_old(made) or made.stat().st_mtime < newest:
        made.parent.mkdir(parents=True, exist_ok=True)
        run_checked([mode.compiler, *command, "-MMD", "-c", str(source), "-o", str(made)])
    return made


class Builder:
    """Compile the objects of one mode at the first use. A lock keeps two test runs from writing the same file."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.folder = mode.folder
        self.command = [
            *shipped_flags(),
            "-D_GNU_SOURCE",
            "-pthread",
            "-Icsrc",
            "-Icsrc_check",
            "-Itests/csrc",
            "-Itests/fake",
            *mode.flags,
        ]
        self.objects: list[Path] | None = None

    def program(self, test: Path, with_it: Sequence[str] = ()) -> Path:
        """Build a test program. `with_it` are additional files and linker options."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            archive = self.folder / "libengine.a"
            if self.objects is None:
                with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                    engine, shared = (list(pool.map(self.compile, each)) for each in (engine_sources(), SHARED))
                archive.unlink(missing_ok=True)
                run_checked(["ar", "rcs", str(archive), *map(str, engine)])
                self.objects, self.shared = [*engine, *shared], shared
            program = self.folder / test.stem
            linked = [*map(str, (self.compile(test), *self.shared)), *with_it, str(archive)]
            command = [
                self.mode.compiler,
                *self.mode.flags,
                "-pthread",
                *WRAPPED,
                *linked,
                "-lm",
                "-ldl",
                "-o",
                str(program),
            ]
            run_checked(command)
        return program

    def compile(self, source: Path) -> Path:
        is_engines = CSRC in source.parents or CHECK in source.parents
        shipped = shipped_object(self.mode.compiler, source) if self.mode.shipped and is_engines else None
        quickly = ["-O0"] if source.name in LARGE and SANITIZED[1] in self.mode.flags else []
        if self.mode.name in ("plain", "asan") and not is_engines and not LONG:
            quickly = [
                "-O1"
            ]  # a test's own loops are most of its run, which -O0 doubles; -O3 doubles the compiler's time
        return shipped or compile_object(self.mode, source, self.folder, [*self.command, *quickly])


BUILDERS = {mode.name: Builder(mode) for mode in MODES}


@pytest.mark.skipif(not C_TESTS, reason="tests/csrc has no test_*.c")
@pytest.mark.timeout(RUN_LIMIT_S + 60)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("test", C_TESTS, ids=lambda path: path.stem)
def test_c_program_exits_with_zero(test: Path, mode: Mode) -> None:
    if mode.long and not LONG and mode.name not in ASKED_FOR:
        pytest.skip(f"long form only (SW_TEST_LONG=1, or SW_TEST_MODES={mode.name})")
    if shutil.which(mode.compiler) is None:
        pytest.skip(f"no compiler {mode.compiler!r} on this machine")
    if mode.emulator and shutil.which(mode.emulator[0]) is None:
        pytest.skip(f"no {mode.emulator[0]} on this machine")
    if mode.emulator and test.stem in NOT_EMULATED:
        pytest.skip(f"{mode.emulator[0]} does not have {NOT_EMULATED[test.stem]}")
    program = BUILDERS[mode.name].program(test)
    options = {
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [*mode.emulator, str(program)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        env={**os.environ, **options},
    )
    assert done.returncode == 0, f"{program} ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
