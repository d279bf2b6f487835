"""`shardwright plan --simulate`: the planned step on a simulated clock, and the run among failures."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..planner.calibration import rates_of
from ..planner.choose import Candidate, Work
from ..planner.costs import COMPRESSORS, Run
from ..planner.failures import recover
from ..planner.machine import Machine, bytes_of
from ..planner.saving import SavePlan
from ..planner.shape import PlanError, Shape
from ..planner.simulate import simulate

_NEED = ("zero", "prefetch", "compress", "chunks", "straggler", "calibration", "restart_seconds")
_RESTART_S = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the simulated step")
    group.add_argument("--simulate", action="store_true", help="simulate a step, and failures of a long run")
    group.add_argument("--zero", type=int, metavar="STAGE", help="simulate this stage; default: the chosen one")
    group.add_argument("--prefetch", type=int, metavar="N", help="units gathered ahead at zero=3 on GPUs (default: 1)")
    group.add_argument("--compress", metavar="NAME", help=f"{', '.join(COMPRESSORS)}; powersgd:8 has rank 8")
    group.add_argument("--chunks", type=int, metavar="N", help="virtual stages per pipeline rank (default: 1)")
    group.add_argument(
        "--straggler", action="append", metavar="RANK=FACTOR", help="a rank that computes FACTOR times as long"
    )
    group.add_argument("--calibration", metavar="FILE", help="measured rates, a JSON object; default: a table's")
    text = f"from a failure to training (default: {_RESTART_S:g})"
    group.add_argument("--restart-seconds", type=float, metavar="S", help=text)


def _stragglers(given: list[str]) -> dict[int, float]:
    found = {}
    for text in given:
        rank, equals, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            equals = ""
        if not equals:
            raise PlanError(f"--straggler must be RANK=FACTOR such as 17=1.3, got {text!r}")
    return found


def refuse_without(options: argparse.Namespace) -> None:
    """Raise for an option that only a simulation reads."""
    given = [name for name in _NEED if getattr(options, name) is not None]
    if given and not options.simulate:
        raise PlanError(f"--{given[0].replace('_', '-')} needs --simulate, which reads it")
    if options.simulate and (options.launch is not None or options.form is not None):
        raise PlanError("pass one of --simulate, --launch and --form")


def simulated(
    options: argparse.Namespace, shape: Shape, machine: Machine, work: Work, chosen: Candidate, saves: SavePlan
) -> dict[str, Any]:
    """Return the step of the chosen configuration, or of --zero, with and without its stragglers, and the run's goodput."""
    zero = chosen.zero if options.zero is None else options.zero
    run = Run(
        zero,
        chosen.checkpointed,
        prefetch=1 if options.prefetch is None else options.prefetch,
        compress=options.compress,
        chunks=1 if options.chunks is None else options.chunks,
        private=zero == 3 and chosen.offload is not None,
        stragglers=_stragglers(options.straggler or []),
    )
    work = dataclasses.replace(work, tp=chosen.tp, pp=chosen.pp)
    rates = rates_of(machine, options.calibration)
    made = simulate(shape, machine, work, run, rates)
    even = simulate(shape, machine, work, dataclasses.replace(run, stragglers={}), rates) if run.stragglers else made
    write_s = saves.checkpoint_bytes / bytes_of(options.disk_rate, "--disk-rate")
    restart_s = _RESTART_S if options.restart_seconds is None else options.restart_seconds
    recovery = recover(saves.mtbf_s, saves.save_s, restart_s, write_s)
    label = dataclasses.replace(chosen, zero=zero).label
    return {
        "configuration": label,
        "ranks": machine.world,
        **dataclasses.asdict(made),
        "without_stragglers_s": even.step_s,
        "recovery": dataclasses.asdict(recovery),
        "rates": dataclasses.asdict(rates),
        "tokens_per_s_with_failures": made.tokens_per_s * recovery.goodput,
    }


_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "tensor": "waits of tp and cp inside layers",
    "pipeline": "idle in the pipeline",
    "communication": "exposed communication, and waits for slower ranks",
    "optimizer": "optimizer",
}


def lines(found: dict[str, Any]) -> list[str]:
    step, recovery = found["step_s"], found["recovery"]
    mfu = "" if found["mfu"] is None else f", {found['tflops']:.0f} TFLOP/s per rank, MFU {100 * found['mfu']:.1f} %"
    text = [
        "",
        f"Simulated, {found['configuration']}: a step takes {_shown(step)}: {found['tokens_per_s']:,.0f} tokens/s{mfu}.",
        *(
            f"  {100 * found['seconds'][name] / step:5.1f} %  {_shown(found['seconds'][name]):>9}  {meaning}"
            for name, meaning in _NAMES.items()
            if found["seconds"].get(name, 0.0) > 5e-4 * step
        ),
        f"The link of data-parallel ranks is in use for {100 * found['link_busy']:.0f} % of the step. "
        f"{found['ranks']:,} ranks in {found['classes']:,} class{'es' if found['classes'] > 1 else ''}, {found['events']:,} events.",
    ]
    even = found["without_stragglers_s"]
    if even != step:
        text.append(f"Without stragglers it takes {_shown(even)}: they cost {100 * (step / even - 1):.1f} %.")
    text += [
        f"Failures: {100 * recovery['goodput']:.2f} % of the time trains with a save every {recovery['every_s']:.0f} s, the best interval "
        f"simulated; a restart takes {recovery['restart_s']:.0f} s.",
        f"Young's interval, {recovery['young_s']:.0f} s: {100 * recovery['young_goodput']:.2f} %; Daly's, {recovery['daly_s']:.0f} s: "
        f"{100 * recovery['daly_goodput']:.2f} %.",
    ]
    return text


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
