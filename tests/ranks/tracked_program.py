"""A program of two ranks that trains under one framework and logs to its own tracker: `python tracked_program.py NAME FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import torch

NAME, FOLDER = sys.argv[1:]


def with_accelerate() -> None:
    from shardwright.integrations.accelerate import Accelerator

    accelerator = Accelerator(zero=2, log_with="tensorboard", project_dir=FOLDER)
    accelerator.init_trackers("run")
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(6):
        loss = model(torch.randn(8, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            accelerator.log({"loss": loss.item()}, step=step)
    accelerator.log({"final": 1.0}, step=6)  # no step since the last
    accelerator.end_training()


class Lines(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index % 5)), "labels": torch.tensor(float(index % 5))}


class Scored(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


def with_transformers() -> None:
    import transformers
    from shardwright.integrations.transformers import Trainer

    arguments = transformers.TrainingArguments(
        *(FOLDER,), use_cpu=True, max_steps=4, logging_steps=2, report_to=["tensorboard"], save_strategy="no"
    )
    Trainer(model=Scored(), args=arguments, train_dataset=Lines(), zero=2).train()


def with_lightning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger
    from shardwright.integrations.lightning import ShardwrightStrategy

    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            self.log("loss", found["loss"])
            return found

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardwrightStrategy(zero=2),
        max_steps=6,
        log_every_n_steps=2,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=CSVLogger(FOLDER, flush_logs_every_n_steps=1),
    )
    trainer.fit(Logging())


if __name__ == "__main__":
    {"accelerate": with_accelerate, "transformers": with_transformers, "lightning": with_lightning}[NAME]()
