"""The transport between GPUs: NCCL, or slots in memory of one host. See docs/design/gpu.md.

The ranks exchange facts of their GPUs, and each makes the same choice from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._engine import DeviceComm

VARIABLE = "SHARDWRIGHT_GPU_TRANSPORT"
TRANSPORTS = ("auto", "nccl", "shm", "ipc")
#: bytes of each of a rank's two slots
SLOT_BYTES = 4 << 20
#: the first NCCL with an option that allows several ranks on one GPU
NCCL_SHARES = (2, 30, 0)


#: NCCL's settings for two communicators on a GPU, which ranks may use in different orders (zero=3). The first connects
#: peers as a communicator is made, and not at its first operation, which waits for all hosts. The second lets the GPU
#: start operations in the host's order (from 2.26 and CUDA 12.3 on; older ones ignore it).
_SETTINGS = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


def settle_order() -> None:
    """Set what the program has not set, before NCCL reads it with this process's first communicator."""
    if torch.version.hip is None:  # RCCL has read the second one, and crashed
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)


def offer_of(comm: DeviceComm) -> dict[str, Any]:
    """Return the facts of a rank's GPU that its peers need: plain values."""
    wanted = os.environ.get(VARIABLE, "auto")  # bits depend on it only where `deterministic=False`
    if wanted not in TRANSPORTS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(TRANSPORTS)}, got {wanted!r}")
    found = comm.describe()
    return {
        "wanted": wanted,
        "address": found["address"],
        "nccl": list(found["nccl"]),
        "nccl_missing": found["nccl_missing"],
        "nccl_shares": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    }


def choose_transport(
    offers: Sequence[Mapping[str, Any]], host_of: Sequence[int], borrows: bool = False
) -> tuple[str, str]:
    """Return (transport, the reason why it is not NCCL). "auto" is slots if every rank supports them.

    `offers` are each rank's offer_of(), so all ranks choose alike, or raise the same ValueError or NotImplementedError.
    """
    wanted = offers[0]["wanted"]
    for rank, offer in enumerate(offers):
        if offer["wanted"] != wanted:
            raise ValueError(
                f"{VARIABLE} must be equal on all ranks: rank 0 has {wanted!r}, rank {rank} {offer['wanted']!r}"
            )
    if borrows:  # ranks may share a GPU
        why = f"{VARIABLE}={wanted} asks for slots" if wanted in ("shm", "ipc") else _missing_nccl(offers)
        if why:
            raise NotImplementedError(f"communicator='borrow' needs NCCL, but {why}")
        return "nccl", ""
    host_count = len(set(host_of))
    if len(offers) == 1 and wanted in ("auto", "nccl"):
        return "nccl", ""  # whose link makes no communicator for one rank
    if wanted in ("shm", "ipc"):
        if host_count > 1:
            raise NotImplementedError(
                f"{VARIABLE}={wanted} is for GPUs of one host, and the ranks run on {host_count}: unset it, or set it to nccl"
            )
        return wanted, f"{VARIABLE}={wanted}"
    why = _why_not_nccl(offers, host_of)
    if not why:
        return "nccl", ""
    if wanted == "auto" and host_count == 1:
        return "auto", why
    raise NotImplementedError(why)


def _missing_nccl(offers: Sequence[Mapping[str, Any]]) -> str:
    for rank, offer in enumerate(offers):
        if offer["nccl_missing"]:
            return f"rank {rank} cannot use its GPU with others: {offer['nccl_missing']}"
    return ""


def _why_not_nccl(offers: Sequence[Mapping[str, Any]], host_of: Sequence[int]) -> str:
    if missing := _missing_nccl(offers):
        return missing
    if all(tuple(offer["nccl"]) >= NCCL_SHARES and offer["nccl_shares"] for offer in offers):
        return ""
    seen: dict[tuple[int, str], int] = {}
    for rank, offer in enumerate(offers):
        first = seen.setdefault((host_of[rank], offer["address"]), rank)
        if first != rank:
            version = ".".join(map(str, offer["nccl"]))
            return (
                f"ranks {first} and {rank} share the GPU at {offer['address']}, which NCCL {version} refuses (2.30 and newer take it with "
                "NCCL_MULTI_RANK_GPU_ENABLE=1)"
            )
    return ""
