"""Law of torch's own tests with our class in place of torch's: the table of differences is well-formed; the long form
runs the tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITES = ROOT / "tests" / "torch_suites"


def differences() -> dict[str, str]:
    """Return the table as the runner reads it."""
    text = (SUITES / "ddp_differences.txt").read_text()
    found = re.findall(r"^(test_\w+): (.+(?:\n[ \t]+.+)*)", text, re.MULTILINE)
    assert len(found) == sum(line.startswith("test_") for line in text.splitlines())
    assert len({name for name, _ in found}) == len(found), "a test is named twice"
    return dict(found)


def test_the_documentation_names_each_limit_that_was_lifted() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    lifted = {name for name, reason in differences().items() if reason.startswith("lifted: ")}
    assert lifted == set(re.findall(r"`(test_\w+)`", page))


@pytest.mark.skipif(os.environ.get("SW_TEST_LONG") != "1", reason="minutes: the long form")
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch.testing needs expecttest")
@pytest.mark.timeout(1800)
def test_torchs_own_tests_pass_but_for_the_table() -> None:
    run = subprocess.run(
        [sys.executable, str(SUITES)], cwd=ROOT, text=True, capture_output=True, timeout=1700, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def test_the_table_of_fsdp2_names_each_test_once_with_a_reason() -> None:
    text = (SUITES / "fsdp2_differences.txt").read_text()
    found = re.findall(r"^(test_\w+\.\w+\.test_\w+(?:@[\d.]+)?):(?: |\n[ \t]+)(\S.*)", text, re.MULTILINE)
    assert len(found) == sum(line.startswith("test_") for line in text.splitlines())
    assert len({name for name, _ in found}) == len(found), "a test is named twice"


@pytest.mark.skipif(
    "TORCH_FSDP2_TESTS" not in os.environ, reason="torch's source is not in the wheel: a path that you give"
)
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch.testing needs expecttest")
@pytest.mark.timeout(3600)
def test_torchs_own_tests_of_fsdp2_pass_but_for_the_table() -> None:
    command = [sys.executable, str(SUITES / "fsdp2.py"), "--of", os.environ.get("TORCH_FSDP2_TESTS_OF", "2.13")]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=3500, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
