"""A launch of torchtitan's own trainer on CPU ranks: `torchrun ... torchtitan_program.py FOLDER stock|ours STEPS [OPTION=VALUE ...]`.

It trains the debug Llama model, and rank 0 writes FOLDER/losses-<side>.json. What the trainer asks of CUDA is stubbed: the
device is the CPU, memory statistics are empty, and attention is PyTorch's own, since FlexAttention has no backward on CPUs.
Tokenizer and data are made in FOLDER. "ours" replaces one name, fully_shard in torchtitan.distributed.fsdp.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def stand_on_cpu() -> None:
    """Make the CPU torchtitan's device, before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
    torch.cpu.current_device = lambda: 0
    if not hasattr(torch.distributed, "set_timeout"):  # of a later torch than 2.13
        torch.distributed.set_timeout = lambda *_: None
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None


class _Anything(types.ModuleType):
    """A module, decorator and value of any name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


@contextlib.contextmanager
def stubbed_triton() -> Iterator[None]:
    """Have `import triton` succeed while torchtitan's kernels are imported; none of them runs."""
    import torch._inductor.utils
    import torch.distributed.pipelining  # noqa: F401  what of torch asks for triton is imported without

    torch.compile(len)
    names = ["triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda", "triton.tools"]
    sys.modules.update({name: _Anything(name) for name in names})
    yield
    for name in names:
        del sys.modules[name]


def write_assets(folder: Path) -> None:
    """Write a tokenizer of bytes and a data set of 256 lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {sign: number for number, sign in enumerate(["<s>", "</s>", *signs])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "data").mkdir()
    draw = random.Random(0)
    lines = [
        " ".join(draw.choice(["red", "green", "blue", "cat", "dog", "runs"]) for _ in range(40)) for _ in range(256)
    ]
    (folder / "data" / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))


def configuration(folder: Path, side: str, steps: int) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = str(folder / "tokenizer")
    config.dump_folder = str(folder / side)
    config.dataloader.dataset_path = str(folder / "data")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, steps
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a later torch than 2.13
    config.debug.seed, config.debug.deterministic = 7, True
    config.validator.enable = False
    config.lr_scheduler.total_steps = 40
    return config


def set_option(config: Any, option: str) -> None:
    """Set `section.key=value` as the trainer's command line does."""
    path, _, value = option.partition("=")
    *sections, key = path.split(".")
    for section in sections:
        config = getattr(config, section)
    assert hasattr(config, key), option
    setattr(config, key, json.loads(value))


def replace_fully_shard(side: str) -> None:
    import torchtitan.distributed.fsdp as place

    if side == "ours":
        import shardwright as sw

        place.fully_shard = sw.fully_shard
    else:
        plainly = place.disable_fsdp_gradient_division

        def divide_nothing(model: torch.nn.Module) -> None:  # a factor is a reduction that Gloo has not
            plainly(model)
            for module in model.modules():
                if isinstance(module, place.FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

        place.disable_fsdp_gradient_division = divide_nothing


def main() -> None:
    folder, side, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    stand_on_cpu()
    with stubbed_triton():
        import torchtitan.trainer  # noqa: F401
    replace_fully_shard(side)
    config = configuration(folder, side, steps)
    for option in sys.argv[4:]:
        set_option(config, option)
    trainer = config.build()
    losses: list[tuple[int, float, float]] = []
    trainer.metrics_processor.log = lambda step, loss, most, norm, **_: losses.append((step, loss, norm))
    try:
        trainer.train()
    finally:
        trainer.close()
    if torch.distributed.get_rank() == 0:
        (folder / f"losses-{side}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2] == "assets":
        write_assets(Path(sys.argv[1]))
    else:
        main()
