"""A time limit for every test: a test that hangs is a failed promise, and must say where it hung.

A test may set its own with @pytest.mark.timeout; the long form allows more.
"""

from __future__ import annotations

import os

import pytest

QUICK_LIMIT_S = 180
LONG_LIMIT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_s = LONG_LIMIT_S if os.environ.get("SW_TEST_LONG") == "1" else QUICK_LIMIT_S
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
