"""The user's options. This folder imports only the engine."""

from .options import Options

__all__ = ["Options"]
