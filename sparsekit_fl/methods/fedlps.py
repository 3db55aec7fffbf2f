"""FedLPS: learnable personalised sparsification, with a bandit per client that decides the ratio.

Xue, Sun, Liu, Wang, Liu, Wang: Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025
(arXiv 2412.07216). What the paper leaves open is decided here, twice: `fedlps` is our reading, `fedlps_paper` is
literal where the paper speaks and plain where it is silent. The authors' released code learns no pattern (no task
gradient reaches its importance, which stays sorted); that is not copied.
"""

from __future__ import annotations

from dataclasses import replace

from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.aggregate import DeltaMean
from sparsekit_fl.policies.bandit import BanditRatio
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.personal import LocalModel

__all__ = ["fedlps", "fedlps_paper"]


def fedlps() -> Method:
    """Our FedLPS: standardised importance target, summed regulariser, personal model chosen on validation data."""
    return Method(
        name="fedlps",
        source="Xue et al., Learnable Sparse Customization in Heterogeneous Edge Computing, ICDE 2025, arXiv 2412.07216",
        ratio=BanditRatio(),
        local=LearnableSgd(term=ImportanceRegularizer(target="standardised", reduction="sum"), importance_lr=0.02),
        aggregate=DeltaMean(),
        personal=LocalModel(select="best"),
    )


def fedlps_paper() -> Method:
    """FedLPS as the paper words it: sigmoid of the plain absolute sums, mean regulariser, last personal model."""
    return replace(
        fedlps(),
        name="fedlps-paper",
        local=LearnableSgd(term=ImportanceRegularizer(target="absolute", reduction="mean"), noise=0.01),
        personal=LocalModel(select="last"),
    )
