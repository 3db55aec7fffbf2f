"""Method: one class per paper. Its fields are its options; it overrides what its paper changes; all defaults are FedAvg.

A round:

1. The server calls `sample`, then `assign` for each client of the cohort.
2. Each of these clients calls `train`.
3. The server calls `validate` for each update. A refused update changes nothing.
4. With all valid updates, the server calls `aggregate`, then `seconds`.

To score a client, it calls `deploy`. Before the first round, a run calls `prepare`, `check` and `private`.

A method is never changed. State that must survive a round goes into `server.memory` or `client.memory`: tensors, numbers,
strings, and lists and dicts of these. What the server must remember of one client goes into `server.client[id]`, which is read
and written for the clients of a round alone. Random numbers come from `server.rngs` and `client.rngs`. So a run gives the same
bits on every engine and after every resume.

The types that hooks take and return, and their usual steps, can be imported from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sparsekit.errors import NoUnitsError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.messages import Update, require_metrics
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.methods.client import Result, Task, kept_model, sgd
from sparsekit_fl.methods.server import Over, ServerContext, Weights, drawn, mean
from sparsekit_fl.options import Checked
from sparsekit_fl.problem.problem import Problem

__all__ = [
    "ClientContext", "Method", "Problem", "Result", "ServerContext", "StateDict", "Task", "UnitGraph", "Update",
    "mean", "sgd",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """A federated method: FedAvg, unless a subclass overrides a hook.

    A subclass is a frozen, keyword-only dataclass. Attributes such as `source` and `masked` are set without an annotation.
    Annotated fields are its options: an annotation such as `NonNegative` or `Literal["a", "b"]` says what is allowed, and
    `option(default, "…")` what it means. The command line then takes `--set FIELD=VALUE`.

    Raises:
        InvalidValueError: the value of an option is not allowed.
    """

    called: ClassVar[str] = ""
    """The name in tables and in results; empty: the name of the class, in lower case. A subclass does not inherit it."""

    source: ClassVar[str] = ""
    """Where the method was published."""

    note: ClassVar[str] = ""
    """What a reader of its numbers must know, one sentence: tables print it as a footnote."""

    masked: ClassVar[bool] = False
    """Whether clients may send a part of an entry; if not, such an update is refused."""

    required: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics that an update must have."""

    weights: ClassVar[Weights] = "examples"
    """How much a client counts in the mean: by its number of training examples, or all alike ("uniform")."""

    over: ClassVar[Over] = "all"
    """The clients that an entry's mean is over; see `mean`."""

    needs_units: ClassVar[bool] = False
    """Whether a model without units is refused."""

    recalibrates: ClassVar[bool] = False
    """Whether batch norm statistics are computed again from the client's own training data before a model is scored."""

    redraw_capability: ClassVar[bool | None] = None
    """Draw the clients' capabilities in every round or once, whatever the run says; None leaves it to the run."""

    @property
    def name(self) -> str:
        """The name, with the options that differ from their defaults: `fedprox`, or `fedprox mu=0.1`. Commands take it too."""
        own = vars(type(self)).get("called") or type(self).__name__.lower()
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changed = [f"{name}={_text(value)}" for name, value in self.options().items() if value != defaults[name]]
        return " ".join([own, *changed])

    def options(self) -> dict[str, Any]:
        """Return field → value, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def describe(self) -> dict[str, str]:
        """Return name, source and every option as text: equal for equal methods, in any process."""
        described = {"name": self.name, "source": self.source, **{name: _text(value) for name, value in self.options().items()}}
        # Only if a method decides it, so that a report can tell its choice from an option of the run.
        decided = self.redraw_capability
        return described if decided is None else {**described, "redraw_capability": str(decided).lower()}

    # Before the first round

    def prepare(self, problem: Problem) -> Problem:
        """Return the problem with another architecture, for a method that needs one."""
        return problem

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise if the method cannot work with this problem. The default accepts all, unless the class `needs_units`."""
        if self.needs_units and not graph.groups:
            raise NoUnitsError(
                f"the model has no units, so {type(self).__name__} has nothing to choose from;"
                " `sparsekit units` shows why; or run a method that trains the whole model"
            )

    def private(self, graph: UnitGraph) -> Collection[str]:
        """Return the state-dict keys of the entries that stay on each client from round to round; by default none.

        At first they are those of round 0.
        """
        return ()

    # On the server

    def sample(self, server: ServerContext) -> list[int]:
        """Return the cohort of this round; by default `server.cohort_size` clients, drawn uniformly without replacement.

        Returns:
            Distinct ids out of `server.roster`; updates are added up in this order.
        """
        return sorted(drawn(list(server.roster), server.cohort_size, server.rngs["sampling"]))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return what one client of the cohort is to train; by default the whole model."""
        return Task()

    def validate(self, server: ServerContext, update: Update, task: Task) -> None:
        """Refuse an update that this method cannot use.

        The default refuses partial entries, unless the class is `masked`, and an update that lacks a `required` metric.

        Keys, shapes, types and finite values were checked before.

        Args:
            server: The server's context.
            update: What the client sent.
            task: What it was asked, from `assign`.

        Raises:
            UpdateError: the update must not change anything; the round continues without this client.
        """
        if update.mask is not None and not self.masked:
            raise UpdateError(
                f"{self.name} needs whole entries, but client {update.client_id} sent masked ones; set masked = True in"
                ' the class, and aggregate with mean(over="all") (untrained entries count as unchanged) or'
                ' mean(over="holders") (mean over the clients that hold an entry)'
            )
        require_metrics(update, *self.required)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the new global state, and learn from the updates; by default their mean, by the class's `weights` and `over`.

        Args:
            server: The server's context; `server.state` is the global state before the round, read-only.
            updates: The valid updates of the round, at least one.
        """
        return mean(server, updates, weights=self.weights, over=self.over)

    def seconds(self, server: ServerContext) -> float | None:
        """Return the simulated length of the round that was just aggregated; None: until the slowest client has answered."""
        return None

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train one client on its own data; by default SGD under the mask of the task."""
        return sgd(client, task)

    def deploy(self, client: ClientContext, state: StateDict) -> Task:
        """Return the model that a client is scored with.

        By default, that is the model of `keep_model`, or else the global one, with the client's private entries.

        Args:
            client: The client's context. Changes to its memory are not kept.
            state: The global state, dense, with the client's private entries.
        """
        return kept_model(client) or Task(state=state)


def _text(value: object) -> str:
    """Return the value of an option as it is typed."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
