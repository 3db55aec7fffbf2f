"""make_method(): a method from the text that a user wrote."""

from collections.abc import Mapping
from typing import Any

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.base import Method
from sparsekit_fl.options import options_of, parse_value, read_settings


def make_method(text: str, *, settings: Mapping[str, Any] | None = None) -> Method:
    """Make a method from its name in the registry, or from `package.module:Class`; options may follow: `fedprox mu=0.1`.

    Args:
        text: What the user wrote.
        settings: Further options: name → value; text is read by the annotation of the field.

    Raises:
        UnknownNameError: there is no such method or option; names the nearest.
        InvalidValueError: the text does not name a method, or the value of an option is not allowed.
    """
    name, *own = text.split() or [text]
    found = registry.find(name)
    if not isinstance(found, type) or not issubclass(found, Method):
        called = getattr(found, "__name__", type(found).__name__)
        raise InvalidValueError(f"{name!r} must be a subclass of sparsekit_fl.Method, got {called}")
    given = {**read_settings(own), **(settings or {})}
    known = options_of(found)  # type: ignore[arg-type]  # classes are hashable
    for option in given:
        if option not in known:
            raise UnknownNameError(
                f"method {name!r} has no option {option!r}; {nearest(option, known)};"
                f" `sparsekit describe {name}` shows its options, `sparsekit list options` those of a run"
            )
    return found(**{option: _value(known[option].hint, value, option) for option, value in given.items()})


def _value(hint: Any, value: Any, name: str) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return parse_value(hint, value, name=name) if isinstance(value, str) else value
