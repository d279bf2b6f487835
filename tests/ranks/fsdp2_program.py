"""Programs of libraries that call FSDP2, on CPU ranks: `torchrun ... fsdp2_program.py accelerate|lightning|trl stock|ours FILE FOLDER`.

Rank 0 writes the losses of the steps, then norms of the trained parameters, to FILE. "ours" replaces one name, fully_shard in
torch.distributed.fsdp, before the library is imported. accelerate takes FSDP on GPUs alone: the ranks count as GPUs there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, ROWS = 12, 4
WORDS = [f"w{number}" for number in range(40)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 33), nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(self.norm(x)).relu())


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 16), Block(), Block(), nn.Linear(16, 3))


def rows() -> torch.utils.data.TensorDataset:
    values = torch.randn(STEPS * ROWS * 2, 7, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(values, values[:, :3].sin())


def with_accelerate(folder: Path) -> tuple[list[float], nn.Module]:
    """Train with accumulation of two micro-batches, clipping, a schedule, and a save and load of the state midway."""
    accelerator = accelerate_fsdp(gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if step == STEPS // 2 - 1:
            accelerator.save_state(str(folder / "state"))
            for parameter in model.parameters():
                nn.init.zeros_(parameter.detach())
            accelerator.load_state(str(folder / "state"))
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        losses += [float(value.norm()) for value in whole.values()]
    return losses, model


def accelerate_fsdp(**options: Any) -> Any:
    import accelerate
    from accelerate.state import PartialState

    count_ranks_as_gpus(PartialState)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        state_dict_type=os.environ.get("STATE_DICT_TYPE", "SHARDED_STATE_DICT"), cpu_ram_efficient_loading=True,
    )  # fmt: skip
    return accelerate.Accelerator(fsdp_plugin=plugin, **options)


def count_ranks_as_gpus(state: Any) -> None:
    from accelerate.utils import DistributedType

    begin = state.__init__

    def begin_on_gpus(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    state.__init__ = begin_on_gpus


def with_lightning(folder: Path) -> tuple[list[float], nn.Module]:
    """Train with Lightning's ModelParallelStrategy, whose example shards in configure_model."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Subject(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = network(), []

        def configure_model(self) -> None:
            for block in self.net:
                if isinstance(block, Block):
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def trainer(epochs: int) -> Any:
        return pl.Trainer(
            accelerator="cpu", devices=dist_size(), strategy=ModelParallelStrategy(dist_size(), 1), max_epochs=epochs, logger=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, default_root_dir=folder,
        )  # fmt: skip

    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS)
    subject, first = Subject(), trainer(1)
    first.fit(subject, loader)
    first.save_checkpoint(folder / "saved")
    second = Subject()
    trainer(2).fit(second, loader, ckpt_path=folder / "saved")
    return [*subject.losses, *second.losses], second.net


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def with_trl(folder: Path) -> tuple[list[float], nn.Module]:
    """Tune a small Llama with TRL's SFTTrainer and accelerate's fsdp_version 2."""
    import datasets
    import tokenizers
    import transformers
    import trl
    from accelerate.state import PartialState

    count_ranks_as_gpus(PartialState)
    wraps = {
        "TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "VERSION": "2",
    }
    os.environ.update({f"FSDP_{key}": value for key, value in wraps.items()}, ACCELERATE_USE_FSDP="true")
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
    transformers.set_seed(0)
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    counted = [" ".join(WORDS[(start + step) % len(WORDS)] for step in range(8)) for start in range(256)]
    args = trl.SFTConfig(
        str(folder), max_length=32, use_cpu=True, bf16=False, per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1,
        report_to=[], disable_tqdm=True, learning_rate=3e-3, gradient_checkpointing=False, gradient_accumulation_steps=2,
        save_steps=STEPS // 2,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config), args=args, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"text": counted}),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    kept = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry[key] for entry in kept for key in ("loss", "grad_norm")], trainer.model


PROGRAMS: dict[str, Callable[[Path], tuple[list[float], nn.Module]]] = {
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "trl": with_trl,
}


def main() -> None:
    name, side, file, folder = sys.argv[1:5]
    torch.set_num_threads(1)
    if side == "ours":
        import shardwright as sw
        from torch.distributed import fsdp

        fsdp.fully_shard = sw.fully_shard
    numbers, model = PROGRAMS[name](Path(folder))
    if side == "ours":
        assert any(isinstance(each, sw.FSDPModule) for each in model.modules())
    numbers += [float(value.detach().full_tensor().norm()) for value in model.parameters()]
    dist.barrier()
    if int(os.environ["RANK"]) == 0:
        Path(file).write_text(json.dumps(numbers))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # else threads of Gloo's groups may end the process ("terminate called") as Python ends


if __name__ == "__main__":
    main()
