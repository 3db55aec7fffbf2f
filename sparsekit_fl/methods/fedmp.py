"""FedMP: a bandit per client picks its ratio, the server prunes the global model by magnitude and restores it afterwards.

Jiang, Xu, Xu, Wang, Qiao, Zhao: FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge Computing,
ICDE 2022. Its bandit is E-UCB. Its synchronisation, R2SP, adds to each submodel the residual that was pruned and takes
the mean, which is the mean over all clients with equal weights. FedMP prunes shares of filters by their L1 norm; a ratio here
is the share that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from sparsekit.bandit import EUCB, Interval, Pull
from sparsekit.criteria import Criterion, Magnitude
from sparsekit.graph import StateDict
from sparsekit_fl.client.messages import Update, require_metrics
from sparsekit_fl.methods.context import ServerContext
from sparsekit_fl.methods.means import Over
from sparsekit_fl.methods.submodels import Submodels
from sparsekit_fl.methods.task import Task
from sparsekit_fl.options import Fraction, Hint, Positive, Ratio


@dataclass(frozen=True, kw_only=True)
class FedMP(Submodels):
    """Magnitude pruning by the server at the ratio of each client's E-UCB; the residual stays as it was.

    The bandits, in the server's memory, learn ratios that finish with the others. The reward of a participation is the decrease
    of the client's training loss since the one before, over the relative gap |T − T̄| / T̄ between its simulated seconds and the
    mean of the round. The paper divides by |T − T̄| itself, whose scale depends on the devices while the index of the bandit
    has none; we have its reward from other descriptions of the paper, so this form is ours where they are silent. A first
    participation has nothing to compare with and is not credited.

    Args:
        low: Least ratio; 0.2 in the comparison of Xue et al., ICDE 2025.
        capped: Never exceed the client's capability. Off in the paper: a ratio that is too large for a client makes it
            late, and its bandit learns from that.
        floor: Least relative gap, so that finishing exactly on time does not give an infinite reward; ours.
        discount: λ of E-UCB; its other settings are those of `EUCB`.

    Source: Jiang et al., ICDE 2022, algorithm E-UCB.
    """

    source: ClassVar[str] = "Jiang et al., FedMP, ICDE 2022"
    note: ClassVar[str] = (
        "Unless they are capped, its ratios may exceed what a client can do; slowness, not a limit, keeps them low."
    )
    over: ClassVar[Over] = "all"

    low: Annotated[Fraction, Hint("the arms cover [low, 1]")] = 0.2
    capped: bool = False
    floor: Positive = 0.1
    discount: Annotated[Ratio, Hint("1 forgets nothing")] = 0.98

    def criterion(self) -> Criterion:
        """Return the L1 norm of the weights."""
        return Magnitude()

    def _bandit(self, memory: Mapping[str, Any], *, seed: int) -> EUCB:
        bandit = EUCB(Interval(self.low, 1.0), discount=self.discount, rng=np.random.default_rng(seed))
        if "bandit" in memory:
            bandit.load_state_dict(memory["bandit"])
        return bandit

    def ratio_of(self, server: ServerContext, client_id: int) -> float:
        """Draw a ratio for this client. A draw without an answer is proposed again."""
        memory = server.memory.setdefault(str(client_id), {})
        seed = int(server.rngs["ratio"].integers(2**63 - 1))
        if memory.get("pull") is None:
            bandit = self._bandit(memory, seed=seed)
            pull = bandit.ask()
            memory["pull"] = [pull.id, pull.value]
            memory["bandit"] = bandit.state_dict()
        drawn = float(memory["pull"][1])
        return min(drawn, server.roster[client_id].capability.ratio) if self.capped else drawn

    def validate(self, server: ServerContext, update: Update, task: Task) -> None:
        """Refuse an update without a loss."""
        super().validate(server, update, task)
        require_metrics(update, "loss")

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean, and credit each client's ratio."""
        mean = sum(update.cost.seconds for update in updates) / len(updates)
        for update in updates:
            memory = server.memory[str(update.client_id)]
            pull = Pull(*memory["pull"])
            bandit = self._bandit(memory, seed=0)
            loss, before = update.metrics["loss"], memory.get("loss")
            if before is None:
                bandit.forget(pull)
            else:
                gap = abs(update.cost.seconds - mean) / max(mean, 1e-12)
                bandit.tell(pull, (before - loss) / max(gap, self.floor))
            memory.update(bandit=bandit.state_dict(), pull=None, loss=loss)
        return super().aggregate(server, updates)
