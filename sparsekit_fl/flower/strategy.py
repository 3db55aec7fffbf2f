"""`SubmodelStrategy` wraps a Flower strategy that averages: it sends submodels, and merges the trained ones."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

import sparsekit as sk
from sparsekit.allocation import check_ratio
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import StateDict
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.messages import Cost, Request, Update
from sparsekit_fl.flower.client import KEY, arrays_of, mask_record, read_mask, traced, unpacked
from sparsekit_fl.methods.bandits import ClientBandit
from sparsekit_fl.methods.base import Over, mean_change, moved
from sparsekit_fl.methods.client import Task
from sparsekit_fl.packing import Kept
from sparsekit_fl.server import check

_log = logging.getLogger(__name__)
_METRICS = "metrics"
_MOST_EXAMPLES = 1e15  # per client, so that sums stay finite


class SubmodelStrategy(Strategy):
    """Send each client a submodel, and merge the trained submodels into the global model.

    It wraps a strategy of Flower, which still samples clients and averages metrics; a strategy such as FedAdam also moves the
    model towards the average. HeteroFL is `SubmodelStrategy(FedAvg(...), Net(), inputs, ratio=capability_of)`, and FedLPS is
    `SubmodelStrategy(FedAvg(...), Net(), inputs, ratio=BanditRatios(...), learned=True)`. The clients use `train_submodel`.

    A reply is checked before it is used: its mask, the names, shapes and finite values of its entries, and `num-examples`.
    Invalid replies, and second replies of a node, are left out and logged.

    Args:
        strategy: Samples and averages; one of `flwr.serverapp.strategy` whose messages have one ArrayRecord.
        model: The model, for its shapes and units; its weights do not matter.
        example_inputs: A tensor, or a tuple of positional inputs. The model is called with them once, to find its units.
        ratio: Share of units that a client trains, in (0, 1]: a number, a function of the node's id, or `BanditRatios`.
        learned: False: each client trains the first units of each group, and an entry becomes the mean over the clients that
            trained it, weighted by examples; an entry that no client trained stays unchanged. True: each client learns its own
            mask, and the mean is over all clients; those without an entry count as if they had left it unchanged.

    Raises:
        NoUnitsError: the model has no units that can be removed exactly.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        example_inputs: Any,
        *,
        ratio: float | Callable[[int], float] = 0.5,
        learned: bool = False,
    ) -> None:
        self._inner, self._learned = strategy, learned
        self._ratio = ratio if callable(ratio) else lambda _: ratio
        self._graph = traced(model, example_inputs)
        self._examples = getattr(strategy, "weighted_by_key", "num-examples")
        self._state: StateDict = {}
        self._sent: dict[int, Request] = {}
        self._name = ""  # name of the ArrayRecord in messages

    def summary(self) -> None:
        """Log the options of this strategy and of the wrapped one."""
        _log.info("SubmodelStrategy: masks are %s, around:", "learned" if self._learned else "ordered")
        self._inner.summary()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Send each sampled client its ratio, and the submodel with its mask; if clients learn masks, the whole model."""
        self._state, self._sent = dict(arrays.to_torch_state_dict()), {}
        messages = []
        for message in self._inner.configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            ratio, mask = check_ratio(self._ratio(node)), None
            content = RecordDict(dict(message.content.items()))  # a copy, since messages may share one content
            content[KEY] = ConfigRecord({"ratio": ratio})
            (self._name,) = content.array_records
            if not self._learned:
                context = sk.ScoringContext(weights=self._state)
                mask = sk.allocation.make_mask(sk.criteria.Ordered(), self._graph, ratio, context)
                content[self._name] = arrays_of(Kept(self._graph, mask).gather_all(self._state))
                content[KEY] = mask_record(mask, ratio=ratio)
            self._sent[node] = Request(round=server_round, client_id=node, state={}, mask=mask, ratio=ratio)
            messages.append(Message(content, node, message.metadata.message_type))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the submodels, and pass the wrapped strategy the merged model in place of each client's model."""
        good: dict[int, tuple[Message, Update, MetricRecord]] = {}
        failed = []
        for reply in replies:
            if reply.has_error():
                failed.append(reply)
                continue
            node = reply.metadata.src_node_id
            with _left_out(node, server_round):
                if node in good or node not in self._sent:
                    raise DataError("this round already has its reply, or did not ask it")
                good[node] = (reply, *self._read(self._sent[node], reply.content))
        alike = _alike({node: metrics for node, (*_, metrics) in good.items()}, server_round)
        # In the order of nodes, so that the sums do not depend on which reply came first.
        ordered = [good[node] for node in sorted(alike)]
        updates, weights = [update for _, update, _ in ordered], [float(metrics[self._examples]) for *_, metrics in ordered]  # type: ignore[arg-type]
        over: Over = "all" if self._learned else "holders"
        arrays = arrays_of(moved(self._state, mean_change(self._graph, self._state, updates, weights=weights, over=over)))
        for reply, update, metrics in ordered:
            if isinstance(self._ratio, BanditRatios):
                self._ratio.tell(update.client_id, metrics, update.cost.seconds)
            reply.content = RecordDict({self._name: arrays, _METRICS: metrics})
        return self._inner.aggregate_train(server_round, [reply for reply, *_ in ordered] + failed)

    def _read(self, request: Request, content: RecordDict) -> tuple[Update, MetricRecord]:
        """Return the update in a reply, and its metrics; raise an error if they do not fit the request."""
        (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
        record, weight = content.config_records[KEY], float(metrics[self._examples])  # type: ignore[arg-type]
        mask = read_mask(record, self._graph)
        if request.mask not in (None, mask):
            raise DataError("its mask differs from the requested mask")
        if not 0 < weight < _MOST_EXAMPLES:
            raise DataError(f"{self._examples} must be a finite number > 0, got {weight}")
        if isinstance(self._ratio, BanditRatios):
            self._ratio.check(metrics)
        kept = Kept(self._graph, mask)
        state = unpacked(arrays, {name: kept.shape(name) for name in self._state})
        cost = Cost(simulated_seconds=float(record["seconds"]))  # type: ignore[arg-type]
        update = Update(round=request.round, client_id=request.client_id, examples=1, delta=state, mask=mask, cost=cost)
        check(update, request, self._graph, self._state, Task(mask=request.mask, own_mask=True), examples=1)
        # `check` above has validated shapes and values of the state; aggregation needs the change.
        sent = kept.gather_all(self._state)
        change = {name: tensor.double() - sent[name].double() for name, tensor in state.items()}
        return replace(update, delta=change), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate with the wrapped strategy the evaluation replies whose metrics have the same names."""
        good, failed = dict[int, Message](), list[Message]()
        for reply in replies:
            if reply.has_error():
                failed.append(reply)
                continue
            with _left_out(node := reply.metadata.src_node_id, server_round):
                (metrics,) = reply.content.metric_records.values()
                if node in good or not 0 < float(metrics.get(self._examples, 1)) < _MOST_EXAMPLES:  # type: ignore[arg-type]
                    raise DataError(f"it is a second one, or its {self._examples} is not a finite number > 0")
                reply.content = RecordDict({_METRICS: metrics})
                good[node] = reply
        alike = _alike({node: reply.content.metric_records[_METRICS] for node, reply in good.items()}, server_round)
        return self._inner.aggregate_evaluate(server_round, [good[node] for node in sorted(alike)] + failed)


@contextmanager
def _left_out(node: int, round: int) -> Iterator[None]:
    """Log any error in the reply of a node, and continue without the reply."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - an untrusted reply can raise any exception
        _log.warning("round %d continues without the reply of node %d: %s: %s", round, node, type(error).__name__, error)


def _alike(found: Mapping[int, MetricRecord], round: int) -> set[int]:
    """Return the nodes whose metrics have the most common names and lengths; Flower's strategies fail on mixed ones."""
    kinds = {
        node: tuple(sorted((name, len(value) if isinstance(value, list) else -1) for name, value in found[node].items()))
        for node in sorted(found)
    }
    usual = Counter(kinds.values()).most_common(1)
    for node, kind in kinds.items():
        with _left_out(node, round):
            if kind != usual[0][0]:
                raise DataError("its metrics have other names or lengths than most nodes have")
    return {node for node, kind in kinds.items() if kind == usual[0][0]}


class BanditRatios:
    """A P-UCBV bandit per node, which learns the ratio from training accuracy gained per second.

    Args:
        rounds: Expected number of rounds of a node: all rounds, times the share of clients that a round samples.
        metric: Name of the training metric in the replies, in [0, 1]; higher is better.
        low: Smallest ratio.
        high: Largest ratio.
        seed: Seed of the random draws.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Algorithm 2.
    """

    def __init__(
        self, rounds: float, *, metric: str = "train_acc", low: float = 1 / 16, high: float = 1.0, seed: int = 0
    ) -> None:
        self._rounds, self._metric, self._space, self._seed = rounds, metric, sk.bandit.Interval(low, high), seed
        self._memory: dict[int, Memory] = {}

    def __call__(self, node: int) -> float:
        """Return the ratio of a node for this round. A ratio without a reply is proposed again."""
        return self._bandit(node).ask()

    def _bandit(self, node: int) -> ClientBandit:
        bandit = sk.bandit.PUCBV(self._space, horizon=self._rounds, rng=np.random.default_rng([self._seed, node]))
        return ClientBandit(bandit, self._memory.setdefault(node, {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all bandits as JSON values. Save it with the model to resume a run."""
        return {str(node): dict(memory) for node, memory in self._memory.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `state_dict`; the same ratios follow as without interruption."""
        self._memory = {int(node): dict(memory) for node, memory in state.items()}

    def check(self, metrics: Mapping[str, Any]) -> float:
        """Return the accuracy in the metrics of a reply; raise InvalidValueError if it is missing or not a finite number."""
        found = metrics.get(self._metric)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise InvalidValueError(
                f"the bandits learn from the metric {self._metric!r}, a finite number; the reply has {dict(metrics)}"
            )
        return float(found)

    def tell(self, node: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Credit the ratio of a node with the gain in accuracy per second."""
        accuracy, bandit, memory = self.check(metrics), self._bandit(node), self._memory[node]
        bandit.tell((accuracy - memory.get("accuracy", accuracy)) / max(seconds, 1e-9))
        memory["accuracy"] = accuracy
