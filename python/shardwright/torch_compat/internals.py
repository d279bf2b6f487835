"""Private names of torch that have no public form, each at one place. Without one of them this module does not import."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import operator
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten as flatten
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._pytree import tree_unflatten as unflatten

#: names of torch that other files take from here
__all__ = ["BatchNorm", "JoinConfig", "TorchDispatchMode", "flatten", "tree_leaves", "tree_map", "unflatten"]

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

#: the `__torch_function__` of a class whose operations reach `__torch_dispatch__` only
no_torch_function: Any = torch._C._disabled_torch_function_impl
#: a context in which subclasses' `__torch_function__` is not called
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
#: the class in C with the attributes of every tensor
TensorBase: Any = torch._C.TensorBase


def without_memory_of(
    kind: type[_Tensor], like: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None
) -> _Tensor:
    """Return a tensor of class `kind` with the shape and strides of `like` and no memory."""
    options: Any = {"strides": like.stride(), "dtype": dtype or like.dtype, "device": device or like.device}
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, **options)


def subclassed(kind: type[_Tensor], tensor: torch.Tensor, requires_grad: bool = False) -> _Tensor:
    """Return a tensor of class `kind` over the memory of `tensor`."""
    return torch.Tensor._make_subclass(kind, tensor, requires_grad)


def written_by(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation changes by its schema, those of lists one by one."""
    arguments = getattr(getattr(operation, "_schema", None), "arguments", ())
    writes = [(n, each.name) for n, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write]
    return tree_leaves([args[n] if n < len(args) else kwargs.get(name) for n, name in writes])


def name_of_op(operation: Any) -> str:
    """Return the name of an operation that a mode sees, such as "aten::cat"."""
    return str(operation._schema.name)


def is_view_op(operation: Any) -> bool:
    """Return True for an operation whose results are views of its arguments by its schema."""
    return any(each.alias_info and not each.alias_info.is_write for each in operation._schema.returns)


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def group_timeout(group: Any) -> timedelta:
    """Return the default timeout of torch's `group` of Gloo."""
    found: timedelta = cpu_backend(group).options._timeout
    return found


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set the default timeout of torch's `group`."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def end_groups() -> None:
    """Destroy torch's groups, if there are any, and take back the hook that names this rank before a traceback."""
    if dist.is_initialized():
        dist.destroy_process_group()
    hook: Any = sys.excepthook
    if getattr(hook, "__qualname__", "") == "init_process_group.<locals>._distributed_excepthook":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or ()))
        sys.excepthook = cells["old_hook"].cell_contents  # else each group adds one


def cpu_backend(group: Any) -> Any:
    """Return the backend of torch's `group` for tensors on the CPU."""
    return group._get_backend(torch.device("cpu"))


def make_gloo(store: Any, rank: int, count: int, timeout: timedelta, connects_late: bool = False) -> Any:
    """Make a Gloo backend, without torch's dispatch, that connects at first use if asked and this torch can."""
    if not connects_late or os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") != "TCP":
        return dist.ProcessGroupGloo(store, rank, count, timeout)
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs have no _Options
    options = gloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        options._devices = [
            dist.ProcessGroupGloo.create_device(interface=name, lazy_init=True) for name in interfaces
        ] or [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    except TypeError:  # before torch 2.7
        return dist.ProcessGroupGloo(store, rank, count, timeout)
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, count, options)


def original_of(module: Any) -> Any:
    """Return the module inside torch.compile(module); any other unchanged."""
    return getattr(module, "_orig_mod", module)


#: returns a module's tables of hooks before and after its forward; runs no Python code
forward_hooks: Callable[[torch.nn.Module], tuple[Any, Any]] = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks"
)


def buffers_of_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that its state dict holds."""
    hidden = module._non_persistent_buffers_set
    return {name: each for name, each in module._buffers.items() if each is not None and name not in hidden}


def has_weights_beside(module: torch.nn.Module) -> bool:
    """Return True for a recurrent layer, which keeps a list of weights beside its parameters."""
    return hasattr(module, "_flat_weights_names")


def refresh_weights(module: torch.nn.Module) -> None:
    """Refresh the list of weights that recurrent layers keep beside their parameters."""
    names = getattr(module, "_flat_weights_names", None)
    if names is not None:
        module._flat_weights = [getattr(module, name, None) for name in names]  # type: ignore[assignment]


@contextlib.contextmanager
def changing_weights(module: torch.nn.Module) -> Iterator[None]:
    """Without the weak references that recurrent layers keep beside their parameters; they are made anew afterwards."""
    layers = [each for each in module.modules() if isinstance(each, torch.nn.RNNBase)]
    for each in layers:
        each._flat_weight_refs = []
    try:
        yield
    finally:
        for each in layers:
            each._init_flat_weights()


def reset_of(module: torch.nn.Module) -> Any:
    """Return the method that initialises a module's parameters, or None; MultiheadAttention's has another name."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def initialiser_above(module: torch.nn.Module, name: str) -> Any:
    """Return transformers' `_init_weights` of a submodule or of the nearest module around it that has it, or None."""
    parts = name.split(".") if name else []
    for count in range(len(parts), -1, -1):
        found = getattr(module.get_submodule(".".join(parts[:count])), "_init_weights", None)
        if callable(found):
            return found
    return None


def swap_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors' memory, devices, classes and attributes. RuntimeError: `tensor` has hooks or weak references.

    torch's swap leaves the table of hooks, to which the new memory's node would not listen: it must not be there.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, name):
            raise RuntimeError("it has hooks")
        if getattr(tensor, name) is not None:
            setattr(tensor, name, None)
    torch.utils.swap_tensors(tensor, other)


def ignored_by_transformers(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the patterns of stored names that a transformers model ignores."""
    return tuple(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())


def tied_by_transformers(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the patterns of names that a transformers model makes from others as it loads."""
    return tuple(getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ())


def unstored_by_transformers(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names that a transformers model does not store."""
    return tuple(getattr(module, "_keys_to_ignore_on_save", None) or ())


def conversions_of_transformers(module: torch.nn.Module) -> dict[str, str]:
    """Return the patterns by which transformers before version 5 renames what it loads."""
    return dict(getattr(module, "_checkpoint_conversion_mapping", None) or {})


def stores_adapters_alone(module: torch.nn.Module) -> bool:
    """Return True for a transformers model of which save_pretrained() writes the adapters."""
    return bool(getattr(module, "_hf_peft_config_loaded", False))


def ignored_by_torchs_ddp(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names that a program told torch's DistributedDataParallel to leave alone."""
    return tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def set_low_precision(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Set the attributes that torch's own code reads of a parameter under mixed_precision=; the copy has no memory."""
    parameter._fp_param = parameter.data  # type: ignore[attr-defined]
    parameter._mp_param = parameter.data.new_empty(0, dtype=dtype)  # type: ignore[attr-defined]


def is_hsdp(group: Any) -> bool:
    """Return True if FSDP2 sharded a parameter group over two dimensions."""
    return bool(getattr(group, "_is_hsdp", False))


@functools.cache
def _of_fsdp2(name: str) -> Any:
    """Return a name of torch's FSDP2; None if this torch has none."""
    for place in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):  # the latter before torch 2.6
        found = getattr(importlib.import_module(place), name, None) if importlib.util.find_spec(place) else None
        if found is not None:
            return found
    return None


def fsdp_module_of_torch() -> tuple[type, ...]:
    """Return torch's class of modules that fully_shard was called on, which programs ask for; none if this torch has none."""
    found = _of_fsdp2("FSDPModule")
    return () if found is None else (found,)


def is_profiling() -> bool:
    """Return True while a profiler of torch's is on."""
    return bool(torch.autograd._profiler_enabled())


def offload_policy_of_torch() -> tuple[type, ...]:
    """Return torch's class of FSDP2's offload policies; none if this torch has none."""
    found = _of_fsdp2("OffloadPolicy")
    return () if found is None else (found,)


def fsdp_policy(**fields: Any) -> Any:
    """Return torch's MixedPrecisionPolicy, which extensions of tensors read; None if this torch has none."""
    found = _of_fsdp2("MixedPrecisionPolicy")
    return None if found is None else found(**fields)


def fsdp2_groups(module: torch.nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of this module itself."""
    get = getattr(module, "_get_fsdp_state", None)
    state = None if get is None else get()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        found = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]
