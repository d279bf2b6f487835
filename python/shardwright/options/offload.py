"""The option offload=: None, "cpu" or "nvme:<folder>"."""

from __future__ import annotations

from typing import Any

from .places import expanded

__all__ = ["offload_folder", "offload_kind"]


def offload_kind(offload: Any) -> str | None:
    """Return None, "cpu" or "nvme". Raise ValueError for any other option."""
    if offload is None or offload == "cpu":
        return None if offload is None else "cpu"
    if isinstance(offload, str) and offload.startswith("nvme:") and len(offload) > len("nvme:"):
        return "nvme"
    raise ValueError(f"offload must be None, 'cpu' or 'nvme:<folder>', got {offload!r}")


def offload_folder(offload: Any) -> str | None:
    """Return the folder of "nvme:<folder>"."""
    return expanded("offload", offload.removeprefix("nvme:")) if offload_kind(offload) == "nvme" else None
