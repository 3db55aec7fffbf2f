"""eFD, extended Federated Dropout: each client trains a random submodel as large as its device allows.

Defined as a baseline by Horváth et al., FjORD, NeurIPS 2021 (arXiv 2102.13451), which extends Caldas,
Konečný, McMahan, Talwalkar: Expanding the Reach of Federated Learning by Reducing Client Resource Requirements
(arXiv 1812.07210), which drops the same share everywhere. FjORD also bounds the number of distinct submodels in use
("diversity parameter"); here every client draws its own each round, which is the unbounded case.
"""

from dataclasses import dataclass

from sparsekit.criteria import Random
from sparsekit_fl.methods.base import ClientContext, Result, Task, sgd
from sparsekit_fl.methods.submodels import Submodels
from sparsekit_fl.options import Positive


@dataclass(frozen=True, kw_only=True)
class EFD(Submodels):
    """Random units by capability, sent by the server; entries are averaged over the clients that hold them, by examples.

    Args:
        clip: Largest norm of the gradient of a step, unless the run asks for a smaller one; None leaves it to the run. The
            papers do not clip.
    """

    source = "Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451, after Caldas et al., arXiv 1812.07210"
    criterion = Random()
    weights = "examples"

    clip: Positive | None = 1.0

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the submodel, without HeteroFL's scaler, which the papers do not have."""
        return sgd(client, task, clip=min(filter(None, (self.clip, client.training.clip)), default=None))
