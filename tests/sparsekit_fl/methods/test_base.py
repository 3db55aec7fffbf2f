"""Methods of one class."""

import sparsekit_fl as fl
from sparsekit_fl.methods.base import Method
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def test_the_defaults_are_fedavg():
    ours, theirs = (fl.run(one, tiny_problem(), tiny_clients(), tiny_config()) for one in (Method(), fl.methods.fedavg()))
    assert ours.final.state_sha256 == theirs.final.state_sha256
    assert ours.final.per_client == theirs.final.per_client
    assert ours.cost.downlink_bytes == theirs.cost.downlink_bytes
