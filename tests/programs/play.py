"""Runs a program: on one rank of the engine, or on all ranks of the oracle. Says how it ended, in values that pickle."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import multiprocessing.resource_sharer
import os
import signal
import sys
import types
import unittest.mock
import warnings
from typing import Any

import shardwright as sw
import torch
from shardwright.comm import process_group

from .naive import OutOfStep, Package, World
from .others import CHILD, CHILD_OF_ORACLE
from .text import Program


@dataclasses.dataclass
class End:
    """How a program ended on one rank.

    Attributes
    ----------
    piece : int
        The piece that raised, or the number of pieces.
    error : str
        What it raised, "type: message"; empty where it came to its end.
    is_ours : bool
        Whether the error is the package's, or one of torch's.
    seen : list
        What the program noted.
    final : dict
        Name to (dtype, shape, bytes) of parameters and buffers.
    """

    piece: int
    error: str = ""
    is_ours: bool = True
    seen: list[Any] = dataclasses.field(default_factory=list)
    final: dict[str, tuple[str, tuple[int, ...], bytes]] = dataclasses.field(default_factory=dict)


def play_pieces(pieces: list[str], rank: int, world_size: int, package: Any, space: dict[str, Any]) -> End:
    children: list[Any] = []
    try:
        return _play_pieces(pieces, rank, world_size, package, space, children)
    finally:
        for child in children:  # whose pipes children of other programs hold open, too: it would see no end of them
            if child.pid:
                os.close(child.ask)
                os.close(child.answer)
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)


def _play_pieces(
    pieces: list[str], rank: int, world_size: int, package: Any, space: dict[str, Any], children: list[Any]
) -> End:
    space.update(rank=rank, world_size=world_size, sw=package, seen=[], losses=[], children=children)
    for number, piece in enumerate(pieces):
        try:
            exec(compile(piece, f"<piece {number}>", "exec"), space)
        except OutOfStep as error:
            return End(number, str(error), seen=space["seen"])
        except Exception as error:
            is_ours = isinstance(error, (sw.Error, RuntimeError, ValueError, TypeError, NotImplementedError))
            text = f"{type(error).__name__}: {error}"
            space.clear()
            return End(number, text, is_ours)
    final = {}
    for name, value in space["final"].items():
        plain = value.detach().contiguous()
        final[name] = str(value.dtype), tuple(value.shape), plain.flatten().view(torch.uint8).numpy().tobytes()
    return End(len(pieces), seen=space["seen"], final=final)


_numbers = itertools.count()


def play(rank: int, world_size: int, pieces: list[str]) -> End:
    """A team's body: one rank of the engine."""
    logger = logging.getLogger("shardwright")
    before = logger.level
    logger.setLevel(logging.ERROR)
    name = f"program_{next(_numbers)}"  # torch.compile imports it by its name, and keeps it
    sys.modules[name] = types.ModuleType(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            end = play_pieces(pieces, rank, world_size, sw, sys.modules[name].__dict__)
    finally:
        sys.modules.pop(name).__dict__.clear()
        if any("torch.compile" in piece for piece in pieces):
            torch._dynamo.reset()  # code that it has seen eight times it would not compile again
        logger.setLevel(before)  # the process plays other tests afterwards
    if end.error:  # what is left of it is no affair of the next program; peers that wait hear of it
        for group in process_group.live_groups():
            group.close()
    return end


def play_oracle(program: Program) -> list[End]:
    """Every rank of the oracle."""
    world = World(program.world_size)
    pieces = [piece.replace(CHILD, CHILD_OF_ORACLE) for piece in program.pieces]

    def body(rank: int) -> End:
        torch.set_num_threads(1)  # of this thread; as the engine's ranks compute
        return play_pieces(pieces, rank, program.world_size, Package(world, rank), {"__name__": "program"})

    with warnings.catch_warnings(), unittest.mock.patch("torch.compile", lambda model, **_: model):
        warnings.simplefilter("ignore")
        ends = world.run(body)
    multiprocessing.resource_sharer.stop()  # closes what went into queues from which nobody took it
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends
