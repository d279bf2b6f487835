"""Law: accelerate with fsdp_version 2, Lightning's ModelParallelStrategy and TRL's SFTTrainer with FSDP2 train, save and resume
with sw.fully_shard in the place of torch's: the same losses, gradient norms and parameters. One name differs."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from peer import PEER

PROGRAM = pathlib.Path(__file__).with_name("fsdp2_program.py")
pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.timeout(600)]
ALLOWED = 1e-6


def train(name, side, folder, world_size, **settings):
    file = folder / f"{name}-{side}.json"
    (folder / side).mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(PROGRAM), name, side, str(file), str(folder / side)],
        capture_output=True, text=True, timeout=250, env={**os.environ, **own, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", ["accelerate", "lightning", "trl"])
def test_a_program_trains_saves_and_resumes_as_with_fsdp2(tmp_path, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    stock, ours = (train(name, side, tmp_path, 2) for side in ("stock", "ours"))
    assert len(ours) == len(stock) > 24
    assert max(abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=True)) <= ALLOWED


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_saves_whole_states_of_three_ranks(tmp_path):
    stock, ours = (
        train("accelerate", side, tmp_path, 3, STATE_DICT_TYPE="FULL_STATE_DICT") for side in ("stock", "ours")
    )
    assert max(abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=True)) <= ALLOWED
