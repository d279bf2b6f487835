"""Law: a step makes few Python calls, and as few on a GPU as on the host. A backward makes six for any number of
parameters. One call of a backward, and one of a step, add the plan to an error of a full memory.

The bounds are measured counts. A count above its bound means that a change added a call to every step.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import DEADLINE_S, gather
from peer import PEER
from python_calls import STAGES, Counts, profile_step
from simulated_gpus import SimulatedGpus, run

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

#: polls of a wait, as many as it takes time, and a wrapper of a class's step(): also of an earlier test in this process
OF_THE_PROCESS = ("torch_compat/interrupts.py", "torch_compat/autograd.py:explained")
#: Python calls, at most: of a forward, a backward, a step
HOST = {"zero=0": (11, 5, 9), "zero=2": (12, 5, 62), "zero=3": (166, 104, 102), "fully_shard": (294, 245, 27)}
#: on GPUs each unit waits for its own gathers
GPU = {"zero=0": (13, 5, 9), "zero=2": (56, 5, 66), "zero=3": (191, 146, 104), "fully_shard": (319, 5, 28)}
#: files and functions of the package that a whole step crosses on the host, at most
CROSSED = {"zero=0": (7, 21), "zero=2": (13, 57), "zero=3": (18, 96), "fully_shard": (16, 89)}


def check(found: dict[str, Counts], most: tuple[int, ...]) -> str:
    """Format the counts in one line."""
    for (phase, counts), bound in zip(found.items(), most, strict=True):
        of_process = {name: counts.calls.pop(name) for name in [*counts.calls] if name.startswith(OF_THE_PROCESS)}
        assert sum(count for name, count in of_process.items() if "explained" in name) <= 1, of_process
        assert sum(counts.calls.values()) <= bound, f"{phase}: {counts}\n{counts.calls}\n{counts.engine}"
    lines: list[str] = gather(" ".join(f"{phase} {counts}" for phase, counts in found.items()))
    return lines[0]


@pytest.mark.parametrize("stage", STAGES)
def test_on_the_host(teams: Any, stage: str) -> None:
    teams.run(2, on_host, spoils=False, deadline_s=DEADLINE_S, arguments={"stage": stage})


def on_host(rank: int, world_size: int, stage: str) -> None:
    """A step has one exchange of bytes for the ranks' agreement. Its outcome travels with the slices."""
    found = profile_step(lambda module: module, **STAGES[stage])
    assert found["step"].engine["HostComm.all_gather_bytes"] == (stage in ("zero=2", "zero=3")), found["step"].engine
    line = check(found, HOST[stage])
    crossed = {name for counts in found.values() for name in counts.calls}
    files = {name.partition(":")[0] for name in crossed}
    assert len(files) <= CROSSED[stage][0] and len(crossed) <= CROSSED[stage][1], (len(files), len(crossed))
    if rank == 0:
        print(stage, "host", line, "crosses", len(files), len(crossed))


@pytest.mark.parametrize("stage", STAGES)
def test_on_a_gpu(teams: Any, paths: dict[str, str], stage: str) -> None:
    run(teams, 2, paths, on_gpu, stage)


def on_gpu(gpus: SimulatedGpus, rank: int, world_size: int, stage: str) -> None:
    options = {key: value for key, value in STAGES[stage].items() if key != "share_parameters"}
    line = check(profile_step(gpus.adopt_module, **options), GPU[stage])
    if rank == 0:
        print(stage, "GPU", line)
