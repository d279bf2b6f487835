"""The state of compressors with memory: its parameters, saving and loading.

An entry belongs to a parameter, by its name if names are known, else by the order in which parameters first reached the
hook. Every rank saves its own state and loads it at the same world size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._engine import Error
from ..comm.exchange import Exchange, group_exchange
from ..layout.bucket import used_in


class CompressionState:
    """Entries (dicts of tensors) by parameter, created at a parameter's first bucket or taken from a loaded state.

    `iter` counts complete rounds. `split` is this rank's position among ranks with other parts of the parameters.
    """

    kind = ""
    split = ""
    #: a rank that is not its host's carrier still counts buckets and rounds (comm/levels.py)
    follows_rounds = True

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
        """Set the names for state_dict(), before the first bucket."""
        for name, parameter in named_parameters:
            self._names[parameter] = name

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the parameter's name, or #k for the k-th parameter without one."""
        if parameter not in self._names:
            self._names[parameter] = f"#{self._unnamed}"
            self._unnamed += 1
        return str(self._names[parameter])

    @property
    def exchange(self) -> Exchange:
        """Return the exchange over the process group, created at first use."""
        if self._exchange is None:
            self._exchange = group_exchange(self.process_group)
        return self._exchange

    def use_exchange(self, exchange: Exchange) -> None:
        """Use `exchange` instead of one over the process group."""
        self._exchange = exchange

    def watch(self, is_under_way: Callable[[], bool]) -> None:
        """Set the function that returns True if another thread may be changing this state."""
        self._is_under_way = is_under_way

    def _check_rest(self, operation: str) -> None:
        if self._is_under_way():
            raise Error(
                f"{self.kind}: {operation}: rank {self.exchange.rank} has buckets in flight of a backward that is not over, or "
                "that an exception ended: the next forward or step waits for them"
            )

    def entry(
        self, parameter: torch.Tensor, shapes: dict[str, tuple[int, ...]]
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the parameter's tensors, with dtype_of() and `shapes`, and True if they are new (zeros)."""
        name = self.name_of(parameter)
        if name not in self._entries:
            taken = self._taken(name, shapes)
            if taken is not None:
                made = {key: self._placed(tensor, parameter) for key, tensor in taken.items()}
            else:
                made = {key: self._zeros(shape, self.dtype_of(key), parameter) for key, shape in shapes.items()}
            self._entries[name] = made
            return made, taken is None
        found = self._entries[name]
        for key, shape in shapes.items():
            if tuple(found[key].shape) != tuple(shape):
                raise Error(
                    f"{self.kind}: {key} of parameter {name!r} has shape {tuple(found[key].shape)}, but the parameter needs "
                    f"{tuple(shape)} (rank {self.exchange.rank})"
                )
        return found, False

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor of zeros for an entry, on the device of the parameter's state."""
        return torch.zeros(shape, dtype=dtype, device="cpu")

    def _placed(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Move `tensor` from the CPU to the device of the parameter's state."""
        return tensor

    def _taken(self, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor] | None:
        if self._loaded is None:
            return None
        given = self._loaded.pop(name, None)
        if given is None and name in self._loaded_without:
            return None
        if given is None:
            raise Error(
                f"{self.kind}: the loaded state belongs to another model: it has nothing for parameter {name!r} "
                f"(rank {self.exchange.rank})"
            )
        for key, shape in shapes.items():
            if key not in given or tuple(given[key].shape) != tuple(shape):
                has = tuple(given[key].shape) if key in given else None
                raise Error(
                    f"{self.kind}: the loaded state belongs to another model: {key} of parameter {name!r} must have shape "
                    f"{tuple(shape)}, not {has} (rank {self.exchange.rank})"
                )
        return {key: given[key].clone() for key in shapes}

    def members(self, bucket: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield gradients and parameters of a bucket, without those that no rank used: their error stays."""
        used = used_in(bucket) or itertools.repeat(True)
        for gradient, parameter, is_used in zip(bucket.gradients(), bucket.parameters(), used):
            if is_used:
                yield gradient, parameter
            else:
                self._skipped = True

    def end_bucket(self, is_last: bool) -> None:
        """Count the bucket; call this after each bucket."""
        if not is_last:
            return
        self.iter += 1
        skipped, self._skipped = self._skipped, False
        if self._loaded and self.uses_entries() and not skipped:
            name = next(iter(self._loaded))
            raise Error(
                f"{self.kind}: the loaded state belongs to another model: no parameter is named {name!r} "
                f"(rank {self.exchange.rank})"
            )

    def uses_entries(self) -> bool:
        """Return True if the round just ended asked for every parameter's entry."""
        return True

    def dtype_of(self, key: str) -> torch.dtype:
        return torch.float32

    def settings(self) -> dict[str, Any]:
        """Return the settings that a loaded state must share."""
        return {}

    def _facts(self) -> dict[str, Any]:
        ranks = {"rank": self.exchange.rank, "world_size": self.exchange.world_size}
        return {"kind": self.kind, "settings": self.settings(), **ranks}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as copies. Every rank saves its own."""
        self._check_rest("state_dict")
        entries = {**(self._loaded or {}), **self._entries}
        known = {str(name) for name in self._names.values()} | self._loaded_without
        return {
            **self._facts(),
            "iter": self.iter,
            **({"split": self.split} if self.split else {}),
            "parameters": {name: {key: t.clone().cpu() for key, t in entry.items()} for name, entry in entries.items()},
            "without": sorted(known - entries.keys()),  # parameters that have not been in any bucket yet
        }

    def scale_errors(self, factor: float) -> None:
        """Multiply the error when the loss scale grows by `factor`, which must be positive and finite."""
        self._check_rest("scale_errors")
        if not 0 < factor < math.inf:
            raise ValueError(f"{self.kind}: scale_errors: factor must be above 0 and finite, got {factor!r}")
        for entry in (*self._entries.values(), *(self._loaded or {}).values()):
            for key in ("error", "memory", "right"):
                if key in entry:
                    entry[key].mul_(factor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load state_dict()'s result of this rank. Raise Error for another compressor, rank or world size."""
        self._check_rest("load_state_dict")
        for key, value in {**self._facts(), "split": self.split}.items():
            if state.get(key, "") != value:
                raise Error(f"{self.kind}: load_state_dict: {key} must be {value!r}, got {state.get(key)!r}")
        self.iter = int(state["iter"])
        self._entries = {}
        self._loaded = {
            name: {key: tensor.clone() for key, tensor in entry.items()} for name, entry in state["parameters"].items()
        } or None
        self._loaded_without = frozenset(state.get("without", ()))

    def forget(self) -> None:
        """Restart with no error."""
        self.iter, self._entries, self._loaded, self._loaded_without = 0, {}, None, frozenset()


class StatesOfParts:
    """The compressor states of a module with groups=, as one object: the first engine's and the others'."""

    def __init__(self, states: Sequence[CompressionState]) -> None:
        self.states = tuple(states)
        self.kind, self.exchange, self.settings = states[0].kind, states[0].exchange, states[0].settings
        self.split = "; ".join(each.split or "whole" for each in states)

    @property
    def iter(self) -> int:
        """Return the complete rounds."""
        return self.states[0].iter

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states as copies. Every rank saves its own."""
        first, *others = (each.state_dict() for each in self.states)
        return {**first, "split": self.split, "parts": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states that state_dict() returned on this rank. Raise Error for those of other groups."""
        if state.get("split", "") != self.split:
            raise Error(
                f"{self.kind}: load_state_dict: split must be {self.split!r}, got {state.get('split', '')!r}: the state was saved with another groups="
            )
        first = self.states[0]
        given = {key: value for key, value in state.items() if key not in ("split", "parts")}
        for each, own in zip(self.states, [{**given, "split": first.split}, *state["parts"]], strict=True):
            each.load_state_dict(own)

    def scale_errors(self, factor: float) -> None:
        """Multiply the errors when the loss scale grows by `factor`."""
        for each in self.states:
            each.scale_errors(factor)

    def forget(self) -> None:
        """Restart with no error."""
        for each in self.states:
            each.forget()


def joined_states(states: Sequence[CompressionState]) -> CompressionState | StatesOfParts | None:
    """Return the single state, or several as one object; None without a state."""
    return StatesOfParts(states) if len(states) > 1 else next(iter(states), None)


def reshard_state(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return a state for load_state_dict() of rank `rank` of `world_size`, made for another world size.

    `states` are the results of state_dict() on every rank, in rank order. Every rank gets the ranks' mean error, so the
    total error stays the same. Raises Error if a rank's state is missing, or states belong to different compressors.
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
