"""`ClientContext`, a method's view of a client; functions for the cost of its work, and for random numbers of both sides."""

import bisect
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from sparsekit.allocation import ratio_counts
from sparsekit.graph import StateDict, UnitGraph, UnitMask, WeightMask
from sparsekit.measure import CostModel
from sparsekit.training import LearnableMask
from sparsekit_fl.client.fit import Batches, Examples, Step, TrainingLog, evaluate, fit
from sparsekit_fl.client.messages import Cost, Request, Scores
from sparsekit_fl.config import CapabilityOf, Deploy, TrainingConfig
from sparsekit_fl.layers import Layer
from sparsekit_fl.packing import Mask
from sparsekit_fl.problem.data import CAPABILITY_LEVELS, Capability, Client
from sparsekit_fl.problem.problem import Problem

Split = Literal["train", "val", "test"]

Memory = dict[str, Any]
"""State that is kept from round to round: tensors, masks, numbers, strings, None, and lists and dicts of these."""


Use = Literal["model", "data", "server", "client", "capability", "noise", "evaluation"]
"""Parts of a run that draw random numbers. Seeds depend on this order, so a change of it changes results."""

Purpose = Literal["sampling", "ratio", "mask", "local", "share", "aggregate", "personal", "reading"]
"""Purposes of random numbers within a round. Seeds depend on this order, too."""


def stream(seed: int, use: Use, *key: int) -> np.random.Generator:
    """Return the random generator of one part of a run. `key` is the round, and for a client also its id.

    It depends only on the arguments, so every engine, order of clients and resumed run draws the same numbers.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(get_args(Use).index(use), *key)))


class Rngs(dict[str, np.random.Generator]):
    """Purpose → its generator within a stream, created on first access: creation takes time, and few are used."""

    def __init__(self, seed: int, use: Use, *key: int) -> None:
        super().__init__()
        self._made_of: tuple[Any, ...] = (seed, use, *key)

    def __missing__(self, purpose: str) -> np.random.Generator:
        self[purpose] = stream(*self._made_of, get_args(Purpose).index(purpose))
        return self[purpose]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientContext:
    """A method's view of a client.

    Args:
        round: The server round, counted from 1; for scoring, the last finished round.
        rounds: Number of rounds of the run.
        client: Id and data.
        capability: The device's capability in this round.
        problem: Model, loss, metrics.
        graph: The units of the model.
        layers: Its layers, in forward order.
        training: Options, with the learning rate of this round.
        costs: FLOPs of the model.
        masked: The narrow model of this process, its mask and importance; load it before use.
        device: Where the narrow model trains.
        rngs: Purpose → its generator for this client in this round; they draw independently.
        memory: State of the method on this client, which is kept from round to round.
        initial_state: Returns the global state of round 0.
        frozen: State-dict keys of parameters without gradient; they keep the values of round 0.
        private: State-dict keys of the entries that stay on this client from round to round.
        scored: FLOPs of each call of `score` in this round.
        levels: Ratios from which the run draws capabilities.
        capability_of: What ratios are shares of: "flops", "units" or "memory".
        deploy: Which model a client deploys; see `RunConfig.deploy`.
        request: The server's request in this round.
        trained: Whether the global state of round 0 is trained, not random.
        purpose: Purpose of the generator `rng`: "local" for training, "personal" for deployment.
    """

    round: int
    rounds: int
    client: Client
    capability: Capability
    problem: Problem
    graph: UnitGraph
    layers: tuple[Layer, ...]
    training: TrainingConfig
    costs: CostModel
    masked: LearnableMask
    device: str
    rngs: Mapping[str, np.random.Generator] = field(repr=False)
    memory: Memory
    initial_state: Callable[[], StateDict]
    frozen: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    scored: list[int] = field(default_factory=list, repr=False)
    levels: tuple[float, ...] = CAPABILITY_LEVELS
    capability_of: CapabilityOf = "flops"
    deploy: Deploy = "last"
    trained: bool = False
    purpose: Purpose = "local"
    request: Request = field(default_factory=lambda: Request(round=0, client_id=0, state={}), repr=False)
    _read: dict[str, Examples] = field(default_factory=dict, repr=False)

    @property
    def rng(self) -> np.random.Generator:
        """The generator for training, such as for batches and dropout."""
        return self.rngs[self.purpose]

    def width(self, ratio: float) -> float:
        """Return the share of units to keep in each group at a ratio, which may be a share of FLOPs."""
        return ratio if self.capability_of == "units" else width_of(self.costs, ratio, self.capability_of)

    def load(self, state: StateDict, mask: Mask | None) -> None:
        """Load a state into the narrow model, under a fixed mask.

        Args:
            state: Dense; read-only.
            mask: Units outside a unit mask are removed; with a weight mask or None, the model stays whole.
        """
        self.masked.load(state, mask=mask if isinstance(mask, UnitMask) else full(self.graph))

    def examples(self, split: Split) -> Examples:
        """Return one split of the client's data, prepared once per round.

        Raises:
            DataError: its inputs hold NaN or infinity; data that are read lazily are checked at each read.
        """
        if split not in self._read:
            self._read[split] = Examples(
                self.problem,
                getattr(self.client.data, split),
                device=self.device,
                name=f"client {self.client.id}",
                split=split,
                rng=lambda: self.rngs["reading"],
            )
        return self._read[split]

    def batches(self, *, epochs: int | None = None, batch_size: int | None = None) -> Batches:
        """Return shuffled training batches; by default with the run's settings."""
        return Batches(
            self.examples("train"),
            epochs=self.training.local_epochs if epochs is None else epochs,
            batch_size=self.training.batch_size if batch_size is None else batch_size,
            rng=self.rng,
        )

    def fit(self, batches: Batches, step: Step) -> TrainingLog:
        """Run `step`, which trains the narrow model, over `batches`; see `client.fit.fit`."""
        module, metrics, amp = self.masked.model, self.problem.metrics, self.training.amp
        return fit(module, batches, step, metrics=metrics, rng=self.rng, amp=amp, device=self.device)

    def work(self, mask: UnitMask | WeightMask | None, log: TrainingLog) -> Cost:
        """Return the cost of a fit under one mask, including further passes of the model that its log counts.

        The paper's FLOPs count every batch as full, and only once.
        """
        work = self.work_on(max(log.examples, log.passes), mask, padded_examples=log.padded_examples)
        if not log.forward_only:
            return work
        return replace(work, flops=work.flops + log.forward_only * forward_flops(self.costs, mask))

    def work_on(self, examples: int, mask: UnitMask | WeightMask | None = None, *, padded_examples: int | None = None) -> Cost:
        """Return the cost of training on some examples. The backward pass counts as two forward passes.

        A weight mask makes uploads smaller but saves no computation, so its executed FLOPs are those of the whole model.

        Args:
            examples: Number of examples, over all epochs.
            mask: The part that trains; None for the whole model.
            padded_examples: The same if every batch counts as full, for the paper's FLOPs; None: `examples`.
        """
        whole = _at(self.costs, _counts(self.costs, mask))
        # No FLOPs are spent on gradients of frozen weights.
        step = 3 * whole.forward - int(sum(flops for name, flops in whole.entries.items() if name in self.frozen))
        padded = examples if padded_examples is None else padded_examples
        return Cost(flops=step * examples, flops_paper=3 * rowmask_flops(self.costs, mask) * padded)

    def score(self, split: Split, *, positions: Tensor | None = None) -> Scores:
        """Score the narrow model on one split of this client; empty for an empty split. `scored` counts the FLOPs.

        Args:
            split: Name of the split.
            positions: int64 positions of the examples to score; None for all.
        """
        if len(getattr(self.client.data, split)) == 0:
            return {}
        examples = self.examples(split)
        count = len(examples) if positions is None else len(positions)
        self.scored.append(count * forward_flops(self.costs, self.masked.unit_mask()))
        return evaluate(self.masked.model, self.problem, examples, positions=positions)


full = functools.lru_cache(maxsize=8)(UnitMask.full)

_METRICS: Mapping[CapabilityOf, str] = {"flops": "flops", "memory": "params"}
"""What a capability is a share of → its name in the costs of a run, whose parameters are those that train."""


@functools.lru_cache(maxsize=1024)
def width_of(costs: CostModel, share: float, of: CapabilityOf = "flops") -> float:
    """Return the largest share of units, equal in all groups, at which a step costs at most `share` of a full step's FLOPs,
    or trains at most this share of the entries.

    Each group keeps at least one unit, even if that costs more.
    """
    if share == 1.0:
        return 1.0
    metric = _METRICS[of]
    limit, sizes = share * costs.dense_costs()[metric], {group.size for group in costs.graph.groups.values()}
    # The shares at which a group gets another unit.
    widths = sorted({count / size for size in sizes for count in range(1, size + 1)})
    fits = bisect.bisect_right(widths, limit, key=lambda width: costs.costs(ratio_counts(costs.graph, width))[metric])
    return widths[max(0, fits - 1)] if widths else 1.0


def share_of(costs: CostModel, mask: Mask | None, of: CapabilityOf) -> float:
    """Return the share of the whole model that a mask keeps: of the FLOPs of a step, of the entries that train, or of all
    units.

    A weight mask saves no FLOPs, so its share is that of its kept entries.
    """
    if isinstance(mask, UnitMask) and of in _METRICS:
        return _at(costs, _counts(costs, mask)).costs[_METRICS[of]] / _at(costs, _counts(costs, None)).costs[_METRICS[of]]
    if mask is None or not len(mask):
        return 1.0
    return sum(int(keep.sum()) for keep in mask.values()) / sum(keep.numel() for keep in mask.values())


def timed(cost: Cost, capability: Capability) -> Cost:
    """Return a cost with simulated seconds: the device downloads, trains, scores and uploads, one after the other."""
    scoring = cost.flops_scoring / capability.flops_per_second
    seconds = (
        cost.downlink_bytes / capability.downlink_bytes_per_second
        + cost.flops_training / capability.flops_per_second
        + cost.uplink_bytes / capability.uplink_bytes_per_second
    )
    return replace(cost, simulated_seconds=seconds + scoring, simulated_seconds_scoring=scoring)


class _Costs(NamedTuple):
    """FLOPs of one example: of a forward pass, by the row-mask convention, and by state-dict key; and the costs of a step."""

    forward: int
    rowmask: int
    entries: dict[str, float]
    costs: dict[str, float]


@functools.lru_cache(maxsize=4096)
def _at(costs: CostModel, counts: tuple[int, ...]) -> _Costs:
    """Return the costs of a submodel whose groups keep `counts` units. Clients and rounds share most submodels."""
    named = dict(zip(costs.graph.groups, counts, strict=True))
    mask = UnitMask({name: torch.arange(costs.graph.groups[name].size) < count for name, count in named.items()})
    rows = _flops(costs, costs.sizes(mask, sides=("out",)), bias=True, others=costs.other_flops)
    entries = {name: cost["flops"] for name, cost in costs.entry_costs(named).items()}
    return _Costs(costs.forward_flops(mask), rows, entries, costs.costs(named))


def _counts(costs: CostModel, mask: Mask | None) -> tuple[int, ...]:
    if isinstance(mask, UnitMask):
        found = mask.counts()
        return tuple(found[name] for name in costs.graph.groups)
    return tuple(group.size for group in costs.graph.groups.values())


def forward_flops(costs: CostModel, mask: Mask | None = None) -> int:
    """Return the FLOPs of a forward pass of one example. A weight mask saves none."""
    return _at(costs, _counts(costs, mask)).forward


def rowmask_flops(costs: CostModel, mask: Mask | None = None) -> int:
    """Return the forward FLOPs of one example by the paper's row-mask convention.

    They are (2 · nonzero weights + bias entries) per output position, and all products between activations. A UnitMask zeroes
    the rows of dropped units, a WeightMask single weights, None nothing.
    """
    if isinstance(mask, WeightMask):
        sizes = {name: int(mask[name].sum()) if name in mask else math.prod(s) for name, s in costs.graph.shapes.items()}
        return _flops(costs, sizes, bias=True, others=costs.other_flops)
    return _at(costs, _counts(costs, mask)).rowmask


def part_flops(costs: CostModel, weights: Collection[str], *, bias: bool = False) -> int:
    """Return the forward FLOPs of one example that are spent on some weights of the whole model.

    `bias` adds one per bias entry and output position, as the paper's convention does.
    """
    return _flops(costs, {name: math.prod(costs.graph.shapes[name]) for name in weights}, bias=bias)


def _flops(costs: CostModel, sizes: Mapping[str, int], *, bias: bool, others: int = 0) -> int:
    """Return the forward FLOPs of one example: per position, two for a weight entry and, with `bias`, one for a bias entry.

    `sizes`: weight key → number of entries to count. `others`: FLOPs to add, of all `costs.examples` examples together.
    """
    flops = Fraction(others)
    for term in costs.terms:
        if term.weight in sizes:
            entries = math.prod(costs.graph.shapes[term.bias]) if bias and term.bias is not None else 0
            flops += term.positions * (2 * sizes[term.weight] + entries)
    return int(flops // costs.examples)
