"""FedProx: the contract, the pull to the global model, and partial work."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.methods import fedavg, fedprox
from sparsekit_fl.results.records import Observer
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.methods import MethodContract
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem


class TestFedProx(MethodContract):
    @pytest.fixture
    def make(self):
        return fedprox


class TestFedProxWithStragglers(MethodContract):
    @pytest.fixture
    def make(self):
        return lambda: fedprox(0.1, stragglers=0.5)


def trained(method):
    return run(method, tiny_problem(), tiny_clients(), tiny_config())


def test_without_the_term_it_is_fedavg_bit_for_bit() -> None:
    ours, reference = trained(fedprox(0.0)), trained(fedavg())
    assert ours.final.state_sha256 == reference.final.state_sha256
    assert ours.cost.flops_compact == reference.cost.flops_compact


def test_the_term_is_not_charged() -> None:
    assert trained(fedprox(1.0)).cost.flops_rowmask == trained(fedavg()).cost.flops_rowmask


class Norms(Observer):
    def __init__(self) -> None:
        self.norms = []

    def on_client(self, round, client_id, update) -> None:
        self.norms.append(float(update.delta["first.weight"].norm()))


@pytest.mark.parametrize(("weak", "strong"), [(0.0, 1.0), (1.0, 5.0)])
def test_a_stronger_term_holds_clients_nearer(weak, strong) -> None:
    sums = []
    for strength in (weak, strong):
        norms = Norms()
        run(fedprox(strength), tiny_problem(), tiny_clients(), tiny_config(rounds=1), observers=[norms])
        sums.append(sum(norms.norms))
    assert sums[1] < sums[0]


def test_the_shortcut_in_place_equals_the_longer_gradient() -> None:
    """Plain SGD interpolates the leaves; weight decay of almost nothing takes the other way."""
    states = []
    for decay in (0.0, 1e-30):
        config = tiny_config(rounds=2)
        training = dataclasses.replace(config.training, weight_decay=decay)
        config = dataclasses.replace(config, training=training)
        states.append(run(fedprox(0.5), tiny_problem(), tiny_clients(), config).state)
    assert all(torch.allclose(value.double(), states[1][name].double(), atol=1e-5) for name, value in states[0].items())


def test_stragglers_do_fewer_epochs() -> None:
    some, all_of_them, none = (trained(fedprox(stragglers=share)).cost.flops_compact for share in (0.5, 1.0, 0.0))
    assert all_of_them < some < none
    # Epochs are drawn from 1 and 2.
    assert all_of_them > none / 2


@pytest.mark.parametrize("options", [{"proximal": -1.0}, {"stragglers": 1.5}])
def test_bad_options_are_refused(options) -> None:
    with pytest.raises(InvalidValueError):
        fedprox(**options)
