"""Builds the problem and the clients of a preset: loads its data, divides them among clients, and makes a model for them."""

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.context import stream
from sparsekit_fl.config import read_keywords
from sparsekit_fl.paper.presets import Preset
from sparsekit_fl.problem.data import Client, ClientData
from sparsekit_fl.problem.datasets import DataSource, datasets
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.problem.models import ModelSpec, Network, models
from sparsekit_fl.problem.partition import partitions
from sparsekit_fl.problem.problem import Problem


def build_problem(preset: Preset, **options: Any) -> tuple[Problem, list[Client]]:
    """Return the problem and the clients that `build_task` returns for the same arguments."""
    return build_task(preset, **options)[:2]


def build_task(
    preset: Preset,
    *,
    model: str | None = None,
    clients: int | None = None,
    partition: str | None = None,
    options: Mapping[str, object] | None = None,
    data_dir: Path | str | None = None,
    seed: int = 0,
    ids: Collection[int] | None = None,
) -> tuple[Problem, list[Client], dict[str, Any]]:
    """Load the data of a preset, divide them among clients, and make a model for their shape and number of classes.

    Args:
        preset: The settings. Its `dataset` is a name, or `package.module:factory`: a function that takes any of the keywords
            `root` or `data_dir`, `seed`, `batch_size` and `ids`, and returns a DataSource, batches, a map-style data set, a
            pair of these for training and tests, or (Problem, one of these), or (Problem, clients).
        model: Model in place of the preset's: a name, or `package.module:factory`.
        clients: Number of clients in place of the preset's; if the data have too few shards, these shrink, with a warning.
        partition: Partition in place of the preset's, whose options are then not used: a name, or `package.module:function` of
            the form of `Partition`.
        options: Keywords for the partition, in addition to the preset's. Text is converted as the annotation says.
        data_dir: Folder of the data sets; None downloads what can be downloaded.
        seed: Seed of the run; the partition draws from its `stream(seed, "data")`.
        ids: The clients to load, such as the clients of one device; empty on a server without data. None loads all.

    Returns:
        The problem, its clients, and the names of model, data set and partition, for the result. Clients of a DataSource have
        the ids 0, 1, …, and a full capability each.

    Raises:
        DataError: the data are missing, too few, or do not fit the model.
        InvalidValueError: an option out of range, or a client of `ids` that does not exist.
        UnknownNameError: no data set, model or partition of that name, or no such option of the partition.
    """
    problem, data = _load(preset.dataset, None if data_dir is None else Path(data_dir), seed, ids)
    changes: dict[str, Any] = {"model": model if problem else None}
    if not isinstance(data, DataSource):
        changes |= {"clients": clients, "partition": partition, "options": options}
    given = [name for name, value in changes.items() if value is not None]
    if given:
        raise InvalidValueError(
            f"{preset.dataset!r} brings its own {'problem' if isinstance(data, DataSource) else 'problem and clients'}, so"
            f" {', '.join(given)} cannot be changed; leave it out, or let the factory return a DataSource"
        )
    name = model or preset.model
    if problem is not None:
        made: Any = getattr(problem.model, "func", problem.model)
        name = f"{made.__module__}:{getattr(made, '__qualname__', type(made).__name__)}"
    count = preset.clients if clients is None else clients
    described: dict[str, Any] = {"preset": preset.name, "dataset": preset.dataset, "model": name}
    if not isinstance(data, DataSource):
        assert problem is not None
        described |= {"partition": None, "partition_options": {}}
        return problem, _only(data, ids), described
    source = data
    if problem is None:
        problem, source = _problem_for(source, name)
    elif source.kind == "image" and source.train.inputs[0].dtype == torch.uint8 and source.train.transform is None:
        source = _normalized(source, tuple(problem.example_inputs[0].shape[1:]))
    kind = partition or preset.partition or ("natural" if source.owners is not None else "pathological")
    keywords: dict[str, Any] = dict(preset.options) if kind == preset.partition else {}
    deal, own = partitions.find(kind), ("clients", "rng")  # passed below, so they are not options
    keywords |= read_keywords(deal, options or {}, name=f"partition {kind!r}", prefix="partition.", without=own)
    described |= {"clients": count, "partition": kind, "partition_options": keywords}
    splits = deal(source, clients=count, rng=stream(seed, "data"), **keywords)
    if ":" in kind and (len(splits) != count or not all(isinstance(one, ClientData) for one in splits)):
        raise InvalidValueError(
            f"partition {kind!r} must return a list of {count} ClientData, one for each client, got {splits!r:.200}"
        )
    return problem, _only([Client(id=id, data=split) for id, split in enumerate(splits)], ids), described


def _only(clients: list[Client], ids: Collection[int] | None) -> list[Client]:
    known = {client.id: client for client in clients}
    strangers = sorted(set(ids or ()) - set(known))
    if strangers:
        there = f"the data have the clients {min(known)} to {max(known)}" if known else "the data have no clients"
        raise InvalidValueError(f"{there}, but this node was given {strangers}; correct its option `clients`")
    return clients if ids is None else [known[id] for id in ids]


def _problem_for(source: DataSource, name: str) -> tuple[Problem, DataSource]:
    """Return the problem of a named model on a source, and the source with the transform that the model needs."""
    found = models.find(name)
    if isinstance(found, torch.nn.Module) or not callable(getattr(found, "build", found)):
        raise InvalidValueError(f"{name!r} must be a class or function that builds a model, got {type(found).__name__}")
    spec = found if isinstance(found, ModelSpec) else ModelSpec(name=name, build=found)
    shape = spec.input_shape(source.kind, tuple(source.shape))
    if source.kind == "image":
        source = _normalized(source, tuple(shape))
    problem = Problem(
        model=Network(spec, source.kind, shape, source.classes),
        example_inputs=tuple(torch.zeros_like(one) for one in source.train.batch(slice(1))[0]),
        metrics={"accuracy": partial(accuracy, never_right=source.never_right) if source.kind == "tokens" else accuracy},
        channels_last=spec.channels_last,
    )
    return problem, source


def _normalized(source: DataSource, shape: tuple[int, ...]) -> DataSource:
    if len(shape) != 3 or not source.mean or not source.std:
        raise InvalidValueError(
            f"images of {source.name!r} are uint8, and cannot be normalized for inputs of shape {shape}; give the"
            ' DataSource mean and std, and the Problem example_inputs (batch, channels, height, width), or kind="other"'
            " and a transform of your own"
        )
    return source.normalized(shape)


def _load(
    name: str, root: Path | None, seed: int, ids: Collection[int] | None
) -> tuple[Problem | None, DataSource | list[Client]]:
    factory = datasets.find(name)
    accepted = inspect.signature(factory).parameters
    offered = {"root": root, "data_dir": root, "seed": seed, "ids": ids, "batch_size": 64}
    found = factory(**{word: value for word, value in offered.items() if word in accepted})
    brings = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Problem)
    problem, data = found if brings else (None, found)
    if problem is not None and isinstance(data, list | tuple) and all(isinstance(one, Client) for one in data):
        return problem, list(data)
    return problem, data if isinstance(data, DataSource) else DataSource.of(name, data, seed)
