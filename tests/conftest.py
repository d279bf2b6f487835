"""A time limit for every test, and three groups of tests that two processes share (`-n 2`).

A test that hangs is a failed promise, and must say where it hung: a test may set a limit of its own with
@pytest.mark.timeout; the long form allows more.

What looks at time is one group, and comes first in one process. Programs that are built and run alone, the C tests above all,
come first in the other, at the lowest priority: they take what the first leaves of the machine, and are never in its way. All
else starts ranks that compare bits, and goes file by file to the process that is free.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest

QUICK_LIMIT_S = 180
LONG_LIMIT_S = 900
IN_TIME = (
    "tests/test_package.py",
    "tests/test_launch.py",
    "tests/ranks/test_a_dead_",
    "tests/ranks/test_a_link_that_fails",
    "tests/ranks/test_a_poor_host",
    "tests/ranks/test_all_reduce_",
    "tests/ranks/test_auto_compresses",
    "tests/ranks/test_checkpoint_survives_kill",
    "tests/ranks/test_communicators_made_anew",
    "tests/ranks/test_compressed_buckets_cross",
    "tests/ranks/test_every_shape_of_backward",
    "tests/ranks/test_hosts_",
    "tests/ranks/test_joining_fails",
    "tests/ranks/test_local_steps",
    "tests/ranks/test_ranks_",
    "tests/ranks/test_stages_over_hosts_that_are_apart",
)
IN_TURN = "tests/ranks/"
LOWEST = 19


def group(nodeid: str) -> str:
    if nodeid.startswith(IN_TIME):
        return "in time"
    return "in turn" if nodeid.startswith(IN_TURN) else "when idle"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_s = LONG_LIMIT_S if os.environ.get("SW_TEST_LONG") == "1" else QUICK_LIMIT_S
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
    items.sort(key=lambda item: ["in time", "when idle", "in turn"].index(group(item.nodeid)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        with contextlib.suppress(PermissionError):  # then nothing else comes after what ran at the lowest
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST if group(item.nodeid) == "when idle" else 0)


def may_rise_again() -> bool:
    """Whether a thread that gave up its priority may take it back: not everybody's may."""
    answer = []

    def there_and_back() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
            answer.append(True)

    thread = threading.Thread(target=there_and_back)
    thread.start()
    thread.join()
    return bool(answer)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of xdist: the first two groups each as a whole to one process, the third by files, where processes may take any."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # first in the collection, first to go
    by_files = may_rise_again()

    class SideBySide(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if group(nodeid) == "in turn":
                return nodeid.split("::")[0] if by_files else "in time"
            return group(nodeid)

    return SideBySide(config, log)
