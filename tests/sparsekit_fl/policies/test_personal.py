"""LocalModel: which of a client's trained models it keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from personal import client_context, equals, watched
from torch import nn

from sparsekit_fl.client.loop import TrainingLog
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.policies import ClientContext, LocalModel, LocalResult

# Validation accuracy and loss of ten examples, training loss of ninety; one row per participation.
PARTICIPATIONS = [(1.0, 0.30, 0.20), (0.9, 0.31, 0.01), (0.9, 0.35, 0.10)]


def kept(select: Any, participations=PARTICIPATIONS, *, metric: str = "accuracy") -> float:
    memory: dict[str, Any] = {}
    for number, (accuracy, validation, training) in enumerate(participations):
        scores = {
            "val": {metric: (accuracy * 10, 10), "loss": (validation * 10, 10)},
            "train": {metric: (90, 90), "loss": (training * 90, 90)},
        }
        ctx: Any = SimpleNamespace(
            memory=memory,
            round=number,
            frozen=frozenset(),
            scored=[],
            score=lambda module, split, scores=scores, **_: scores[split],
            client=SimpleNamespace(data=SimpleNamespace(train=range(90), val=range(10))),
            rng=np.random.default_rng(number),
        )
        state = {"number": torch.tensor(number)}
        LocalModel(select).keep(
            ctx, LocalResult(state=state, mask=None, log=TrainingLog(examples=450), module=nn.Identity()), 1.0
        )
    return int(memory["state"]["number"])


@pytest.mark.parametrize(("select", "number"), [("last", 2), ("best", 0), ("loss", 1)])
def test_the_last_the_best_or_the_one_of_least_loss_stays(select, number) -> None:
    assert kept(select) == number


def test_without_accuracy_best_is_least_validation_loss() -> None:
    assert kept("best", metric="log_loss") == 0
    assert kept("loss", metric="log_loss") == 1


@pytest.mark.parametrize("select", ["best", "loss"])
def test_the_training_examples_that_decide_are_few_drawn_once_and_then_stay_the_same(select, monkeypatch) -> None:
    asked: dict[int, list[Any]] = {}
    score = ClientContext.score

    def heard(ctx: ClientContext, module: Any, split: Any, **options: Any) -> Any:
        if split == "train":
            asked.setdefault(ctx.client.id, []).append(options["positions"].tolist())
        return score(ctx, module, split, **options)

    monkeypatch.setattr(ClientContext, "score", heard)
    method = make_method("fedavg", settings={"personal": "LocalModel", "personal.select": select})
    watched(method, clients=equals(40))
    assert any(len(samples) > 1 for samples in asked.values())
    for samples in asked.values():
        assert all(sample == samples[0] for sample in samples)
        assert 0 < len(set(samples[0])) == len(samples[0]) < 24
    assert len({tuple(samples[0]) for samples in asked.values()}) > 1, "by the client's own generator"


def test_a_client_without_validation_data_decides_by_training_data_however_little_it_trains() -> None:
    for examples, count in ((1, 1), (10**6, 24)):
        _, client, ctx = client_context(make_method("fedavg"), kind="personal")
        assert len(client.data.train) == 24
        ctx = replace(ctx, client=replace(client, data=replace(client.data, val=client.data.val.take(np.arange(0)))))
        assert len(LocalModel("best")._sample(ctx, TrainingLog(examples=examples))) == count
