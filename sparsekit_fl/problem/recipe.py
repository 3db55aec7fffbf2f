"""recipe_of(): how another process makes a problem's model again and reads raw inputs, as plain JSON values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sparsekit_fl.problem.problem import Problem


def recipe_of(problem: Problem) -> dict[str, Any]:
    """Return what the problem says of itself (`Problem.about`), its example inputs, and where its model's code is.

    Args:
        problem: The task, as the user gave it.

    Returns:
        `about`; `factory`, as `package.module:function`, where that can be imported; `example_inputs`, shape and dtype of each.
    """
    shapes = [
        {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch.")} if isinstance(one, Tensor) else None
        for one in problem.example_inputs
    ]
    return {
        "about": dict(problem.about),
        "factory": _importable(problem.model),
        "example_inputs": shapes,
        "classifies": "accuracy" in problem.metrics,
    }


def _importable(model: Callable[[], nn.Module]) -> str | None:
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is model else None
