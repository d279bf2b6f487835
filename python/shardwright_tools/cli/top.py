"""`shardwright top`: a live table of what each rank of a job does. It needs rich."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.observe.rings import Row

from .report import Nothing, guarded
from .why import Rank, cause, job_folder, rank_text, read_ranks

#: means over the last ten steps, in milliseconds
_MEANS: dict[str, Callable[[Row], int]] = {
    "ms/step": lambda row: row.total_ns,
    "own": lambda row: row.own_ns,
    "waits": lambda row: row.exposed_ns,
    "data": lambda row: row.phases[0],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", help="as in shardwright why")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two tables (default: 1)")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="end after N tables (default: never)")


def table_of(ranks: Sequence[Rank]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table."""
    rows = []
    for rank in ranks:
        means = [1e-6 * sum(map(value, rank.rows)) / max(len(rank.rows), 1) for value in _MEANS.values()]
        where = f"{rank.operation} for {rank_text(rank.awaited)}" if rank.waits else rank.place
        first = map(str, (rank.number, rank.head.pid, rank.state, rank.head.steps))
        rows.append([*first, *(f"{each:.3g}" for each in means), where])
    return ["rank", "pid", "state", "step", *_MEANS, "where"], rows


@guarded
def run(options: argparse.Namespace) -> int:
    try:
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        raise Nothing("shardwright top needs rich (pip install rich); shardwright why shows the same once") from None
    folder, count = job_folder(options.job), 0

    def table() -> Any:
        ranks = read_ranks(folder)
        made = Table(title=Text(f"{folder.name}: {cause(ranks)[0]}" if ranks else f"{folder.name} has ended"))
        heads, rows = table_of(ranks)
        for each in heads:
            made.add_column(each)
        for row in rows:
            made.add_row(*map(Text, row))
        return made

    with Live(table(), auto_refresh=False) as live:
        while True:
            live.update(table(), refresh=True)
            count += 1
            if count == options.times or not list(folder.glob("rank-*")):
                return 0
            time.sleep(options.every)
