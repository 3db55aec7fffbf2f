"""eFD, extended Federated Dropout: each client trains a random submodel as large as its device allows.

Defined as a baseline by Horváth et al., FjORD, NeurIPS 2021 (arXiv 2102.13451), where it extends Caldas,
Konečný, McMahan, Talwalkar: Expanding the Reach of Federated Learning by Reducing Client Resource Requirements
(arXiv 1812.07210), which drops the same share everywhere. FjORD also bounds the number of distinct submodels in use
("diversity parameter"); here every client draws its own each round, which is the unbounded case.
"""

from sparsekit.criteria import Random
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import ByCapability, Mean, RecalibratedBatchNorm, ServerCriterion, SubmodelSgd


def efd() -> Method:
    """Random units by capability, sent by the server; entries are averaged over the clients that hold them, by examples.

    The papers do not clip gradients; without it (`local.clip=none`) training diverges within 20 rounds on MNIST (batches of 32,
    learning rate 0.1, ratios down to 1/16), so it is trained here as HeteroFL is.
    """
    return Method(
        name="efd",
        source="Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451, after Caldas et al., arXiv 1812.07210",
        ratio=ByCapability(),
        mask=ServerCriterion(Random()),
        local=SubmodelSgd(clip=1.0),
        aggregate=Mean("examples", over="holders"),
        personal=RecalibratedBatchNorm(),
    )
