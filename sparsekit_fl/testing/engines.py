"""EngineContract: inherit it and supply one fixture, `engine`, to test an engine that was written elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sparsekit.graph import StateDict
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.context.client import ClientContext
from sparsekit_fl.engines.base import Engine
from sparsekit_fl.errors import ClientError
from sparsekit_fl.methods.local import local
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.local import LocalPolicy, LocalResult, Sgd
from sparsekit_fl.policies.personal import LocalModel, PersonalModel, PersonalPolicy
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem
from sparsekit_fl.wire.kept import Mask
from sparsekit_fl.wire.messages import Evaluation, Update


@dataclass(frozen=True)
class FailingSgd(LocalPolicy):
    """SGD that raises on some clients, and counts the participations of the others in their memories.

    Args:
        clients: Ids of those; None for all.
    """

    clients: tuple[int, ...] | None = None

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train and report the count, or raise."""
        if self.clients is None or ctx.client.id in self.clients:
            raise ArithmeticError(f"no luck with {ctx.client.id}")
        ctx.memory["count"] = ctx.memory.get("count", 0) + 1
        result = Sgd().train(ctx, start, mask, ratio)
        extra = {"count": torch.tensor([ctx.memory["count"]])}
        return LocalResult(state=result.state, mask=mask, log=result.log, extra=extra, module=result.module)


@dataclass(frozen=True)
class _Unscored(PersonalPolicy):
    """The global model, which client 1 cannot score."""

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        if ctx.client.id == 1:
            raise ArithmeticError("no score for 1")
        return super().model(ctx, state)


class _Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.counts: dict[int, list[int]] = {}

    def on_client_end(self, view: RunView, client_id: int, update: Update | Evaluation | None) -> None:
        if isinstance(update, Evaluation):
            return
        self.seen.append((view.round + 1, client_id))
        if update is not None:
            self.counts.setdefault(client_id, []).append(int(update.extra["count"]))


class EngineContract:
    """What holds for every engine; the fixture `engine`, a fresh one, is to be supplied.

    Set `rounding` where an engine computes in another order of operations.
    """

    rounding = 0.0
    """Largest relative and absolute difference of a run's weights from those of the default engine; 0: the same bits."""

    @pytest.mark.parametrize(
        "method",
        [
            Method(name="plain", source=""),
            replace(local(), personal=LocalModel(select="best")),
            Method(name="own", source="", personal=LocalModel()),
        ],
        ids=lambda method: method.name,
    )
    def test_same_results_as_the_default_engine(self, engine: Engine, method: Method, tmp_path: Path) -> None:
        ours, default = _run(method, engine, out=tmp_path), _run(method)
        if self.rounding:
            torch.testing.assert_close(ours.state, default.state, rtol=self.rounding, atol=self.rounding)
        else:
            assert ours.final.state_sha256 == default.final.state_sha256
            assert ours.final.per_client == default.final.per_client
        for name in ("uplink_bytes", "downlink_bytes", "seconds"):
            assert getattr(ours.cost, name) == getattr(default.cost, name)
        if method.name == "own":  # personal models are written where they differ from the global one
            trained = {f"client-{client_id}" for record in ours.rounds for client_id in record.cohort}
            assert {path.stem for path in (tmp_path / "models").glob("client-*.safetensors")} == trained

    def test_replies_come_in_the_order_of_the_cohort_and_memories_live_on(self, engine: Engine) -> None:
        watch = _Watch()
        result = _run(Method(name="counting", source="", local=FailingSgd(())), engine, watch)
        assert watch.seen == [(record.round, client_id) for record in result.rounds for client_id in record.cohort]
        assert max(len(counts) for counts in watch.counts.values()) > 1
        assert all(counts == list(range(1, len(counts) + 1)) for counts in watch.counts.values())

    def test_a_failing_client_is_dropped_and_the_round_goes_on(self, engine: Engine) -> None:
        victim = _run(Method(name="plain", source="")).rounds[0].cohort[0]
        result = _run(Method(name="failing", source="", local=FailingSgd((victim,)), personal=_Unscored()), engine)
        (client_id, reason), *_ = result.rounds[0].dropped
        assert client_id == victim
        told = ("'failing'", "local policy", "round 1", f"client {victim}", f"ArithmeticError: no luck with {victim}")
        assert all(part in reason for part in told)
        assert set(result.rounds[0].ratios) == set(result.rounds[0].cohort) - {victim}
        assert [evaluation.client_id for evaluation in result.final.per_client] == [0, *range(2, 8)]
        assert any("client 1 was not scored" in note and "no score for 1" in note for note in result.rounds[-1].notes)

    def test_when_every_client_fails_the_first_error_ends_the_run(self, engine: Engine) -> None:
        with pytest.raises(ClientError, match=r"local policy: ArithmeticError: no luck"):
            _run(Method(name="failing", source="", local=FailingSgd()), engine)


def _run(method: Method, engine: Engine | None = None, watch: Callback | None = None, out: Path | None = None) -> RunResult:
    callbacks = () if watch is None else (watch,)
    return run(method, tiny_problem(), tiny_clients(), tiny_config(), engine=engine, callbacks=callbacks, out=out)
