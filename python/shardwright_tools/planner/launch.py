"""Launch files: one function per launcher completes a file of the folder launch_files. All but accelerate's end in torchrun."""

from __future__ import annotations

import dataclasses
import re
import shlex
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .machine import Machine
from .shape import PlanError

_PORT = 29500
#: seconds before the limit in which a job saves its last step
_NOTICE_S = 120


@dataclasses.dataclass(frozen=True)
class Job:
    """A program and what a scheduler must know of it."""

    program: Sequence[str]
    machine: Machine
    name: str = "train"
    hours: float = 24.0
    cpus: int = 8  # per rank
    image: str = "pytorch/pytorch:latest"
    hostfile: str | None = None
    options: str = "zero0"  # of `shardwright run`
    mixed_precision: str = "no"
    made_by: str = "shardwright plan"


def launch_file(kind: str, job: Job) -> str:
    """Return the file of a launcher by its name. Raises PlanError for an unknown one."""
    if kind not in LAUNCHERS:
        raise PlanError(f"--launch must be one of {', '.join(LAUNCHERS)}, got {kind!r}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", job.name):
        raise PlanError(f"--name must be 1 to 40 lower-case letters, digits, hyphens, a letter first, got {job.name!r}")
    return LAUNCHERS[kind](job)


class _File(string.Template):
    """A launch file of the folder launch_files, in which `%` begins a name, and `%%` is one."""

    delimiter = "%"

    @classmethod
    def filled(cls, file: str, job: Job, **values: Any) -> str:
        text = (Path(__file__).with_name("launch_files") / file).read_text(encoding="utf-8")
        own = {"name": job.name, "made_by": job.made_by, "hosts": job.machine.hosts, "threads": _threads(job)}
        return cls(text).substitute({**own, "notice": _NOTICE_S, **values})


def _threads(job: Job) -> str:
    """Return torchrun's variable of threads. Ranks on CPUs compute with all their processors, others only start kernels."""
    return f"export OMP_NUM_THREADS={1 if job.machine.on_gpu else max(1, job.cpus)}"


def _elastic(job: Job, address: str, indent: str = "    ", quote: str = '"') -> str:
    """Return torchrun's command for one host of several: a rendezvous that survives restarts and a lost host's return."""
    start = f"torchrun --nnodes={job.machine.hosts} --nproc-per-node={job.machine.ranks} --max-restarts=3"
    endpoint = f"{quote}{address}:{_PORT}{quote}"
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id={shlex.quote(job.name)}"
    return f" \\\n{indent}".join([start, meeting, shlex.join(job.program)])


def _script(job: Job, *lines: str) -> str:
    return "\n".join(["#!/usr/bin/env bash", f"# {job.made_by}", "set -euo pipefail", _threads(job), *lines]) + "\n"


def _torchrun(job: Job) -> str:
    if job.machine.hosts > 1:
        return _File.filled("torchrun.sh", job, torchrun=_elastic(job, "$MASTER_ADDR"))
    command = f"torchrun --standalone --nproc-per-node={job.machine.ranks} --max-restarts=3"
    return _script(job, f"exec {command} \\\n    {shlex.join(job.program)}")


def _accelerate(job: Job) -> str:
    machine, lines = job.machine, []
    if not machine.on_gpu:  # with --cpu accelerate starts one process; its --multi_gpu starts all, which then use CPUs
        lines.append("export ACCELERATE_USE_CPU=1")
    start = f"accelerate launch --multi_gpu --num_processes {machine.world} --mixed_precision {job.mixed_precision}"
    meeting = "--num_machines 1"
    if machine.hosts > 1:
        lines += [
            "# Run this on each host, with its own NODE_RANK. MASTER_ADDR is an address of the host with NODE_RANK 0.",
            ': "${MASTER_ADDR:?the address of the host with NODE_RANK 0}" "${NODE_RANK:?the number of this host, from 0}"',
        ]
        meeting = f'--num_machines {machine.hosts} --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port {_PORT}'
    run = f"-m shardwright run {shlex.quote(job.options)} {shlex.join(job.program)}"
    return _script(job, *lines, "exec " + " \\\n    ".join([start, f"{meeting} --dynamo_backend no", run]))


def _slurm(job: Job) -> str:
    machine = job.machine
    days, rest = divmod(max(1, round(60 * job.hours)), 24 * 60)
    return _File.filled(
        "slurm.sh",
        job,
        cpus=job.cpus * machine.ranks,
        gpus=f"\n#SBATCH --gpus-per-node={machine.ranks}" if machine.on_gpu else "",
        time=f"{days}-{rest // 60:02d}:{rest % 60:02d}:00",
        torchrun=_elastic(job, "$head"),
    )


def _sky(job: Job) -> str:
    machine = job.machine
    resources = f"cpus: {job.cpus * machine.ranks}+"
    if machine.on_gpu:
        resources = f"accelerators: {(machine.gpu or 'H100').upper()}:{machine.ranks}"
        resources += "\n  network_tier: best" if machine.hosts > 1 else ""
    return _File.filled("sky.yaml", job, resources=resources, torchrun=_elastic(job, "$head", "      "))


def _jobset(job: Job) -> str:
    machine = job.machine
    resources = f"nvidia.com/gpu: {machine.ranks}" if machine.on_gpu else f"cpu: {job.cpus * machine.ranks}"
    torchrun = _elastic(job, f"{job.name}-ranks-0-0.{job.name}", 18 * " ", quote="")
    threads = _threads(job).partition("=")[2]
    return _File.filled("jobset.yaml", job, image=job.image, resources=resources, torchrun=torchrun, threads=threads)


def hosts_of(path: str) -> list[tuple[str, int]]:
    """Return (host, slots) of a DeepSpeed or MPI hostfile: lines "host slots=N"."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = words[1][6:] if len(words) == 2 and words[1].startswith("slots=") else ""
        if not slots.isdecimal() or not int(slots) or not re.fullmatch(r"[\w.:\[\]][\w.:\[\]-]*", words[0]):
            raise PlanError(f'{path}:{number} must read "host slots=N", got {line.strip()!r}')
        found.append((words[0], int(slots)))
    if not found or len({slots for _, slots in found}) > 1:
        raise PlanError(
            f"{path} must name at least one host, all with the same number of slots; torchrun starts equal hosts"
        )
    return found


def _hostfile(job: Job) -> str:
    if job.hostfile is None:
        raise PlanError("--launch hostfile needs --hostfile FILE")
    names = [host for host, _ in hosts_of(job.hostfile)]
    torchrun = _elastic(job, names[0]).replace(" \\\n   ", "")
    inside = f"cd {{}} && {_threads(job)} && exec {torchrun}"
    given = {"hostfile": job.hostfile, "command": shlex.quote(inside), "names": shlex.join(names)}
    return _File.filled("hostfile.sh", job, **given)


LAUNCHERS: dict[str, Callable[[Job], str]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "slurm": _slurm,
    "sky": _sky,
    "jobset": _jobset,
    "hostfile": _hostfile,
}
