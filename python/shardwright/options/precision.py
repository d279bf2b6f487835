"""The dtypes in which a module computes: sw.Precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .checks import among, switch
from .names import offers_fields

LOW_DTYPES = (torch.bfloat16, torch.float16)
_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: other names of them -> name
_NAMED = {text: name for name, dtype in _NAMES.items() for text in (str(dtype), str(dtype).removeprefix("torch."))}
_NAMED |= {"half": "fp16", "float": "fp32", "bfloat": "bf16", "16-mixed": "fp16", "bf16-mixed": "bf16", "amp": "bf16"}


@offers_fields
@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes in which a module computes; fields as in FSDP2's MixedPrecisionPolicy.

    Parameters
    ----------
    param_dtype : torch.dtype, optional
        The dtype of parameters during forward and backward. None: their own.
    reduce_dtype : torch.dtype, optional
        The dtype in which gradients are averaged. None: the parameters' own dtype, which is float32 with `master`.
        bfloat16 and float16 work like compress=sw.Bf16() and sw.Fp16(). float32 without `master`: gradients of
        low-precision parameters travel in their own dtype, are added in float32 and rounded once. Between GPUs it
        implies deterministic=True.
    output_dtype : torch.dtype, optional
        The dtype of floating-point outputs. None: unchanged; for a module inside another policy, that policy's
        param_dtype.
    cast_forward_inputs : bool
        Cast floating-point inputs to param_dtype.
    master : bool
        Make low-precision parameters float32 when wrapped, for the optimizer to update. False: keep their dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"Precision: {field} must be a floating dtype or None, got {value!r}")
        among(torch.float32, *LOW_DTYPES, None)("Precision: reduce_dtype", self.reduce_dtype)
        for field in ("cast_forward_inputs", "master"):
            switch(f"Precision: {field}", getattr(self, field))

    @staticmethod
    def of(value: Any, where: str = "precision") -> Precision:
        """Return the policy for "bf16", "fp16", "fp32", or a policy."""
        if isinstance(value, Precision):
            return value
        if isinstance(value, str) and value in _NAMES:
            return Precision(param_dtype=_NAMES[value])
        raise ValueError(
            f"{where} must be None, 'bf16', 'fp16', 'fp32', a sw.Precision or a dict of them, got {value!r}"
            + (f": did you mean {_NAMED[str(value)]!r}?" if str(value) in _NAMED else "")
        )
