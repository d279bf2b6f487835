"""Names: the nearest known one for a name that is unknown, also by what torch, DeepSpeed and others call the same thing."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: our name -> names of other libraries for it
_SYNONYMS = {
    "zero": "zero_stage stage zero_optimization zero_level sharding sharding_strategy sharding_stage fsdp",
    "precision": "mixed_precision mp_policy autocast amp dtype param_dtype bf16 fp16",
    "compress": "compression compressor comm_hook compression_hook",
    "clip_grad_norm": "max_norm max_grad_norm gradient_clipping grad_clip gradient_clip_val clip",
    "offload": "offload_optimizer cpu_offload offload_policy offload_param nvme_path",
    "partition": "slicing shard partitioning",
    "process_group": "group pg world_size rank backend",
    "device_mesh": "mesh",
    "groups": "expert_groups ep_mesh",
    "bucket_cap_mb": "bucket_cap bucket_size bucket_size_mb bucket_mb reduce_bucket_size allgather_bucket_size",
    "timeout_s": "timeout timeout_seconds",
    "gradient_as_bucket_view": "gradients_as_bucket_view grad_as_bucket_view parameters_as_bucket_view",
    "find_unused_parameters": "find_unused unused_parameters",
    "broadcast_buffers": "sync_buffers forward_sync_buffers",
    "init_sync": "sync_module_states",
    "ignored_params": "ignored_modules ignored_parameters ignored_states parameters_to_ignore",
    "reduce": "reduce_op reduction gradient_allreduce_op",
    "units": "auto_wrap_policy wrap_policy leaf_modules",
    "reshard_after_forward": "reshard shard_after_forward",
    "prefetch": "forward_prefetch backward_prefetch limit_all_gathers",
    "gather": "gather_dtype zero_quantized_weights quantized_weights",
    "keep_last": "keep max_to_keep save_total_limit save_top_k keep_n total_limit num_to_keep",
    "keep_every": "keep_period",
    "on_busy": "busy",
    "snapshot": "async_save asynchronous blocking",
    "directory": "path folder dir checkpoint_dir save_dir dirpath",
    "overwrite": "force exist_ok replace",
    "dataloader": "loader data_loader train_loader",
    "scheduler": "lr_scheduler",
    "scaler": "grad_scaler",
    "user_state": "extra state client_state metadata",
    "block": "block_size group_size",
    "rank": "matrix_approximation_rank",
    "warmup_steps": "start_powerSGD_iter warmup",
    "error_feedback": "use_error_feedback",
    "seed": "random_seed",
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "warmup_steps warmup",
    "use_error_feedback": "error_feedback",
    "random_seed": "seed",
    "local_directory": "cache_dir local_dir",
    "fully_shard": "FSDP FullyShardedDataParallel fsdp",
    "DistributedDataParallel": "DDP",
    "full_state_dict": "get_model_state_dict state_dict get_state_dict",
    "full_optimizer_state_dict": "get_optimizer_state_dict optimizer_state_dict",
    "load_full_state_dict": "set_model_state_dict load_state_dict",
    "load_full_optimizer_state_dict": "set_optimizer_state_dict",
    "full_parameters": "summon_full_params GatheredParameters",
    "save_pretrained": "zero_to_fp32 save_16bit_model",
    "clip_grad_norm_": "clip_grad_norm",
    "shard_optimizer": "ZeroRedundancyOptimizer",
    "deepspeed": "initialize",
    "wrap": "prepare parallelize distribute",
    "SyncBatchNorm": "convert_sync_batchnorm",
    "init_process_group": "init init_distributed",
}


def near(name: str, known: Iterable[str], *, nothing: str = "") -> str:
    """Return ": did you mean 'x'?" for the known name nearest to an unknown one; `nothing` if none is near."""
    names = sorted(known)
    candidates = {each.lower(): ours for ours in names for each in _SYNONYMS.get(ours, "").split()}
    candidates |= {ours.lower(): ours for ours in names}
    found = difflib.get_close_matches(name.lower(), candidates, n=1)
    return f": did you mean {candidates[found[0]]!r}?" if found else nothing


def unknown_name(name: str, known: Iterable[str]) -> str:
    return f"unknown option {name!r}" + near(name, known, nothing=f"; known are {', '.join(sorted(known))}")


def offers_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function raise TypeError with the nearest of its names for a keyword that it does not take."""
    parameters = inspect.signature(function).parameters.values()
    known = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    known.discard("self")
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    count_max = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    count_max = sys.maxsize if any(each.kind is each.VAR_POSITIONAL for each in parameters) else count_max
    called = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")

    @functools.wraps(function)
    def checked(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        for name in () if takes_any else keywords:
            if name not in known:
                raise TypeError(f"{called}: {unknown_name(name, known)}")
        if len(arguments) > count_max:
            extra = ", ".join(map(repr, arguments[count_max:]))
            raise TypeError(f"{called}: options are passed by name, such as {example}=, got {extra} by position")
        return function(*arguments, **keywords)

    example = next((each.name for each in parameters if each.kind is each.KEYWORD_ONLY), "")
    return checked


def offers_fields(kind: type[_T]) -> type[_T]:
    setattr(kind, "__init__", offers_names(kind.__init__))
    return kind
