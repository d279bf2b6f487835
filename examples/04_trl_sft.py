"""TRL's SFTTrainer and DPOTrainer with shardwright, by a mixin. See README.md.

    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/04_trl_sft.py --shardwright zero2
    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/04_trl_sft.py --stock    # torch's DistributedDataParallel

It tunes a small Llama on made sentences, then on pairs of a right and a wrong one. The tokenizer is made here, too.
"""

import argparse
import tempfile

import datasets
import tokenizers
import torch
import transformers
import trl
from shardwright.integrations.transformers import TrainerMixin

WORDS = [f"w{number}" for number in range(40)]


class SFTTrainer(TrainerMixin, trl.SFTTrainer):
    pass


class DPOTrainer(TrainerMixin, trl.DPOTrainer):
    pass


def make_tokenizer():
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def counted(start, step, length=8):
    return " ".join(WORDS[(start + step * k) % len(WORDS)] for k in range(length))


def report(name, trainer, key):
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if key in entry and "grad_norm" in entry:
                print(f"{name} step {entry['step']}: loss {entry['loss']:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shardwright", default="zero2")
    parser.add_argument("--stock", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
    datasets.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(0)
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    zero = int(options.shardwright.removeprefix("zero"))
    stage = {} if options.stock else {"zero": zero}
    settings = dict(
        use_cpu=True, bf16=False, per_device_train_batch_size=8, max_steps=20, logging_steps=5, save_strategy="no",
        report_to=[], disable_tqdm=True, learning_rate=3e-3, gradient_checkpointing=False,
    )  # fmt: skip
    text = datasets.Dataset.from_dict({"text": [counted(start, 1) for start in range(256)]})
    args = trl.SFTConfig(tempfile.mkdtemp(), max_length=32, **settings)
    kind = trl.SFTTrainer if options.stock else SFTTrainer
    trainer = kind(model=model, args=args, train_dataset=text, processing_class=tokenizer, **stage)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    report("SFT", trainer, "loss")
    reference = transformers.LlamaForCausalLM(config)
    reference.load_state_dict(trainer.accelerator.get_state_dict(trainer.model_wrapped))
    pairs = {
        "prompt": [counted(start, 1, 4) for start in range(256)],
        "chosen": [" " + counted(start + 4, 1, 4) for start in range(256)],
        "rejected": [" " + counted(start + 4, 3, 4) for start in range(256)],
    }
    args = trl.DPOConfig(tempfile.mkdtemp(), beta=0.1, **{**settings, "learning_rate": 1e-3})
    kind = trl.DPOTrainer if options.stock else DPOTrainer
    data = datasets.Dataset.from_dict(pairs)
    trainer = kind(model=model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer, **stage)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    report("DPO", trainer, "loss")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
