"""SubmodelStrategy and hostile nodes: whatever a node sends costs its own reply alone, and numpy's reader never sees it."""

import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from local_grid import LocalGrid
from mutations import mutated

import sparsekit as sk
from sparsekit_fl.flower import SubmodelStrategy
from sparsekit_fl.flower.client import KEY, mask_record, packed, traced
from sparsekit_fl.testing import TinyNet

pytestmark = pytest.mark.flower
NODES, FIRST = 100, 1000  # of a LocalGrid
MUTATIONS = 100_000 if os.environ.get("SPARSEKIT_ALL_SEEDS") else 3_000
EXAMPLE = torch.zeros(1, 6)
GRAPH = traced(TinyNet(), EXAMPLE)


def strategy(**options):
    return SubmodelStrategy(FedAvg(fraction_train=1.0, min_available_nodes=1), TinyNet(), EXAMPLE, **options)


def honest(asked, node):
    mask = asked._sent[node].mask or sk.make_mask(sk.criteria.Ordered(), GRAPH, 0.5, sk.ScoringContext(weights=STATE))
    part = sk.compact(TinyNet(), GRAPH, mask).state_dict()
    metrics = MetricRecord({"num-examples": 10, "train_acc": 0.5})
    return RecordDict({"arrays": packed(part), "metrics": metrics, KEY: mask_record(mask, seconds=1.0)})


def reply(node, content):
    return SimpleNamespace(metadata=SimpleNamespace(src_node_id=node), content=content, has_error=lambda: False)


STATE = TinyNet().state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_no_array_of_a_node_ends_a_round_or_harms_the_model(learned, monkeypatch):
    logging.getLogger("sparsekit_fl").setLevel(logging.ERROR)
    rng, counted, asked = np.random.default_rng(0), 0, strategy(ratio=0.5, learned=learned)
    list(asked.configure_train(1, ArrayRecord(STATE), ConfigRecord(), LocalGrid(ClientApp(), nodes=NODES)))
    read, seen = np.load, []
    monkeypatch.setattr(np, "load", lambda file, **more: seen.append(bytes(file.getbuffer())) or read(file, **more))
    content = honest(asked, FIRST)
    array, bits = content["arrays"]["body"].data, content[KEY]["mask"]
    while counted < MUTATIONS // 2:
        replies, sent = [reply(FIRST, honest(asked, FIRST))], set()
        for node in range(FIRST + 1, FIRST + NODES):
            body, mask = mutated(array, rng), bits
            if node % 10 == 0:
                body, mask = array, mutated(bits, rng)
            sent.add(body)
            arrays = ArrayRecord({"body": Array(dtype="uint8", shape=(len(body),), stype="sparsekit.raw", data=body)})
            record = ConfigRecord({"mask": mask, "seconds": 1.0})
            replies.append(reply(node, RecordDict({"arrays": arrays, "metrics": content["metrics"], KEY: record})))
        merged, metrics = asked.aggregate_train(1, replies)
        counted += NODES - 1
        assert metrics["train_acc"] == pytest.approx(0.5)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in merged.to_torch_state_dict().values())
        assert not sent & set(seen), "numpy read what a node sent"


def test_scores_with_names_of_their_own_cost_the_reply_of_their_node_alone(caplog):
    said = [{"num-examples": 10, "eval_acc": 0.5}] * 2 + [{"num-examples": 10}, {"eval_acc": [0.5], "num-examples": 1}]
    replies = [reply(node, RecordDict({"metrics": MetricRecord(one)})) for node, one in enumerate(said)]
    replies += [reply(7, RecordDict({})), reply(0, RecordDict({"metrics": MetricRecord(said[0])}))]
    assert dict(strategy().aggregate_evaluate(1, replies) or {}) == {"eval_acc": 0.5}
    assert all(f"without the reply of node {node}: " in caplog.text for node in (0, 2, 3, 7))
