"""One forge and one set of teams for every test under tests/ranks."""

import functools
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the folder of `oracle`

import harness  # noqa: E402
from hosts import lab  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
#: a hang is told of at the harness's own deadline, 45 s on a machine that does nothing else
LIMIT_S = 300
_forge: harness.Forge | None = None


def pytest_generate_tests(metafunc):
    if "world_size" in metafunc.fixturenames:
        at_least = getattr(metafunc.function, "at_least", 1)
        exactly = getattr(metafunc.function, "exactly", None)
        sizes = [size for size in harness.world_sizes() if size >= at_least] or [max(at_least, 3)]
        if getattr(metafunc.module, "QUICK_FORM_IS_THE_LARGEST_WORLD", False) and not harness.LONG:
            sizes = sizes[-1:]
        if harness.LONG and not os.environ.get("SW_TEST_WORLDS"):
            sizes = [*sizes, *getattr(metafunc.module, "MORE_WORLDS", [])]
        sizes = [exactly] if exactly is not None else sizes
        metafunc.parametrize("world_size", sizes, ids=[f"W{size}" for size in sizes])


def pytest_collection_modifyitems(items):
    for item in [] if harness.LONG else items:  # the long form has the limit of tests/conftest.py
        if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def pytest_collection_finish(session):
    """Forked here: every test module is imported, asserts rewritten, and no test has run yet."""
    global _forge
    if not session.config.option.collectonly and any(item.path.parent == HERE for item in session.items):
        _forge = harness.Forge()


@pytest.fixture(scope="session")
def teams():
    assert _forge is not None
    teams = harness.Teams(_forge)
    yield teams
    teams.close()


@pytest.fixture
def fresh_ranks(teams):
    """`with fresh_ranks(world_size) as team:` for tests that kill, stop or exit ranks."""
    return teams.fresh


@pytest.fixture(scope="session")
def paths():
    """Of the fakes that simulate GPUs, and of their kernels."""
    import simulated_gpus

    return simulated_gpus.build()


@pytest.fixture
def hosts(teams):
    """`with hosts(2, 1) as lab:`: ranks 0 and 1 on one host, rank 2 on another; see hosts.py."""
    return functools.partial(lab, teams)


def pytest_sessionfinish(session):
    if _forge is not None:
        _forge.close()
