"""The command line of train_gpt.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import shardwright as sw

COMPRESSORS = {
    "none": None,
    "auto": "auto",
    "fp16": sw.Fp16(),
    "bf16": sw.Bf16(),
    "int8": sw.Int8(),
    "int4": sw.Int4(),
    "powersgd": sw.PowerSGD(rank=4, warmup_steps=100),
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's own documentation and sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpt"), help="folder of checkpoint and loss curve")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--seed", type=int, default=0, help="seed of weights, batches and sample")
    add("--steps", type=_positive(int), default=3000, help="stop at this step")
    add("--minutes", type=_positive(float), default=2.0, help="stop after this time in the loop, if it is earlier")
    add("--validate-every", type=_positive(int), default=100, help="steps; a checkpoint is written as often")
    add("--batch-size", type=_positive(int), default=8, help="rows of a batch of all ranks together")
    add("--context", type=_positive(int), default=128, help="bytes a row")
    add("--layers", type=_positive(int), default=4, help="transformer blocks")
    add("--width", type=_positive(int), default=128, help="width of the residual stream")
    add("--heads", type=_positive(int), default=4, help="attention heads a block")
    add("--learning-rate", type=_positive(float), default=2e-3, help="learning rate at the end of warm-up")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="stage of slicing: see README.md")
    add("--compress", choices=sorted(COMPRESSORS), default="none", help="format of gradients between ranks")
    add("--bucket-cap-mb", type=_positive(float), default=25, help="largest gradient bucket")
    options = parser.parse_args()
    # Rotary positions turn the features of a head in pairs.
    if options.width % (2 * options.heads):
        multiple = 2 * options.heads
        parser.error(f"--width must be a multiple of 2 x --heads, {multiple}, not {options.width}")
    return options


def _positive(number: type):
    def convert(text: str):
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    return convert
