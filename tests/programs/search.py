"""Runs programs on teams of warm ranks, and searches for one that ends wrongly."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable

import harness
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as with_seed

from .draw import programs
from .play import play, play_oracle
from .text import Program
from .verdict import complaint

DEADLINE_S = 30.0


class Wrong(AssertionError):
    """A program that ends wrongly; the message has its text."""


class Stuck(BaseException):
    """A program of which a rank waits in vain. It is not made smaller, which would take its deadline each time."""


class Runner:
    """Runs programs, and counts how they ended.

    Parameters
    ----------
    teams : Teams
        Warm ranks; one team a world size serves all programs.
    """

    def __init__(self, teams: harness.Teams) -> None:
        self._teams = teams
        self.counts: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()

    def complaint(self, program: Program) -> str:
        """What is wrong with how the program ends; empty where nothing is."""
        expected = play_oracle(program)
        try:
            arguments = {"pieces": program.pieces}
            ends = self._teams.run(program.world_size, play, spoils=False, deadline_s=DEADLINE_S, arguments=arguments)
        except harness.RanksFailed as error:  # a crash, or no end
            self.counts["crashed or hung"] += 1
            return str(error)
        self.counts["programs"] += 1
        self.counts[f"stage {program.stage}"] += 1
        if ends[0].error:
            self.counts["refused"] += 1
            self.refusals[ends[0].error[:100]] += 1
        return complaint(program, ends, expected)

    def check(self, program: Program) -> None:
        """Raises Wrong with the program's text."""
        found = self.complaint(program)
        if found:
            text = f"{found}\n\n{program.as_file()}"
            raise Stuck(text) if "did not finish" in found or "CommTimeoutError" in found else Wrong(text)


def search(check: Callable[[Program], None], count: int, seed: int | None = None, *, max_statements: int = 14) -> None:
    """Checks `count` programs; raises Wrong for the smallest one like the first that fails. The same ones always for a seed."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=seed is None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(programs(max_statements))
    def body(program: Program) -> None:
        check(program)

    (body if seed is None else with_seed(seed)(body))()


def main(arguments: list[str]) -> int:
    """The command line."""
    import argparse
    import pathlib

    from .text import program_of

    parser = argparse.ArgumentParser(prog="tests/programs", description=__doc__)
    parser.add_argument("file", nargs="?", type=pathlib.Path, help="a program to run and to compare with the oracle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--statements", type=int, default=14, help="at most, a program")
    given_ = parser.parse_args(arguments)
    forge = harness.Forge()
    teams = harness.Teams(forge)
    runner = Runner(teams)
    begin_s = time.monotonic()
    try:
        if given_.file is not None:
            program = program_of(given_.file.read_text())
            print(runner.complaint(program) or "as the oracle, or refused")
            return 0
        search(runner.check, given_.count, given_.seed, max_statements=given_.statements)
    except (Wrong, Stuck) as wrong:
        print(wrong)
        return 1
    finally:
        teams.close()
        forge.close()
        seconds = time.monotonic() - begin_s
        print(dict(runner.counts), f"{seconds:.1f} s", file=sys.stderr)
        for sentence, times in runner.refusals.most_common(40):
            print(f"  {times:5d}  {sentence}", file=sys.stderr)
    return 0
