"""The option compress=: its base class and its check. The compressors themselves load at their first use."""

from __future__ import annotations

from typing import Any

from .names import near

#: the classes; options/compressors.py has them by name
KINDS = ("Fp16", "Bf16", "Int8", "Int4", "PowerSGD")


class Compressor:
    """The base of the compressors; all are frozen dataclasses, equal on all ranks."""


def check_compressor(compress: Any, reduce: str) -> None:
    """Raise TypeError or NotImplementedError with a sentence, before anything is created."""
    if compress is None or isinstance(compress, str) and compress == "auto":
        return
    if not isinstance(compress, Compressor):
        name = compress.__name__ if isinstance(compress, type) else str(compress)
        offer = near(name, KINDS).replace("'", "sw.", 1).replace("'", "()", 1)
        *most, last = (f"sw.{each}()" for each in KINDS)
        raise TypeError(f"compress must be None, 'auto', {', '.join(most)} or {last}, got {compress!r}{offer}")
    if reduce != "mean":
        raise NotImplementedError(
            f"compress={compress} computes the mean over ranks: reduce must be 'mean', got {reduce!r}"
        )
