"""The state in a checkpoint besides model and optimizer: the data position, the losses so far, the settings.

All of it is equal on all ranks, so a run goes on at any world size and any stage of --zero.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import shardwright as sw
import torch

# Settings on which the losses depend.
SETTINGS = ("batch_size", "context", "layers", "width", "heads", "learning_rate", "seed")


class Run:
    """The state that sw.Checkpointer stores as `user_state`."""

    def __init__(self, options: argparse.Namespace, generator: torch.Generator) -> None:
        self.settings = {name: getattr(options, name) for name in SETTINGS}
        self.generator = generator
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        losses = dict(train=self.train, validation=self.validation)
        return dict(settings=self.settings, data=self.generator.get_state(), **losses)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, saved in state["settings"].items():
            if self.settings[name] != saved:
                raise ValueError(f"it was saved with --{name.replace('_', '-')} {saved}: pass the same")
        self.generator.set_state(state["data"])
        self.train, self.validation = state["train"], state["validation"]


def open_checkpoints(
    options: argparse.Namespace, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: Run
) -> tuple[sw.Checkpointer, int]:
    """Return the checkpoints of this run and its first step; end with a sentence if it cannot go on."""
    folder: Path = options.out / "checkpoints"
    if rank == 0 and not options.resume:
        shutil.rmtree(folder, ignore_errors=True)  # remains of an earlier run
    try:
        checkpoints = sw.Checkpointer(folder, model, optimizer, user_state=run, keep_last=2)
        step = checkpoints.restore() if options.resume else 0
    except sw.CheckpointError as error:
        raise SystemExit(f"checkpoints: {error}") from None
    if options.resume and not step:
        raise SystemExit(f"--resume: there is no checkpoint in {folder}")
    return checkpoints, step
