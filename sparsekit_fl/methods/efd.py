"""eFD, extended Federated Dropout: each client trains a random submodel as large as its device allows.

Defined as a baseline by Horváth et al., FjORD, NeurIPS 2021 (arXiv 2102.13451), which extends Caldas,
Konečný, McMahan, Talwalkar: Expanding the Reach of Federated Learning by Reducing Client Resource Requirements
(arXiv 1812.07210), which drops the same share everywhere. FjORD also bounds the number of distinct submodels in use
("diversity parameter"); here every client draws its own each round, which is the unbounded case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsekit.criteria import Criterion, Random
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.methods.client import sgd
from sparsekit_fl.methods.means import Weights
from sparsekit_fl.methods.submodels import Submodels
from sparsekit_fl.methods.task import Result, Task
from sparsekit_fl.options import Positive


@dataclass(frozen=True, kw_only=True)
class EFD(Submodels):
    """Random units by capability, sent by the server; entries are averaged over the clients that hold them, by examples.

    Args:
        clip: Largest norm of the gradient of a step, unless the run asks for a smaller one; None leaves it to the run. The
            papers do not clip.
    """

    source: ClassVar[str] = "Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451, after Caldas et al., arXiv 1812.07210"
    weights: ClassVar[Weights] = "examples"

    clip: Positive | None = 1.0

    def criterion(self) -> Criterion:
        """Return a random order."""
        return Random()

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the submodel, without HeteroFL's scaler, which the papers do not have."""
        return sgd(client, task, clip=min(filter(None, (self.clip, client.training.clip)), default=None))
