"""Models with a `save_pretrained` of their own, as in the package transformers, after a cut.

Such a method writes a configuration beside the weights, with the widths of the dense model. What it writes after a cut
cannot be read again, which shows only when somebody loads it.
"""

import functools
from typing import Any, NoReturn

from torch import nn

from sparsekit.errors import UnsupportedModelError

_METHOD = "save_pretrained"


def _refuse(model: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    """Stands, as a partial that can be copied and pickled, in place of `save_pretrained` on one compact model."""
    raise UnsupportedModelError(
        f"save_pretrained of this compact {model} would write a config with the widths of the dense model, which"
        " from_pretrained cannot load. Where all layers keep one shape, sparsekit.fit_config(small, graph, mask) writes the"
        " config that fits. Or save it with sparsekit.save_compact(masked, 'small.safetensors') and read it with"
        f" sparsekit.load_compact. Where you have changed the config yourself: {model}.save_pretrained(model, folder)"
    )


def guard_pretrained(compact: nn.Module, *, cut: bool) -> nn.Module:
    """Let `save_pretrained` of a compact model refuse, with the way out, where units were `cut`; return the same model."""
    if cut and callable(getattr(compact, _METHOD, None)) and hasattr(compact, "config"):
        setattr(compact, _METHOD, functools.partial(_refuse, type(compact).__name__))
    return compact
