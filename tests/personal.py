"""Shared by the tests of personalised and weight-mask methods: a model of three numbers, small problems, watched runs."""

import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import nn

import sparsekit_fl as fl
from sparsekit.cli.main import execute
from sparsekit.graph import UnitGraph, UnitGroup, UnitMask, UnitSlice, WeightMask
from sparsekit_fl.layers import Layer
from sparsekit_fl.methods import make_method
from sparsekit_fl.methods.base import ClientInfo
from sparsekit_fl.packing import Kept
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import problem_of, tiny_clients, tiny_config, tiny_problem

# A hidden matrix of three numbers, which are units too, its bias, an output layer that nobody prunes, and a counter.
STATE = {
    "w": torch.tensor([[1.0, 2.0, 3.0]]), "b": torch.tensor([10.0]), "out": torch.tensor([[5.0]]), "n": torch.tensor(10)
}  # fmt: skip
GRAPH = UnitGraph(
    groups={"a": UnitGroup("a", 3, "feature", (UnitSlice("w", 1, torch.arange(3).view(3, 1), "out", False),))},
    shapes={name: tensor.shape for name, tensor in STATE.items()},
)
LAYERS = Layer("hidden", ("w", "b"), ("w", "b"), {"w": torch.Size([1, 3])}), Layer("head", ("out",), ("out",))


def server_context(*, clients=2, cohort=2, rng=0, parameters=(), **given):
    """A server's, on the model of three numbers; all draws are from one generator, seeded with `rng`."""
    own = {"round": 2, "rounds": 10, "state": STATE, "memory": {}, "client": defaultdict(dict), "costs": None}
    own |= {"graph": GRAPH, "layers": LAYERS}
    own["roster"] = dict.fromkeys(range(clients), ClientInfo(10, fl.Capability()))
    rngs = dict.fromkeys(("sampling", "ratio", "mask"), np.random.default_rng(rng))
    return fl.ServerContext(
        **own | given, cohort_size=cohort, rngs=rngs, parameters=frozenset(parameters), capability_of="units"
    )


def update(client_id, w, *, keep=None, units=False, b=0.0, out=0.0, n=0, **fields):
    """An update of the model of three numbers; `keep` says which of w it holds, as single entries or as units."""
    kept = None if keep is None else torch.tensor(keep)
    mask = None if kept is None else UnitMask({"a": kept}) if units else WeightMask({"w": kept[None]})
    delta = {"w": Kept(GRAPH, mask).gather("w", torch.tensor([w])), "b": torch.tensor([b])}
    delta |= {"out": torch.tensor([[out]]), "n": torch.tensor(n)}
    return fl.Update(**{"round": 2, "examples": 1} | fields, client_id=client_id, delta=delta, mask=mask)


def deep_problem():
    """Three layers without batch norm, so that nothing but gradients moves the state."""
    return chain(6, 8, 8, 3, exits=("2",))


def chain(*widths, frozen=(), exits=()):
    """Linear layers of these widths, with ReLU between them; those at `frozen` places do not train."""
    return fl.Problem(model=partial(_chain, widths, frozen, exits), example_inputs=(torch.zeros(2, 6),))


def _chain(widths, frozen, exits):
    model = nn.Sequential(*[layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())][:-1])
    for place in frozen:
        model[place].requires_grad_(False)
    model.exits_before = exits
    return model


@dataclass
class Watching:
    """An engine that keeps the requests and the replies of another one; `change` makes the replies that arrive."""

    engine: fl.Engine = field(default_factory=fl.Processes)
    change: Callable[[fl.Request, fl.Reply], fl.Reply] = lambda request, reply: reply
    seen: list[tuple[fl.Request, fl.Reply]] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    @contextmanager
    def open(self, spec, clients, memories):
        with self.engine.open(spec, clients, memories) as run_clients:

            def watched(requests):
                for request, reply in zip(requests, run_clients(requests), strict=True):
                    arrived = self.change(request, reply)
                    self.seen.append((request, arrived))
                    yield arrived

            yield watched


class Present(Watching):
    """An engine with some of its clients in each round: `there` has the ids of round 1, 2, …"""

    def __init__(self, *there):
        super().__init__()
        self.there = there

    def clients(self, spec, clients):
        round = max([1, *(request.round + 1 for request, _ in self.seen if request.task == "train")])
        return {id: clients[id] for id in self.there[min(round, len(self.there)) - 1]}


def tiny_run(method="fedavg", *, problem=None, clients=None, config=None, rounds=4, **given):
    """A small run of a method or of what `make_method` makes of a text; options of its configuration or of `fl.run`."""
    config = config or tiny_config(rounds=rounds)
    config = replace(config, **{one.name: given.pop(one.name) for one in fields(config) if one.name in given})
    method = make_method(method) if isinstance(method, str) else method
    return fl.run(method, problem or problem_of(method), clients or tiny_clients(), config, **given)


def watched(method="fedavg", *, engine=None, change=lambda request, reply: reply, **options):
    """A small run and its updates."""
    watching = Watching(engine or fl.Processes(), change)
    result = tiny_run(method, engine=watching, **options)
    return result, [reply.update for _, reply in watching.seen if reply.update is not None]


def training(config, **changes):
    """A configuration with other options of local training."""
    return replace(config, training=replace(config.training, **changes))


ONE_STEP = training(tiny_config(), local_epochs=1, batch_size=64)
"""All examples of a client in one batch, once."""


def client_context(method, problem=None, config=None, *, client=None, purpose="local", round=1, memory=None):
    """The specification of a run, a client of it, and what the method sees on the client."""
    spec = RunSpec.build(method, problem or tiny_problem(), config or tiny_config())
    client = client or tiny_clients(1)[0]
    request = fl.Request(round=round, client_id=client.id, state={}, capability=client.capability)
    return spec, client, spec.context(client, request, {"method": {} if memory is None else memory}, purpose=purpose)


SMALL = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--epochs", "1", "--workers", "1"]
"""Options of a command, for a run that is over soon."""


def command(arguments, capsys):
    """The JSON that a command prints, and nothing else."""
    assert execute([*arguments, "--json"]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


class Read:
    """A data set of its own kind, read example by example."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, place):
        return self.data[place]


def write_lines(path, values):
    """Write a JSON object, a line for each name."""
    lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def equals(count=20):
    """Clients with equally many examples, so that every weighting is one."""
    return tiny_clients(count)[::4]
