"""FedAvg equals a loop written by hand; local training shares nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sparsekit.rng import torch_scope
from sparsekit_fl.client.context import rngs_by_kind
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.methods import fedavg, local
from sparsekit_fl.server.loop import run
from sparsekit_fl.streams import Streams
from sparsekit_fl.testing import TinyNet, tiny_clients, tiny_config, tiny_problem


@pytest.mark.same_bits
def test_equals_a_loop_written_by_hand():
    clients, config = tiny_clients(), tiny_config(rounds=3)
    result = run(fedavg(), tiny_problem(), clients, config)
    streams = Streams(config.seed)
    with torch_scope(streams.model()):
        model = TinyNet()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for round in range(1, 4):
        rng = rngs_by_kind(streams.server(round))["sampling"]
        cohort = sorted(rng.choice(8, size=4, replace=False).tolist())
        sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
        for client_id in cohort:
            data = clients[client_id].data.train
            rng = rngs_by_kind(streams.client(round, client_id))["local"]
            orders = [rng.permutation(len(data)) for _ in range(2)]
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for order in orders:
                pieces = np.split(order, range(8, len(data), 8))
                if len(pieces[-1]) == 1:
                    pieces[-2:] = [np.concatenate(pieces[-2:])]
                for piece in pieces:
                    (inputs,), targets = data.batch(torch.from_numpy(piece))
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
            for name, tensor in model.state_dict().items():
                sums[name] += (tensor - state[name]).double() * (len(data) / len(clients[cohort[0]].data.train))
        weight = sum(len(clients[i].data.train) / len(clients[cohort[0]].data.train) for i in cohort)
        for name, total in sums.items():
            value = state[name].double() + total / weight
            state[name] = (value if state[name].is_floating_point() else value.round()).to(state[name].dtype)
        assert result.rounds[round - 1].cohort == tuple(cohort)
    assert all(torch.equal(result.state[name], state[name]) for name in state)


def test_the_global_model_never_moves_and_personal_models_learn():
    config = tiny_config(rounds=8)
    result = run(local(), tiny_problem(), tiny_clients(), config)
    initial = RunSpec.build(local(), tiny_problem(), config).initial
    assert all(torch.equal(result.state[name], initial[name]) for name in initial)
    assert result.final.personal["accuracy"] > result.final.shared["accuracy"]
