"""Advice for what was typed in place of a command: a method's name needs `sparsekit run` before it."""

from __future__ import annotations

import difflib

from sparsekit_fl.methods import registry

_CLOSE = 0.8


def method_hint(name: str) -> str | None:
    """Say which command runs a method of this name, or of a name like it.

    Args:
        name: What was typed.

    Returns:
        For example `fedavg is a method; type: sparsekit run fedavg`; None where no method is meant.
    """
    if name in registry:
        return f"{name} is a method; type: sparsekit run {name}"
    turned = [known for known in registry if sorted(known) == sorted(name)]  # letters in another order
    close = turned or difflib.get_close_matches(name, list(registry), n=1, cutoff=_CLOSE)
    if not close:
        return None
    typed = close[0] if close[0] == "fedlps" else f"run {close[0]}"
    return f"did you mean: sparsekit {typed}"
