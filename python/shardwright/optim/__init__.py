"""Optimizers that step in one pass of C: AdamW, Adam and SGD, with torch's arguments."""

from .fused import SGD, Adam, AdamW, global_norm

__all__ = ["SGD", "Adam", "AdamW", "global_norm"]

for _public in (SGD, Adam, AdamW):  # the public module appears in error messages and saved states
    _public.__module__ = __name__
