"""SubmodelStrategy: any Flower strategy that averages, made to send submodels and to merge what comes back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.flower.masks import KEY, narrow, record, traced, unpacked

_log = logging.getLogger(__name__)


class SubmodelStrategy(Strategy):
    """Send each client a submodel, and merge the trained submodels into the global model.

    It wraps a strategy of Flower, which still samples clients, averages metrics and, if it is one such as FedAdam, moves the
    model towards the average. HeteroFL is `SubmodelStrategy(FedAvg(...), Net(), inputs, ratio=capability_of)`, and FedLPS is
    `SubmodelStrategy(FedAvg(...), Net(), inputs, ratio=BanditRatios(...), mask="learned")`. The clients use
    `train_submodel`.

    A reply is checked before it counts: its mask, the names, shapes and finite values of its entries, and `num-examples`. A bad
    one, and a second one of the same node, is left out and logged.

    Args:
        strategy: Samples and averages; one of `flwr.serverapp.strategy` whose replies have one ArrayRecord.
        model: The model, for its shapes and units; its weights do not matter.
        example_inputs: A tensor, or a tuple of positional inputs, with which the model is called once to find its units.
        ratio: Share of units that a client trains, in (0, 1]: a number, a function of the node's id, or `BanditRatios`.
        mask: "ordered" keeps the first units of each group, "magnitude" those of largest weights in the global model, and with
            "learned" each client learns its own.
        over: Whom an entry is averaged over. "holders" are the clients that trained it, weighted by examples; an entry that
            nobody trained stays. With "all", clients without an entry count as if they had left it unchanged.

    Raises:
        InvalidValueError: an option that is not allowed.
        NoUnitsError: the model has no units that can be removed exactly.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        example_inputs: Any,
        *,
        ratio: float | Callable[[int], float] = 0.5,
        mask: Literal["ordered", "magnitude", "learned"] = "ordered",
        over: Literal["holders", "all"] = "holders",
    ) -> None:
        if mask not in ("ordered", "magnitude", "learned"):
            raise InvalidValueError(f"mask must be 'ordered', 'magnitude' or 'learned', got {mask!r}")
        if over not in ("holders", "all"):
            raise InvalidValueError(f"over must be 'holders' or 'all', got {over!r}")
        self._inner, self._model, self._mask, self._over = strategy, model, mask, over
        self._ratio = ratio if callable(ratio) else lambda _: float(ratio)
        self._graph = traced(model, example_inputs)
        self._arrays = getattr(strategy, "arrayrecord_key", "arrays")
        self._examples = getattr(strategy, "weighted_by_key", "num-examples")
        self._state: dict[str, Tensor] = {}
        self._sent: dict[int, sk.UnitMask | None] = {}

    def summary(self) -> None:
        """Log the options of this strategy and of the one inside."""
        _log.info("SubmodelStrategy: mask %s, mean over %s, around:", self._mask, self._over)
        self._inner.summary()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Send each sampled client its ratio, its mask if the server chooses it, and the entries that it trains."""
        self._state, self._sent = dict(arrays.to_torch_state_dict()), {}
        messages = []
        for message in self._inner.configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            ratio = float(self._ratio(node))
            if not 0 < ratio <= 1:
                raise InvalidValueError(f"the ratio of node {node} must be in (0, 1], got {ratio}")
            mask = self._chosen(ratio)
            content = RecordDict(dict(message.content.items()))  # the strategy may send one content to all
            if mask is not None:
                content[self._arrays] = ArrayRecord(narrow(self._model, self._state, self._graph, mask).state_dict())
            content[KEY] = record(ratio, mask, learned=self._mask == "learned")
            self._sent[node] = mask
            messages.append(Message(content, node, message.metadata.message_type))
        return messages

    def _chosen(self, ratio: float) -> sk.UnitMask | None:
        if self._mask == "learned":
            return None
        criterion = sk.criteria.Ordered() if self._mask == "ordered" else sk.criteria.Magnitude()
        return sk.make_mask(criterion, self._graph, ratio, sk.ScoringContext(weights=self._state))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the submodels; the strategy inside gets the merged model in the place of each client's."""
        good: dict[int, tuple[Message, sk.UnitMask, dict[str, Tensor]]] = {}
        failed = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                failed.append(reply)
                continue
            try:
                if node in good or node not in self._sent:
                    raise DataError("this round already has its reply, or did not ask it")
                good[node] = (reply, *self._read(node, reply.content))
            except (DataError, KeyError, TypeError, ValueError) as error:
                _log.warning("round %d continues without the update of node %d: %s", server_round, node, error)
        # In the order of nodes, so that the sums do not depend on which reply came first.
        ordered = [good[node] for node in sorted(good)]
        if ordered:
            merged = self._merged([(reply.content, mask, state) for reply, mask, state in ordered])
            arrays = ArrayRecord(merged)
            for reply, _, _ in ordered:
                self._observe(reply)
                reply.content[self._arrays] = arrays
                del reply.content[KEY]
        return self._inner.aggregate_train(server_round, [reply for reply, _, _ in ordered] + failed)

    def _observe(self, reply: Message) -> None:
        if isinstance(self._ratio, BanditRatios):
            metrics = next(iter(reply.content.metric_records.values()))
            self._ratio.tell(reply.metadata.src_node_id, metrics, float(reply.content.config_records[KEY]["seconds"]))  # type: ignore[arg-type]

    def _read(self, node: int, content: RecordDict) -> tuple[sk.UnitMask, dict[str, Tensor]]:
        """Return mask and entries of a reply.

        Raises:
            DataError: they are not those of a submodel that this node was to train.
        """
        mask, sent = unpacked(content.config_records[KEY], self._graph), self._sent[node]
        if mask is None or (sent is not None and mask != sent):
            raise DataError("its mask is not the one that it was to train")
        weight = self._weight(content)
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"{self._examples} must be a finite number > 0, got {weight}")
        state = dict(content.array_records[self._arrays].to_torch_state_dict())
        wanted = narrow(self._model, self._state, self._graph, mask).state_dict()
        if set(state) != set(wanted):
            raise DataError(f"its entries are not those of the model: {sorted(set(state) ^ set(wanted))[:5]}")
        for name, tensor in state.items():
            if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
                raise DataError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and its mask says {wanted[name].dtype}"
                    f" {tuple(wanted[name].shape)}"
                )
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise DataError(f"{name} has values that are not finite; a lower learning rate may help")
        return mask, state

    def _weight(self, content: RecordDict) -> float:
        return float(next(iter(content.metric_records.values()))[self._examples])  # type: ignore[arg-type]

    def _merged(self, replies: list[tuple[RecordDict, sk.UnitMask, dict[str, Tensor]]]) -> dict[str, Tensor]:
        before = {name: tensor.double() for name, tensor in self._state.items()}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        total, held = dict(zeros), dict(zeros)
        everybody = sum(self._weight(content) for content, _, _ in replies)
        for content, mask, state in replies:
            weight = self._weight(content)
            parts = ({name: weight * tensor.double() for name, tensor in state.items()},
                     {name: torch.full_like(tensor, weight, dtype=torch.double) for name, tensor in state.items()})  # fmt: skip
            for sums, part in zip((total, held), parts, strict=True):
                dense = sk.expand(part, self._graph, mask, into=zeros)
                sums.update({name: sums[name] + dense[name] for name in sums})
        if self._over == "all":
            total = {name: one + (everybody - held[name]) * before[name] for name, one in total.items()}
            held = {name: torch.full_like(one, everybody) for name, one in held.items()}
        return {
            name: torch.where(held[name] > 0, total[name] / held[name].clamp(min=1e-300), before[name]).to(old.dtype)
            for name, old in self._state.items()
        }

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Do as the strategy inside does: the whole global model travels, and `load_submodel` cuts it."""
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Do as the strategy inside does."""
        return self._inner.aggregate_evaluate(server_round, replies)


class BanditRatios:
    """A P-UCBV bandit per node, which learns the ratio from training accuracy gained per second.

    Args:
        rounds: Number of rounds of a node: all rounds, times the share of clients that a round samples.
        metric: Name of the training metric in the replies, in [0, 1]; large is good.
        low: Least ratio.
        high: Largest ratio.
        seed: Seed of the draws.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Algorithm 2.
    """

    def __init__(
        self, rounds: float, *, metric: str = "train_acc", low: float = 1 / 16, high: float = 1.0, seed: int = 0
    ) -> None:
        self._rounds, self._metric, self._space, self._seed = rounds, metric, sk.Interval(low, high), seed
        self._bandits: dict[int, sk.PUCBV] = {}
        self._pulls: dict[int, sk.Pull] = {}
        self._accuracy: dict[int, float] = {}

    def __call__(self, node: int) -> float:
        """Return the ratio of a node for this round. A draw without an answer is proposed again."""
        if node not in self._bandits:
            rng = np.random.default_rng([self._seed, len(self._bandits)])
            self._bandits[node] = sk.PUCBV(self._space, horizon=self._rounds, rng=rng)
        if node not in self._pulls:
            self._pulls[node] = self._bandits[node].ask()
        return self._pulls[node].value

    def tell(self, node: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Credit the ratio of a node with what its accuracy gained."""
        if self._metric not in metrics:
            raise InvalidValueError(
                f"the replies have no metric {self._metric!r}, from which the bandits learn: {sorted(metrics)}"
            )
        accuracy, pull = float(metrics[self._metric]), self._pulls.pop(node, None)
        gain = accuracy - self._accuracy.get(node, accuracy)
        self._accuracy[node] = accuracy
        if pull is not None and math.isfinite(accuracy):
            self._bandits[node].tell(pull, gain / max(seconds, 1e-9))
