"""Training of a bfloat16 model with a billion parameters on one rank: torch's DDP and FSDP2, ours at zero=0 and zero=3.

Each arm runs in its own process, for its own peak memory. One rank exchanges no data: the figures show the copies,
launches and waits that a stage adds to a step. Arms that are compared have optimizer states of the same bytes, in
bfloat16; "masters" is sw.optim's default, float32 masters and moments, which moves twice as many.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import shardwright as sw
import torch
from torch import nn
from torch.nn import functional

from .report import Row, row


@dataclass(frozen=True)
class Size:
    width: int = 2048
    heads: int = 16
    layers: int = 16
    words: int = 32_000
    sequence: int = 1024
    batch: int = 4
    steps: int = 10


_QUICK = Size(16, 2, 2, 32, 8, 2, 1)


class Model(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        sizes: tuple[Any, ...] = (size.width, size.heads, 4 * size.width, 0.0, functional.gelu)
        form: dict[str, Any] = {"batch_first": True, "norm_first": True, "bias": False}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(*sizes, **form) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        scores = self.head(x[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _ddp(module: nn.Module, device: torch.device) -> tuple[Any, Any]:
    ids = [device.index] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _fsdp2(module: nn.Module, device: torch.device) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (1,))
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=device.type == "cuda")


def _ours(*, master: bool = False, **options: Any) -> Callable[[nn.Module, torch.device], tuple[Any, Any]]:
    def wrap(module: nn.Module, device: torch.device) -> tuple[Any, Any]:
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=1e-4, master=master), **options)
        return model, optimizer

    return wrap


_ARMS = {
    "DDP": (True, _ddp),
    "FSDP2": (True, _fsdp2),
    "zero=0": (False, _ours(zero=0)),
    "zero=3": (False, _ours(zero=3)),
    "zero=0, masters": (False, _ours(zero=0, master=True)),
    "zero=3, prefetch=2": (False, _ours(zero=3, prefetch=2)),
    "zero=0, buckets of 100 MB": (False, _ours(zero=0, bucket_cap_mb=100)),
}


def arm(place: Any, rank: int, world_size: int, *, name: str, is_quick: bool) -> Iterator[Row]:
    """Report one arm's tokens a second and peak memory, and write a profiler's trace."""
    size = _QUICK if is_quick else Size()
    is_torchs, wrap = _ARMS[name]
    with place.torchs() if is_torchs else contextlib.nullcontext(place) as where:
        torch.manual_seed(0)
        with torch.device(where.device):
            module = Model(size).to(torch.bfloat16)
        numel = sum(each.numel() for each in module.parameters())
        model, optimizer = wrap(where.put(module), where.device)
        generator = torch.Generator().manual_seed(0)
        shape = (size.batch, size.sequence)
        tokens = torch.randint(size.words, shape, generator=generator, dtype=torch.int64, device="cpu")
        tokens = where.memory(tokens)
        losses: list[torch.Tensor] = []

        def step() -> None:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for _ in range(3):
            step()
        where.synchronize()
        where.reset_peak()
        milliseconds = where.milliseconds(step, size.steps)
        peak = where.peak_bytes()
        trace = f"trace-{name.replace('=', '').replace(', ', '-')}.json.gz"
        with where.profile(os.path.join(os.environ.get("SHARDWRIGHT_GPU_CHECK_TO", "."), trace)):
            step()
            where.synchronize()
        found = [float(each) for each in losses]
        # every step trains on the same tokens, so the loss of each arm must fall
        status = "ok" if found[-1] < found[0] else "wrong"
        note = f"{numel:,} parameters, {milliseconds:.1f} ms a step, peak {peak / 2**30:.2f} GiB, "
        note += f"loss {found[0]:.4f} to {found[-1]:.4f}"
        yield row(name, status, 1e3 * size.batch * size.sequence / milliseconds, "tokens/s", note=note)
