"""Goodput: the part of a job's time that restarts did not cost, from the accounts that its earlier starts have left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .._engine import account_restarted
from ..comm import account
from .rings import AccountError, AccountFile, Head


class Starts(NamedTuple):
    """Earlier starts: when the first began, until when the last one's work is kept (since 1970), the time lost, their count."""

    first_ns: int = 0
    kept_ns: int = 0
    lost_ns: int = 0
    restarts: int = 0


def starts_of(files: Iterable[AccountFile]) -> Starts:
    """Return what accounts of a rank's earlier starts tell, the oldest first.

    Work is kept until the last save that a row shows, in an account without a save until its last step: the program may save by
    other means. What passes from there to the first step of the next start is lost.
    """
    found = Starts()
    for file in files:
        head, rows = file.head(), file.rows(10**9)
        if head.restarts > found.restarts:
            found = Starts(head.first_unix_ns, head.kept_unix_ns, head.lost_ns, head.restarts)
        first, kept, lost = found.first_ns or head.unix_ns, found.kept_ns, found.lost_ns
        if rows:
            lost += lost_since(kept, head, rows[0].begun_ns) if found.restarts else 0
            saves = [row.begun_ns for row in rows if row.phases[-1] > 0]
            kept = head.unix_ns_of(saves[-1] if saves else rows[-1].ended_ns)
        found = Starts(first, kept or head.unix_ns, lost, found.restarts + 1)
    return found


def lost_since(kept_ns: int, head: Head, begun_ns: int) -> int:
    """Return the nanoseconds from `kept_ns` to the first step of a start."""
    return max(head.unix_ns_of(begun_ns) - kept_ns, 0)


def begin() -> None:
    """Take over what earlier starts of this rank's job have left, and remove their files."""
    files = []
    for path in account.earlier:
        with contextlib.suppress(OSError, AccountError):
            files.append(AccountFile(path))
    if files:
        account_restarted(*starts_of(sorted(files, key=lambda file: file.head().unix_ns)))
    for path in account.earlier:
        for each in (path, Path(f"{path}.stacks")):
            each.unlink(missing_ok=True)
    account.earlier.clear()


def text(head: Head, first_step_ns: int) -> str:
    """Return the goodput of a job until now, in words; "" if it has not restarted. `first_step_ns`: of this start."""
    if not head.restarts:
        return ""
    lost_ns = head.lost_ns + lost_since(head.kept_unix_ns, head, first_step_ns)
    share = 1 - lost_ns / max(time.time_ns() - head.first_unix_ns, lost_ns, 1)
    return f"goodput {100 * share:.0f} %: {lost_ns * 1e-9:,.0f} s lost to {head.restarts} restart{'s' * (head.restarts > 1)}"
