"""FedLPS: all clients train one network, each a nested submodel as large as its device can run.

This is our version, with the parts that pay off in measurements. `FedLPSPaper` follows the paper.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparsekit.allocation import mask_from_scores, ratio_counts
from sparsekit.criteria import Magnitude, Ordered, ScoringContext
from sparsekit.graph import StateDict, UnitGraph, UnitMask
from sparsekit_fl.client.context import ClientContext, forward_flops, rowmask_flops
from sparsekit_fl.client.fit import Batch
from sparsekit_fl.client.messages import Cost
from sparsekit_fl.config import option
from sparsekit_fl.layers import head_entries
from sparsekit_fl.methods.base import Method, ServerContext, Setup, Update, learn_limits, mean, offered
from sparsekit_fl.methods.client import Model, Result, Task, narrower, sgd
from sparsekit_fl.packing import Kept

_APART = 0.05  # if a larger share of the variance of labels is between clients, each client has its own head


@dataclass(frozen=True, kw_only=True)
class FedLPS(Method):
    """Our FedLPS: each client trains the first units of an order that all clients share, as many as its device can run.

    The server fixes the order of units before round 1: by magnitude if the network is already trained, else by index. So
    submodels are nested, and a device receives and sends only its submodel. In each step, a client also trains a narrower
    submodel inside its own, whose level is drawn uniformly from the smaller levels of the run. Each entry is averaged over its
    holders, and batch norm statistics over the clients of a level.

    If the label distributions of clients differ, each client keeps its own head. The heads are also averaged into the server's
    head, from which new clients start. A client deploys the newest global entries of its submodel, with its own head.

    If a client's code raises an exception, it is offered a smaller ratio, and from time to time a larger one; see `offered`.

    Source: the order is HeteroFL's (Diao, Ding, Tarokh, ICLR 2021), a narrower level in each step is like the sandwich rule of
        Yu, Huang, Universally Slimmable Networks, ICCV 2019. From the paper are personal heads, and submodels by capability.
    """

    source = "after Xue et al., Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025, arXiv 2412.07216"

    uses_capability = True

    order: Literal["auto", "magnitude", "given"] = option(
        "auto",
        'Which units come first: those of largest "magnitude" in the network of round 0, or those of lowest index in their '
        'layer ("given"). "auto": "magnitude" for a network that is already trained, else "given".',
    )
    nested: bool = option(
        True, "Whether each step also trains a narrower submodel, of a random level. It costs about a quarter more FLOPs."
    )
    head: Literal["auto", "own", "shared"] = option(
        "auto",
        'Whether each client keeps its "own" head, or all have a "shared" one. "auto": own heads where the labels of '
        "clients differ. Each client then reports how often each label occurs in its training data, once.",
    )

    def check(self, setup: Setup) -> Setup:
        setup.require_units("FedLPS")
        return setup

    # On the server

    def offer(self, server: ServerContext, client_id: int) -> Task:
        ratio = offered(server, client_id, server.roster[client_id].capability.ratio)
        order = self._order(server)
        own = self.head == "own" or (self.head == "auto" and server.memory.get("apart", 0.0) > _APART)
        extra = {"order": order, "own head": torch.tensor(own)}
        return Task(mask=None if ratio == 1.0 else _first(server, order, ratio), ratio=ratio, extra=extra)

    def assign(self, server: ServerContext, client_id: int) -> Task:
        task, labels = self.offer(server, client_id), _labels(server)
        if self.head != "auto" or not labels or "told" in server.client[client_id]:
            return task
        wanted = {"labels": torch.zeros(labels, dtype=torch.float64)}
        return replace(task, extra={**task.extra, **wanted}, returns=wanted)

    def _order(self, server: ServerContext) -> Tensor:
        """Return the importance that orders the units, float (units,), over all groups; it is computed in the first round."""
        if "order" not in server.memory:
            by = Magnitude() if self.order == "magnitude" or (self.order == "auto" and server.trained) else Ordered()
            found = by.scores(server.graph, ScoringContext(weights=server.state))
            server.memory["order"] = torch.cat([found[name].float().cpu() for name in server.graph.groups])
        order: Tensor = server.memory["order"]
        return order

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        learn_limits(server, updates)
        for update in updates:
            if "labels" in update.extra:
                _hear(server.memory, update.extra["labels"])
                server.client[update.client_id]["told"] = True
                server.memory["apart"] = _apart(server.memory)
        return mean(server, updates, over="holders")

    # On a client

    def train(self, client: ClientContext, task: Task) -> Result:
        head = head_entries(client.layers) if len(client.layers) > 1 else ()
        start = {**task.state, **self._head(client, task.extra)}
        labels, batches = task.extra.get("labels"), client.batches()
        levels = sorted({level for level in client.levels if level < task.ratio}) if self.nested else []
        numbers = client.rng.integers(len(levels), size=batches.steps).tolist() if levels else ()
        runs = {number: self._run(client, task, start, levels[number]) for number in sorted(set(numbers))}
        drawn = iter(numbers)
        module, loss_of, counts, spent = client.masked.model, client.problem.loss, labels, [0, 0]

        def forward(batch: Batch) -> tuple[Any, Tensor]:
            nonlocal counts
            if counts is not None:
                counts = counts + _counted(batch.targets, len(counts))
            outputs = module(*batch.inputs)
            loss = loss_of(outputs, batch.targets)
            if runs:
                flops, paper, run = runs[next(drawn)]
                spent[0] += flops * batch.size
                spent[1] += paper * batch.size
                more = loss_of(run(batch), batch.targets)
                loss = loss + (more - more.detach())  # report the loss of the whole submodel only
            return outputs, loss

        result = sgd(client, replace(task, state=start), batches=batches, forward=forward)
        client.memory["head"] = Kept(client.graph, task.mask).scatter_all({name: result.state[name] for name in head}, start)
        extra = {} if counts is None else {"labels": counts / client.training.local_epochs}
        log = result.log
        work = client.work_on(log.examples, result.mask, padded_examples=log.padded_examples)
        work += Cost(flops=spent[0], flops_paper=spent[1])
        return replace(result, extra=extra, work=work)

    def _run(
        self, client: ClientContext, task: Task, start: StateDict, level: float
    ) -> tuple[int, int, Callable[[Batch], Any]]:
        """Return a narrower level: FLOPs of training on an example, FLOPs by the paper's count, and a forward function."""
        mask = _first(client, task.extra["order"], level)
        run = narrower(client, start, task.mask if isinstance(task.mask, UnitMask) else None, mask)
        return 3 * forward_flops(client.costs, mask), 3 * rowmask_flops(client.costs, mask), run

    def _head(self, client: ClientContext, extra: Mapping[str, Tensor]) -> StateDict:
        own: StateDict = client.memory.get("head", {}) if "own head" in extra and bool(extra["own head"]) else {}
        return own

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        asked = client.request
        return Model(state={**state, **self._head(client, asked.extra)}, mask=asked.mask, ratio=asked.ratio)


def _first(side: ServerContext | ClientContext, order: Tensor, ratio: float) -> UnitMask:
    """Return the mask of the units that come first in `order`, at a ratio."""
    return _first_units(side.graph, order.numpy().tobytes(), side.width(ratio))


@functools.lru_cache(maxsize=64)
def _first_units(graph: UnitGraph, order: bytes, width: float) -> UnitMask:
    """Return the mask of the units that come first. Clients and rounds share the few masks of a run."""
    parts = torch.frombuffer(bytearray(order), dtype=torch.float32).split([group.size for group in graph.groups.values()])
    scores = dict(zip(graph.groups, parts, strict=True))
    return mask_from_scores(graph, scores, ratio_counts(graph, width), source="the order")


def _labels(server: ServerContext) -> int:
    """Return the number of labels, which is the number of outputs of the head; 0 if the head has no weights."""
    weights = server.layers[-1].weights if server.layers else {}
    return max((shape[0] for shape in weights.values()), default=0)


def _counted(targets: Any, labels: int) -> Tensor:
    """Return how often each label occurs, float64 (labels,); zeros where targets are not labels."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        return torch.zeros(labels, dtype=torch.float64)
    flat = targets.reshape(-1).cpu().long()
    return torch.bincount(flat[(flat >= 0) & (flat < labels)], minlength=labels).double()


def _hear(memory: dict[str, Any], counts: Tensor) -> None:
    """Add the label counts of a client to the sums for `_apart`."""
    counts = counts.clamp(min=0)
    total, squares = counts.sum(), counts.square().sum()
    sums = {"counts": counts, "squares": squares, "alike": squares - total, "pairs": total * (total - 1), "own": total.square()}
    before = memory.get("labels", {})
    memory["labels"] = {name: before.get(name, 0.0) + value for name, value in sums.items()}


def _apart(memory: Mapping[str, Any]) -> float:
    """Return the between-client share of the variance of labels: about 0 if all have the same distribution.

    If w is the probability that two labels of one client are equal, and b that two labels of different clients are, it is
    (w − b) / (1 − b). If each client's label distribution is drawn from a Dirichlet distribution whose parameters sum to a, it
    is 1 / (a + 1).

    Source: the fixation index of Wright, The genetical structure of populations, Annals of Eugenics 15, 1951, estimated as by
        Hudson, Slatkin, Maddison, Genetics 132, 1992.
    """
    if "labels" not in memory:
        return 0.0
    found = memory["labels"]
    others = found["counts"].sum().square() - found["own"]  # pairs of labels of different clients
    if others <= 0 or found["pairs"] <= 0:
        return 0.0
    within, between = found["alike"] / found["pairs"], (found["counts"].square().sum() - found["squares"]) / others
    return float((within - between) / (1.0 - between).clamp(min=1e-12))
