"""Test of checkpoint libraries: a kill during an overwrite, a flipped bit, a zeroed page, a truncated file.

    python benchmarks/crash_peers.py [--kills 20] [--only DeepSpeed]

Compares torch.save, torch's DCP, accelerate, DeepSpeed (if it is installed) and this library. Every value of a state is
the number of its save, so that a wrong or mixed load shows. One process; the overwritten path is the same each time, as
in each library's own examples. Prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

PAGE = 4096


def state(step: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a state of 24 MB whose every value is `step`."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step),
                "exp_avg_sq": torch.full_like(parameter, step),
            }
    return model, optimizer


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for k, v in s.items() if k != "step")]
    return {value for tensor in tensors for value in tensor.detach().unique().tolist()}


class TorchSave:
    name = "torch.save"

    def save(self, path: str, step: float) -> None:
        model, optimizer = state(step)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load(self, path: str) -> set[float]:
        model, optimizer = state(0)
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return values(model, optimizer)


class Dcp:
    name = "torch DCP"

    def _state(self, step: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, object]]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = state(step)
        tensors, moments = get_state_dict(model, optimizer)
        return model, optimizer, {"model": tensors, "optim": moments}

    def save(self, path: str, step: float) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(step)[2], checkpoint_id=path)

    def load(self, path: str) -> set[float]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        model, optimizer, found = self._state(0)
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
        return values(model, optimizer)


class Accelerate:
    name = "accelerate"

    def _prepared(self, step: float) -> tuple[object, torch.nn.Module, torch.optim.Optimizer]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        return (accelerator, *accelerator.prepare(*state(step)))

    def save(self, path: str, step: float) -> None:
        self._prepared(step)[0].save_state(path)

    def load(self, path: str) -> set[float]:
        accelerator, model, optimizer = self._prepared(0)
        accelerator.load_state(path)
        return values(model, optimizer.optimizer)


class DeepSpeed:
    name = "DeepSpeed"

    def _engine(self, step: float) -> tuple[object, torch.optim.Optimizer]:
        import deepspeed

        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)  # otherwise DeepSpeed asks MPI
        model, optimizer = state(step)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1}, dist_init_required=True
        )
        return engine, optimizer

    def save(self, path: str, step: float) -> None:
        self._engine(step)[0].save_checkpoint(path, tag="latest_one")

    def load(self, path: str) -> set[float]:
        engine, optimizer = self._engine(0)
        engine.load_checkpoint(path, tag="latest_one")
        return values(engine.module, optimizer)


class Shardwright:
    name = "shardwright"

    def save(self, path: str, step: float) -> None:
        import shardwright as sw

        with sw.Checkpointer(path, *state(step)) as checkpoints:
            checkpoints.save(0)

    def load(self, path: str) -> set[float]:
        import shardwright as sw

        model, optimizer = state(0)
        with sw.Checkpointer(path, model, optimizer) as checkpoints:
            if checkpoints.restore() == 0:
                raise FileNotFoundError("no checkpoint")
        return values(model, optimizer)


ARMS = {arm.name: arm for arm in (TorchSave(), Dcp(), Accelerate(), DeepSpeed(), Shardwright())}
NEEDS = {"accelerate": "accelerate", "DeepSpeed": "deepspeed"}


def largest(path: str) -> Path:
    files = [Path(path)] if os.path.isfile(path) else [p for p in Path(path).rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size * 2 // 5 | 3)  # the high byte of a value
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def zero_page(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size * 2 // 5 // PAGE * PAGE)
        file.write(b"\0" * PAGE)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit flips": flip,
    "a page is zeroed": zero_page,
    "the end is cut off": lambda path: os.truncate(path, path.stat().st_size - 5 * PAGE),
}


def outcome(arm: object, path: str, allowed: set[float]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = arm.load(path)
    except BaseException as error:  # DCP's error is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return "error"
    return "whole" if len(found) == 1 and found <= allowed else "WRONG VALUES, no error"


def overwrite_for_ever(name: str, path: str) -> None:
    warnings.simplefilter("ignore")
    for step in itertools.count(2):
        ARMS[name].save(path, float(step))
        print(step, flush=True)


def killed(name: str, kills: int) -> str:
    """Kill overwriting saves at random moments. Return the outcomes of the loads that follow."""
    counts: collections.Counter[str] = collections.Counter()
    chance = random.Random(5)
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "checkpoint")
            ARMS[name].save(path, 1.0)
            writer = subprocess.Popen([sys.executable, __file__, "--overwrite", name, path], stdout=subprocess.PIPE)
            assert writer.stdout is not None
            began = time.monotonic()
            writer.stdout.readline()  # first warm up
            writer.stdout.readline()
            time.sleep(chance.uniform(0, min(0.5, time.monotonic() - began)))
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            counts[outcome(ARMS[name], path, {float(i) for i in range(1, 10_000)})] += 1
    lost = counts["error"]
    text = f"nothing loads in {lost} of {kills}" if lost else f"previous or new, {kills} of {kills}"
    wrong = counts["WRONG VALUES, no error"]
    return text + (f"; wrong values in {wrong}" if wrong else "")


def damaged(arm: object, damage: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        arm.save(path, 1.0)
        damage(largest(path))
        return outcome(arm, path, {1.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills of each library; 0: damage alone")
    parser.add_argument("--only", choices=list(ARMS), help="one library")
    parser.add_argument("--overwrite", nargs=2, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.overwrite:
        overwrite_for_ever(*options.overwrite)
    columns = ["kill -9 while it is overwritten", *DAMAGE]
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for name, arm in ARMS.items():
        if options.only not in (None, name):
            continue
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            print(f"| {name} | not installed here |" + " |" * (len(columns) - 1))
            continue
        after_kills = killed(name, options.kills) if options.kills else ""
        cells = [after_kills, *(damaged(arm, damage) for damage in DAMAGE.values())]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
