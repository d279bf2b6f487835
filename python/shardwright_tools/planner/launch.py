"""Launch files: one function per launcher returns a complete file. All but accelerate's end in torchrun."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

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


def _threads(job: Job) -> str:
    """Return torchrun's variable of threads. Ranks on CPUs compute with all their processors, others only start kernels."""
    return f"export OMP_NUM_THREADS={1 if job.machine.on_gpu else max(1, job.cpus)}"


def _program(job: Job) -> str:
    return " ".join(map(shlex.quote, job.program))


def _elastic(job: Job, address: str) -> str:
    """Return torchrun's command for one host of several: a rendezvous that survives restarts and a lost host's return."""
    start = f"torchrun --nnodes={job.machine.hosts} --nproc-per-node={job.machine.ranks} --max-restarts=3"
    meeting = f'--rdzv-backend=c10d --rdzv-endpoint="{address}:{_PORT}" --rdzv-id={shlex.quote(job.name)}'
    return " \\\n    ".join([start, meeting, _program(job)])


def _text(job: Job, lines: Sequence[str]) -> str:
    return "\n".join([f"# {job.made_by}", *lines]) + "\n"


def _script(job: Job, lines: Sequence[str]) -> str:
    return "#!/usr/bin/env bash\n" + _text(job, lines)


def _torchrun(job: Job) -> str:
    if job.machine.hosts == 1:
        command = f"torchrun --standalone --nproc-per-node={job.machine.ranks} --max-restarts=3 \\\n    {_program(job)}"
        lines = ["set -euo pipefail", _threads(job), f"exec {command}"]
    else:
        lines = [
            "#",
            "# Run this on each host. MASTER_ADDR is an address of one of them that all reach.",
            "set -euo pipefail",
            ': "${MASTER_ADDR:?an address of one host that all hosts reach}"',
            _threads(job),
            f"exec {_elastic(job, '$MASTER_ADDR')}",
        ]
    return _script(job, lines)


def _accelerate(job: Job) -> str:
    machine = job.machine
    lines = ["set -euo pipefail", _threads(job)]
    if not machine.on_gpu:  # with --cpu accelerate starts one process; its --multi_gpu starts all, which then use CPUs
        lines.append("export ACCELERATE_USE_CPU=1")
    words = [f"accelerate launch --multi_gpu --num_processes {machine.world} --mixed_precision {job.mixed_precision}"]
    if machine.hosts > 1:
        lines += [
            "# Run this on each host, with its own NODE_RANK. MASTER_ADDR is an address of the host with NODE_RANK 0.",
            ': "${MASTER_ADDR:?the address of the host with NODE_RANK 0}" "${NODE_RANK:?the number of this host, from 0}"',
        ]
        words.append(
            f'--num_machines {machine.hosts} --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port {_PORT}'
        )
    else:
        words.append("--num_machines 1")
    words[-1] += " --dynamo_backend no"
    run = f"-m shardwright run {shlex.quote(job.options)} {_program(job)}"
    return _script(job, [*lines, "exec " + " \\\n    ".join([*words, run])])


def _time(hours: float) -> str:
    days, rest = divmod(max(1, round(60 * hours)), 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _slurm(job: Job) -> str:
    machine = job.machine
    lines = [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={machine.hosts}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={job.cpus * machine.ranks}",
        *([f"#SBATCH --gpus-per-node={machine.ranks}"] if machine.on_gpu else []),
        f"#SBATCH --time={_time(job.hours)}",
        f"#SBATCH --signal=B:USR1@{_NOTICE_S}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        "#",
        "# One torchrun per node starts its ranks. This script gets USR1 before the time limit, and torchrun TERM, which it hands",
        "# on: with sw.Checkpointer(..., save_on=(signal.SIGTERM,)) the ranks save and end, within 30 s. The job then goes back",
        "# into the queue until the program has made the file `done`. A job that fails is not started again.",
        "set -euo pipefail",
        _threads(job),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "noticed=",
        """trap 'noticed=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # to srun's steps""",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 ' + _elastic(job, "$head") + " &",
        "step=$!",
        "status=0",
        'wait "$step" || status=$?',
        '[ -n "$noticed" ] || exit "$status"',
        'wait "$step" || true # the signal ended the first wait; torchrun ends with another code than its ranks',
        '[ -e done ] || scontrol requeue "$SLURM_JOB_ID"',
    ]
    return _script(job, lines)


def _sky(job: Job) -> str:
    machine = job.machine
    if machine.on_gpu:
        resources = [f"  accelerators: {(machine.gpu or 'H100').upper()}:{machine.ranks}"]
        resources += ["  network_tier: best"] if machine.hosts > 1 else []
    else:
        resources = [f"  cpus: {job.cpus * machine.ranks}+"]
    lines = [
        "#",
        "# sky jobs launch --env RUN_ROOT=s3://bucket/runs FILE: a spot machine that is taken away comes back as another one, under the",
        "# same SKYPILOT_TASK_ID. The program keeps its checkpoints in RUN_FOLDER, which outlives machines.",
        f"name: {job.name}",
        f"num_nodes: {machine.hosts}",
        "resources:",
        *resources,
        "  use_spot: true",
        "workdir: .",
        "envs: {RUN_ROOT: null}",
        "setup: |",
        "  pip install .",
        "run: |",
        '  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        '  export RUN_FOLDER="$RUN_ROOT/$SKYPILOT_TASK_ID"',
        f"  {_threads(job)}",
        *(f"  {line}" for line in _elastic(job, "$head").splitlines()),
    ]
    return _text(job, lines)


def _jobset(job: Job) -> str:
    machine = job.machine
    resources = f"nvidia.com/gpu: {machine.ranks}" if machine.on_gpu else f"cpu: {job.cpus * machine.ranks}"
    command = [f"torchrun --nnodes={machine.hosts} --nproc-per-node={machine.ranks} --max-restarts=3"]
    command += [f"--rdzv-backend=c10d --rdzv-endpoint={job.name}-ranks-0-0.{job.name}:{_PORT} --rdzv-id={job.name}"]
    command += [_program(job)]
    threads = _threads(job).removeprefix("export ").partition("=")[2]
    lines = [
        "#",
        "# kubectl apply -f FILE; needs the JobSet controller. Set image: to one that holds your program and shardwright, and mount a",
        "# folder that all pods share for checkpoints. Pod 0 is the meeting point, by the name that the headless service",
        "# of the JobSet gives it. /dev/shm holds buckets and parameters that ranks of a host share.",
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        "metadata:",
        f"  name: {job.name}",
        "spec:",
        "  network: {enableDNSHostnames: true, publishNotReadyAddresses: true, subdomain: %s}" % job.name,
        "  failurePolicy: {maxRestarts: 10}",
        "  replicatedJobs:",
        "  - name: ranks",
        "    replicas: 1",
        "    template:",
        "      spec:",
        f"        parallelism: {machine.hosts}",
        f"        completions: {machine.hosts}",
        "        completionMode: Indexed",
        "        backoffLimit: 0",
        "        template:",
        "          spec:",
        "            restartPolicy: Never",
        f"            terminationGracePeriodSeconds: {_NOTICE_S}",
        "            containers:",
        "            - name: ranks",
        f"              image: {job.image}",
        "              env:",
        f'              - {{name: OMP_NUM_THREADS, value: "{threads}"}}',
        "              command: [bash, -c]",
        "              args:",
        "              - |",
        *(f"                {line}" for line in ("exec " + " \\\n  ".join(command)).splitlines()),
        "              resources:",
        f"                limits: {{{resources}}}",
        "              volumeMounts:",
        "              - {name: shm, mountPath: /dev/shm}",
        "            volumes:",
        "            - name: shm",
        "              emptyDir: {medium: Memory}",
    ]
    return _text(job, lines)


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
    hosts = hosts_of(job.hostfile)
    command = _elastic(job, hosts[0][0]).replace(" \\\n   ", "")
    inside = f"cd {{}} && {_threads(job)} && exec {command}"
    lines = [
        "#",
        f"# torchrun on each host of {job.hostfile}, over ssh, in this folder. The first host is the meeting point.",
        "set -euo pipefail",
        'here=$(printf %q "$PWD")',
        f"command={shlex.quote(inside)}",
        f"for host in {' '.join(shlex.quote(host) for host, _ in hosts)}; do",
        '    ${SSH:-ssh} "$host" "${command/\\{\\}/$here}" &',
        "done",
        "status=0",
        'for child in $(jobs -p); do wait "$child" || status=$?; done',
        "exit $status",
    ]
    return _script(job, lines)


LAUNCHERS: dict[str, Callable[[Job], str]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "slurm": _slurm,
    "sky": _sky,
    "jobset": _jobset,
    "hostfile": _hostfile,
}
