"""What a learnable mask saves besides the dense weights, and how it continues from there."""

from typing import Any

import torch
from torch import Tensor

from sparsekit.allocation.shares import check_ratio, ratio_counts
from sparsekit.graph.mask import UnitMask
from sparsekit.training.rule import Rule

_OWN = "sparsekit."
_RULE = f"{_OWN}rule."


def saved_entries(masked: Any, rule: Rule, prefix: str) -> dict[str, Tensor]:
    """Return the dense state under the model's own keys, all else under `sparsekit.` keys, each after `prefix`."""
    entries: dict[str, Tensor] = dict(masked.narrow_model.dense_state())
    entries.update({f"{_OWN}importance.{name}": scores for name, scores in masked.importance().items()})
    entries.update({f"{_OWN}mask.{name}": keep.clone() for name, keep in masked.narrow_model.mask.items()})
    entries[f"{_OWN}magnitudes"] = masked.vectors.unchanging_sums()
    entries[f"{_OWN}ratio"] = torch.tensor(masked.ratio, dtype=torch.float64)
    entries.update({f"{_RULE}{name}": value for name, value in rule.state().items()})
    return {prefix + name: value for name, value in entries.items()}


def load_entries(
    masked: Any, state: dict[str, Any], prefix: str, _metadata: Any, strict: bool, missing: list[str], *_rest: Any
) -> None:
    """Take what `saved_entries` made out of `state`, and leave there what torch expects of the narrow module.

    A hook of a learnable mask, called before torch loads. Dense entries that the state lacks keep their present values, and
    their keys go to `missing` if loading is strict. All keys begin with `prefix`.
    """
    own = prefix + _OWN
    dense = {}
    for name in masked.graph.shapes:
        if prefix + name in state:
            dense[name] = state.pop(prefix + name)
        elif strict:
            missing.append(prefix + name)
    present = masked.narrow_model.dense_state()
    scores, entries = masked.importance(), dict(masked.narrow_model.mask)
    for name in masked.graph.groups:
        scores[name] = state.pop(f"{own}importance.{name}", scores[name])
        entries[name] = state.pop(f"{own}mask.{name}", entries[name]).cpu()
    ratio = check_ratio(float(state.pop(f"{own}ratio", masked.ratio)))
    remembered = {name: state.pop(name) for name in [name for name in state if name.startswith(prefix + _RULE)]}
    remembered = {name.removeprefix(prefix + _RULE): value for name, value in remembered.items()}
    # State that was just loaded comes from the same checkpoint and belongs to its units already.
    following = [optimizer for optimizer in masked.optimizers if optimizer not in masked.optimizers.just_loaded]
    mask = UnitMask(entries)
    masked.narrow_model.set_mask(mask, following)
    masked.narrow_model.load({**present, **dense}, mask)
    masked.vectors.reload()
    sums = state.pop(f"{own}magnitudes", None)
    if sums is not None:
        masked.vectors.restore_sums(sums)
    masked.load_importance(scores)
    if masked.budget is None and mask.counts() == ratio_counts(masked.graph, ratio):
        masked.ratio = ratio
    else:
        masked.widths.set(mask.counts())
    masked._rule.load(masked, remembered)
    masked.mask_changed = False
    # The tensors themselves: load_state_dict(assign=True) then puts each in its own place, and optimisers keep theirs.
    state[prefix + "scores"] = masked.scores
    for name, tensor in masked.model.state_dict(keep_vars=True).items():
        state[f"{prefix}model.{name}"] = tensor
