"""Write the table of tested versions in docs/versions.md out of .github/workflows/ci.yml, with a row for each job.

.venv/bin/python docs/site/versions.py
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
HEAD = "| CI job | command | Python | torch | processor | when |\n|---|---|---|---|---|---|"
BEGIN, END = "<!-- made by docs/site/versions.py -->\n", "<!-- end -->"
#: commands that run on another processor or C library than the machine's, or with another torch than requirements/torch.txt
MACHINES = {"make test-aarch64": "aarch64 under qemu", "make test-musl": "x86_64, musl"}
WITHOUT_TORCH = (
    "make lint",
    "make docs",
    "make wheel",
    "make release",
    "make fuzz",
    "make test-aarch64",
    "make test-musl",
)


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    return found


def runs_of(job: dict[str, Any]) -> list[tuple[list[str], str, str]]:
    """Return (commands, Python, machine) for each entry of a job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = []
    for values in itertools.product(*matrix.values()):

        def filled(text: str) -> str:
            for name, value in zip(matrix, values, strict=True):
                text = text.replace("${{ matrix.%s }}" % name, value)
            return text

        asked = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
        commands = [filled(step["run"]) for step in job["steps"] if "run" in step]
        found.append((commands, ", ".join(filled(" ".join(asked)).split()), filled(job["runs-on"])))
    return found


def rows() -> list[str]:
    made = []
    for name, job in jobs().items():
        when = "every night" if "schedule" in job.get("if", "") else "every change"
        for commands, pythons, machine in runs_of(job):
            command = next(each for each in commands if "apt-get" not in each)
            processor = MACHINES.get(command, "aarch64" if machine.endswith("-arm") else "x86_64")
            made.append(f"| {name} | `{command}` | {pythons} | {torch_of(command)} | {processor} | {when} |")
    return made


def torch_of(command: str) -> str:
    if command in WITHOUT_TORCH:
        return ""
    given = re.search(r"TORCH=(\S+)", command)
    file = "free-threaded.txt" if "FREE_THREADED=" in command else "torch.txt"
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements" / file).read_text(encoding="utf-8"), re.MULTILINE)
    version = given or pinned
    assert version is not None
    return version[1]


def page(text: str) -> str:
    """Return the page with the table that ci.yml makes."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{HEAD}\n" + "\n".join(rows()) + f"\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
