"""The small networks of the papers, by name. Each registered object is a `ModelSpec`."""

from __future__ import annotations

from sparsekit.registry import Registry

__all__ = ["models"]

models = Registry(
    "model",
    {
        "cnn": "sparsekit_fl.problem.models.cnn:spec",
        "vgg11": "sparsekit_fl.problem.models.vgg:vgg11_spec",
        "vgg13": "sparsekit_fl.problem.models.vgg:vgg13_spec",
        "vgg16": "sparsekit_fl.problem.models.vgg:vgg16_spec",
        "lstm": "sparsekit_fl.problem.models.lstm:spec",
    },
    group="sparsekit_fl.models",
)
