"""Plan: what a Flower app was configured to run. Read from Flower's run configuration, alike on the server and on a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import load_object
from sparsekit_fl.experiment.build import build_problem
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.config import Aggregation, RunConfig, Upload
from sparsekit_fl.paper.presets import preset_for
from sparsekit_fl.problem.clients import Client, ClientData
from sparsekit_fl.problem.problem import Problem

__all__ = ["Plan", "client_ids"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a deployed run. Empty text and zero stand for "as the preset says".

    Args:
        method: A method by name, or `package.module:function`.
        preset: Of the experiment; it decides model, training and, on a node, how the data are dealt.
        problem: `package.module:function` that returns the Problem, for a model and data of your own; nodes then name the
            data by their `data` option.
        rounds: Server rounds.
        cohort: Size of the cohort.
        seed: Of all random numbers.
        eval_every: Score clients each so many rounds, and at the end.
        eval_clients: How many are scored before the end; zero: all. The end scores all.
        local_epochs: Passes over a client's data per round.
        batch_size: Examples per step.
        lr: Learning rate.
        data_dir: Folder of the data sets on the server, where the preset needs them to know the model's shape.
        out: Folder on the server for result, records and checkpoint.
        resume: Go on with the run in `out`.
        nodes: How many SuperNodes to wait for.
        wait_seconds: How long.
        timeout_seconds: Replies that take longer are given up; zero waits.
        min_replies: Valid updates that a round needs; zero stands for half of its cohort, rounded up.
        aggregation: How changes are combined; see `RunConfig`, which has this and the next six by the same names.
        trim_share: For "trimmed-mean".
        clip_norm: For "norm-clipped"; zero takes the round's median norm.
        dp_clip: Largest norm of a client's change, for privacy; zero: no privacy.
        dp_noise: Noise multiplier.
        dp_delta: δ; zero: by the number of clients. The seed of the noise is no option here, as every node gets the options:
            the server draws it.
        upload: What changes are sent as.
        memory: "nodes": each keeps the memories of its clients in its `state-dir`; "server": they travel.
    """

    method: str = "fedlps"
    preset: str = "digits"
    problem: str = ""
    rounds: int = 0
    cohort: int = 0
    seed: int = 0
    eval_every: int = 0
    eval_clients: int = 0
    local_epochs: int = 0
    batch_size: int = 0
    lr: float = 0.0
    data_dir: str = ""
    out: str = ""
    resume: bool = False
    nodes: int = 2
    wait_seconds: float = 300.0
    timeout_seconds: float = 0.0
    min_replies: int = 0
    aggregation: Aggregation = "mean"
    trim_share: float = 0.2
    clip_norm: float = 0.0
    dp_clip: float = 0.0
    dp_noise: float = 0.0
    dp_delta: float = 0.0
    upload: Upload = "float32"
    memory: Literal["nodes", "server"] = "nodes"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted: tuple[type, ...] = (float, int) if isinstance(field.default, float) else (type(field.default),)
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                raise InvalidValueError(f"{field.name.replace('_', '-')} must be a {wanted[0].__name__}, got {value!r}")
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise InvalidValueError(f"{field.name.replace('_', '-')} must be a finite number >= 0, got {value!r}")
        if self.memory not in ("nodes", "server"):
            raise InvalidValueError(f"memory must be 'nodes' or 'server', got {self.memory!r}")
        if self.nodes < 1:
            raise InvalidValueError(f"nodes must be an integer >= 1, got {self.nodes}")
        if self.resume and not self.out:
            raise InvalidValueError("resume needs out, the folder of the run to go on with")

    @staticmethod
    def of(run_config: Mapping[str, Any]) -> Plan:
        """From Flower's run configuration, whose keys are those of this class with hyphens.

        Raises:
            UnknownNameError: a key that is no option.
            InvalidValueError: a value that is not allowed.
        """
        known = {field.name.replace("_", "-") for field in dataclasses.fields(Plan)}
        for name in run_config:
            if name not in known:
                raise UnknownNameError(f"unknown option {name!r} in the run configuration; {nearest(name, known)}")
        return Plan(**{name.replace("-", "_"): value for name, value in run_config.items()})

    def to_run_config(self) -> dict[str, bool | int | float | str]:
        """The inverse of `of`."""
        return {field.name.replace("_", "-"): getattr(self, field.name) for field in dataclasses.fields(self)}

    def make_method(self) -> Method:
        """The method."""
        from sparsekit_fl.methods import registry

        made = load_object(self.method) if ":" in self.method else registry[self.method]
        found = made() if callable(made) else made
        if not isinstance(found, Method):
            raise InvalidValueError(f"method {self.method!r} must be a function that returns a Method, got {found!r}")
        return found

    def make_problem(self, data_dir: str | None = None) -> tuple[Problem, list[Client]]:
        """The problem, and all clients of the preset; none where the problem is the user's.

        Args:
            data_dir: Folder of the data sets here.
        """
        if not self.problem:
            folder = data_dir or self.data_dir or None
            return build_problem(
                preset_for(preset=self.preset), data_dir=None if folder is None else Path(folder), seed=self.seed
            )
        factory = load_object(self.problem)
        problem = factory() if callable(factory) else factory
        if not isinstance(problem, Problem):
            raise InvalidValueError(f"problem {self.problem!r} must return a Problem, got {type(problem).__name__}")
        return problem, []

    def make_config(self, clients: int) -> RunConfig:
        """The options of the run.

        Args:
            clients: How many clients there are.
        """
        preset = preset_for(preset=self.preset)
        said: dict[str, Any] = {"local_epochs": self.local_epochs, "batch_size": self.batch_size, "lr": self.lr}
        training = replace(preset.training, **{name: value for name, value in said.items() if value})
        return RunConfig(
            rounds=self.rounds or preset.rounds,
            cohort=self.cohort or min(preset.cohort, clients),
            training=training,
            seed=self.seed,
            eval_every=self.eval_every or 10,
            eval_clients=self.eval_clients or None,
            min_replies=self.min_replies or None,
            aggregation=self.aggregation,
            trim_share=self.trim_share,
            clip_norm=self.clip_norm or None,
            dp_clip=self.dp_clip or None,
            dp_noise=self.dp_noise or None,
            dp_delta=self.dp_delta or None,
            upload=self.upload,
            # A user's clients have capabilities of their own.
            capability="fixed" if self.problem else preset.capability,
            capability_levels=None if self.problem else preset.capability_levels,
        )

    def make_clients(self, ids: Iterable[int], node_config: Mapping[str, Any]) -> tuple[Problem, dict[int, Client]]:
        """The problem and the clients of a node, with their data.

        Args:
            ids: Which clients.
            node_config: Its `data-dir`, and `data`: `package.module:function` of a client id and that folder which
                returns a ClientData or a Client.

        Raises:
            InvalidValueError: the node names no data, or clients that the preset does not have.
        """
        folder = str(node_config.get("data-dir", "")) or None
        problem, roster = self.make_problem(folder)
        if not self.problem:
            dealt = {client.id: client for client in roster}
            strangers = sorted(set(ids) - set(dealt))
            if strangers:
                raise InvalidValueError(
                    f"preset {self.preset!r} has the clients 0 to {max(dealt)}, this node was given {strangers}; mend its"
                    " option `clients`"
                )
            return problem, {id: dealt[id] for id in ids}
        name = str(node_config.get("data", ""))
        if not name:
            raise InvalidValueError("a problem of your own needs the node option data='package.module:function'")
        load = load_object(name)
        found = {}
        for id in ids:
            made = load(id, folder)
            if not isinstance(made, Client | ClientData):
                raise InvalidValueError(f"{name!r} must return a ClientData or a Client, got {type(made).__name__}")
            found[id] = made if isinstance(made, Client) else Client(id=id, data=made)
        return problem, found


def client_ids(text: str) -> list[int]:
    """Ids from "3", "0-3" or "0-3,7,9".

    Raises:
        InvalidValueError: it names none, one twice, or is malformed.
    """
    ids: list[int] = []
    try:
        for part in str(text).split(","):
            low, dash, high = part.strip().partition("-")
            ids += range(int(low), int(high) + 1) if dash else [int(low)]
    except ValueError:
        raise InvalidValueError(f"clients must be ids such as 3, 0-3 or 0-3,7, got {text!r}") from None
    if not ids or len(set(ids)) != len(ids):
        raise InvalidValueError(f"clients must name at least one id, and none twice, got {text!r}")
    return ids
