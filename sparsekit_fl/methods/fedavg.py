"""FedAvg: local SGD, and the mean of the clients' models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from dataclasses import dataclass

from sparsekit_fl.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """FedAvg: every default of `Method`."""

    source = "McMahan et al., AISTATS 2017"
