"""Compares how a program ended on the engine's ranks with how it ended in the oracle."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from .play import End
from .text import Program

#: of values that differ by the order of a sum alone: torch's clip_grad_norm_ adds squares of slices
RELATIVE = ABSOLUTE = 1e-4


def complaint(program: Program, ends: list[End], expected: list[End]) -> str:
    """What is wrong, empty where nothing is."""
    failed = [rank for rank, end in enumerate(ends) if end.error]
    if failed:
        return _complaint_about_errors(program, ends, expected, failed)
    return _complaint_about_values(program, ends, expected)


def _complaint_about_errors(program: Program, ends: list[End], expected: list[End], failed: list[int]) -> str:
    told = "; ".join(f"rank {rank} at piece {end.piece}: {end.error or 'no error'}" for rank, end in enumerate(ends))
    if len(failed) < len(ends):
        return f"an error on some ranks alone: {told}"
    if any(other.error for other in expected):  # the program itself is wrong, or its ranks get out of step
        return ""
    patterns = program.refusals_until(
        max(end.piece for end in ends)
    )  # a rank may be ahead, and its write be seen already
    promised = [any(re.search(p, end.error, re.DOTALL) for p in patterns) for end in ends]
    heard = [end.error.startswith("CommError: ") for end in ends]  # what a peer's end is to a rank that waits for it
    if any(promised) and all(each or of_peer for each, of_peer in zip(promised, heard)):
        return ""
    return f"an error that nothing promises: {told}"


def _complaint_about_values(program: Program, ends: list[End], expected: list[End]) -> str:
    for rank, (end, other) in enumerate(zip(ends, expected)):
        if other.error:
            return f"no error on rank {rank}, where the oracle has one at piece {other.piece}: {other.error}"
        difference = _difference(end.seen, other.seen, program.is_exact)
        if difference:
            return f"rank {rank} saw {difference}\n  ours   {end.seen}\n  oracle {other.seen}"
        for name, (dtype, shape, data) in other.final.items():
            mine = end.final.get(name)
            if mine == (dtype, shape, data):
                continue
            if mine is None or mine[:2] != (dtype, shape):
                return f"rank {rank}: {name} is {mine and mine[:2]}, the oracle's {(dtype, shape)}"
            a, b = (_numbers(dtype, each) for each in (mine[2], data))
            if program.is_exact and "float" in dtype and np.array_equal(a, b, equal_nan=True):
                continue  # NaN of other bits
            if not program.is_exact and np.allclose(a, b, RELATIVE, ABSOLUTE, equal_nan=True):
                continue
            count = int((a != b).sum())
            return f"rank {rank}: {count} of {a.size} elements of {name} differ, first {a[:4]}, the oracle's {b[:4]}"
    if ends[0].final.keys() != expected[0].final.keys():
        return "other names"
    return ""


def _numbers(dtype: str, data: bytes) -> Any:
    """The values as numbers of numpy, which knows no bfloat16."""
    found = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype.removeprefix("torch.")))
    return (found.double() if dtype.startswith("torch.bfloat") else found).numpy()


def _difference(mine: Any, theirs: Any, exact: bool) -> str:
    """Where two logs differ."""
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            return f"{len(mine)} values instead of {len(theirs)}"
        for position, (a, b) in enumerate(zip(mine, theirs)):
            found = _difference(a, b, exact)
            if found:
                return f"{found} at {position}"
        return ""
    if mine == theirs or (
        isinstance(mine, float) and isinstance(theirs, float) and math.isnan(mine) and math.isnan(theirs)
    ):
        return ""
    if not exact and isinstance(mine, float) and math.isclose(mine, theirs, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
        return ""
    return f"{mine} instead of {theirs}"
