"""FedPer: the last layers stay with each client, the others are averaged; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers (arXiv 1912.00818).
"""

from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.share import PrivateHead


def fedper() -> Method:
    """FedAvg on all but the head.

    The paper compares the classifier alone as the head (`share.layers`) with the classifier and the last blocks; the classifier
    alone is what it is usually compared with.
    """
    return Method(name="fedper", source="Arivazhagan et al., FedPer, arXiv 1912.00818", share=PrivateHead())
