"""The keys of DeepSpeed's JSON and their translation: one table for the reader, the report and the document.

A row is `keys | state | text`. Keys that share a row share its section. The states:

mapped      the key sets something here; the text says what
no meaning  any value is accepted, and nothing changes; the text says why
refused     a value that switches the feature on is an error; the text names the nearest thing

Inside a mapped section an unknown key is an error. Inside a section of another state any key is accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple


class Key(NamedTuple):
    """One key of DeepSpeed's JSON: its dotted name, its state and the text of its row."""

    name: str
    state: str
    text: str


_TABLE = """
train_batch_size | mapped | the product of the next two and the number of ranks; a contradiction is an error
train_micro_batch_size_per_gpu | mapped | `engine.train_micro_batch_size_per_gpu()`, and the batch of `training_data`
gradient_accumulation_steps | mapped | backwards before the last of a step run inside `no_sync()`
managed_gradient_accumulation | mapped | `true` only: `engine.backward` and `engine.step` count micro-batches
gradient_clipping | mapped | `sw.clip_grad_norm_` before the step; 0 clips nothing
steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers | no meaning | nothing is printed; `sw.stats(model)` has times and bytes
zero_allow_untested_optimizer | mapped | `partition="flat"` for an optimizer that is not known to be elementwise
zero_force_ds_cpu_optimizer | no meaning | the optimizer that was passed is kept
communication_data_type | mapped | `sw.Precision(reduce_dtype=...)`
seq_parallel_comm_data_type seq_parallel_communication_data_type | no meaning | sequences are not split over ranks
prescale_gradients gradient_predivide_factor | no meaning | contributions are added in float32 and divided once
gradient_allreduce_op | mapped | "avg" is `reduce="mean"`, "sum" is `reduce="sum"`
sparse_gradients | no meaning | gradients of `nn.Embedding(sparse=True)` stay sparse at stage 0 on CPUs
disable_allgather graph_harvesting use_data_before_expert_parallelism vocabulary_size | no meaning | they tune DeepSpeed's own loops
dataloader_drop_last | mapped | `drop_last` of the loader of `training_data`
fp16 | mapped | `precision="fp16"`; parameters stay float32 and are their own masters
fp16.enabled | mapped | switches the section on; "auto" is TrainingArguments.fp16
fp16.auto_cast | no meaning | the wrapper casts floating-point inputs under each precision
fp16.loss_scale | mapped | a fixed loss scale; 0 makes it dynamic
fp16.initial_scale_power | mapped | the first loss scale is 2 to this power
fp16.loss_scale_window | mapped | steps without an overflow after which the loss scale doubles
fp16.hysteresis fp16.consecutive_hysteresis | mapped | overflows that pass before the loss scale halves
fp16.min_loss_scale | mapped | the loss scale stays at least this; an overflow at it is an error
fp16.fused_mode | no meaning | `sw.optim` fuses the step
fp16.fp16_master_weights_and_grads | refused | use `sw.wrap(model, optimizer, precision=sw.Precision(master=False))` on a float16 model
bf16 bfloat16 | mapped | `precision="bf16"`; parameters stay float32 and are their own masters
bf16.enabled | mapped | switches the section on; "auto" is TrainingArguments.bf16
bf16.immediate_grad_update | no meaning | gradients are float32 and are accumulated at once
bf16.check_grad_overflow | no meaning | the norm tells; a step is taken as in plain torch
bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states | refused | use `sw.wrap(model, optimizer, precision=sw.Precision(master=False))` on a bfloat16 model
amp | refused | apex is not used: use the section `bf16`, or `torch_autocast`
torch_autocast | mapped | the forward runs inside `torch.autocast`
torch_autocast.enabled torch_autocast.dtype | mapped | its switch, and its dtype (bfloat16 if none is given)
torch_autocast.lower_precision_safe_modules | refused | torch.autocast decides by operation: use `precision={"module name": "bf16"}` of `sw.wrap`
data_types | mapped | a section
data_types.grad_accum_dtype | no meaning | gradients have the parameters' own dtype, float32 under a precision
data_types.param_dtype data_types.buffer_dtype | refused | use `sw.Precision(param_dtype=...)`, or convert the model
optimizer | mapped | an optimizer over `model_parameters`, if none is passed
optimizer.type | mapped | Adam, AdamW and SGD are `sw.optim`'s; other names are classes of `torch.optim`
optimizer.params | mapped | the arguments of the optimizer
optimizer.legacy_fusion | no meaning | `sw.optim` fuses the step
scheduler | mapped | a `LambdaLR` that `engine.step` steps, if none is passed
scheduler.type | mapped | WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of `torch.optim.lr_scheduler`
scheduler.params | mapped | the arguments of the schedule
zero_optimization | mapped | `zero=`; `true` is stage 1
zero_optimization.stage | mapped | `zero=0`, 1, 2 or 3
zero_optimization.reduce_bucket_size | mapped | `bucket_cap_mb`, 4 bytes per element, at most 25 MiB; results do not depend on it
zero_optimization.allgather_bucket_size zero_optimization.allgather_size | no meaning | updated slices are published bucket by bucket
zero_optimization.contiguous_gradients zero_optimization.overlap_comm | no meaning | buckets are contiguous, and are averaged as they fill during the backward
zero_optimization.reduce_scatter zero_optimization.use_multi_rank_bucket_allreduce | no meaning | each owner folds its slice of a bucket
zero_optimization.allgather_partitions zero_optimization.round_robin_gradients zero_optimization.legacy_stage1 | no meaning | each bucket is cut into equal slices
zero_optimization.ignore_unused_parameters | no meaning | unused parameters are handled at every stage
zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint | no meaning | checkpoints hold whole float32 tensors
zero_optimization.offload_optimizer | mapped | `offload=`, for the optimizers of `sw.optim`
zero_optimization.offload_optimizer.device | mapped | "cpu" is `offload="cpu"`, "nvme" is `offload="nvme:<nvme_path>"`
zero_optimization.offload_optimizer.nvme_path | mapped | the folder of `offload="nvme:<folder>"`
zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.fast_init | no meaning | three buffers of 16 MiB; memory for copies is always pinned
zero_optimization.offload_optimizer.pipeline_read zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.pipeline | no meaning | reads and writes always overlap the step
zero_optimization.offload_optimizer.ratio zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc | no meaning | all state is offloaded, and a step uses torch's threads
zero_optimization.offload_param | mapped | a section
zero_optimization.offload_param.device | mapped | "nvme" is `share_parameters=False, offload={"parameters": "nvme:<nvme_path>"}` at stage 3; "cpu": parameters on the CPU lie there already. For a model on a GPU both are refused
zero_optimization.offload_param.nvme_path | mapped | the folder of `offload={"parameters": "nvme:<folder>"}`
zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size | no meaning | units are read from the file to their addresses
zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.pin_memory | no meaning | the ranks of a host share one copy at stage 3
zero_optimization.cpu_offload | mapped | the old name of `offload_optimizer: {"device": "cpu"}`
zero_optimization.cpu_offload_param | mapped | the old name of `offload_param: {"device": "cpu"}`
zero_optimization.cpu_offload_use_pin_memory | no meaning | memory for copies is always pinned
zero_optimization.sub_group_size zero_optimization.partition_stream_chunk_size zero_optimization.stage3_partition_stream_chunk_size | no meaning | a step runs over slices of bounded size
zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size | no meaning | the next unit is gathered while one runs
zero_optimization.stage3_param_persistence_threshold zero_optimization.param_persistence_threshold zero_optimization.stage3_model_persistence_threshold zero_optimization.model_persistence_threshold | no meaning | parameters of at most 128 bytes stay whole
zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters | no meaning | one unit and the next are whole; `units=` sets their size
zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance | no meaning | `reshard_after_forward=False` keeps units for the backward
zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save | no meaning | `engine.save_16bit_model` always gathers
zero_optimization.stage3_module_granularity_threshold zero_optimization.module_granularity_threshold zero_optimization.leaf_module | no meaning | `units=` takes types of modules
zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential zero_optimization.allgather_sequential | no meaning | units are gathered from slices
zero_optimization.memory_efficient_linear zero_optimization.override_module_apply | no meaning | modules are not replaced
zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks | no meaning | drift and writes are always checked
zero_optimization.save_muon_momentum_buffer_in_memory | no meaning | Muon's state is not offloaded
zero_optimization.compute_grad_norm | no meaning | each step has a norm, for `engine.get_global_grad_norm`
zero_optimization.parameter_alignment | no meaning | slices begin on 128-byte boundaries
zero_optimization.zero_hpz_partition_size | refused | use `device_mesh` of (replicate, shard) with a row on each host, or `mics_shard_size`
zero_optimization.zero_quantized_weights | mapped | `gather="int8", share_parameters=False` at stage 3
zero_optimization.zero_quantized_nontrainable_weights | refused | frozen parameters keep their dtype: load them in bfloat16
zero_optimization.zero_quantized_gradients | mapped | `compress=sw.Int8()`
zero_optimization.zeropp_loco_param | refused | use `compress=sw.Int4()`, which has error feedback
zero_optimization.mics_shard_size | mapped | `device_mesh` of (ranks / size, size) at stage 3
zero_optimization.mics_hierarchical_params_gather | no meaning | the ranks of a host share one copy
zero_optimization.zenflow | refused | use `offload_optimizer`
activation_checkpointing | no meaning | it configures DeepSpeed's own function: call `sw.checkpoint_units(model)`
checkpoint | mapped | a section
checkpoint.tag_validation | no meaning | all ranks agree on each save
checkpoint.load_universal | no meaning | checkpoints load at any stage and number of ranks
checkpoint.use_node_local_storage | refused | a checkpoint is one folder that all hosts share
checkpoint.parallel_write checkpoint.writer checkpoint.checkpoint_serialization | no meaning | every rank writes its share
aio comms_logger tensorboard wandb csv_monitor comet monitor_config flops_profiler | no meaning | they tune or report DeepSpeed's own work; `sw.stats(model)` has numbers to log
nebula datastates | refused | use `sw.Checkpointer`, which writes behind training
compile | no meaning | pass `torch.compile(model)`, or call `engine.compile()`
autotuning | refused | `shardwright doctor --bench` measures the machine
elasticity | refused | a checkpoint loads at any number of ranks: give the batch sizes of each run
pipeline | no meaning | a plain model has no pipeline
progressive_layer_drop eigenvalue quantize_training curriculum_learning data_efficiency | refused | the model or the data loader has to do it
compression_training weight_quantization | refused | it compresses the model: use torch.ao; gradients are compressed by `compress=`
sparse_attention | refused | call torch.nn.attention.flex_attention in the model
hybrid_engine | refused | generate inside `sw.full_parameters(model)`
tensor_parallel expert_parallel | refused | use torch.distributed.tensor.parallel; `sw.wrap` takes the data-parallel `device_mesh`
sequence_parallel_size | refused | give `process_group` of the ranks that read different data
shardwright | mapped | arguments of `sw.wrap`, which DeepSpeed ignores; `compress` by name: fp16, bf16, int8, int4, powersgd
"""

KEYS: dict[str, Key] = {}
for _row in _TABLE.strip().splitlines():
    _names, _state, _text = _row.split(" | ")
    KEYS.update({_name: Key(_name, _state, _text) for _name in _names.split()})


def key_of(name: str) -> Key | None:
    """Return the row of a dotted name, or of a section that contains it; None for an unknown name."""
    name = "bf16" + name.removeprefix("bfloat16") if name.startswith("bfloat16.") else name
    section = name
    while section:
        key = KEYS.get(section)
        if key is not None and (section == name or key.state != "mapped" or section.endswith("params")):
            return key
        if section == "shardwright":
            return key
        section = section.rpartition(".")[0]
    return None


def nearest(name: str) -> str:
    """Return the known name nearest to an unknown one, preferably of the same section; "" if none is near."""
    section, _, last = name.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in KEYS if each.rpartition(".")[0] == section}
    found = difflib.get_close_matches(last, siblings, n=1)
    if found:
        return siblings[found[0]]
    lasts = {each.rpartition(".")[2]: each for each in reversed(KEYS)}
    found = difflib.get_close_matches(last, lasts, n=1, cutoff=0.8)
    return lasts[found[0]] if found else ""


def document() -> str:
    """Return the table in Markdown, as docs/deepspeed.md has it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for key in KEYS.values():
        rows.setdefault((key.state, key.text), []).append(key.name)
    lines = ["| key | state | here |", "|---|---|---|"]
    for (state, text), names in rows.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {state} | {text} |")
    return "\n".join(lines)


def is_harmless(value: Any) -> bool:
    """Return True if a value of a refused key leaves the feature off."""
    if isinstance(value, dict):
        switches = list(_switches(value))
        return not any(switches) if switches else all(map(is_harmless, value.values()))
    return value is not True and value in (None, False, 0, 1, "none", "auto", "")


def _switches(section: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of all keys "enabled" of a section."""
    for name, value in section.items():
        if name == "enabled":
            yield value
        elif isinstance(value, dict):
            yield from _switches(value)
