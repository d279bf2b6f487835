"""The verdict on a run: what bounds its steps, and which rank is slow. Functions over rows of accounts; nothing communicates."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from .rings import PHASES, Row

#: a rank is slow if its own time is this many times the lower median of the others', by at least so many nanoseconds,
_RATIO, _LEAST_NS = 1.2, 200_000
#: in _OFTEN of the last WINDOW steps
WINDOW, _OFTEN = 40, 36
#: the share of a step, and the nanoseconds, above which the wait for data has a remedy
DATA_LIMIT, LEAST_DATA_NS = 0.05, 1_000_000
DATA_REMEDY = (
    "the data loader holds the steps: raise its num_workers, set persistent_workers=True and a larger prefetch_factor, and "
    "pin_memory=True where batches go to a GPU"
)
_BOUNDS = ("compute", "communication", "data", "save")


def slow_ranks(own_ns: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
    """Return slow ranks with their median ratio, and in how many of the last WINDOW steps they were slow.

    Parameters
    ----------
    own_ns : mapping
        By rank: its own time (waits and saves excluded) of the same steps, the oldest first. Fewer than WINDOW steps, or
        one rank, name none.
    """
    ranks = sorted(own_ns)
    if len(ranks) < 2 or min(map(len, own_ns.values())) < WINDOW:
        return {}
    ratios: dict[int, list[float]] = {rank: [] for rank in ranks}
    counts = dict.fromkeys(ranks, 0)
    middle = (len(ranks) - 2) // 2
    for values in zip(*(own_ns[rank][-WINDOW:] for rank in ranks)):
        order = sorted(values)
        for rank, value in zip(ranks, values):
            other = order[middle] if value > order[middle] else order[middle + 1]
            ratios[rank].append(value / max(other, 1))
            counts[rank] += value >= _RATIO * other and value - other >= _LEAST_NS
    return {r: (statistics.median(ratios[r]), counts[r]) for r in ranks if counts[r] >= _OFTEN}


def data_ns(rows: Sequence[Row]) -> float:
    """Return the median wait for data of a step."""
    data = PHASES.index("data")
    return statistics.median(row.phases[data] - row.waits[data] for row in rows)


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the shares of a step, which add up to 1.

    They are medians over the steps, since a pause between two steps is often an evaluation; of saves the mean. What is no
    wait for peers, no wait for data and no save is computation.
    """
    data = PHASES.index("data")
    totals = [max(row.total_ns - row.phases[-1], 1) for row in rows]
    saves = sum(row.phases[-1] for row in rows) / max(sum(row.total_ns for row in rows), 1)
    exposed = statistics.median(row.exposed_ns / total for row, total in zip(rows, totals))
    # a thread's wait may begin before the phase that it is counted for
    loading = statistics.median(max(row.phases[data] - row.waits[data], 0) / total for row, total in zip(rows, totals))
    exposed, loading = exposed * (1 - saves), loading * (1 - saves)
    return dict(zip(_BOUNDS, (max(1 - exposed - loading - saves, 0.0), exposed, loading, saves)))


def bound(rows: Sequence[Row]) -> tuple[str, float]:
    """Return what holds the steps most, and its share."""
    found = shares(rows)
    name = max(found, key=found.__getitem__)
    return name, found[name]


def line(rows: Sequence[Row], tokens_per_s: float | None, mfu: float | None, memory: int | None, *more: str) -> str:
    """Return the line of a report over these rows; `more`: further parts, of which empty ones are left out."""
    name, share = bound(rows)
    rest = [f"{each} {100 * value:.0f} %" for each, value in shares(rows).items() if each != name]
    parts = [f"step {rows[-1].step}: {statistics.median(row.total_ns for row in rows) * 1e-6:.3g} ms a step"]
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if mfu is not None:
        parts.append(f"MFU {100 * mfu:.1f} %")
    parts.append(f"{name}-bound: {100 * share:.0f} % ({', '.join(rest)})")
    if memory is not None:
        parts.append(f"this rank's share of memory {memory / 2**20:,.0f} MiB")
    return ", ".join([*parts, *filter(None, more)])
