"""FedLPS: nested orders, narrower levels, heads and the share of labels by exact numbers."""

from dataclasses import replace

import pytest
import torch
from personal import Watching, chain, client_context, deep_problem, server_context, tiny_run, watched

import sparsekit_fl as fl
from sparsekit import trace_units
from sparsekit.graph import UnitMask
from sparsekit_fl.methods import fedlps, heterofl
from sparsekit_fl.methods.base import ClientInfo
from sparsekit_fl.methods.fedlps import _apart, _hear
from sparsekit_fl.packing import Kept
from sparsekit_fl.testing import tiny_clients, tiny_config

LEVELS = (1.0, 0.5, 0.25)


def on_server(method, state, **given):
    roster = {place: ClientInfo(10, fl.Capability(ratio=ratio)) for place, ratio in enumerate(LEVELS)}
    model = deep_problem().model()
    graph = trace_units(model, torch.zeros(2, 6))
    return server_context(roster=roster, graph=graph, state=state, **given), method


def test_magnitude_at_round_0_orders_the_units_of_a_trained_network_and_each_submodel_holds_the_narrower_ones():
    state = deep_problem().model().state_dict()
    state["0.weight"] *= torch.arange(1.0, 9.0)[:, None]
    memory: dict = {}
    ctx, method = on_server(fedlps(), state, trained=True, memory=memory)
    masks = [method.assign(ctx, place).mask for place in range(3)]
    assert masks[0] is None
    assert masks[1]["0"].sum() == 4
    assert all(bool((masks[1][name] | ~masks[2][name]).all()) for name in masks[1])
    sums = state["0.weight"].abs().sum(1) + state["0.bias"].abs()
    assert set(masks[2]["0"].nonzero().flatten().tolist()) <= set(sums.argsort(descending=True)[:4].tolist())
    # Later rounds keep the order, whatever has become of the weights.
    later, _ = on_server(method, {name: -tensor.flip(0) for name, tensor in state.items()}, trained=True, memory=memory)
    assert method.assign(later, 2).mask == masks[2]
    first = [method.assign(on_server(method, state)[0], place).mask for place in (1, 2)]
    assert [mask["0"].tolist() for mask in first] == [[True] * 4 + [False] * 4, [True] * 2 + [False] * 6]


def test_one_step_adds_the_gradients_of_the_submodel_and_of_the_narrower_level_inside_it():
    config = replace(tiny_config(), capability_levels=(1.0, 0.25), capability_of="units")
    config = replace(config, training=fl.TrainingConfig(local_epochs=1, batch_size=64, lr=0.1))
    spec, client, ctx = client_context(fedlps(), deep_problem(), config)
    order = -torch.arange(float(spec.graph.units))
    task = fl.Task(state=spec.initial, extra={"order": order})
    result = fedlps().train(ctx, task)
    model = deep_problem().model()
    model.load_state_dict(spec.initial)
    x, y = client.data.train.inputs[0], client.data.train.targets
    narrow = UnitMask({name: torch.arange(8) < 2 for name in spec.graph.groups})
    zeros = {name: torch.zeros_like(tensor) for name, tensor in spec.initial.items()}
    kept = Kept(spec.graph, narrow)
    on = kept.scatter_all(kept.gather_all({name: torch.ones_like(t) for name, t in spec.initial.items()}), zeros)
    loss = spec.problem.loss(model(x), y)
    small = torch.func.functional_call(model, {name: leaf * on[name] for name, leaf in model.named_parameters()}, (x,))
    (loss + spec.problem.loss(small, y)).backward()
    for name, leaf in model.named_parameters():
        torch.testing.assert_close(result.state[name], (leaf - 0.1 * leaf.grad).detach())
    assert result.log.loss == pytest.approx((loss.item(),)), "the loss of the whole submodel is reported"
    flops = [3 * spec.costs.forward_flops(mask) * len(y) for mask in (None, narrow)]
    assert result.work.flops == sum(flops)
    assert fedlps(nested=False).train(ctx, task).work.flops == flops[0]


def test_a_device_gets_and_sends_its_part_only_and_deploys_the_newest_under_its_units():
    watching, problem = Watching(), chain(6, 64, 64, 3)
    result = tiny_run(fedlps(), engine=watching, problem=problem, rounds=2, redraw_capability=False)
    other, nested = Watching(), heterofl(clip=None, scaler=False)
    tiny_run(nested, engine=other, problem=problem, rounds=2, redraw_capability=False)
    for (request, reply), (_, theirs) in zip(watching.seen, other.seen, strict=True):
        if reply.update is None:
            continue
        assert reply.update.mask == request.mask
        extra = sum(tensor.nbytes for tensor in (*request.extra.values(), *reply.update.extra.values()))
        # A mask that keeps all units takes a bit for each.
        assert reply.update.cost.uplink_bytes - theirs.update.cost.uplink_bytes <= extra
        assert reply.update.cost.downlink_bytes - theirs.update.cost.downlink_bytes <= extra
        assert reply.update.cost.flops_scoring == 0
    for one in result.final.per_client:
        request = next(request for request, _ in watching.seen[::-1] if request.client_id == one.id)
        assert 0.9 * request.capability.ratio < (one.ratio or 1.0) <= request.capability.ratio


@pytest.mark.parametrize(("head", "own"), [("own", True), ("shared", False)])
def test_a_head_of_ones_own_comes_back_and_the_server_has_the_mean_of_all_heads(head, own):
    method = fedlps(head=head, nested=False)
    config = replace(tiny_config(rounds=1), capability_levels=(1.0,), cohort=8)
    result, updates = watched(method, problem=deep_problem(), config=config)
    assert len(updates) == 8
    spec, client, ctx = client_context(method, deep_problem(), config)
    extra = {"order": -torch.arange(float(spec.graph.units)), "own head": torch.tensor(own)}
    before = method.train(ctx, fl.Task(state=spec.initial, extra=extra))
    newer = {name: tensor + 1.0 for name, tensor in spec.initial.items()}
    request = fl.Request(round=2, client_id=client.id, state=newer, extra=extra)
    model = method.deploy(replace(ctx, request=request), newer)
    assert torch.equal(model.state["4.weight"], before.state["4.weight"] if own else newer["4.weight"])
    assert torch.equal(model.state["0.weight"], newer["0.weight"])
    alone = method.deploy(replace(ctx, request=request, memory={}), newer)
    assert alone.state == newer
    # From the same start, the mean of the changes is the mean of the heads.
    heads = torch.stack([spec.initial["4.weight"] + one.delta["4.weight"] for one in updates]).double()
    weights = torch.tensor([one.examples for one in updates], dtype=torch.float64)
    mean = (heads * weights[:, None, None]).sum(0) / weights.sum()
    torch.testing.assert_close(result.state["4.weight"].double(), mean, rtol=1e-5, atol=1e-6)


def test_the_share_of_labels_between_clients_is_what_pairs_of_labels_say():
    memory: dict = {}
    assert _apart(memory) == 0.0
    _hear(memory, torch.tensor([2.0, 0.0]))
    assert _apart(memory) == 0.0, "one client has nobody to differ from"
    _hear(memory, torch.tensor([0.0, 2.0]))
    assert _apart(memory) == 1.0
    memory = {}
    for _ in range(3):
        _hear(memory, torch.tensor([5.0, 5.0]))
    # Two of a client's ten: 20 + 20 of 90 pairs alike. Between clients half are.
    assert _apart(memory) == pytest.approx((40 / 90 - 0.5) / 0.5)


def test_labels_are_told_once_and_heads_are_own_where_they_differ():
    def alike(client):
        return replace(client, data=replace(client.data, train=tiny_clients(1)[0].data.train))

    for clients, own in ((tiny_clients(), None), ([alike(client) for client in tiny_clients()], False)):
        watching = Watching()
        tiny_run(fedlps(), engine=watching, clients=clients, rounds=4)
        told = [request.client_id for request, reply in watching.seen if reply.update and reply.update.extra]
        assert len(told) == len(set(told)) > 4
        last = watching.seen[-1][0].extra["own head"]
        assert own is None or bool(last) is own
