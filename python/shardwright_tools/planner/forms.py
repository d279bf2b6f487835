"""The chosen configuration as code: sw.wrap, and the same for accelerate, FSDP2 and DeepSpeed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from .choose import Candidate, Work
from .machine import Machine
from .memory import PRECISIONS
from .shape import PlanError


def wrap_call(chosen: Candidate, machine: Machine, work: Work) -> str:
    precision = PRECISIONS[work.precision]
    words = [f"zero={chosen.zero}", *([precision.call] if precision.call else [])]
    if chosen.offload:
        words.append(f"offload={chosen.offload_value}")
    if _is_private(chosen, machine):
        words.append("share_parameters=False")
    if chosen.steps:
        words.append("step_in_backward=True")
    if chosen.homes and machine.on_gpu:
        words.append('device="cuda"')  # of a module that is on the CPU or the meta device
    before, part = _mesh(chosen, machine, work)
    mesh = f", device_mesh={part}" if part else ""
    if precision.convert:
        before.append(precision.convert)
    if chosen.checkpointed:
        before.append("sw.checkpoint_units(model)")
    made = _OPTIMIZER[work.optimizer]
    return "\n".join([*before, f"model, optimizer = sw.wrap(model, {made}, {', '.join(words)}{mesh})"])


def _mesh(chosen: Candidate, machine: Machine, work: Work) -> tuple[list[str], str]:
    """Return the lines that make a mesh of all degrees, and its part that averages gradients; none if it is all of it."""
    degrees = {"pp": chosen.pp, "cp": work.cp, "tp": chosen.tp}
    sizes = {name: size for name, size in degrees.items() if size > 1}
    if not sizes:
        return [], ""
    device = "cuda" if machine.on_gpu else "cpu"
    shape = ", ".join(map(str, (machine.world // math.prod(sizes.values()), *sizes.values())))
    names = ", ".join(f'"{name}"' for name in ("dp", *sizes))
    lines = [f'mesh = init_device_mesh("{device}", ({shape}), mesh_dim_names=({names}))']
    if work.cp == 1:
        return lines, 'mesh["dp"]'
    return [*lines, 'mesh["dp", "cp"]._flatten("dp_cp")'], 'mesh["dp_cp"]'  # ranks of a sequence average gradients, too


def _is_private(chosen: Candidate, machine: Machine) -> bool:
    return chosen.zero == 3 and not chosen.shared and not machine.on_gpu


_OPTIMIZER = {
    "adamw": "sw.optim.AdamW(model.parameters(), lr=lr)",
    "adam": "sw.optim.Adam(model.parameters(), lr=lr)",
    "sgd": "sw.optim.SGD(model.parameters(), lr=lr)",
    "sgd-momentum": "sw.optim.SGD(model.parameters(), lr=lr, momentum=0.9)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=lr)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=lr)",
}


def run_options(chosen: Candidate, machine: Machine) -> str:
    """Return the options of `shardwright run`. Raises PlanError if ranks do more than average gradients."""
    if chosen.tp * chosen.pp > 1:
        raise PlanError("--launch accelerate starts data-parallel ranks only: use --launch torchrun with tp or pp")
    place = chosen.offload_value.replace(" ", "") if chosen.homes else chosen.offload
    words = [f"zero={chosen.zero}", *([f"offload={place}"] if chosen.offload else [])]
    if chosen.steps:
        words.append("step_in_backward=true")
    if _is_private(chosen, machine):
        words.append("share_parameters=false")
    return ",".join(words)


def _refuse_steps(chosen: Candidate) -> None:
    if chosen.steps:
        raise PlanError("only sw.wrap has step_in_backward=True, without which the model does not fit: use --form wrap")


def mixed(work: Work) -> str:
    """Return accelerate's and DeepSpeed's name of a precision."""
    return {"fp32": "no", "fp16": "fp16"}.get(work.precision, "bf16")


def _accelerate(chosen: Candidate, machine: Machine, work: Work) -> str:
    """Return the file that `accelerate launch --config_file` reads. Our Accelerator takes zero= itself."""
    _refuse_steps(chosen)
    if chosen.pp > 1:
        raise PlanError(f"accelerate has no pipeline stages, got pp {chosen.pp}: use --form wrap")
    sharded = chosen.zero >= 2
    if chosen.tp * work.cp > 1 and not sharded:
        raise PlanError(f"accelerate has tp and cp with FSDP2 only, got zero {chosen.zero}: use --form wrap")
    kind = "FSDP" if sharded else "MULTI_GPU" if machine.on_gpu else "MULTI_CPU"
    yes_no = ("false", "true")
    lines = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {kind}", f"mixed_precision: '{mixed(work)}'"]
    lines += [f"num_machines: {machine.hosts}", f"num_processes: {machine.world}", "machine_rank: 0"]
    lines.append(f"use_cpu: {yes_no[not machine.on_gpu]}")
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {yes_no[chosen.zero == 3]}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {yes_no[chosen.checkpointed]}",
            f"  fsdp_offload_params: {yes_no[bool(chosen.offload)]}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    if chosen.tp * work.cp > 1:
        sizes = {"dp_shard": machine.world // (chosen.tp * work.cp), "tp": chosen.tp, "cp": work.cp}
        lines += ["parallelism_config:", *(f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items())]
    return "\n".join(lines)


def _fsdp2(chosen: Candidate, machine: Machine, work: Work) -> str:
    _refuse_steps(chosen)
    device = "cuda" if machine.on_gpu else "cpu"
    lines, part = _mesh(chosen, machine, work)
    if chosen.zero < 2:  # FSDP2 has no form that keeps whole gradients
        group = f", process_group={part}.get_group()" if part else ""
        return "\n".join([*lines, f"model = DistributedDataParallel(model{group})"])
    lines = lines or [f'mesh = init_device_mesh("{device}", ({machine.world},))']
    words = [f"mesh={part or 'mesh'}", f"reshard_after_forward={chosen.zero == 3}"]
    if work.precision != "fp32":
        dtype = "float16" if work.precision == "fp16" else "bfloat16"
        lines.append(f"policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)")
        words.append("mp_policy=policy")
    if chosen.offload:
        words.append("offload_policy=CPUOffloadPolicy()")
    given = ", ".join(words)
    lines += ["for layer in model.layers:", f"    fully_shard(layer, {given})", f"fully_shard(model, {given})"]
    return "\n".join(lines)


def _deepspeed(chosen: Candidate, machine: Machine, work: Work) -> str:
    _refuse_steps(chosen)
    if chosen.pp * work.cp > 1:
        raise PlanError(
            f"a DeepSpeed JSON has no pipeline stages and no context parallelism, got pp {chosen.pp} and cp {work.cp}: use --form wrap"
        )
    device, _, folder = (chosen.offload or "").partition(":")
    place = {"device": device, **({"nvme_path": folder} if folder else {})}
    offload = {f"offload_{what}": place for what in ("optimizer", "param")[: 1 + chosen.homes]} if device else {}
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulate,
        "zero_optimization": {"stage": chosen.zero, **offload},
        **({"tensor_parallel": {"autotp_size": chosen.tp}} if chosen.tp > 1 else {}),
        **({} if work.precision == "fp32" else {mixed(work): {"enabled": True}}),
        "gradient_clipping": 1.0,
    }
    return json.dumps(config, indent=2)


FORMS: dict[str, Callable[[Candidate, Machine, Work], str]] = {
    "wrap": wrap_call,
    "accelerate": _accelerate,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
