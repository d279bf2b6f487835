"""Laws of launching: the variables of each launcher are read with their meaning. Missing or contradictory variables are
an error that names them; they never start a single rank silently.
"""

import ast
import inspect

import pytest
from shardwright.comm import launch
from shardwright.comm.launch import DEFAULT_PORT, Launch, first_host, read_launch


def variables(text):
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=1234"
OPEN_MPI = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2"
ONE_HOST = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4"
SLURM = "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_JOB_NODELIST=node[01-02]"
SCRIPT = "ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=a,b"

READ = {
    "nothing": ("", None),
    "an address alone": ("MASTER_ADDR=a MASTER_PORT=1", None),
    "a world of one": ("WORLD_SIZE=1", None),
    "torchrun": (TORCHRUN, Launch("torchrun", 5, 8, 1, "10.0.0.1", 1234)),
    "torchrun's variables by hand": (
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
        Launch("torchrun", 0, 2, None, "a", 1),
    ),
    "torchrun's, one rank": ("RANK=0 WORLD_SIZE=1", Launch("torchrun", 0, 1, None, "", DEFAULT_PORT)),
    "Open MPI on one host": (ONE_HOST, Launch("Open MPI", 2, 4, 2, "127.0.0.1", 29500)),
    "Open MPI on two": (f"{OPEN_MPI} MASTER_ADDR=a", Launch("Open MPI", 2, 4, 0, "a", 29500)),
    "Open MPI, a port": (f"{OPEN_MPI} MASTER_ADDR=a MASTER_PORT=77", Launch("Open MPI", 2, 4, 0, "a", 77)),
    "SLURM": (SLURM, Launch("SLURM", 3, 4, 1, "node01", 29500)),
    "SLURM's job": (f"{SLURM} SLURM_JOB_ID=1000 SLURM_STEP_ID=2", Launch("SLURM", 3, 4, 1, "node01", 11017)),
    "SLURM, a step on some of the nodes": (
        f"{SLURM} SLURM_STEP_NUM_TASKS=5 SLURM_STEP_NODELIST=node02",
        Launch("SLURM", 3, 5, 1, "node02", 29500),
    ),
    "SLURM, an address": (f"{SLURM} MASTER_ADDR=b MASTER_PORT=9", Launch("SLURM", 3, 4, 1, "b", 9)),
    "SLURM, no list": (
        "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LAUNCH_NODE_IPADDR=10.1.1.1",
        Launch("SLURM", 0, 2, None, "10.1.1.1", 29500),
    ),
    "SLURM, one task": ("SLURM_PROCID=0 SLURM_NTASKS=1", Launch("SLURM", 0, 1, None, "", 29500)),
    "SLURM's batch script, one task": (SCRIPT, None),
    "SLURM's batch script, srun inside": (
        f"{SCRIPT} SLURM_NTASKS=2 SLURM_STEP_ID=0",
        Launch("SLURM", 0, 2, 0, "a", 10707),
    ),
    # the inner launcher wins
    "torchrun in SLURM's task": (f"{SLURM} {TORCHRUN}", Launch("torchrun", 5, 8, 1, "10.0.0.1", 1234)),
    "torchrun in SLURM's task, one rank each": (
        f"{SLURM} RANK=0 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x MASTER_ADDR=a MASTER_PORT=1",
        Launch("torchrun", 0, 4, None, "a", 1),
    ),
    "RANK exported from SLURM's": (
        f"{SLURM} RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1",
        Launch("torchrun", 3, 4, None, "a", 1),
    ),
    "mpirun over SLURM's daemons": (
        f"{ONE_HOST} SLURM_PROCID=0 SLURM_NTASKS=1",
        Launch("Open MPI", 2, 4, 2, "127.0.0.1", 29500),
    ),
    "WORLD_SIZE exported for SLURM's tasks": (f"{SLURM} WORLD_SIZE=4", Launch("SLURM", 3, 4, 1, "node01", 29500)),
}


@pytest.mark.parametrize(("text", "expected"), READ.values(), ids=READ)
def test_variables_of_a_launcher_are_read(text, expected):
    assert read_launch(variables(text)) == expected


def without(text, *names):
    return " ".join(word for word in text.split() if word.split("=")[0] not in names)


REFUSED = {
    "no world": (without(TORCHRUN, "WORLD_SIZE"), "RANK is set, but WORLD_SIZE is not"),
    "no rank": (without(TORCHRUN, "RANK"), "WORLD_SIZE is 8 and RANK is not set"),
    "no address": (without(TORCHRUN, "MASTER_ADDR"), "RANK is set, but MASTER_ADDR is not"),
    "no port": (without(TORCHRUN, "MASTER_PORT"), "RANK is set, but MASTER_PORT is not"),
    "rank too high": (TORCHRUN.replace("RANK=5", "RANK=8", 1), "rank 8 of 8: it must be from 0 to 7"),
    "no number": (TORCHRUN.replace("RANK=5", "RANK=five", 1), "RANK must be a whole number from 0, got 'five'"),
    "too large a number": (
        TORCHRUN.replace("RANK=5", "RANK=" + "5" * 5000, 1),
        "RANK must be a whole number from 0, got '555",
    ),
    "empty": (TORCHRUN.replace("RANK=5", "RANK=", 1), "RANK is empty"),
    "world of none": (TORCHRUN.replace("WORLD_SIZE=8", "WORLD_SIZE=0", 1), "WORLD_SIZE must be .* from 1, got '0'"),
    "port too high": (TORCHRUN.replace("1234", "65536"), "MASTER_PORT must be from 1 to 65535, got 65536"),
    "local rank too high": (TORCHRUN.replace("LOCAL_RANK=1", "LOCAL_RANK=9"), "local rank 9 of 8"),
    "Open MPI without its size": (
        without(ONE_HOST, "OMPI_COMM_WORLD_SIZE"),
        "OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not",
    ),
    "Open MPI on two hosts without an address": (OPEN_MPI, "MASTER_ADDR is not set.* mpirun -x MASTER_ADDR="),
    "Open MPI and another world": (f"{ONE_HOST} WORLD_SIZE=8", "WORLD_SIZE is 8 and OMPI_COMM_WORLD_SIZE is 4"),
    "SLURM without its size": (without(SLURM, "SLURM_NTASKS"), "SLURM_PROCID is set, but SLURM_NTASKS is not"),
    "SLURM without hosts": (without(SLURM, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST nor .* is set.* MASTER_ADDR"),
    "SLURM with an invalid list": (
        SLURM.replace("node[01-02]", "node[01-02"),
        r"SLURM_JOB_NODELIST: 'node\[01-02' is not a list of hosts.* MASTER_ADDR",
    ),
    "SLURM and another world": (f"{SLURM} WORLD_SIZE=8", "WORLD_SIZE is 8 and SLURM_NTASKS is 4"),
    "SLURM's rank 0 elsewhere": (
        SLURM.replace("PROCID=3", "PROCID=0") + " SLURMD_NODENAME=node02",
        r"rank 0 runs on node02, not on node01, the first of SLURM_JOB_NODELIST=node\[01-02\]: set MASTER_ADDR",
    ),
    "SLURM's batch script of many tasks": (f"{SCRIPT} SLURM_NTASKS=4", "SLURM_NTASKS is 4 and SLURM_STEP_ID is not set.* srun"),
    "RANK exported once for all of SLURM's tasks": (
        f"{SLURM} RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1",
        "RANK is 0 and SLURM_PROCID is 3, both of 4.* unset it",
    ),
    "RANK exported once for all of Open MPI's": (
        f"{ONE_HOST} RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1",
        "RANK is 0 and OMPI_COMM_WORLD_RANK is 2, both of 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_missing_or_contradictory_variables_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        read_launch(variables(text))


HOSTLISTS = {
    "node1": "node1",
    "a,b": "a",
    "node[01-03,7],login": "node01",
    "node[08-11]": "node08",
    "r[1-2]n[3-4]-ib": "r1n3-ib",
    "10.0.0.[1,3]": "10.0.0.1",
    "[1-2].gpu": "1.gpu",
}


@pytest.mark.parametrize("text", HOSTLISTS)
def test_the_first_of_a_list_of_hosts_is_found(text):
    assert first_host(text) == HOSTLISTS[text]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "a[1",
        "a1]",
        "a[]",
        "a[x]",
        "a[1-]",
        "a[1,]",
        "a[[1]]",
        "a b",
        ",",
    ],
)
def test_an_invalid_list_of_hosts_is_refused(text):
    with pytest.raises(ValueError):
        first_host(text)


def test_the_table_lists_the_variables_that_the_code_reads():
    strings = {
        node.value
        for function in ast.walk(ast.parse(inspect.getsource(launch)))
        if isinstance(function, (ast.FunctionDef, ast.ClassDef))
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text for text in strings if text.isidentifier() and text.isupper() and len(text) > 5} - {"BATCH"}
    assert named | {"RANK"} == set(launch.VARIABLES)
