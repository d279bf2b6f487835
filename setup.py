"""Builds `shardwright._engine`, every C file under csrc, and `shardwright._engine_check`, csrc_check: the comparison of
GPU kernels with their references, for the tools. Both have CPython 3.10's limited API, so that one wheel serves every later
CPython. A free-threaded CPython has no limited API: what it builds serves its own version alone, and keeps the GIL on.

Everything else about the package stands in pyproject.toml. The flags live here once: the C tests
(tests/test_csrc.py) import this file for them, so what is tested is compiled as what is shipped.

Environment: SW_WERROR=1 turns on the strict warnings and makes them errors, SW_DEBUG=1 keeps debug
information, SW_SANITIZE=address,undefined builds with these sanitizers. None of them changes numerics.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BASE_FLAGS = [
    "-std=c11",
    "-O3",
    # Kernels: sqrt without errno vectorises, and no contraction, so every instruction set gives the same bits.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Werror=implicit-function-declaration",
]
STRICT_FLAGS = ["-Wpedantic", "-Wconversion", "-Werror"]
#: files of the engine that _engine_check has, too: errors and dtypes
CHECK_SHARES = ["csrc/base/status.c", "csrc/tensor/dtype.c"]
#: False on a free-threaded CPython (3.13t, 3.14t)
IS_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
MACROS = [("_GNU_SOURCE", "1"), *([("Py_LIMITED_API", "0x030A0000")] if IS_LIMITED else [])]


def sources(folder: str) -> list[str]:
    """All C files, sorted, relative to the root as setuptools wants them."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.c"))


def headers() -> list[str]:
    """What sources include, the device kernels' text (csrc/kernels/kernel_source.c) among it."""
    patterns = ("csrc/**/*.h", "csrc/**/*.cu", "csrc/**/*.cuh", "csrc_check/*.h")
    return sorted(path.relative_to(ROOT).as_posix() for each in patterns for path in ROOT.glob(each))


def extension(name: str, files: list[str], *more_folders: str) -> Extension:
    return Extension(
        name,
        sources=files,
        depends=[*headers(), "setup.py"],
        include_dirs=["csrc", *more_folders],
        define_macros=MACROS,
        extra_compile_args=compile_flags(),
        extra_link_args=link_flags(),
        libraries=["m"],
        py_limited_api=IS_LIMITED,
    )


def wheel_options() -> dict[str, dict[str, str]]:
    return {"bdist_wheel": {"py_limited_api": "cp310"}} if IS_LIMITED else {}


def compile_flags() -> list[str]:
    flags = list(BASE_FLAGS)
    if os.environ.get("SW_WERROR") == "1":
        flags += STRICT_FLAGS
    # -isystem: the strict warnings are about our headers, not CPython's.
    flags += ["-isystem", sysconfig.get_path("include")]
    sanitizers = os.environ.get("SW_SANITIZE")
    if sanitizers:
        return [*flags, f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-O1", "-g"]
    # Old symbol versions, so that the wheel loads from glibc 2.28 on (sanitizers intercept by name instead).
    flags += ["-include", "csrc/platform/glibc_compat.h"]
    return flags + (["-g"] if os.environ.get("SW_DEBUG") == "1" else ["-g0"])


def link_flags() -> list[str]:
    flags = ["-Wl,-z,relro", "-Wl,--as-needed"]
    sanitizers = os.environ.get("SW_SANITIZE")
    if sanitizers:
        return [*flags, f"-fsanitize={sanitizers}"]
    return flags if os.environ.get("SW_DEBUG") == "1" else [*flags, "-Wl,--strip-debug"]


class BuildEngine(build_ext):
    """build_ext that recompiles a file only if it, what it includes or the flags changed, on all processors."""

    def build_extension(self, ext: Extension) -> None:
        files, ext.sources, forced = ext.sources, [], self.force
        # A Python built in an odd place bakes its library folder into what it links: not into our wheel.
        self.compiler.linker_so = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")]
        record, flags = Path(self.build_temp, f"{ext.name}.flags.txt"), self._flags(ext)
        flags_changed = not record.exists() or record.read_text() != flags
        record.unlink(missing_ok=True)  # an interrupted build leaves none

        def compile_one(file: str) -> str:
            (name,) = self.compiler.object_filenames([file], output_dir=self.build_temp)
            if self.force or flags_changed or is_old(Path(name)):
                self.compiler.compile(
                    [file],
                    output_dir=self.build_temp,
                    macros=ext.define_macros,
                    include_dirs=ext.include_dirs,
                    extra_postargs=[*ext.extra_compile_args, "-MMD"],
                )
            return name

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            ext.extra_objects = list(pool.map(compile_one, files))
        record.write_text(flags)
        self.force = True  # the link is cheap: always do it, a file may have gone
        super().build_extension(ext)
        self.force = forced

    def _flags(self, ext: Extension) -> str:
        """Return what decides how a file is compiled, this file included."""
        how = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return repr((self.compiler.compiler_so, ext.extra_compile_args, ext.define_macros, ext.include_dirs, how))


def is_old(made: Path) -> bool:
    """True if an object is missing, or older than a file it was made of; gcc's -MMD names them beside it, but those of .incbin."""
    record = made.with_suffix(".d")
    if not made.exists() or not record.exists():
        return True
    files = record.read_text().partition(":")[2].replace("\\\n", " ").split()
    files += headers() if made.stem == "kernel_source" else []
    paths = [ROOT / each for each in files]
    return any(not each.exists() or each.stat().st_mtime > made.stat().st_mtime for each in paths)


def project_urls() -> dict[str, str]:
    """The pages of the repository that is built: a CI job's, or the clone's origin. Empty if neither has a page."""
    given = "/".join(os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY"))
    if given == "/" and (ROOT / ".git").exists():
        asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
        given = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", asked.stdout.strip())
    found = re.fullmatch(r"(https://)(?:[^/@]*@)?([\w.-]+(?:/[\w.-]+?)+)(?:\.git)?/?", given)  # without a token
    page = found and found[1] + found[2]
    paths = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md", "Security": "/security"}
    return {name: page + path for name, path in paths.items()} if page else {}


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        project_urls=project_urls(),
        ext_modules=[
            extension("shardwright._engine", sources("csrc")),
            extension("shardwright._engine_check", [*sources("csrc_check"), *CHECK_SHARES], "csrc_check"),
        ],
        cmdclass={"build_ext": BuildEngine},
        options=wheel_options(),
    )
