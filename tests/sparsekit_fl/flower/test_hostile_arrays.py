"""SubmodelStrategy and hostile nodes: whatever a node sends costs its own reply alone, and numpy's reader never sees it."""

import json
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from local_grid import LocalGrid

import sparsekit as sk
from sparsekit_fl.flower import BanditRatios, SubmodelStrategy
from sparsekit_fl.flower.client import KEY, mask_record, packed, traced
from sparsekit_fl.testing import TinyNet

pytestmark = pytest.mark.flower
NODES, FIRST = 100, 1000  # of a LocalGrid
MUTATIONS = 100_000 if os.environ.get("SPARSEKIT_ALL_SEEDS") else 3_000
EXAMPLE = torch.zeros(1, 6)
GRAPH = traced(TinyNet(), EXAMPLE)
# What numpy's reader, zip or pickle would open.
BOMBS = [
    b"",
    b"\x93NUMPY",
    b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(70),
    b"PK\x03\x04 nonsense",
    b"PK\x05\x06" + bytes(18),
    b"\x80\x04.",
    (2**40).to_bytes(8, "little") + bytes(40),
]


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


def mutated(data, rng):
    """Other bytes than `data`: flipped, cut, longer, a header that says something else, or a file of another kind."""
    kind, size = int(rng.integers(6)), 8 + int.from_bytes(data[:8], "little")
    if kind == 0:
        return BOMBS[int(rng.integers(len(BOMBS)))]
    if kind == 1:
        return data[: int(rng.integers(len(data)))]
    if kind == 2:
        return data + rng.bytes(int(rng.integers(1, 30)))
    if kind == 3:
        header = json.loads(data[8:size])
        name = sorted(header)[int(rng.integers(len(header)))]
        odd: list[Any] = [[2**62, 2], [-1], [10**13], [[]], None, "F8_E4M3", "X", [0, 2**63], {}, "[" * 1000, [8], [4, 6]]
        part = header[name]
        part[sorted(part)[int(rng.integers(len(part)))]] = odd[int(rng.integers(len(odd)))]
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[size:]
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        changed[int(rng.integers(len(data) if kind == 4 else size))] = int(rng.integers(256))
    return bytes(changed)


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


@pytest.mark.parametrize("bomb", range(len(BOMBS)))
def test_what_numpy_would_open_costs_the_reply_of_its_node_alone(bomb, caplog):
    asked = strategy(ratio=BanditRatios(10))
    list(asked.configure_train(1, ArrayRecord(STATE), ConfigRecord(), LocalGrid(ClientApp(), nodes=NODES)))
    content = honest(asked, FIRST + 1)
    content["arrays"] = ArrayRecord({"body": Array(dtype="float32", shape=(8, 6), stype="numpy.ndarray", data=BOMBS[bomb])})
    merged, _ = asked.aggregate_train(1, [reply(FIRST, honest(asked, FIRST)), reply(FIRST + 1, content)])
    assert merged is not None
    assert "continues without the reply of node 1001: DataError" in caplog.text


def test_scores_with_names_of_their_own_cost_the_reply_of_their_node_alone(caplog):
    said = [{"num-examples": 10, "eval_acc": 0.5}] * 2 + [{"num-examples": 10}, {"eval_acc": [0.5], "num-examples": 1}]
    replies = [reply(node, RecordDict({"metrics": MetricRecord(one)})) for node, one in enumerate(said)]
    replies += [reply(7, RecordDict({})), reply(0, RecordDict({"metrics": MetricRecord(said[0])}))]
    assert dict(strategy().aggregate_evaluate(1, replies) or {}) == {"eval_acc": 0.5}
    assert all(f"without the reply of node {node}: " in caplog.text for node in (0, 2, 3, 7))
