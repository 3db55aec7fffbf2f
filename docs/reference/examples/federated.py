"""Examples of the federated layer's public names for the API reference; a test runs each after the lines before the mark."""

import torch
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model.exits_before = ("2",)  # where depthfl lets a weak client stop
    return model


def split(examples: int) -> fl.TensorData:
    x = torch.randn(examples, 8)
    return fl.TensorData((x,), (x[:, 0] > 0).long())


problem = fl.Problem(model=make_model, example_inputs=(torch.zeros(1, 8),))
clients = [fl.Client(id=k, data=fl.ClientData(split(30), split(10), split(10))) for k in range(4)]
config = fl.RunConfig(rounds=1, cohort=2, training=fl.TrainingConfig(local_epochs=1), seed=0)
# --- examples ---
# sparsekit_fl.Method, sparsekit_fl.ServerContext, sparsekit_fl.Setup, sparsekit_fl.Task, sparsekit_fl.units, sparsekit_fl.mean
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class FedHalf(fl.Method):
    """Slow clients train a random half of the units."""

    threshold: float = fl.option(0.5, "Clients whose capability is below it train half of the units.")

    def check(self, setup: fl.Setup) -> fl.Setup:
        setup.require_units("FedHalf")
        return replace(setup, private=setup.layers[-1].entries)  # each client keeps its own head

    def assign(self, server: fl.ServerContext, client_id: int) -> fl.Task:
        slow = server.roster[client_id].capability.ratio < self.threshold
        return fl.Task(mask=fl.units(server, sk.criteria.Random(), 0.5)) if slow else fl.Task()

    def aggregate(self, server: fl.ServerContext, updates):
        return fl.mean(server, updates, over="holders")


fl.run(FedHalf(), problem, clients, config)

# sparsekit_fl.sgd, sparsekit_fl.ClientContext, sparsekit_fl.Model, sparsekit_fl.Result, sparsekit_fl.option
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class HalfOwn(fl.Method):
    """Sign SGD; a client deploys the mean of the global model and of its own last one."""

    strength: float = fl.option(0.1, "Pull towards the received weights.")

    def train(self, client: fl.ClientContext, task: fl.Task) -> fl.Result:
        signs = lambda gradients: {leaf: gradient.sign() for leaf, gradient in gradients.items()}
        result = fl.sgd(client, task, adjusts=lambda leaves: [signs], pull=self.strength)
        client.memory["own"] = result.state
        return replace(result, metrics={"largest": max(float(value.abs().max()) for value in result.state.values())})

    def deploy(self, client: fl.ClientContext, state) -> fl.Model:
        own = client.memory.get("own", state)
        return fl.Model(state={name: (state[name] + own[name]) / 2 for name in state})


fl.run(HalfOwn(), problem, clients, config)

# sparsekit_fl.Update
class Sizes(fl.Method):
    """Prints what clients send; messages are made by the run, and not by hand."""

    def aggregate(self, server: fl.ServerContext, updates: list[fl.Update]):
        for update in updates:
            cost: fl.Cost = update.cost
            print(update.client_id, update.ratio, update.examples, cost.flops, cost.uplink_bytes)
        return super().aggregate(server, updates)


fl.run(Sizes(), problem, clients, config)
answer = fl.Reply(client_id=0, evaluation=fl.Evaluation(client_id=0, examples=10, scores={"personal": {"accuracy": (9.0, 10.0)}}))


# sparsekit_fl.Request
def bytes_of(assignment: fl.Request) -> int:
    """What an engine of your own would send to a client, roughly."""
    return sum(tensor.nbytes for tensor in assignment.state.values())


print(bytes_of(fl.Request(round=1, client_id=0, state=make_model().state_dict())))


# sparsekit_fl.adapters
class Adapted(nn.Module):
    """A frozen layer with an adapter of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 2)
        self.lora_A, self.lora_B = nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x) + self.lora_B(self.lora_A(x)))


(pair,) = fl.adapters(sk.trace_units(Adapted(), torch.zeros(1, 8)))
print(pair.group, pair.down, pair.up)  # lora_A lora_A.weight lora_B.weight

# sparsekit_fl.Comparison
from dataclasses import replace

for seed in (0, 1):
    fl.run(fl.methods.fedavg(), problem, clients, replace(config, seed=seed), out=f"runs/compared/{seed}")
(comparison,) = fl.Comparison.read("runs/compared")
print(comparison.to_latex("final"))

# sparsekit_fl.Capability
slow = fl.Capability(ratio=0.25, uplink_bytes_per_second=1e6)

# sparsekit_fl.Client
client = fl.Client(id=0, data=fl.ClientData(split(30), split(10), split(10)), capability=fl.Capability(ratio=0.5))

# sparsekit_fl.ClientData
data = fl.ClientData(train=split(60), val=split(20), test=split(40))

# sparsekit_fl.Engine, sparsekit_fl.Reply, sparsekit_fl.Request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Simple:
    """An engine: requests to replies, in order; examples/own_engine.py is one too."""

    workers = 1

    def clients(self, spec, clients):
        return clients  # they are always there

    @contextmanager
    def open(self, spec: fl.engines.RunSpec, clients, memories: fl.engines.Memories) -> Iterator[fl.engines.RunClients]:
        def run_clients(requests: Sequence[fl.Request]) -> Iterator[fl.Reply]:
            for request in requests:
                yield fl.engines.answer(spec, clients[request.client_id], request, memories)

        with fl.engines.one_thread():  # so that results do not depend on the number of cores
            yield run_clients


engine: fl.Engine = Simple()
fl.run(fl.methods.fedavg(), problem, clients, config, engine=engine)


# sparsekit_fl.DataSource
images, labels = torch.randint(256, (40, 1, 8, 8), dtype=torch.uint8), torch.randint(10, (40,))
source = fl.DataSource(  # a function that returns one can be named on the command line: --dataset package.module:function
    name="mine",
    kind="image",
    train=fl.TensorData((images[:30],), labels[:30]),
    test=fl.TensorData((images[30:],), labels[30:]),
    classes=10,
    mean=(0.5,),
    std=(0.25,),
)


# sparsekit_fl.Problem
problem = fl.Problem(model=make_model, example_inputs=(torch.zeros(1, 8),), metrics={"accuracy": fl.metrics.accuracy})

# sparsekit_fl.RunConfig
config = fl.RunConfig(rounds=20, cohort=4, eval_every=5, seed=1)

# sparsekit_fl.RunResult
result: fl.RunResult = fl.run(fl.methods.fedavg(), problem, clients, config)
print(result.final.metrics["accuracy"], result.cost.flops)
result.save("result.json")


# sparsekit_fl.TensorData
data = fl.TensorData(inputs=(torch.randn(10, 8),), targets=torch.randint(2, (10,)))
first = data.take([0, 1, 2])  # a view

# sparsekit_fl.TrainingConfig
training = fl.TrainingConfig(local_epochs=2, batch_size=32, lr=0.05, momentum=0.9)

# sparsekit_fl.build_problem, sparsekit_fl.preset_for
preset = fl.preset_for(dataset="digits")
digits, holders = fl.build_problem(preset, clients=5, seed=0)

# sparsekit_fl.methods
list(fl.methods.registry)
fl.methods.fedprox(mu=0.1)  # an option is a field; `sparsekit describe fedprox` lists them

# sparsekit_fl.metrics.accuracy
right, of = fl.metrics.accuracy(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))

# sparsekit_fl.run
result = fl.run(fl.methods.fedlps(), problem, clients, config)

# sparsekit_fl.errors.ClientError, sparsekit_fl.errors.UpdateError, sparsekit_fl.errors.WorkerDiedError
try:
    fl.run(fl.methods.fedavg(), problem, clients, config)
except (fl.errors.ClientError, fl.errors.UpdateError, fl.errors.WorkerDiedError) as error:
    print(error)  # names the method, the round and the client

# sparsekit_fl.errors.TooFewRepliesError
try:
    fl.run(fl.methods.fedavg(), problem, clients, config)
except fl.errors.TooFewRepliesError as error:  # so many clients failed that a round would mean little
    print(error)

# sparsekit_fl.errors.StorageError
try:
    fl.run(fl.methods.fedavg(), problem, clients, config, out="runs-mine", resume=True)
except (fl.errors.StorageError, fl.errors.ResumeError) as error:  # a damaged or full disk
    print(error)  # says how to go on

# sparsekit_fl.errors.ResumeError
try:
    fl.run(fl.methods.fedavg(), problem, clients, config, resume=True, out="nothing-here")
except fl.errors.ResumeError as error:
    print(error)

# sparsekit_fl.errors.RunInterrupted
try:
    fl.run(fl.methods.fedavg(), problem, clients, config, out="runs-mine")
except fl.errors.RunInterrupted as error:  # Ctrl-C
    print(error)

# sparsekit_fl.Callback
class Spend(fl.Callback):
    """Ends a run once its clients have done this much work."""

    def __init__(self, flops: int) -> None:
        self.flops = flops

    def on_round_end(self, run: fl.RunView, record: fl.RoundRecord) -> None:
        if record.cost.flops > self.flops:
            run.stop(f"{self.flops} FLOPs are spent")


result = fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[Spend(10**9)])


# sparsekit_fl.callbacks.BestCheckpoint
from sparsekit_fl.callbacks import BestCheckpoint

fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[BestCheckpoint()], out="runs-best")

# sparsekit_fl.callbacks.EarlyStopping
from sparsekit_fl.callbacks import EarlyStopping

fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[EarlyStopping(patience=3)])

# sparsekit_fl.callbacks.TensorBoard
from sparsekit_fl.callbacks import TensorBoard


def curves() -> None:  # needs the extra `tensorboard`; then: tensorboard --logdir runs-curves
    fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[TensorBoard()], out="runs-curves")


# sparsekit_fl.load_model, sparsekit_fl.load_result
fl.run(fl.methods.fedavg(), problem, clients, config, out="runs-mine")
result = fl.load_result("runs-mine")
model = fl.load_model("runs-mine", model=make_model)

