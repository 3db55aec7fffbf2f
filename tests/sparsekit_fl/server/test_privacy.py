"""Client-level differential privacy: sums exact to the last number, sensitivity bounded, ε by the book, runs repeatable."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit.graph.mask import UnitMask
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.engines.spec import RunSpec, by_id
from sparsekit_fl.methods import registry
from sparsekit_fl.policies import Mean, Poisson
from sparsekit_fl.server.privacy import check_private, epsilon_of, privacy_line
from sparsekit_fl.server.server import Server
from sparsekit_fl.streams import Streams
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config, tiny_problem

pytest.importorskip("opacus", reason="opacus is not installed; pip install 'sparsekit-torch[privacy]'")

PRIVATE = replace(tiny_config(), dp_clip=0.5, dp_noise=1.5, dp_noise_seed=11)
SECRET = replace(PRIVATE, dp_noise_seed=None)
POLICIES = [Mean(), Mean(over="all"), Mean("uniform", over="holders"), Mean("examples", over="holders")]


def make_server(policy, config=PRIVATE):
    spec = RunSpec.build(fl.Method(name="m", source="", aggregate=policy), tiny_problem(), config)
    return Server(spec, by_id(tiny_clients()))


def update_of(server, assignment, value, mask=None):
    kept = Kept(server.spec.graph, mask)
    examples = len(server.clients[assignment.client_id].data.train)
    delta = {
        name: torch.full(kept.shape(name), value).to(tensor.dtype) if tensor.is_floating_point() else torch.tensor(7)
        for name, tensor in assignment.state.items()
    }
    return fl.Update(round=assignment.round, client_id=assignment.client_id, examples=examples, delta=delta, mask=mask)


def moved(server):
    """Change of the global model since its first round, without the noise, times the expected number of clients."""
    config = server.spec.config
    result = {}
    for place, name in enumerate(sorted(server.spec.initial)):
        before, after = server.spec.initial[name].double(), server.state.state[name].double()
        noise = np.zeros(tuple(before.shape))
        if server.spec.initial[name].is_floating_point():
            noise = Streams(config.dp_noise_seed).noise(1, place).standard_normal(tuple(before.shape))
        result[name] = (after - before) * config.cohort - config.dp_noise * config.dp_clip * torch.as_tensor(noise)
    return result


def norm(state):
    return math.sqrt(sum(float(tensor.square().sum()) for name, tensor in state.items() if "num_batches" not in name))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_client_moves_the_sum_by_the_clipping_norm_at_most_and_the_divisor_is_fixed(policy):
    server = make_server(policy)
    assignments = server.assign(1)
    # One of four answers; still the divisor is four, and the sum moves by C, however loud the client.
    server.aggregate([update_of(server, assignments[0], 1e6)])
    sums = {name: tensor for name, tensor in moved(server).items() if "running_var" not in name}
    assert norm(sums) <= 0.5 + 1e-5
    floats = [t for t in server.spec.initial.values() if t.is_floating_point()]
    each = 0.5 / math.sqrt(sum(t.numel() for t in floats))
    assert torch.allclose(sums["last.bias"], torch.full((3,), each, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=repr)
def test_who_holds_what_leaves_the_divisor_alone_and_every_entry_gets_noise(policy):
    mask = UnitMask({"first": torch.tensor([True] * 2 + [False] * 6)})
    server = make_server(policy)
    assignments = server.assign(1)
    server.aggregate([update_of(server, assignments[0], 1e-3, mask)])
    sums = moved(server)
    # Below the norm nothing is clipped; one of four clients holds the first two units, nobody the others.
    assert torch.allclose(sums["first.bias"][:2], torch.full((2,), 1e-3, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(sums["first.bias"][2:], torch.zeros(6, dtype=torch.float64), atol=1e-6)
    assert not torch.equal(server.state.state["first.bias"][2:], server.spec.initial["first.bias"][2:])


def test_examples_do_not_weigh():
    server = make_server(Mean())
    assignments = server.assign(1)
    server.aggregate([update_of(server, assignment, 1e-3) for assignment in assignments])
    assert len({len(client.data.train) for client in tiny_clients()}) > 1
    assert torch.allclose(moved(server)["last.bias"], torch.full((3,), 4e-3, dtype=torch.float64), atol=1e-6)


def test_counts_stay_and_variances_stay_positive():
    server = make_server(Mean(), replace(PRIVATE, dp_noise=100.0))
    server.aggregate([update_of(server, assignment, 1e-3) for assignment in server.assign(1)])
    state = server.state.state
    assert torch.equal(state["norm.num_batches_tracked"], server.spec.initial["norm.num_batches_tracked"])
    assert float(state["norm.running_var"].min()) == pytest.approx(0.1)
    assert float(state["norm.running_mean"].min()) < -1


def test_the_noise_has_the_stated_size():
    server = make_server(Mean(), replace(PRIVATE, dp_clip=2.0, dp_noise=3.0))
    server.aggregate([update_of(server, assignment, 0.0) for assignment in server.assign(1)])
    drawn = torch.cat(
        [
            (server.state.state[name] - tensor).flatten()
            for name, tensor in server.spec.initial.items()
            if tensor.is_floating_point() and "running_var" not in name
        ]
    )
    assert drawn.numel() > 90
    assert float(drawn.std()) == pytest.approx(3.0 * 2.0 / 4, rel=0.2)
    assert abs(float(drawn.mean())) < 0.5


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "delta", "expected"),
    [
        # σ = 1.1, q = 256 / 60000, 60 epochs: the tutorial of TensorFlow Privacy says 3.01 by the older conversion from RDP.
        (1.1, 256 / 60000, 14062, 1e-5, (2.4, 3.02)),
        # q = 1, one round of σ = 1: the exact value is 4.38 (Balle and Wang 2018); RDP is a bound above it.
        (1.0, 1.0, 1, 1e-5, (4.38, 4.9)),
    ],
)
def test_epsilon_is_that_of_the_literature(noise, rate, rounds, delta, expected):
    low, high = expected
    assert low < epsilon_of(noise=noise, rates=(rate,) * rounds, delta=delta) < high


@pytest.mark.parametrize("fixed_size", [False, True])
def test_more_noise_fewer_rounds_and_fewer_clients_spend_less(fixed_size):
    def epsilon(noise=1.0, rate=0.1, rounds=50):
        return epsilon_of(noise=noise, rates=(rate,) * rounds, delta=1e-5, fixed_size=fixed_size)

    assert max(epsilon(noise=2.0), epsilon(rate=0.05)) < epsilon() < min(epsilon(rounds=100), epsilon(rate=1.0))


def test_epsilon_is_that_of_opacus_on_the_same_schedule():
    from opacus.accountants import RDPAccountant

    rates = (0.1,) * 20 + (0.5,) * 5 + (1.0,)
    accountant = RDPAccountant()
    for rate in rates:
        accountant.noise_multiplier = 1.2
        accountant.step(noise_multiplier=1.2, sample_rate=rate)
    ours = epsilon_of(noise=1.2, rates=rates, delta=1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert ours <= accountant.get_epsilon(1e-5) + 1e-9


@pytest.mark.parametrize("alpha", [1.5, 2.0, 8.0])
@pytest.mark.parametrize("noise", [0.7, 2.0])
@pytest.mark.parametrize("others", [1.0, -1.0, 0.3])
def test_the_divergence_of_a_cohort_of_fixed_size_is_below_the_bound(alpha, noise, others):
    """Three clients, of which two are drawn: mixtures of three Gaussians. One client's change is 1, or absent."""
    from sparsekit_fl.server.privacy import _of_fixed_size

    points = np.linspace(-60, 60, 200_001)

    def log_density(own):
        sums = [own + others, own + 0.3, others + 0.3]
        logs = [-((points - mean) ** 2) / (2 * noise**2) for mean in sums]
        return np.logaddexp.reduce(logs, axis=0) - math.log(3 * noise * math.sqrt(2 * math.pi))

    with_it, without = log_density(1.0), log_density(0.0)
    for one, other in ((with_it, without), (without, with_it)):
        found = math.log(np.trapezoid(np.exp(alpha * one + (1 - alpha) * other), points)) / (alpha - 1)
        assert 0 < found <= _of_fixed_size(2 / 3, noise, [alpha])[0] + 1e-9


def test_poisson_sampling_may_be_private_and_a_round_without_anybody_adds_its_noise():
    method = replace(registry["fedavg"](), sampling=Poisson())
    config = replace(PRIVATE, cohort=1, rounds=12)
    result = tiny_run(method, config=config)
    assert result.privacy["epsilon"] == result.privacy["epsilon_as_poisson"]
    assert [record for record in result.rounds if not record.cohort]
    server = Server(RunSpec.build(method, tiny_problem(), config), by_id(tiny_clients()))
    empty = next(round for round in range(1, 30) if not server.assign(round))
    before = dict(server.state.state)
    server.assign(empty)
    server.aggregate([])
    assert not torch.equal(server.state.state["first.bias"], before["first.bias"])


def test_the_result_says_what_was_spent(tmp_path):
    tiny_run(config=PRIVATE, out=tmp_path)
    raw = json.loads((tmp_path / "result.json").read_text())["privacy"]
    assert raw["epsilon"] == epsilon_of(noise=1.5, rates=(0.5,) * 4, delta=1e-5, fixed_size=True)
    assert raw["epsilon_as_poisson"] == epsilon_of(noise=1.5, rates=(0.5,) * 4, delta=1e-5)
    assert raw["epsilon_as_poisson"] < raw["epsilon"] < raw["epsilon_unamplified"]
    assert (raw["clip"], raw["noise"], raw["sampling_rate"], raw["rounds"]) == (0.5, 1.5, 0.5, 4)
    assert "Poisson" in raw["assumes"]
    assert f"ε = {raw['epsilon']:.3g} at δ = 1e-05" in privacy_line(raw)


def test_methods_whose_server_learns_past_the_noise_are_refused_and_the_others_run():
    refused = {}
    for name in registry:
        try:
            check_private(registry[name]())
        except InvalidValueError as error:
            refused[name] = str(error)
    assert set(refused) == {"oort", "refl", "prunefl", "fedmp", "scaffold"}
    assert "does not sample uniformly" in refused["oort"]
    assert "TimelyRatio.observe" in refused["fedmp"]


def after_one_round(config):
    server = make_server(Mean(), config)
    server.aggregate([update_of(server, assignment, 0.0) for assignment in server.assign(1)])
    return server.state.state


def test_who_knows_the_seed_of_the_run_cannot_take_the_noise_off():
    # Updates of zeros: whatever moved is noise.
    initial = make_server(Mean(), SECRET).spec.initial
    place = sorted(initial).index("last.weight")
    moved = [after_one_round(SECRET)["last.weight"] - initial["last.weight"] for _ in range(2)]
    guess = 1.5 * 0.5 / 4 * torch.as_tensor(Streams(SECRET.seed).noise(1, place).standard_normal((3, 8)))
    assert not torch.allclose(moved[0], moved[1], atol=1e-2)
    assert not torch.allclose(moved[0].double(), guess, atol=1e-2)
    known = replace(SECRET, dp_noise_seed=SECRET.seed)
    assert torch.allclose((after_one_round(known)["last.weight"] - initial["last.weight"]).double(), guess, atol=1e-6)


class Spy(fl.Embedded):
    """Keeps what an engine is given for clients."""

    def run(self, rounds, *, spec, clients, store):
        self.given = spec
        return super().run(rounds, spec=spec, clients=clients, store=store)


@pytest.mark.parametrize("config", [PRIVATE, SECRET], ids=["given", "drawn"])
def test_no_engine_is_told_the_seed_of_the_noise(config):
    spy = Spy()
    result = tiny_run("fedavg", config=replace(config, rounds=1), engine=spy)
    assert spy.given.config == replace(SECRET, rounds=1)
    assert result.to_dict()["config"].get("dp_noise_seed") == config.dp_noise_seed


@pytest.mark.same_bits
def test_a_secret_seed_is_in_the_checkpoint_alone_and_a_resumed_run_goes_on_with_it(tmp_path, monkeypatch):
    secret = 2**127 + 12345
    monkeypatch.setattr("secrets.randbits", lambda bits: secret)
    whole = tiny_run(config=SECRET)
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run(config=SECRET, callbacks=[StopAfter(2)], out=tmp_path)
    monkeypatch.setattr("secrets.randbits", lambda bits: secret + 1)
    assert tiny_run(config=SECRET, out=tmp_path, resume=True).final.state_sha256 == whole.final.state_sha256
    assert tiny_run(config=SECRET).final.state_sha256 != whole.final.state_sha256
    holders = [path.name for path in tmp_path.rglob("*") if path.is_file() and str(secret).encode() in path.read_bytes()]
    assert holders == ["checkpoint.safetensors"]
