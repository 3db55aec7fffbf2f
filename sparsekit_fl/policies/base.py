"""Policy: the base of the seven kinds of policies, and what several of them ask of a problem."""

from __future__ import annotations

from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph
from sparsekit_fl.client.messages import Assignment, Update
from sparsekit_fl.options.checked import Checked
from sparsekit_fl.policies.context import ServerContext
from sparsekit_fl.problem.problem import Problem


class Policy(Checked):
    """One choice of a method: a frozen dataclass of options, whose ranges are in their annotations.

    What a policy learns is in the `memory` of its context.
    """

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise, before the run starts, where the policy cannot work with this problem. The default accepts all."""

    def validate(self, ctx: ServerContext, update: Update, assignment: Assignment) -> None:
        """Raise UpdateError where this policy cannot use an update: the server then leaves it out, and nothing is changed."""


def require_accuracy(problem: Problem, who: str) -> None:
    """Raise InvalidValueError unless the problem has the metric "accuracy".

    Args:
        problem: Has the metrics.
        who: Starts the message: who needs accuracy, and for what.
    """
    if "accuracy" not in problem.metrics:
        raise InvalidValueError(
            f"{who}, and the problem has the metrics {sorted(problem.metrics)};"
            " give it one named 'accuracy', or choose another policy"
        )
