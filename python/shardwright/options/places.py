"""Paths that a user names, and the user's own folders."""

from __future__ import annotations

import os
import re
import sys

#: an address with a scheme; one slash suffices, since pathlib.Path drops the second
_SCHEME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]+:/|[^/]*://")


#: an address of fsspec
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def path_text(name: str, path: object) -> str:
    """Return a path as text. Raise TypeError for another value, with the name of the argument."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} must be a path, as a str or an os.PathLike, got {path!r}")
    return os.fsdecode(path)


def address_of(path: str | os.PathLike[str], name: str = "path") -> str | None:
    """Return `path` as an address if it has a scheme, a place behind it, and fsspec is installed; else None: see absolute_path()."""
    given = path_text(name, path)
    match = _ADDRESS.match(given)
    if match is None or not given[match.end() :]:
        return None
    try:
        import fsspec  # noqa: F401
    except ImportError:
        return None
    slashes = "///" if match[1] in ("file", "local") else "//"
    return f"{match[1]}:{slashes}{given[match.end() :]}".rstrip("/")


def absolute_path(name: str, path: str | os.PathLike[str]) -> str:
    """Return `path` as an absolute path. Raise ValueError for an address, a zero byte or a name that is not UTF-8."""
    given = path_text(name, path)
    if _SCHEME.match(given):
        why = "" if given.partition(":")[2].strip("/") else ", with no place behind its scheme"
        raise ValueError(f"{name} must be a path of a mounted file system, got the address {given!r}{why}")
    found = os.path.abspath(given)
    check_encodable(name, found)
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be UTF-8, got {os.fsencode(found)!r}") from None
    if "\0" in found:
        raise ValueError(f"{name} must have no zero byte, got {found!r}")
    return found


def check_encodable(name: str, path: str) -> None:
    """Raise ValueError where Python passes other bytes to the system than UTF-8, which the engine passes."""
    encoding = sys.getfilesystemencoding()
    if not path.isascii() and encoding.replace("-", "").lower() != "utf8":
        raise ValueError(
            f"{name} must be ASCII where Python encodes file names in {encoding}, got {path!a}: set PYTHONUTF8=1, or a UTF-8 locale"
        )


def cache_folder() -> str | None:
    """Return the folder of files that can be made again, below XDG_CACHE_HOME or ~/.cache; None for a user without a home."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if cache.startswith("~") else os.path.join(os.path.abspath(cache), "shardwright")


def expanded(name: str, path: str) -> str:
    """Return `path` with a leading "~" replaced. Raise ValueError if that home is not known."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ValueError(f"{name} needs a home, which HOME and passwd do not name: pass an absolute path, got {path!r}")
    return found


def is_writable(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
