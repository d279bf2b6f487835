"""Moments as records: 32 codes of 8 bits and an exponent for each 32 elements, from a parameter's first one on.

The engine steps on records (csrc/kernels/host/moment_body.h has the format). Here they are made from loaded float32
moments, and decoded where others read them. Elements are in memory order; what leaves for a checkpoint or a state dict is
records only if that is row-major order as well, so that records are the same at any stage, and decoded otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ..layout.shard_runs import memory_order
from ..torch_compat.dtensor import held_tensor, is_dtensor, local_part, placed_as, placed_like, waited

#: elements of a record, and its bytes
BLOCK, RECORD = 32, 33
#: by entry of the state: the exponent of the least normal code, and the code of NaN
FORMS = {"exp_avg": (122, 127), "exp_avg_sq": (114, 255)}
#: records that are converted at once, of 1 Mi elements: a conversion has some 30 bytes an element besides its result
_CHUNK = 1 << 15
_LARGEST, _DROPS, _NORMAL = 0x7EFFFFFF, 19, 1 << 23


def blocks(numel: int) -> int:
    """Return the number of records of so many elements."""
    return -(-numel // BLOCK)


def run(low: int, high: int) -> tuple[int, int]:
    """Return [begin, end) of the bytes of the records of elements [low, high)."""
    return low // BLOCK * RECORD, blocks(high) * RECORD


def is_records(key: Any, value: Any) -> bool:
    """Return True if entry `key` of a state is a moment in records."""
    is_bytes = isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and not is_dtensor(value)
    return key in FORMS and is_bytes and value.dim() == 2 and value.shape[1] == RECORD


def check_fits(state: Mapping[Any, Any], numel: int, name: str) -> None:
    """Raise ValueError for records in `state` that are not those of so many elements, of parameter `name`."""
    for key, value in state.items():
        if is_records(key, value) and value.shape[0] != blocks(numel):
            raise ValueError(
                f"optimizer state: {key!r} of {name} must have shape {(blocks(numel), RECORD)}, the records of {numel} elements, "
                f"not {tuple(value.shape)}"
            )


def zeros(p: torch.Tensor) -> torch.Tensor:
    """Return what torch.zeros_like() takes for the records of a parameter, or its local part."""
    numel = (held_tensor(p) if is_dtensor(p) else p).numel()
    return torch.empty(blocks(numel), RECORD, dtype=torch.uint8, device="meta")


def decoded(records: torch.Tensor, key: str, numel: int) -> torch.Tensor:
    """Return the float32 elements of the records of entry `key`, in their order."""
    made = torch.empty(len(records) * BLOCK, dtype=torch.float32, device=records.device)
    for part, some in zip(made.split(_CHUNK * BLOCK), records.split(_CHUNK)):
        part.copy_(_decoded(some, key).reshape(-1))
    return made[:numel]


def _decoded(records: torch.Tensor, key: str) -> torch.Tensor:
    least, top = FORMS[key]
    codes, exponents = records[:, :BLOCK].to(torch.int32), records[:, BLOCK:].to(torch.int32)
    codes, is_negative = (codes & 127, codes > 127) if key == "exp_avg" else (codes, None)
    bits, lowest = (
        (codes << _DROPS) + (least << 23),
        _float(torch.tensor(least << 23, dtype=torch.int32, device=codes.device)),
    )
    parts = torch.where(codes < 16, _float(bits) - lowest, _float(bits - _NORMAL)) * _float(exponents << 23)
    parts[codes == top] = torch.nan
    return parts if is_negative is None else torch.where(is_negative, -parts, parts)


def encoded(flat: torch.Tensor, key: str) -> torch.Tensor:
    """Return float32 elements as records of entry `key`, rounded to nearest; what records held comes back with its bits."""
    made = torch.empty(blocks(flat.numel()), RECORD, dtype=torch.uint8, device=flat.device)
    for part, some in zip(made.split(_CHUNK), flat.split(_CHUNK * BLOCK)):
        part.copy_(_encoded(some, key))
    return made


def _encoded(flat: torch.Tensor, key: str) -> torch.Tensor:
    least, top = FORMS[key]
    padded = torch.nn.functional.pad(flat.to(torch.float32), (0, -flat.numel() % BLOCK)).reshape(-1, BLOCK)
    bits = padded.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    is_held = magnitudes <= _LARGEST
    most = torch.where(is_held, magnitudes, 0).amax(1, keepdim=True) if flat.numel() else magnitudes[:, :1]
    exponents = (most.clamp(min=1) - 1 >> 23).clamp(min=1)
    parts = _float(magnitudes) * _float((254 - exponents) << 23)
    lowest = least << 23
    base = _float(torch.tensor(lowest, dtype=torch.int32, device=bits.device))
    places = torch.where(parts < base, _bits(parts + base) - lowest, _bits(parts) - lowest + _NORMAL)
    codes = (places + (1 << (_DROPS - 1)) - 1 + (places >> _DROPS & 1)) >> _DROPS
    if key == "exp_avg_sq":
        codes = torch.where(magnitudes != 0, codes.clamp(min=1), codes)
    codes = torch.where(is_held, codes, top)
    if key == "exp_avg":
        codes = codes | (bits < 0).to(torch.int32) << 7
    return torch.cat((codes, exponents), 1)


def _float(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def kept(value: torch.Tensor, key: str, p: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Convert a moment of `p` to records if `dtype` is "int8", else from records to float32."""
    if dtype != "int8" or key not in FORMS:
        return _floating(value, key, p) if is_records(key, value) else value
    if is_records(key, value):
        return value
    if is_dtensor(p):
        value = placed_as(value, p) if is_dtensor(value) else local_part(value, p)
        value, p = (waited(held_tensor(each)) if is_dtensor(each) else each for each in (value, p))
    return encoded(memory_order(value, p), key)


def floating(state: Mapping[Any, Any], p: torch.Tensor) -> Mapping[Any, Any]:
    """Return the state of `p`, or of a slice of a parameter, with records decoded, in its memory order."""
    if not any(itertools.starmap(is_records, state.items())):
        return state
    return {key: kept(value, key, p, None) for key, value in state.items()}


def portable(state: Mapping[Any, Any], p: torch.Tensor) -> Mapping[Any, Any]:
    """Return a parameter's state as others read it: records decoded unless they are of a plain, row-major one."""
    return state if p.is_contiguous() and not is_dtensor(p) else floating(state, p)


def readable(state: Mapping[Any, Any], p: torch.Tensor) -> Mapping[Any, Any]:
    """Invert portable(): decode records, of row-major order, unless `p` is plain and row-major; a DTensor gets its part."""
    return state if p.is_contiguous() and not is_dtensor(p) else wide(state, p)


def wide(state: Mapping[Any, Any], p: torch.Tensor) -> Mapping[Any, Any]:
    """Return a whole parameter's state with its records, of row-major order, decoded; a DTensor gets its part."""
    if not any(itertools.starmap(is_records, state.items())):
        return state
    return {key: placed(value, key, p) if is_records(key, value) else value for key, value in state.items()}


def placed(records: torch.Tensor, key: str, p: torch.Tensor) -> torch.Tensor:
    """Decode a whole parameter's records, of row-major order, into the shape of `p`; a DTensor gets its part."""
    whole = decoded(records, key, p.numel()).reshape(p.shape)
    return placed_like(local_part(whole, p).contiguous(), p) if is_dtensor(p) else whole


def _floating(records: torch.Tensor, key: str, like: torch.Tensor) -> torch.Tensor:
    local = held_tensor(like) if is_dtensor(like) else like
    made = decoded(records, key, local.numel()).as_strided(local.shape, local.stride())
    return placed_like(made, like) if is_dtensor(like) else made
