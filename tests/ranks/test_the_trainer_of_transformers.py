"""Law: transformers' Trainer with our integration has the losses of the stock one and the same bits at every stage. Its
checkpoints hold the same at every stage and resume at any other with the bits of an uninterrupted run; with LoRA,
too."""

import functools
import importlib.util
import os
import pathlib

import pytest
import torch
from harness import LONG, gather
from oracle.fold import bits_equal
from peer import PEER
from test_accelerate_trains_with_ours import launched

for package in ("accelerate", "transformers"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

#: fields of wrap_options= beside the stage
CASES = [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"share_parameters": False})]
STEPS, SAVED = 5, 3


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    """Return a model whose head is tied to its embedding."""
    import transformers

    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2, **none)
    return transformers.GPT2LMHeadModel(config)


def lora():
    import peft

    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0))


class Sentences(torch.utils.data.Dataset):
    def __init__(self, length):
        self._tokens = torch.randint(0, 61, (length, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, index):
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def quiet():
    """Suppress imports and output of transformers that the tests do not use."""
    os.environ.update(USE_TF="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def make(build, folder, world_size, kind=None, zero=None, **settings):
    """Return a Trainer of our integration, or the stock one without a stage, over its own model; and its log."""
    transformers = quiet()
    from accelerate.state import AcceleratorState, GradientState
    from shardwright.integrations.transformers import Trainer

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    settings = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        **settings,
    }
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        dataloader_num_workers=0,
        **{"save_strategy": "no", **settings},
    )
    losses = []

    class Keeps(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            if "loss" in logs:
                losses.append((logs["loss"], logs["grad_norm"]))

    stage = {} if zero is None else {"zero": zero, "wrap_options": kind}
    trainer = (transformers.Trainer if zero is None else Trainer)(
        model=build(),
        args=arguments,
        train_dataset=Sentences(40),
        eval_dataset=Sentences(6),
        callbacks=[Keeps()],
        **stage,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.accelerator.num_processes == world_size == trainer.args.world_size
    return trainer, losses


def values_of(trainer):
    from shardwright import full_parameters

    if hasattr(trainer, "_stage"):
        with full_parameters(trainer.model_wrapped):
            return [p.detach().clone() for p in trainer.model.parameters()]
    return [p.detach().clone() for p in trainer.model.parameters()]


def assert_near(left, right, what, atol=1e-5):
    for a, b in zip(left, right, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=atol), what


def assert_same(left, right, what):
    assert all(bits_equal(a, b) for a, b in zip(left, right, strict=True)), what


def train_at_every_stage(rank, world_size, folder, build, **settings):
    found = []
    for zero, kind in [(None, None), *CASES]:
        trainer, losses = make(build, folder, world_size, kind, zero, **settings)
        trainer.train()
        assert len(losses) == STEPS
        found.append((losses, values_of(trainer), trainer.evaluate()["eval_loss"]))
        gather(None)
    (stock, values, evaluated), *ours = found
    for (losses, own, own_evaluated), case in zip(ours, CASES, strict=True):
        assert torch.allclose(torch.tensor(losses), torch.tensor(stock), rtol=1e-4), (case, losses, stock)
        assert_near(own, values, case, 5e-3 if settings.get("bf16") else 1e-5)
        assert abs(own_evaluated - evaluated) < 1e-3, case
        assert losses == ours[0][0] and own_evaluated == ours[0][2], (case, losses, ours[0][0])
        assert_same(own, ours[0][1], case)


def save_and_resume(rank, world_size, folder, build):
    """Save at step SAVED with each stage and with the stock class; resume with another."""
    from safetensors.torch import load_file

    folder = pathlib.Path(folder)
    found, files = [], []
    for number, (zero, kind) in enumerate([(None, None), *CASES]):
        every = dict(save_strategy="steps", save_steps=SAVED)
        trainer, losses = make(build, folder / str(number), world_size, kind, zero, **every)
        trainer.train()
        found.append((losses, values_of(trainer)))
        trainer.save_model(str(folder / f"last-{number}"))
        gather(None)
        checkpoint = folder / str(number) / f"checkpoint-{SAVED}"
        name = "adapter_model.safetensors" if build is lora else "model.safetensors"
        files.append((load_file(checkpoint / name), torch.load(checkpoint / "optimizer.pt", weights_only=True)))
        last = load_file(folder / f"last-{number}" / name)
        assert sum(v.numel() for v in last.values()) == sum(v.numel() for v in files[0][0].values())
    for (weights, optimizer), case in zip(files[1:], CASES, strict=True):
        assert weights.keys() == files[0][0].keys() and optimizer.keys() == files[0][1].keys(), case
        assert_same(weights.values(), files[1][0].values(), case)
        assert optimizer["param_groups"] == files[0][1]["param_groups"], case
        for position, entry in files[1][1]["state"].items():
            assert_same([optimizer["state"][position][key] for key in entry], entry.values(), (case, position))
    for number, (zero, kind) in enumerate(CASES, 1):
        source = (number + 1) % len(CASES) + 1
        trainer, losses = make(build, folder / f"again-{number}", world_size, kind, zero)
        trainer.train(resume_from_checkpoint=str(folder / str(source) / f"checkpoint-{SAVED}"))
        assert losses == found[source][0][SAVED:], (number, source)
        assert_same(values_of(trainer), found[source][1], (number, source))
        gather(None)
    trainer, losses = make(build, folder / "of-stock", world_size, {}, 2)
    trainer.train(resume_from_checkpoint=str(folder / "0" / f"checkpoint-{SAVED}"))
    assert torch.allclose(torch.tensor(losses), torch.tensor(found[0][0][SAVED:]), rtol=1e-4)
    gather(None)


def load_the_best(rank, world_size, folder, build):
    """The first evaluation is the best, since noise teaches nothing at this rate. Its weights are loaded at the end."""
    from safetensors.torch import load_file

    for number, (zero, kind) in enumerate(CASES):
        at_end = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=4)
        at_end |= dict(load_best_model_at_end=True, learning_rate=0.3, lr_scheduler_type="constant")
        trainer, _ = make(build, f"{folder}/{number}", world_size, kind, zero, **at_end)
        trainer.train()
        weights = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
        names = dict(trainer.model.named_parameters())
        from shardwright import full_parameters

        with full_parameters(trainer.model_wrapped):
            assert all(bits_equal(names[name].detach(), weights[name]) for name in weights if name in names), zero
        trainer.args.max_steps = 6
        trainer.train()  # once more, on the wrapped model
        assert trainer.state.global_step == 6
        gather(None)


def run(rank, world_size, folder, law, **arguments):
    with launched(rank, world_size):
        law(rank, world_size, folder, **arguments)


@pytest.fixture(scope="module")
def team(teams):
    """Start separate ranks, since they import transformers, which no other test needs."""
    with teams.fresh(3 if LONG else 2) as team:
        yield team


LAWS = {
    "gpt2": functools.partial(train_at_every_stage, build=gpt2),
    "llama": functools.partial(train_at_every_stage, build=llama, gradient_checkpointing=True),
    "llama-bf16": functools.partial(train_at_every_stage, build=llama, bf16=True),
    "resumed": functools.partial(save_and_resume, build=llama),
    "lora-resumed": functools.partial(save_and_resume, build=lora),
    "best": functools.partial(load_the_best, build=llama),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("law", LAWS)
def test_every_stage_has_the_losses_of_the_stock_class(team, tmp_path, law):
    if LAWS[law].keywords["build"] is lora and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    team.run(run, 140, folder=str(tmp_path), law=LAWS[law])
