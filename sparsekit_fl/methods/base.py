"""Method: one class per paper. Its fields are its options; it overrides what its paper changes; all defaults are FedAvg.

Before the first round, a run calls `check`. In a round:

1. The server calls `sample`, then `assign` for each client of the cohort.
2. Each of these clients calls `train`.
3. The server refuses each update that is not as the task says. A refused update changes nothing.
4. With all valid updates, the server calls `aggregate`.

To score a client, it calls `deploy`.

A method is never changed. State that must survive a round goes into `server.memory` or `client.memory`: tensors, numbers,
strings, and lists and dicts of these. What the server must remember of one client goes into `server.client[id]`, which is read
and written for the clients of a round alone. Random numbers come from `server.rngs` and `client.rngs`. This makes a run
bit-identical on every engine and after every resumption.

The types that hooks take and return, and their usual steps, can be imported from here.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from sparsekit.graph import StateDict, UnitGraph
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.messages import Update
from sparsekit_fl.methods.client import Model, Result, Task, kept_model, sgd
from sparsekit_fl.methods.server import ServerContext, Setup, drawn, mean
from sparsekit_fl.options import Checked
from sparsekit_fl.problem.problem import Problem

__all__ = [
    "ClientContext", "Method", "Model", "Problem", "Result", "ServerContext", "Setup", "StateDict", "Task", "UnitGraph",
    "Update", "mean", "sgd",
]  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A method with other `defaults` than its class, name → value; `about` is a sentence, for `note` see `Method.note`."""

    name: str
    about: str
    note: str
    defaults: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """A federated method: FedAvg, unless a subclass overrides a hook.

    A subclass is a frozen, keyword-only dataclass. The attributes `called`, `source` and `note` are set without an annotation.
    Annotated fields are its options: an annotation such as `NonNegative` or `Literal["a", "b"]` says what is allowed, and
    `option(default, "…")` what it means. The command line then takes `--set FIELD=VALUE`.

    A method can be called with options: it returns a copy of itself with these.

    Raises:
        InvalidValueError: the value of an option is not allowed.
    """

    called: ClassVar[str] = ""
    """The name in tables and in results; empty: the name of the class, in lower case. A subclass does not inherit it."""

    source: ClassVar[str] = ""
    """Where the method was published."""

    note: ClassVar[str] = ""
    """What a reader of its numbers must know, one sentence: tables print it as a footnote."""

    _variant: Variant | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._variant is not None:
            object.__setattr__(self, "note", self._variant.note)
            object.__setattr__(self, "__doc__", self._variant.about)

    @classmethod
    def variant(cls, name: str, about: str, *, note: str = "", **defaults: Any) -> Self:
        """Return a method of this class with other defaults and a name of its own."""
        return cls(**defaults, _variant=Variant(name, about, note, tuple(defaults.items())))

    def __call__(self, **options: Any) -> Self:
        return dataclasses.replace(self, **options)

    @property
    def name(self) -> str:
        """The name, with the options that differ from their defaults: `fedprox`, or `fedprox mu=0.1`. Commands take it too."""
        own = vars(type(self)).get("called") or type(self).__name__.lower()
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if self._variant is not None:
            own, defaults = self._variant.name, {**defaults, **dict(self._variant.defaults)}
        changed = [f"{name}={_text(value)}" for name, value in self.options().items() if value != defaults[name]]
        return " ".join([own, *changed])

    def options(self) -> dict[str, Any]:
        """Return field → value, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "_variant"}

    def describe(self) -> dict[str, str]:
        """Return name, source and every option as text: equal for equal methods, in any process."""
        return {"name": self.name, "source": self.source, **{name: _text(value) for name, value in self.options().items()}}

    # Before the first round

    def check(self, setup: Setup) -> Setup:
        """Return how this method runs, or raise if it cannot work with this model, problem or configuration.

        Use `dataclasses.replace` to change the model, to keep entries of the state private to each client, or to set an option
        of the run. The default changes nothing.
        """
        return setup

    # On the server

    def sample(self, server: ServerContext) -> list[int]:
        """Return the cohort of this round; by default `server.cohort_size` clients, drawn uniformly without replacement.

        Returns:
            Distinct ids out of `server.roster`; updates are added up in this order.
        """
        return sorted(drawn(list(server.roster), server.cohort_size, server.rngs["sampling"]))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return what one client of the cohort is to train, and what its update must hold; by default the whole model."""
        return Task()

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict | tuple[StateDict, float]:
        """Return the new global state, and learn from the updates; by default their mean, weighted by examples.

        Args:
            server: The server's context; `server.state` is the global state before the round, read-only.
            updates: The valid updates of the round, at least one.

        Returns:
            The state; or the state and the simulated length of the round in seconds, if it ended before its slowest client.
        """
        return mean(server, updates)

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train one client on its own data; by default SGD under the mask of the task."""
        return sgd(client, task)

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the model that a client is scored with.

        By default, that is the model of `keep_model`, or else the global one, with the client's private entries.

        Args:
            client: The client's context. Changes to its memory are not kept.
            state: The global state, dense, with the client's private entries.
        """
        return kept_model(client) or Model(state=state)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
