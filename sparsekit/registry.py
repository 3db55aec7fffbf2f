"""Registry: a name finds an object, from a table or from an installed entry point, imported when asked for."""

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest

__all__ = ["Registry", "load_object"]


def load_object(path: str) -> Any:
    """Import `package.module:attribute` and return the attribute.

    Args:
        path: A module path, a colon, and a (dotted) attribute path.

    Returns:
        The object.

    Raises:
        InvalidValueError: the text has no colon, or nothing of that name can be imported.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise InvalidValueError(f"expected 'package.module:name', got {path!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidValueError(
            f"cannot import module {module_name!r} of {path!r}: {error}; is it installed, or on PYTHONPATH?"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [name for name in vars(found) if not name.startswith("_")]
            raise InvalidValueError(f"{module_name!r} has no {part!r}; {nearest(part, public)}") from None
    return found


class Registry(Mapping[str, Any]):
    """Names of one kind of plug-in. Looking a name up imports it; listing names imports nothing."""

    def __init__(self, kind: str, table: Mapping[str, str], *, group: str) -> None:
        """Set up a registry.

        Args:
            kind: What the names stand for, in the singular, for error messages: "criterion".
            table: Name → `"module:object"` of what ships with the project.
            group: The entry-point group in which other packages add theirs.
        """
        self.kind = kind
        self.group = group
        self._table = dict(table)

    def _targets(self) -> dict[str, str]:
        added = {point.name: point.value for point in entry_points(group=self.group)}
        return {**added, **self._table}

    def __getitem__(self, name: str) -> Any:
        # What ships with the project comes first, so that looking it up need not read the metadata of every installed package.
        target = self._table.get(name)
        if target is None:
            targets = self._targets()
            if name not in targets:
                raise UnknownNameError(
                    f"unknown {self.kind} {name!r}; {nearest(name, targets)}; or package.module:name for one of your own"
                )
            target = targets[name]
        return load_object(target)

    def find(self, text: str) -> Any:
        """What a user named: `package.module:object`, or a name of this registry.

        Raises:
            InvalidValueError: nothing of that path can be imported.
            UnknownNameError: no such name.
        """
        return load_object(text) if ":" in text else self[text]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._targets()))

    def __len__(self) -> int:
        return len(self._targets())

    def __contains__(self, name: object) -> bool:
        return name in self._targets()
