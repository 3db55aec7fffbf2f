"""HeteroFL: a client trains the first units of every layer, as many as its device allows.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021 (arXiv 2010.01264). Beside the nested submodels it has a scaler, static batch normalisation, a masked loss, and in
its reference code gradients clipped at norm 1. All are here. Statistics are those of each client's own data, where the
paper takes those of all clients. The masked loss alone is off unless asked for: it is meant to be scored among a client's
own classes, while here all methods are scored among all classes. On the digits (two classes per client, 60 rounds, two
seeds) it lowers the accuracy from 0.76 to 0.65.
"""

from sparsekit.criteria import Ordered
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import (
    ByCapability,
    Mean,
    RecalibratedBatchNorm,
    ServerCriterion,
    SubmodelSgd,
)


def heterofl() -> Method:
    """A prefix of ⌈z · J⌉ units per layer; entries are averaged over the clients that hold them, all alike.

    With a masked loss (`local.masked_loss=true`) classes that a client has no example of belong out of its vote too:
    `aggregate=TouchedRowsMean`, `aggregate.weighting=uniform`. `personal=GlobalModel` takes the running statistics of batch
    norm in place of static ones.
    """
    return Method(
        name="heterofl",
        source="Diao, Ding, Tarokh, HeteroFL, ICLR 2021, arXiv 2010.01264",
        ratio=ByCapability(),
        mask=ServerCriterion(Ordered()),
        local=SubmodelSgd(),
        aggregate=Mean("uniform", over="holders"),
        personal=RecalibratedBatchNorm(),
    )
