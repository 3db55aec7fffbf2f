"""measure_sensitivity(): what narrowing each group alone does to a model."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.allocation.choose import choose
from sparsekit.allocation.shares import check_ratio, keep_count
from sparsekit.criteria.base import check_scores
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.clock import evaluated
from sparsekit.progress import track
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.inputs import find_tensors

SHARES = (0.75, 0.5, 0.25)
"""Shares of the units of a group at which it is measured."""


def output_error(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[nn.Module], float]:
    """A score that needs no data: minus the relative change of the outputs on example inputs.

    Args:
        model: The dense model.
        args: Positional inputs, at best real ones.
        kwargs: Keyword inputs.

    Returns:
        Model → −‖outputs − dense outputs‖ / ‖dense outputs‖, in eval mode; 0 for the dense model.
    """

    def run(module: nn.Module) -> Tensor:
        with torch.no_grad(), evaluated(module):
            return torch.cat([t.double().reshape(-1) for t in find_tensors(module(*args, **kwargs)) if t.is_floating_point()])

    dense = run(model)
    return lambda small: -float((run(small) - dense).norm() / dense.norm().clamp_min(1e-30))


def measure_sensitivity(
    model: nn.Module,
    graph: UnitGraph,
    scores: Mapping[str, Tensor],
    evaluate: Callable[[nn.Module], float],
    *,
    shares: Sequence[float],
    known: Collection[str] = (),
    progress: bool = False,
) -> Iterator[tuple[str, tuple[tuple[float, float], ...]]]:
    """Narrow each group alone to some shares of its units, and measure by how much the model gets worse.

    `dict(measure_sensitivity(...))` is the table of the allocation `Sensitivity`.

    Args:
        model: The dense model; not changed.
        graph: Its units.
        scores: Group name → float (units,): which units of a group go first.
        evaluate: Scores a model; larger is better, such as accuracy on validation data.
        shares: Shares of the units that stay, each in (0, 1].
        known: Names of groups that are not measured again, since an earlier run has been there.
        progress: Whether to draw a progress bar on stderr.

    Yields:
        The name of a group and its pairs (share kept, score of the dense model − score), from the widest on, as soon as it is
        measured. Of tied groups, which are narrowed together, the first one.

    Raises:
        InvalidValueError: a share outside (0, 1], or scores that do not fit the graph or hold NaN.
    """
    check_scores(graph, scores, "scores")
    for share in shares:
        check_ratio(share)
    if not shares:
        raise InvalidValueError("sensitivity needs at least one share to measure at, such as 0.5")
    dense = evaluate(model)
    full = {name: group.size for name, group in graph.groups.items()}
    for groups in track(graph.tied_sets, "Measuring groups", show=progress):
        if groups[0] in known:
            continue
        pairs = []
        for share in sorted(set(shares), reverse=True):
            counts = {**full, **{group: keep_count(share, graph.groups[groups[0]].size) for group in groups}}
            small = compact(model, graph, choose(graph, scores, counts))
            pairs.append((float(share), dense - evaluate(small)))
        yield groups[0], tuple(pairs)
