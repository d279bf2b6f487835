"""What every rank is asked, and may refuse: a refusal is an error on all ranks, instead of a wait for the one that refused."""

from __future__ import annotations

from collections.abc import Callable

from .._engine import Error, HostComm, norm_sum, norm_value

__all__ = ["gather_answers", "norm_over_ranks"]

_ANSWER, _REFUSAL = b"\0", b"\1"


def gather_answers(comm: HostComm, answer: Callable[[], bytes], label: str) -> list[bytes]:
    """Every rank's answer, in rank order. Collective.

    Parameters
    ----------
    comm : HostComm
    answer : callable
        Of this rank; may raise Error or NotImplementedError.
    label : str
        What is asked, in messages about ranks that do not come.

    Raises
    ------
    Error
        Some rank refused: its own exception there, elsewhere an Error with the lowest refusing rank's sentence.

    Notes
    -----
    Cost: the answers' bytes and one byte a rank, to every rank.
    """
    refusal: Exception | None = None
    try:
        mine = _ANSWER + answer()
    except (Error, NotImplementedError) as error:
        refusal, mine = error, _REFUSAL + str(error).encode()
    said = comm.all_gather_bytes(mine, label)
    if refusal is not None:
        raise refusal
    for each in said:
        if each[:1] == _REFUSAL:
            raise Error(each[1:].decode())
    return [each[1:] for each in said]


def norm_over_ranks(comm: HostComm, sums: Callable[[], bytes], label: str) -> float:
    """The exact 2-norm of what all ranks hold together. Collective.

    `sums` gives this rank's, as norm_sum() does, one behind the other: 1,112 bytes each. Where it raises Error on some rank, all raise.
    """
    size = len(norm_sum([]))
    sums_of_all = b"".join(gather_answers(comm, sums, f"norm of the gradients of {label}"))
    return norm_value([sums_of_all[at : at + size] for at in range(0, len(sums_of_all), size)])
