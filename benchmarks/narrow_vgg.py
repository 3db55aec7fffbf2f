"""VGG11 and VGG13 with a quarter of their channels, at a sixteenth of the FLOPs, for runs on a CPU.

    sparsekit compare fedlps fedavg local --preset cifar100 --model narrow_vgg:vgg13 --rounds 10 --data-dir DIR --out FOLDER

in the folder `benchmarks`. sparsekit removes the channels; all weights are initialized again afterwards.
"""

import torch
from torch import nn

import sparsekit as sk
from sparsekit_fl.problem.models import Vgg

__all__ = ["vgg11", "vgg13"]


def _quarter(depth: int, classes: int) -> nn.Module:
    wide = Vgg(depth, classes)
    graph = sk.trace_units(wide, torch.zeros(2, 3, 32, 32))
    narrow = sk.compact(wide, graph, sk.allocation.make_mask(sk.criteria.Ordered(), graph, 0.25, sk.criteria.ScoringContext()))
    for module in narrow.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return narrow


def vgg11(classes: int = 10) -> nn.Module:
    return _quarter(11, classes)


def vgg13(classes: int = 100) -> nn.Module:
    return _quarter(13, classes)
