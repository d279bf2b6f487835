"""Text that every CPython carries, cut into the same batches for any number of ranks.

The documents are the help topics of ``pydoc_data`` and the standard library's
top-level sources, in the order of their names. Every tenth document is held
out for validation, whole, so that no validation byte has a neighbour in training.

Each rank draws the whole global batch's offsets from the same generator and
keeps its own rows. The data position is therefore the state of one generator,
equal on all ranks, and a run may be resumed at another world size.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

HELD_OUT_EVERY = 10  # documents
VALIDATION_ROWS = 128


def load(options: argparse.Namespace, rank: int, world_size: int) -> tuple[TrainingBatches, tuple[Tensor, Tensor]]:
    """Return this rank's training batches and its validation inputs and targets."""
    if options.batch_size < world_size:
        raise SystemExit(f"--batch-size must be {world_size} (the ranks) or more")
    share = dict(context=options.context, rank=rank, world_size=world_size)
    training, validation = load_corpus()
    batches = TrainingBatches(training, batch_size=options.batch_size, seed=options.seed, **share)
    return batches, validation_windows(validation, count=VALIDATION_ROWS, **share)


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return the training and the validation bytes, each uint8 (bytes,)."""
    documents = [topics[name].encode() for name in sorted(topics)]
    # _sysconfigdata_* describes the machine, not the language: it differs between builds.
    sources = Path(sysconfig.get_path("stdlib")).glob("*.py")
    documents += [path.read_bytes() for path in sorted(sources) if not path.name.startswith("_sysconfigdata")]
    training = [text for i, text in enumerate(documents) if (i + 1) % HELD_OUT_EVERY]
    validation = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return _as_tensor(training), _as_tensor(validation)


def _as_tensor(documents: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(documents)), dtype=torch.uint8)


def windows_at(text: Tensor, offsets: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 (rows, context) each, targets one byte later."""
    rows = text[offsets[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


class TrainingBatches:
    """An endless stream of random windows: this rank's rows of each global batch.

    Parameters
    ----------
    text : Tensor
        uint8 (bytes,).
    batch_size : int
        Rows of the global batch, over all ranks.
    context : int
        Bytes a row.
    rank, world_size : int
        This rank takes rows ``rank``, ``rank + world_size``, ...
    seed : int
        The same seed on every rank.
    """

    def __init__(self, text: Tensor, *, batch_size: int, context: int, rank: int, world_size: int, seed: int) -> None:
        self.text = text
        self.batch_size = batch_size
        self.context = context
        self.share = slice(rank, None, world_size)
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        limit = len(self.text) - self.context
        offsets = torch.randint(limit, (self.batch_size,), generator=self.generator)
        return windows_at(self.text, offsets[self.share], self.context)


def validation_windows(text: Tensor, *, count: int, context: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of ``count`` windows spread evenly over the held-out text."""
    offsets = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    return windows_at(text, offsets[rank::world_size], context)
