"""make_method: a method from the text that a user wrote."""

from __future__ import annotations

from dataclasses import replace

from sparsekit.errors import InvalidValueError
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.bandit import BanditRatio

__all__ = ["make_method"]


def make_method(text: str, *, bandit: str | None = None) -> Method:
    """A method by its name in the registry or as `package.module:function`; `METHOD@BANDIT` says its bandit too.

    Args:
        text: What the user wrote.
        bandit: Decides the ratio, in place of the method's own bandit. None: as the text or the method says.

    Raises:
        UnknownNameError: no such method or bandit.
        InvalidValueError: what was found does not make a Method, or no bandit decides its ratio.
    """
    name, _, wanted = text.partition("@")
    found = registry.find(name)
    made = found() if callable(found) else found
    if not isinstance(made, Method):
        raise InvalidValueError(f"{name!r} must be a Method or a function that returns one, got {type(made).__name__}")
    return _with_bandit(made, bandit or wanted) if bandit or wanted else made


def _with_bandit(method: Method, bandit: str) -> Method:
    if not isinstance(method.ratio, BanditRatio):
        raise InvalidValueError(
            f"method {method.name!r} takes no bandit, as no bandit decides its ratio; fedlps and fedlps-paper take one"
        )
    if method.ratio.bandit == bandit:
        return method
    return replace(method, name=f"{method.name}@{bandit}", ratio=replace(method.ratio, bandit=bandit))
