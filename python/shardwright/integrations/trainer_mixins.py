"""Mixins that make any subclass of transformers' Trainer train with shardwright. They do not import transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint import save_pretrained
from ..options.compress import Compressor
from .accelerate import Accelerator
from .meta_loading import keep_loading
from .settings import chosen
from .wrappers import whole_parameters, writes_in_parts


@dataclasses.dataclass
class ArgumentsMixin:
    """A mixin that adds --shardwright to the next base class, a class of arguments such as trl.SFTConfig."""

    shardwright: str = dataclasses.field(
        default="", metadata={"help": "zero0 to zero3, or options of sw.wrap: zero=3,compress=int8; or a file of such"}
    )

    def __post_init__(self) -> None:
        """At zero=3 in a launch of several CPU ranks: from_pretrained leaves tensors in their files from now on."""
        super().__post_init__()  # type: ignore[misc]
        if chosen(self.shardwright, None)["zero"] == 3 and getattr(self, "world_size", 1) > 1:
            if torch.device(getattr(self, "device", "cpu")).type == "cpu":
                keep_loading(self)


_Base: Any = object  # a Trainer of transformers


class TrainerMixin(_Base):
    """A mixin that makes the next base class, a Trainer, train with shardwright.

    `zero`, `compress`, `partition` and `wrap_options` are those of Accelerator. Without `zero` they are read from the
    `shardwright` argument of TrainingArguments, or SHARDWRIGHT_OPTIONS. Launch several CPU processes with
    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node N. Every rank saves and loads checkpoints, as in the stock Trainer.
    """

    def __init__(
        self,
        *args: Any,
        zero: int | None = None,
        compress: Compressor | None = None,
        partition: str = "auto",
        wrap_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        text = getattr(arguments, "shardwright", "")
        self._stage = chosen(text, zero, compress=compress, partition=partition, wrap_options=wrap_options)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like the Trainer, then convert it to shardwright's class."""
        super().create_accelerator_and_postprocess()
        Accelerator.of_stock(self.accelerator, **self._stage)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log like the Trainer. Its trackers also get what sw.metrics gives of the steps since the last call; a console does not."""
        super().log(logs, *args, **kwargs)
        scalars = self.accelerator._recent() if "loss" in logs else {}
        for callback in self.callback_handler.callbacks if scalars else ():
            kind = type(callback)  # DVCLive's would count each call as a step
            if kind.__module__.startswith("transformers.integrations") and kind.__name__ != "DVCLiveCallback":
                callback.on_log(self.args, self.state, self.control, logs=scalars, model=self.model)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model like the Trainer: with sw.save_pretrained where it can, else with whole parameters."""
        place = self.args.output_dir if output_dir is None else output_dir
        if not writes_in_parts(self.model_wrapped, self.model, place) or self.args.save_on_each_node:
            with whole_parameters(self.model_wrapped):
                super().save_model(output_dir, *args, **kwargs)
            return
        save_pretrained(self.model_wrapped, place)
        self.model.save_pretrained = lambda *_, **__: None  # the weights are there; tokenizer and arguments follow
        try:
            super().save_model(output_dir, *args, **kwargs)
        finally:
            del self.model.save_pretrained

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self.accelerator.whole_optimizer_states():
            super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with whole_parameters(self.model_wrapped, writable=True):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with whole_parameters(self.model_wrapped, writable=True):
            super()._load_best_model()
