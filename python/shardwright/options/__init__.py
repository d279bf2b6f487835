"""Options of a user. Imports nothing of the package but the engine."""

from .options import Options

__all__ = ["Options"]
