"""Laws of `shardwright plan`: counts of published models, bytes of published tables, activations as measured, a choice
with its reason, launch files that their own tools accept, and a sentence with exit code 2 for input that no plan fits.
"""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from shardwright.integrations.settings import read_settings
from shardwright_tools.cli import main
from shardwright_tools.planner.choose import Work, _candidate, candidates, choose
from shardwright_tools.planner.forms import FORMS, run_options
from shardwright_tools.planner.machine import Machine, shown_bytes
from shardwright_tools.planner.memory import (
    OPTIMIZERS,
    PRECISIONS,
    activation_bytes,
    cut_buckets,
    gradient_bytes,
    state_of,
)
from shardwright_tools.planner.saving import learning_rate, save_plan
from shardwright_tools.planner.shape import PlanError, from_config, from_numbers

ROOT = Path(__file__).resolve().parents[1]


def llama(width, layers, heads, kv_heads, inner, words, kind="llama", **more):
    return {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": words, "tie_word_embeddings": False, **more,
    }  # fmt: skip


LLAMA_8B = llama(4096, 32, 32, 8, 14336, 128256)
LLAMA_70B = llama(8192, 80, 64, 8, 28672, 128256)
#: name -> (configuration, parameters as its publisher counts them)
PUBLISHED = {
    "Llama-2-7B": (llama(4096, 32, 32, 32, 11008, 32000), 6_738_415_616),
    "Llama-3-8B": (LLAMA_8B, 8_030_261_248),
    "Llama-3-70B": (LLAMA_70B, 70_553_706_496),
    "Mixtral-8x7B": (
        llama(4096, 32, 32, 8, 14336, 32000, "mixtral", num_local_experts=8, num_experts_per_tok=2), 46_702_792_704
    ),
    "Qwen2-7B": (llama(3584, 28, 28, 4, 18944, 152064, "qwen2"), 7_615_616_512),
    "Qwen3-8B": (llama(4096, 36, 32, 8, 12288, 151936, "qwen3", head_dim=128), 8_190_735_360),
    "Qwen3-30B-A3B": (
        llama(2048, 48, 32, 4, 6144, 151936, "qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=768), 30_532_122_624
    ),
    "Qwen1.5-MoE-A2.7B": (
        llama(2048, 24, 16, 16, 5632, 151936, "qwen2_moe", num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, shared_expert_intermediate_size=5632), 14_315_784_192
    ),
    "Phi-3-mini": (llama(3072, 32, 32, 32, 8192, 32064, "phi3"), 3_821_079_552),
    "Gemma-2B": (
        {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8, "head_dim": 256,
         "num_key_value_heads": 1, "intermediate_size": 16384, "vocab_size": 256000}, 2_506_172_416
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "Pythia-1.4B": (llama(2048, 24, 16, 16, 8192, 50304, "gpt_neox"), 1_414_647_808),
    "OPT-1.3B": (
        {"model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
         "vocab_size": 50272, "max_position_embeddings": 2048}, 1_315_758_080
    ),
    "BERT-base": (
        {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512}, 109_482_240
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_has_the_parameters_of_its_model(name):
    config, numel = PUBLISHED[name]
    assert from_config(config).numel == numel


def test_a_token_passes_the_experts_that_it_is_routed_to():
    assert from_config(PUBLISHED["Mixtral-8x7B"][0]).active_numel == 12_879_925_248
    assert from_config(PUBLISHED["Qwen3-30B-A3B"][0]).active_numel == 3_353_032_704


#: bytes per token that autograd and the output held after the forward of small models of transformers 5.24, torch 2.13,
#: CPU: width 256, 8 heads, 1000 words, (layers, kv heads, inner), by dtype's bytes
ACTIVATIONS = {
    "llama": ((6, 2, 704), {4: 131_268, 2: 74_420}),
    "gpt2": ((6, 8, 1024), {4: 182_396, 2: 93_304}),
    "mixtral": ((4, 4, 512), {4: 130_564, 2: 72_180}),
    "qwen3": ((6, 4, 704), {4: 153_060, 2: 90_068}),
    "gpt_neox": ((6, 8, 1024), {4: 120_984, 2: 62_596}),
    "opt": ((6, 8, 1024), {4: 84_096, 2: 44_156}),
    "gemma": ((6, 1, 1024), {4: 160_504, 2: 95_720}),
    "bert": ((6, 8, 1024), {4: 100_668, 2: 50_436}),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_what_autograd_kept(kind):
    (layers, kv_heads, inner), measured = ACTIVATIONS[kind]
    names = {"gpt2": {"n_embd": 256, "n_layer": layers, "n_head": 8, "n_positions": 256}, "opt": {"ffn_dim": inner}}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    config = llama(256, layers, 8, kv_heads, inner, 1000, kind, head_dim=32, max_position_embeddings=256, **experts)
    shape = from_config({**config, **names.get(kind, {})})
    for item, per_token in measured.items():
        assert activation_bytes(shape, 256, item) / 256 == pytest.approx(per_token, rel=0.03), item


def test_numbers_make_a_model_of_their_size():
    # the inner width is a multiple of 16, so that tensor-parallel ranks divide it
    assert from_numbers(layers=32, width=4096, vocabulary=32000, parameters=7_000_000_000).numel == pytest.approx(
        7e9, rel=4e-4
    )
    assert from_numbers(layers=2, width=64, vocabulary=100).numel > 0
    for billions, layers, width in ((1, 16, 2048), (7, 32, 4096), (13, 40, 5120)):  # Llama's own at 7 and 13
        alone = from_numbers(parameters=billions * 10**9)
        assert (alone.layers, alone.width) == (layers, width) and alone.numel == pytest.approx(
            billions * 10**9, rel=0.002
        )


def test_the_table_of_the_zero_paper():
    """Figure 1 of Rajbhandari et al. (2020): 7.5 B parameters, 64 ranks, mixed precision Adam: 120, 31.4, 16.6, 1.9 GB."""
    shape = from_numbers(layers=36, width=4096, vocabulary=32000, parameters=7_500_000_000)
    want = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}
    for zero, gigabytes in want.items():
        held = state_of(
            shape,
            zero=zero,
            ranks=64,
            host_ranks=8,
            precision=PRECISIONS["bf16-parameters"],
            optimizer="adamw",
            on_gpu=True,
        )
        ring = (
            0 if zero < 2 else held.gradients - shape.numel * 2 // 64
        )  # buckets in flight, which the paper leaves out
        assert (held.parameters + held.gradients - ring + held.state) / 1e9 == pytest.approx(gigabytes, rel=0.02), zero
        assert 0 <= ring < 0.8e9


def test_quoted_sizes():
    """7 B takes 112 GB in mixed precision, 70 B 1.1 TB: 16 bytes per parameter."""
    for config, gigabytes in ((PUBLISHED["Llama-2-7B"][0], 108), (LLAMA_70B, 1129)):
        held = state_of(
            from_config(config),
            zero=0,
            ranks=1,
            host_ranks=1,
            precision=PRECISIONS["bf16-parameters"],
            optimizer="adamw",
            on_gpu=True,
        )
        assert held.model_state / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_state_per_element_is_what_a_step_makes():
    import torch
    from shardwright.plan import _element_bytes

    made = {
        "adamw": lambda p: torch.optim.AdamW(p),
        "adam": lambda p: torch.optim.Adam(p),
        "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p),
        "rmsprop": lambda p: torch.optim.RMSprop(p),
    }
    assert made.keys() == OPTIMIZERS.keys()
    for name, make in made.items():
        optimizer = make([torch.zeros(3, requires_grad=True)])
        assert _element_bytes(optimizer, optimizer.param_groups[0], torch.float32) == OPTIMIZERS[name], name


def test_buckets_are_closed_at_their_cap():
    assert cut_buckets([[100, 100, 100]], 4, 500, 1) == [
        512 + 400 + 112,
        512,
    ]  # from the last parameter on, aligned to 128
    assert gradient_bytes([300, 200], zero=0, slices=1, cap_bytes=100, on_gpu=False) == 500
    assert gradient_bytes([300, 200], zero=2, slices=2, cap_bytes=100, on_gpu=False) == 400 + 250
    assert gradient_bytes([300, 200], zero=2, slices=2, cap_bytes=100, on_gpu=True) == 500 + 250
    for zero, expected in ((0, 400), (2, 400 + 200)):
        settings = {"zero": zero, "slices": 1 + (zero > 0), "cap_bytes": 100, "on_gpu": False, "steps": True}
        assert gradient_bytes([300, 200, 200], **settings) == expected
        assert gradient_bytes([200, 300, 100], **settings) == expected, "the last bucket lies behind the second"
    assert gradient_bytes([], zero=3, slices=2, cap_bytes=100, on_gpu=True) == 0


# the choice -----------------------------------------------------------------------------------------------------------


def h100(hosts=1, ranks=8, memory=80e9):
    return Machine(hosts, ranks, int(memory), 350.0, 320.0, True, "h100", 989.0)


@pytest.mark.parametrize(
    ("config", "machine", "work", "label"),
    [
        (PUBLISHED["GPT-2"][0], h100(), Work(4, 1024), "zero=0"),
        (PUBLISHED["OPT-1.3B"][0], h100(memory=40e9), Work(1, 512), "zero=0"),
        (PUBLISHED["OPT-1.3B"][0], h100(memory=26e9), Work(1, 512), "zero=1"),
        (PUBLISHED["OPT-1.3B"][0], h100(memory=16e9), Work(1, 512), "zero=2"),
        (PUBLISHED["OPT-1.3B"][0], h100(memory=10e9), Work(1, 512), "zero=3"),
        (LLAMA_8B, h100(), Work(1, 8192), "zero=3, activation checkpointing"),
        (LLAMA_70B, h100(8), Work(1, 4096), "zero=3, activation checkpointing"),
    ],
)
def test_the_lowest_stage_that_fits_is_chosen(config, machine, work, label):
    found = choose(from_config(config), machine, work)
    assert found.chosen.label == label and found.chosen.fits
    assert found.chosen.memory.total <= 0.95 * machine.memory
    if label != "zero=0":
        assert found.nearest is not None and not found.nearest.fits and found.nearest.over > 0


def test_64_ranks_are_8_x_4_x_2():
    found = choose(from_config(LLAMA_70B), h100(8), Work(1, 4096, accumulate=16, tp=8, pp=4))
    assert found.chosen.tp == 8 and found.chosen.pp == 4 and found.global_batch_tokens == 2 * 4096 * 16
    assert found.chosen.fits


def test_days_are_6_n_t_over_the_rate():
    found = choose(from_config(LLAMA_8B), h100(16), Work(1, 8192, tokens=10**12))
    seconds = 6 * 8_030_261_248 * 10**12 / (128 * 989e12 * 0.4)
    assert not found.chosen.checkpointed
    assert found.days == pytest.approx(seconds / 86400, rel=0.05)


def test_rules_have_their_numbers():
    shape = from_config(LLAMA_70B)
    notes = " ".join(choose(shape, h100(8), Work(1, 4096, accumulate=4, tp=8, pp=8)).notes)
    assert "64 % of the pipeline is idle" in notes and "at least 28 micro-batches" in notes
    assert "4 micro-batches for 8 stages, fewer than 4 per stage: use 32" in notes
    assert "80 layers do not divide by 3" not in notes
    notes = " ".join(choose(shape, h100(6), Work(1, 4096, accumulate=64, tp=8, pp=3)).notes)
    assert "80 layers do not divide by 3 stages: give the first and last stage fewer" in notes
    notes = " ".join(choose(shape, h100(8, 4), Work(1, 4096, tp=8)).notes)
    assert "tp=8 crosses hosts of 4 ranks" in notes
    notes = " ".join(choose(from_config(LLAMA_8B), h100(), Work(1, 128, precision="fp16")).notes)
    assert "this device has bfloat16" in notes
    slow = Machine(16, 1, int(80e9), 350.0, 1.1, True, "h100", 989.0)
    assert "communication-bound" in " ".join(choose(from_config(LLAMA_8B), slow, Work(1, 2048)).notes)


# checkpoints and the learning rate ------------------------------------------------------------------------------------


def test_the_interval_is_young_and_daly():
    shape = from_config(LLAMA_8B)
    found = save_plan(
        shape, optimizer="adamw", precision="bf16-parameters", ranks=8, mtbf_s=86400, save_s=30, keep_last=2
    )
    young = (2 * 30 * 86400) ** 0.5
    assert young - 31 < found.every_s < young  # Daly subtracts the save, and adds a little
    assert found.checkpoint_bytes == 14 * shape.numel and found.disk_bytes == 3 * found.checkpoint_bytes
    # Llama 3: 419 interruptions in 54 days of 16,384 GPUs
    assert save_plan(shape, optimizer="adamw", precision="bf16", ranks=16_384).mtbf_s == pytest.approx(54 * 86400 / 419)
    for folder, warns in (("/tmp/runs", True), ("/dev/shm/x", True), ("/nfs/runs", False)):
        notes = save_plan(shape, optimizer="adamw", precision="bf16", ranks=8, folder=folder).notes
        assert any("one host" in note for note in notes) == warns


def test_the_learning_rate_follows_its_rule():
    assert learning_rate(1e-3, 256, 1024, "linear")[0] == pytest.approx(4e-3)
    assert learning_rate(1e-3, 256, 1024, "sqrt")[0] == pytest.approx(2e-3)
    assert "Goyal" in learning_rate(1e-3, 1, 1, "linear")[1] and "Malladi" in learning_rate(1e-3, 1, 1, "sqrt")[1]


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def test_the_command_needs_no_torch_and_takes_less_than_three_seconds(config, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    path = tmp_path / "70b.json"
    path.write_text(json.dumps(LLAMA_70B))
    words = [
        sys.executable,
        "-m",
        "shardwright",
        "plan",
        str(path),
        "--hosts",
        "8",
        "--ranks",
        "8",
        "--gpu",
        "h100",
        "--json",
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(tmp_path), "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["model"]["parameters"] == 70_553_706_496
    assert found["forms"]["wrap"].startswith("sw.checkpoint_units(model)") and "zero=3" in found["forms"]["wrap"]
    assert json.loads(found["forms"]["deepspeed"])["zero_optimization"]["stage"] == 3


def test_the_text_has_the_table_the_choice_and_its_reason(config, capsys):
    assert main(["plan", config, "--ranks", "8", "--gpu", "h100", "--sequence", "8192", "--tokens", "1T", "--learning-rate", "3e-4",
                 "--base-batch", "4M"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    for text in ("8,030,261,248 parameters", "zero=2, checkpointing", "Nearest that does not fit: zero=2", "sw.wrap(model",
                 "days (6 N T / rate)", "compute-bound", "every_s=", "keep_last=3", "Learning rate"):  # fmt: skip
        assert text in out, text


def test_nothing_fits_is_said_with_the_remedy(config, capsys):
    for ranks, memory in (("2", "22GB"), ("1", "40GB")):
        small = ["plan", config, "--ranks", ranks, "--memory", memory, "--sequence", "512"]
        assert main(small) == 2
        out = capsys.readouterr().out
        hosts = re.search(r"use more ranks, which each hold less of it; (\d+) hosts are enough", out)
        assert "Nothing fits" in out and hosts and main([*small, "--hosts", hosts[1]]) == 0, out
    assert main(["plan", config, "--ranks", "2", "--memory", "4GB"]) == 2  # less than whole units: no ranks are enough
    out = capsys.readouterr().out
    assert "Whole units are the largest part" in out and "more ranks" not in out


def test_a_module_is_built_on_meta(tmp_path, capsys):
    (tmp_path / "given.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(50)))\n"
        "def needs(x):\n    return x\ndef reads():\n    return torch.zeros(3).tolist()\nnumber = 3\ndef empty():\n    return torch.nn.ReLU()\n"
    )
    path = str(tmp_path / "given.py")
    assert main(["plan", f"{path}:build", "--ranks", "4", "--memory", "8GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["parameters"] == 50 * (4096 * 4096 + 4096) and "not counted" in " ".join(found["notes"])
    for name, text in (
        ("needs", "missing 1 required positional argument"),
        ("reads", "cannot be built on the meta device"),
        ("number", "cannot be built on the meta device"),
        ("absent", "has no attribute"),
        ("empty", "has no parameters"),
    ):
        assert main(["plan", f"{path}:{name}", "--memory", "8GB"]) == 2
        assert text in capsys.readouterr().err, name


GPU = ["--gpu", "h100"]
WRONG = {
    "no model": (
        [*GPU],
        "pass a config.json, module:name, --parameters such as 7B, or --layers, --width and --vocabulary",
    ),
    "no file": (["absent.json", *GPU], "absent.json does not exist"),
    "no json": (["{bad}", *GPU], "is not JSON"),
    "a program without a name": (["{lazy}", *GPU], "lazy_model.py:NAME, a function in it that returns the module"),
    "a list": (["{list}", *GPU], "must hold a mapping"),
    "unknown family": (["{other}", *GPU], "model_type 'mamba' is not known"),
    "a field": (["{short}", *GPU], "has no intermediate_size"),
    "a text for a number": (
        ["{text}", *GPU],
        "num_hidden_layers must be a positive integer of at most 10,000, got 'many'",
    ),
    "heads": (["{heads}", *GPU], "kv heads must divide heads, got kv heads 5 and heads 32"),
    "no memory": (["{good}"], "--memory is needed"),
    "memory": (["{good}", "--memory", "lots"], "--memory must be a size such as 80GB"),
    "gpu": (["{good}", "--gpu", "h900"], "--gpu must be one of b200"),
    "link": (["{good}", *GPU, "--link", "string"], "--link must be one of nvlink"),
    "network": (["{good}", *GPU, "--network", "0GB/s"], "--network must be one of nvlink"),
    "degrees": (["{good}", *GPU, "--ranks", "8", "--tp", "3"], "tp 3 x pp 1 x cp 1 must divide 1 hosts x 8 ranks = 8"),
    "tp and heads": (["{good}", *GPU, "--ranks", "16", "--tp", "16"], "tp must divide kv heads"),
    "stages": (["{good}", *GPU, "--ranks", "64", "--pp", "64"], "pp must be at most the number of layers, 32"),
    "experts": (["{good}", *GPU, "--ranks", "8", "--ep", "8"], "ep must divide the experts (0)"),
    "precision": (["{good}", *GPU, "--precision", "fp4"], "--precision must be one of fp32"),
    "optimizer": (["{good}", *GPU, "--optimizer", "magic"], "--optimizer must be one of adamw"),
    "both": (["{good}", *GPU, "--layers", "3"], "not both"),
    "tokens and steps": (["{good}", *GPU, "--tokens", "1B", "--steps", "5"], "--tokens or --steps, not both"),
    "ranks": (["{good}", *GPU, "--ranks", "0"], "--ranks must be positive"),
    "mfu": (["{good}", *GPU, "--mfu", "2"], "--mfu must be above 0"),
    "form": (["{good}", *GPU, "--form", "jax"], "--form must be one of wrap"),
    "launch": (["{good}", *GPU, "--launch", "pbs"], "--launch must be one of torchrun"),
    "hostfile": (["{good}", *GPU, "--launch", "hostfile"], "needs --hostfile"),
    "base": (["{good}", *GPU, "--learning-rate", "1e-3"], "--learning-rate needs --base-batch"),
    "deep": (["{deep}", *GPU], "is not JSON"),
    "a list for the family": (["{family}", *GPU], "model_type \"['llama']\" is not known"),
    "a text for a flag": (["{flag}", *GPU], "attention_bias must be true or false, got 'no'"),
    "a size out of range": (["{large}", *GPU], "hidden_size must be a positive integer of at most"),
    "no expert": (["{idle}", *GPU], "num_experts_per_tok must be 1 to the number of experts, 8, got 0"),
    "no text": (["{good}", "--memory", ""], "--memory must be a size"),
    "memory out of range": (["{good}", "--memory", "9" * 400 + "GB"], "--memory must be a size"),
    "hosts out of range": (["{good}", *GPU, "--hosts", "9" * 400], "--hosts must be at most"),
    "hours": (["{good}", *GPU, "--hours", "inf", "--launch", "slurm"], "--hours must be at most"),
    "mtbf": (["{good}", *GPU, "--mtbf-hours", "nan"], "--mtbf-hours must be positive"),
    "save": (["{good}", *GPU, "--save-seconds", "0"], "--save-seconds must be positive"),
    "milestones": (["{good}", *GPU, "--milestones", "-2"], "--milestones must be at least 0"),
    "a part of a step": (["{good}", *GPU, "--steps", "0.2"], "--steps must be a positive whole count"),
    "rule alone": (["{good}", *GPU, "--rule", "sqrt"], "need --learning-rate"),
    "two outputs": (["{good}", *GPU, "--launch", "slurm", "--json"], "one of --launch, --form and --json"),
    "name": (["{good}", *GPU, "--launch", "jobset", "--name", "a: b"], "--name must be 1 to 40 lower-case letters"),
    "accelerate": (
        ["{good}", *GPU, "--ranks", "8", "--tp", "8", "--launch", "accelerate"],
        "starts data-parallel ranks only",
    ),
    "lazy": (["{lazy}:build", *GPU], "has a parameter without a shape"),
    "two sizes": (
        ["--parameters", "1B", "--inner", "9", "--layers", "9", "--width", "512", "--vocabulary", "9000", *GPU],
        "--parameters or --inner, not both",
    ),
    "too small": (
        ["--parameters", "1M", "--layers", "9", "--width", "512", "--vocabulary", "9000", *GPU],
        "is less than the",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(name, tmp_path, capsys):
    short = {key: value for key, value in LLAMA_8B.items() if key != "intermediate_size"}
    files = {
        "good": LLAMA_8B, "list": [1], "other": {"model_type": "mamba"}, "short": short,
        "text": {**LLAMA_8B, "num_hidden_layers": "many"}, "heads": {**LLAMA_8B, "num_key_value_heads": 5},
        "family": {**LLAMA_8B, "model_type": ["llama"]}, "flag": {**LLAMA_8B, "attention_bias": "no"},
        "large": {**LLAMA_8B, "hidden_size": 10**30},
        "idle": {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 0},
    }  # fmt: skip
    paths = {key: tmp_path / f"{key}.json" for key in files} | {"bad": tmp_path / "bad.json"}
    paths |= {"deep": tmp_path / "deep.json", "lazy": tmp_path / "lazy_model.py"}
    paths["deep"].write_text("[" * 100_000)
    paths["lazy"].write_text("import torch\ndef build():\n    return torch.nn.LazyLinear(3)\n")
    for key, value in files.items():
        paths[key].write_text(json.dumps(value))
    paths["bad"].write_text("{")
    words, text = WRONG[name]
    assert main(["plan", *(word.format(**paths) for word in words)]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error


def test_a_hostfile_is_read_as_deepspeed_does(tmp_path, config, capsys):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two\nnode1 slots=4\n\nnode2 slots=4\n")
    words = [
        "plan",
        config,
        *GPU,
        "--launch",
        "hostfile",
        "--hostfile",
        str(hostfile),
        "--",
        "train.py",
        "--steps",
        "a b",
    ]
    assert main(words) == 0
    script = capsys.readouterr().out
    assert main([*words[: words.index("--launch")], *words[words.index("--hostfile") : words.index("--")]]) == 0
    assert "on 2 x 4 ranks" in capsys.readouterr().out
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$1: $2" >> ' + str(tmp_path / "said") + "\n")
    ssh.chmod(0o755)
    subprocess.run(
        ["bash", "-c", script], check=True, env={"SSH": str(ssh), "PATH": "/usr/bin:/bin"}, cwd=tmp_path, timeout=170
    )
    said = sorted((tmp_path / "said").read_text().splitlines())
    assert [line.partition(":")[0] for line in said] == ["node1", "node2"]
    assert all("--nnodes=2 --nproc-per-node=4" in line and 'rdzv-endpoint="node1:29500"' in line for line in said)
    assert all("train.py --steps 'a b'" in line and f"cd {tmp_path}" in line for line in said)
    for text in ("node1 slots=4\nnode2 slots=2\n", "node1 4\n", "node1 slots=x\n", ""):
        hostfile.write_text(text)
        assert main(words) == 2
        assert str(hostfile) in capsys.readouterr().err


def torchrun_reads(script):
    """Parse torchrun's command in a script as torchrun does."""
    from torch.distributed.run import parse_args

    script = "\n".join(line for line in script.splitlines() if not line.startswith("#"))
    text = script[script.index("torchrun --") :].replace("\\\n", " ").split("\n")[0].removesuffix(" &")
    words = shlex.split(text)
    return parse_args(words[1:])


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("kind", ["torchrun", "slurm", "sky", "jobset", "accelerate"])
def test_a_launch_file_is_what_its_tool_reads(kind, hosts, config, capsys):
    words = [
        "plan",
        config,
        *GPU,
        "--hosts",
        str(hosts),
        "--ranks",
        "8",
        "--launch",
        kind,
        "--",
        "train.py",
        "--steps",
        "3",
    ]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "made by: shardwright" in text
    yaml = pytest.importorskip("yaml")
    if kind in ("torchrun", "slurm", "accelerate"):
        subprocess.run(["bash", "-n", "-c", text], check=True)
    if kind == "slurm":
        options = dict(
            line[8:].split("=", 1) if "=" in line else (line[8:], "")
            for line in text.splitlines()
            if line.startswith("#SBATCH")
        )
        assert (
            options["--nodes"] == str(hosts)
            and options["--gpus-per-node"] == "8"
            and options["--ntasks-per-node"] == "1"
        )
        assert options["--time"] == "1-00:00:00" and options["--signal"] == "B:USR1@120" and "--requeue" in options
    elif kind == "sky":
        task = yaml.safe_load(text)
        assert (
            task["num_nodes"] == hosts
            and task["resources"]["accelerators"] == "H100:8"
            and task["resources"]["use_spot"]
        )
        assert (task["resources"].get("network_tier") == "best") == (hosts > 1)
        text = task["run"]
        subprocess.run(["bash", "-n", "-c", text], check=True)
    elif kind == "jobset":
        job = yaml.safe_load(text)
        assert job["kind"] == "JobSet" and job["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        (ranks,) = job["spec"]["replicatedJobs"]
        spec = ranks["template"]["spec"]
        assert spec["completions"] == spec["parallelism"] == hosts and spec["completionMode"] == "Indexed"
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8} and pod["terminationGracePeriodSeconds"] == 120
        assert (
            pod["volumes"][0]["emptyDir"] == {"medium": "Memory"}
            and container["volumeMounts"][0]["mountPath"] == "/dev/shm"
        )
        (text,) = container["args"]
        subprocess.run(["bash", "-n", "-c", text], check=True)
    if kind == "accelerate":
        parser = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
        words = shlex.split(text[text.index("accelerate launch") :].replace("\\\n", " ").replace("$NODE_RANK", "1"))
        read = parser.parse_args(words[2:])
        assert read.num_processes == 8 * hosts and read.num_machines == hosts and read.multi_gpu
        assert read.mixed_precision == "bf16" and read.module and read.training_script == "shardwright"
        assert read.training_script_args == ["run", "zero=3", "train.py", "--steps", "3"]
        return
    read = torchrun_reads(text)
    assert (
        read.nproc_per_node == "8"
        and read.training_script == "train.py"
        and read.training_script_args == ["--steps", "3"]
    )
    assert read.standalone if hosts == 1 and kind == "torchrun" else read.nnodes == str(hosts)


def test_a_launch_file_starts_ranks(tmp_path):
    """The file for torchrun runs as it is on CPUs."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os\nsaid = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')]\n"
        "os.write(1, f\"rank {' '.join(said)}\\n\".encode())  # in one call: ranks share the pipe\n"
    )
    words = [sys.executable, "-m", "shardwright", "plan", "--layers", "2", "--width", "64", "--vocabulary", "100", "--ranks", "2", "--memory",
             "1GB", "--cpus", "1", "--launch", "torchrun", "--", str(program)]  # fmt: skip
    script = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == ["rank 0 2 1", "rank 1 2 1"]


@pytest.mark.parametrize("zero", [2, 3])
def test_other_engines_read_their_form(zero, tmp_path):
    """accelerate reads its YAML, and our reader of DeepSpeed's JSON the stage, the precision and the place of state."""
    from shardwright_tools.planner.forms import FORMS, wrap_call

    made = pytest.importorskip("accelerate.commands.config.config_args")
    work = Work(precision="bf16", optimizer="adam")
    for machine, place, words in (
        (h100(), "cpu", 'offload="cpu"'),
        (Machine(1, 4, 10**9, 6.0, 1.1, False), "nvme:/tmp", 'offload="nvme:/tmp"'),
    ):
        chosen = next(
            each
            for each in candidates(from_config(LLAMA_8B), machine, work)
            if (each.zero, each.offload) == (zero, place)
        )
        (tmp_path / "config.yaml").write_text(FORMS["accelerate"](chosen, machine, work))
        read = made.load_config_from_file(str(tmp_path / "config.yaml"))
        assert read.distributed_type == "FSDP" and read.num_processes == machine.world
        assert read.fsdp_config["fsdp_reshard_after_forward"] == (zero == 3)
        section = json.loads(FORMS["deepspeed"](chosen, machine, work))["zero_optimization"]
        assert section["stage"] == zero and section["offload_optimizer"]["device"] == place.partition(":")[0]
        assert section["offload_optimizer"].get("nvme_path") == (place.partition(":")[2] or None)
        call = wrap_call(chosen, machine, work)
        assert words in call and "sw.optim.Adam(" in call  # the optimizers of sw.optim alone leave memory
    work = dataclasses.replace(work, optimizer="rmsprop")
    assert {each.offload for each in candidates(from_config(LLAMA_8B), h100(), work)} == {None}


@pytest.mark.parametrize("form", ["wrap", "fsdp2", "accelerate", "deepspeed"])
@pytest.mark.parametrize("tp, pp, cp", [(4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_no_form_drops_a_degree(form, tp, pp, cp, tmp_path):
    """A form names every degree, or says that it has none."""
    from shardwright_tools.planner.forms import FORMS

    made = pytest.importorskip("accelerate.commands.config.config_args")
    machine, work = Machine(2, 8, 80 * 10**9, 100.0, 10.0, True), Work(precision="bf16", cp=cp)
    chosen = next(
        dataclasses.replace(each, tp=tp, pp=pp)
        for each in candidates(from_config(LLAMA_8B), machine, work)
        if each.zero == 3
    )
    if (form == "accelerate" and pp > 1) or (form == "deepspeed" and pp * cp > 1):
        with pytest.raises(PlanError, match=f"no pipeline stages.*got pp {pp}.*use --form wrap"):
            FORMS[form](chosen, machine, work)
        return
    text = FORMS[form](chosen, machine, work)
    if form == "accelerate":
        (tmp_path / "config.yaml").write_text(text)
        read = made.load_config_from_file(str(tmp_path / "config.yaml")).parallelism_config
        sizes = [read[f"parallelism_config_{name}_size"] for name in ("dp_shard", "tp", "cp")]
        assert sizes == [16 // (tp * cp), tp, cp]
    elif form == "deepspeed":
        assert json.loads(text)["tensor_parallel"] == {"autotp_size": tp}
    else:
        sizes = ", ".join(str(size) for size in (16 // (tp * pp * cp), pp, cp, tp) if size > 1)
        assert f'init_device_mesh("cuda", ({sizes})' in text
        assert f'mesh=mesh["{"dp_cp" if cp > 1 else "dp"}"]' in text


def test_a_size_in_parameters_is_divided_by_tensor_parallel_ranks(capsys):
    words = "--parameters 8e9 --layers 32 --width 4096 --vocabulary 128256 --ranks 8 --memory 80GB --tp 8"
    assert main(["plan", *words.split(), "--form", "wrap"]) == 0
    assert 'mesh_dim_names=("dp", "tp")' in capsys.readouterr().out


def test_a_sequence_beyond_the_context_is_said():
    found = choose(from_config(PUBLISHED["GPT-2"][0]), h100(), Work(1, 2048))
    assert "a sequence of 2048 tokens is longer than the model's context of 1024" in found.notes


def test_a_module_larger_than_a_rank_is_said_to_be_built_on_meta():
    found = choose(from_config(LLAMA_70B), h100(16), Work(sequence=4096, precision="bf16"))
    assert found.chosen.zero == 3 and any("meta device" in note and "282 GB" in note for note in found.notes)
    assert not any(
        "meta device" in note for note in choose(from_config(LLAMA_8B), h100(), Work(precision="bf16")).notes
    )


def test_steps_in_the_backward_come_before_a_file():
    """A law of the rung: only where gradients are what does not fit, on CPUs, without accumulation."""
    shape, work = from_config(LLAMA_8B), Work(sequence=16, precision="fp32")
    need = {}
    for steps in (False, True):
        need[steps] = _candidate(shape, Machine(1, 8, 10**12, 6.0, 1.1, False), work, 3, None, True, 1, 1, steps=steps)
    assert need[False].memory.gradients - need[True].memory.gradients > 0.9 * shape.numel * 4 / 8
    memory = int((need[True].memory.total + need[False].memory.total) / 2 / 0.9)
    machine = Machine(1, 8, memory, 6.0, 1.1, False)
    found = choose(shape, machine, work)
    assert found.chosen.fits and found.chosen.steps and "no clipping by the norm" in found.reason
    assert "step_in_backward=True" in found.chosen.label and "step_in_backward=True)" in FORMS["wrap"](
        found.chosen, machine, work
    )
    assert read_settings(run_options(found.chosen, machine)) == {"zero": 3, "wrap_options": {"step_in_backward": True}}
    for form in ("accelerate", "fsdp2", "deepspeed"):
        with pytest.raises(PlanError, match="only sw.wrap has step_in_backward=True"):
            FORMS[form](found.chosen, machine, work)
    other = choose(shape, machine, dataclasses.replace(work, accumulate=2)).chosen
    assert other.fits and not other.steps and other.offload


def test_parameters_leave_a_memory_that_holds_no_slices():
    """A law of the last rung: the state alone does not suffice, and a GPU then holds units and one bucket."""
    shape, work = from_config(LLAMA_70B), Work(sequence=2048, precision="bf16")
    found = choose(shape, h100(1), work)
    chosen = found.chosen
    assert found.nearest is not None and not found.nearest.homes and found.nearest.offload == "cpu"
    assert chosen.fits and chosen.homes and chosen.memory.parameters == 0 and "parameters and" in found.reason
    assert chosen.memory.gradients == chosen.memory.buckets > 0
    assert 'offload={"parameters": "cpu", "optimizer": "cpu"}, device="cuda")' in FORMS["wrap"](chosen, h100(1), work)
    assert any(f"holds {shown_bytes(shape.numel * 16 // 8)} of each rank" in note for note in found.notes), found.notes
    zero = json.loads(FORMS["deepspeed"](chosen, h100(1), work))["zero_optimization"]
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu"}
    words = run_options(chosen, h100(1))
    place = {"parameters": "cpu", "optimizer": "cpu"}
    assert read_settings(words) == {"zero": 3, "wrap_options": {"offload": place}}
    assert all(not each.homes for each in candidates(shape, h100(1), dataclasses.replace(work, tp=2)))


def test_a_launch_file_of_what_does_not_fit_is_marked(config, capsys):
    assert main(["plan", config, "--memory", "2GB", "--launch", "torchrun"]) == 2
    assert "Nothing fits" in capsys.readouterr().err


def test_a_row_adds_up_and_names_its_parts(config, capsys):
    words = ["plan", config, "--ranks", "8", "--gpu", "h100", "--precision", "bf16-parameters", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other_precisions"].keys() == PRECISIONS.keys() - {"bf16-parameters"}
    assert {len(table) for table in found["other_precisions"].values()} == {len(found["table"])}
    for row in found["table"]:
        held = row["memory"]
        parts = ("parameters", "units", "gradients", "state", "buffers", "activations", "workspace", "runtime")
        assert held["total"] == sum(held[name] for name in parts)
        assert (held["buckets"] > 0) == (row["zero"] >= 2) and (held["masters"] > 0) == (row["offload"] is None)
        assert held["buckets"] <= held["gradients"] and held["masters"] <= held["state"]
        assert (held["buckets"] < held["gradients"]) == (not row["homes"]) and (held["parameters"] > 0) == (
            not row["homes"]
        )
    assert main(words[:-1]) == 0
    text = capsys.readouterr().out
    assert "4.02 GB of its state are float32 masters." in text and "The same takes 102 GB in fp32, " in text


def test_degrees_that_another_engine_lacks_leave_the_rest_of_the_json(config, capsys):
    assert (
        main(["plan", config, "--ranks", "8", "--gpu", "h100", "--tp", "2", "--pp", "2", "--accumulate", "8", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["forms"].keys() == {"wrap", "fsdp2"} and found["missing_forms"].keys() == {"accelerate", "deepspeed"}


def test_a_reader_that_leaves_is_no_error(config):
    words = [sys.executable, "-m", "shardwright", "plan", config, "--gpu", "h100"]
    plan = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    plan.stdout.close()
    assert "Error" not in plan.stderr.read() and plan.wait(60) in (0, 2)


SIZED = re.compile(r"^\| (1|8|70) B.*?, (\d+) ranks \| (.*?) \| (.*) \|$", re.MULTILINE)


def test_the_memory_table_of_the_page_is_what_the_plan_says():
    """docs/choosing.md: model state in GB of three models at each stage."""

    page = (ROOT / "docs" / "choosing.md").read_text()
    billion = from_numbers(layers=16, width=2048, vocabulary=32000, parameters=10**9)
    shapes = {"1": billion, "8": from_config(LLAMA_8B), "70": from_config(LLAMA_70B)}
    rows = SIZED.findall(page)
    assert len(rows) == 9
    for size, ranks, precision, cells in rows:
        for zero, cell in enumerate(cells.split(" | ")):
            held = state_of(
                shapes[size], zero=zero, ranks=int(ranks), host_ranks=8, optimizer="adamw", on_gpu=True,
                precision=PRECISIONS["fp32" if precision == "float32" else "bf16-parameters"],
                offload="cpu" if "offload" in precision else None,
            )  # fmt: skip
            assert float(cell.replace(",", "")) == pytest.approx(held.model_state / 1e9, rel=5e-3), (
                size,
                precision,
                zero,
            )
    rows = re.findall(r"^\| (1|8|70) B[^|]*\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for size, kept, again in rows:
        for cell, checkpointed in ((kept, False), (again, True)):
            found = activation_bytes(shapes[size], 8192, 2, checkpointed=checkpointed)
            assert float(cell) == pytest.approx(found / 1e9, rel=5e-3), (size, checkpointed)


def test_errors_are_of_one_kind():
    with pytest.raises(PlanError):
        from_config({"model_type": "llama"})
    assert issubclass(PlanError, ValueError)
