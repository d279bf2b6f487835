"""The tensors that DiLoCo averages, and the ranks that average them. docs/design/compress.md has the reasons.

Without a mesh, all ranks average whole parameters. On a mesh (replicate, shard), the ranks of a column own the same
slices and average them, and a row has whole parameters again once all of its ranks have stepped on their slices:

    mesh          inner steps           outer steps
      0 1         0 and 1 as one        0 and 2, on slice 0
      2 3         2 and 3 as one        1 and 3, on slice 1
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import Error
from ..comm.model_ranks import ModelRanks
from ..comm.process_group import HostGroup, host_group, resolve_group
from ..layout.local_parameters import local_of
from ..parallel.ddp import DistributedDataParallel
from ..parallel.engine import Engine, engine_of
from ..parallel.fully_shard import FSDPModule
from ..torch_compat.dtensor import is_dtensor
from .rules import is_elementwise, name_of

#: seconds that a row waits for a column's result beyond the column's own deadline
_GRACE_S = 2.0


class WholeParameters:
    """The parameters of a bare model, or of one wrapped at zero=0: inner steps change them on each rank separately.

    `tensors`: the contiguous targets of the outer optimizer, by `names`. `numels`: elements of each whole parameter.
    """

    def __init__(self, model: Any, process_group: Any) -> None:
        self._model = model
        self.module = _module_to_train(model, process_group)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        is_wrapped = isinstance(model, DistributedDataParallel)
        self.model_ranks: ModelRanks | None = model._engine.replica.model_ranks if is_wrapped else None
        for name, parameter in trained.items():
            if is_dtensor(parameter) and self.model_ranks is None:
                raise ValueError(
                    f"DiLoCo: parameter {name!r} is a DTensor, whose ranks hold other shards and do not average: wrap the model over the "
                    'data-parallel dimension first, sw.wrap(model, device_mesh=mesh["dp"])'
                )
        self._hold(trained, map(local_of, trained.values()))

    def _hold(self, trained: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
        self.names, self.numels = list(trained), [parameter.numel() for parameter in trained.values()]
        self.tensors = list(tensors)
        for (name, parameter), tensor in zip(trained.items(), self.tensors):
            dtype, device = parameter.dtype, parameter.device.type
            if dtype != torch.float32 or device != "cpu" or not tensor.is_contiguous():
                raise TypeError(
                    f"DiLoCo: parameter {name!r} must be a contiguous float32 tensor on the CPU, not {dtype} on {device}"
                )
        for name, buffer in self.module.named_buffers():
            if buffer.device.type != "cpu":
                raise TypeError(f"DiLoCo: buffer {name!r} must be on the CPU, not on {buffer.device.type}")

    def description(self) -> list[list[str]]:
        """Return the facts that must be equal on all ranks."""
        return _described([*zip(self.names, self.tensors), *self.module.named_buffers()])

    def description_over_mesh(self, wire: str) -> list[list[str]]:
        """Return the facts that must be equal on ranks with other shards."""
        return [["parameters", ", ".join(self.names)]]

    def layout(self) -> list[list[int]] | None:
        """Return [begin, end) of this rank's elements of each parameter, in memory order; None: all."""
        return None

    def check_outer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if the outer optimizer cannot step on `tensors`, parts of parameters."""
        if not is_elementwise(optimizer) and (self.layout() is not None or self.model_ranks is not None):
            parts = "shards" if self.layout() is None else "slices"
            raise ValueError(
                f"DiLoCo: outer returned a {name_of(optimizer)}, which is not known to be elementwise, but steps on {parts} here: use "
                "one of torch's elementwise optimizers or of sw.optim"
            )

    def begin(self, all_ranks: HostGroup) -> HostGroup:
        """Broadcast rank 0's values to `all_ranks` and return the ranks that average. Collective."""
        if isinstance(self._model, DistributedDataParallel):
            self._model.set_requires_gradient_sync(False)
        all_ranks.broadcast([*self.tensors, *self.module.buffers()], 0, "parameters and buffers under DiLoCo")
        return all_ranks

    def check_step(self) -> None:
        """Raise an error if no step can be taken; the same one on all ranks of the step."""

    @contextlib.contextmanager
    def changing(self, failure: Exception | None) -> Iterator[None]:
        """Inside, write to `tensors`. First agree: raise a failure on every rank whose parameters depend on it."""
        if self.model_ranks is not None:
            self.model_ranks.agree([], f"{type(self.module).__name__} under DiLoCo", failure)
        elif failure is not None:
            raise failure
        yield


class SlicedParameters(WholeParameters):
    """The slices of a model wrapped at zero >= 1 over the rows of a mesh (replicate, shard), with its row's optimizer."""

    def __init__(self, model: Any, inner_optimizer: Any, mesh: Any) -> None:
        engine = _engine_over_a_row(model, mesh)
        self.module = engine.module
        self._mesh, self._replica = mesh, engine.replica
        if getattr(inner_optimizer, "replica", None) is not self._replica:
            raise ValueError(
                f"DiLoCo: inner_optimizer must be the optimizer that sw.wrap(model, optimizer, zero={engine.options.zero}, ...) returned, got "
                f"{type(inner_optimizer).__name__}"
            )
        _check_no_groups(engine)
        self.model_ranks = self._replica.model_ranks
        table = self._replica.table
        indices = {id(parameter): index for index, parameter in enumerate(table.module_parameters)}
        named = self.module.named_parameters()
        trained = {name: p for name, p in named if p.requires_grad and id(p) in indices}
        self._parameters = list(trained.values())
        self._indices = [indices[id(parameter)] for parameter in self._parameters]
        pieces = map(self._replica.parameters().slice, self._indices)
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        self._hold(trained, (none.clone() if piece is None else piece for piece in pieces))

    def description(self) -> list[list[str]]:
        ranks = range(self._replica.group.world_size)
        runs = [" ".join(str(self._run(index, rank)) for index in self._indices) for rank in ranks]
        slices = [["slices", f"{number}: {row}"] for number, row in enumerate(runs)]
        tensors = [*zip(self.names, self._parameters), *self.module.named_buffers()]
        return [["zero", str(self._replica.zero)], *_described(tensors), *slices]

    def description_over_mesh(self, wire: str) -> list[list[str]]:
        runs, mesh = [], self._replica.table.model_mesh
        if wire == "int8":  # blocks begin at slices: other slices would give equal parameters other values
            for name, parameter, run in zip(self.names, self._parameters, self.layout() or ()):
                if mesh is None or not any(mesh.sharded(parameter)):
                    runs.append([f"wire='int8' on the slice of {name!r}", str(run)])
        return [*super().description_over_mesh(wire), *runs]

    def layout(self) -> list[list[int]] | None:
        return [list(self._run(index, self._replica.group.rank)) for index in self._indices]

    def _run(self, index: int, rank: int) -> tuple[int, int]:
        return self._replica.parameters().run(index, rank)

    def begin(self, all_ranks: HostGroup) -> HostGroup:
        all_ranks.broadcast(list(self.module.buffers()), 0, "buffers under DiLoCo")
        column = host_group(self._mesh.get_group(0), all_ranks.comm.timeout_s)
        values = [tensor.clone() for tensor in self.tensors]  # ranks of the row may still read the shared memory
        failure: Exception | None = None
        try:
            column.broadcast(values, 0, "slices of parameters under DiLoCo")
        except Exception as error:
            failure = error
        with self.changing(failure):
            for tensor, value in zip(self.tensors, values):
                tensor.copy_(value)
        return column

    def check_step(self) -> None:
        if self._replica.retired:
            raise Error("DiLoCo: the model has been wrapped again: create a DiLoCo of the newer wrapper and optimizer")
        if self._replica.in_sliced_join:
            raise Error(
                "DiLoCo over a mesh cannot step inside join(): ranks that ran out of inputs take no part in outer steps; give the "
                "ranks of a row the same number of inputs"
            )

    @contextlib.contextmanager
    def changing(self, failure: Exception | None) -> Iterator[None]:
        """Inside, write to `tensors`; then publish them. One rank's failure is raised on all ranks of the row."""
        access = self._replica.access
        with access, contextlib.ExitStack() as agreed:
            try:
                agreed.enter_context(super().changing(self._failure_in_row(failure)))
            except Exception:
                access.refuse_change(self._replica.group.comm)
                raise
            with access.writing():  # the write guard accepts the outer step's writes
                yield
                self._replica.parameters().publish()
                access.count_writes(self._parameters)

    def _failure_in_row(self, failure: Exception | None) -> Exception | None:
        """Return this rank's failure, or an error with another's. A barrier of the row."""
        comm = self._replica.group.comm
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        before_s = comm.timeout_s
        comm.timeout_s = before_s + _GRACE_S  # a column's wait, with its better message, ends first
        try:
            replies = [each.decode() for each in comm.all_gather_bytes(text.encode(), "news of DiLoCo's exchange")]
        finally:
            comm.timeout_s = before_s
        other = next((rank for rank, each in enumerate(replies) if each), None)
        if failure is None and other is not None:
            return Error(f"DiLoCo: rank {other} of this replica could not exchange its slices: {replies[other]}")
        return failure


def creating_ranks(
    model: Any, process_group: Any, device_mesh: Any, timeout_s: float
) -> tuple[HostGroup, ModelRanks | None]:
    """Return all ranks that create a DiLoCo, and those with other shards of the model. They exchange errors before its
    arguments are trusted.
    """
    engine = engine_of(model, make=False)
    replica = engine.made[0] if engine is not None and engine.made else None
    model_ranks = None if replica is None else replica.model_ranks
    if device_mesh is not None:
        fits = getattr(device_mesh, "ndim", 0) == 2 and dist.get_rank() in device_mesh.mesh.flatten().tolist()
        return host_group(resolve_group(None, device_mesh if fits else None), timeout_s), model_ranks
    if replica is not None and isinstance(model, DistributedDataParallel):
        return replica.group, model_ranks
    return host_group(resolve_group(process_group, None), timeout_s), model_ranks


def _module_to_train(model: Any, process_group: Any) -> torch.nn.Module:
    """Return the bare module, and make sure that no wrapper averages its gradients from now on."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"DiLoCo: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, FSDPModule):
        raise Error(_over_slices(3))
    if not isinstance(model, TorchDDP):
        return model
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "DiLoCo: torch's DistributedDataParallel averages the gradients of every step: pass the module itself"
        )
    if process_group is not None:
        raise ValueError("DiLoCo: process_group is the wrapped model's own: leave it None")
    if model._comm_hooks:
        raise ValueError(
            "DiLoCo: the model has a compressor or a communication hook, which would never run: use `wire` instead"
        )
    if model._engine.options.zero:
        raise Error(_over_slices(model._engine.options.zero))
    if model._engine.options.step_in_backward:
        raise Error(
            "DiLoCo: step_in_backward=True averages the gradients of every step: leave it out between all ranks"
        )
    _check_no_groups(model._engine)
    return model.module


def _over_slices(zero: int) -> str:
    return (
        f"DiLoCo cannot run at zero={zero} between all ranks: ranks whose parameters differ between exchanges cannot share slices "
        "of one optimizer state; wrap with zero=0, or over mesh['shard'] and pass device_mesh=mesh, of dimensions (replicate, shard)"
    )


def _engine_over_a_row(model: Any, mesh: Any) -> Engine:
    """Return the engine of `model`, whose ranks must be this rank's row of `mesh`."""
    if getattr(mesh, "ndim", 0) != 2:
        raise ValueError(
            f"DiLoCo: device_mesh must be a DeviceMesh of two dimensions, (replicate, shard), got {mesh!r}"
        )
    rows = mesh.mesh.tolist()
    row = next((each for each in rows if dist.get_rank() in each), None)
    if row is None:
        raise ValueError(f"DiLoCo: this rank, {dist.get_rank()}, is not part of the device_mesh given, {rows}")
    if len({tuple(sorted(range(len(each)), key=each.__getitem__)) for each in rows}) > 1:
        raise ValueError(f"DiLoCo: device_mesh {rows} has columns of different slices: order all of its rows equally")
    engine = engine_of(model)
    if engine is None or not engine.options.zero:
        got = type(model).__name__ if engine is None else "one at zero=0"
        raise ValueError(
            "DiLoCo: with device_mesh the model must be wrapped with zero >= 1, or fully sharded, over mesh['shard'], got "
            f"{got}; zero=0 needs no mesh"
        )
    group = engine.process_group
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    if sorted(ranks) != sorted(row):
        raise ValueError(
            f"DiLoCo: the model is wrapped over ranks {sorted(ranks)}, but this rank's row of device_mesh is {row}: wrap it with "
            "device_mesh=mesh['shard'], so that only the row shares inner steps"
        )
    return engine


def _check_no_groups(engine: Engine) -> None:
    if len(engine.replicas) > 1:  # raises if a later wrapper has replaced this one
        raise NotImplementedError(
            "DiLoCo does not support a module with groups=: its outer steps average over one group of replicas"
        )


def _described(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    return [[name, f"{tuple(tensor.shape)} {tensor.dtype}"] for name, tensor in tensors]
