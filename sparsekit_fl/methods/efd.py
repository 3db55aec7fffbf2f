"""eFD, extended Federated Dropout: each client trains a random submodel as large as its device allows.

Defined as a baseline by Horváth et al., FjORD, NeurIPS 2021 (arXiv 2102.13451), which extends Caldas,
Konečný, McMahan, Talwalkar: Expanding the Reach of Federated Learning by Reducing Client Resource Requirements
(arXiv 1812.07210), which drops the same share everywhere. FjORD also bounds the number of distinct submodels in use
("diversity parameter"); here every client draws its own each round, which is the unbounded case.
"""

from dataclasses import dataclass

from sparsekit.criteria import Random
from sparsekit_fl.methods.heterofl import HeteroFL


@dataclass(frozen=True, kw_only=True)
class EFD(HeteroFL):
    """Random units by capability, sent by the server; entries are averaged over the clients that hold them, by examples.

    HeteroFL's scaler is off, and its clipping on; the papers have neither.
    """

    source = "Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451, after Caldas et al., arXiv 1812.07210"
    criterion = Random()
    weights = "examples"

    scaler: bool = False
