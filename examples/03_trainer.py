"""transformers' Trainer with shardwright: two names are imported from another module. See README.md.

    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/03_trainer.py --shardwright zero2
    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/03_trainer.py --stock    # torch's DistributedDataParallel

It trains a small Llama on made sentences, saves a checkpoint, and resumes it at another stage.
"""

import argparse
import tempfile

import torch
import transformers
from shardwright.integrations.transformers import Trainer, TrainingArguments


class Counts(torch.utils.data.Dataset):
    """Sentences that count up from a random number."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        start = torch.randint(0, 61, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(16)) % 61
        return {"input_ids": tokens, "labels": tokens}


def run(folder, stage, steps, is_stock, resume=None):
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    settings = dict(
        use_cpu=True, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=3e-3, max_steps=steps,
        lr_scheduler_type="constant", logging_steps=10, save_steps=20, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    if is_stock:
        args, kind = transformers.TrainingArguments(folder, **settings), transformers.Trainer
    else:
        args, kind = TrainingArguments(folder, shardwright=stage, **settings), Trainer
    trainer = kind(model=transformers.LlamaForCausalLM(config), args=args, train_dataset=Counts())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "grad_norm" in entry and entry["step"] > (20 if resume else 0):
                print(
                    f"step {entry['step']}: loss {entry['loss']:.4f}, norm {float(entry['grad_norm']):.4f}", flush=True
                )
    return trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shardwright", default="zero2")
    parser.add_argument("--stock", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    state = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True).distributed_state
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    run(folder[0], options.shardwright, 20, options.stock)
    if state.is_main_process:
        print("resumed" if options.stock else "resumed at zero=1")
    run(folder[0], "zero1", 40, options.stock, resume=f"{folder[0]}/checkpoint-20")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
