"""Budget: the bytes that the images of a host need, and the bytes that its limits leave."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from ..._engine import host_limits

SLOTS = 2
#: fraction of free memory that images may take, since training allocates, too
_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of a host's images, of the images of `of_others` there, of those that its guardian has, and left under `limit`."""

    host: str
    own: int
    of_others: Sequence[int]
    held: int
    left: int
    limit: str

    def nbytes(self, replicas: int) -> int:
        return SLOTS * (self.own + sum(self.of_others[:replicas]))

    def fits(self, replicas: int) -> bool:
        return self.nbytes(replicas) - self.held <= _SHARE * self.left


def memory_left() -> tuple[int, str]:
    """Return the bytes that this process may still touch, and the name of the limit that applies."""
    limits = host_limits()
    available = 1 << 62
    with contextlib.suppress(OSError, StopIteration, ValueError), open("/proc/meminfo", "rb") as file:
        available = next(1024 * int(line.split()[1]) for line in file if line.startswith(b"MemAvailable:"))
    found = [(available, "MemAvailable")]
    if limits["memory_max_bytes"] is not None and limits["memory_current_bytes"] is not None:
        left = max(0, limits["memory_max_bytes"] - limits["memory_current_bytes"])
        found.append((left, f"the control group's limit of {in_gib(limits['memory_max_bytes'])}"))
    return min(found)


def refusal(needs: Sequence[Need], replicas: int) -> str:
    """Return the reason why some host's images do not fit, and a setting that would fit; "" if all fit."""
    short = next((need for need in needs if not need.fits(replicas)), None)
    if short is None:
        return ""
    fitting = [fewer for fewer in range(replicas) if all(need.fits(fewer) for need in needs)]
    would = f"memory_replicas={fitting[-1]} would fit" if fitting else "no number of replicas would fit"
    return (
        f"host {short.host} needs {in_gib(short.nbytes(replicas))} for {SLOTS} images of {in_gib(short.own)} of its ranks and "
        f"of {replicas} other hosts, and {in_gib(short.left)} are left there ({short.limit}), of which images take at most "
        f"{_SHARE:.0%}: {would}"
    )


def no_restore(needs: Sequence[Need], replicas: int) -> str:
    """Return the reason why a restore that fetches a whole step to the images of each host would exceed some host's memory, or ""."""
    whole = sum(need.own for need in needs)
    for need in needs:
        rest = whole - need.own
        if rest and need.nbytes(replicas) - need.held + rest > need.left:
            return (
                f"host {need.host} has room for its images and not for a restore from memory, which needs {in_gib(rest)} more there, "
                f"the shares of all other hosts: {in_gib(need.left)} are left ({need.limit}). restore() then reads the disk"
            )
    return ""


def in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
