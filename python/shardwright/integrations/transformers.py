"""transformers' Trainer with shardwright.

    from shardwright.integrations.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=data, zero=2)       # the rest of the program stays unchanged

or, with the stage on the command line, `--shardwright zero2`:

    from shardwright.integrations.transformers import Trainer, TrainingArguments

The Trainer creates its accelerator itself; it is turned into shardwright's before it prepares anything. Saving and
loading read and write whole parameters and full optimizer states, so checkpoints are those of the stock class at every
stage. `TrainerMixin` serves other Trainers, TRL's for example; name it first: `class Ours(TrainerMixin,
trl.SFTTrainer)`.

Needs transformers and the optional extra: pip install shardwright[accelerate] transformers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import transformers

from .trainer_mixins import ArgumentsMixin, TrainerMixin

__all__ = ["ArgumentsMixin", "Trainer", "TrainerMixin", "TrainingArguments"]


if not TYPE_CHECKING and issubclass(transformers.Trainer, TrainerMixin):  # a program of `shardwright run`
    Trainer = transformers.Trainer
else:

    class Trainer(TrainerMixin, transformers.Trainer):
        """transformers' Trainer with `zero`, `compress`, `partition` and `wrap_options`."""


@dataclasses.dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """transformers' TrainingArguments with `shardwright`, or --shardwright on a command line."""
