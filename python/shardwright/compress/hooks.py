"""Communication hooks that compress, with torch's names and arguments: changing one import is enough.

    from shardwright.hooks import PowerSGDState, powerSGD_hook
    ddp.register_comm_hook(PowerSGDState(process_group=None, matrix_approximation_rank=4), powerSGD_hook)

They run in torch's DistributedDataParallel on CPU tensors and in shardwright's. Every rank ends with the same bits, and
the error does not grow with the world size (docs/design/compress.md). A hook communicates before it returns, in bucket
order, so the messages of two buckets never mix. PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019.

Annotations in this file are objects, not strings, because torch compares them.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .._engine import Codec, Exchange
from ..comm.exchange import done, group_exchange
from ..layout.bucket import real_bucket
from ..layout.views import as_real, dtype_name
from .state import BlockState, PowerSGDState, run_codec


class Halves:
    """float16 or bfloat16 on the wire between the ranks of an exchange; it keeps nothing between buckets."""

    def __init__(self, dtype: torch.dtype, exchange: Exchange) -> None:
        self.codec, self.exchange = Codec("half", wire=dtype_name(dtype)), exchange

    def register(self, named: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Add all parameters of a model, as CompressionState.register() does."""
        for _, _, like in named:
            self.codec.add(as_real(like).numel(), 0, 0)

    def average(self, bucket: Any) -> None:
        """Average one bucket of any floating-point dtype."""
        run_codec(self.codec, self.exchange, bucket, [])


def state_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average `bucket` by a compressor's state (compress/make.py)."""
    state.average(real_bucket(bucket))
    return done(bucket.buffer())


#: halves over the exchange of a torch group, which lives as long as the process
_halves = functools.cache(Halves)


def run_half(process_group: Any, bucket: Any, dtype: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over a torch group."""
    return state_hook(_halves(dtype, group_exchange(process_group)), bucket)


def fp16_compress_hook(process_group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average `bucket` with float16 on the wire, in place, and return a Future of its buffer.

    `process_group=None` is the default group. The buffer is one-dimensional, of a floating dtype, on the CPU.

    Notes
    -----
    Contributions are divided by W in float32 and cast in the same pass, so they overflow at 65504 W, as in torch. An
    element's error is at most 2^-11 (mean magnitude + magnitude of the mean), plus 2^-25 each below 2^-14. Cost: 4 (W -
    1) / W bytes an element a rank.
    """
    return run_half(process_group, bucket, torch.float16)


def bfloat16_compress_hook(process_group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average like fp16_compress_hook with bfloat16: 2^-8 in place of 2^-11, and the range of float32."""
    return run_half(process_group, bucket, torch.bfloat16)


#: torch's name. The function's own name differs, because torch refuses a hook called bf16_compress_hook without NCCL.
bf16_compress_hook = bfloat16_compress_hook


def int8_compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average `bucket` with 8-bit integers on the wire, one float32 scale a block.

    `state` is a BlockState, or a ProcessGroup (None: the default one) for blocks of 256 without error feedback.

    Notes
    -----
    Blocks are counted from each parameter's start, so values do not depend on how parameters are cut into buckets. An
    element's error is at most 1/254 of the greatest magnitude in its block, once for the mean of the contributions and
    once for the result. An infinity or NaN makes its block NaN on every rank. Cost: 2 (W - 1) / W (1 + 4 / block) bytes
    an element a rank.
    """
    return state_hook(_block_state(state, 8), bucket)


def int4_compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average like int8_compress_hook with 4 bits and 1/14. Use a BlockState(bits=4) with error feedback."""
    return state_hook(_block_state(state, 4), bucket)


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: N802, torch's name
    """Average `bucket` through matrices of low rank. See PowerSGDState.

    A bucket takes two exchanges. Cost: rank * (rows + columns) floats for each compressed matrix; other parameters
    travel whole.
    """
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"powerSGD_hook needs a shardwright.hooks.PowerSGDState as its state, got {type(state).__name__}: torch's own "
            "state works with torch's own hook only"
        )
    return state_hook(state, bucket)


def _block_state(state: Any, bits: int) -> BlockState:
    if isinstance(state, BlockState):
        if state.bits != bits:
            raise ValueError(f"int{bits}_compress_hook needs a state of {bits} bits, got one of {state.bits}")
        return state
    if bits == 4:
        raise TypeError(
            "int4_compress_hook needs a shardwright.hooks.BlockState(group, bits=4, block=64, error_feedback=True) as its "
            f"state, got {type(state).__name__}"
        )
    return BlockState(state)  # without error feedback it keeps nothing between buckets
