"""Time of every registered method's client step against what its arithmetic needs, with plain torch.optim.SGD.

    python benchmarks/client_step.py                            a table, the CNN at ratio 1/2
    python benchmarks/client_step.py --json                     one line per method, for machines
    python benchmarks/client_step.py --models vgg11 --methods fedlps heterofl

A client trains one round under the method, in its third round, so that masks and memories are what they usually are. The
reference takes one plain step (zero_grad, backward, torch.optim.SGD) for every forward pass in training that the method
made, on the same batch and on a module of the same shapes: a narrow network for methods that train submodels, the whole
network for the others; two for a method that trains two models. A method that says it trained a submodel but ran the whole
network is measured against the submodel. Both run in turn in one process on one thread; shown are medians of the ratios.

`step` is the time of the loop over batches over that of the reference; `round` is everything that a client does in a
round (reading its data, building the submodel, training, scoring and packing its update) over the same; `flops` is the
arithmetic that the method reports over that of the reference, 1 where these are the same work.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from common import in_turns, over, show
from step import LR, MODELS
from torch import Tensor, nn

from sparsekit import UnitMask, compact, count_cost
from sparsekit.errors import SparsekitError
from sparsekit_fl import Capability, Client, ClientData, Problem, RunConfig, TensorData, TrainingConfig
from sparsekit_fl.checkpoint import dumps, loads
from sparsekit_fl.client import context
from sparsekit_fl.client.messages import Request, Update
from sparsekit_fl.client_round import run_client
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.exits import WithExits
from sparsekit_fl.problem.metrics import TokenAccuracy, accuracy
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec

BATCH = 20
ROUND = 3
METRICS = {"cnn": accuracy, "vgg11": accuracy, "lstm": TokenAccuracy(())}


def task(name: str, examples: int) -> tuple[Problem, TensorData]:
    """A model of `step.py` and noise to train it on."""
    make, data, _ = MODELS[name]
    inputs, targets = data(examples)
    problem = Problem(
        model=make,
        example_inputs=(torch.zeros_like(inputs[:2]),),
        metrics={"accuracy": METRICS[name]},
        channels_last=name == "cnn",
    )
    return problem, TensorData((inputs,), targets)


class Pass(nn.Module):
    """One forward pass in training: of which module, by which of its methods, and what it was given."""

    def __init__(self, module: nn.Module, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.method, self.inputs, self.options = module, method, inputs, options

    def forward(self, *inputs: Any) -> list[Tensor]:
        """The outputs of the module: its own, or those of its exits."""
        outputs = getattr(self.module, self.method)(*inputs, **self.options)
        return outputs if isinstance(outputs, list) else [outputs]


class Record:
    """The forward passes of a client's round, over one plain module for all that have the same shapes."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._modules: dict[tuple[object, ...], nn.Module] = {}

    def add(self, module: nn.Module, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
        if shapes not in self._modules:
            self._modules[shapes] = plain_copy(module)
        copied = tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)
        self.passes.append(Pass(self._modules[shapes], method, copied, options))


def plain_copy(module: nn.Module) -> nn.Module:
    """A module of its own, without what a method hung on it."""
    # Within `functional_call` the parameters are parts of others, which cannot be copied with their graph.
    own = {id(p): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in module.parameters()}
    copied = copy.deepcopy(module, own)
    for part in copied.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return copied


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Write down every outermost forward pass that is made in training mode with gradients."""
    within = False

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *inputs: Any, **options: Any) -> Any:
            nonlocal within
            if not within and module.training and torch.is_grad_enabled():
                record.add(module, real.__name__, inputs, options)
            before, within = within, True
            try:
                return real(module, *inputs, **options)
            finally:
                within = before

        return call

    calls, exits = noted(nn.Module.__call__), noted(WithExits.outputs)
    with patch.object(nn.Module, "__call__", calls), patch.object(WithExits, "outputs", exits):
        yield


class Case:
    """A method on a model, after two rounds."""

    def __init__(self, method: str, model: str, ratio: float, steps: int) -> None:
        torch.manual_seed(0)
        problem, data = task(model, steps * BATCH)
        training = TrainingConfig(local_epochs=1, batch_size=BATCH, lr=LR)
        config = RunConfig(rounds=100, cohort=2, training=training)
        self.spec = RunSpec.build(registry[method](), problem, config)
        held = data.take(torch.arange(BATCH).numpy())
        self.clients = {
            id: Client(id=id, data=ClientData(data, held, held), capability=Capability(ratio=ratio)) for id in range(2)
        }
        self.memories = dict.fromkeys(self.clients, dumps({}))
        server = Server(self.spec, self.clients)
        for round in range(1, ROUND):
            server.aggregate([self._train(request) for request in server.requests(round)])
        self.request = server.requests(ROUND)[0]

    def _train(self, request: Request) -> Update:
        """Train, and keep the memory."""
        update, self.memories[request.client_id] = self._round(request)
        return update

    def _round(self, request: Request) -> tuple[Update, bytes]:
        memory = loads(self.memories[request.client_id])
        reply, memory = run_client(self.spec, self.clients[request.client_id], request, memory)
        assert reply.update is not None
        return reply.update, dumps(memory)

    def once(self) -> Update:
        """The client's third round, from the same memory every time."""
        return self._round(self.request)[0]


class Reference:
    """Plain steps for the forward passes of a record."""

    def __init__(self, case: Case, record: Record, update: Update) -> None:
        self.passes = record.passes
        modules = {one.module: self._needed(case, one.module, update) for one in self.passes}
        for one in self.passes:
            one.module = modules[one.module]
        self.loss = case.spec.problem.loss
        self.targets = case.clients[0].data.train.materialise().targets
        self.steps = {
            module: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR) for module in modules.values()
        }

    @staticmethod
    def _needed(case: Case, module: nn.Module, update: Update) -> nn.Module:
        """The module itself, or the submodel that the update says was trained."""
        full = case.spec.problem.model()
        whole = {name: p.shape for name, p in full.named_parameters()}
        if isinstance(update.mask, UnitMask) and {name: p.shape for name, p in module.named_parameters()} == whole:
            return compact(full, case.spec.graph, update.mask)
        return module

    def run(self) -> None:
        """All steps."""
        for one in self.passes:
            one.train()
            self.steps[one.module].zero_grad()
            targets = self.targets[: len(one.inputs[0])]
            torch.stack([self.loss(output, targets) for output in one(*one.inputs)]).sum().backward()
            self.steps[one.module].step()

    def flops(self) -> int:
        """Of all steps: forward, and a backward that costs twice as much."""
        costs: dict[str, int] = {}
        total = 0
        for one in self.passes:
            kind = f"{id(one.module)} {one.method} {one.options}"
            if kind not in costs:
                costs[kind] = count_cost(one, *(x[:1] for x in one.inputs)).flops
            total += 3 * costs[kind] * len(one.inputs[0])
        return total


def measure(method: str, model: str, ratio: float, steps: int, repeats: int) -> dict[str, Any]:
    """One method on one model."""
    case = Case(method, model, ratio, steps)
    record = Record()
    with recording(record):
        update = case.once()
    reference = Reference(case, record, update)
    reference.run()
    loops: list[float] = []
    fit = context.fit

    def timed_fit(*arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return fit(*arguments, **options)
        finally:
            loops[-1] += time.process_time() - began

    def timed_round() -> None:
        loops.append(0.0)
        with patch.object(context, "fit", timed_fit):
            case.once()

    times = in_turns({"round": timed_round, "plain": reference.run}, repeats)
    times["step"] = loops
    return {
        "model": model,
        "method": method,
        "ratio": round(update.ratio, 4),
        "step_over_reference": round(over(times, "step", "plain")[1], 3),
        "round_over_reference": round(over(times, "round", "plain")[1], 3),
        "flops_over_reference": round(update.cost.flops_training / reference.flops(), 3),
        "passes_per_batch": round(len(record.passes) / steps, 2),
        "reference_milliseconds": round(1e3 * statistics.median(times["plain"]) / len(record.passes), 3),
    }


def main() -> None:
    """Read the options and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(registry), help="default: all that are registered")
    parser.add_argument("--models", nargs="+", choices=METRICS, default=["cnn"])
    parser.add_argument("--ratio", type=float, default=0.5, help="capability of the client (default 0.5)")
    parser.add_argument("--steps", type=int, default=10, help="batches of 20 per round (default 10)")
    parser.add_argument("--repeats", type=int, default=9, help="measured rounds (default 9)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def rows() -> Iterator[dict[str, Any]]:
        for model, method in product(options.models, options.methods):
            try:
                row = measure(method, model, options.ratio, options.steps, options.repeats)
            except SparsekitError as error:
                row = {"model": model, "method": method, "refused": str(error)}
            yield row

    show(rows(), options.json)


if __name__ == "__main__":
    main()
