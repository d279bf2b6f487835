"""Law: torchtitan's own trainer trains its debug Llama with sw.fully_shard in the place of FSDP2: the same losses and gradient
norms, and each resumes from a checkpoint that the other wrote. One import differs."""

import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from peer import PEER

PROGRAM = pathlib.Path(__file__).with_name("torchtitan_program.py")
pytestmark = [
    pytest.mark.skipif(PEER == "torch", reason="ours"),
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.timeout(900),
]
STEPS = 20
ALLOWED = 1e-6
SAVES = ["checkpoint.enable=true", "checkpoint.interval=10", "checkpoint.last_save_in_hf=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan") / "assets"
    run([sys.executable, str(PROGRAM), str(folder), "assets"])
    return folder


def run(command):
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, **settings})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def train(folder, side, steps, *options, world_size=2):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    run([*launch, str(PROGRAM), str(folder), side, str(steps), *options])
    return json.loads((folder / f"losses-{side}.json").read_text())


def differences(ours, stock):
    assert [step for step, *_ in ours] == [step for step, *_ in stock]
    pairs = itertools.chain.from_iterable(zip(a[1:], b[1:], strict=True) for a, b in zip(ours, stock, strict=True))
    return [abs(a - b) / abs(b) for a, b in pairs]


FORMS = {
    "float32": ['training.mixed_precision_param="float32"'],
    "bfloat16": [],
    "full_dtensor": ['training.mixed_precision_param="float32"', 'parallelism.spmd_backend="full_dtensor"'],
    "two micro-batches": ['training.mixed_precision_param="float32"', "training.global_batch_size=8"],
}


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_fsdp2(folder, form):
    stock, ours = (train(folder, side, STEPS, *FORMS[form]) for side in ("stock", "ours"))
    assert len(stock) == STEPS and stock[-1][1] < 0.7 * stock[0][1]
    assert max(differences(ours, stock)) <= ALLOWED


def test_losses_with_rows_of_replicas_are_those_of_fsdp2(folder):
    options = [*FORMS["float32"], "parallelism.data_parallel_replicate_degree=2"]
    stock, ours = (train(folder, side, 5, *options, world_size=4) for side in ("stock", "ours"))
    assert max(differences(ours, stock)) <= ALLOWED


@pytest.mark.parametrize("writer, reader", [("stock", "ours"), ("ours", "stock"), ("ours", "ours")])
def test_a_checkpoint_of_one_resumes_the_other(folder, tmp_path, writer, reader):
    options = [*FORMS["float32"], *SAVES, f'dump_folder="{tmp_path}"']
    begun = train(folder, writer, STEPS, *options)
    (tmp_path / "checkpoint" / f"step-{STEPS}").rename(tmp_path / "last")
    resumed = train(folder, reader, STEPS, *options)
    assert [step for step, *_ in resumed] == list(range(STEPS // 2 + 1, STEPS + 1))
    assert max(differences(resumed, begun[STEPS // 2 :])) <= ALLOWED
