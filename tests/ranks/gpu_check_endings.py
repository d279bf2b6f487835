"""Bodies that end badly, and their place. Interpreters that a test starts import only this file, not pytest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from shardwright_tools.gpu_check.report import row


class Nowhere:
    backend = "gloo"

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def nowhere(rank: int, world_size: int, folder: str) -> Nowhere:
    return Nowhere()


def hang(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    time.sleep(1000)


def fail(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    raise ValueError("the second case is missing")


def refuse(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    raise NotImplementedError("no such card")


def end_badly(place: Any, rank: int, world_size: int) -> Iterator[Any]:
    yield row("first")
    yield row("second")
    raise ValueError("at the end")
