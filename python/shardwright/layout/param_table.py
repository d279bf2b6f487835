"""The table of a wrapped module's parameters and buffers.

Ranks that disagree about names, order, shapes, dtypes or strides would silently average unrelated values, so they
compare description() first (comm/agreement.py: verify).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._engine import Error
from .._version import __version__
from ..torch_compat import cuda
from ..torch_compat.dtensor import held_tensor, is_dtensor
from .local_parameters import SHARDED, LocalParameter, module_parameter
from .memory import has_memory, without_memory
from .model_mesh import ModelMesh, find_model_mesh, placed
from .views import dense_strides, dtype_name


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ParameterTable:
    """The trained state of a module: parameters in registration order, tied ones once, and buffers, by bare names.

    A LocalParameter stands for a DTensor in `parameters`. `sparse`: numbers of parameters that have no place in buckets.
    """

    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    buffers: dict[str, torch.Tensor]
    sparse: frozenset[int] = frozenset()
    module_parameters: tuple[torch.nn.Parameter, ...] = ()
    model_mesh: ModelMesh | None = None
    #: the GPU on which the module computes while its parameters are on the CPU
    device: torch.device | None = None

    @functools.cached_property
    def is_by_rows(self) -> bool:
        """Return True if the parameters are the whole ones of fully_shard, cut by rows."""
        return all(getattr(each, SHARDED, None) is not None for each in self.module_parameters)

    @functools.cached_property
    def sharded_kinds(self) -> list[tuple[bool, ...]]:
        """Return for each parameter the dimensions of the model mesh that shard it."""
        if self.model_mesh is None:
            return [()] * len(self.parameters)
        return [self.model_mesh.sharded(p) for p in self.module_parameters]

    @property
    def is_on_gpu(self) -> bool:
        """Return True if all tensors are on a GPU, or are going there; they share one device."""
        return self.device is not None or bool(cuda.runtime.holds(self.parameters[0]))

    @functools.cached_property
    def like(self) -> torch.Tensor:
        """Return a tensor on the device of the module, whose values must not be read."""
        found: torch.Tensor = self.parameters[0] if self.device is None else cuda.runtime.empty(self.device)
        return found

    @classmethod
    def of(
        cls, module: torch.nn.Module, ignored: frozenset[str], ranks: Sequence[int] = (), *, may_be_frozen: bool = False
    ) -> ParameterTable:
        """Make the table; raise for tensors that cannot take part. `ranks`: global numbers of the training ranks."""
        own = [(name, p) for name, p in module.named_parameters() if name not in ignored]
        mesh = find_model_mesh(own, ranks)
        pairs = [(name, LocalParameter.of(p) if is_dtensor(p) else p) for name, p in own]
        buffers = {
            name: held_tensor(b) if is_dtensor(b) else b for name, b in module.named_buffers() if name not in ignored
        }
        for name, parameter in pairs:
            _check_kind("parameter", name, parameter)
        for name, buffer in buffers.items():
            _check_kind("buffer", name, buffer)
        if not (may_be_frozen and pairs) and not any(p.requires_grad for _, p in pairs):
            raise Error(
                "no parameter of this module requires a gradient: there is nothing to average, use the module as it is"
            )
        _check_one_device([*pairs, *buffers.items()])
        names, parameters = tuple(name for name, _ in pairs), tuple(p for _, p in pairs)
        return cls(names, parameters, buffers, module_parameters=tuple(p for _, p in own), model_mesh=mesh)

    def check_apart(self) -> None:
        """Raise Error if a parameter shares elements with another tensor: in memory of its own it would no longer."""
        if self.is_by_rows:
            return  # made for the table, with memory of their own to come
        tensors: list[tuple[str, torch.Tensor]] = [*zip(self.names, self.parameters), *self.buffers.items()]
        spans = sorted((*_span(tensor), at) for at, (_, tensor) in enumerate(tensors) if tensor.numel())
        for position, (begin, end, at) in enumerate(spans):
            for other_begin, _, other in spans[position + 1 :]:
                if other_begin >= end:
                    break
                if min(at, other) < len(self.names) and _overlap(tensors[at][1], tensors[other][1]):
                    one, two = tensors[min(at, other)][0], tensors[max(at, other)][0]
                    raise Error(
                        f"parameter {one!r} and {two!r} are two tensors over the same memory, which at zero >= 1 would be two: tie them as one "
                        "Parameter, or give one of them a clone"
                    )

    def rows(self) -> list[tuple[Any, ...]]:
        """Return (name, numel, dtype, requires_grad[, 0, elements of a row]) of each parameter, the input of the reducer."""
        flat = [
            (n, p.numel(), dtype_name(p.dtype), p.requires_grad and i not in self.sparse)
            for i, (n, p) in enumerate(zip(self.names, self.parameters))
        ]
        if not self.is_by_rows:
            return list(flat)
        return [(*each, 0, getattr(p, SHARDED).row_numel) for each, p in zip(flat, self.module_parameters)]

    def description(self, settings: Mapping[str, Any]) -> list[list[str]]:
        """Return [item, value] lines that must be equal on every rank, the most informative first."""
        lines = [["shardwright", __version__]]
        lines += [
            [f"parameter {i}", _sentence(n, p, with_gradient=True)]
            for i, (n, p) in enumerate(zip(self.names, self.parameters))
        ]
        lines += [
            [f"buffer {i}", _sentence(n, b, with_gradient=False)] for i, (n, b) in enumerate(self.buffers.items())
        ]
        return lines + [[f"option {name}", repr(value)] for name, value in sorted(settings.items())]


def _check_kind(what: str, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)):
        raise Error(
            f"{what} {name!r} has no shape yet: run one forward before wrapping, so that lazy modules are initialised"
        )
    if tensor.is_meta:
        raise Error(
            f"{what} {name!r} is on the meta device: pass init= or weights= to sw.wrap, with an optimizer that may be made before, or call "
            "sw.materialize(module) and make the optimizer after that"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"{what} {name!r} is on {tensor.device}: only CPU and CUDA tensors are supported, move the module with .cpu() or .cuda()"
        )
    gradient_dtype = getattr(tensor, "grad_dtype", None)
    if gradient_dtype not in (None, tensor.dtype):
        raise NotImplementedError(
            f"{what} {name!r} is {tensor.dtype} with grad_dtype={gradient_dtype}: a gradient of another dtype is not supported yet; "
            "precision= keeps float32 parameters and computes in low precision"
        )
    if tensor.layout is not torch.strided:
        raise Error(f"{what} {name!r} has layout {tensor.layout}: only strided tensors can be wrapped")
    if not has_memory(tensor):
        raise Error(
            f"{what} {name!r} is {without_memory(tensor)}. Name it in ignored_params, which leaves it as it is on each "
            "rank, or wrap a module without it"
        )


def _check_one_device(pairs: list[tuple[str, torch.Tensor]]) -> None:
    first_name, first = pairs[0]
    for name, tensor in pairs:
        if tensor.device != first.device:
            raise Error(
                f"{first_name!r} is on {first.device} and {name!r} on {tensor.device}: a wrapped module must be on one device, move "
                f"it with .to({str(first.device if first.device.type != 'cpu' else tensor.device)!r}), or list the tensors to "
                "leave alone in ignored_params"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range [begin, end) that contains a tensor's elements."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (extent + 1) * tensor.element_size()


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors with overlapping spans share a byte; one may lie in gaps of the other."""
    first = min(a.data_ptr(), b.data_ptr())
    touched = torch.zeros(max(_span(a)[1], _span(b)[1]) - first, dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        item = tensor.element_size()
        strides = [stride * item for stride in tensor.stride()]
        return touched.as_strided([*tensor.shape, item], [*strides, 1], tensor.data_ptr() - first)

    bytes_of(a).fill_(True)
    return bool(bytes_of(b).any())


def _sentence(name: str, tensor: torch.Tensor, *, with_gradient: bool) -> str:
    text = f"{name!r} {dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    if not with_gradient:
        return text
    strides = dense_strides(tensor)
    if strides is not None and not tensor.is_contiguous():
        text += f" strides {strides}"
    text += placed(module_parameter(tensor))
    return text if tensor.requires_grad else text + " frozen"
