"""Laws of the build: a change of a header compiles the files that include it, directly or not, and no other one. A free-threaded
Python builds without the limited API, every other one with that of 3.10."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
setuptools = pytest.importorskip("setuptools")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def setup_py():
    spec = importlib.util.spec_from_file_location("shardwright_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that builds a small extension and returns the names of the files that it compiled."""
    module = setup_py()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    texts = {
        "low.h": "",
        "high.h": '#include "low.h"',
        "a.c": '#include "high.h"',
        "b.c": '#include "low.h"',
        "c.c": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}\ntypedef int {name.replace('.', '_')};\n")
        os.utime(name, (1, 1))

    def run():
        before = {each.stem: each.stat().st_mtime_ns for each in tmp_path.glob("objects/*.o")}
        extension = setuptools.Extension("small", ["a.c", "b.c", "c.c"], depends=["low.h", "high.h"])
        command = module.BuildEngine(setuptools.Distribution({"ext_modules": [extension]}))
        command.build_temp, command.build_lib = "objects", "library"
        command.ensure_finalized()
        command.run()
        return {each.stem for each in tmp_path.glob("objects/*.o") if before.get(each.stem) != each.stat().st_mtime_ns}

    return run


def test_a_header_compiles_what_includes_it(build):
    assert build() == {"a", "b", "c"}
    assert build() == set()
    for changed, compiled in (("high.h", {"a"}), ("low.h", {"a", "b"}), ("c.c", {"c"})):
        os.utime(changed)
        assert build() == compiled
        os.utime(changed, (1, 1))
    next(Path("objects").glob("*.flags.txt")).unlink()  # an interrupted build
    assert build() == {"a", "b", "c"}
    os.remove("high.h")
    Path("a.c").write_text('#include "low.h"\n')
    os.utime("a.c", (1, 1))
    assert build() == {"a"}  # what it included is gone


@pytest.mark.parametrize(("free_threaded", "limited"), [(1, False), (0, True), (None, True)])
def test_a_free_threaded_python_builds_for_its_own_version_alone(monkeypatch, free_threaded, limited):
    asked = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: free_threaded if name == "Py_GIL_DISABLED" else asked(name)
    )
    module = setup_py()
    made = module.extension("small", [])
    assert made.py_limited_api is limited and (("Py_LIMITED_API", "0x030A0000") in made.define_macros) is limited
    assert module.wheel_options() == ({"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {})
