"""What SECURITY.md says is not protected: each test shows an exposure, so that the page changes with the code.

Two more are shown elsewhere: `flwr run` needs no key in flower/test_deployment.py, and a client that does not answer ends the
run in flower/test_local_grid.py.
"""

from dataclasses import replace

import pytest
import torch
from own_models import OwnModels
from personal import ONE_STEP, tiny_run, watched
from safetensors.torch import load_file
from torch import nn

import sparsekit_fl as fl
from sparsekit_fl.packing import pack, unpack
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

LIAR = 1
ONCE = {"rounds": 1, "capability_levels": None, "redraw_capability": False}


def lying(lie):
    """One client sends another update."""

    def change(request, reply):
        lies = reply.update is not None and request.client_id == LIAR
        return replace(reply, update=lie(reply.update)) if lies else reply

    return change


def stating(cost=None, **metrics):
    """One client sends honest weights, and other costs and metrics of its training."""
    return lying(lambda one: replace(one, metrics={**one.metrics, **metrics}, cost=replace(one.cost, **(cost or {}))))


def sending(delta):
    """One client sends other changes of its weights."""
    return lying(lambda one: replace(one, delta={k: delta(v) if v.is_floating_point() else v for k, v in one.delta.items()}))


def with_data(change):
    """The clients; one trains on other examples."""
    clients = tiny_clients()
    own = clients[LIAR].data
    inputs, targets = change(own.train.inputs[0], own.train.targets)
    clients[LIAR] = replace(clients[LIAR], data=replace(own, train=fl.TensorData((inputs,), targets)))
    return clients


def test_the_server_can_compute_a_training_example_from_an_update():
    clients = [replace(one, data=replace(one.data, train=one.data.train.take([0]))) for one in tiny_clients()]
    problem = fl.Problem(model=lambda: nn.Linear(6, 3), example_inputs=(torch.zeros(1, 6),))
    _, updates = watched(problem=problem, clients=clients, config=ONE_STEP, rounds=1)
    for update in updates:
        secret = clients[update.client_id].data.train.inputs[0][0]
        found = update.delta["weight"][0] / update.delta["bias"][0]
        torch.testing.assert_close(found, secret, rtol=1e-3, atol=1e-3)


def test_masks_and_label_counts_depend_on_the_data_and_come_with_ratio_costs_and_scores():
    plain, other = with_data(lambda x, y: (x, y)), with_data(lambda x, y: (x * torch.tensor([9.0, 0, 0, 0, 0, 0]), y))

    def sent(method, clients):
        return next(one for one in watched(method, clients=clients, cohort=8, **ONCE)[1] if one.client_id == LIAR)

    update = sent("fedlps", plain)
    labels = plain[LIAR].data.train.targets
    assert torch.equal(update.extra["labels"], torch.bincount(labels, minlength=3).double())
    assert {"loss", "accuracy"} <= set(update.metrics)
    assert 0 < update.ratio <= 1
    assert update.cost.flops > 0
    assert not sent("fedlps head=own", plain).extra
    assert not torch.equal(sent("fedspa", plain).extra["next_mask"], sent("fedspa", other).extra["next_mask"])


def test_flops_losses_and_accuracies_that_a_client_states_are_believed_and_its_clock_decides_nothing():
    honest = tiny_run(cohort=8, rounds=2)
    told, _ = watched(change=stating({"flops": 10**6}, loss=-500.0), cohort=8, rounds=2)
    assert told.final == honest.final
    assert told.cost.flops > honest.cost.flops + 10**6
    assert told.cost.simulated_seconds > honest.cost.simulated_seconds, "these follow from the FLOPs"
    assert all(record.loss is not None and record.loss < 0 for record in told.rounds)
    clock, _ = watched(
        change=stating({"wall_seconds": 10.0**9, "simulated_seconds": 10.0**9, "uplink_bytes": 0}), cohort=8, rounds=2
    )
    for name in ("simulated_seconds", "uplink_bytes", "downlink_bytes", "flops"):
        assert getattr(clock.cost, name) == getattr(honest.cost, name)
    beyond, _ = watched(change=stating({"flops": 10**7}), cohort=8, rounds=2)
    assert all([client for client, _ in record.dropped] == [LIAR] for record in beyond.rounds), "more than a method allows"


@pytest.mark.parametrize(
    ("method", "lie"),
    [
        ("oort", stating(mean_squared_loss=10.0**6)),
        pytest.param("refl", stating({"flops": 10**6}), marks=pytest.mark.slow),
        pytest.param("p-ucbv-dyn", stating(accuracy=0.0), marks=pytest.mark.slow),
    ],
)
def test_what_a_client_states_moves_the_sampling_or_the_ratios(method, lie):
    seen = []
    for change in (stating(), lie):
        result, _ = watched(method, change=change, rounds=5, cohort=5)
        assert not any(record.dropped for record in result.rounds)
        seen.append([record.ratios for record in result.rounds])
    assert seen[0] != seen[1]


def test_scores_that_a_client_states_are_believed():
    def perfect(request, reply):
        told = {"accuracy": (12.0, 12.0), "loss": (0.0, 12.0)}
        if reply.evaluation is None:
            return reply
        return replace(reply, evaluation=replace(reply.evaluation, scores={**reply.evaluation.scores, "personal": told}))

    assert watched(change=perfect, rounds=1)[0].final.metrics == {"accuracy": 1.0, "loss": 0.0}


def test_one_client_destroys_the_model_with_finite_numbers():
    result, _ = watched(change=sending(lambda one: torch.full_like(one, 1e30)), cohort=8, rounds=1)
    assert not result.rounds[0].dropped
    assert min(float(one.abs().max()) for one in result.state.values() if one.is_floating_point()) > 1e27


def test_a_run_adds_no_noise_and_one_example_moves_the_model():
    runs = [with_data(lambda x, y: (x, y)), with_data(lambda x, y: (x, y)), with_data(lambda x, y: (x[:-1], y[:-1]))]
    same, again, without = (tiny_run(clients=clients, cohort=8, rounds=1).final.state_sha256 for clients in runs)
    assert same == again != without


@pytest.mark.parametrize(
    ("clients", "change"),
    [
        (tiny_clients(), sending(torch.zeros_like)),
        (with_data(lambda x, y: (x, (y + 1) % 3)), stating()),
        (with_data(lambda x, y: (torch.cat([x, 9 + 0 * x]), torch.cat([y, 0 * y]))), stating()),
    ],
    ids=["a free rider", "poisoned labels", "a backdoor"],
)
def test_nobody_notices(clients, change):
    result, _ = watched(clients=clients, change=change, cohort=8, rounds=2)
    assert all(LIAR in record.ratios and not record.dropped and not record.notes for record in result.rounds)


def test_a_message_shows_the_model_and_can_be_changed_on_its_way():
    pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from local_grid import InProcess, planted

    from sparsekit_fl.flower.engine import content, read

    shown = list[bytes]()

    def doubled(message, reply):
        shown.extend(one.deflate() for one in get_all_nested_objects(message).values())
        value = unpack(read(reply)[1][0])
        value["update"]["delta"] = {name: 2 * one for name, one in value["update"]["delta"].items()}
        return Message(content(pack(value)), reply_to=message)

    initial = RunSpec.build(fl.Method(), tiny_problem(), tiny_config()).initial
    moved = [
        result.state["first.weight"] - initial["first.weight"]
        for result in (tiny_run(rounds=1), tiny_run(rounds=1, engine=InProcess(fault=planted(doubled))))
    ]
    torch.testing.assert_close(moved[1], 2 * moved[0])
    assert any(initial["first.weight"].numpy().tobytes() in one for one in shown)


def test_models_and_memories_lie_open_in_the_folder_of_a_node(tmp_path):
    tiny_run(OwnModels(), out=tmp_path)
    model = load_file(tmp_path / "models" / "client-0.safetensors")
    memory = next((tmp_path / "clients").glob("0-*.state")).read_bytes()
    assert model["first.weight"].numpy().tobytes() in memory
