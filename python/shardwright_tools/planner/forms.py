"""The chosen configuration as code: sw.wrap, and the same for accelerate, FSDP2 and DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Callable

from .choose import Candidate, Work
from .machine import Machine
from .memory import PRECISIONS

__all__ = ["FORMS", "wrap_call"]


def wrap_call(chosen: Candidate, machine: Machine, work: Work) -> str:
    """Return the call of sw.wrap."""
    precision = PRECISIONS[work.precision]
    words = [f"zero={chosen.zero}", *([precision.call] if precision.call else [])]
    if chosen.offload:
        words.append(f'offload="{chosen.offload}"')
    if chosen.zero == 3 and not chosen.shared and not machine.on_gpu:
        words.append("share_parameters=False")
    before, mesh = [], ""
    if chosen.tp * chosen.pp * work.cp > 1:
        sizes, names = ["-1"], ["dp"]
        for name, value in (("pp", chosen.pp), ("cp", work.cp), ("tp", chosen.tp)):
            if value > 1:
                sizes.append(str(value))
                names.append(name)
        device = "cuda" if machine.on_gpu else "cpu"
        quoted = ", ".join(f'"{name}"' for name in names)
        data = machine.world // (chosen.tp * chosen.pp * work.cp)
        before.append(
            f'mesh = init_device_mesh("{device}", ({data}, {", ".join(sizes[1:])}), mesh_dim_names=({quoted}))'
        )
        mesh = ', device_mesh=mesh["dp"]'
        if work.cp > 1:  # ranks of a sequence average their gradients too
            before.append('mesh["dp", "cp"]._flatten("dp_cp")')
            mesh = ', device_mesh=mesh["dp_cp"]'
    if precision.convert:
        before.append(precision.convert)
    if chosen.checkpointed:
        before.append("# each layer's forward inside torch.utils.checkpoint.checkpoint(..., use_reentrant=False)")
    class_name = {"adamw": "sw.optim.AdamW(model.parameters(), lr=lr)"}.get(
        work.optimizer, f"{_OPTIMIZER[work.optimizer]}"
    )
    return "\n".join([*before, f"model, optimizer = sw.wrap(model, {class_name}, {', '.join(words)}{mesh})"])


_OPTIMIZER = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=lr)",
    "adam": "torch.optim.Adam(model.parameters(), lr=lr)",
    "sgd": "sw.optim.SGD(model.parameters(), lr=lr)",
    "sgd-momentum": "sw.optim.SGD(model.parameters(), lr=lr, momentum=0.9)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=lr)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=lr)",
}


def _mixed(work: Work) -> str:
    return {"fp32": "no", "fp16": "fp16"}.get(work.precision, "bf16")


def _accelerate(chosen: Candidate, machine: Machine, work: Work) -> str:
    """Return the file that `accelerate launch --config_file` reads. Our Accelerator takes zero= itself."""
    sharded = chosen.zero >= 2
    kind = "FSDP" if sharded else "MULTI_GPU" if machine.on_gpu else "MULTI_CPU"
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"mixed_precision: '{_mixed(work)}'",
        f"num_machines: {machine.hosts}",
        f"num_processes: {machine.world}",
        "machine_rank: 0",
        f"use_cpu: {str(not machine.on_gpu).lower()}",
    ]
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(chosen.zero == 3).lower()}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(chosen.checkpointed).lower()}",
            f"  fsdp_offload_params: {str(bool(chosen.offload)).lower()}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    return "\n".join(lines)


def _fsdp2(chosen: Candidate, machine: Machine, work: Work) -> str:
    device = "cuda" if machine.on_gpu else "cpu"
    data = machine.world // (chosen.tp * chosen.pp)
    lines = [f'mesh = init_device_mesh("{device}", ({data},))']
    words = ["mesh=mesh", f"reshard_after_forward={chosen.zero == 3}"]
    if work.precision != "fp32":
        dtype = "float16" if work.precision == "fp16" else "bfloat16"
        lines.append(f"policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)")
        words.append("mp_policy=policy")
    if chosen.offload:
        words.append("offload_policy=CPUOffloadPolicy()")
    given = ", ".join(words)
    if chosen.zero < 2:
        return "model = DistributedDataParallel(model)  # FSDP2 has no form that keeps whole gradients"
    lines += ["for layer in model.layers:", f"    fully_shard(layer, {given})", f"fully_shard(model, {given})"]
    return "\n".join(lines)


def _deepspeed(chosen: Candidate, machine: Machine, work: Work) -> str:
    offload = {"offload_optimizer": {"device": "cpu"}} if chosen.offload else {}
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulate,
        "zero_optimization": {"stage": chosen.zero, **offload},
        **({} if work.precision == "fp32" else {_mixed(work): {"enabled": True}}),
        "gradient_clipping": 1.0,
    }
    return json.dumps(config, indent=2)


FORMS: dict[str, Callable[[Candidate, Machine, Work], str]] = {
    "wrap": wrap_call,
    "accelerate": _accelerate,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}
