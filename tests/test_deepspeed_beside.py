"""Law: a DeepSpeed program has the losses, norms and learning rates of DeepSpeed itself at stages 1 to 3."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

if os.environ.get("SW_TEST_LONG") != "1" or importlib.util.find_spec("deepspeed") is None:
    pytest.skip("the long form, with DeepSpeed installed", allow_module_level=True)


def run(package):
    """Return the JSON that rank 0 of three prints; its keys are the stages."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "programs" / "deepspeed_loop.py"), package],
        capture_output=True, text=True, timeout=500, env={**os.environ, **settings, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])


@pytest.mark.timeout(1100)
def test_losses_norms_and_rates_are_those_of_deepspeed():
    theirs, ours = run("deepspeed"), run("shardwright")
    for stage in ("1", "2", "3"):
        for step, (mine, other) in enumerate(zip(ours[stage], theirs[stage], strict=True)):
            assert mine == pytest.approx(other, rel=2e-5, abs=2e-6), (stage, step)
    assert ours["1"] == ours["2"] == ours["3"]
