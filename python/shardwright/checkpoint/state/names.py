"""Names of a model's tensors without wrappers, and safetensors' names of their dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..._engine import CheckpointError
from ...formats.lazy import DTYPES
from ...layout.memory import address_of, has_memory, without_memory
from ...parameters.sharded_parameter import plain_part
from ...torch_compat.dtensor import is_dtensor
from ...torch_compat.internals import buffers_of_state
from ..slices import Sliced, check_placements

#: children of wrappers that names in a checkpoint leave out
_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclasses.dataclass
class ModelTensors:
    """A model's tensors by their names without wrappers, in registration order: each once, under its first name."""

    parameters: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    #: the persistent ones
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    #: additional name of a tensor -> its name in `parameters` or `buffers`
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    #: modules with get_extra_state()
    extras: dict[str, torch.nn.Module] = dataclasses.field(default_factory=dict)

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}


def check_wrappers(model: torch.nn.Module) -> None:
    """Raise ValueError for FullyShardedDataParallel, whose parameters have no names of their own."""
    for name, module in model.named_modules():
        kinds = [kind for kind in type(module).__mro__ if kind.__name__ == "FullyShardedDataParallel"]
        if any(kind.__module__.startswith("torch.distributed.fsdp") for kind in kinds):
            raise ValueError(
                f"model is a FullyShardedDataParallel{f' at {name!r}' if name else ''}, whose flat parameters have no names: use torch's "
                "fully_shard (FSDP2), which sw.save() and a Checkpointer accept, or save its state_dict() through "
                "torch.distributed.checkpoint with sw.checkpoint.StorageWriter"
            )


def model_tensors(model: torch.nn.Module) -> ModelTensors:
    """Return the tensors of `model` by their names without wrappers. Raise CheckpointError for one that cannot be saved."""
    found, modules = ModelTensors(), list(walk(model, ""))
    first_names: dict[Any, str] = {}

    def add(table: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        check_savable(name, tensor)
        first = first_names.setdefault(_identity(tensor), name)
        if first != name:
            found.tied[name] = first
        else:
            table[name] = tensor

    for place, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                add(found.parameters, place + name, parameter)
    for place, module in modules:
        for name, buffer in buffers_of_state(module).items():
            add(found.buffers, place + name, buffer)
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            found.extras.setdefault(place + "_extra_state", module)
    return found


def _identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors with the same memory, dtype, shape and strides."""
    if is_dtensor(tensor):
        local = plain_part(tensor)
        return (type(tensor), *(_identity(local) if local.numel() else (id(tensor),)))
    if not address_of(tensor):
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def walk(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (prefix, module) of every module. A wrapper adds nothing to the prefix."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is None:
            continue
        hidden = name in _TRANSPARENT or (name == "module" and isinstance(module, (TorchDDP, DataParallel)))
        yield from walk(child, prefix if hidden else f"{prefix}{name}.")


def check_savable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError if `tensor` has no plain bytes, or `name` has a zero byte."""
    if "\0" in name:
        raise CheckpointError(f"tensor {name!r} has a zero byte in its name, which no checkpoint can hold")
    if is_dtensor(tensor):
        check_placements(name, tensor)
        tensor = plain_part(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"tensor '{name}' is not initialised: run the model once before it is saved or loaded")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"tensor '{name}' is sparse or quantized: safetensors stores dense tensors only")
    if tensor.is_meta:
        raise CheckpointError(f"tensor '{name}' is on the meta device and has no values")
    if not has_memory(tensor):
        raise CheckpointError(
            f"tensor '{name}' is {without_memory(tensor)}. A checkpoint holds plain tensors, such as its dequantised values"
        )
    dtype_name(name, tensor.dtype)


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype; for a complex dtype, that of its real view."""
    if dtype not in DTYPES:
        raise CheckpointError(f"tensor '{name}' has dtype {dtype}, which safetensors cannot name")
    return DTYPES[dtype]


def stored_shape(tensor: torch.Tensor | Sliced) -> list[int]:
    """Return the shape in the file: a complex tensor has a last dimension of 2."""
    return [*tensor.shape, 2] if tensor.is_complex() else list(tensor.shape)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor with the values of `tensor`, of any strides: a view of its memory where possible."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real, row-major CPU tensor with the values of `tensor`: a view of its memory where possible."""
    found = real(tensor).cpu().contiguous()
    if not has_memory(found):
        raise CheckpointError(f"{without_memory(found)}; it has no bytes to read or write")
    return found
