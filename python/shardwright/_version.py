"""The version, defined once by the distribution's metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("shardwright")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
