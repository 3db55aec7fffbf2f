"""EngineContract: what every engine must satisfy. Inherit it and supply one fixture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sparsekit.graph.state import StateDict
from sparsekit_fl.context.client import ClientContext
from sparsekit_fl.engines.base import Engine
from sparsekit_fl.errors import ClientError
from sparsekit_fl.methods.local import local
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.local import LocalPolicy, LocalResult, Sgd
from sparsekit_fl.policies.personal import LocalModel, PersonalModel, PersonalPolicy
from sparsekit_fl.results.records import Observer, RunResult
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem
from sparsekit_fl.wire.kept import Mask
from sparsekit_fl.wire.messages import Update

__all__ = ["CountingSgd", "EngineContract", "FailingSgd", "UnscoredModel"]


@dataclass(frozen=True)
class FailingSgd(LocalPolicy):
    """SGD that raises on some clients.

    Args:
        clients: Ids of those; empty for all.
    """

    clients: tuple[int, ...] = ()

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train, or raise."""
        if not self.clients or ctx.client.id in self.clients:
            raise ArithmeticError(f"no luck with {ctx.client.id}")
        return Sgd().train(ctx, start, mask, ratio)


@dataclass(frozen=True)
class CountingSgd(LocalPolicy):
    """SGD that counts a client's participations in its memory and reports the count."""

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train and count."""
        ctx.memory["count"] = ctx.memory.get("count", 0) + 1
        result = Sgd().train(ctx, start, mask, ratio)
        extra = {"count": torch.tensor([ctx.memory["count"]])}
        return LocalResult(state=result.state, mask=mask, log=result.log, extra=extra, module=result.module)


@dataclass(frozen=True)
class UnscoredModel(PersonalPolicy):
    """The global model, which raises on some clients when it is to be scored.

    Args:
        clients: Ids of those.
    """

    clients: tuple[int, ...] = ()

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the model, or raise."""
        if ctx.client.id in self.clients:
            raise ArithmeticError(f"no score for {ctx.client.id}")
        return super().model(ctx, state)


class _Watch(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.counts: dict[int, list[int]] = {}

    def on_client(self, round: int, client_id: int, update: Update | None) -> None:
        self.seen.append((round, client_id))
        if update is not None and "count" in update.extra:
            self.counts.setdefault(client_id, []).append(int(update.extra["count"]))


class EngineContract:
    """What holds for every engine.

    Supply the fixture `engine`::

        class TestMyEngine(EngineContract):
            @pytest.fixture
            def engine(self):
                return MyEngine()
    """

    @pytest.fixture
    def engine(self) -> Engine:
        """To be supplied: a fresh engine."""
        pytest.fail("an EngineContract needs a fixture `engine` that returns an Engine")

    @pytest.mark.parametrize("method", [Method(name="plain", source=""), local("best")], ids=lambda method: method.name)
    def test_same_bits_as_the_default_engine(self, engine: Engine, method: Method) -> None:
        ours, default = _run(method, engine=engine), _run(method, engine=None)
        assert ours.final.state_sha256 == default.final.state_sha256
        assert ours.final.per_client == default.final.per_client
        assert ours.cost.uplink_bytes == default.cost.uplink_bytes
        assert ours.cost.downlink_bytes == default.cost.downlink_bytes
        assert ours.cost.seconds == default.cost.seconds

    def test_replies_come_in_the_order_of_the_cohort(self, engine: Engine) -> None:
        watch = _Watch()
        result = _run(Method(name="plain", source=""), engine=engine, watch=watch)
        assert watch.seen == [(record.round, client_id) for record in result.rounds for client_id in record.cohort]

    def test_client_memory_lives_from_round_to_round(self, engine: Engine) -> None:
        watch = _Watch()
        _run(Method(name="counting", source="", local=CountingSgd()), engine=engine, watch=watch)
        assert max(len(counts) for counts in watch.counts.values()) > 1
        assert all(counts == list(range(1, len(counts) + 1)) for counts in watch.counts.values())

    def test_a_failing_client_is_dropped_and_the_round_goes_on(self, engine: Engine) -> None:
        plain = _run(Method(name="plain", source=""), engine=None)
        victim = plain.rounds[0].cohort[0]
        result = _run(Method(name="failing", source="", local=FailingSgd((victim,))), engine=engine)
        (client_id, reason), *_ = result.rounds[0].dropped
        assert client_id == victim
        assert "'failing'" in reason
        assert "local policy" in reason
        assert "round 1" in reason
        assert f"client {victim}" in reason
        assert f"ArithmeticError: no luck with {victim}" in reason
        assert set(result.rounds[0].ratios) == set(result.rounds[0].cohort) - {victim}

    def test_when_every_client_fails_the_first_error_ends_the_run(self, engine: Engine) -> None:
        with pytest.raises(ClientError, match=r"local policy: ArithmeticError: no luck"):
            _run(Method(name="failing", source="", local=FailingSgd()), engine=engine)

    def test_a_client_that_cannot_be_scored_is_left_out_and_the_record_says_so(self, engine: Engine) -> None:
        result = _run(Method(name="unscored", source="", personal=UnscoredModel((1,))), engine=engine)
        assert [evaluation.client_id for evaluation in result.final.per_client] == [0, *range(2, 8)]
        (note,) = [note for note in result.rounds[-1].notes if "client 1 was not scored" in note]
        assert "ArithmeticError: no score for 1" in note

    def test_personal_models_are_written_where_they_differ_from_the_global_one(self, engine: Engine, tmp_path: Path) -> None:
        method = Method(name="own", source="", personal=LocalModel())
        result = _run(method, engine=engine, out=tmp_path)
        trained = {client_id for record in result.rounds for client_id in record.cohort}
        written = {int(path.stem.split("-")[1]) for path in (tmp_path / "models").glob("client-*.safetensors")}
        assert written == trained


def _run(method: Method, *, engine: Engine | None, watch: Observer | None = None, out: Path | None = None) -> RunResult:
    observers = () if watch is None else (watch,)
    return run(method, tiny_problem(), tiny_clients(), tiny_config(), engine=engine, observers=observers, out=out)
