"""The states of compressors: their parameters by name, settings, saving and loading. The engine's Codec has what they keep.

An entry belongs to a parameter, by its name if names are known, else by the order in which parameters first reached the
hook. Every rank saves its own state and loads it at the same world size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._engine import Codec, Error, Exchange, block_record_bytes
from ..comm.exchange import Ranks, group_exchange
from ..layout.bucket import share_of, used_in
from ..layout.views import as_real, dtype_name
from ..options.compressors import check_powersgd
from ..torch_compat import cuda

#: what follows a change of the loss scale
_SCALED = ("error", "memory", "right")


class CompressionState:
    """Entries of a codec by parameter. `split`: this rank's position among ranks with other parts of the parameters."""

    kind = ""
    split = ""

    def __init__(
        self,
        codec: Codec,
        process_group: Any = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.codec = codec
        self.process_group = process_group
        self._ranks: Exchange | Ranks | Any = None
        self._is_under_way: Callable[[], bool] = lambda: False
        self._names = WeakIdKeyDictionary()  # parameter -> name
        self._numbers: dict[str, int] = {}  # name -> entry of the codec
        self._is_complete = False  # every parameter has its entry
        self._unnamed = 0
        self._skipped = False
        self._loaded: dict[str, dict[str, torch.Tensor]] | None = None
        self._loaded_without: frozenset[str] = frozenset()
        self.set_names(named_parameters or ())

    def set_names(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the names for state_dict(), before the first bucket."""
        for name, parameter in named_parameters:
            self._names[parameter] = name

    @property
    def iter(self) -> int:
        """Return the complete rounds."""
        return self.codec.rounds

    @iter.setter
    def iter(self, rounds: int) -> None:
        self.codec.set_rounds(rounds)

    @property
    def exchange(self) -> Any:
        """Return the ranks: of the process group, at first use, unless use_exchange() gave others."""
        if self._ranks is None:
            self._ranks = group_exchange(self.process_group)
        return self._ranks

    def use_exchange(self, ranks: Any) -> None:
        """Use other ranks than those of the process group."""
        self._ranks = ranks

    def watch(self, is_under_way: Callable[[], bool]) -> None:
        """Set the function that returns True if another thread may be changing this state."""
        self._is_under_way = is_under_way

    def _check_rest(self, operation: str) -> None:
        if self._is_under_way():
            raise Error(
                f"{self.kind}: {operation}: rank {self.exchange.rank} has buckets in flight of a backward that is not over, or "
                "that an exception ended: the next forward or step waits for them"
            )

    # entries --------------------------------------------------------------------------------------------------------

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the parameter's name, or #k for the k-th parameter without one."""
        if parameter not in self._names:
            self._names[parameter] = f"#{self._unnamed}"
            self._unnamed += 1
        return str(self._names[parameter])

    def register(self, named: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Add all parameters of a model, (name, parameter, tensor with its layout), before the first bucket."""
        for name, parameter, like in named:
            self._names[parameter] = name
            self.number_of(parameter, as_real(like))
        self._is_complete = True

    def number_of(self, parameter: torch.Tensor, gradient: torch.Tensor) -> int:
        """Return the parameter's entry in the codec. A new one takes its part of a loaded state."""
        name = self.name_of(parameter)
        if name not in self._numbers:
            # equal on all ranks and in all runs, unlike hash()
            number = self.codec.add(gradient.numel(), self.rows_of(gradient), sum(map(ord, name)))
            self._take(name, number)
            self._numbers[name] = number
        return self._numbers[name]

    def rows_of(self, gradient: torch.Tensor) -> int:
        """Return the rows of a matrix; 0: the compressor has none."""
        return 0

    def _given(self, name: str, number: int) -> dict[str, torch.Tensor] | None:
        """Return what a loaded state has for an entry. Raise Error if it belongs to another model."""
        shapes = self.codec.shapes(number)
        if self._loaded is None or not shapes:
            return None
        given = self._loaded.get(name)
        if given is None and name in self._loaded_without:
            return None
        if given is None:
            raise self._of_another_model(f"it has nothing for parameter {name!r}")
        for key, shape in shapes.items():
            has = tuple(given[key].shape) if key in given else None
            if has != shape:
                raise self._of_another_model(f"{key} of parameter {name!r} must have shape {shape}, not {has}")
        return {key: given[key] for key in shapes}

    def _of_another_model(self, why: str) -> Error:
        return Error(f"{self.kind}: the loaded state belongs to another model: {why} (rank {self.exchange.rank})")

    def _take(self, name: str, number: int) -> None:
        given = self._given(name, number)
        if given is not None and self._loaded is not None:
            self.write(number, given)
            del self._loaded[name]

    def _refuse(self, names: Iterable[str]) -> None:
        """Raise Error for the names of a loaded state that the model lacks, if there are any."""
        for name in names:
            raise self._of_another_model(f"no parameter is named {name!r}")

    def is_made(self, number: int) -> bool:
        return self.codec.is_made(number)

    def read(self, number: int) -> dict[str, torch.Tensor]:
        """Return copies of an entry's tensors, on the CPU."""
        found = {}
        for key, shape in self.codec.shapes(number).items():
            found[key] = torch.empty(shape, dtype=self.dtype_of(key), device="cpu")
            self.codec.read(number, key, found[key].data_ptr(), found[key].nbytes)
        return found

    def write(self, number: int, entry: dict[str, torch.Tensor]) -> None:
        for key, tensor in entry.items():
            given = tensor.to("cpu", self.dtype_of(key)).contiguous()
            self.codec.write(number, key, given.data_ptr(), given.nbytes)

    def restart(self, rounds: int) -> None:
        """Drop all entries and set the complete rounds."""
        self.codec.restart(rounds)

    def entries(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of the entries by name."""
        return {name: self.read(number) for name, number in self._numbers.items() if self.is_made(number)}

    # rounds of a hook -------------------------------------------------------------------------------------------------

    def average(self, bucket: Any) -> torch.Tensor:
        """Average a bucket in place, for a hook."""
        used = used_in(bucket) or itertools.repeat(True)
        base, members = bucket.buffer().storage_offset(), []
        for gradient, parameter, is_used in zip(bucket.gradients(), bucket.parameters(), used):
            number = self.number_of(parameter, gradient)
            members.append((number, gradient.storage_offset() - base, gradient.numel(), is_used))
            self._skipped |= not is_used
        run_codec(self.codec, self.exchange, bucket, members)
        self.end_bucket(bucket.is_last())
        result: torch.Tensor = bucket.buffer()
        return result

    def end_bucket(self, is_last: bool) -> None:
        """Count the bucket; call this after each bucket."""
        if not is_last:
            return
        kept, skipped, self._skipped = self.codec.keeps, self._skipped, False
        self.iter += 1
        if kept and not skipped:
            self._refuse(self._loaded or ())

    # saving and loading -----------------------------------------------------------------------------------------------

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
        waiting = {name: {key: t.clone() for key, t in entry.items()} for name, entry in (self._loaded or {}).items()}
        entries = {**waiting, **self.entries()}
        known = {str(name) for name in self._names.values()} | self._loaded_without
        return {
            **self._facts(),
            "iter": self.iter,
            **({"split": self.split} if self.split else {}),
            "parameters": entries,
            "without": sorted(known - entries.keys()),  # parameters that have not been in any bucket yet
        }

    def scale_errors(self, factor: float) -> None:
        """Multiply the error when the loss scale grows by `factor`, which must be positive and finite."""
        self._check_rest("scale_errors")
        if not 0 < factor < math.inf:
            raise ValueError(f"{self.kind}: scale_errors: factor must be above 0 and finite, got {factor!r}")
        for name, entry in self.entries().items():
            self.write(self._numbers[name], {key: t.mul_(factor) for key, t in entry.items() if key in _SCALED})
        for entry in (self._loaded or {}).values():
            for key in entry.keys() & set(_SCALED):
                entry[key].mul_(factor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load state_dict()'s result of this rank. Raise Error for another compressor, rank, world size or model."""
        self._check_rest("load_state_dict")
        for key, value in {**self._facts(), "split": self.split}.items():
            if state.get(key, "") != value:
                raise Error(f"{self.kind}: load_state_dict: {key} must be {value!r}, got {state.get(key)!r}")
        before = self._loaded, self._loaded_without
        copies = {name: {k: t.clone() for k, t in entry.items()} for name, entry in state["parameters"].items()}
        self._loaded, self._loaded_without = copies or None, frozenset(state.get("without", ()))
        try:
            taken = {n: k for n, k in self._numbers.items() if self._given(n, k) is not None}
            if self._is_complete:
                self._refuse(copies.keys() - taken.keys())
        except Error:
            self._loaded, self._loaded_without = before
            raise
        self.restart(int(state["iter"]))
        for name, number in taken.items():
            self._take(name, number)
        self._loaded = self._loaded or None

    def forget(self) -> None:
        """Restart with no error."""
        self.restart(0)
        self._loaded, self._loaded_without = None, frozenset()


def run_codec(codec: Codec, exchange: Exchange, bucket: Any, members: Sequence[tuple[int, int, int, bool]]) -> None:
    """Average a bucket of a hook in place."""
    buffer, number = bucket.buffer(), bucket.index()
    if cuda.runtime.holds(buffer):
        raise NotImplementedError(
            "hooks of shardwright.hooks support buckets on the CPU only: on GPUs use sw.wrap(..., compress=...) or torch's own hooks"
        )
    codec.set_bucket(number, members)
    share, _ = share_of(bucket)
    codec.average(exchange, number, buffer.data_ptr(), buffer.numel(), dtype_name(buffer.dtype), share or 0)


class BlockState(CompressionState):
    """The state of int8_compress_hook and int4_compress_hook.

    Parameters
    ----------
    process_group : ProcessGroup or None
        None: the default group.
    bits : {8, 4}
    block : int
        Elements that share a scale: a multiple of 32 in [32, 4096]. ValueError for others, as for bits.
    error_feedback : bool
        Add the rounding error of a step to the next step, on the rank where it arose. The owner of a slice also takes
        the rounding error of the mean, times W: the sum over steps of applied means plus the ranks' mean error is that
        of the mean gradients. Costs a float32 an element. A value that is not finite leaves a bucket's error unchanged.
    named_parameters : iterable of (str, Parameter), optional
        Names for state_dict().
    """

    def __init__(
        self,
        process_group: Any = None,
        bits: int = 8,
        block: int = 256,
        error_feedback: bool = False,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.kind = f"int{bits}"
        block_record_bytes(block, bits)  # raises for a setting out of range
        self.bits, self.block, self.error_feedback = bits, block, error_feedback
        codec = Codec("blocks", block=block, bits=bits, error_feedback=error_feedback)
        super().__init__(codec, process_group, named_parameters)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "block": self.block, "error_feedback": self.error_feedback}


class PowerSGDState(CompressionState):
    """Settings and state of powerSGD_hook, with torch's arguments.

    Parameters
    ----------
    process_group : ProcessGroup or None
        None: the default group.
    matrix_approximation_rank : int
        In [1, 256]. A matrix uses min(rank, rows, columns).
    start_powerSGD_iter : int
        Rounds at the start that are averaged without compression; may be 0.
    min_compression_rate : float
        A matrix is compressed if (rows + columns) * rank * rate < rows * columns.
    use_error_feedback, warm_start : bool
    random_seed : int
        The seed of the first basis; equal on all ranks.
    orthogonalization_epsilon, compression_stats_logging_frequency, batch_tensors_with_same_shape
        Accepted like torch's, without effect.
    wire_dtype : torch.dtype
        The dtype of factors on the wire: float32, bfloat16 or float16. Their rounding error is fed back; small
        parameters travel in float32. In float16 a factor beyond 65504 counts as not finite.
    error_dtype : torch.dtype
        The dtype of the memory between rounds: float32; or bfloat16, which halves the memory and rounds it by up to
        2^-9 each round.
    named_parameters : iterable of (str, Parameter), optional
        Names for state_dict().

    Notes
    -----
    Values out of range raise ValueError. Each rank keeps its own error, (I - P Pᵀ) v, so the error does not grow with
    other ranks' contributions. It is never stored: the memory holds v. If a bucket's P is not finite on some rank, the
    state is unchanged on every rank and the compressed gradients are NaN. If P is finite but Q overflows, the state
    restarts. Memory: one element of error_dtype an element, and 2 rank (rows + columns) float32.
    """

    kind = "PowerSGD"

    def __init__(
        self,
        process_group: Any = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803, torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        wire_dtype: torch.dtype = torch.float32,
        error_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_powersgd(locals())
        codec = Codec(
            "powersgd",
            wire=dtype_name(wire_dtype),
            error_feedback=use_error_feedback,
            warm_start=warm_start,
            rank=matrix_approximation_rank,
            least_rate=min_compression_rate,
            first_round=start_powerSGD_iter,
            seed=random_seed % 2**64,
            memory=dtype_name(error_dtype),
        )
        super().__init__(codec, process_group, named_parameters)
        self.wire_dtype, self.error_dtype = wire_dtype, error_dtype
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape

    def settings(self) -> dict[str, Any]:
        dtypes = {"wire_dtype": self.wire_dtype, "error_dtype": self.error_dtype}
        halves = {key: str(dtype) for key, dtype in dtypes.items() if dtype != torch.float32}
        return {
            **halves,
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "min_compression_rate": self.min_compression_rate,
            "use_error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            "alternate": False,  # of a form that is gone: states of the two cannot be exchanged
        }

    def dtype_of(self, key: str) -> torch.dtype:
        return self.error_dtype if key == "memory" else torch.float32

    def rows_of(self, gradient: torch.Tensor) -> int:
        """Return the size of the outermost dimension in memory order; 0 with less than two dimensions, or with gaps."""
        if gradient.dim() == 0 or gradient.numel() == 0:
            return 0
        strides = gradient.stride()
        order = sorted(range(gradient.dim()), key=lambda d: (-strides[d], gradient.shape[d] == 1))
        ordered = gradient.permute(order)
        return ordered.shape[0] if ordered.is_contiguous() else 0

    def errors(self) -> dict[str, torch.Tensor]:
        """Return this rank's error by parameter, rows x columns in float32, for tests and inspection."""
        return {name: owed(entry).float() for name, entry in self.entries().items() if "memory" in entry}


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
        made["memory"] = torch.stack([owed(entry) for entry in entries]).mean(0).to(made["memory"].dtype)
    return made


def owed(entry: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the error of a matrix in float64: what its memory has and its last factors did not send."""
    rows, cols = entry["memory"].shape
    return entry["memory"].double() - entry["left"][:, :rows].double().T @ entry["right"][:, :cols].double()
