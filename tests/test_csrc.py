"""Runs the C tests: each tests/csrc/test_*.c, linked with the engine's sources that need no Python, and with the
other files of that folder, which the tests share (one of them fails allocations in turn: hence --wrap).

Modes: the quick form has plain: what is shipped, the very objects of `make build` where they are up to date, and the tests' own
files at -O1. `make asan-quick`, of which CI's check consists too, adds asan (address and undefined behaviour, without optimisation,
which halves the time of a build), by naming it in SW_TEST_MODES; the long form (SW_TEST_LONG=1) optimises asan and adds tsan and
clang. Other objects are compiled once a mode, under build/csrc-tests, and again only if they or a header changed. The engine's
objects are one archive, of which a program links what it needs. A C test passes if it exits with 0.
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

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
C_TESTS = sorted((ROOT / "tests" / "csrc").glob("test_*.c"))
SHARED = sorted(set((ROOT / "tests" / "csrc").glob("*.c")) - set(C_TESTS))
WRAPPED = ["-Wl," + ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc", "mmap", "munmap"))]
LONG = os.environ.get("SW_TEST_LONG") == "1"
#: of the long form, which run all the same
ASKED_FOR = os.environ.get("SW_TEST_MODES", "").split(",")
RUN_LIMIT_S = 600 if LONG else 170


@dataclass(frozen=True)
class Mode:
    name: str
    flags: tuple[str, ...]
    compiler: str = os.environ.get("CC", "gcc")
    long: bool = False
    shipped: bool = False

    @property
    def folder(self) -> Path:
        """Return the place of its objects; those of the two forms differ."""
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
]


def shipped_flags() -> list[str]:
    """The flags of setup.py: one truth for what is shipped and what is tested."""
    spec = importlib.util.spec_from_file_location("shardwright_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [*module.BASE_FLAGS, *module.STRICT_FLAGS]


def engine_sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*.c") if path.relative_to(CSRC).parts[0] != "python")


def shipped_object(compiler: str, source: Path) -> Path | None:
    """What setup.py has made of an engine source with this compiler and without sanitizers; None if it is out of date."""
    newest = max(source.stat().st_mtime, newest_header(tests=False))
    for flags in sorted(ROOT.glob("build/temp.*/flags.txt")):
        made = (flags.parent / source.relative_to(ROOT)).with_suffix(".o")
        text = flags.read_text()
        if made.exists() and made.stat().st_mtime > newest and "-fsanitize" not in text and f"'{compiler}'" in text:
            return made
    return None


def run_checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@functools.cache
def newest_header(tests: bool = True) -> float:
    headers = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cu*"), ROOT / "setup.py"]
    if tests:
        headers += [*(ROOT / "tests" / "csrc").glob("*.h"), Path(__file__)]
    return max(header.stat().st_mtime for header in headers)


def compile_object(mode: Mode, source: Path, folder: Path, command: list[str]) -> Path:
    made = folder / source.relative_to(ROOT).with_suffix(".o")
    newest = max(source.stat().st_mtime, newest_header())
    if not made.exists() or made.stat().st_mtime < newest:
        made.parent.mkdir(parents=True, exist_ok=True)
        run_checked([mode.compiler, *command, "-c", str(source), "-o", str(made)])
    return made


class Builder:
    """Objects of one mode, compiled at the first use; a lock keeps two test runs from writing one file."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.folder = mode.folder
        self.command = [
            *shipped_flags(),
            "-D_GNU_SOURCE",
            "-pthread",
            "-Icsrc",
            "-Itests/csrc",
            "-Itests/fake",
            *mode.flags,
        ]
        self.objects: list[Path] | None = None

    def program(self, test: Path, with_it: Sequence[str] = ()) -> Path:
        """The test as a program; `with_it` are more files and options of its link."""
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
        is_engines = CSRC in source.parents
        shipped = shipped_object(self.mode.compiler, source) if self.mode.shipped and is_engines else None
        quickly = ["-O0"] if source.name in LARGE and SANITIZED[1] in self.mode.flags else []
        if self.mode.shipped and not is_engines and not LONG:
            quickly = ["-O1"]  # the compiler takes half the time, and a test's own loops little more
        return shipped or compile_object(self.mode, source, self.folder, [*self.command, *quickly])


BUILDERS = {mode.name: Builder(mode) for mode in MODES}


@pytest.mark.skipif(not C_TESTS, reason="tests/csrc has no test_*.c")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("test", C_TESTS, ids=lambda path: path.stem)
def test_c_program_exits_with_zero(test: Path, mode: Mode) -> None:
    if mode.long and not LONG and mode.name not in ASKED_FOR:
        pytest.skip(f"long form only (SW_TEST_LONG=1, or SW_TEST_MODES={mode.name})")
    if shutil.which(mode.compiler) is None:
        pytest.skip(f"no compiler {mode.compiler!r} on this machine")
    program = BUILDERS[mode.name].program(test)
    options = {
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=RUN_LIMIT_S, env={**os.environ, **options}
    )
    assert done.returncode == 0, f"{program} ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
