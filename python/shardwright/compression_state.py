"""What compressors that remember share: whose state is whose, and how it is saved and taken back.

State belongs to a parameter, by its name where names are known, and else by its place in the order in which parameters first
came to the hook. It survives other buckets. It is this rank's own: saved by every rank, taken back at the same world size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ._engine import Error
from .exchange import Exchange, group_exchange


class CompressionState:
    """Entries (dicts of tensors) by parameter, made at a parameter's first bucket or taken from a loaded state.

    Attributes
    ----------
    iter : int
        Rounds complete.
    """

    kind = ""

    def __init__(
        self, process_group: Any = None, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> None:
        self.process_group = process_group
        self.iter = 0
        self._exchange: Exchange | None = None
        self._is_under_way: Callable[[], bool] = lambda: False
        self._names = WeakIdKeyDictionary()  # parameter -> name
        self._unnamed = 0
        self._skipped = False
        self._entries: dict[str, dict[str, torch.Tensor]] = {}
        self._loaded: dict[str, dict[str, torch.Tensor]] | None = None
        self._loaded_without: frozenset[str] = frozenset()
        if named_parameters is not None:
            self.set_names(named_parameters)

    def set_names(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Names for state_dict(); before the first bucket."""
        for name, parameter in named_parameters:
            self._names[parameter] = name

    def name_of(self, parameter: torch.Tensor) -> str:
        """Its name, or #k for the k-th parameter without one."""
        if parameter not in self._names:
            self._names[parameter] = f"#{self._unnamed}"
            self._unnamed += 1
        return str(self._names[parameter])

    @property
    def exchange(self) -> Exchange:
        """Over the process group, made at first use."""
        if self._exchange is None:
            self._exchange = group_exchange(self.process_group)
        return self._exchange

    def use_exchange(self, exchange: Exchange) -> None:
        """In place of the process group."""
        self._exchange = exchange

    def watch(self, is_under_way: Callable[[], bool]) -> None:
        """What tells whether another thread may be changing this state."""
        self._is_under_way = is_under_way

    def _check_rest(self, operation: str) -> None:
        if self._is_under_way():
            raise Error(
                f"{self.kind}: {operation}: buckets of a backward that is not over, or that an exception ended, are under way on rank "
                f"{self.exchange.rank}: the next forward or step waits for them"
            )

    def entry(
        self, parameter: torch.Tensor, shapes: dict[str, tuple[int, ...]]
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """The parameter's tensors, of dtype_of() and `shapes`, and whether they are new (zeros)."""
        name = self.name_of(parameter)
        if name not in self._entries:
            taken = self._taken(name, shapes)
            if taken is not None:
                self._entries[name] = {key: self._placed(tensor, parameter) for key, tensor in taken.items()}
            else:
                self._entries[name] = {
                    key: self._zeros(shape, self.dtype_of(key), parameter) for key, shape in shapes.items()
                }
            return self._entries[name], taken is None
        found = self._entries[name]
        for key, shape in shapes.items():
            if tuple(found[key].shape) != tuple(shape):
                raise Error(
                    f"{self.kind}: {key} of parameter {name!r} has shape {tuple(found[key].shape)}, and the parameter needs "
                    f"{tuple(shape)} (rank {self.exchange.rank})"
                )
        return found, False

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
        """Memory of an entry, where the state of `parameter` lies."""
        return torch.zeros(shape, dtype=dtype, device="cpu")

    def _placed(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """`tensor`, which is on the CPU, where the state of `parameter` lies."""
        return tensor

    def _taken(self, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor] | None:
        if self._loaded is None:
            return None
        given = self._loaded.pop(name, None)
        if given is None and name in self._loaded_without:
            return None
        if given is None:
            raise Error(
                f"{self.kind}: the state that was loaded is another model's: it has nothing for parameter {name!r} "
                f"(rank {self.exchange.rank})"
            )
        for key, shape in shapes.items():
            if key not in given or tuple(given[key].shape) != tuple(shape):
                has = tuple(given[key].shape) if key in given else None
                raise Error(
                    f"{self.kind}: the state that was loaded is another model's: {key} of parameter {name!r} must have shape "
                    f"{tuple(shape)}, not {has} (rank {self.exchange.rank})"
                )
        return {key: given[key].clone() for key in shapes}

    def members(self, bucket: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients and parameters of a bucket, but those that no rank used, where the bucket knows: what they are owed must
        wait, since a result for them would be thrown away."""
        used = bucket.used() if hasattr(bucket, "used") else itertools.repeat(True)
        for gradient, parameter, is_used in zip(bucket.gradients(), bucket.parameters(), used):
            if is_used:
                yield gradient, parameter
            else:
                self._skipped = True

    def end_bucket(self, is_last: bool) -> None:
        """After each bucket."""
        if not is_last:
            return
        self.iter += 1
        skipped, self._skipped = self._skipped, False
        if self._loaded and self.uses_entries() and not skipped:
            name = next(iter(self._loaded))
            raise Error(
                f"{self.kind}: the state that was loaded is another model's: no parameter is named {name!r} "
                f"(rank {self.exchange.rank})"
            )

    def uses_entries(self) -> bool:
        """Whether the round just ended asked for every parameter's entry."""
        return True

    def dtype_of(self, key: str) -> torch.dtype:
        """Of an entry's tensor."""
        return torch.float32

    def settings(self) -> dict[str, Any]:
        """What a loaded state must agree about."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; tensors are copies. Every rank saves its own."""
        self._check_rest("state_dict")
        entries = {**(self._loaded or {}), **self._entries}
        known = {str(name) for name in self._names.values()} | self._loaded_without
        return {
            "kind": self.kind,
            "settings": self.settings(),
            "iter": self.iter,
            "rank": self.exchange.rank,
            "world_size": self.exchange.world_size,
            "parameters": {name: {key: t.clone().cpu() for key, t in entry.items()} for name, entry in entries.items()},
            "without": sorted(known - entries.keys()),  # no bucket has had them so far
        }

    def scale_errors(self, factor: float) -> None:
        """Multiplies what is owed, when the loss is scaled by `factor` more than before.

        Raises
        ------
        ValueError
            A factor that is not above 0 and finite.
        """
        self._check_rest("scale_errors")
        if not 0 < factor < math.inf:
            raise ValueError(f"{self.kind}: scale_errors: factor must be above 0 and finite, got {factor!r}")
        for entry in (*self._entries.values(), *(self._loaded or {}).values()):
            for key in ("error", "memory", "right"):
                if key in entry:
                    entry[key].mul_(factor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what state_dict() gave on this rank.

        Raises
        ------
        Error
            Another compressor's or rank's state, or another world size's; at the first round: another model's.
        """
        self._check_rest("load_state_dict")
        wanted = {
            "kind": self.kind,
            "settings": self.settings(),
            "rank": self.exchange.rank,
            "world_size": self.exchange.world_size,
        }
        for key, value in wanted.items():
            if state.get(key) != value:
                raise Error(f"{self.kind}: load_state_dict: {key} must be {value!r}, got {state.get(key)!r}")
        self.iter = int(state["iter"])
        self._entries = {}
        self._loaded = {
            name: {key: tensor.clone() for key, tensor in entry.items()} for name, entry in state["parameters"].items()
        } or None
        self._loaded_without = frozenset(state.get("without", ()))

    def forget(self) -> None:
        """Begins anew, with nothing owed."""
        self.iter, self._entries, self._loaded, self._loaded_without = 0, {}, None, frozenset()


def reshard_state(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """A state for rank `rank` of `world_size` from the states of all ranks of a run of another size.

    Parameters
    ----------
    states : sequence of dict
        What state_dict() gave on every rank, in rank order.

    Returns
    -------
    dict
        For load_state_dict(). Every rank gets the ranks' mean error, so what is owed stays what it was.

    Raises
    ------
    Error
        A rank is missing, or states are of different compressors.
    """
    first = states[0] if states else {}
    for place, state in enumerate(states):
        for key, value in {**first, "rank": place, "world_size": len(states)}.items():
            if key != "parameters" and state.get(key) != value:
                raise Error(f"reshard_state: {key} of states[{place}] must be {value!r}, got {state.get(key)!r}")
    if not states:
        raise Error("reshard_state: states must hold the state of every rank, got none")
    names = first["parameters"]
    entries = {name: _joined([state["parameters"][name] for state in states]) for name in names}
    return {**first, "rank": rank, "world_size": world_size, "parameters": entries}


def _joined(entries: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One entry that owes the mean of what `entries` owe."""
    made = {key: tensor.clone() for key, tensor in entries[0].items()}
    if "error" in made:
        made["error"] = torch.stack([entry["error"].double() for entry in entries]).mean(0).float()
    if "right" in made:
        made["right"].zero_()
    if "memory" in made:
        rows, cols = made["memory"].shape
        owed = [e["memory"].double() - e["left"][:, :rows].double().T @ e["right"][:, :cols].double() for e in entries]
        made["memory"] = torch.stack(owed).mean(0).to(made["memory"].dtype)
    return made
