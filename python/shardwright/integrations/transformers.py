"""transformers' Trainer with shardwright.

    from shardwright.integrations.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=data, zero=2)       # the rest of the program stays unchanged

The Trainer creates its accelerator itself; it is turned into shardwright's before it prepares anything. Saving and
loading read and write whole parameters and full optimizer states, so checkpoints are those of the stock class at every
stage. `TrainerMixin` serves other Trainers, TRL's for example; name it first: `class Ours(TrainerMixin,
trl.SFTTrainer)`.

Needs transformers and the optional extra: pip install shardwright[accelerate] transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import transformers

from ..options.compressors import Compressor
from ..parallel.fully_shard import wrapper_of
from .accelerate import Accelerator
from .whole import whole_parameters

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """A mixin that makes the Trainer class named after it train with shardwright.

    Parameters
    ----------
    *args, **kwargs
        Arguments of the Trainer.
    zero, compress, partition, wrap_options
        See Accelerator.

    Notes
    -----
    Launch several CPU processes with ACCELERATE_USE_CPU=1 torchrun --nproc-per-node N. Every rank saves and loads
    checkpoints, as in the Trainer itself.
    """

    def __init__(
        self,
        *args: Any,
        zero: int = 0,
        compress: Compressor | None = None,
        partition: str = "auto",
        wrap_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._stage: dict[str, Any] = {
            "zero": zero,
            "compress": compress,
            "partition": partition,
            "wrap_options": wrap_options,
        }
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like the Trainer, and turn it into shardwright's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        Accelerator.of_stock(self.accelerator, **self._stage)

    # whole parameters while they are read or written ----------------------------------------------------------------

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model like the Trainer, with whole parameters."""
        with self._whole_parameters(writable=False):
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self.accelerator.whole_optimizer_states():
            super()._save_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._whole_parameters(writable=True):
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with self._whole_parameters(writable=True):
            super()._load_best_model()  # type: ignore[misc]

    def _whole_parameters(self, *, writable: bool) -> contextlib.AbstractContextManager[None]:
        return whole_parameters(wrapper_of(self.model_wrapped), writable=writable)

    accelerator: Accelerator
    model_wrapped: Any


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' Trainer with `zero`, `compress`, `partition` and `wrap_options`."""
