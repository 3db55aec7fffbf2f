"""FedAvg: local SGD, and the mean of the clients' models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from sparsekit_fl.methods.method import Method


def fedavg() -> Method:
    """Every default of `Method`."""
    return Method(name="fedavg", source="McMahan et al., AISTATS 2017")
