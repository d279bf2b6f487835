"""DiLoCo: ranks take local steps and average the resulting changes every H steps.

    trainer = sw.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=3e-4), every=50, fragments=4, wire="bf16")
    for x, y in batches:
        loss(model(x), y).backward()
        trainer.step(); trainer.zero_grad()
    trainer.synchronise()

Over a mesh of two dimensions, (replicate, shard), each row trains one replica at zero >= 1, and rows are averaged:

    model, inner = sw.wrap(model, inner, zero=3, device_mesh=mesh["shard"])
    trainer = sw.DiLoCo(model, inner, every=50, device_mesh=mesh)

References
----------
Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023. Douillard et al., Streaming
DiLoCo with overlapping communication, 2025 (fragments).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._engine import Codec, Error, Exchange
from ..comm.agreement import verify
from ..comm.model_ranks import together
from ..options.checks import among, count
from .diloco_parameters import SlicedParameters, WholeParameters, creating_ranks
from .sharded import ShardedOptimizer

_CODECS = {
    "float32": lambda: Codec("plain"),
    "bf16": lambda: Codec("half", wire="bfloat16"),
    "int8": lambda: Codec("blocks", bits=8, block=256),
}
_TIMEOUT_S = 1800.0


def _nesterov(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo:
    """An optimizer of local steps with an outer optimizer over ranks.

    Parameters
    ----------
    model : Module
        A bare module, or one wrapped by sw at zero=0, which then stops averaging gradients. With `device_mesh`, a
        module wrapped at zero >= 1 over mesh["shard"]. Parameters are float32 on the CPU. All ranks take rank 0's
        parameters and buffers.
    inner_optimizer : Optimizer
        This rank's own optimizer. With `device_mesh`, the row's optimizer that sw.wrap returned.
    every : int
        H, at least 1: local steps between two exchanges of the same parameter.
    fragments : int
        In [1, every]: the number of parts of about equal size into which parameters are cut. Parts are exchanged at
        different steps.
    outer : callable
        Makes an optimizer from parameters; the default is SGD with Nesterov momentum, lr 0.7, momentum 0.9. With
        `device_mesh` it steps on one-dimensional slices and must be elementwise.
    wire : {"bf16", "int8", "float32"}
        The format in which changes of parameters travel.
    overlap : int
        In [0, every // fragments): an exchange runs on a thread and ends this many local steps after its begin.
    process_group : ProcessGroup, optional
        The group of a bare model; default: the default group.
    device_mesh : DeviceMesh, optional
        A mesh of two dimensions, (replicate, shard). A row takes inner steps together and averages its gradients as
        usual. Outer steps average each slice between its owners, one a row.
    timeout_s : float
        The deadline of each wait, for a bare model and between rows.

    Raises
    ------
    Error, ValueError, TypeError
        If the model is wrapped with zero >= 1 and there is no `device_mesh`, if ranks disagree about the arguments or
        one is out of range, or if another wrapper averages the model; on all ranks.

    Notes
    -----
    Let θ be the last common parameter and θ_r this rank's. At an exchange the outer optimizer steps on θ with the mean
    of θ - θ_r as its gradient, and θ_r is set to θ: the same bits on every rank. With `overlap`, θ_r is set to θ plus
    the change that the rank's own steps made since the start of the exchange. Ranks then differ until synchronise(),
    and only θ is bitwise equal.

    Cost: a copy of the parameters and the outer optimizer's state, with overlap also a copy of the largest fragment. On
    the wire, in `every` steps, 2 (W - 1) / W times the parameters in the wire type. With `device_mesh` the memory is
    that of this rank's slices, W is the number of rows, and an exchange costs the row two barriers and one publication;
    blocks of int8 are counted from each slice's start.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int,
        fragments: int = 1,
        outer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = _nesterov,
        wire: str = "bf16",
        overlap: int = 0,
        process_group: Any = None,
        device_mesh: Any = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.inner_optimizer, self.steps = inner_optimizer, 0
        self.every, self.wire, self.overlap = every, wire, overlap
        deadline_s = timeout_s if _is_timeout(timeout_s) else _TIMEOUT_S
        all_ranks, model_ranks = creating_ranks(model, process_group, device_mesh, deadline_s)
        description: list[list[str]] = []

        def describe() -> list[list[str]]:
            _check_arguments(inner_optimizer, every, fragments, wire, overlap, timeout_s)
            if device_mesh is None:
                self._held: WholeParameters = WholeParameters(model, process_group)
            elif process_group is None:
                self._held = SlicedParameters(model, inner_optimizer, device_mesh)
            else:
                raise ValueError("DiLoCo: process_group and device_mesh were both given; pass one of them")
            self._anchors = [tensor.detach().clone() for tensor in self._held.tensors]
            self.outer_optimizer = _made(outer, self._anchors)
            self._held.check_outer(self.outer_optimizer)
            plain = (int, float, str, tuple, type(None))  # the repr of other types may differ between ranks
            groups = self.outer_optimizer.param_groups
            groups = [{k: v for k, v in group.items() if isinstance(v, plain)} for group in groups]
            settings = {"every": every, "fragments": fragments, "wire": wire, "overlap": overlap}
            settings["outer"] = f"{type(self.outer_optimizer).__name__} {groups}"
            description.extend([name, str(value)] for name, value in settings.items())
            return [*description, *self._held.description()]

        together(
            model_ranks,
            lambda: verify(all_ranks.comm, describe, "DiLoCo"),
            "model under DiLoCo",
            lambda: description + self._held.description_over_mesh(wire),
        )
        group = self._held.begin(all_ranks)
        self._names, self._tensors = self._held.names, self._held.tensors
        for anchor, tensor in zip(self._anchors, self._tensors):
            anchor.copy_(tensor.detach())
        self._fragments = _cut(self._held.numels, fragments)
        self._sizes = [[self._tensors[i].numel() for i in part] for part in self._fragments]
        largest = max(map(sum, self._sizes), default=0)
        self._change = torch.empty(largest, dtype=torch.float32, device="cpu")
        self._then = torch.empty(largest if overlap else 0, dtype=torch.float32, device="cpu")
        self._exchange, self._codec = Exchange(group.comm), _CODECS[wire]()
        for k, sizes in enumerate(self._sizes):
            ends = itertools.accumulate(sizes)
            members = [(self._codec.add(size, 0, 0), end - size, size, True) for size, end in zip(sizes, ends)]
            self._codec.set_bucket(k, members)
        self._pending: tuple[int, int] | None = None  # a fragment in flight, and the step in which it ends

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's groups, for schedulers."""
        return self.inner_optimizer.param_groups

    @property
    def wire_bytes(self) -> int:
        """Return the bytes that this rank has sent so far."""
        return self._codec.sent_bytes

    @property
    def is_sliced(self) -> bool:
        """Return True on a mesh (parameters are this rank's slices) and for DTensors (they are its shards)."""
        return isinstance(self._held, SlicedParameters) or self._held.model_ranks is not None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the inner optimizer."""
        self.inner_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step and exchange the fragments that are due. Collective once every / fragments steps."""
        self._held.check_step()
        result = self.inner_optimizer.step(closure) if closure is not None else self.inner_optimizer.step()
        self.steps += 1
        if self._pending is not None and self._pending[1] == self.steps:
            self._end()
        count = len(self._fragments)
        for k in range(count):
            due = (k + 1) * self.every // count  # the last fragment is due at a multiple of `every`
            if (self.steps - due) % self.every == 0:
                self._begin(k)
                if not self.overlap:
                    self._end()
        return result

    def synchronise(self) -> None:
        """Exchange every fragment now. Afterwards all ranks have the same parameters. Collective."""
        self._held.check_step()
        if self._pending is not None:
            self._end()
        for k in range(len(self._fragments)):
            self._begin(k)
            self._end(is_common=True)

    @torch.no_grad()
    def _begin(self, k: int) -> None:
        """Start the exchange of fragment k's change."""
        for index, change, then in zip(self._fragments[k], self._parts(self._change, k), self._parts(self._then, k)):
            tensor = self._tensors[index].view(-1)
            torch.sub(self._anchors[index].view(-1), tensor, out=change)
            if self.overlap:
                then.copy_(tensor)
        address, numel = self._change.data_ptr(), sum(self._sizes[k])
        self._codec.begin(self._exchange, k, address, numel, "float32", 0, "changes under DiLoCo")
        self._pending = k, self.steps + self.overlap

    def _wait(self) -> tuple[int, int]:
        """Wait for the exchange in flight and return its fragment and end step. A failed exchange has ended too."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._exchange.wait()
        return pending

    @torch.no_grad()
    def _end(self, is_common: bool = False) -> None:
        """Apply the mean change. `is_common`: True if no local step was taken since the exchange began."""
        assert self._pending is not None
        k = self._pending[0]
        failure: Exception | None = None
        fragment = self._fragments[k]
        try:
            self._wait()
            self._check_finite(k)
        except Exception as error:
            failure = error
        with self._held.changing(failure):
            for index, change in zip(fragment, self._parts(self._change, k)):
                self._anchors[index].grad = change.view(self._anchors[index].shape)
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad(set_to_none=True)
            for index, then in zip(fragment, self._parts(self._then, k)):
                tensor, anchor = self._tensors[index], self._anchors[index]
                if self.overlap and not is_common:
                    tensor.sub_(then.view(tensor.shape)).add_(anchor)
                else:
                    tensor.copy_(anchor)

    def _check_finite(self, k: int) -> None:
        """Raise if fragment k's mean change is not finite; all ranks that averaged it have the same bits."""
        if not bool(self._change[: sum(self._sizes[k])].isfinite().all()):
            raise Error(
                f"DiLoCo: the change of the fragment of {self._names[self._fragments[k][0]]!r} is not finite on some rank "
                f"after {self.steps} steps: its parameters were not averaged"
            )

    def _parts(self, flat: torch.Tensor, k: int) -> list[torch.Tensor]:
        """Return the parts of `flat` of fragment k's parameters; an empty list if `flat` is empty."""
        total = sum(self._sizes[k])
        return list(flat[:total].split(self._sizes[k])) if flat.numel() else [flat] * len(self._sizes[k])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, since ranks differ between exchanges. The model saves the parameters.

        Waits for an exchange in flight, which ends once all ranks have begun it.
        """
        inner = self.inner_optimizer
        state = {
            "steps": self.steps,
            "inner": inner.own_slices() if isinstance(inner, ShardedOptimizer) else inner.state_dict(),
            "outer": self.outer_optimizer.state_dict(),
            "anchors": {name: anchor.clone() for name, anchor in zip(self._names, self._anchors)},
        }
        if self.is_sliced:
            state["layout"] = self._held.layout()
        if self._pending is not None:
            self._pending = k, ends = self._wait()
            total = sum(self._sizes[k])
            tensors = {"change": self._change[:total].clone(), "then": self._then[:total].clone()}
            state["pending"] = {"fragment": k, "ends": ends, **tensors}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that state_dict() returned on this rank. Raise Error if it belongs to another model."""
        for key in ("steps", "inner", "outer", "anchors"):
            if key not in state:
                raise Error(f"DiLoCo: load_state_dict: the state must come from state_dict(): it has no {key!r}")
        anchors, pending = state["anchors"], state.get("pending")
        if state.get("layout") != self._held.layout():
            raise Error(
                "DiLoCo: load_state_dict: the state has other slices than this rank's: load each rank's own state, on a mesh "
                "with rows of the same size and at the same bucket size"
            )
        other = "DiLoCo: load_state_dict: the state belongs to another model"
        for name, anchor in zip(self._names, self._anchors):
            if name not in anchors or anchors[name].shape != anchor.shape:
                raise Error(f"{other}: it has no {name!r} of this shape")
        for name in anchors:
            if name not in self._names:
                raise Error(f"{other}: this one does not train {name!r}")
        if pending is not None:
            k, total = pending["fragment"], pending["change"].numel()
            if not self.overlap or k >= len(self._fragments) or total != sum(self._sizes[k]):
                raise Error(
                    f"DiLoCo: load_state_dict: fragment {k} of {total} elements was in flight, which needs the same fragments and "
                    f"overlap > 0; this trainer has {len(self._fragments)} fragments and overlap={self.overlap}"
                )
        if self._pending is not None:
            self._wait()  # ends the exchange of the abandoned run
        self.inner_optimizer.load_state_dict(state["inner"])
        self.outer_optimizer.load_state_dict(state["outer"])
        self.steps = int(state["steps"])
        for name, anchor in zip(self._names, self._anchors):
            anchor.copy_(anchors[name])
        if pending is not None:
            self._change[:total].copy_(pending["change"])
            self._then[:total].copy_(pending["then"])
            self._pending = pending["fragment"], int(pending["ends"])


def _is_timeout(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e9


def _check_arguments(inner_optimizer: Any, every: Any, fragments: Any, wire: Any, overlap: Any, timeout_s: Any) -> None:
    if not hasattr(inner_optimizer, "step") or not hasattr(inner_optimizer, "param_groups"):
        raise TypeError(f"DiLoCo: inner_optimizer must be an optimizer, got {type(inner_optimizer).__name__}")
    count(1, 2**31, f"an integer in [1, {2**31}]")("DiLoCo: every", every)
    count(1, every, f"an integer in [1, {every}]")("DiLoCo: fragments", fragments)
    most = every // fragments
    in_time = "every // fragments, so that one exchange ends before the next begins"
    count(0, most - 1, f"an integer in [0, {most}), {in_time}")("DiLoCo: overlap", overlap)
    among(*_CODECS)("DiLoCo: wire", wire)
    if not _is_timeout(timeout_s):
        raise ValueError(f"DiLoCo: timeout_s must be above 0 and at most 1e+09 seconds, got {timeout_s!r}")


def _made(outer: Any, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    if not callable(outer):
        raise TypeError(f"DiLoCo: outer must be a callable that returns an optimizer, got {outer!r}")
    made = outer(anchors)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"DiLoCo: outer must return a torch.optim.Optimizer, got {type(made).__name__}")
    return made


def _cut(sizes: list[int], count: int) -> list[list[int]]:
    """Cut indices, in order, into at most `count` parts of about equal size."""
    parts: list[list[int]] = [[] for _ in range(count)]
    total, before = sum(sizes) or 1, 0
    for index, size in enumerate(sizes):
        parts[min((before + size // 2) * count // total, count - 1)].append(index)
        before += size
    return [part for part in parts if part]
