"""A time limit for every test, and four groups of tests that a few processes share (`-n 3`).

A test that hangs is a failed promise, and must say where it hung: a test may set a limit of its own with
@pytest.mark.timeout; the long form allows more.

What looks at time is one group, and comes first in one process. The C tests come first in another, at the lowest priority. All
else goes file by file, at a low priority, to the process that is free: what needs no ranks first, then ranks that compare bits, the
longest files of each first. So the others take what the first group leaves of the machine, and end together.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections import Counter
from pathlib import Path
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
#: seconds that files took with --record-durations, one process, W = 2, on two busy cores
DURATIONS = Path(__file__).with_name("durations.json")
#: the same with --each-choice, all tests, in as many processes as there were
QUICK_DURATIONS = Path(__file__).with_name("durations_quick.json")
#: of the files that --fast runs, together; two processes share them
FAST_TOTAL_S = 120.0
FAST_WORLD_MAX = 2
#: in order, and not far apart: who may not rise again takes part in the last group at the lowest
NICENESS = {"in time": 0, "C programs": 12, "alone": 12, "ranks": 6}
#: groups whose files go to any process
BY_FILES = ("alone", "ranks")


def group(nodeid: str) -> str:
    if nodeid.startswith(IN_TIME):
        return "in time"
    if nodeid.startswith("tests/test_csrc.py"):
        return "C programs"
    return "ranks" if nodeid.startswith("tests/ranks/") else "alone"


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("shardwright")
    options.addoption("--fast", action="store_true", help=f"the shortest files of {DURATIONS.name}, up to W = 2")
    options.addoption(
        "--each-choice",
        action="store_true",
        help="of a test's cases as many as hold each value of each parameter once, in the largest world where they can",
    )
    options.addoption(
        "--record-durations",
        action="store_true",
        help=f"write the seconds of these files to {DURATIONS.name}; with --each-choice, to {QUICK_DURATIONS.name}",
    )


def fast_files() -> frozenset[str]:
    """Return the files that --fast runs: the shortest ones, until their seconds add up to FAST_TOTAL_S."""
    chosen, total = [], 0.0
    for name, seconds in sorted(json.loads(DURATIONS.read_text()).items(), key=lambda row: row[1]):
        if not (DURATIONS.parents[1] / name).exists():
            continue
        total += seconds
        if total > FAST_TOTAL_S:
            break
        chosen.append(name)
    return frozenset(chosen)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out before they are imported, which would take longer than --fast may."""
    if not config.option.fast or not collection_path.match("test_*.py"):
        return None
    return True if str(collection_path.relative_to(config.rootpath)) not in fast_files() else None


def is_fast(item: pytest.Item) -> bool:
    """Return True for a test without ranks, and for a law that ranks check in worlds up to FAST_WORLD_MAX."""
    if not item.nodeid.startswith("tests/ranks/"):
        return True
    callspec = getattr(item, "callspec", None)
    is_law = getattr(getattr(item, "function", None), "body", None) is not None
    return is_law and callspec is not None and callspec.params["world_size"] <= FAST_WORLD_MAX


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def each_choice(cases: list[dict[str, Any]]) -> list[int]:
    """Return the positions of a few cases that together hold each value of each parameter.

    Each next case holds the most values that none before it holds; of several such, it has the largest world, and is the first.
    """
    values = [{(name, _hashable(value)) for name, value in case.items()} for case in cases]
    missing, chosen = set().union(*values), []
    while missing:
        best = max(range(len(cases)), key=lambda at: (len(missing & values[at]), cases[at].get("world_size", 0), -at))
        missing -= values[best]
        chosen.append(best)
    return sorted(chosen) or list(range(len(cases)))


def left_out_of_each_choice(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that --each-choice leaves to the long form. Programs in C run all of theirs: a case is a build."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if group(item.nodeid) != "C programs" and not item.nodeid.startswith("tests/test_fake_gpu.py"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in functions.values():
        specs = [getattr(item, "callspec", None) for item in cases]
        kept = each_choice([{} if spec is None else dict(spec.params) for spec in specs])
        left_out.update(item for at, item in enumerate(cases) if at not in kept)
    return left_out


class DurationRecorder:
    """The seconds of each file, which replace its entry in the table."""

    def __init__(self, to: Path) -> None:
        self.to = to
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        table = json.loads(self.to.read_text()) if self.to.exists() else {}
        table |= {name: round(seconds, 2) for name, seconds in self.seconds.items()}
        self.to.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None):
        gc.disable()  # until all is collected: modules and cases stay
    # threads of OpenMP that wait burn the cores that ranks need; programs that tests start take this over
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch would start a program for each frame of a stack that it prints
    os.environ.setdefault("TORCH_DISABLE_ADDR2LINE", "1")
    if config.option.record_durations and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(DurationRecorder(QUICK_DURATIONS if config.option.each_choice else DURATIONS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.fast or (config.option.record_durations and not config.option.each_choice):
        left_out = [item for item in items if not is_fast(item)]
        items[:] = [item for item in items if is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
    if config.option.each_choice:
        dropped = left_out_of_each_choice(items)
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    limit_s = LONG_LIMIT_S if os.environ.get("SW_TEST_LONG") == "1" else QUICK_LIMIT_S
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
    seconds = json.loads(QUICK_DURATIONS.read_text()) if QUICK_DURATIONS.exists() else {}

    def order(item: pytest.Item) -> tuple[int, float]:
        its_group, file = group(item.nodeid), item.nodeid.partition("::")[0]
        # a file without an entry may be long
        return list(NICENESS).index(its_group), -seconds.get(file, 60.0) if its_group in BY_FILES else 0.0

    items.sort(key=order)


def pytest_collection_finish() -> None:
    gc.freeze()  # all that was imported, which no collection need look at
    gc.enable()


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
            return nodeid.split("::")[0] if group(nodeid) in BY_FILES else group(nodeid)

    return SideBySide(config, log)
