"""NameMap: which tensors of a checkpoint are loaded, and under which names."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .mapping_files import read_mapping

Rename = Mapping[str, str] | Callable[[str], str] | None
_T = TypeVar("_T")
_KEYS = ("include", "rename")


@dataclasses.dataclass(frozen=True)
class NameMap:
    """A selection and renaming of a checkpoint's tensors.

    Parameters
    ----------
    include : str or iterable of str
        Regular expressions. A tensor is taken if one of them is found in its new name. Empty: all are taken.
    rename : mapping of str to str, or callable
        Regular expressions and replacements: the first expression found in a name is replaced. Or a function that
        returns the new name. Optimizer state follows its parameter.
    strict : bool
        Every selected tensor of the checkpoint must be in the model, and the reverse.

    Examples
    --------
    >>> names = NameMap(include=r"^encoder\\.", rename={r"^module\\.": ""})
    >>> names.new("module.encoder.weight"), names.takes("head.bias")
    ('encoder.weight', False)
    """

    include: str | Iterable[str] = ()
    rename: Rename = None
    strict: bool = True
    _include: list[re.Pattern[str]] = dataclasses.field(init=False, repr=False, compare=False)
    _rules: list[tuple[re.Pattern[str], str]] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.rename is None or callable(self.rename) or isinstance(self.rename, Mapping)):
            raise TypeError(f"rename must be a mapping of str to str, a callable or None, got {self.rename!r}")
        include = (self.include,) if isinstance(self.include, str) else tuple(self.include)
        rules = () if self.rename is None or callable(self.rename) else tuple(self.rename.items())
        try:
            object.__setattr__(self, "_include", [re.compile(each) for each in include])
            object.__setattr__(self, "_rules", [(re.compile(old), new) for old, new in rules])
            for old, new in rules:
                re.sub(f"(?:{old})|", new, "")  # always matches, so a bad group in `new` raises
        except (re.error, TypeError, IndexError) as error:
            raise ValueError(f"include and rename must be regular expressions: {error}") from None
        object.__setattr__(self, "include", include)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> NameMap:
        """Read a map from a TOML or JSON file with the keys `include`, a list, and `rename`, a table. Raise ValueError."""
        body = read_mapping(path, "TOML")
        unknown = sorted(set(body) - set(_KEYS))
        if unknown or not isinstance(body.get("rename", {}), dict) or not isinstance(body.get("include", []), list):
            raise ValueError(
                f"'{os.fspath(path)}' must have the list `include` and table `rename`, got {unknown or body!r}"
            )
        return cls(**body)

    @property
    def is_all(self) -> bool:
        """True if the map changes nothing and all must fit."""
        return self.strict and not self.include and self.rename is None

    def new(self, name: str) -> str:
        """Return the new name of a tensor of the checkpoint."""
        if callable(self.rename):
            return str(self.rename(name))
        for rule, text in self._rules:
            changed, count = rule.subn(text, name)
            if count:
                return changed
        return name

    def takes(self, name: str) -> bool:
        """Return whether a tensor with this new name is taken."""
        return not self._include or any(rule.search(name) for rule in self._include)

    def unmatched(self, names: Iterable[str]) -> str | None:
        """Return the first expression of `include` that is found in no name."""
        names = list(names)
        return next((rule.pattern for rule in self._include if not any(map(rule.search, names))), None)

    def renamed(self, named: Mapping[str, _T]) -> dict[str, _T]:
        """Return the values under their new names. Raise ValueError if two would get one name."""
        found: dict[str, _T] = {}
        for name, value in named.items():
            new = self.new(name)
            if new in found:
                raise ValueError(f"rename gives two tensors the name '{new}', one of them '{name}'")
            found[new] = value
        return found

    def describe(self) -> dict[str, Any]:
        """Return plain values to compare between ranks."""
        rename = [] if self.rename is None else [[rule.pattern, text] for rule, text in self._rules] or "a function"
        return {"strict": bool(self.strict), "include": list(self.include), "rename": rename}
