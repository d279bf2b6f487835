"""`shardwright config FILE`: what a DeepSpeed JSON, or a file of `accelerate config`, becomes, and a table of its keys."""

from __future__ import annotations

import argparse
import json
import types
from typing import TYPE_CHECKING, Any

from .report import columns, refuse, shortened

if TYPE_CHECKING:
    from shardwright.integrations.deepspeed.config import Plan

#: defaults of transformers' TrainingArguments, which replace "auto"
_TRAINER: dict[str, Any] = {
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "warmup_steps": 0},
    **{"learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0},
    **{"fp16": False, "bf16": False},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", help="the JSON file passed to deepspeed.initialize, or a file of accelerate config"
    )
    parser.add_argument("--ranks", type=int, default=1, help="the number of ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the run, for 'auto' (default: %(default)s)")
    parser.add_argument("--keys", action="store_true", help="print the support table of all keys in Markdown instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Print the report. Return 1 if the configuration is refused."""
    from shardwright.integrations.deepspeed.config import load_config, plan
    from shardwright.integrations.deepspeed.keys import document

    if options.keys:
        print(document())
        return 0
    if options.file is None or options.ranks < 1:
        return refuse(options, "pass a file, and --ranks of at least 1", command="shardwright config: ")
    try:
        if options.file.endswith((".yaml", ".yml")):
            return _of_accelerate(options)
        given = load_config(options.file)
        autos = _autos(given)
        made = plan(_filled(given, options.ranks, options.steps), options.ranks)
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        return refuse(options, str(error), 1, command="shardwright config: ")
    rows = [{"key": r.key, "value": autos.get(r.key, r.value), "state": r.state, "here": r.text} for r in made.rows]
    if options.json:
        print(json.dumps({"ok": True, "python": python_of(made), "rows": rows}, indent=2, default=str))
        return 0
    print(python_of(made))
    print("\n".join(columns([(row["key"], shortened(row["value"], 30), row["state"], row["here"]) for row in rows])))
    return 0


def _of_accelerate(options: argparse.Namespace) -> int:
    """Print what a file of `accelerate config` becomes. Return 1 if it is refused."""
    from shardwright.integrations.plugins import of_file
    from shardwright.options.mapping_files import read_mapping

    made = of_file(read_mapping(options.file), options.file)
    wrap = [f"{name!r}: {value!r}" for name, value in made.wrap_options.items()]
    wrap += [f"'units': ({', '.join(made.units)},)"] if made.units else []
    python = f"accelerator = Accelerator(zero={made.zero}" + (f", wrap_options={{{', '.join(wrap)}}})" if wrap else ")")
    python = f"from shardwright.integrations.accelerate import Accelerator\n{python}"
    if made.clip_grad_norm:
        python += f"\n# before each step: accelerator.clip_grad_norm_(model.parameters(), {made.clip_grad_norm!r})"
    if options.json:
        rows = [{"key": key, "value": value, "here": here} for key, value, here in made.rows]
        print(json.dumps({"ok": True, "python": python, "rows": rows}, indent=2, default=str))
    else:
        print(python)
        print("\n".join(columns([(key, shortened(value, 30), here) for key, value, here in made.rows])))
    return 0


def _filled(given: dict[str, Any], ranks: int, steps: int) -> dict[str, Any]:
    """Replace each "auto" by the Trainer's default; derive an "auto" of the batch sizes from the given ones."""
    from shardwright.integrations.deepspeed.config import TRAINER_FIELDS, fill_auto

    if not _autos(given):
        return given
    args = types.SimpleNamespace(**_TRAINER)
    for key, field in TRAINER_FIELDS.items():
        setattr(args, field, _value(given, key, getattr(args, field)))
    args.adam_beta1, args.adam_beta2 = _value(given, "optimizer.params.betas", (args.adam_beta1, args.adam_beta2))
    total = given.get("train_batch_size")
    if isinstance(total, int):
        args.gradient_accumulation_steps = max(1, total // (args.per_device_train_batch_size * ranks))
    return fill_auto(given, args, world_size=ranks, num_training_steps=steps)


def _value(given: dict[str, Any], key: str, default: Any) -> Any:
    value: Any = given
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return default if value in (None, "auto") else value


def _autos(section: dict[str, Any], above: str = "") -> dict[str, str]:
    """Return the keys whose value is "auto"."""
    found: dict[str, str] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            found.update(_autos(value, f"{above}{name}."))
        elif value == "auto":
            found[f"{above}{name}"] = "auto"
    return found


def python_of(made: Plan) -> str:
    """Return the plan as a program that does not import deepspeed."""
    from shardwright.integrations.deepspeed.schedules import SCHEDULES

    rows, micro, steps = made.train_batch_size, made.micro_batch_size, made.accumulation_steps
    lines = [f"# {rows} rows a step: {micro} rows a backward, {steps} backwards a step"]
    if made.optimizer is not None:
        name, arguments = made.optimizer
        lines.append(f"optimizer = {name}(model.parameters(){_arguments(arguments)})")
    options = dict(made.wrap)
    if made.clip_grad_norm and made.loss_scale is None:
        options["clip_grad_norm"] = made.clip_grad_norm
    if made.shard_size:
        lines.append(f"mesh = init_device_mesh('cpu', (ranks // {made.shard_size}, {made.shard_size}))")
    mesh = ", device_mesh=mesh" if made.shard_size else ""
    lines.append(f"model, optimizer = sw.wrap(model, optimizer{_arguments(options)}{mesh})")
    if made.scheduler is not None:
        name, arguments = made.scheduler
        home = "sw.deepspeed" if name in SCHEDULES else "torch.optim.lr_scheduler"
        lines.append(f"scheduler = {home}.{name}(optimizer{_arguments(arguments)})")
    if made.loss_scale is not None:
        lines.append(f"scale = sw.deepspeed.LossScale({_arguments(made.loss_scale).removeprefix(', ')})")
    if made.autocast is not None:
        lines.append(f"with torch.autocast(device, {made.autocast}): loss = model(batch)")
    return "\n".join(lines) + "\n"


def _arguments(values: dict[str, Any]) -> str:
    return "".join(f", {name}={_code(value)}" for name, value in values.items())


def _code(value: Any) -> str:
    from shardwright.options.precision import Precision

    if isinstance(value, Precision):
        fields = {"param_dtype": value.param_dtype, "reduce_dtype": value.reduce_dtype}
        return f"sw.Precision({_arguments({n: v for n, v in fields.items() if v is not None}).removeprefix(', ')})"
    named = type(value).__module__.startswith("shardwright.")
    return f"sw.{value!r}" if named else repr(value)
