"""Plan: what a Flower app was configured to run. Read from Flower's run configuration, alike on the server and on a node."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.options import Count, NonNegative, PartialOptions, parse_value
from sparsekit_fl.paper.build import Task, build_task, have_capabilities
from sparsekit_fl.paper.presets import Preset, preset_for
from sparsekit_fl.problem.clients import Client

_MANY = 10**6


class Plan(
    PartialOptions,
    offers=(TrainingConfig, RunConfig),
    without=("training", "capability_levels", "device", "capability"),
):
    """The options of a deployed run: those of `RunConfig` and `TrainingConfig`, and these.

    In Flower's run configuration, which has no none, empty text stands for what was not given.

    Args:
        method: A method by name, or `package.module:function`.
        preset: Experiment that decides model, training and, on a node, how examples are split. Empty: digits.
        dataset: A data set by name, or `package.module:factory`, as for `sparsekit run --dataset`. The factory is called on
            each node with `ids`, its clients, and `root`, its `data-dir`; on the server with no ids.
        data_dir: Folder of the data sets on the server, if the preset needs them to know the shape of the model.
        out: Folder on the server for result, records and checkpoint.
        resume: Continue the run in `out`.
        nodes: Number of SuperNodes to wait for.
        wait_seconds: How long to wait for them.
        timeout_seconds: Give up replies that take longer; zero waits.
        memory: "nodes": each keeps the memories of its clients in its `state-dir`. "server": they travel.
        allowed: TOML file on the server with a line for each SuperNode, such as `client-0 = "0-3"`: the name under which its
            key was registered, and the clients that it may have. Without it, nodes are believed.

    Raises:
        InvalidValueError: a value that is not allowed.
    """

    method: str = "fedlps"
    preset: str = ""
    dataset: str = ""
    data_dir: str = ""
    out: str = ""
    resume: bool = False
    nodes: Count = 2
    wait_seconds: NonNegative = 300.0
    timeout_seconds: NonNegative = 0.0
    memory: Literal["nodes", "server"] = "nodes"
    allowed: str = ""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.resume and not self.out:
            raise InvalidValueError("resume needs out, the folder of the run to go on with")

    @classmethod
    def _called(cls, name: str) -> str:
        return name.replace("_", "-")

    @staticmethod
    def of(run_config: Mapping[str, Any]) -> Plan:
        """The plan of Flower's run configuration, whose keys have hyphens; raises UnknownNameError and InvalidValueError."""
        known = {name.replace("_", "-"): option for name, option in Plan.table.items()}
        given = {}
        for key, value in run_config.items():
            if key not in known:
                raise UnknownNameError(f"unknown option {key!r} in the run configuration; {nearest(key, known)}")
            name = known[key].name
            if value not in ("", getattr(Plan, name)):
                given[name] = parse_value(known[key].hint, value, name=key) if isinstance(value, str) else value
        return Plan(**given)

    def to_run_config(self) -> dict[str, bool | int | float | str]:
        """The inverse of `of`."""
        values = {name: getattr(self, name) for name in self.table}
        return {name.replace("_", "-"): "" if value is None else value for name, value in values.items()}

    def make_method(self) -> Method:
        return make_method(self.method)

    def allowed_clients(self) -> dict[str, list[int]] | None:
        """Name of a SuperNode → clients that it may have, from the file `allowed`; None without it."""
        if not self.allowed:
            return None
        with Path(self.allowed).open("rb") as file:
            return {name: client_ids(text) for name, text in tomllib.load(file).items()}

    @property
    def _preset(self) -> Preset:
        return preset_for(preset=self.preset or None, dataset=self.dataset or None)

    def make_task(self, data_dir: str | None = None, ids: Collection[int] | None = None) -> Task:
        """Load problem and clients.

        Args:
            data_dir: Folder of the data sets on this machine; None: that of the option.
            ids: The clients that are wanted here, as for `build_task`.

        Raises:
            InvalidValueError: a node was given clients that the data do not have.
        """
        folder = data_dir or self.data_dir or None
        return build_task(self._preset, data_dir=None if folder is None else Path(folder), seed=self.seed or 0, ids=ids)

    def make_config(self, clients: Sequence[Client] | None = None) -> RunConfig:
        """The options of the run; of all `clients`, which a node does not know."""
        given = self.given_of(TrainingConfig, RunConfig)
        if clients is not None and have_capabilities(clients):
            given |= {"capability": "fixed", "capability_levels": None}
        return self._preset.config(given, _MANY if clients is None else len(clients))


def client_ids(text: str) -> list[int]:
    """Ids from "3", "0-3" or "0-3,7,9"; raises InvalidValueError where it names none, one twice, or is malformed."""
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
