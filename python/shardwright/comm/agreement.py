"""Exchanges of answers in which each rank may refuse. A refusal is an error on all ranks, so no rank waits for the one
that refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .._engine import Error, HostComm, norm_sum
from ..layout.memory import bytes_of

__all__ = ["NORM_SUM_BYTES", "added_sums", "gather_answers", "sums_over_ranks"]

#: bytes of an exact sum of squares
NORM_SUM_BYTES = len(norm_sum([]))

_ANSWER, _REFUSAL = b"\0", b"\1"


def _error_of(rank: int, sentence: str) -> Exception:
    return Error(sentence)


def gather_answers(
    comm: HostComm,
    answer: Callable[[], bytes],
    label: str,
    *,
    refusals: tuple[type[Exception], ...] = (Error, NotImplementedError),
    retell: Callable[[int, str], Exception] = _error_of,
) -> list[bytes]:
    """Return every rank's answer, in rank order. Collective.

    Parameters
    ----------
    comm : HostComm
    answer : callable
        A function that returns this rank's answer, bytes; may raise one of `refusals`.
    label : str
        The operation's name in messages about absent ranks.
    refusals : tuple of exception classes
        The exceptions that `answer` may raise; after any other one the peers wait until the deadline.
    retell : callable
        A function (refusing rank, message) -> the exception of the other ranks. Default: an Error with the message.

    Raises
    ------
    Exception
        If some rank refused: its own exception on that rank; elsewhere `retell` of the lowest refusing rank's message.

    Notes
    -----
    Cost: the answers' bytes and one byte a rank, to every rank.
    """
    refusal: Exception | None = None
    try:
        mine = _ANSWER + answer()
    except refusals as error:
        refusal, mine = error, _REFUSAL + (str(error) or type(error).__name__).encode(errors="backslashreplace")
    said = comm.all_gather_bytes(mine, label)
    if refusal is not None:
        try:
            raise refusal
        finally:
            refusal = None  # its traceback holds this frame
    for rank, each in enumerate(said):
        if each[:1] == _REFUSAL:
            raise retell(rank, each[1:].decode())
    return [each[1:] for each in said]


def sums_over_ranks(comm: HostComm, sums: Callable[[], bytes], label: str) -> bytes:
    """Return exact sums of squares of all ranks together. Collective.

    `sums` returns this rank's, in norm_sum()'s format, concatenated. If it raises Error on some rank, all raise.
    """
    return added_sums(gather_answers(comm, sums, f"norm of the gradients of {label}"))


def added_sums(sums: Iterable[bytes]) -> bytes:
    """Add exact sums of squares, equally many in each argument: integers, digit by digit."""
    rows = [torch.frombuffer(bytearray(each), dtype=torch.int64) for each in sums]
    return bytes_of(torch.stack(rows).sum(0))
