"""Law: a program that logs to its framework's own tracker finds there what sw.metrics gives, from rank 0, at the same steps."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peer import PEER

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
PROGRAM = Path(__file__).with_name("tracked_program.py")


def written(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars in a folder of TensorBoard's or Lightning's files, by name and step."""
    found: dict[str, dict[int, float]] = {}
    for path in folder.rglob("metrics.csv"):
        for row in csv.DictReader(path.open()):
            for name, value in row.items():
                if value and name != "step":
                    found.setdefault(name, {})[int(row["step"])] = float(value)
    for path in folder.rglob("events.out.tfevents*"):
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


@pytest.mark.parametrize(
    "framework, loss, first, steps",
    [
        ("accelerate", "loss", "", [1, 3, 5]),
        ("transformers", "train/loss", "train/", [2, 4]),
        ("lightning", "loss", "", [1, 3, 5]),
    ],
)
def test_a_tracker_has_them_beside_the_loss(
    tmp_path: Path, framework: str, loss: str, first: str, steps: list[int]
) -> None:
    for package in (framework, *(["tensorboard"] if framework != "lightning" else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    words = [
        sys.executable,
        *([] if framework == "lightning" else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [*words, str(PROGRAM), framework, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step_s" not in done.stdout + done.stderr  # a console gets none
    found = written(tmp_path)
    assert sorted(found[loss]) == steps, found
    for name in ("step_s", "backward_s", "share_compute", "shared_memory_bytes"):
        values = found[f"{first}shardwright/{name}"]
        assert sorted(values) == steps and all(value >= 0 for value in values.values()), (name, found)
    assert all(value > 0 for value in found[f"{first}shardwright/step_s"].values())
