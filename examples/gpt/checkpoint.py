"""One file that a crash cannot leave half written, and that resumes bit for bit.

The state is whole, whatever ranks slice, so rank 0 writes for all and every rank reads: a file
made at one stage of --zero resumes at any other.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

# What the losses depend on, besides the state itself.
SETTINGS = ("batch_size", "context", "layers", "width", "heads", "learning_rate", "seed")


def save(path: Path, options: argparse.Namespace, state: dict[str, Any]) -> None:
    """Replace ``path``: a reader sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    settings = {name: getattr(options, name) for name in SETTINGS}
    with open(temporary, "wb") as file:
        torch.save({**state, "settings": settings, "torch_rng": torch.get_rng_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The new name is durable only once its folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Read what ``save`` wrote and restore torch's generator; end with a sentence if it cannot."""
    if not path.exists():
        raise SystemExit(f"--resume: there is no checkpoint at {path}")
    state = torch.load(path, weights_only=True)
    for name, saved in state["settings"].items():
        if getattr(options, name) != saved:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"--resume: {path} was made with {flag} {saved}: give the same")
    torch.set_rng_state(state["torch_rng"])
    return state
