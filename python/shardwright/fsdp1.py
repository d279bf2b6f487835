"""FullyShardedDataParallel: the names of torch's FSDP1 over sw.fully_shard.

    from shardwright import FullyShardedDataParallel as FSDP
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.AdamW(model.parameters())

The call runs sw.fully_shard on the modules that the policy names and on the module. It returns the module itself, whose
class is now also this one: no name gets a prefix, and no attribute needs to be forwarded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from ._engine import Error
from .comm.process_group import resolve_group
from .layout.local_parameters import whole_tensor
from .optim.clip_grad import clip_grad_norm_
from .options.names import offers_names
from .options.precision import Precision
from .parallel.fully_shard import FSDPModule, fully_shard
from .torch_compat.dtensor import is_dtensor, like_dtensor
from .torch_compat.fsdp1_policies import choose_units, full_precision_classes
from .torch_compat.state_dicts import asked_from_inside
from .wrapping import full_parameters, load_full_state_dict

_FULL, _SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
_LOCAL = StateDictType.LOCAL_STATE_DICT
#: by form of state dicts, the classes of settings for the module's and for the optimizer's
_CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    _FULL: (torch_fsdp.FullStateDictConfig, torch_fsdp.FullOptimStateDictConfig),
    _SHARDED: (torch_fsdp.ShardedStateDictConfig, torch_fsdp.ShardedOptimStateDictConfig),
    _LOCAL: (torch_fsdp.LocalStateDictConfig, torch_fsdp.LocalOptimStateDictConfig),
}
_DEFAULT = torch_fsdp.StateDictSettings(_FULL, *(config() for config in _CONFIGS[_FULL]))
_RELEASES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class FullyShardedDataParallel(FSDPModule):
    """A module that sw.fully_shard was called on, with the methods of torch's FullyShardedDataParallel.

    Parameters
    ----------
    module, process_group, auto_wrap_policy, ignored_modules, ignored_states, param_init_fn, device_mesh
        As in torch's class. `process_group` as a pair of groups is an error: pass `device_mesh`.
    sharding_strategy : ShardingStrategy, optional
        FULL_SHARD (the default), SHARD_GRAD_OP (units stay whole between forward and backward), HYBRID_SHARD and
        _HYBRID_SHARD_ZERO2 (slices inside a row of `device_mesh`, by default the ranks of a host) and NO_SHARD: rows of one
        rank, which has all slices.
    cpu_offload : CPUOffload, optional
        No effect on the CPU. `offload_params=True` raises NotImplementedError on GPUs.
    mixed_precision : MixedPrecision, optional
        See Precision; `buffer_dtype` casts buffers. With auto_wrap_policy, batch norms keep their own precision.
    device_id : int or torch.device, optional
        The device to which the module is moved first.
    sync_module_states : bool
        True: rank 0's parameters and buffers replace those of the other ranks. False: each rank's slices are of its own.
    backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params
        Accepted without effect: the engine plans its gathers, and parameters are always the module's own.

    Returns
    -------
    Module
        `module`, changed in place.
    """

    _state_dict_settings: Any = _DEFAULT

    @offers_names
    def __new__(
        cls,
        module: torch.nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Iterable[torch.nn.Module] | None = None,
        param_init_fn: Callable[[torch.nn.Module], object] | None = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: Any = None,
    ) -> Any:
        """Shard `module` in place, and return it."""
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"FullyShardedDataParallel: module must be a torch.nn.Module, got {type(module).__name__}")
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        _check("sharding_strategy", strategy, ShardingStrategy)
        _check("mixed_precision", mixed_precision, torch_fsdp.MixedPrecision, type(None))
        _check("cpu_offload", cpu_offload, torch_fsdp.CPUOffload, type(None))
        if mixed_precision is not None and mixed_precision.keep_low_precision_grads:
            raise NotImplementedError(
                "FullyShardedDataParallel: mixed_precision.keep_low_precision_grads must be False, got True: gradients have the parameters' dtype"
            )
        ignored = [*(ignored_modules or ()), *(ignored_states or ())]
        modules = {part for each in ignored if isinstance(each, torch.nn.Module) for part in each.modules()}
        left = [p for each in ignored for p in (each.parameters() if isinstance(each, torch.nn.Module) else (each,))]
        ids = set(map(id, left))
        device = _prepare(module, param_init_fn, device_id, ids)
        if cpu_offload is not None and cpu_offload.offload_params and device != "cpu":
            raise NotImplementedError(
                "FullyShardedDataParallel: cpu_offload must be None or CPUOffload(offload_params=False) on GPUs, got offload_params=True: "
                "sw.fully_shard(offload='cpu') moves the optimizer's state"
            )
        mesh = _mesh(strategy, process_group, device_mesh, device)
        if sync_module_states:
            group = resolve_group(process_group, mesh, trains=True)
            held = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in ids and not is_dtensor(t)]
            first = dist.get_process_group_ranks(group)[0] if group is not None else 0
            for tensor in held if dist.is_initialized() else ():
                sent = tensor.detach().contiguous()
                dist.broadcast(sent, first, group=group)
                tensor.detach().copy_(sent)
        options = {"process_group": process_group, "sharding_strategy": strategy, "mixed_precision": mixed_precision}
        options |= {"ignored_states": left, "device_mesh": mesh}
        kept = full_precision_classes(mixed_precision)
        dtype = None if mixed_precision is None else mixed_precision.buffer_dtype
        casts = (each for each in module.modules() if dtype and each not in modules and not isinstance(each, kept))
        for buffer in itertools.chain.from_iterable(each.buffers(recurse=False) for each in casts):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
        chosen: dict[torch.nn.Module, dict[str, Any]] = {}
        if auto_wrap_policy is not None:
            norms = (each for each in module.modules() if isinstance(each, kept) and each not in modules)
            chosen = {each: {} for each in norms if each is not module}
            chosen |= choose_units(module, auto_wrap_policy, modules, ids)
        for each, changed in chosen.items():
            own = {**options, **changed}
            if _copies(own["sharding_strategy"]) != _copies(strategy):
                raise ValueError(
                    f"FullyShardedDataParallel: auto_wrap_policy must give {type(each).__name__} a sharding_strategy over the ranks of the "
                    f"outermost one's, {strategy}, got {own['sharding_strategy']}"
                )
            precision = _precision(own["mixed_precision"], is_inner=True)
            _shard(each, own, "fp32" if isinstance(each, kept) and precision is not None else precision)
        return _shard(module, options, _precision(mixed_precision, is_inner=False))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the module was made by its own class."""

    @property
    def module(self) -> Any:
        """The module without this class, over the same attributes; a child that has this name hides it."""
        if "module" in self._modules:
            return self._modules["module"]
        bare = object.__new__(self._shardwright_original)
        bare.__dict__ = self.__dict__
        return bare

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by the norm over all ranks, and return it. Collective."""
        if float(norm_type) == 2.0:
            return clip_grad_norm_(self, max_norm)
        norm: torch.Tensor = whole_tensor(torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type))
        return norm

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """Call `fn` on each module, inner ones first, while parameters are whole. All ranks then have rank 0's values. Collective."""
        with full_parameters(_outermost(self), writable=True):
            _apply(self, fn)
        return self

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Raise NotImplementedError: slices of gradients are averaged by the engine."""
        raise NotImplementedError(
            f"register_comm_hook({getattr(hook, '__name__', hook)}) is not supported by FullyShardedDataParallel: pass compress= to "
            "sw.fully_shard, or register the hook on the module that sw.wrap(zero=2) returns"
        )

    @staticmethod
    def fsdp_modules(module: torch.nn.Module, root_only: bool = False) -> list[torch.nn.Module]:
        """Return the modules of this class in `module`; with `root_only` those that are in no other one."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        inner = {id(part) for each in found for part in list(each.modules())[1:]} if root_only else ()
        return [each for each in found if id(each) not in inner]

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: torch.nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Return a context in which every rank has whole parameters, of the inner units too: see full_parameters. Collective.

        With `writeback` all ranks have rank 0's values afterwards. `recurse`, `rank0_only` and `offload_to_cpu` have no effect.
        """
        if with_grads:
            raise NotImplementedError(
                "summon_full_params: with_grads must be False, got True: sw.full_gradients(module) returns them"
            )
        if writeback and (rank0_only or offload_to_cpu):
            name = "rank0_only" if rank0_only else "offload_to_cpu"
            raise NotImplementedError(f"summon_full_params: {name}=True needs writeback=False, got writeback=True")
        with contextlib.ExitStack() as stack:
            for each in FullyShardedDataParallel.fsdp_modules(module, root_only=True):
                stack.enter_context(full_parameters(_outermost(each), writable=writeback))
            yield

    # state dicts ----------------------------------------------------------------------------------------------------

    @staticmethod
    def get_state_dict_type(module: torch.nn.Module) -> Any:
        """Return the StateDictSettings in force."""
        found = FullyShardedDataParallel.fsdp_modules(module)
        return found[0]._state_dict_settings if found else _DEFAULT

    @staticmethod
    def set_state_dict_type(
        module: torch.nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Any:
        """Set the form of state dicts of all modules of this class in `module`. Return the former StateDictSettings."""
        if not isinstance(state_dict_type, StateDictType):
            raise TypeError(f"state_dict_type must be a StateDictType, got {state_dict_type!r}")
        kinds = _CONFIGS[state_dict_type]
        given = {"state_dict_config": state_dict_config, "optim_state_dict_config": optim_state_dict_config}
        for (name, config), kind in zip(given.items(), kinds):
            if config is not None and not isinstance(config, kind):
                raise RuntimeError(f"{name} must be a {kind.__name__} for {state_dict_type}, got {config!r}")
        chosen = (kind() if config is None else config for config, kind in zip(given.values(), kinds))
        former = FullyShardedDataParallel.get_state_dict_type(module)
        settings = torch_fsdp.StateDictSettings(state_dict_type, *chosen)
        for each in FullyShardedDataParallel.fsdp_modules(module):
            each.__dict__["_state_dict_settings"] = settings
        return former

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Return a context with the arguments of set_state_dict_type."""
        former = FullyShardedDataParallel.set_state_dict_type(module, *args, **kwargs)
        try:
            yield
        finally:
            for each in FullyShardedDataParallel.fsdp_modules(module):
                each.__dict__["_state_dict_settings"] = former

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state by the module's own names: whole tensors, DTensors, or this rank's slices. Collective for whole ones."""
        state, settings = super().state_dict(*args, **kwargs), self._state_dict_settings
        if args or kwargs or asked_from_inside():
            return state
        if settings.state_dict_type is _LOCAL:
            return {name: each.to_local() if is_dtensor(each) else each for name, each in state.items()}
        return _whole(state, settings.state_dict_config, self) if settings.state_dict_type is _FULL else state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict() of the form in force; DTensors load in every form. Collective for whole tensors, which are rank 0's."""
        form = self._state_dict_settings.state_dict_type
        if asked_from_inside() or form is _SHARDED or any(map(is_dtensor, state_dict.values())):
            return super().load_state_dict(state_dict, strict, assign)
        if form is _FULL:
            return load_full_state_dict(self, state_dict, strict=strict)
        held = super().state_dict()
        slices = {name: value for name, value in held.items() if is_dtensor(value) and name in state_dict}
        for name, value in slices.items():
            if state_dict[name].shape != value.to_local().shape:
                raise ValueError(
                    f"load_state_dict: {name!r} must have this rank's slice of {tuple(value.to_local().shape)} for {form}, got "
                    f"{tuple(state_dict[name].shape)}"
                )
        made = {n: like_dtensor(v, slices[n]) if n in slices else v for n, v in state_dict.items()}
        return super().load_state_dict(made, strict, assign)

    @staticmethod
    def optim_state_dict(
        model: torch.nn.Module, optim: torch.optim.Optimizer, optim_state_dict: Any = None, group: Any = None
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameters' names, in the form that set_state_dict_type says. Collective."""
        _only(None, optim_state_dict=optim_state_dict, group=group)
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        form = settings.state_dict_type
        if form is _LOCAL:
            raise NotImplementedError(
                "optim_state_dict: state_dict_type must be FULL_STATE_DICT or SHARDED_STATE_DICT, got LOCAL_STATE_DICT"
            )
        return _optimizer_state(model, optim, settings.optim_state_dict_config if form is _FULL else None)

    @staticmethod
    def full_optim_state_dict(
        model: torch.nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the optimizer's whole state by parameters' names; with `rank0_only` an empty dict on other ranks. Collective."""
        _only(None, optim_input=optim_input, group=group)
        return _optimizer_state(model, optim, torch_fsdp.FullOptimStateDictConfig(rank0_only=rank0_only))

    @staticmethod
    def sharded_optim_state_dict(
        model: torch.nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameters' names, as DTensors."""
        _only(None, group=group)
        return _optimizer_state(model, optim, None)

    @staticmethod
    def optim_state_dict_to_load(
        model: torch.nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Load a result of optim_state_dict into `optim`, and return its state_dict(), which loads again. Collective.

        In the full form with `rank0_only`, all ranks load rank 0's state.
        """
        _only(None, group=group)
        _only(False, is_named_optimizer=is_named_optimizer)
        config = FullyShardedDataParallel.get_state_dict_type(model).optim_state_dict_config
        rank0_only = getattr(config, "rank0_only", False)
        tensors = (each for state in optim_state_dict.get("state", {}).values() for each in state.values())
        is_full = not any(map(is_dtensor, tensors))
        options = torch_states.StateDictOptions(full_state_dict=is_full, broadcast_from_rank0=rank0_only)
        copied = {key: dict(value) if isinstance(value, dict) else value for key, value in optim_state_dict.items()}
        torch_states.set_optimizer_state_dict(model, optim, copied, options=options)
        return optim.state_dict()


def _shard(module: torch.nn.Module, options: Mapping[str, Any], precision: Any) -> torch.nn.Module:
    """Make `module` a unit and give it the class."""
    mesh, reshards = options["device_mesh"], None if options["sharding_strategy"] in _RELEASES else False
    ranks = {"mesh": mesh} if mesh is not None else {"process_group": options["process_group"]}
    fully_shard(
        module, reshard_after_forward=reshards, precision=precision, ignored_params=options["ignored_states"], **ranks
    )
    kind = type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__new__": FSDPModule.__new__}
    module.__class__ = type(kind.__name__, (FullyShardedDataParallel, kind), names)
    return module


def _check(name: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        legal = " or ".join("None" if kind is type(None) else f"a {kind.__name__}" for kind in kinds)
        raise TypeError(f"FullyShardedDataParallel: {name} must be {legal}, got {value!r}")


def _only(legal: Any, **given: Any) -> None:
    for name, value in given.items():
        if value is not legal:
            raise NotImplementedError(f"FullyShardedDataParallel: {name} must be {legal}, got {value!r:.80}")


def _precision(mixed_precision: Any, *, is_inner: bool) -> Precision | None:
    if mixed_precision is None or (mixed_precision.param_dtype is None and mixed_precision.reduce_dtype is None):
        return None
    casts = mixed_precision.cast_forward_inputs or (not is_inner and mixed_precision.cast_root_forward_inputs)
    dtypes = {name: getattr(mixed_precision, name) for name in ("param_dtype", "reduce_dtype")}
    return Precision(**dtypes, cast_forward_inputs=casts, master=False)


def _prepare(module: torch.nn.Module, init: Any, device_id: Any, ignored: Collection[int]) -> str:
    """Give tensors of the meta device memory and values, and move the module. Return the type of its device."""
    device = None
    if device_id is not None:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    for each in module.modules():
        own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
        if not any(t.is_meta and id(t) not in ignored for t in own):
            continue
        if init is not None:
            init(each)
        elif callable(reset := getattr(each, "reset_parameters", None)):
            each.to_empty(device=device or ("cuda" if torch.cuda.is_available() else "cpu"), recurse=False)
            reset()
        else:
            raise ValueError(
                f"FullyShardedDataParallel: param_init_fn must be a function, as {type(each).__name__} is on the meta device and has no "
                "reset_parameters(), got None"
            )
    if device is not None and not any(is_dtensor(each) for each in module.parameters()):
        module.to(device)
    kinds = {each.device.type for each in module.parameters()}
    return kinds.pop() if len(kinds) == 1 else "cuda" if torch.cuda.is_available() else "cpu"


def _copies(strategy: ShardingStrategy) -> tuple[bool, bool]:
    """Return whether there are copies of slices, and whether a rank has all slices."""
    return "HYBRID" in strategy.name, strategy is ShardingStrategy.NO_SHARD


def _mesh(strategy: ShardingStrategy, process_group: Any, mesh: Any, device: str) -> Any:
    """Return the mesh of a strategy: two dimensions, (replicas, slices), where ranks hold copies; None for all ranks of the group."""
    if isinstance(process_group, tuple):
        raise NotImplementedError(
            "FullyShardedDataParallel: process_group must be a ProcessGroup or None, got a pair of groups: pass "
            "device_mesh=init_device_mesh(device, (replicas, ranks of one), mesh_dim_names=('replicate', 'shard'))"
        )
    is_hybrid, is_whole = _copies(strategy)
    if mesh is not None and (is_whole or mesh.ndim != 1 + is_hybrid):
        legal = "be None" if is_whole else f"have {1 + is_hybrid} dimensions"
        raise ValueError(f"FullyShardedDataParallel: device_mesh must {legal} with {strategy}, got {mesh}")
    if mesh is not None or not (is_hybrid or is_whole):
        return mesh
    if process_group is not None:
        raise ValueError(f"FullyShardedDataParallel: process_group must be None with {strategy}, got {process_group!r}")
    resolve_group(None, None, trains=True)
    ranks = dist.get_world_size()
    row = 1 if is_whole else int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    if ranks % row:
        raise ValueError(
            f"FullyShardedDataParallel: LOCAL_WORLD_SIZE must divide {ranks} ranks with {strategy}, got {row}"
        )
    return init_device_mesh(device, (ranks // row, row), mesh_dim_names=("replicate", "shard"))


def _apply(module: torch.nn.Module, fn: Callable[[torch.nn.Module], None]) -> None:
    for each in module.children():
        _apply(each, fn)
    fn(module)


def _outermost(module: Any) -> torch.nn.Module:
    outer = module._shardwright_mark.outer()
    return module if outer is None else _outermost(outer)


def _whole(state: Any, config: Any, module: torch.nn.Module) -> Any:
    """Return `state` with whole tensors in the places of DTensors, one gathered at a time; empty if the config keeps it from this rank."""
    mark: Any = FullyShardedDataParallel.fsdp_modules(module)[0]._shardwright_mark
    keeps = not config.rank0_only or int(mark.mesh.mesh.flatten()[0]) == dist.get_rank()

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: whole(each) for key, each in value.items()}
        made = whole_tensor(value)
        if not keeps or not isinstance(made, torch.Tensor):
            return made if keeps else None
        is_held = not is_dtensor(value) or value.to_local().numel() == made.numel()  # then later steps write into it
        made = made.detach().clone() if is_held else made.detach()
        return made.cpu() if config.offload_to_cpu else made

    made = {name: whole(value) for name, value in state.items()}
    return made if keeps else {}


def _optimizer_state(model: torch.nn.Module, optim: torch.optim.Optimizer, config: Any) -> dict[str, Any]:
    """Return the state by names: whole as `config` says, DTensors without one."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        raise Error(f"optim_state_dict needs a module of FullyShardedDataParallel, got a {type(model).__name__}")
    state: dict[str, Any] = dict(torch_states.get_optimizer_state_dict(model, optim))
    return state if config is None else _whole(state, config, model)
