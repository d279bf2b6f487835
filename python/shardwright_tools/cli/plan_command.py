"""`shardwright plan`: what fits, which configuration to run and why, and the files that start it."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from typing import Any, NamedTuple

from ..planner import choose, forms, launch, saving
from ..planner.choose import Candidate, Choice, Work, as_dict
from ..planner.machine import GPUS, Machine, bytes_of, count_of, link_of, shown_bytes
from ..planner.memory import OPTIMIZERS, PRECISIONS
from ..planner.saving import SavePlan
from ..planner.shape import PlanError, Shape, from_config, from_module, from_numbers
from . import plan_simulate
from .report import columns, print_report, refuse, show

DESCRIPTION = """Print what a model needs at each stage, the configuration to run with its reason, how often to save, and launch files.
Closed formulas: no GPU, no download."""
EPILOG = """Examples:
  shardwright plan config.json --hosts 1 --ranks 8 --gpu h100 --tokens 1T
  shardwright plan --parameters 7B --layers 32 --width 4096 --vocabulary 32000 --ranks 8 --memory 80GB
  shardwright plan train.py:build_model --ranks 4 --memory 6GB --json
  shardwright plan config.json --hosts 128 --ranks 8 --gpu h100 --simulate --straggler 17=1.3
  shardwright plan config.json --hosts 2 --ranks 8 --gpu h100 --launch slurm -- train.py --steps 1000 > train.sbatch

Exit codes: 0 a configuration fits, 2 nothing fits or the input is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a config.json or its folder, or module:name or file.py:name")
    model = parser.add_argument_group("the model by numbers")
    model.add_argument("--parameters", metavar="COUNT", help="such as 7B")
    for name in ("layers", "width", "vocabulary", "heads", "kv-heads", "inner"):
        model.add_argument(f"--{name}", metavar="COUNT")
    ranks = parser.add_argument_group("the machine")
    ranks.add_argument("--hosts", type=int, default=1, metavar="N")
    ranks.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks per host (default: 1)")
    ranks.add_argument("--memory", metavar="SIZE", help="per rank, such as 80GB; default: the GPU's")
    ranks.add_argument("--gpu", metavar="NAME", help="such as h100; without it ranks compute on CPUs")
    ranks.add_argument("--peak", type=float, metavar="TFLOP/S", help="peak rate per rank; default: the GPU's")
    ranks.add_argument("--mfu", type=float, default=0.4, help="the part of it that training reaches (default: 0.4)")
    ranks.add_argument("--link", metavar="RATE", help="inside a host: a name such as nvlink, or 300GB/s")
    ranks.add_argument("--network", metavar="RATE", help="between hosts: a name such as 8x400g, or 100Gbit")
    work = parser.add_argument_group("the run")
    work.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per rank and forward (default: 1)")
    work.add_argument("--sequence", type=int, default=2048, metavar="TOKENS", help="of each sequence (default: 2048)")
    work.add_argument("--accumulate", type=int, default=1, metavar="N", help="forwards per step (default: 1)")
    work.add_argument("--tokens", metavar="COUNT", help="tokens of the run, such as 1T")
    work.add_argument("--steps", metavar="COUNT", help="steps of the run, instead of --tokens")
    work.add_argument("--optimizer", default="adamw", metavar="NAME")
    work.add_argument("--precision", metavar="NAME", help="fp32, bf16, bf16-parameters, fp16; default: bf16 on GPUs")
    for name, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("cp", "context")):
        work.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{meaning} parallel ranks (default: 1)")
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--mtbf-hours", type=float, metavar="H", help="mean time between failures of the job")
    saving.add_argument("--save-seconds", type=float, metavar="S", help="training time that one save costs")
    saving.add_argument("--disk-rate", default="1GB", metavar="SIZE", help="bytes per second written (default: 1GB)")
    saving.add_argument("--folder", help="where checkpoints go: warns of a disk that does not outlive the job")
    saving.add_argument("--keep-last", type=int, default=3, metavar="N")
    saving.add_argument("--milestones", type=int, default=0, metavar="N", help="checkpoints kept for good")
    rate = parser.add_argument_group("learning rate")
    rate.add_argument("--learning-rate", type=float, metavar="LR", help="at --base-batch: print it for this batch")
    rate.add_argument("--base-batch", metavar="TOKENS", help="tokens per step for which --learning-rate was found")
    rate.add_argument("--rule", metavar="NAME", help="linear or sqrt; default: sqrt for Adam, else linear")
    plan_simulate.add_options(parser)
    out = parser.add_argument_group("what to print")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    out.add_argument("--form", metavar="NAME", help="print this configuration: wrap, accelerate, fsdp2 or deepspeed")
    out.add_argument(
        "--launch",
        metavar="NAME",
        help="print only a launch file: torchrun, accelerate, slurm, sky, jobset, hostfile; the program follows after --",
    )
    out.add_argument("--hostfile", metavar="FILE", help="hosts and ranks of --launch hostfile, and of the plan")
    out.add_argument("--hours", type=float, default=24.0, metavar="H", help="the job's time limit (default: 24)")
    out.add_argument("--cpus", type=int, default=8, metavar="N", help="processors per rank (default: 8)")
    out.add_argument("--name", default="train", help="the job's name")


def run(options: argparse.Namespace) -> int:
    """Print the plan. Return 0 if something fits, 2 if nothing does or no plan can be made of the input."""
    try:
        return _run(options)
    except PlanError as error:
        return refuse(options, str(error), command="shardwright plan: ")


def _run(options: argparse.Namespace) -> int:
    plan_simulate.refuse_without(options)
    machine = _machine(options)
    work = _work(options, machine)
    shape = _shape(options)
    found = choose.choose(shape, machine, work)
    if options.form is not None and options.form not in forms.FORMS:
        raise PlanError(f"--form must be one of {', '.join(forms.FORMS)}, got {options.form!r}")
    if (options.launch is not None) + (options.form is not None) + options.json > 1:
        raise PlanError("pass one of --launch, --form and --json")
    if options.launch is not None:
        program = options.after or ["train.py"]
        job = launch.Job(
            *(program, machine, options.name, options.hours, options.cpus),
            hostfile=options.hostfile,
            options=forms.run_options(found.chosen, machine),
            mixed_precision=forms.mixed(work),
            made_by=f"made by: shardwright {shlex.join([*options.words, '--', *program])}",
        )
        show(launch.launch_file(options.launch, job).removesuffix("\n"))
        if not found.chosen.fits:
            print(f"shardwright plan: {found.reason}", file=sys.stderr)
        return 0 if found.chosen.fits else 2
    if options.form is not None:
        show(forms.FORMS[options.form](found.chosen, machine, work))
        return 0 if found.chosen.fits else 2
    saves = saving.save_plan(
        shape,
        optimizer=work.optimizer,
        precision=work.precision,
        ranks=machine.world,
        mtbf_s=None if options.mtbf_hours is None else 3600 * options.mtbf_hours,
        save_s=options.save_seconds,
        disk_rate=bytes_of(options.disk_rate, "--disk-rate"),
        keep_last=options.keep_last,
        milestones=options.milestones,
        folder=options.folder,
    )
    rate = None
    if options.learning_rate is None and (options.base_batch or options.rule):
        raise PlanError("--base-batch and --rule need --learning-rate, which they scale")
    if options.learning_rate is not None:
        if options.base_batch is None:
            raise PlanError("--learning-rate needs --base-batch, the tokens per step for which it was found")
        rule = options.rule or ("sqrt" if work.optimizer.startswith("adam") else "linear")
        base = count_of(options.base_batch, "--base-batch")
        rate = saving.learning_rate(options.learning_rate, base, found.global_batch_tokens, rule)
    tables = {name: choose.candidates(shape, machine, dataclasses.replace(work, precision=name)) for name in PRECISIONS}
    report = _Report(shape, machine, work, found, tables, saves, rate)
    simulated = (
        plan_simulate.simulated(options, shape, machine, work, found.chosen, saves) if options.simulate else None
    )
    if options.json:
        print_report(options, _as_json(report) | ({"simulation": simulated} if simulated else {}), [])
    else:
        print_report(options, None, _lines(report) + (plan_simulate.lines(simulated) if simulated else []))
    return 0 if found.chosen.fits else 2


def _in_range(options: argparse.Namespace, *names: str, least: int | None = None) -> None:
    """Raise PlanError for a number that is not positive, or not at least `least`, and for one that no machine has."""
    for name in names:
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not (value > 0 if least is None else value >= least):
            raise PlanError(f"--{name} must be {'positive' if least is None else f'at least {least}'}, got {value}")
        if value is not None and value > 1e9:
            raise PlanError(f"--{name} must be at most 1,000,000,000, got {value}")


def _machine(options: argparse.Namespace) -> Machine:
    _in_range(options, "hosts", "ranks", "peak", "batch", "sequence", "accumulate", "cpus", "hours", "keep-last")
    _in_range(options, "mtbf-hours", "save-seconds", "learning-rate")
    _in_range(options, "restart-seconds", least=0)
    _in_range(options, "milestones", least=0)
    if not 0 < options.mfu <= 1:
        raise PlanError(f"--mfu must be above 0 and at most 1, got {options.mfu}")
    gpu = options.gpu.lower() if options.gpu else None
    if gpu is not None and gpu not in GPUS:
        raise PlanError(f"--gpu must be one of {', '.join(GPUS)}, got {options.gpu!r}; else pass --memory and --peak")
    if options.memory is None and gpu is None:
        raise PlanError(
            "--memory is needed: the bytes that each rank may use, such as 80GB (or --gpu, which has its own)"
        )
    memory = bytes_of(options.memory, "--memory") if options.memory is not None else GPUS[gpu or ""][2] * 10**9
    on_gpu = gpu is not None
    inside = link_of(options.link or ("nvlink" if on_gpu else "shm"), "--link")
    between = link_of(options.network or ("8x400g" if on_gpu else "10g"), "--network")
    hosts, ranks = options.hosts, options.ranks
    if options.hostfile is not None:
        listed = launch.hosts_of(options.hostfile)
        hosts, ranks = len(listed), listed[0][1]
    item = 4 if options.precision == "fp32" or (options.precision is None and not on_gpu) else 2
    peak = GPUS[gpu][0 if item == 2 else 1] if options.peak is None and gpu else options.peak
    return Machine(hosts, ranks, memory, inside, between, on_gpu, gpu, peak, GPUS[gpu][3] if gpu else True)


def _work(options: argparse.Namespace, machine: Machine) -> Work:
    default = "fp32" if not machine.on_gpu else "bf16" if machine.has_bf16 else "fp16"
    precision = options.precision or default
    if precision not in PRECISIONS:
        raise PlanError(f"--precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if options.optimizer not in OPTIMIZERS:
        raise PlanError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {options.optimizer!r}")
    same = ("sequence", "accumulate", "optimizer", "mfu", "tp", "pp", "ep", "cp")
    tokens = None if options.tokens is None else count_of(options.tokens, "--tokens")
    given = {name: getattr(options, name) for name in same}
    work = Work(micro_batch=options.batch, tokens=tokens, precision=precision, **given)
    if options.steps is not None:
        if options.tokens is not None:
            raise PlanError("pass --tokens or --steps, not both")
        data = machine.world // max(1, work.tp * work.pp * work.cp)
        per_step = data * work.micro_batch * work.sequence * work.accumulate
        work = dataclasses.replace(work, tokens=count_of(options.steps, "--steps") * per_step)
    return work


def _shape(options: argparse.Namespace) -> Shape:
    names = ("parameters", "layers", "width", "vocabulary", "heads", "kv_heads", "inner")
    given: dict[str, Any] = {
        name: count_of(text, f"--{name}") for name in names if (text := getattr(options, name)) is not None
    }
    if options.model is None:
        cut = given.keys() & {"layers", "width"}
        if ("parameters" in given and not cut) or (len(cut) == 2 and "vocabulary" in given):
            return from_numbers(**given)
        numbers = "--parameters such as 7B, or --layers, --width and --vocabulary"
        raise PlanError(f"no model: pass a config.json, module:name, {numbers}")
    if given:
        raise PlanError(f"pass a model or numbers, not both: got {options.model} and --{next(iter(given))}")
    model: str = options.model
    return from_module(model) if ":" in model and not model.endswith(".json") else from_config(model)


class _Report(NamedTuple):
    shape: Shape
    machine: Machine
    work: Work
    found: Choice
    tables: dict[str, list[Candidate]]  # by precision
    saves: SavePlan
    rate: tuple[float, str] | None


def _as_json(report: _Report) -> dict[str, Any]:
    shape, machine, work, found, tables, saves, rate = report
    made, missing = {}, {}
    for name, make in forms.FORMS.items():
        try:
            made[name] = make(found.chosen, machine, work)
        except PlanError as error:  # the other engine lacks a degree
            missing[name] = str(error)
    return {
        "ok": found.chosen.fits,
        "model": {"name": shape.name, "parameters": shape.numel, "active_parameters": shape.active_numel},
        "machine": dataclasses.asdict(machine),
        "work": dataclasses.asdict(work),
        "table": [as_dict(each) for each in tables.pop(work.precision)],
        "other_precisions": {name: [as_dict(each) for each in table] for name, table in tables.items()},
        "chosen": as_dict(found.chosen),
        "reason": found.reason,
        "nearest_that_does_not_fit": None if found.nearest is None else as_dict(found.nearest),
        "notes": found.notes,
        "seconds_per_step": found.seconds,
        "tokens_per_step": found.global_batch_tokens,
        "days": found.days,
        "checkpoints": dataclasses.asdict(saves),
        "learning_rate": None if rate is None else {"value": rate[0], "source": rate[1]},
        "forms": made,
        "missing_forms": missing,
    }


_COLUMNS = ("parameters", "gradients", "state", "units", "activations", "other")


def _lines(report: _Report) -> list[str]:
    shape, machine, work, found, tables, saves, rate = report
    chosen, memory = found.chosen, machine.memory
    active = f" ({shape.active_numel / 1e9:.3g} B per token)" if shape.active_numel != shape.numel else ""
    where = f"{machine.hosts} x {machine.ranks} ranks with {shown_bytes(memory)}"
    lines = [f"{shape.name}: {shape.numel:,} parameters{active}, {work.precision}, {work.optimizer}, on {where}", ""]
    rows = [["per rank", *_COLUMNS, "total", ""]]
    for each in tables.pop(work.precision):
        held = {**vars(each.memory), "other": each.memory.buffers + each.memory.workspace + each.memory.runtime}
        cells = [shown_bytes(held[name]) if held[name] else "-" for name in _COLUMNS]
        note = "fits" if each.fits else f"{shown_bytes(each.over)} over"
        label = each.label.replace("activation checkpointing", "checkpointing")
        rows.append([label, *cells, shown_bytes(each.memory.total), note])
    lines += columns(rows, right=range(1, len(rows[0])))
    inside = (
        (chosen.memory.buckets, "gradients", "buckets in flight"),
        (chosen.memory.masters, "state", "float32 masters"),
    )
    shares = [f"{shown_bytes(size)} of its {name} are {part}" for size, name, part in inside if size]
    lines.append("units: whole layers and compute copies; other: the loss, buffers, the runtime")
    lines += ["", found.reason, *(f"{share}." for share in shares)]
    same = [(name, each) for name, table in tables.items() for each in table if each.label == chosen.label]
    if same:
        lines.append(
            "The same takes " + ", ".join(f"{shown_bytes(each.memory.total)} in {name}" for name, each in same) + "."
        )
    if found.nearest is not None and chosen.fits:
        nearest = found.nearest
        lines.append(
            f"Nearest that does not fit: {nearest.label}, {shown_bytes(nearest.memory.total)}, {shown_bytes(nearest.over)} too much."
        )
    lines += ["", *(f"    {line}" for line in forms.wrap_call(chosen, machine, work).splitlines())]
    lines += [""] * bool("compute" in found.seconds or found.notes)
    if "compute" in found.seconds:
        seconds = found.seconds["compute"] + found.seconds["exposed"]
        text = f"A step of {found.global_batch_tokens:,} tokens takes {seconds:.3g} s at {100 * work.mfu:.0f} % of the peak rate"
        if found.days is not None:
            text += f"; {work.tokens:,} tokens take {found.days:.3g} days (6 N T / rate)"
        lines.append(text + ".")
    lines += [f"- {note}" for note in found.notes]
    lines += ["", *_save_lines(saves)]
    if rate is not None:
        lines += ["", f"Learning rate for {found.global_batch_tokens:,} tokens per step: {rate[0]:.3g} ({rate[1]})."]
    return lines


def _save_lines(saves: SavePlan) -> list[str]:
    days = saves.mtbf_s / 86400
    often = f"{days:.3g} days" if days >= 1 else f"{24 * days:.3g} hours"
    return [
        f"Save every {saves.every_s:.0f} s (sw.Checkpointer.save(step, every_s={saves.every_s:.0f})): one failure per {often}, "
        f"{saves.save_s:.2g} s of training per save, {100 * saves.lost:.2g} % of the time lost in all (Young 1974, Daly 2006).",
        f"A checkpoint takes {shown_bytes(saves.checkpoint_bytes)}; keep_last={saves.keep_last} and one being written: "
        f"{shown_bytes(saves.disk_bytes)} of disk.",
        *(f"- {note}" for note in saves.notes),
    ]
