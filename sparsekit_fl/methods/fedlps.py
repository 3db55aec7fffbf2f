"""FedLPS: personal submodels, as large as a device affords.

`fedlps` is our version, with the parts that pay off in measurements. `fedlps-paper` follows the paper literally, and is plain
where the paper is silent. The authors' released code learns no pattern (no task gradient reaches its importance, which stays
sorted); that is not copied. In the ablations of the paper's Table II, one part of the paper's method is replaced, and
regularizers are means.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import sparsekit as sk
from sparsekit.allocation import mask_from_scores, ratio_counts
from sparsekit.bandit import PUCBV, Interval
from sparsekit.criteria import Criterion, Fisher, Magnitude, Ordered, Random, ScoringContext
from sparsekit.graph import StateDict, UnitMask
from sparsekit.training import GradientImportance, LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.config import Fraction, NonNegative, Ratio, option
from sparsekit_fl.layers import head_entries
from sparsekit_fl.methods.bandits import ClientBandit
from sparsekit_fl.methods.base import Method, ServerContext, Setup, Update, affordable, learn_limits, mean, offered, units
from sparsekit_fl.methods.client import Model, Result, Task, descend, keep_model, kept_model, sgd, trained_leaves
from sparsekit_fl.packing import Kept, recall_mask, remember_mask

_CRITERIA: Mapping[str, Criterion] = {"ordered": Ordered(), "magnitude": Magnitude(), "random": Random()}
_EXPLORATION = 0.5  # ρ of P-UCBV, in the released code
_IMPORTANCE_LR, _REFRESH_EVERY = 0.02, 4  # ours
_LEAST, _MOST = 32, 256  # examples that importance is computed from, and at most as many for a refit
_NOISE = 0.01  # upper end of the noise on importance that starts at the absolute target; ours: targets that round to 1 tie


def utility(accuracy: float) -> float:
    """Return u(x) = 10 − 20 / (1 + e^(0.35 x)) = 10 tanh(0.175 x) of the paper; x is a fraction, where u is nearly linear."""
    return 10.0 * math.tanh(0.175 * accuracy)


@dataclass(frozen=True, kw_only=True)
class FedLPS(Method):
    """Our FedLPS: each client trains a submodel that its device affords and keeps its own head; holders of an entry average it.

    If the network was trained before, a client chooses its units once, when it first takes part, and refits the layers that
    read dropped units on its own examples. It adds its refit R to the weights that it receives, and subtracts it from the
    weights that it sends, because R does not fit clients that keep other units. If the network is untrained, no unit is more
    important than another: all clients take the first units, half of the FLOPs that their devices afford, and train twice as
    many epochs in the same time. A client that fails by an exception of its own code is offered half of the ratio next time,
    and twice as much after each success.

    The bandit is P-UCBV, one per client, asked for a ratio within the capability. The reward of a participation is
    (U(a) − U(a⁻)) / T: training accuracy a, the accuracy a⁻ of the participation before (at first: of the global state of
    round 0), and the simulated seconds T of computing and sending both ways. The ratio that ran gets it.

    The pattern "learned": the loss is the task loss + μ‖θ − ω‖² + λ‖Q − σ(|θ|_J)‖². Importance Q stays in the client's memory
    and starts at its target; the mask follows it after every step. ‖θ − ω‖² is a mean over the entries of the whole model, the
    sum over λ's units is one. The target is the sigmoid of the absolute sums after each group's mean and deviation are removed;
    it, and the gradient from the regularizer, are recomputed at every fourth step. `fedlps-paper` has what the paper writes.

    Source: Algorithms 1 and 2 of the paper for bandit and learned pattern; ξ = R / (K · ε), and I₀, ρ, Δ are not in it. All
        else is ours.
    """

    source = "Xue et al., Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025, arXiv 2412.07216"

    uses_capability = True

    ratios: Literal["auto", "capability", "half", "bandit", "random"] | Ratio = option(
        "auto",
        'What chooses the ratio of a client, a share of the FLOPs: its "capability", "half" of that, a "bandit", '
        '"random", uniform up to the capability, or a number, the same for everybody. "auto": "capability" for a network '
        'that was trained before, else "half".',
    )
    pattern: Literal["auto", "importance", "ordered", "magnitude", "random", "learned"] = option(
        "auto",
        'Which units a client trains: those of largest "importance", the second moment of gates on its own examples; the '
        'first ones ("ordered"), those of largest "magnitude" in the received model, "random" ones, or those "learned" '
        'while it trains by the paper\'s rule. "auto": "importance" for a network that was trained before, else "ordered".',
    )
    refit: bool = option(
        True, "Whether a client refits its submodel of a network that was trained before. The passes are counted."
    )
    head: Literal["own", "shared"] = option("own", 'Whether each client keeps its "own" head, or all have a "shared" one.')
    average: Literal["holders", "all"] = option(
        "holders",
        'Whether an entry is averaged over the clients that hold it ("holders"), or over "all", as unchanged elsewhere.',
    )
    fill: bool = option(
        True, "Whether a client whose ratio is below its capability trains as many more epochs as fit into the same time."
    )
    low: Fraction = option(1 / 16, "Least ratio; the bandit's arms cover [low, 1].")
    threshold: float = option(-0.05, "Δ: if accuracy changed by less than this, the bandit eliminates smaller ratios.")
    strength: NonNegative = option(1.0, 'λ, of the pattern "learned".')
    mu: NonNegative = option(1.0, "μ, a pull towards the weights that training starts from; 0 switches it off.")
    redraw: bool | None = option(None, "Draw the clients' capabilities in every round or once; None leaves it to the run.")
    literal: bool = option(
        False,
        "Follow the paper's words where ours differ. Both regularizers are sums of squares. The target of importance is the "
        "sigmoid of the absolute sums, which is close to 1 for every unit of a wide network; a little noise on the first "
        "importance breaks ties. Target and importance are read at every step with the learning rate of the weights. T counts "
        "computation and upload. The executed ratio is credited, so with a capability that changes, its limits credit most "
        "rewards to small arms.",
    )

    def describe(self) -> dict[str, str]:
        """Return name, source and options; `redraw_capability`, an option of the run, only if the method decides it."""
        described = super().describe()
        del described["redraw"]
        return described if self.redraw is None else {**described, "redraw_capability": str(self.redraw).lower()}

    def check(self, setup: Setup) -> Setup:
        """Keep the head private, unless all share it or the model has nothing else."""
        setup.require_units("FedLPS")
        if self.ratios == "bandit":
            setup.problem.require_accuracy("FedLPS learns from training accuracy")
        layers, config = setup.layers, setup.config
        if self.redraw is not None:
            config = replace(config, redraw_capability=self.redraw)
        return replace(setup, config=config, private=head_entries(layers) if self.head == "own" and len(layers) > 1 else ())

    # On the server

    def assign(self, server: ServerContext, client_id: int) -> Task:
        metrics = ("accuracy",) if self.ratios == "bandit" else ()
        return Task(ratio=offered(server, client_id, self._ratio(server, client_id)), own_mask=True, metrics=metrics)

    def _ratio(self, server: ServerContext, client_id: int) -> float:
        capability = server.roster[client_id].capability.ratio
        rule = self.ratios if self.ratios != "auto" else "capability" if server.trained else "half"
        if isinstance(rule, float | int):
            return float(rule)
        seed = int(server.rngs["ratio"].integers(2**63 - 1))
        if rule == "random":
            return capability if capability <= self.low else float(np.random.default_rng(seed).uniform(self.low, capability))
        if rule != "bandit":
            return capability / 2 if rule == "half" else capability
        if capability < self.low:
            # No arm is that small: the client does what it can, and no bandit learns from it.
            server.client[client_id]["pull"] = None
            return capability
        upper = None if self.literal else max(self.low, offered(server, client_id, capability))
        return min(capability, self._bandit(server, client_id, seed).ask(upper=upper))

    def _bandit(self, server: ServerContext, client_id: int, seed: int = 0) -> ClientBandit:
        horizon, rng = server.rounds / server.cohort_size, np.random.default_rng(seed)
        if "bandit" in server.client[client_id]:  # cohorts may have changed since
            horizon = server.client[client_id]["bandit"]["settings"]["horizon"]
        bandit = PUCBV(Interval(self.low, 1.0), horizon=horizon, exploration=_EXPLORATION, rng=rng)
        return ClientBandit(bandit, server.client[client_id])

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        learn_limits(server, updates)
        if self.ratios == "bandit":
            for update in updates:
                self._observe(server, update)
            for client_id in server.failed:
                self._bandit(server, client_id).forget()
        return mean(server, updates, over=self.average)

    def _observe(self, server: ServerContext, update: Update) -> None:
        """Credit the ratio that ran with the utility gained per second."""
        memory = server.client[update.client_id]
        accuracy = update.metrics["accuracy"]
        before = memory.get("accuracy", update.metrics.get("initial_accuracy", accuracy))
        memory["accuracy"] = accuracy
        seconds = update.cost.seconds
        if self.literal:
            seconds -= update.cost.downlink_bytes / server.roster[update.client_id].capability.downlink_bytes_per_second
        reward = (utility(accuracy) - utility(before)) / max(seconds, 1e-9)
        eliminate: Literal["below"] | None = "below" if accuracy - before < self.threshold else None
        self._bandit(server, update.client_id).tell(reward, ran=max(update.ratio, self.low), eliminate=eliminate)

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        memory, private = client.memory, client.private
        mask = None if self.pattern == "learned" else self._mask(client, task)
        metrics = self._first(client, task.ratio, mask)
        # ‖θ − ω‖² is a sum in the paper and a mean here; its gradient has a factor of 2.
        weights = () if self.literal and mask is None else client.masked.named_weights()
        pull = 2.0 * self.mu / max(1, sum(task.state[name].numel() for name in weights))
        if mask is None:
            masked = self._load(client, task.state, task.ratio)

            def learn(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
                masked.update_importance(gradients)  # before they are clipped
                return gradients

            result = descend(client, task, trained_leaves(masked), adjusts=lambda _: [learn], pull=pull)
            result = replace(result, mask=masked.unit_mask(), metrics=metrics)
            memory["importance"] = masked.importance_vector().cpu()
            keep_model(client, result)
            return result
        kept, start, refit = Kept(client.graph, mask), dict(task.state), memory.get("refit", {})
        for name, change in refit.items():
            # The head is the client's own, and has the refit since it was chosen.
            if name not in private or memory["chosen"] == client.round:
                start[name] = task.state[name].clone()
                kept.add(name, change.to(start[name]), start[name])
        more: dict[str, Any] = {"local_epochs": self._epochs(client, task.ratio)} if self.fill else {}
        result = sgd(client, replace(task, state=start, mask=mask), pull=pull, **more)
        keep_model(client, result)
        own = {name: tensor - refit[name].to(tensor) for name, tensor in result.state.items() if name in refit.keys() - private}
        return replace(result, state={**result.state, **own}, metrics=metrics)

    def _epochs(self, client: ClientContext, ratio: float) -> int:
        """Return the number of local epochs that fit into the time of the largest submodel that the client affords."""
        graph, costs = client.graph, client.costs
        most, own = (
            costs.costs(ratio_counts(graph, client.width(share)))["flops"] for share in (client.capability.ratio, ratio)
        )
        return client.training.local_epochs * max(1, int(most / own + 0.1))

    def _mask(self, client: ClientContext, task: Task) -> UnitMask:
        """Return the units to train: as in the client's last participation if it had refitted them at the same ratio."""
        memory, refits = client.memory, self.refit and client.trained and task.ratio < 1.0
        if refits and memory.get("ratio") == task.ratio:
            mask = recall_mask(memory)
            assert isinstance(mask, UnitMask)
            return mask
        pattern = self.pattern if self.pattern != "auto" else "importance" if client.trained else "ordered"
        if pattern == "importance":
            scores = self._importance(client, task)
            mask = mask_from_scores(client.graph, scores, ratio_counts(client.graph, client.width(task.ratio)), source="Fisher")
        else:
            mask = units(client, _CRITERIA[pattern], task.ratio, task.state)
        memory.pop("refit", None)
        if refits:
            memory.update(ratio=task.ratio, chosen=client.round, refit=_refitted(client, task, mask))
            remember_mask(memory, mask)
        return mask

    def _importance(self, client: ClientContext, task: Task) -> Mapping[str, Tensor]:
        """Return the second moment of gates on the client's own examples; computed once, and counted."""
        memory, graph = client.memory, client.graph
        if "importance" not in memory:
            # Scores cost about as much as one participation at the client's ratio.
            size = client.training.local_epochs * len(client.client.data.train)
            count = min(_MOST, max(_LEAST, int(size * task.ratio)))
            client.load(task.state, None)
            context = ScoringContext(model=client.masked.compact(), weights=task.state)
            found = Fisher(_sample(client, count), client.problem.loss).scores(graph, context)
            client.scored.append(3 * count * client.costs.forward_flops(None))
            memory["importance"] = {name: scores.float().cpu() for name, scores in found.items()}
        found = memory["importance"]
        return dict(found)

    def _first(self, client: ClientContext, ratio: float, mask: UnitMask | None) -> dict[str, float]:
        """If a bandit learns from it, score a client's first submodel in the state of round 0, a⁻¹ in the paper.

        A few training examples count, for a hundredth of the FLOPs of the training, drawn by the generator of the ratio, so
        that batches are the same as in any other method. Without a mask, units are learned.
        """
        if self.ratios != "bandit" or "began" in client.memory:
            return {}
        client.memory["began"] = True
        if mask is None:
            self._load(client, client.initial_state(), ratio)
        else:
            client.load(client.initial_state(), mask)
        size = len(client.client.data.train)
        count = max(1, 3 * client.training.local_epochs * size // 100)  # a backward pass costs two forward ones
        sample = torch.from_numpy(client.rngs["ratio"].permutation(size))[:count].sort().values
        score, weight = client.score("train", positions=sample).get("accuracy", (0.0, 0.0))
        return {"initial_accuracy": score / weight} if weight else {}

    def _load(self, client: ClientContext, start: StateDict, ratio: float) -> LearnableMask:
        masked = client.masked
        rate, every = (client.training.lr, 1) if self.literal else (_IMPORTANCE_LR, _REFRESH_EVERY)
        target: Any = "absolute" if self.literal else "standardized"
        importance = client.memory.get("importance")
        rule = GradientImportance(strength=self.strength, target=target, lr=rate, refresh_every=every)
        masked.load(start, ratio=client.width(ratio), importance=importance, learning=rule)
        if importance is None and self.literal:
            targets = masked.importance_vector()
            noise = torch.from_numpy(client.rng.uniform(0.0, _NOISE, targets.numel()))
            masked.load(start, importance=targets + noise.to(targets))
        return masked

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the client's model; before its first participation, the first units that its device affords."""
        return kept_model(client) or affordable(client, state)


def _sample(client: ClientContext, count: int) -> list[tuple[Tensor, ...]]:
    """Return batches of up to `count` of the client's training examples, drawn without replacement; targets come last."""
    found, left = list[tuple[Tensor, ...]](), count
    for batch in next(iter(client.batches(epochs=1))):
        if left > 0:
            found.append((*(one[:left] for one in batch.inputs), batch.targets[:left]))
            left -= batch.size
    return found


def _refitted(client: ClientContext, task: Task, mask: UnitMask) -> dict[str, Tensor]:
    """Return how a refit on the client's own examples changes the kept weights of its submodel; the passes are counted."""
    client.load(task.state, None)
    dense, graph = client.masked.compact().eval(), client.graph
    small = sk.compact(dense, graph, mask)
    batches = _sample(client, _MOST)
    sk.reconstruct(dense, small, graph, mask, batches)
    costs, count = client.costs, sum(len(batch[-1]) for batch in batches)
    client.scored.append(count * (costs.forward_flops(None) + costs.forward_flops(mask)))
    kept, after = Kept(graph, mask), small.state_dict()
    names = [name for name in client.masked.named_weights() if name not in client.frozen]
    changes = {name: after[name].cpu() - kept.gather(name, task.state[name]).cpu() for name in names}
    return {name: change for name, change in changes.items() if change.any()}


# The variants: FedLPS with other defaults. The first are the paper's, in place of our parts.
_PAPER: dict[str, Any] = {
    "ratios": "bandit", "pattern": "learned", "refit": False, "head": "shared", "average": "all", "fill": False,
}  # fmt: skip
_RCR = {**_PAPER, "ratios": "capability"}
_ONCE: dict[str, Any] = {"redraw": False, "note": "Capabilities are drawn once, whatever the run says."}
_AGAIN: dict[str, Any] = {"redraw": True, "note": "Capabilities are drawn in every round, whatever the run says."}

fedlps_paper = FedLPS.variant("fedlps-paper", "FedLPS as the paper words it.", **_PAPER, literal=True)
flst = FedLPS.variant(
    "flst",
    "FLST: one ratio for all clients, 0.5 as in Table II.",
    note="All clients have one ratio, whatever they can do.",
    **_PAPER | {"ratios": 0.5},
)
p_ucbv_fix = FedLPS.variant("p-ucbv-fix", "P-UCBV-Fix: the paper's parts; capabilities are drawn once.", **_PAPER, **_ONCE)
p_ucbv_dyn = FedLPS.variant("p-ucbv-dyn", "P-UCBV-Dyn: the same, drawn again in every round.", **_PAPER, **_AGAIN)
rcr_fix = FedLPS.variant("rcr-fix", "RCR-Fix: ratios are the clients' capabilities, drawn once.", **_RCR, **_ONCE)
rcr_dyn = FedLPS.variant("rcr-dyn", "RCR-Dyn: ratios are capabilities, drawn again in every round.", **_RCR, **_AGAIN)
fedlps_random, fedlps_ordered, fedlps_magnitude = (
    FedLPS.variant(f"fedlps-{pattern}", f"The paper's parts, and {what}.", **_PAPER | {"pattern": pattern})
    for pattern, what in (
        ("random", "random units, drawn for each client and round"),
        ("ordered", "the first units of every layer"),
        ("magnitude", "the units of largest absolute weights in the received model"),
    )
)
