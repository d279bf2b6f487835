"""Optimizers with torch's arguments: AdamW, Adam and SGD, which step in one pass of C, and Muon."""

from .fused import SGD, Adam, AdamW, global_norm
from .muon import Muon, muon_groups
from .rules import register

__all__ = ["SGD", "Adam", "AdamW", "Muon", "global_norm", "muon_groups", "register"]

for _public in (SGD, Adam, AdamW, Muon):  # the public module appears in error messages and saved states
    _public.__module__ = __name__
