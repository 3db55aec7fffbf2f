"""The ablations of FedLPS: one of its parts is replaced, everything else is FedLPS.

Xue et al., ICDE 2025 (arXiv 2412.07216), Table II and the comparison of sparse patterns. FLST replaces the bandit by one
ratio for everybody, RCR by the capability of the client; "fix" and "dyn" draw that capability once or in every round.
Three variants replace the learned criterion. In the paper's comparison of patterns all clients have one ratio, and
heuristic patterns are scored with the global model while the learned one is scored with the personal model; here every
variant reports both, and `ratio` gives all clients the same. `whole` says which FedLPS a part is taken from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from sparsekit.criteria import Criterion, Magnitude, Ordered, Random
from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.packing import Mask
from sparsekit_fl.methods.fedlps import fedlps, fedlps_own
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import ByCapability, Constant, LearnableSgd, LocalPolicy, LocalResult, Sgd, UnitCriterion
from sparsekit_fl.policies.local import initial_accuracy, with_epochs

Whole: TypeAlias = Literal["fedlps", "fedlps-own"]
"""The method that an ablation replaces a part of."""

_FIX = "Capabilities are drawn once, whatever the run says."
_DYN = "Capabilities are drawn anew in every round, whatever the run says."


def _ablation(name: str, whole: Whole) -> Method:
    """The whole method under the name of an ablation, such as `flst`; of fedlps-own it is `own-flst`."""
    methods = {"fedlps": fedlps, "fedlps-own": fedlps_own}
    if whole not in methods:
        raise InvalidValueError(f"whole must be one of {', '.join(methods)}, got {whole!r}")
    return replace(methods[whole](), name=name if whole == "fedlps" else f"own-{name}")


def flst(ratio: float = 0.5, whole: Whole = "fedlps") -> Method:
    """FLST: one ratio for all clients, whatever they can do; the pattern is learned.

    Args:
        ratio: s; 0.5 in Table II.
        whole: What the part is taken from: fedlps or fedlps-own.
    """
    return replace(_ablation("flst", whole), ratio=Constant(ratio), note=f"Its ratio is {ratio:g}, whatever a client can do.")


def _replaced(name: str, about: str, **parts: Any) -> Callable[..., Method]:
    def make(whole: Whole = "fedlps") -> Method:
        return replace(_ablation(name, whole), **parts)

    make.__name__ = name.replace("-", "_")
    make.__doc__ = f"{about}\n\nArgs:\n    whole: What the part is taken from: fedlps or fedlps-own.\n"
    return make


rcr_fix = _replaced(
    "rcr-fix", "RCR-Fix: resource-controlled ratios, the client's capability, which is drawn once.",
    ratio=ByCapability(), capability="fixed", note=_FIX,
)  # fmt: skip
rcr_dyn = _replaced(
    "rcr-dyn", "RCR-Dyn: resource-controlled ratios, the client's capability, which is drawn anew in every round.",
    ratio=ByCapability(), capability="dynamic", note=_DYN,
)  # fmt: skip
p_ucbv_fix = _replaced("p-ucbv-fix", "P-UCBV-Fix: FedLPS where capabilities are drawn once.", capability="fixed", note=_FIX)
p_ucbv_dyn = _replaced(
    "p-ucbv-dyn", "P-UCBV-Dyn: FedLPS where capabilities are drawn anew in every round.", capability="dynamic", note=_DYN
)


@dataclass(frozen=True)
class MeanProximalSgd(LocalPolicy):
    """SGD on task loss + μ · mean square distance to the round's start, under a mask that was chosen before.

    What is left of FedLPS's client where the mask is not learned. The first time it reports `initial_accuracy`, as
    that client does, so that the bandits learn from the same signals.

    Args:
        proximal: μ; 1 in the paper, the mean over the entries of the whole model as in `LearnableSgd`.
        epochs_factor: Factor on the local epochs of the run, as in `LearnableSgd`.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), equation of the local loss without its importance term.
    """

    proximal: float = 1.0
    epochs_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.proximal < float("inf"):
            raise InvalidValueError(f"proximal must be a finite number >= 0, got {self.proximal}; 0 switches it off")

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train under `mask`."""
        metrics: Mapping[str, float] = {}
        if "seen" not in ctx.memory:
            ctx.memory["seen"] = True
            ctx.load(ctx.initial_state(), mask)
            metrics = initial_accuracy(ctx, ctx.masked.model)
        entries = sum(start[name].numel() for name in ctx.masked.named_weights())
        result = Sgd(proximal=2.0 * self.proximal / max(1, entries)).train(
            with_epochs(ctx, self.epochs_factor), start, mask, ratio
        )
        return replace(result, metrics={**result.metrics, **metrics})


def _pattern(name: str, about: str, criterion: Criterion) -> Callable[..., Method]:
    def make(ratio: float | None = None, whole: Whole = "fedlps") -> Method:
        found = _ablation(name, whole)
        factor = found.local.epochs_factor if isinstance(found.local, LearnableSgd) else 1.0
        chosen = found.ratio if ratio is None else Constant(ratio)
        return replace(found, ratio=chosen, mask=UnitCriterion(criterion), local=MeanProximalSgd(epochs_factor=factor))

    make.__name__ = name.replace("-", "_")
    make.__doc__ = (
        f"{about}\n\nArgs:\n    ratio: The same for all clients; None leaves it to the bandits, as in FedLPS.\n"
        "    whole: What the part is taken from: fedlps or fedlps-own.\n"
    )
    return make


fedlps_random = _pattern("fedlps-random", "FedLPS with units drawn at random, anew for each client and round.", Random())
fedlps_ordered = _pattern("fedlps-ordered", "FedLPS with the first units of every layer.", Ordered())
fedlps_magnitude = _pattern(
    "fedlps-magnitude", "FedLPS with the units of largest absolute weights in the global model.", Magnitude()
)
