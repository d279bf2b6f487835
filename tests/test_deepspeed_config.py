"""Laws of DeepSpeed's JSON: each key is in one table, which the document prints. Files of published programs become the
options that they request. Anything else is an error that names the key.
"""

import importlib.util
import json
import math
import os
import types
from pathlib import Path

import pytest
import shardwright as sw
import torch
from shardwright.integrations.deepspeed import keys as deepspeed_keys
from shardwright.integrations.deepspeed.config import fill_auto, load_config, plan
from shardwright_tools.cli import main

ROOT = Path(__file__).resolve().parents[1]
FILES = Path(__file__).parent / "deepspeed_configs"
HAS_DEEPSPEED = os.environ.get("SW_TEST_LONG") == "1" and importlib.util.find_spec("deepspeed") is not None

#: fields of TrainingArguments, as a program of the Trainer gives them
ARGS = types.SimpleNamespace(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.7, learning_rate=3e-4,
    adam_beta1=0.9, adam_beta2=0.98, adam_epsilon=1e-7, weight_decay=0.1, warmup_steps=20, fp16=False, bf16=True,
)  # fmt: skip
#: other switches of a file
OTHERS = {
    "accelerate_zero1": dict(fp16=True, bf16=False, gradient_accumulation_steps=1),
    "accelerate_zero3_offload": dict(bf16=False, gradient_accumulation_steps=1),
}


def read(name, ranks=4):
    """Return the plan of a file, with each "auto" filled from ARGS if there is one."""
    given = load_config(FILES / f"{name}.json")
    if '"auto"' in json.dumps(given):
        args = types.SimpleNamespace(**{**vars(ARGS), **OTHERS.get(name, {})})
        given = fill_auto(given, args, world_size=ranks, num_training_steps=200, hidden_size=64)
    return plan(given, ranks)


def offloaded(**options):
    return {"offload": "cpu", **options}


ADAMW = ("sw.optim.AdamW", dict(lr=3e-4, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1))
SMALL = 64 * 64 * 4 / 2**20  # MiB of the buckets that a width of 64 asks for
#: file -> batch sizes, options of wrap, optimizer, scheduler, clipping
EXPECTED = {
    "transformers_zero2": (
        (4, 2, 32), offloaded(zero=2, precision="bf16", bucket_cap_mb=25.0), ADAMW, "WarmupLR", 0.7,
    ),
    "transformers_zero3": (
        (4, 2, 32), offloaded(zero=3, precision="bf16", bucket_cap_mb=SMALL), ADAMW, "WarmupLR", 0.7,
    ),
    "accelerate_zero1": (
        (4, 1, 16), dict(zero=1, precision="fp16", bucket_cap_mb=SMALL),
        ("sw.optim.AdamW", dict(lr=3e-4, weight_decay=0.1, betas=(0.9, 0.999))), "WarmupDecayLR", 0.7,
    ),
    "accelerate_zero3_offload": (
        (4, 1, 16), offloaded(zero=3, bucket_cap_mb=SMALL),
        ("sw.optim.AdamW", dict(lr=3e-4, weight_decay=0.1, betas=(0.9, 0.999))), "WarmupDecayLR", 0.7,
    ),
    "examples_cifar": (
        (4, 1, 16), dict(zero=0, precision="fp16", bucket_cap_mb=25.0),
        ("sw.optim.AdamW", dict(lr=1e-3, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)), "WarmupLR", 1.0,
    ),
    "examples_bert": (
        (64, 16, 4096), dict(zero=0, precision="fp16"),
        ("sw.optim.AdamW", dict(lr=1e-4, weight_decay=0.01, betas=(0.9, 0.999))), None, 1.0,
    ),
    "examples_gpt": ((4, 16, 256), dict(zero=1, precision="fp16"), None, None, 1.0),
    "examples_chat": ((4, 8, 128), dict(zero=3, precision="bf16"), None, None, 1.0),
    "examples_nvme": (
        (4, 2, 32), dict(zero=2, precision="bf16", offload="nvme:/local_nvme"),
        ("sw.optim.AdamW", dict(lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0)), "OneCycle", 0.0,
    ),
    "axolotl_zero2": ((4, 2, 32), offloaded(zero=2, precision="bf16"), None, None, 0.7),
    "axolotl_zero3_bf16": (
        (4, 2, 32), dict(zero=3, precision="bf16", bucket_cap_mb=SMALL, partition="flat"), None, None, 0.7,
    ),
    "llama_factory_z0": ((4, 2, 32), dict(zero=0, precision="bf16", bucket_cap_mb=25.0), None, None, 0.7),
    "llama_factory_z3": (
        (4, 2, 32), dict(zero=3, precision="bf16", bucket_cap_mb=SMALL, partition="flat"), None, None, 0.7,
    ),
}  # fmt: skip


def test_every_file_becomes_what_it_asks_for():
    for name, (sizes, options, optimizer, schedule, clip) in EXPECTED.items():
        made = read(name)
        assert (made.micro_batch_size, made.accumulation_steps, made.train_batch_size) == sizes, name
        assert made.wrap == options, name
        assert made.optimizer == optimizer, name
        assert (made.scheduler[0] if made.scheduler else None) == schedule, name
        assert made.clip_grad_norm == clip, name
        assert (made.loss_scale is not None) == (options.get("precision") == "fp16"), name
        sw.Options(**made.wrap)
        given = {row.key for row in made.rows}
        assert all(row.text and deepspeed_keys.key_of(row.key) for row in made.rows), name
        assert {"zero_optimization.stage", "gradient_clipping"} & given or name == "examples_bert", name
    assert read("examples_cifar").loss_scale["loss_scale_window"] == 500
    assert read("examples_gpt").loss_scale["initial_scale_power"] == 11
    assert read("transformers_zero3").offloads_parameters and not read("examples_chat").offloads_parameters
    assert {path.stem for path in FILES.iterdir()} == {*EXPECTED, "examples_onebit"}


BATCH = {"train_micro_batch_size_per_gpu": 2}


def test_parameters_on_a_disk_are_parameters_in_a_file():
    param = {"device": "nvme", "nvme_path": "/a", "buffer_count": 5, "buffer_size": 1, "max_in_cpu": 9}
    for state, place in (({}, None), ({"offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}, "nvme:/b")):
        made = plan({**BATCH, "zero_optimization": {"stage": 3, "offload_param": param, **state}}, 4)
        assert made.wrap["offload"] == {"parameters": "nvme:/a", "optimizer": place}
        assert made.wrap["share_parameters"] is False and not made.offloads_parameters
        sw.Options(**made.wrap)


ERRORS = [
    ({"train_batch_size": 9, **BATCH}, ValueError, r"got train_batch_size=9, train_micro_batch_size_per_gpu=2 with 4 ranks"),
    ({}, ValueError, "must have train_batch_size or"),
    ({**BATCH, "train_batch_size": True}, ValueError, "train_batch_size must be a whole number of at least 1, got True"),
    ({**BATCH, "gradient_clip": 1.0}, ValueError, "unknown key 'gradient_clip' of DeepSpeed: did you mean 'gradient_clipping'"),
    ({**BATCH, "zero_optimization": {"stge": 2}}, ValueError, "'zero_optimization.stge'.* 'zero_optimization.stage'"),
    ({**BATCH, "zero_optimization": {"stage": 4}}, ValueError, "must be 0, 1, 2 or 3, got 4"),
    ({**BATCH, "zero_optimization": {"mics_shard_size": 2}}, ValueError, "needs zero_optimization.stage 3, got stage 0"),
    ({**BATCH, "optimizer": {"type": "OneBitAdam"}}, NotImplementedError, "OneBitAdam.*compress.*int4"),
    ({**BATCH, "optimizer": {"type": "ZeroOneAdam"}}, NotImplementedError, "compress.*int4"),
    ({**BATCH, "optimizer": {"type": "OneBitLamb"}}, NotImplementedError, "compress.*powersgd"),
    ({**BATCH, "optimizer": {"type": "Adem"}}, ValueError, "optimizer.type must be Adam, AdamW, SGD or a class of torch.optim"),
    ({**BATCH, "optimizer": {"type": "Adam", "params": {"beta": 1}}}, ValueError, "'optimizer.params.beta'.* did you mean betas"),
    ({**BATCH, "scheduler": {"type": "Warmup"}}, ValueError, "scheduler.type must be WarmupLR, WarmupDecayLR"),
    ({**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, ValueError, "unknown key 'scheduler.params.warmup'"),
    ({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, ValueError, "fp16 and bf16 are both enabled"),
    ({**BATCH, "fp16": {"enabled": 1}}, ValueError, "fp16.enabled must be true or false, got 1"),
    ({**BATCH, "zero_optimization": {"offload_param": {"device": "nvme"}}}, ValueError, "nvme_path must be a folder for 'nvme', got None"),
    ({**BATCH, "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x"}}}, ValueError, "offload_param needs zero_optimization.stage 3, got stage 0"),
    ({**BATCH, "zero_optimization": {"zero_hpz_partition_size": 8}}, NotImplementedError, "zero_hpz_partition_size=8.*device_mesh"),
    ({**BATCH, "elasticity": {"enabled": True}}, NotImplementedError, "elasticity"),
    ({**BATCH, "tensor_parallel": {"autotp_size": 2}}, NotImplementedError, "tensor_parallel"),
    ({**BATCH, "gradient_clipping": "auto"}, ValueError, "gradient_clipping: 'auto' is filled by the Trainer"),
    ({**BATCH, "shardwright": {"compress": "int3"}}, ValueError, "shardwright.compress must be one of fp16"),
    ({**BATCH, "shardwright": {"bucket_cap": 3}}, TypeError, "did you mean 'bucket_cap_mb'"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_a_key_that_means_nothing_here_is_named(case):
    config, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        plan(config, 4)


def test_switches_that_are_off_and_our_own_section_are_taken(tmp_path):
    quiet = {"enabled": False, "anything": {"else": 3}}
    sections = ("elasticity", "autotuning", "data_efficiency", "compression_training", "hybrid_engine", "amp")
    made = plan({**BATCH, **{name: quiet for name in sections}, "zero_optimization": True}, 3)
    assert made.wrap == {"zero": 1} and made.train_batch_size == 6
    made = plan({**BATCH, "communication_data_type": "bf16", "bf16": {"enabled": True}}, 1)
    assert made.wrap["precision"] == sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    own = {"compress": "powersgd", "timeout_s": 60.0}
    assert plan({**BATCH, "shardwright": own}, 1).wrap == {
        "zero": 0,
        "compress": sw.PowerSGD(rank=4),
        "timeout_s": 60.0,
    }
    (tmp_path / "twice.json").write_text('{"fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match="'enabled' appears twice"):
        load_config(tmp_path / "twice.json")
    with pytest.raises(ValueError, match=r"gradient_clipping=2.0 against 0.7.*optimizer.params.lr=1 against"):
        fill_auto({"gradient_clipping": 2.0, "optimizer": {"params": {"lr": 1}}}, ARGS)


def test_the_document_and_the_command_print_the_table(capsys):
    assert deepspeed_keys.document() in (ROOT / "docs" / "deepspeed.md").read_text()
    states = {key.state for key in deepspeed_keys.KEYS.values()}
    assert states == {"mapped", "no meaning", "refused"}
    for name in EXPECTED:
        assert main(["config", str(FILES / f"{name}.json"), "--ranks", "4", "--json"]) == 0, capsys.readouterr().out
        report = json.loads(capsys.readouterr().out)
        compile(report["python"], name, "exec")
        assert "sw.wrap(model, optimizer, zero=" in report["python"] and report["rows"]
    assert main(["config", str(FILES / "transformers_zero2.json"), "--ranks", "4"]) == 0
    printed = capsys.readouterr().out
    assert "optimizer = sw.optim.AdamW(model.parameters(), lr=5e-05" in printed
    assert [line.split() for line in printed.splitlines() if line.startswith("train_batch_size ")][0][1] == "auto"
    assert main(["config", str(FILES / "examples_onebit.json")]) == 1
    assert "OneBitAdam" in capsys.readouterr().err


SCHEDULES = [
    ("WarmupLR", dict(warmup_min_lr=0.001, warmup_max_lr=0.1, warmup_num_steps=7)),
    ("WarmupLR", dict(warmup_num_steps=5, warmup_type="linear")),
    ("WarmupDecayLR", dict(total_num_steps=20, warmup_max_lr=0.3, warmup_num_steps=6)),
    ("WarmupCosineLR", dict(total_num_steps=20, warmup_num_steps=6, warmup_min_ratio=0.1, cos_min_ratio=0.01)),
    ("OneCycle", dict(cycle_min_lr=0.01, cycle_max_lr=0.2, cycle_first_step_size=5, cycle_second_step_size=7)),
    ("OneCycle", dict(cycle_min_lr=0.01, cycle_max_lr=0.2, cycle_first_step_size=5, decay_step_size=3, decay_lr_rate=0.5, decay_mom_rate=0.01)),
    ("LRRangeTest", dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=4, lr_range_test_step_rate=2.0, lr_range_test_staircase=True)),
]  # fmt: skip


def rates(kind, arguments, steps=30):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler, found = kind(optimizer, **arguments), []
    for _ in range(steps):
        found.append((float(optimizer.param_groups[0]["lr"]), *optimizer.param_groups[0]["betas"]))
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_and_loss_scales_follow_their_formulas():
    found = [rate for rate, *_ in rates(sw.deepspeed.WarmupLR, SCHEDULES[0][1])]
    warm = [0.001 + 0.099 * math.log(step + 1) / math.log(7) for step in range(7)]
    assert found == pytest.approx([0.001, *warm, *[0.1] * 22])
    found = [rate for rate, *_ in rates(sw.deepspeed.WarmupDecayLR, SCHEDULES[2][1])]
    assert found[7] == pytest.approx(0.3) and found[14] == pytest.approx(0.15) and found[21:] == [0.0] * 9
    found = [rate for rate, *_ in rates(sw.deepspeed.OneCycle, SCHEDULES[4][1])]
    assert max(found) == found[5] == pytest.approx(0.2) and found[12:] == pytest.approx([0.01] * 18)
    scale, seen = sw.deepspeed.LossScale(initial_scale_power=4, loss_scale_window=2, hysteresis=2, min_loss_scale=4), []
    for overflow in (0, 0, 0, 1, 1, 1, 0, 0, 0):
        scale.update(bool(overflow))
        seen.append(scale.scale)
    assert seen == [16, 16, 32, 32, 16, 8, 8, 8, 16]
    again = sw.deepspeed.LossScale(min_loss_scale=4)
    again.load_state_dict(scale.state_dict())
    assert again.scale == 16
    with pytest.raises(OverflowError, match="at least 4"):
        for _ in range(9):
            scale.update(True)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="the long form, with DeepSpeed installed")
def test_schedules_and_loss_scales_are_those_of_deepspeed(monkeypatch):
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)

    for name, arguments in SCHEDULES:
        ours, theirs = (rates(getattr(home, name), arguments) for home in (sw.deepspeed, lr_schedules))
        assert all(a == pytest.approx(b, rel=1e-12) for a, b in zip(ours, theirs, strict=True)), (name, ours, theirs)
    generator = torch.Generator().manual_seed(0)
    for hysteresis, consecutive, window in [(1, False, 3), (2, False, 3), (3, True, 2), (2, True, 4)]:
        ours = sw.deepspeed.LossScale(0, 8, window, hysteresis, consecutive, 1)
        theirs = loss_scaler.DynamicLossScaler(2**8, window, 1, hysteresis, consecutive, raise_error_at_min_scale=False)
        for overflow in (torch.rand(200, generator=generator) < 0.2).tolist():
            if not (overflow and ours.scale == 1):
                ours.update(overflow)
                theirs.update_scale(overflow)
            assert ours.scale == theirs.cur_scale


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="the long form, with DeepSpeed installed")
def test_the_table_has_every_key_of_the_installed_schema():
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections = {
        "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config, "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    }  # fmt: skip
    names = [
        f"{section}.{each}"
        for section, model in sections.items()
        for name, field in model.model_fields.items()
        for each in {name, field.alias or name}
    ]
    top = "TRAIN_BATCH_SIZE SPARSE_ATTENTION OPTIMIZER SCHEDULER ZERO_ALLOW_UNTESTED_OPTIMIZER STEPS_PER_PRINT " \
        "ZERO_FORCE_DS_CPU_OPTIMIZER GRADIENT_ACCUMULATION_STEPS SPARSE_GRADIENTS BFLOAT16_OLD AMP GRADIENT_CLIPPING " \
        "GRAPH_HARVESTING COMMUNICATION_DATA_TYPE SEQ_PARALLEL_COMMUNICATION_DATA_TYPE PRESCALE_GRADIENTS " \
        "GRADIENT_PREDIVIDE_FACTOR DISABLE_ALLGATHER DUMP_STATE VOCABULARY_SIZE WALL_CLOCK_BREAKDOWN MEMORY_BREAKDOWN " \
        "EIGENVALUE PROGRESSIVE_LAYER_DROP CHECKPOINT DATA_TYPES DATALOADER_DROP_LAST TORCH_AUTOCAST LOG_LEVEL " \
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU USE_DATA_BEFORE_EXPERT_PARALLEL".split()  # fmt: skip
    names += [getattr(constants, name) for name in top if hasattr(constants, name)]
    assert [name for name in names if deepspeed_keys.key_of(name) is None] == []


@pytest.mark.skipif(os.environ.get("SW_TEST_LONG") != "1", reason="the long form")
def test_auto_is_filled_as_the_trainer_fills_it(tmp_path):
    """Needs transformers and DeepSpeed, whose presence the Trainer checks."""
    pytest.importorskip("deepspeed")
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.7,
        learning_rate=3e-4, adam_beta2=0.98, adam_epsilon=1e-7, weight_decay=0.1, warmup_steps=20, bf16=True,
    )  # fmt: skip
    model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=64))
    for name in (
        "transformers_zero2",
        "transformers_zero3",
        "axolotl_zero3_bf16",
        "llama_factory_z3",
        "llama_factory_z0",
    ):
        theirs = HfTrainerDeepSpeedConfig(str(FILES / f"{name}.json"))
        theirs.trainer_config_process(args)
        theirs.trainer_config_finalize(args, model, 200)
        ours = fill_auto(FILES / f"{name}.json", args, num_training_steps=200, hidden_size=64)
        assert ours == theirs.config, name
