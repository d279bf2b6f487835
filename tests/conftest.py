"""A time limit for every test, and two groups of tests that may run side by side (`-n 2`).

A test that hangs is a failed promise, and must say where it hung: a test may set a limit of its own with
@pytest.mark.timeout; the long form allows more.

What starts ranks looks at time and is one group. Programs that are built and run alone, the C tests above all, are the other:
they take what the first leaves of the machine, and are never in its way.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

QUICK_LIMIT_S = 180
LONG_LIMIT_S = 900
IN_TIME = ("tests/ranks/", "tests/test_package.py", "tests/test_launch.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_s = LONG_LIMIT_S if os.environ.get("SW_TEST_LONG") == "1" else QUICK_LIMIT_S
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and not item.nodeid.startswith(IN_TIME):
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # nobody takes it back: the other group has a process of its own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of xdist: each group as a whole goes to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class SideBySide(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "in time" if nodeid.startswith(IN_TIME) else "when idle"

    return SideBySide(config, log)
