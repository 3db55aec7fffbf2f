"""HeteroFL: a client trains the first units of every layer, as many as its device allows.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021 (arXiv 2010.01264). Beside the nested submodels it has a scaler, static batch normalisation, a masked loss, and in
its reference code gradients clipped at norm 1. All are here. Statistics are those of each client's own data, where the
paper takes those of all clients. The masked loss alone is off unless asked for: it is meant to be scored among a client's
own classes, while here all methods are scored among all classes. On the digits (two classes per client, 60 rounds, two
seeds) it lowers the accuracy from 0.76 to 0.65.
"""

from __future__ import annotations

from sparsekit.criteria import Ordered
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import (
    ByCapability,
    GlobalModel,
    Mean,
    RecalibratedBatchNorm,
    ServerCriterion,
    SubmodelSgd,
    TouchedRowsMean,
)


def heterofl(*, clip: float | None = 1.0, scaler: bool = True, masked_loss: bool = False, static_norm: bool = True) -> Method:
    """A prefix of ⌈z · J⌉ units per layer; entries are averaged over the clients that hold them, all alike.

    Args:
        clip: Largest norm of a step's gradient, where the run does not ask for a smaller one; None leaves it to the run.
        scaler: Divide activations by the ratio while training.
        masked_loss: Leave classes that a client has no example of out of its loss and its vote.
        static_norm: Take batch norm statistics from training data before scoring; else the running ones.
    """
    return Method(
        name="heterofl",
        source="Diao, Ding, Tarokh, HeteroFL, ICLR 2021, arXiv 2010.01264",
        ratio=ByCapability(),
        mask=ServerCriterion(Ordered()),
        local=SubmodelSgd(clip=clip, scaler=scaler, masked_loss=masked_loss),
        aggregate=TouchedRowsMean("uniform") if masked_loss else Mean("uniform", over="holders"),
        personal=RecalibratedBatchNorm() if static_norm else GlobalModel(),
    )
