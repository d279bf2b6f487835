"""Laws of the build: a change of a header compiles the files that include it, directly or not, and no other one."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
setuptools = pytest.importorskip("setuptools")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that builds a small extension and returns the names of the files that it compiled."""
    spec = importlib.util.spec_from_file_location("shardwright_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
