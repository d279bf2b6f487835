"""Laws of the wheel, which is built once from a copy of the tree, inspected, and imported everywhere. The long form
builds from a clean tree. The quick form's tree has the objects of `make build`, of which setup.py reuses those that are
up to date.

One file serves every CPython >= 3.10 and every glibc >= 2.28. So the tests check its tag, the libraries that it names,
the newest glibc symbol and an import on each Python of the machine. They import the engine by path, without the
package, because only the package needs torch. Free-threaded builds cannot load abi3: tests/test_free_threaded.py has
them. Other C libraries and processors are compiled for where their compilers are.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from shutil import copy2, copytree, ignore_patterns, which

import pytest

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "csrc_check", "python")
NEWEST_GLIBC = (2, 28)
OLDEST_PYTHON = (3, 10)
LONG = os.environ.get("SW_TEST_LONG") == "1"
LIMIT_S, BUILD_LIMIT_S = 900 if LONG else 180, 600
pytestmark = pytest.mark.timeout(LIMIT_S, func_only=True)  # fixtures have limits of their own

PROBE = """
import sys, sysconfig, os
ok = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
include = sysconfig.get_path("include")
print(sys.version_info[0], sys.version_info[1], int(ok), include if os.path.exists(include + "/Python.h") else "")
"""
# Read in the interpreter under test. LD_BIND_NOW=1 makes a missing function an ImportError here and now.
IMPORT_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("shardwright._engine", sys.argv[1])
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
assert "torch" not in sys.modules
if hasattr(engine, "self_test"):
    engine.self_test()
print("imported")
"""


def probe(python: str) -> tuple[tuple[int, int], str] | None:
    """Return (version, include folder or "") of an interpreter that can load the wheel; None for other interpreters."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if done.returncode != 0:
        return None
    major, minor, usable, *include = done.stdout.split()
    version = (int(major), int(minor))
    return (version, "".join(include)) if version >= OLDEST_PYTHON and usable == "1" else None


def find_pythons() -> dict[str, tuple[tuple[int, int], str]]:
    """Return path -> (version, include folder) of each distinct CPython >= 3.10 found, the running one included."""
    names = ["python3", *(f"python3.{minor}" for minor in range(10, 20))]
    candidates = [sys.executable, "/usr/bin/python3", *filter(None, map(which, names))]
    candidates += sorted(glob.glob(str(Path.home() / ".pyenv/versions/*/bin/python")))
    found, seen = {}, set()
    for python in candidates:
        if not os.path.exists(python) or "shims" in python or os.path.realpath(python) in seen:
            continue
        seen.add(os.path.realpath(python))
        if (answer := probe(python)) is not None:
            found[python] = answer
    return found


PYTHONS = find_pythons()


def output_of(*command: str, timeout: float = LIMIT_S, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def clean_copy(folder: Path) -> Path:
    """Copy the sources of a wheel, without objects or caches of earlier builds."""
    folder.mkdir(parents=True)
    for name in INPUTS:
        source = ROOT / name
        if source.is_dir():
            copytree(source, folder / name, ignore=ignore_patterns("*.so", "*.o", "__pycache__", "*.egg-info"))
        elif source.exists():
            copy2(source, folder / name)
    return folder


def with_built_objects(tree: Path) -> dict[str, str]:
    """Copy the objects of `make build` into the tree. Return the settings with which they were built."""
    settings = {}
    for flags in (ROOT / "build").glob("temp.*/*_engine.flags.txt"):
        text = flags.read_text()
        if "-fsanitize" not in text and "'-g0'" in text:
            copytree(flags.parent, tree / "build" / flags.parent.name)
            settings = {"SW_WERROR": "1"} if "'-Werror'" in text else {}
    return settings


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tree = clean_copy(folder / "tree")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SW_")}
    if not LONG:
        environment |= with_built_objects(tree)
    images = tree / "python" / "shardwright" / "images"  # made ahead of time: `shardwright kernels --to`
    images.mkdir()
    (images / "one.image").touch()
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"))
    output_of(sys.executable, "-m", "pip", "wheel", str(tree), *options, env=environment, timeout=BUILD_LIMIT_S)
    (made,) = (folder / "dist").glob("shardwright-*.whl")
    return made


def unpacked(wheel: Path, name: str) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"shardwright/{name}.abi3.so", wheel.parent / "unpacked"))


@pytest.fixture(scope="session")
def engine(wheel: Path) -> Path:
    return unpacked(wheel, "_engine")


@pytest.fixture(scope="session", params=("_engine", "_engine_check"))
def binary(wheel: Path, request: pytest.FixtureRequest) -> Path:
    return unpacked(wheel, request.param)


def test_the_wheel_is_tagged_for_every_cpython_from_3_10(wheel: Path) -> None:
    assert re.search(r"-cp310-abi3-(many)?linux_\w+\.whl$", wheel.name), wheel.name


def test_the_wheel_carries_the_types_the_licence_and_no_source(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"shardwright/__init__.py", "shardwright/py.typed", "shardwright/_engine.pyi"} <= set(names)
    assert {"shardwright/integrations/deepspeed/keys.md", "shardwright_tools/planner/launch_files/sky.yaml"} <= set(
        names
    )
    assert any(name.endswith("/LICENSE") for name in names) and "shardwright/images/one.image" in names
    assert [name for name in names if name.endswith((".c", ".h", ".o"))] == []


def test_each_binary_needs_libc_and_libm_alone(binary: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", str(binary)))
    assert {name for name in needed if not name.startswith("ld-linux")} <= {"libc.so.6", "libm.so.6"}
    assert re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", output_of("readelf", "-d", str(binary))) is None


def test_no_symbol_is_newer_than_glibc_2_28(binary: Path) -> None:
    wanted = re.findall(r"GLIBC_(\d+)\.(\d+)[.\d]*\)?\s+(\S+)", output_of("objdump", "-T", str(binary)))
    newer = {name: f"{major}.{minor}" for major, minor, name in wanted if (int(major), int(minor)) > NEWEST_GLIBC}
    assert wanted and newer == {}, "bind it in csrc/platform/glibc_compat.h or use syscall()"


def test_the_stack_is_not_executable(binary: Path) -> None:
    stack = re.search(r"GNU_STACK.*\n?.*", output_of("readelf", "-lW", str(binary)))
    assert stack is not None and "RWE" not in stack[0]


def test_it_asks_python_for_public_names_only(binary: Path) -> None:
    asked = re.findall(r"\*UND\*.*?\s(_?Py\w+)$", output_of("objdump", "-T", str(binary)), re.MULTILINE)
    assert asked
    # Macros of the 3.10 limited API lead to these private names, which are part of the stable ABI.
    private = {name for name in asked if name.startswith("_")} - {"_Py_NoneStruct", "_Py_TrueStruct"}
    private -= {"_Py_FalseStruct", "_Py_NotImplementedStruct", "_Py_EllipsisObject", "_Py_Dealloc"}
    private -= {"_PyObject_New", "_PyArg_ParseTuple_SizeT", "_PyArg_ParseTupleAndKeywords_SizeT"}
    private -= {"_Py_BuildValue_SizeT", "_PyObject_CallFunction_SizeT"}
    assert private == set()


@pytest.mark.parametrize("python", sorted(PYTHONS), ids=lambda path: "%d.%d:" % PYTHONS[path][0] + path)
def test_the_engine_imports_without_torch_on(python: str, engine: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "LD_BIND_NOW": "1"}
    assert "imported" in output_of(python, "-I", "-c", IMPORT_ALONE, str(engine), env=environment)


def test_the_binding_compiles_against_the_headers_of_python_3_10() -> None:
    includes = [include for version, include in PYTHONS.values() if version == OLDEST_PYTHON and include]
    if not includes:
        pytest.skip("no Python 3.10 with headers on this machine")
    files = sorted(map(str, [*(ROOT / "csrc" / "python").glob("**/*.c"), ROOT / "csrc_check" / "check_module.c"]))
    flags = ("-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")
    macros = ("-D_GNU_SOURCE=1", "-DPy_LIMITED_API=0x030A0000")
    output_of("gcc", *flags, *macros, "-Icsrc", "-Icsrc_check", "-isystem", includes[0], *files, cwd=ROOT)


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
def test_pip_install_works_in_an_environment_that_has_only_pip(tmp_path: Path) -> None:
    tree = clean_copy(tmp_path / "tree")
    output_of(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    output_of(python, "-m", "pip", "uninstall", "--yes", "setuptools", "wheel")
    output_of(python, "-m", "pip", "install", "--no-deps", str(tree))
    (engine,) = (tmp_path / "venv").glob("lib/python*/site-packages/shardwright/_engine.abi3.so")
    assert "imported" in output_of(python, "-I", "-c", IMPORT_ALONE, str(engine))


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
def test_the_engine_compiles_for_aarch64_without_a_warning(tmp_path: Path) -> None:
    if which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("no aarch64-linux-gnu-gcc on this machine")
    tree = clean_copy(tmp_path / "tree")
    environment = {**os.environ, "SW_WERROR": "1", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    environment |= {"CC": "aarch64-linux-gnu-gcc", "LDSHARED": "aarch64-linux-gnu-gcc -shared"}
    output_of(sys.executable, "setup.py", "--quiet", "build_ext", cwd=tree, env=environment)


def test_the_engine_compiles_with_musl_without_a_warning() -> None:
    """The C tests run with it by `make test-musl`."""
    if which("musl-gcc") is None:
        pytest.skip("no musl-gcc on this machine: it is in Debian's musl-tools")
    files = sorted(map(str, [*(ROOT / "csrc").rglob("*.c"), *(ROOT / "csrc_check").glob("*.c")]))
    flags = ("-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Wpedantic", "-Wconversion", "-Werror")
    macros = ("-D_GNU_SOURCE=1", "-DPy_LIMITED_API=0x030A0000", "-include", "csrc/platform/glibc_compat.h")
    includes = ("-Icsrc", "-Icsrc_check", "-isystem", sysconfig.get_path("include"))
    output_of("musl-gcc", *flags, *macros, *includes, *files, cwd=ROOT)


CHECKSUM = """
#include <stdio.h>
#include "kernels/crc32c.h"
#include "platform/cpu.h"
int main(void) { return printf("%d %08x\\n", sw_cpu_has_crc32c(), sw_crc32c(0, "123456789", 9)) < 0; }
"""


def test_checksums_on_aarch64_use_its_instruction(tmp_path: Path) -> None:
    """The table form gives the same bits, so the object must have the instruction, and the processor must be seen to have it."""
    if which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("no aarch64-linux-gnu-gcc on this machine")
    (tmp_path / "main.c").write_text(CHECKSUM)
    sources = ("csrc/kernels/host/crc32c.c", "csrc/platform/cpu.c", str(tmp_path / "main.c"))
    program = str(tmp_path / "program")
    flags = ("-std=c11", "-O3", "-pthread", "-D_GNU_SOURCE", "-Icsrc")
    output_of("aarch64-linux-gnu-gcc", *flags, *sources, "-o", program, cwd=ROOT)
    assert {"crc32cx", "crc32cb"} <= set(output_of("aarch64-linux-gnu-objdump", "-d", program).split())
    if which("qemu-aarch64") is None:
        pytest.skip("no qemu-aarch64 on this machine: compiled only")
    assert output_of("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program) == "1 e3069283\n"


def test_the_sdist_holds_every_tracked_file(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    # the list of files alone: nothing is compiled
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    output_of(sys.executable, "-c", program, str(tmp_path), cwd=ROOT)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - held == set()
    assert [name for name in held if name.endswith((".so", ".o", ".pyc"))] == []


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into an empty environment, which finds torch where this one has it. Return its folder of
    programs."""
    folder = tmp_path_factory.mktemp("installed")
    output_of(sys.executable, "-m", "venv", str(folder / "venv"))
    programs = folder / "venv" / "bin"
    output_of(str(programs / "pip"), "install", "--no-deps", "--no-index", str(wheel))
    site = Path(
        output_of(str(programs / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    packages = {
        path.parent for name in ("torch", "numpy") for path in ROOT.glob(f".venv/lib/python*/site-packages/{name}")
    }
    packages |= {Path(each) for each in sys.path if Path(each, "torch").is_dir()}
    (site / "torchs.pth").write_text("\n".join(map(str, packages)) + "\n")
    # an editable install of this checkout must not answer in the place of the wheel
    return programs


def test_an_installed_wheel_runs_the_readmes_program_and_the_doctor(installed: Path, tmp_path: Path) -> None:
    environment = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    where = output_of(
        str(installed / "python"),
        "-c",
        "import shardwright; print(shardwright.__file__)",
        env=environment,
        cwd=tmp_path,
    )
    assert str(installed.parent) in where
    text = (ROOT / "README.md").read_text()
    program = next(part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "sw.wrap(" in part)
    (tmp_path / "program.py").write_text(program)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "program.py"]
    out = output_of(str(installed / "python"), *words, env=environment, cwd=tmp_path, timeout=300)
    assert len(set(re.findall(r"rank \d: (first weight .*)", out))) == 1 and out.count("first weight") == 2
    found = subprocess.run(
        [str(installed / "shardwright"), "doctor"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert found.returncode in (0, 1) and "Traceback" not in found.stderr, found.stderr
    for word in ("engine computes", "torch", "shared memory", "watching peers", "instruction"):
        assert word in found.stdout, found.stdout


@pytest.mark.parametrize("python", sorted(PYTHONS), ids=lambda path: "%d.%d:" % PYTHONS[path][0] + path)
def test_the_wheel_installs_on_each_python_and_plans_without_torch(python: str, wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    output_of(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)
    )
    words = ["plan", "--layers", "2", "--width", "64", "--vocabulary", "100", "--memory", "1GB", "--json"]
    start = "import sys; from shardwright_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site)}
    assert '"ok": true' in output_of(python, "-S", "-c", start, *words, env=environment, cwd=tmp_path)
