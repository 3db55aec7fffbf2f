"""FedRolex: the submodel is a window of units that moves on by one each round, so that every unit is trained.

Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022
(arXiv 2212.01548). Built on HeteroFL, whose scaler, static batch normalisation, masked loss and clipping its reference
code keeps; the masked loss is off here, for the reason given in `heterofl`. In that code the window moves towards lower
indices and all clients weigh alike; the direction is a matter of numbering, and ours moves upwards. Every layer has its
window, and the inputs of a layer are the units that the layer before it kept.
"""

from __future__ import annotations

from dataclasses import replace

from sparsekit_fl.methods.heterofl import heterofl
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.mask import ServerCriterion
from sparsekit_fl.policies.rolling import Rolling


def fedrolex() -> Method:
    """A window of ⌈z · J⌉ units per layer that begins at the round's number, modulo J; averages as HeteroFL.

    `mask.criterion.step` is the number of units by which the window moves each round; 1 in the paper.
    """
    return replace(
        heterofl(),
        name="fedrolex",
        source="Alam et al., FedRolex, NeurIPS 2022, arXiv 2212.01548",
        mask=ServerCriterion(Rolling()),
    )
