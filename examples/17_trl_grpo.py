"""TRL's GRPOTrainer at zero=3 on two ranks, which hands the weights to an engine, a process of its own, after each step.

    ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/17_trl_grpo.py

The model is a small random Llama, and the tokenizer is made here. The reward counts one word. The engine stands for a
server of generations: it holds the whole model in bfloat16, and says how likely it finds that word.
"""

import tempfile

import datasets
import shardwright as sw
import tokenizers
import torch
import torch.multiprocessing as processes
import transformers
import trl
from shardwright.integrations.transformers import TrainerMixin

WORDS = [f"w{number}" for number in range(12)]
STEPS, GOAL = 8, WORDS[3]


class GRPOTrainer(TrainerMixin, trl.GRPOTrainer):
    pass


def make_tokenizer():
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model(words):
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def engine(requests, words, goal):
    """Take weights as they come, and answer how likely the goal is on average."""
    torch.set_num_threads(1)
    model = make_model(words).to(torch.bfloat16)
    state, taken = model.state_dict(), 0
    prompts = torch.arange(2, words)[:, None]
    while True:
        name, values = requests.recv()
        if name is None:
            return
        if name:
            state[name].copy_(values)
            taken += 1
            continue
        with torch.no_grad():
            chances = model(input_ids=prompts).logits[:, -1].float().softmax(-1)
        requests.send((taken, chances[:, goal].mean().item()))


class HandOver(transformers.TrainerCallback):
    """Streams the weights to the engine after each step; all ranks take part, rank 0 gets them."""

    def __init__(self, trainer, pipe):
        self.trainer, self.pipe = trainer, pipe

    def on_step_end(self, args, state, control, **_):
        for name, values in sw.iter_full_parameters(self.trainer.model_wrapped, ranks=0, dtype=torch.bfloat16):
            if self.pipe is not None:
                self.pipe.send((name.removeprefix("module."), values))
        if self.pipe is not None:
            self.pipe.send(("", None))
            taken, chance = self.pipe.recv()
            print(
                f"step {state.global_step}: the engine took {taken} tensors and says {GOAL} with {chance:.3f}",
                flush=True,
            )


def reward(completions, **_):
    return [float(each.split().count(GOAL)) for each in completions]


def main():
    torch.set_num_threads(1)
    for library in (transformers, datasets):
        library.logging.set_verbosity_error()
    datasets.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(0)
    tokenizer = make_tokenizer()
    args = trl.GRPOConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, per_device_train_batch_size=16, num_generations=8, max_steps=STEPS,
        max_completion_length=8, learning_rate=2e-2, logging_steps=STEPS, save_strategy="no", report_to=[],
        disable_tqdm=True, gradient_checkpointing=False, beta=0.0,
    )  # fmt: skip
    prompts = datasets.Dataset.from_dict({"prompt": [f"{WORDS[k % 12]} {WORDS[(k + 1) % 12]}" for k in range(64)]})
    trainer = GRPOTrainer(
        model=make_model(len(tokenizer)), reward_funcs=reward, args=args, train_dataset=prompts,
        processing_class=tokenizer, zero=3,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    pipe, process = None, None
    if trainer.is_world_process_zero():
        context = processes.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=engine, args=(other, len(tokenizer), 2 + WORDS.index(GOAL)), daemon=True)
        process.start()
    trainer.add_callback(HandOver(trainer, pipe))
    trainer.train()
    if pipe is not None:
        pipe.send((None, None))
        process.join()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
