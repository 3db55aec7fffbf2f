"""Support layers of your own with a LayerRule: two kinds of rules in one file. Seconds, offline.

Run it with `python examples/layer_rule.py`. To test your rule like the built-in ones, inherit `sparsekit.testing.RuleContract`
and supply the rule, a network with the layer inside, and its inputs. To make a rule known wherever sparsekit is used, name its
class in the entry-point group `sparsekit.rules` of your package.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk


class GatedLinear(nn.Module):
    """A gated linear unit with one fused weight: the first half of the rows gives values, the second half their gates."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(2 * out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(2 * out_features))

    def forward(self, x: Tensor) -> Tensor:
        values, gates = F.linear(x, self.weight, self.bias).split([self.out_features, self.out_features], dim=-1)
        return values * torch.sigmoid(gates)


class GatedLinearRule(sk.LayerRule):
    """Only updates the layer's stored sizes after pruning; tracing its operators shows which rows belong together."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (GatedLinear,)

    def resize(self, module: nn.Module) -> None:
        """Set `in_features` and `out_features` from the shape of the weight."""
        assert isinstance(module, GatedLinear)
        module.out_features, module.in_features = module.weight.shape[0] // 2, module.weight.shape[1]


class Centred(nn.Module):
    """Scales each feature and subtracts its median over time, by an operator that sparsekit does not support."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(0.5 + torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.gain
        return scaled - scaled.nanmedian(dim=1, keepdim=True).values


class CentredRule(sk.LayerRule):
    """Describes the layer in place of its operators: gain j scales feature j, which is output j."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (Centred,)

    def resize(self, module: nn.Module) -> None:
        """Do nothing, since the layer stores no sizes."""

    def trace(
        self,
        tracer: sk.layers.Tracer,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Tie each feature to its gain as one unit, which the gain produces."""
        assert isinstance(module, Centred)
        out = run(*args, **kwargs)
        entering, gain = tracer.labels(args[0]), tracer.labels(module.gain)
        units, own = entering.axes[-1], gain.axes[0]
        if units is None or own is None:  # raw inputs, or a single feature
            tracer.fix(entering, "no units reach the layer")
            tracer.fix(gain, "no units reach the layer")
            return out
        tracer.unite(units.nodes, own.nodes)
        tracer.make(gain, 0)
        tracer.set(out, sk.layers.TensorLabels((None, None, own)))
        return out


RULES: dict[type[nn.Module], sk.LayerRule] = {GatedLinear: GatedLinearRule(), Centred: CentredRule()}


def make_model() -> nn.Module:
    """Return both layers between ordinary ones, for inputs (batch, time, features)."""
    return nn.Sequential(nn.Linear(6, 32), Centred(32), GatedLinear(32, 24), nn.Linear(24, 4))


def main() -> None:
    """Trace without the rules and with them, prune, and compare outputs."""
    torch.manual_seed(0)
    model, x = make_model().eval(), torch.randn(8, 16, 6)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = dict(sk.trace_units(model, x).fingerprint())
        except sk.errors.NoUnitsError:
            found = {}
    print(f"without the rules: groups {found}")
    for warning in caught:
        print(f"  {str(warning.message).splitlines()[0][:110]}")

    graph = sk.trace_units(model, x, rules=RULES)
    print(f"with the rules: groups {dict(graph.fingerprint())}")
    context = sk.ScoringContext(weights=model.state_dict())
    mask = sk.allocation.make_mask(sk.criteria.Magnitude(), graph, 0.25, context)
    small = sk.compact(model, graph, mask, rules=RULES)
    print(f"compact: {small[2].in_features} features in and {small[2].out_features} out of the gated layer")
    with torch.no_grad():
        gated = graph.gate(model.state_dict(), {name: keep.float() for name, keep in mask.items()})
        gap = float((torch.func.functional_call(model, gated, (x,)) - small(x)).abs().max())
    print(f"gated and compact outputs differ by at most {gap:.1e}")


if __name__ == "__main__":
    main()
