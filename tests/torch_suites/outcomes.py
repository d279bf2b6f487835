"""Runs of torch's tests: one after another, each against the table of expected differences."""

from __future__ import annotations

import io
import re
import time
import unittest
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout


def read_differences(text: str) -> dict[str, str]:
    """Return name to reason; a reason goes on in lines that are indented."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line[0].isspace():
            name = next(reversed(found))
            found[name] += " " + line.strip()
        else:
            name, _, reason = line.partition(":")
            found[name.strip()] = reason.strip()
    return found


def run_case(case: unittest.TestCase) -> tuple[str, str]:
    """Return the outcome of a test, "passed", "skipped" or "failed", and what it said."""
    output = io.StringIO()
    result = unittest.TestResult()
    with redirect_stdout(output), redirect_stderr(output):
        unittest.TestSuite([case]).run(result)
    wrong = [text for _, text in (*result.errors, *result.failures)]
    if wrong:
        return "failed", "\n".join(wrong)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def run_all(
    title: str,
    names: Iterable[str],
    run: Callable[[str], tuple[str, str]],
    expected: Mapping[str, str],
    unknown: Iterable[str] = (),
    *,
    verbose: bool,
) -> int:
    """Run tests and print a line each; return 1 if one differs from the table. `unknown`: names of no test in the table."""
    names, unknown = list(names), list(unknown)
    counts = {"passed": 0, "expected": 0, "unexpected": len(unknown)}
    for name in unknown:
        print(f"UNEXPECTED {name}: the table names it, and torch has no such test of {title}", flush=True)
    for name in names:
        start = time.monotonic()
        outcome, why = run(name)
        seconds = time.monotonic() - start
        as_told = (outcome == "passed") != (name in expected)
        kind = ("passed" if outcome == "passed" else "expected") if as_told else "unexpected"
        counts[kind] += 1
        shown = expected[name] if kind == "expected" else why if verbose else last_line(why)
        if kind == "unexpected" and outcome == "passed":
            shown = "passes, and the table expects a difference: " + expected[name]
        head = kind.upper() if kind == "unexpected" else kind
        print(f"{head:10} {outcome:7} {seconds:5.1f} s  {name}  {shown}", flush=True)
    print(
        f"torch's tests of {title}: {counts['passed']} of {len(names)} passed, "
        f"{counts['expected']} expected differences, {counts['unexpected']} unexpected"
    )
    return 1 if counts["unexpected"] else 0


def last_line(text: str) -> str:
    """Return the error in a trace of a rank."""
    lines = [line for line in text.strip().splitlines() if re.match(r"^[\w.]*(Error|Exception|Warning|Failed)\b", line)]
    found = [line for line in lines if not line.startswith("RuntimeError: Process")]
    return (found or lines or text.strip().splitlines() or [""])[-1][:300]
