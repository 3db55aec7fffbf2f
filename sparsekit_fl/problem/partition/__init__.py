"""Ways to deal a data set to clients, by name."""

from sparsekit.registry import Registry

__all__ = ["partitions"]

partitions = Registry(
    "partition",
    {
        "pathological": "sparsekit_fl.problem.partition.pathological:pathological",
        "dirichlet": "sparsekit_fl.problem.partition.dirichlet:dirichlet",
        "natural": "sparsekit_fl.problem.partition.natural:natural",
    },
    group="sparsekit_fl.partitions",
)
