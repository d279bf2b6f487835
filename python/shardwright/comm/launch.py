"""The launch of this process: rank, world size and meeting point, from the variables of launchers (docs/launch.md).

Text only, no network. A launcher is present if its rank variable is set. The inner launcher wins: torchrun runs inside
SLURM's tasks, and Open MPI's daemons are SLURM's tasks. Variables that contradict each other are an error; they never
silently mean one rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

DEFAULT_PORT = 29500
#: range of the port computed from SLURM's job and step: a prime number of ports, below those that the kernel assigns
_PORT_FIRST, _PORT_COUNT = 10_000, 19_997
#: one word of SLURM's lists of hosts
_HOST = r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"

#: all variables that read_launch reads
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_LAUNCH_NODE_IPADDR", "SLURMD_NODENAME", "ENVIRONMENT"),
)


class Launch(NamedTuple):
    """A launch. `local_rank` is None if the launcher did not set it, and `master_addr` "" for one rank without an address."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    master_addr: str
    master_port: int


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that `environment` describes, None without a launcher. ValueError names a wrong variable."""
    read = _Reader(environment)
    # SLURM runs a batch script as task 0 outside any step; srun starts the job's tasks
    is_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if "RANK" in environment:
        found = _torchrun(read)
    elif "OMPI_COMM_WORLD_RANK" in environment:
        found = _open_mpi(read)
    elif "SLURM_PROCID" in environment and not is_script:
        found = _slurm(read)
    elif (read.optional("WORLD_SIZE", 1) or 1) > 1:
        raise ValueError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']} and RANK is not set: start the program with torchrun, mpirun or srun, "
            "or unset WORLD_SIZE to train as one rank"
        )
    elif "SLURM_PROCID" in environment and (tasks := environment.get("SLURM_NTASKS", "1")) != "1":
        raise ValueError(
            f"SLURM_NTASKS is {tasks} and SLURM_STEP_ID is not set: the batch script itself is only one of them; "
            "start the program with srun or torchrun, or unset SLURM_PROCID to train as one rank"
        )
    else:
        return None
    for kind, number in (("rank", found.rank), ("local rank", found.local_rank or 0)):
        if number >= found.world_size:
            raise ValueError(
                f"{found.launcher}'s variables say that this is {kind} {number} of {found.world_size}: "
                f"it must be from 0 to {found.world_size - 1}"
            )
    return found


def _torchrun(read: _Reader) -> Launch:
    rank, world_size = read.number("RANK", 0), read.number("WORLD_SIZE", 1)
    if "TORCHELASTIC_RUN_ID" not in read.environment:
        _check_not_exported_for_all(read, rank, world_size)
    alone = world_size == 1 and "MASTER_ADDR" not in read.environment
    place = ("", DEFAULT_PORT) if alone else (read.text("MASTER_ADDR"), read.port(None))
    return Launch("torchrun", rank, world_size, read.optional("LOCAL_RANK", 0), *place)


def _check_not_exported_for_all(read: _Reader, rank: int, world_size: int) -> None:
    """Raise if a script exported RANK and another launcher then started several processes."""
    for launcher, rank_name, size_name in (
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    ):
        theirs = read.optional(rank_name, 0)
        if theirs not in (None, rank) and read.environment.get(size_name) == str(world_size):
            raise ValueError(
                f"RANK is {rank} and {rank_name} is {theirs}, both of {world_size}, and torchrun did not set RANK: "
                f"unset it to use {launcher}'s variables"
            )


def _open_mpi(read: _Reader) -> Launch:
    world_size = read.number("OMPI_COMM_WORLD_SIZE", 1)
    read.agree("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", world_size)
    address = read.environment.get("MASTER_ADDR", "")
    if not address and read.optional("OMPI_COMM_WORLD_LOCAL_SIZE", 1) == world_size:
        address = "127.0.0.1"
    elif not address and world_size > 1:
        raise ValueError(
            "Open MPI's variables do not name the host of rank 0, which ranks on several hosts need, and MASTER_ADDR is not set: "
            "use mpirun -x MASTER_ADDR=<host of rank 0>"
        )
    rank, local_rank = read.number("OMPI_COMM_WORLD_RANK", 0), read.optional("OMPI_COMM_WORLD_LOCAL_RANK", 0)
    return Launch("Open MPI", rank, world_size, local_rank, address, read.port(DEFAULT_PORT))


def _slurm(read: _Reader) -> Launch:
    sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in read.environment]
    size = sizes[0] if sizes else "SLURM_NTASKS"
    world_size = read.number(size, 1)
    read.agree("WORLD_SIZE", size, world_size)
    rank = read.number("SLURM_PROCID", 0)
    address = read.environment.get("MASTER_ADDR", "")
    if not address and world_size > 1:
        address = _first_slurm_host(read, rank)
    job, step = read.optional("SLURM_JOB_ID", 0), read.optional("SLURM_STEP_ID", 0)
    port = DEFAULT_PORT if job is None else _PORT_FIRST + (101 * job + (step or 0)) % _PORT_COUNT
    return Launch("SLURM", rank, world_size, read.optional("SLURM_LOCALID", 0), address, read.port(port))


def _first_slurm_host(read: _Reader, rank: int) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if text := read.environment.get(name):
            try:
                first = first_host(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}; set MASTER_ADDR to the host of rank 0") from None
            own = read.environment.get("SLURMD_NODENAME", first)
            if rank == 0 and own != first:
                raise ValueError(
                    f"rank 0 runs on {own}, not on {first}, the first of {name}={text}: set MASTER_ADDR to its host"
                )
            return first
    if address := read.environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return address
    raise ValueError(
        "neither SLURM_JOB_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set: set MASTER_ADDR to the host of rank 0"
    )


class _Reader:
    """A reader of variables whose errors name them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def text(self, name: str) -> str:
        if self.environment.get(name):
            return self.environment[name]
        if name in self.environment:
            raise ValueError(f"{name} is empty: unset it, or give it a value")
        there = next(rank for rank in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if rank in self.environment)
        raise ValueError(f"{there} is set, but {name} is not: use a launcher that sets both, or set {name}")

    def number(self, name: str, least: int) -> int:
        text = self.text(name).strip()
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) < least:
            raise ValueError(f"{name} must be a whole number from {least}, got {self.environment[name]!r}")
        return int(text)

    def optional(self, name: str, least: int) -> int | None:
        return self.number(name, least) if self.environment.get(name) else None

    def port(self, default: int | None) -> int:
        """Return MASTER_PORT, or `default`; None: the variable must be set."""
        port = self.optional("MASTER_PORT", 1) or default or self.number("MASTER_PORT", 1)
        if port > 65535:
            raise ValueError(f"MASTER_PORT must be from 1 to 65535, got {port}")
        return port

    def agree(self, name: str, other: str, value: int) -> None:
        if self.optional(name, 1) not in (None, value):
            raise ValueError(
                f"{name} is {self.environment[name]} and {other} is {value}: unset {name}, which the launcher did not set"
            )


def first_host(text: str) -> str:
    """Return the first of SLURM's hosts: node01 of `node[01-03,7],login`. ValueError for another form."""
    found = re.fullmatch(rf"({_HOST})(?:,{_HOST})*", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is not a list of hosts like 'node[01-03,7],login'")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", found[1])
