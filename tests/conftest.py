"""A time limit for every test, and four groups of tests that a few processes share (`-n 3`).

A test that hangs is a failed promise, and must say where it hung: a test may set a limit of its own with
@pytest.mark.timeout; the long form allows more.

What looks at time is one group, and comes first in one process. The C tests come first in another, at the lowest priority. All
else goes file by file, at a low priority, to the process that is free: what needs no ranks first, since a few of its files are the
longest, then ranks that compare bits. So the others take what the first group leaves of the machine, and end together.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest

QUICK_LIMIT_S = 180
LONG_LIMIT_S = 900
IN_TIME = (
    "tests/test_package.py",
    "tests/test_launch.py",
    "tests/test_fake_gpu.py",
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
LONGEST = "tests/test_example.py"  # of those that go by files
#: in order, and not far apart: who may not rise again takes part in the last group at the lowest
NICENESS = {"in time": 0, "C programs": 12, "alone": 12, "ranks": 6}


def group(nodeid: str) -> str:
    if nodeid.startswith(IN_TIME):
        return "in time"
    if nodeid.startswith("tests/test_csrc.py"):
        return "C programs"
    return "ranks" if nodeid.startswith("tests/ranks/") else "alone"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_s = LONG_LIMIT_S if os.environ.get("SW_TEST_LONG") == "1" else QUICK_LIMIT_S
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
    items.sort(key=lambda item: (list(NICENESS).index(group(item.nodeid)), not item.nodeid.startswith(LONGEST)))


def pytest_collection_finish() -> None:
    gc.freeze()  # all that was imported, which no collection need look at


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS[group(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of xdist: the first two groups each as a whole to one process, the others by files, where processes may take any."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # first in the collection, first to go

    class SideBySide(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.split("::")[0] if group(nodeid) in ("alone", "ranks") else group(nodeid)

    return SideBySide(config, log)
