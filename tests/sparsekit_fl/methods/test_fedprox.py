"""FedProx: the contract, the pull to the global model, and partial work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from personal import training, watched

from sparsekit_fl.methods import fedlps, fedprox, with_settings
from sparsekit_fl.policies import Constant, LearnableSgd
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def trained(method):
    return run(method, tiny_problem(), tiny_clients(), tiny_config())


@pytest.mark.parametrize(("weak", "strong"), [(0.0, 1.0), (1.0, 5.0)])
def test_a_stronger_term_holds_clients_nearer(weak, strong) -> None:
    sums = []
    for strength in (weak, strong):
        _, updates = watched(with_settings(fedprox(), {"local.proximal": strength}), config=tiny_config(rounds=1))
        sums.append(sum(float(update.delta["first.weight"].norm()) for update in updates))
    assert sums[1] < sums[0]


LEARNED = replace(fedlps(), ratio=Constant(0.5), local=LearnableSgd(proximal=0.3, proximal_reduction="sum", importance_lr=0.1))


@pytest.mark.parametrize("method", [with_settings(fedprox(), {"local.proximal": 0.5}), LEARNED], ids=["fedprox", "fedlps"])
def test_the_shortcut_in_place_equals_the_longer_gradient(method) -> None:
    """Plain SGD interpolates the leaves, in fedlps under a moving mask; weight decay of almost nothing takes the other way."""
    near, far = (
        run(method, tiny_problem(), tiny_clients(), training(tiny_config(rounds=2), weight_decay=decay)).state
        for decay in (0.0, 1e-30)
    )
    assert all(torch.allclose(value.double(), far[name].double(), atol=1e-5) for name, value in near.items())


def test_stragglers_do_fewer_epochs() -> None:
    some, all_of_them, none = (
        trained(with_settings(fedprox(), {"local.stragglers": share})).cost.flops_compact for share in (0.5, 1.0, 0.0)
    )
    assert all_of_them < some < none
    # Epochs are drawn from 1 and 2.
    assert all_of_them > none / 2
