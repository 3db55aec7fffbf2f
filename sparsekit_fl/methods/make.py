"""make_method: a method from the text that a user wrote."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.method import KINDS, Method
from sparsekit_fl.methods.settings import with_arguments, with_settings
from sparsekit_fl.options import read_settings
from sparsekit_fl.policies.ratio import BanditRatio


def make_method(text: str, *, settings: Mapping[str, Any] | None = None) -> Method:
    """A method by its name in the registry or as `package.module:function`.

    `METHOD@BANDIT` says its bandit too, and `METHOD PATH=VALUE …` its options, as in `fedprox local.proximal=0.1`; both are
    then part of its name, so that a comparison may have one method several times.

    Args:
        text: What the user wrote.
        settings: Further options by path; see `methods.settings`.

    Raises:
        UnknownNameError: no such method, bandit or option.
        InvalidValueError: what was found does not make a Method, no bandit decides its ratio, or a value is not allowed.
    """
    words = text.split() or [text]
    name, _, wanted = words[0].partition("@")
    own = read_settings(words[1:])
    given = {**own, **(settings or {})}
    made = registry.find(name)
    if callable(made):
        arguments = [path for path in given if "." not in path and path not in KINDS]
        made = with_arguments(made, {path: given.pop(path) for path in arguments}, name=name)
    if not isinstance(made, Method):
        raise InvalidValueError(f"{name!r} must be a Method or a function that returns one, got {type(made).__name__}")
    made = with_settings(made, given)
    if own:
        made = replace(made, name=f"{made.name}[{','.join(f'{path}={value}' for path, value in own.items())}]")
    return _with_bandit(made, wanted) if wanted else made


def _with_bandit(method: Method, bandit: str) -> Method:
    if not isinstance(method.ratio, BanditRatio):
        raise InvalidValueError(
            f"method {method.name!r} takes no bandit, as no bandit decides its ratio; fedlps and fedlps-paper take one"
        )
    if method.ratio.bandit == bandit:
        return method
    return replace(method, name=f"{method.name}@{bandit}", ratio=replace(method.ratio, bandit=bandit))
