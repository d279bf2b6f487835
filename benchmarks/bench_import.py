"""Benchmark of `import shardwright`: processor time beyond torch's import. Also `shardwright --help`, which does not
import torch.

Each sample is a new process. Bytecode is compiled first, as pip does it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

import common

TORCH = "import torch, torch.distributed, torch.nn.parallel"
ARMS = {
    "python": [sys.executable, "-c", "pass"],
    "torch": [sys.executable, "-c", TORCH],
    "import": [sys.executable, "-c", f"{TORCH}, shardwright"],
    "wrap": [sys.executable, "-c", f"{TORCH}, shardwright; shardwright.wrap"],
    "help": [sys.executable, "-m", "shardwright", "--help"],
}
IMPORT_GOAL_S, HELP_GOAL_S = 0.15, 0.2


def processor_s(command: list[str]) -> float:
    """Run a command. Return the processor time of the process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    report, quick = common.begin("import", __doc__)
    rounds = 5 if quick else 15
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for command in ARMS.values():
        processor_s(command)
    for _ in range(rounds):
        for arm, command in ARMS.items():
            samples[arm].append(processor_s(command))
    median = {arm: statistics.median(times) for arm, times in samples.items()}
    least = {arm: min(times) for arm, times in samples.items()}
    for arm, case in (("import", "import shardwright beyond torch"), ("wrap", "the same, and sw.wrap")):
        beyond = median[arm] - median["torch"]
        report.add(
            f"{case}, processor time",
            "s",
            beyond,
            IMPORT_GOAL_S,
            "the goal",
            goal=1.0,
            samples=rounds,
            of_least=least[arm] - least["torch"],
            torch_s=median["torch"],
        )
    report.add(
        "shardwright --help, processor time",
        "s",
        median["help"],
        HELP_GOAL_S,
        "the goal",
        goal=1.0,
        samples=rounds,
        least=least["help"],
        python_s=median["python"],
    )


if __name__ == "__main__":
    main()
