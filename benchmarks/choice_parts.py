"""The learned arm of `choice.py` with another constant, to see over which range results do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import sparsekit as sk
from sparsekit.training import evidence, loss_importance

__all__ = ["PARTS"]


def _with(name: str, value: float) -> Callable[..., sk.LossImportance]:
    """Another constant of the two files of the rule, from now on; all others are the usual ones again."""

    def make(**options: Any) -> sk.LossImportance:
        mock.patch.stopall()
        mock.patch.object(loss_importance if hasattr(loss_importance, name) else evidence, name, value).start()
        return sk.LossImportance(**options)

    return make


def _setting(**given: float) -> Callable[..., sk.LossImportance]:
    def make(**options: Any) -> sk.LossImportance:
        mock.patch.stopall()
        return sk.LossImportance(**options, **given)  # type: ignore[arg-type]

    return make


PARTS: dict[str, Callable[..., sk.LossImportance]] = {
    **{f"samples {value}": _setting(samples=value) for value in (4, 16)},
    **{f"share {value:g}": _setting(share=value) for value in (0.25, 1.0)},
    **{f"errors {value:g}": _setting(errors=value) for value in (0.0, 0.5, 2.0)},
    **{f"every {value}": _with("_EVERY", value) for value in (1, 16)},
    **{f"memory {value:g}": _with("_MEMORY", value) for value in (0.5, 1.0)},
    **{f"promise {value:g}": _with("_KEPT_PROMISE", value) for value in (0.25, 1.0)},
    **{f"patience {value}": _with("_PATIENCE", value) for value in (2, 6)},
}
"""Arm → how its mask learns."""
