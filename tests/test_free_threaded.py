"""Laws of a free-threaded CPython: its engine is built for its version alone, and importing the package turns the GIL on. They
run under such a Python only (`make test-free-threaded`); tests/test_setup.py shows on every Python what setup.py chooses."""

import subprocess
import sys
import sysconfig

import pytest

pytestmark = pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a free-threaded CPython")


def test_importing_the_engine_turns_the_gil_on():
    code = "import sys, torch; print(sys._is_gil_enabled()); import shardwright._engine; print(sys._is_gil_enabled())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_the_engine_is_of_this_version_alone():
    from shardwright import _engine, _engine_check

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert _engine.__file__.endswith(suffix) and _engine_check.__file__.endswith(suffix) and "t-" in suffix
