"""Every method under all options of runs, on several models, without its own state, and with hostile clients."""

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from personal import chain, deep_problem, equals, problem_of, tiny_clients, tiny_config, tiny_problem, tiny_run, watched
from zoo import ZOO

import sparsekit_fl as fl
from sparsekit.graph import WeightMask
from sparsekit_fl.client.context import share_of
from sparsekit_fl.methods import prunefl, registry
from sparsekit_fl.packing import Kept
from sparsekit_fl.problem.models import NextWordLstm
from sparsekit_fl.spec import RunSpec, run_client

# Of FedLPS, its literal form alone takes other ways; other ablations are made of the same parts.
ABLATIONS = {name for name, made in registry.items() if isinstance(made, fl.Method)} - {"fedlps-paper", "fedlps-random"}
METHODS = {name: registry[name] for name in registry if name not in ABLATIONS} | {"prunefl-often": partial(prunefl, every=2)}
ADAPTED = {"flexlora", "hetlora"}
BY_ENTRY = {"cs", "fedspa", "lotteryfl", "prunefl", "prunefl-often"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_runs_under_all_that_a_run_may_ask_at_once_and_what_never_trains_neither_travels_nor_is_kept(name, tmp_path):
    """A layer that does not train, clients without validation data, AdamW and bfloat16."""
    clients = [replace(c, data=replace(c.data, val=None)) if c.id % 2 else c for c in tiny_clients()]
    base = tiny_config(rounds=6)
    training = replace(base.training, optimizer="adamw", lr=0.01, amp="bfloat16")
    config = replace(base, cohort=2, eval_every=6, training=training)
    problem = problem_of(METHODS[name]()) if name in ADAPTED else chain(6, 8, 7, 6, 3, frozen=(2,), exits=("4",))
    result, updates = watched(METHODS[name](), problem=problem, clients=clients, config=config, out=tmp_path)
    assert len(result.rounds) == 6
    assert not any(record.dropped for record in result.rounds)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.state.values())
    assert 0.0 <= result.final.personal["accuracy"] <= 1.0
    assert updates
    spec = RunSpec.build(METHODS[name](), problem, config)
    assert len(spec.frozen) == 2
    for key in spec.frozen:
        assert torch.equal(result.state[key], spec.initial[key])
        assert not any(key.encode() in path.read_bytes() for path in (tmp_path / "clients").iterdir())
    for update in updates:
        assert not spec.frozen & set(update.delta)
        assert name not in BY_ENTRY or not spec.frozen & set(update.mask or ())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_run_on_the_device_equals_that_on_the_cpu(name, device):
    """With `--device cuda` or `--device elsewhere`."""
    if device == "cpu":
        pytest.skip("compares another device with the CPU")
    config = replace(tiny_config(rounds=2), cohort=3)
    here, there = (
        tiny_run(METHODS[name](), clients=tiny_clients(4), config=replace(config, device=place)) for place in ("cpu", device)
    )
    assert there.environment["device"] == device
    for key, tensor in here.state.items():
        torch.testing.assert_close(there.state[key].cpu(), tensor, rtol=1e-3, atol=1e-4, msg=key)


@pytest.fixture
def spoiled(monkeypatch):
    """Runs a method while two clients change their messages; returns why they were refused."""

    def start(method, change):
        def hostile(spec, client, request, memory, **given):
            reply, memory = run_client(spec, client, request, memory, **given)
            changes = reply.update is not None and client.id in HOSTILE
            return (replace(reply, update=change(reply.update)) if changes else reply), memory

        monkeypatch.setattr("sparsekit_fl.spec.run_client", hostile)
        result, _ = watched(method, config=replace(tiny_config(rounds=6), eval_every=6))
        assert len(result.rounds) == 6
        return {reason for record in result.rounds for _, reason in record.dropped}

    return start


GRAPH = RunSpec.build(fl.Method(), tiny_problem(), tiny_config()).graph
HOSTILE = (1, 4)
STRANGE = WeightMask({"first.weight": torch.arange(48).view(8, 6) % 5 == 0})
EXTREMES = (1.7e308, -1.7e308, 5e-324, 0.0, math.inf, -math.inf, math.nan)


def _masked(update):
    """A mask of its own."""
    kept = Kept(GRAPH, STRANGE)
    delta = {
        key: torch.zeros(kept.shape(key) if key in GRAPH.shapes else delta.shape, dtype=delta.dtype)
        for key, delta in update.delta.items()
    }
    extra = {key: torch.zeros(2) for key in ("next_mask", "x")}
    return replace(update, mask=STRANGE, delta=delta, extra=extra)


def _extreme(update, turn):
    """The largest, the least, none: in every metric, cost and time; the changes themselves are honest."""
    metrics = {key: EXTREMES[(turn + place) % len(EXTREMES)] for place, key in enumerate(update.metrics)}
    seconds = abs(EXTREMES[(turn + 1) % len(EXTREMES)])
    cost = replace(update.cost, wall_seconds=seconds, flops=2**59)
    return replace(update, metrics=metrics, cost=cost)


# PruneFL asks one client alone in the first round, so that a hostile one stops that round for good; it has a test of its own.
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"prunefl", "prunefl-often", "fedlps-random"}))
def test_nothing_that_clients_send_stops_a_run(spoiled, name):
    """Nothing that the method learns from, then a mask of its own, then numbers that are none, and again."""
    turns = itertools.count()

    def change(update):
        turn = next(turns)
        return (replace(update, metrics={}, extra={}), _masked(update), _extreme(update, turn // 3))[turn % 3]

    reasons = spoiled(registry[name](), change)
    assert name not in ("fedlps-paper", "fedmp", "oort") or any("lacks the metrics" in reason for reason in reasons)
    assert name not in ("fedavg", "fedprox", "refl") or any("another mask than its task" in reason for reason in reasons)


def test_prunefl_refuses_gradients_that_are_not_of_its_weights(spoiled):
    reasons = spoiled(prunefl(every=1, initial=0), lambda update: replace(update, extra={"first.weight": torch.zeros(3)}))
    assert reasons
    assert all("must return the tensors that its task names" in found and "first.weight" in found for found in reasons)


@pytest.mark.parametrize("name", ["fedlps", "rcr-dyn", "fedmp"])
def test_a_device_that_fails_is_given_less_and_trains_no_more_epochs_for_it(name, monkeypatch):
    fit, trained = fl.ClientContext.fit, []

    def limited(self, batches, step):
        share = share_of(self.costs, self.masked.unit_mask(), "flops")
        if share > 0.3 and self.client.id == 0:
            raise MemoryError("more than this device has")
        trained.append((share, self.client.id, fit(self, batches, step)))
        return trained[-1][-1]

    monkeypatch.setattr(fl.ClientContext, "fit", limited)
    result = tiny_run(name, clients=tiny_clients(2), rounds=12, cohort=2, min_replies=1, capability_levels=(1.0,))
    assert any(record.dropped for record in result.rounds)
    assert len({client for _, client, _ in trained}) == 2
    for _, client, log in trained:
        assert log.examples == 2 * len(tiny_clients(2)[client].data.train)


OWN = {"fedper": True, "local": True, "ditto": True, "fedlps head=own": True, "fedlps head=shared": False}
OWN |= {"fedavg": False, "heterofl": False, "flexlora": False}


@pytest.mark.parametrize("name", sorted(OWN))
def test_scores_say_whether_clients_deploy_parts_that_they_keep(name):
    assert any(one.own for one in tiny_run(name, rounds=2).final.per_client) == OWN[name]


MODELS = {
    "lstm": (lambda: NextWordLstm(vocabulary=4, width=6, hidden=8), lambda count: torch.randint(0, 4, (count, 5))),
    "residual": (ZOO["resnet-small"].make, lambda count: torch.randn(count, 3, 7, 7)),
}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "residual") for name in ("efd", "fedlps", "fedmp", "fedrolex", "fjord", "heterofl", "oort")),
        *((name, "lstm") for name in ("fedlps", "fedmp", "heterofl")),
    ],
)
def test_runs_to_the_end(name, model):
    make, draw = MODELS[model]
    torch.manual_seed(0)

    def split(count: int) -> fl.TensorData:
        inputs = draw(count)
        return fl.TensorData((inputs,), inputs if model == "lstm" else torch.arange(count) % 2)

    clients = [replace(client, data=fl.ClientData(train=split(6), val=split(2), test=split(2))) for client in tiny_clients(3)]
    problem = fl.Problem(model=make, example_inputs=(draw(2),))
    training = fl.TrainingConfig(local_epochs=1, batch_size=3, lr=0.01)
    result = fl.run(registry[name](), problem, clients, fl.RunConfig(rounds=2, cohort=2, training=training, eval_every=2))
    assert not any(record.dropped for record in result.rounds)
    assert math.isfinite(result.final.personal["loss"])
    assert result.cost.flops > 0


EQUAL = [
    "ditto lam=0.0", "ditto lam=2.0", "efd clip=none", "fedlps nested=false head=shared", "fedprox mu=0.0", "oort",
    "fjord", "fedlps-random ratios=1.0 mu=0.0", "fedrolex clip=none", "fedspa ratio=1.0", "hermes threshold=1.0 lasso=0.0",
    "heterofl clip=none", "lotteryfl threshold=1.0", "per-fedavg adaptation_lr=0.0", "prunefl initial=0 every=99",
    "refl target=1.0 cool_down=0",
]  # fmt: skip
# More passes, or masks of weights, move what batch norm remembers.
WITHOUT_NORM = {"per-fedavg", "lotteryfl", "prunefl", "fedspa"}
# A method that is not FedAvg without what is its own, but another one.
ANOTHER = {"fedp3 layers=9 kept=1.0": "fedper"}


@cache
def _run(method, *, norm, samples_itself):
    # Equally many examples and full capabilities, so that every weighting is one.
    base = tiny_config(rounds=1 if samples_itself else 3)
    training = replace(base.training, momentum=0.5)
    clients, problem = tiny_clients(4) if samples_itself else equals(), None if norm else deep_problem()
    return tiny_run(method, problem=problem, clients=clients, config=base, training=training, capability_levels=(1.0,))


@pytest.mark.parametrize("method", [*EQUAL, *ANOTHER])
@pytest.mark.same_bits
def test_without_what_is_its_own_a_method_is_fedavg_bit_for_bit(method, monkeypatch):
    # REFL waits for everybody, and everybody is there.
    monkeypatch.setattr(fl.methods.refl, "_presence", lambda self, server, ids: (ids >= 0,) * 2)
    name = method.partition(" ")[0]
    how = {"norm": name not in WITHOUT_NORM, "samples_itself": name == "oort"}
    ours, plain = _run(method, **how), _run(ANOTHER.get(method, "fedavg"), **how)
    assert ours.final.state_sha256 == plain.final.state_sha256
    assert [record.cohort for record in ours.rounds] == [record.cohort for record in plain.rounds]
    assert ours.cost.flops > 0
    if name in {"efd", "fedlps", "fedprox", "fedrolex", "fjord", "heterofl", "oort", "refl"}:
        assert ours.cost.flops_training == plain.cost.flops_training
        assert ours.cost.flops_paper == plain.cost.flops_paper
    if name in {"per-fedavg", "lotteryfl", "ditto"}:
        assert (ours.final.personal == plain.final.personal) != (name == "ditto")
    if name == "ditto":
        assert (ours.cost.uplink_bytes, ours.final.shared) == (plain.cost.uplink_bytes, plain.final.shared)
    if name == "refl":
        assert ours.cost.seconds == plain.cost.seconds


EVERY_FILE = """
import hashlib, pathlib, tempfile
import sparsekit_fl as fl
from sparsekit_fl.testing import problem_of, tiny_clients, tiny_config
for name, make in fl.methods.registry.items():
    with tempfile.TemporaryDirectory() as out:
        fl.run(make(), problem_of(make()), tiny_clients(), tiny_config(rounds=1), out=out)
        files = sorted(path for path in pathlib.Path(out).glob("*/*") if path.is_file())
        print(name, [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
"""


@pytest.mark.slow
def test_memories_and_models_have_the_same_bytes_in_whatever_order_python_walks_through_sets():
    """Text has another hash in each process, so sets of names have another order."""
    found = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        found.append(subprocess.run([sys.executable, "-c", EVERY_FILE], env=env, capture_output=True, text=True, check=True))
    assert found[0].stdout.splitlines() == found[1].stdout.splitlines()
