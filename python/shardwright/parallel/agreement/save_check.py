"""The comparison of replicas at the start of a save: of all engines of a module, or of the stages of a pipeline."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._engine import Error
from ..engine import engine_of
from .replica_check import ReplicaCheck

#: position of an engine on its rank, the ranks that hold equal parameters (by the lowest), and the digest of what they store
Row = tuple[int, int, int]


class SaveCheck:
    """The checks of the modules that one save stores: one, or stages in order; none without check_every=."""

    def __init__(self, parts: Iterable[tuple[Any, Any]]) -> None:
        self._checks: list[tuple[ReplicaCheck, Any]] = []
        for module, optimizer in parts:
            engine = engine_of(module)
            replicas = engine.replicas if engine is not None and engine.made else ()
            self._checks += [(each.check, optimizer) for each in replicas if each.check is not None]

    def rows(self) -> list[Row]:
        """Return this rank's digests, for the exchange at the start of a save."""
        return [(at, check.column, check.digest_of_save(each)) for at, (check, each) in enumerate(self._checks)]

    def compare(self, gathered: Sequence[Sequence[Row]], exchange: Callable[[Any, str], Sequence[Any]]) -> None:
        """Raise the same Error on all ranks if the rows of some differ, with shards too. Collective then."""
        digests = collections.defaultdict(set)
        for at, column, digest in (row for rows in gathered for row in rows):
            digests[at, column].add(digest)
        if all(len(each) == 1 for each in digests.values()):
            return
        sentence = ""
        for check, _ in self._checks:
            try:
                check.explain()
            except Error as error:
                sentence = sentence or str(error)
        found = next(filter(None, exchange(sentence, "replicas that differ")), "")
        if found:
            raise Error(found)
