"""The small networks of the papers, by name. Each registered object is a `ModelSpec`."""

from sparsekit.registry import Registry

__all__ = ["models"]

models = Registry(
    "model",
    {
        "cnn": "sparsekit_fl.problem.models.networks:cnn_spec",
        "vgg11": "sparsekit_fl.problem.models.networks:vgg11_spec",
        "vgg13": "sparsekit_fl.problem.models.networks:vgg13_spec",
        "vgg16": "sparsekit_fl.problem.models.networks:vgg16_spec",
        "lstm": "sparsekit_fl.problem.models.networks:lstm_spec",
    },
    group="sparsekit_fl.models",
)
