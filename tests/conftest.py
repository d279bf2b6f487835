"""A time limit for every test, and two groups of tests that may run side by side (`-n 2 --dist loadgroup`).

A test that hangs is a failed promise, and must say where it hung: a test may set a limit of its own with
@pytest.mark.timeout; the long form allows more.

What starts ranks looks at time and is one group. Programs that are built and run alone, the C tests above all, are the other:
they take what the first leaves of the machine, and are never in its way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

QUICK_LIMIT_S = 180
LONG_LIMIT_S = 900
HERE = Path(__file__).resolve().parent
#: outside of tests/ranks, and looks at time too
IN_TIME = ("test_package.py", "test_launch.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit_s = LONG_LIMIT_S if os.environ.get("SW_TEST_LONG") == "1" else QUICK_LIMIT_S
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("in time" if is_in_time(item) else "when idle"))


def is_in_time(item: pytest.Item) -> bool:
    return item.path.parent == HERE / "ranks" or item.path.name in IN_TIME


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and not is_in_time(item):
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # nobody takes it back: the other group has a process of its own
