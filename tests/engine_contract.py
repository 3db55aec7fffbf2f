"""EngineContract: what holds for every engine; and methods whose clients fail, or keep models of their own."""

from dataclasses import dataclass, replace

import pytest
import torch
from own_models import OwnModels
from personal import tiny_run, watched

from sparsekit.errors import DataError
from sparsekit_fl.errors import ClientError
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.client import Model, sgd
from sparsekit_fl.methods.whole_models import Local
from sparsekit_fl.models import load_model


@dataclass(frozen=True, kw_only=True)
class Failing(Method):
    """FedAvg that raises on some clients, and counts the participations of the others in their memories."""

    clients: tuple[int, ...] | None = None  # the ids that fail; None: all
    unscored: int = -1  # an id that cannot be scored; -1: all can be

    def train(self, client, task):
        if self.clients is None or client.client.id in self.clients:
            raise ArithmeticError(f"no luck with {client.client.id}")
        client.memory["count"] = client.memory.get("count", 0) + 1
        return replace(sgd(client, task), extra={"count": torch.tensor([client.memory["count"]])})

    def deploy(self, client, state):
        if client.client.id == self.unscored:
            raise ArithmeticError(f"no score for {client.client.id}")
        return Model(state=state)


class EngineContract:
    """What holds for every engine; the fixture `engine`, a fresh one, is to be supplied."""

    @pytest.mark.parametrize("method", [Method(), Local(), OwnModels()], ids=lambda method: method.name)
    def test_same_results_as_the_default_engine(self, engine, method, tmp_path):
        ours, default = tiny_run(method, engine=engine, out=tmp_path), tiny_run(method)
        assert ours.final.state_sha256 == default.final.state_sha256
        assert ours.final.per_client == default.final.per_client
        assert replace(ours.cost, wall_seconds=0.0) == replace(default.cost, wall_seconds=0.0)
        if isinstance(method, OwnModels):  # personal models are written where they differ from the global one
            trained = {f"client-{client_id}" for record in ours.rounds for client_id in record.cohort}
            if getattr(engine, "keeps_models", False):
                trained = set()
                with pytest.raises(DataError, match="stayed on its device"):
                    load_model(tmp_path, 0)
            assert {path.stem for path in (tmp_path / "models").glob("client-*.safetensors")} == trained

    def test_replies_come_in_the_order_of_the_cohort_and_memories_live_on(self, engine):
        result, updates = watched(Failing(clients=()), engine=engine)
        seen = [(update.round, update.client_id) for update in updates]
        assert seen == [(record.round, client_id) for record in result.rounds for client_id in record.cohort]
        counts = [[int(one.extra["count"]) for one in updates if one.client_id == client_id] for client_id in range(8)]
        assert max(map(len, counts)) > 1
        assert all(found == list(range(1, len(found) + 1)) for found in counts)

    def test_a_failing_client_is_dropped_and_the_round_goes_on(self, engine):
        victim = tiny_run(Method()).rounds[0].cohort[0]
        failing = Failing(clients=(victim,), unscored=1)
        result = tiny_run(failing, engine=engine)
        (client_id, reason), *_ = result.rounds[0].dropped
        assert client_id == victim
        told = ("'failing", "in train()", "round 1", f"client {victim}", f"ArithmeticError: no luck with {victim}")
        assert all(part in reason for part in told)
        # It got the model before it failed.
        assert result.rounds[0].cost.downlink_bytes == tiny_run(Method()).rounds[0].cost.downlink_bytes
        assert set(result.rounds[0].ratios) == set(result.rounds[0].cohort) - {victim}
        assert [client.id for client in result.final.per_client] == [0, *range(2, 8)]
        assert any("client 1 was not scored" in note and "no score for 1" in note for note in result.rounds[-1].notes)

    def test_when_every_client_fails_the_first_error_ends_the_run(self, engine):
        with pytest.raises(ClientError, match=r"in train\(\): ArithmeticError: no luck"):
            tiny_run(Failing(), engine=engine)
