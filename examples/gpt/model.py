"""A byte-level GPT: pre-norm transformer blocks over a vocabulary of 256 bytes.

The module knows nothing of ranks: it is the one that a user has before
wrapping it. It leaves out dropout (the demo sees no byte often enough to
overfit) and a key-value cache (the sample at the end is short).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


def rotation_of(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 (length, size / 2): pair i turns by 10000^(-2i/size) a byte."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of features by its position, so that scores depend on distances (RoPE)."""
    (first, second), (cos, sin) = x.chunk(2, dim=-1), rotation
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """A block of causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.query_key_value(self.attention_norm(x)).view(split).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """A model that predicts the next byte from up to ``context`` bytes before it.

    Parameters
    ----------
    context : int
        Longest input, in bytes.
    layers, width, heads : int
        Number of blocks, size of the residual stream, attention heads a block;
        ``width / heads`` is an even integer.
    """

    def __init__(self, *, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.head_size = width // heads
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        # 2 * layers branches add into one stream: scale them so that their sum keeps unit variance.
        for block in self.blocks:
            for out in (block.attention_out, block.mlp_out):
                nn.init.normal_(out.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes, int64 (batch, length), to logits, float32 (batch, length, 256)."""
        rotation = rotation_of(tokens.shape[1], self.head_size)
        x = self.byte_embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float, seed: int) -> bytes:
        """Return ``prompt`` followed by ``count`` bytes sampled from the model."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            chosen = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
        return bytes(tokens[0].tolist())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
