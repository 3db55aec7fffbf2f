"""Names and import paths of the commands, models and data in sparsekit. Listing them imports nothing."""

from collections.abc import Mapping
from typing import NamedTuple


class Listed(NamedTuple):
    """A command: the path `package.module:name` of its `typer.Typer`, imported on demand, and the first line of its help."""

    path: str
    summary: str


COMMANDS: Mapping[str, Listed] = {
    "compare": Listed(
        "sparsekit_fl.cli.compare:compare", "Run several methods over several seeds, and print mean ± deviation."
    ),
    "describe": Listed("sparsekit_fl.cli.listing:describe", "Describe a method: where it was published, and its options."),
    "fedlps": Listed(
        "sparsekit_fl.cli.run:fedlps", "Run FedLPS: each client trains a submodel that fits its device and its data."
    ),
    "flower-app": Listed(
        "sparsekit_fl.cli.flower_app:flower_app",
        "Write a Flower app that runs any method on real devices: SuperLink and SuperNodes, with TLS.",
    ),
    "list": Listed(
        "sparsekit_fl.cli.listing:list_names",
        "List the names that an option takes, ours and those of installed packages, or every option.",
    ),
    "prune": Listed("sparsekit.cli.prune:prune", "Prune a model to a budget, and report what was pruned."),
    "report": Listed(
        "sparsekit_fl.cli.compare:report",
        "Write report.html of finished runs, with tables and charts, and print the tables; nothing is trained.",
    ),
    "run": Listed(
        "sparsekit_fl.cli.run:run",
        "Run any federated method; `sparsekit list methods` shows them, `sparsekit describe METHOD` the options of one.",
    ),
    "tune": Listed(
        "sparsekit.cli.tune:tune",
        "Tune numbers and choices in any command line: a bandit chooses them, and a regular expression reads the score.",
    ),
    "units": Listed(
        "sparsekit.cli.units:units",
        "Show the unit groups of a model: what can be removed exactly, what cannot be pruned, and why.",
    ),
}

MODELS: Mapping[str, str] = {
    name: f"sparsekit_fl.problem.models:{name}_spec.demo" for name in ("cnn", "lstm", "vgg11", "vgg13", "vgg16")
}

DATA: Mapping[str, str] = {
    name: f"sparsekit_fl.problem.images:{name.replace('-', '_')}_loaders"
    for name in ("cifar10", "cifar100", "digits", "mnist", "tiny-imagenet")
}
