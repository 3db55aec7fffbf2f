"""Low-rank adapters: their pairs, HetLoRA and FlexLoRA by hand, shares of memory, and a base that the server writes."""

from dataclasses import dataclass, replace

import pytest
import torch
from personal import ONE_STEP, watched
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.graph import UnitMask
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.methods.adapters import FlexLoRA, HetLoRA
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, answer, by_id
from sparsekit_fl.testing import MethodContract, OtherNet, adapter_problem, tiny_clients, tiny_config, tiny_problem

PAIR = fl.Adapter("lora_A", "lora_A.weight", "lora_B.weight", None)
RANKS = (4, 2, 1)


def trained(method, *, ranks=RANKS, tmp_path):
    """A round with clients of these ranks: the server, and of each client A and B as it trained them, padded with zeros."""
    clients = [replace(one, capability=fl.Capability(ratio=rank / 4)) for one, rank in zip(tiny_clients(), ranks, strict=False)]
    spec = RunSpec.build(method, adapter_problem(), replace(ONE_STEP, cohort=len(ranks), capability_levels=None))
    memories, found, updates = Memories(tmp_path, durable=False), [], []
    server = Server(spec, by_id(clients), remembered=Memories(tmp_path / "server", durable=False))
    ctx = server.context(1)
    for request in server.requests(ctx):
        reply = answer(server.spec, server.clients[request.client_id], replace(request, memory_round=None), memories)
        assert not reply.error, reply.error
        updates.append(server.validate(ctx, request, server.priced(request, reply)))
        rank = updates[-1].mask.counts()["lora_A"]
        padded = [torch.zeros(4, 6, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)]
        padded[0][:rank] = ctx.state[PAIR.down][:rank].double() + updates[-1].delta[PAIR.down]
        padded[1][:, :rank] = ctx.state[PAIR.up][:, :rank].double() + updates[-1].delta[PAIR.up]
        found.append(padded)
    server.aggregate(ctx, updates)
    return server, found, updates


def test_pairs_are_named_and_nothing_else_is_one():
    graph = RunSpec.build(fl.methods.fedavg(), adapter_problem(), tiny_config()).graph
    assert fl.adapters(graph) == (PAIR,)
    assert fl.adapters(sk.trace_units(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8)), torch.zeros(2, 6))) == ()
    for method in (HetLoRA(), FlexLoRA()):
        with pytest.raises(NoUnitsError, match=r"no pair lora_A, lora_B that trains; add them"):
            RunSpec.build(method, tiny_problem(), tiny_config())
        spec = RunSpec.build(method, adapter_problem(), tiny_config())
        assert set(spec.graph.groups) == {"lora_A"}, "the layers that train besides stay whole"


class Mixed(nn.Module):
    """An embedding, a linear layer and a convolution, to which PEFT adds adapters."""

    def __init__(self):
        super().__init__()
        self.words, self.line, self.image = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        hidden = self.line(self.words(tokens)).transpose(1, 2).reshape(-1, 8, 2, 2)
        return self.head(self.image(hidden).mean((2, 3)))


def mixed():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Mixed(), peft.LoraConfig(r=4, target_modules=["words", "line", "image"])).base_model.model


def test_adapters_of_peft_are_pairs_whose_mean_product_is_what_the_model_then_adds():
    """Of embeddings and convolutions too. With one step of each client and full ranks, the mean of products has its rank."""
    problem = fl.Problem(model=mixed, example_inputs=(torch.zeros(2, 4, dtype=torch.int64),))
    tokens = fl.TensorData((torch.arange(48).reshape(12, 4) % 10,), torch.arange(12) % 3)
    clients = [fl.Client(id=id, data=fl.ClientData(tokens.take([*range(id, 12)]), None, tokens)) for id in range(2)]
    config = replace(ONE_STEP, rounds=1, cohort=2, capability_levels=None)
    spec = RunSpec.build(FlexLoRA(), problem, config)
    pairs = fl.adapters(spec.graph)
    assert [pair.base for pair in pairs] == [f"{name}.base_layer.weight" for name in ("words", "line", "image")]
    result, updates = watched(FlexLoRA(), problem=problem, clients=clients, config=config)
    total = sum(update.examples for update in updates)
    for pair in pairs:
        mean = 0.0
        for update in updates:
            down, up = (spec.initial[name].double() + update.delta[name] for name in (pair.down, pair.up))
            mean = mean + update.examples / total * up.flatten(1) @ down.flatten(1)
        down, up = (result.state[name].double().flatten(1) for name in (pair.down, pair.up))
        assert down.shape[0] == 4
        assert mean.norm() > 0
        first, values, last = torch.linalg.svd(mean)
        torch.testing.assert_close(up @ down, first[:, :4] * values[:4] @ last[:4], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", [HetLoRA(), FlexLoRA()])
def test_a_capability_is_a_share_of_the_ranks_and_of_memory_where_adapters_alone_train(method):
    for of, found in (("flops", "units"), ("units", "units"), ("memory", "memory")):
        problem = fl.Problem(model=frozen_but_adapters, example_inputs=(torch.zeros(2, 6),))
        spec = RunSpec.build(method, problem, replace(tiny_config(), capability_of=of))
        ctx = Server(spec, by_id(tiny_clients())).context(1)
        assert spec.config.capability_of == found
        assert [ctx.width(rank / 4) for rank in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
        assert method.least(ctx) == 0.25


def frozen_but_adapters():
    model = OtherNet("adapters")
    for name, leaf in model.named_parameters():
        leaf.requires_grad_("lora" in name)
    return model


def test_memory_counts_the_entries_that_train():
    config = replace(tiny_config(), capability_of="memory")
    spec = RunSpec.build(fl.methods.heterofl(), adapter_problem(), config)
    sizes = {name: group.size for name, group in spec.graph.groups.items()}
    assert set(sizes) == {"lora_A", "outer"}
    half = UnitMask({name: torch.arange(size) < size // 2 for name, size in sizes.items()})
    result, updates = watched("heterofl", problem=adapter_problem(), capability_of="memory", capability_levels=(0.6,), rounds=1)
    whole = 24 + 32 + 64 + 8 + 24 + 3  # A, B, outer, its bias, out, its bias
    kept = sum(one.numel() for one in updates[0].delta.values())
    assert kept <= 0.6 * whole
    assert result.rounds[0].ratios[updates[0].client_id] == pytest.approx(kept / whole)
    from sparsekit_fl.client.context import share_of

    assert share_of(spec.costs, half, "memory") == pytest.approx((12 + 16 + 32 + 4 + 12 + 3) / whole)


def test_hetlora_pads_with_zeros_and_weighs_by_the_norm_of_the_product(tmp_path):
    server, found, updates = trained(HetLoRA(gamma=1.0), tmp_path=tmp_path)
    norms = torch.stack([(up @ down).norm() for down, up in found])
    assert [update.mask.counts()["lora_A"] for update in updates] == list(RANKS)
    for side, name in enumerate((PAIR.down, PAIR.up)):
        expected = sum(norm / norms.sum() * part[side] for norm, part in zip(norms, found, strict=True))
        torch.testing.assert_close(server.state.model[name].double(), expected, atol=1e-7, rtol=1e-6)
    examples = torch.tensor([float(update.examples) for update in updates])
    moved = sum(n / examples.sum() * update.delta["out.bias"] for n, update in zip(examples, updates, strict=True))
    torch.testing.assert_close(server.state.model["out.bias"], server.spec.initial["out.bias"] + moved)


def test_hetlora_trains_on_the_norms_of_the_last_ranks_and_drops_them_where_they_shrank(tmp_path):
    plain, strong = (trained(HetLoRA(gamma=0.5, lam=lam), tmp_path=tmp_path) for lam in (0.0, 5.0))
    start = strong[0].spec.initial
    down, up = (start[name].double().requires_grad_() for name in (PAIR.down, PAIR.up))
    (down[2:].norm() * up[:, 2:].norm()).backward()
    rate = ONE_STEP.training.lr
    tail = (plain[1][0][0] - 5.0 * rate * down.grad)[2:].norm() * (plain[1][0][1] - 5.0 * rate * up.grad)[:, 2:].norm()
    shrank = tail < (down[2:].norm() * up[:, 2:].norm())
    assert shrank
    assert [update.mask.counts()["lora_A"] for update in strong[2]] == [2, 1, 1], "the last one of rank 1 stays"
    kept = (plain[1][0][0] - 5.0 * rate * down.grad)[:2]
    torch.testing.assert_close(strong[1][0][0][:2], kept.detach(), atol=1e-6, rtol=1e-5)
    told = strong[0].requests(strong[0].context(2))
    assert [request.mask.counts()["lora_A"] for request in told] == [2, 1, 1], "they are gone for good"


def test_flexlora_factors_the_mean_of_the_products_so_that_each_rank_is_the_best_of_it(tmp_path):
    server, found, updates = trained(FlexLoRA(), tmp_path=tmp_path)
    examples = torch.tensor([float(update.examples) for update in updates], dtype=torch.float64)
    mean = sum(n / examples.sum() * up @ down for n, (down, up) in zip(examples, found, strict=True))
    first, values, last = torch.linalg.svd(mean)
    down, up = (server.state.model[name].double() for name in (PAIR.down, PAIR.up))
    for rank in (1, 2, 4):
        best = first[:, :rank] * values[:rank] @ last[:rank]
        torch.testing.assert_close(up[:, :rank] @ down[:rank], best, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(down @ down.T, torch.eye(4, dtype=torch.float64), atol=1e-6, rtol=0)


def test_flexlora_beyond_the_rank_of_the_mean_can_still_learn(tmp_path):
    """One client of rank 1: the other ranks add nothing now, and have gradients."""
    server, found, _ = trained(FlexLoRA(), ranks=(1,), tmp_path=tmp_path)
    down, up = (server.state.model[name].double() for name in (PAIR.down, PAIR.up))
    torch.testing.assert_close(up @ down, found[0][1] @ found[0][0], atol=1e-6, rtol=1e-5)
    assert up[:, 1:].abs().max() < 1e-7
    assert down.norm(dim=1).min() > 0.1


class TestHetLoRA(MethodContract):
    problem = adapter_problem()

    @pytest.fixture
    def make(self):
        return HetLoRA


class TestFlexLoRA(TestHetLoRA):
    largest_step = 100.0  # other matrices, with the product of the mean

    @pytest.fixture
    def make(self):
        return FlexLoRA


@dataclass(frozen=True, kw_only=True)
class Merged(fl.Method):
    """FLoRA: the server adds the mean of the products to the frozen base, and adapters begin again from zero."""

    def check(self, setup):
        return replace(setup, written=[BASE])

    def aggregate(self, server, updates):
        total = sum(update.examples for update in updates)
        base = server.state[BASE].double()
        for update in updates:
            down, up = (server.state[name].double() + update.delta[name] for name in (PAIR.down, PAIR.up))
            base += update.examples / total * up @ down
        return {**fl.mean(server, updates), BASE: base.float(), PAIR.up: torch.zeros(8, 4)}


BASE = "inner.weight"


def test_the_server_may_write_a_frozen_base_which_clients_receive_and_never_send_back():
    config = replace(tiny_config(rounds=2), capability_levels=None)
    problem = adapter_problem()
    result, updates = watched(Merged(), problem=problem, config=config)
    assert not any(record.dropped for record in result.rounds)
    assert all(BASE not in update.delta for update in updates)
    spec = RunSpec.build(Merged(), problem, config)
    base, up = spec.initial[BASE].double(), spec.initial[PAIR.up].double()
    down = spec.initial[PAIR.down].double()
    for place in (updates[:4], updates[4:]):
        total = sum(update.examples for update in place)
        for update in place:
            base += update.examples / total * (up + update.delta[PAIR.up]) @ (down + update.delta[PAIR.down])
        down = down + sum(update.examples / total * update.delta[PAIR.down] for update in place)
        up = torch.zeros(8, 4, dtype=torch.float64)
    torch.testing.assert_close(result.state[BASE].double(), base, atol=1e-6, rtol=1e-5)
    plain, _ = watched("fedavg", problem=problem, config=config)
    assert result.cost.downlink_bytes - plain.cost.downlink_bytes == 8 * spec.initial[BASE].nbytes
    assert result.cost.uplink_bytes == plain.cost.uplink_bytes
    # A kept model has the base that it was trained on.
    best, _ = watched(Merged(), problem=problem, config=replace(config, deploy="best"))
    assert best.final.per_client


def test_only_frozen_entries_need_to_be_named_as_written():
    for name in ("outer.weight", "nothing"):
        with pytest.raises(InvalidValueError, match=rf"written must name frozen parameters, got \['{name}'\]"):
            RunSpec.build(Writes(name=name), adapter_problem(), tiny_config())


@dataclass(frozen=True, kw_only=True)
class Writes(fl.Method):
    name: str = ""

    def check(self, setup):
        return replace(setup, written=[self.name])
