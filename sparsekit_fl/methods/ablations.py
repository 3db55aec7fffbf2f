"""The ablations of FedLPS: one of its parts is replaced, everything else is FedLPS.

Xue et al., ICDE 2025 (arXiv 2412.07216), Table II and the comparison of sparse patterns. FLST replaces the bandit by one
ratio for everybody, RCR by the capability of the client; "fix" and "dyn" draw that capability once or in every round.
Three variants replace the learned criterion. In the paper's comparison of patterns all clients have one ratio, and
heuristic patterns are scored with the global model while the learned one is scored with the personal model; here every
variant reports both, and `ratios=0.5` gives all clients the same. `ratios` and `pattern` are options of every FedLPS:
`fedlps-local-classes pattern=ordered` is that variant without a learned pattern.
"""

from dataclasses import dataclass

from sparsekit_fl.methods.fedlps import FedLPS, Pattern, Ratios


@dataclass(frozen=True, kw_only=True)
class FLST(FedLPS):
    """FLST: one ratio for all clients, 0.5 as in Table II; the pattern is learned."""

    note = "All clients have one ratio, whatever they can do."

    ratios: Ratios = 0.5


@dataclass(frozen=True, kw_only=True)
class PUCBVFix(FedLPS):
    """P-UCBV-Fix: FedLPS whose capabilities are drawn once."""

    called = "p-ucbv-fix"
    note = "Capabilities are drawn once, whatever the run says."
    capability = "fixed"


@dataclass(frozen=True, kw_only=True)
class PUCBVDyn(FedLPS):
    """P-UCBV-Dyn: FedLPS whose capabilities are drawn again in every round."""

    called = "p-ucbv-dyn"
    note = "Capabilities are drawn again in every round, whatever the run says."
    capability = "dynamic"


@dataclass(frozen=True, kw_only=True)
class RCRFix(PUCBVFix):
    """RCR-Fix: resource-controlled ratios, the client's capability, which is drawn once."""

    called = "rcr-fix"

    ratios: Ratios = "capability"


@dataclass(frozen=True, kw_only=True)
class RCRDyn(PUCBVDyn):
    """RCR-Dyn: resource-controlled ratios, the client's capability, which is drawn again in every round."""

    called = "rcr-dyn"

    ratios: Ratios = "capability"


@dataclass(frozen=True, kw_only=True)
class FedLPSRandom(FedLPS):
    """FedLPS with units drawn at random, again for each client and round."""

    called = "fedlps-random"

    pattern: Pattern = "random"


@dataclass(frozen=True, kw_only=True)
class FedLPSOrdered(FedLPS):
    """FedLPS with the first units of every layer."""

    called = "fedlps-ordered"

    pattern: Pattern = "ordered"


@dataclass(frozen=True, kw_only=True)
class FedLPSMagnitude(FedLPS):
    """FedLPS with the units of largest absolute weights in the received model."""

    called = "fedlps-magnitude"

    pattern: Pattern = "magnitude"
