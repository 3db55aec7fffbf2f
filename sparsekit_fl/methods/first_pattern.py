"""The first pattern of a client on a network that was trained: units scored on its own data, the submodel reconstructed."""

import copy
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from sparsekit.allocation import make_mask
from sparsekit.criteria import ScoringContext
from sparsekit.criteria.base import score_units
from sparsekit.criteria.by_name import with_data
from sparsekit.criteria.scored import Scored
from sparsekit.finetuning import reconstruct
from sparsekit.graph import StateDict
from sparsekit.surgery import compact, expand
from sparsekit.training import ImportanceRegularizer
from sparsekit_fl.client.context import ClientContext

_BATCHES = 16


def first_pattern(
    client: ClientContext, state: StateDict, ratio: float, criterion: str, term: ImportanceRegularizer
) -> tuple[StateDict, Tensor]:
    """Score the units of the received model on the client's first batches, and refit the layers after dropped units.

    Their FLOPs are counted as those of scoring: three passes for gradients, one for the refit.

    Args:
        client: The client.
        state: The received dense state.
        ratio: Share of units kept in each group.
        criterion: Name of a criterion that reads data, such as "activation" or "fisher".
        term: Maps scores to importance as it maps magnitudes to targets.

    Returns:
        The dense state, in which kept units have the refitted weights; and importance, float (J,).
    """
    batches: Sequence[tuple[Tensor, ...]] = [
        (*batch.inputs, batch.targets) for epoch in client.batches(epochs=1) for batch in islice(epoch, _BATCHES)
    ]
    client.load(state, None)
    dense = copy.deepcopy(client.masked.model).eval()
    context = ScoringContext(weights=state, model=dense)
    found = score_units(with_data(criterion, batches, client.problem.loss), client.graph, context)
    scores = Scored(found, criterion)
    mask = make_mask(scores, client.graph, ratio, context)
    small = compact(dense, client.graph, mask)
    reconstruct(dense, small, client.graph, mask, batches)
    client.scored.append(4 * sum(len(batch[-1]) for batch in batches) * client.costs.forward_flops(None))
    vector = torch.cat([found[name].float() for name in client.graph.groups])
    importance = term.targets(vector, [group.size for group in client.graph.groups.values()])
    return expand(small.state_dict(), client.graph, mask, into=dict(state)), importance
