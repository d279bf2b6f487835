"""Lightning's Trainer with shardwright: the strategy's name is the one change. See docs/lightning.md.

    python examples/06_lightning.py [stage]           # starts the second process itself

It fits a small regression on made data with two processes, and resumes the checkpoint in plain Lightning, without ranks.
"""

import logging
import sys
import tempfile
import warnings

import lightning.pytorch as pl
import shardwright.integrations.lightning  # noqa: F401 # adds "shardwright_zero0" to "shardwright_zero3"
import torch


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch, _):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch, _):
        self.log("validation", self.training_step(batch, _), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Made(pl.LightningDataModule):
    """Rows of noise and their sums."""

    def setup(self, stage):
        x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
        self.rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=32)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.Subset(self.rows, range(256)), batch_size=64)


def fit(strategy, devices, epochs, **options):
    pl.seed_everything(0, verbose=False)
    module = Regression()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=epochs,
        gradient_clip_val=10.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=Made(), **options)
    return trainer, trainer.callback_metrics["validation"].item()


def main():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    stage = sys.argv[1] if len(sys.argv) > 1 else "2"
    trainer, loss = fit(f"shardwright_zero{stage}", 2, 3)
    folder = trainer.strategy.broadcast(tempfile.mkdtemp())
    trainer.save_checkpoint(f"{folder}/last.ckpt", weights_only=False)
    if trainer.is_global_zero:
        print(f"zero={stage}, {trainer.world_size} ranks, 3 epochs: validation loss {loss:.4f}")
        _, loss = fit("auto", 1, 4, ckpt_path=f"{folder}/last.ckpt")
        print(f"plain Lightning, resumed for one epoch: validation loss {loss:.4f}")


if __name__ == "__main__":
    main()
