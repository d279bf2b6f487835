"""All-gathers in which any rank may fail: a failure raises on every rank, so no rank waits for the one that failed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._engine import Error, HostComm, norm_sum
from ..layout.memory import bytes_of
from ..layout.model_mesh import numbers_of

#: bytes of an exact sum of squares
NORM_SUM_BYTES = len(norm_sum([]))

_ANSWER, _REFUSAL = b"\0", b"\1"
#: the errors whose message is a sentence by itself; any other one needs its type's name
_SENTENCES = (Error, NotImplementedError, ValueError, TypeError, MemoryError)


def _error_of(rank: int, sentence: str) -> Exception:
    return Error(sentence)


def _words_of(error: Exception) -> str:
    name, text = type(error).__name__, str(error)
    return text if text and isinstance(error, _SENTENCES) else f"{name}: {text}" if text else name


def gather_answers(
    comm: HostComm,
    answer: Callable[[], bytes],
    label: str,
    *,
    refusals: tuple[type[Exception], ...] = (Error, NotImplementedError),
    retell: Callable[[int, str], Exception] = _error_of,
    compare: Callable[[Sequence[bytes]], str] | None = None,
    alike: bool = False,
) -> list[bytes]:
    """Return every rank's answer, in rank order; `label` names the operation. Collective.

    If answer() raises one of `refusals` on some rank, that rank raises it, and the others retell(the lowest such rank, its
    message); with `alike` so do ranks that refuse with another message. After any other exception the peers wait until the
    deadline. With `compare` the answers must be equal: compare(answers) is the message of the Error on all ranks.

    Cost: the answers' bytes and one byte a rank, to every rank. With `compare`, 32 bytes a rank if they are equal.
    """
    refusal: Exception | None = None
    try:
        mine = _ANSWER + answer()
    except refusals as error:
        refusal, mine = error, _REFUSAL + _words_of(error).encode(errors="backslashreplace")
    digests = [] if compare is None else comm.all_gather_bytes(hashlib.sha256(mine).digest(), label)
    are_equal = len({*digests}) == 1
    if are_equal and refusal is None:
        return [mine[1:]] * len(digests)
    gathered = [mine] * len(digests) if are_equal else comm.all_gather_bytes(mine, label)
    refused = next((rank for rank, each in enumerate(gathered) if each[:1] == _REFUSAL), None)
    try:
        if refusal is not None and (not alike or gathered[refused or 0] == mine):
            raise refusal
    finally:
        refusal = None  # its traceback holds this frame
    if refused is not None:
        raise retell(refused, gathered[refused][1:].decode())
    answers = [each[1:] for each in gathered]
    if compare is not None and len({*answers}) > 1:
        raise Error(compare(answers))
    return answers


def gather_values(comm: HostComm, value: Callable[[], Any], label: str, **options: Any) -> list[Any]:
    """Return every rank's value, which JSON can express: gather_answers() for values."""
    options.setdefault("refusals", (Error, NotImplementedError, TypeError, ValueError))
    gathered = gather_answers(comm, lambda: json.dumps(value()).encode(), label, **options)
    return [json.loads(each) for each in gathered]


def verify(comm: HostComm, describe: Callable[[], list[list[str]]], what: str, *, alike: bool = False) -> None:
    """Raise on every rank unless describe() returns the same [item, value] lines, and fails on none. Collective."""

    def failed(rank: int, sentence: str) -> Exception:
        if sentence.startswith("rank "):  # that rank heard of another rank's error
            return Error(sentence)
        verb = "wrap" if what.startswith("the wrapped ") else "begin"
        return Error(f"rank {rank} could not {verb} {what.removeprefix('the wrapped ')}: {sentence}")

    gather_values(
        *(comm, describe, "parameter table"),  # ranks may differ in what they wrap
        refusals=(Exception,),  # any error: the peers must not wait for this rank
        retell=failed,
        alike=alike,
        compare=lambda answers: _disagreement([json.loads(each) for each in answers], what),
    )


def _disagreement(tables: list[list[list[str]]], what: str) -> str:
    other = next(table for table in tables if table != tables[0])
    at = next((i for i, (a, b) in enumerate(zip(tables[0], other)) if a != b), min(map(len, (tables[0], other))))
    lines, counts, options, versions = [], [], [], False
    for table in (tables[0], other):
        ranks = [rank for rank, each in enumerate(tables) if each == table]
        holders = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {numbers_of(ranks)}"
        line = " ".join(table[at]) if at < len(table) else "nothing more"
        lines.append(f"{holders} {'has' if len(ranks) == 1 else 'have'} {line}")
        counts.append(f"{sum(row[0].startswith('parameter ') for row in table)} on {holders}")
        options.append(line.startswith("option "))
        versions = line.startswith("shardwright ")
    same = (
        "pass the same options" if all(options) else "install the same version" if versions else "build the same module"
    )
    remedy = f"{same} on every rank"
    return f"ranks disagree about {what}: {', '.join(lines)} (parameters: {', '.join(counts)}); {remedy}"


def sums_over_ranks(comm: HostComm, sums: Callable[[], bytes], label: str) -> bytes:
    """Return exact sums of squares of all ranks together; `sums` returns this rank's, or raises on all. Collective."""
    return added_sums(gather_answers(comm, sums, f"norm of the gradients of {label}"))


def added_sums(sums: Iterable[bytes]) -> bytes:
    """Add exact sums of squares, equally many in each argument: integers, digit by digit."""
    rows = [torch.frombuffer(bytearray(each), dtype=torch.int64) for each in sums]
    return bytes_of(torch.stack(rows).sum(0))
