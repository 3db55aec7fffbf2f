"""build_problem: load the data of a preset, partition them over clients and fit the model to them."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparsekit.errors import InvalidValueError, nearest
from sparsekit.registry import load_object
from sparsekit_fl.paper.presets import Preset
from sparsekit_fl.problem.clients import Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets import datasets
from sparsekit_fl.problem.datasets.base import DataSource, ImageTransform, TokenTransform
from sparsekit_fl.problem.metrics import TokenAccuracy, accuracy
from sparsekit_fl.problem.models import models
from sparsekit_fl.problem.models.base import factory_spec
from sparsekit_fl.problem.partition import partitions
from sparsekit_fl.problem.partition.base import Partition
from sparsekit_fl.problem.partition.pathological import lacking
from sparsekit_fl.problem.problem import Problem, check_fit
from sparsekit_fl.streams import Streams


class Task(NamedTuple):
    """What was built.

    Args:
        problem: Model, loss and metrics.
        clients: With their data.
        described: Names of what was built, for the result.
        test: The test examples of all clients together; None where each client splits its own.
    """

    problem: Problem
    clients: list[Client]
    described: Mapping[str, Any]
    test: TensorData | None = None


def build_problem(preset: Preset, **options: Any) -> tuple[Problem, list[Client]]:
    """Return the problem and the clients of `build_task`, whose arguments these are."""
    return build_task(preset, **options)[:2]


def build_task(
    preset: Preset,
    *,
    model: str | None = None,
    clients: int | None = None,
    partition: str | None = None,
    options: Mapping[str, object] | None = None,
    lack_classes: int | None = None,
    data_dir: Path | str | None = None,
    seed: int = 0,
) -> Task:
    """Load the data, partition them, and fit the model to them.

    Args:
        preset: The settings.
        model: Model in place of the preset's: a name, or `package.module:factory`.
        clients: Number of clients in place of the preset's; shards shrink, with a warning, where the data have too few.
        partition: Partition in place of the preset's, whose options are then not used: a name, or `package.module:function` of
            the form of `Partition`.
        options: Keywords for the partition, over those of the preset.
        lack_classes: Number of classes that each client lacks, for the pathological partition; see
            `partition.pathological.lacking`.
        data_dir: Folder of the data sets; None downloads what can be downloaded.
        seed: Seed of the run; the partition draws from its `Streams(seed).data()`.

    Returns:
        The problem and its clients, ids 0, 1, …, each with a full capability.

    Raises:
        DataError: data missing, too few, or not fit for the model.
        InvalidValueError: an option out of range or unknown to the partition.
        UnknownNameError: no data set, model or partition of that name.
    """
    described: dict[str, Any] = {"preset": preset.name, "dataset": preset.dataset}
    found = _load(preset.dataset, None if data_dir is None else Path(data_dir), seed)
    if not isinstance(found, DataSource):
        changes = {"model": model, "clients": clients, "partition": partition, "options": options, "lack_classes": lack_classes}
        given = [name for name, value in changes.items() if value is not None]
        if given:
            raise InvalidValueError(
                f"{preset.dataset!r} brings its own problem and clients, so {', '.join(given)} cannot be changed;"
                " leave it out, or let the factory return a DataSource"
            )
        problem, roster = found
        check_fit(problem, roster[0])
        described |= {"model": _name_of(problem), "clients": len(roster), "partition": None, "partition_options": {}}
        return Task(problem, roster, described)
    name = model or preset.model
    spec = factory_spec(name, models.find(name))
    takes = spec.input_shape(found.kind, tuple(found.shape))
    if takes.kind == "image":
        channels, *size = takes.shape
        source = found.with_transform(ImageTransform(channels, (size[0], size[1]), found.mean, found.std))
    else:
        source = found.with_transform(TokenTransform())
    kind, deal, keywords = _partition(preset, source, clients, partition, options or {}, lack_classes)
    count = preset.clients if clients is None else clients
    splits = deal(source, clients=count, rng=Streams(seed).data(), **keywords)
    if ":" in kind and (len(splits) != count or not all(isinstance(one, ClientData) for one in splits)):
        raise InvalidValueError(
            f"partition {kind!r} must return a list of {count} ClientData, one for each client, got {splits!r:.200}"
        )
    problem = Problem(
        model=spec.factory(classes=found.classes, takes=takes),
        example_inputs=takes.zeros(),
        metrics={"accuracy": TokenAccuracy(found.never_right) if found.kind == "tokens" else accuracy},
        channels_last=spec.channels_last,
        about={
            "model": name,
            "classes": found.classes,
            "takes": {"kind": takes.kind, "shape": list(takes.shape)},
            "transform": {"mean": list(found.mean), "std": list(found.std)} if takes.kind == "image" else {},
        },
    )
    roster = [Client(id=id, data=data) for id, data in enumerate(splits)]
    check_fit(problem, roster[0])
    # The level decides all that the preset says of shards, so what it overrides is not reported.
    kept = {"lack_classes": lack_classes} if lack_classes is not None else preset.options if kind == preset.partition else {}
    described |= {"model": name, "clients": count, "partition": kind, "partition_options": {**kept, **(options or {})}}
    return Task(problem, roster, described, source.test)


def _name_of(problem: Problem) -> str:
    made = getattr(problem.model, "func", problem.model)
    return f"{made.__module__}:{made.__qualname__}" if hasattr(made, "__qualname__") else type(problem.model()).__name__


def _load(name: str, root: Path | None, seed: int) -> DataSource | tuple[Problem, list[Client]]:
    if ":" not in name:
        found = datasets[name](root)
    else:
        factory = load_object(name)
        if not callable(factory):
            raise InvalidValueError(f"{name!r} must be a function, got {type(factory).__name__}; it is called to load the data")
        accepted = inspect.signature(factory).parameters
        found = factory(**{word: value for word, value in (("root", root), ("seed", seed)) if word in accepted})
    if isinstance(found, DataSource):
        return found
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Problem):
        roster = list(found[1])
        if roster and all(isinstance(client, Client) for client in roster):
            return found[0], roster
    raise InvalidValueError(f"{name!r} must return a DataSource or (Problem, list of Client), got {type(found).__name__}")


def _partition(
    preset: Preset,
    source: DataSource,
    clients: int | None,
    partition: str | None,
    options: Mapping[str, object],
    lack_classes: int | None,
) -> tuple[str, Partition, dict[str, Any]]:
    """Return the partition with its name, and its keywords: those of the preset, those given over them."""
    name = partition or preset.partition or ("natural" if source.owners is not None else "pathological")
    keywords: dict[str, Any] = dict(preset.options) if name == preset.partition else {}
    if name == "pathological" and (clients not in (None, preset.clients) or name != preset.partition):
        keywords["when_short"] = "shrink"
    keywords.update(options)
    if lack_classes is not None:
        if name != "pathological":
            raise InvalidValueError(
                f"lack_classes belongs to the partition 'pathological', got {name!r}; leave one of the two out"
            )
        if not {"classes_per_client", "images_per_class"}.isdisjoint(options):
            raise InvalidValueError(
                f"lack_classes decides how many classes a client has, so {', '.join(sorted(options))} cannot be given too"
            )
        keywords.update(lacking(lack_classes, source.classes, keywords))
    deal = partitions.find(name)
    known = set(inspect.signature(deal).parameters) - {"source", "clients", "rng"}
    for option in keywords:
        if option not in known:
            raise InvalidValueError(f"partition {name!r} has no option {option!r}; {nearest(option, known)}")
    return name, deal, keywords
