"""Law: the examples for other libraries print the numbers that examples/README.md quotes, at each stage and with
torch's DistributedDataParallel.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONG = os.environ.get("SW_TEST_LONG") == "1"

#: program -> packages that it imports; [arguments before the program, and behind it]
EXAMPLES = {
    "03_trainer.py": (("transformers",), [([], ["--stock"]), ([], ["--shardwright", "zero2"]), ([], ["--shardwright", "zero3"]), (["-m", "shardwright", "run", "zero2"], ["--stock"])]),
    "04_trl_sft.py": (("trl", "datasets"), [([], ["--stock"]), ([], ["--shardwright", "zero2"])]),
    "05_peft_lora.py": (("peft", "transformers"), [([], ["ddp"]), ([], ["1"]), ([], ["3"])]),
    "07_deepspeed_json.py": ((), [([], ["--stage", stage]) for stage in "0123"]),
    "08_accelerate.py": (("accelerate",), [([], []), (["-m", "shardwright", "run", "zero2"], [])]),
    "09_three_d.py": ((), [([], [])]),
    "12_everyday_tools.py": (("torchdata", "torchmetrics", "tensorboard"), [([], [form]) for form in ("ddp", "0", "1", "2", "3", "fsdp")]),
    "13_long_context.py": ((), [([], [stage]) for stage in "0123"]),
}  # fmt: skip
RANKS = {"09_three_d.py": "8", "13_long_context.py": "4"}
#: programs in bfloat16, whose last digit depends on the processor's kernels, with torch's own wrapper too
ROUNDED = {"05_peft_lora.py"}
NUMBER = re.compile(r"^((?:\w+ )?(?:epoch|step|steps) .*(?:loss|norm).*|\d.* parameters train.*)$", re.MULTILINE)


def quoted(name):
    """Return the lines with numbers in the program's section of the README."""
    text = (ROOT / "examples" / "README.md").read_text()
    section = text.partition(f"## {name}")[2].partition("\n## ")[0]
    return NUMBER.findall(section.partition("```text")[2].partition("```")[0])


def in_words(lines):
    return [re.sub(r"\d+\.\d+", "", line) for line in lines]


def in_numbers(lines):
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def printed(name, before, behind):
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", RANKS.get(name, "2")]
    done = subprocess.run(
        [*command, *before, str(ROOT / "examples" / name), *behind],
        capture_output=True, text=True, timeout=500, env={**os.environ, **settings, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return NUMBER.findall(done.stdout)


@pytest.mark.timeout(1600)
@pytest.mark.skipif(not LONG, reason="the long form")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_its_readme_says_at_every_stage(name):
    packages, runs = EXAMPLES[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    expected = quoted(name)
    assert expected
    first = printed(name, *runs[0])  # torch's wrapper, or zero=0
    if name in ROUNDED:
        assert in_words(first) == in_words(expected)
        assert in_numbers(first) == pytest.approx(in_numbers(expected), abs=2e-4)
    else:
        assert first == expected
    for before, behind in runs[1:]:
        assert printed(name, before, behind) == first, (before, behind)


def ran(ranks, *program):
    """Return what an example prints on `ranks` ranks."""
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / program[0]), *program[1:]],
        capture_output=True, text=True, timeout=300, env={**os.environ, **settings, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_grpo_hands_its_weights_to_an_engine_after_each_step(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    printed = ran(2, "17_trl_grpo.py")
    found = re.findall(r"step \d: the engine took (\d+) tensors and says w3 with (\d\.\d+)", printed)
    assert [int(count) for count, _ in found] == [21 * step for step in range(1, 9)]
    assert float(found[0][1]) < 0.2 and float(found[-1][1]) > 0.4
