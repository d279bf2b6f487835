"""transformers' Trainer with shardwright.

    from shardwright.integrations.transformers import Trainer trainer = Trainer(model=model, args=args,
    train_dataset=data, zero=2)       # the rest of the program stays unchanged

With `TrainingArguments` of this module the stage can be on the command line: `--shardwright zero2`. Checkpoints equal
those of the stock class at every stage. For other Trainers, such as TRL's, use `TrainerMixin` as the first base: `class
Ours(TrainerMixin, trl.SFTTrainer)`.

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
