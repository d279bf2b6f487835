"""The version, in one place: the distribution's metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("shardwright")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"
