"""Modules, data and launches for the tests of Lightning's Trainer and Fabric. Imported in ranks alone, since Lightning takes
seconds to import."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import warnings

import lightning.fabric
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: F401 # the tests'
from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: F401 # the tests'
from shardwright.integrations.lightning import FabricStrategy, ShardwrightStrategy
from torch import nn

warnings.filterwarnings("ignore", module="lightning")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

EPOCHS, BATCH, ROWS = 2, 4, 48
#: options of our strategies, by name
STAGES = {"0": {"zero": 0}, "1": {"zero": 1}, "2": {"zero": 2}, "3": {"zero": 3}}
STAGES["3 private"] = {"zero": 3, "share_parameters": False}


def mlp() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 5))


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.rows = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(3))

    def _loader(self, begin: int) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.rows[begin:], batch_size=BATCH)

    def train_dataloader(self):
        return self._loader(0)

    def val_dataloader(self):
        return self._loader(ROWS - 12)

    test_dataloader = predict_dataloader = val_dataloader


class Subject(pl.LightningModule):
    """A regression whose losses are kept."""

    def __init__(self, optimizer=torch.optim.AdamW, rate: float = 1e-2):
        super().__init__()
        self.net = mlp()
        self.optimizer, self.rate, self.losses = optimizer, rate, []

    def _loss(self, x):
        return self.net(x).square().mean()

    def training_step(self, x, _):
        loss = self._loss(x)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, x, _):
        self.log("val", self._loss(x), sync_dist=True)

    def test_step(self, x, _):
        self.log("test", self._loss(x), sync_dist=True)

    def predict_step(self, x, _):
        return self.net(x)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Adversaries(Subject):
    """Two networks that train against each other, with an optimizer each, by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.judge = nn.Linear(7, 7), mlp()

    def training_step(self, x, index):
        makes, judges = self.optimizers()
        for optimizer, sign in ((makes, 1), (judges, -1)):
            with optimizer.toggle_model():
                loss = sign * self.judge(self.net(x)).square().mean() + self.judge(x).abs().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.losses.append(loss.item())
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self):
        optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net, self.judge)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in optimizers]


class KeepsAnObject(Subject):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = object()


class WatchSaves(pl.callbacks.ModelCheckpoint):
    """Note the folder that is being written when a save returns."""

    def _save_checkpoint(self, trainer, filepath):
        super()._save_checkpoint(trainer, filepath)
        self.__dict__.setdefault("was_writing", []).append(trainer.strategy._folders.writing)


class Wide(Subject):
    """Norms of gradients of this size depend on the order in which elements are added."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 501), nn.Tanh(), nn.Linear(501, 301))


class ByHand(Subject):
    """Accumulation and clipping by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, x, index):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=index % 2 == 1):
            loss = self._loss(x) / 2
            self.manual_backward(loss)
        self.losses.append(loss.item())
        if index % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


_worlds = itertools.count()


@contextlib.contextmanager
def world(rank: int, size: int, of: int, folder: str):
    """Make the first `size` of the ranks a group, and set torchrun's variables. Gives False on other ranks."""
    environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK=0)
    environment |= dict(TORCHELASTIC_RUN_ID="tests", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    before = {name: os.environ.get(name) for name in environment}
    _join(folder, rank, size)
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        yield rank < size
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _join(folder, rank, of)


def _join(folder: str, rank: int, size: int) -> None:
    name = f"group {next(_worlds)}"
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < size:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{name}", size), rank=rank, world_size=size)
        dist.barrier()  # a rank that leaves at once would close connections that slower ranks have not accepted


def fit(strategy, folder, build=Subject, *, ckpt_path=None, epochs=EPOCHS, data=None, **options):
    """Fit a new module. `strategy`: see trainer()."""
    torch.manual_seed(0)
    module, data = build(), data or Data()
    fits = trainer(strategy, folder, max_epochs=epochs, **options)
    fits.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return fits, module, data


def trainer(strategy, folder, **options):
    """Make a Trainer. `strategy`: a name of Lightning's, or options of ours."""
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy if isinstance(strategy, str) else ShardwrightStrategy(**strategy),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def initial():
    """Return the parameters of a Subject that no step has changed."""
    torch.manual_seed(0)
    return [value.detach() for value in Subject().parameters()]


def saved(path):
    """Return a .ckpt of the Trainer."""
    return torch.load(path, weights_only=False)


def keep_last(folder, **options):
    """Save at the end of each epoch; names tell the epoch."""
    return pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, **options)


def fabric(strategy):
    strategy = strategy if isinstance(strategy, str) else FabricStrategy(**strategy)
    made = lightning.fabric.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    made.launch()
    return made


def fabric_fit(strategy, path, *, resumed=False, clip=None, steps=range(3)):
    """Take steps of two backwards each with Fabric, and save after them. Return losses and weights."""
    own = fabric(strategy)
    torch.manual_seed(0)
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = own.setup(module, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resumed:
        own.load(path, state)
    losses = []
    for step in steps:
        for number in range(2):
            with own.no_backward_sync(model, enabled=number == 0):
                generator = torch.Generator().manual_seed(100 * step + 10 * number + own.global_rank)
                loss = model(torch.randn(BATCH, 7, generator=generator)).square().mean()
                own.backward(loss / 2)
            losses.append(loss.item())
        if clip is not None:
            own.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
    if not resumed:
        own.save(path, state)
    weights = own.strategy.get_module_state_dict(model._forward_module)
    return losses, [value.detach().clone() for value in weights.values()]


def ema():
    return pl.callbacks.EMAWeightAveraging(decay=0.8)


def swa():
    return pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
