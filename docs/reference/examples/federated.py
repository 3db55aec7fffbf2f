"""Examples of the federated layer's public names for the API reference; a test runs each after the lines before the mark."""

import torch
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def split(examples: int) -> fl.TensorData:
    x = torch.randn(examples, 8)
    return fl.TensorData((x,), (x[:, 0] > 0).long())


problem = fl.Problem(model=make_model, example_inputs=(torch.zeros(1, 8),))
clients = [fl.Client(id=k, data=fl.ClientData(split(30), split(10), split(10))) for k in range(4)]
config = fl.RunConfig(rounds=1, cohort=2, training=fl.TrainingConfig(local_epochs=1), seed=0)
# --- examples ---
# sparsekit_fl.AggregatePolicy, sparsekit_fl.LocalPolicy, sparsekit_fl.MaskPolicy, sparsekit_fl.PersonalPolicy, sparsekit_fl.SamplingPolicy, sparsekit_fl.SharePolicy
method = fl.methods.fedavg()
kinds = {
    "sampling": method.sampling,
    "mask": method.mask,
    "local": method.local,
    "share": method.share,
    "aggregate": method.aggregate,
    "personal": method.personal,
}
print({kind: type(policy).__name__ for kind, policy in kinds.items()})  # inherit one of their base classes for your own

# sparsekit_fl.RatioPolicy, sparsekit_fl.ClientContext
from dataclasses import dataclass


@dataclass(frozen=True)
class HalfWhenSlow(fl.RatioPolicy):
    """The whole model, or half of it on slow clients."""

    def choose(self, ctx: fl.ClientContext, proposal):
        return 1.0 if ctx.capability.ratio >= 0.5 else 0.5


method = fl.Method(
    name="half",
    source="mine",
    ratio=HalfWhenSlow(),
    mask=fl.policies.UnitCriterion(sk.criteria.Ordered()),
    aggregate=fl.policies.CoverageMean(),
)
fl.run(method, problem, clients, config)


# sparsekit_fl.Assignment, sparsekit_fl.Update, sparsekit_fl.WorkCost, sparsekit_fl.Evaluation, sparsekit_fl.ServerContext, sparsekit_fl.LocalResult, sparsekit_fl.PersonalModel
class Sizes(fl.Observer):
    """Messages are met in policies and observers, and are not made by hand."""

    def on_client(self, round, client_id, update):
        print(client_id, update.ratio, update.cost.flops_compact)

    def on_evaluation(self, round, client_id, evaluation):
        print(client_id, evaluation.personal["accuracy"])


fl.run(fl.methods.fedlps(), problem, clients, config, observers=[Sizes()])

# sparsekit_fl.Capability
slow = fl.Capability(ratio=0.25, uplink_bytes_per_second=1e6)

# sparsekit_fl.Client
client = fl.Client(id=0, data=fl.ClientData(split(30), split(10), split(10)), capability=fl.Capability(ratio=0.5))

# sparsekit_fl.ClientData
data = fl.ClientData(train=split(60), val=split(20), test=split(40))

# sparsekit_fl.ClientPool, sparsekit_fl.Engine, sparsekit_fl.engines.ClientPool, sparsekit_fl.engines.Engine
engine: fl.Engine = fl.Embedded(workers=1)  # examples/own_engine.py writes one

# sparsekit_fl.DataSource
source = fl.build_problem.__module__  # a factory of a data set returns one; see examples/own_data.py and `--dataset`
digits = __import__("sparsekit_fl.datasets.digits", fromlist=["load"]).load()
assert isinstance(digits, fl.DataSource)

# sparsekit_fl.Embedded, sparsekit_fl.engines.Embedded
fl.run(fl.methods.fedavg(), problem, clients, config, engine=fl.Embedded(workers=2))

# sparsekit_fl.Method
method = fl.Method(name="mine", source="an example", aggregate=fl.policies.CoverageMean())
fl.run(method, problem, clients, config)


# sparsekit_fl.Observer
class Print(fl.Observer):
    def on_round(self, record):
        print(record.round, record.loss)


fl.run(fl.methods.fedavg(), problem, clients, config, observers=[Print()])

# sparsekit_fl.Problem
problem = fl.Problem(model=make_model, example_inputs=(torch.zeros(1, 8),), metrics={"accuracy": fl.metrics.accuracy})

# sparsekit_fl.RoundRecord
result = fl.run(fl.methods.fedavg(), problem, clients, config)
record = result.rounds[-1]
print(
    record.round, record.cohort, record.cost.simulated_seconds if hasattr(record.cost, "simulated_seconds") else record.seconds
)

# sparsekit_fl.RunConfig
config = fl.RunConfig(rounds=20, cohort=4, eval_every=5, seed=1)

# sparsekit_fl.RunResult
result = fl.run(fl.methods.fedavg(), problem, clients, config)
print(result.final.metrics["accuracy"], result.cost.flops_compact)
result.save("result.json")

# sparsekit_fl.TensorData
data = fl.TensorData(inputs=(torch.randn(10, 8),), targets=torch.randint(2, (10,)))
first = data.take([0, 1, 2])  # a view

# sparsekit_fl.TrainingConfig
training = fl.TrainingConfig(local_epochs=2, batch_size=32, lr=0.05, momentum=0.9)

# sparsekit_fl.build_problem, sparsekit_fl.preset_for
preset = fl.preset_for(dataset="digits")
digits, holders = fl.build_problem(preset, clients=5, seed=0)

# sparsekit_fl.engines, sparsekit_fl.engines.registry
list(fl.engines.registry)

# sparsekit_fl.errors
try:
    fl.run(fl.methods.fedavg(), problem, clients, config, resume=True, out="nothing-here")
except fl.errors.ResumeError as error:
    print(error)

# sparsekit_fl.methods, sparsekit_fl.methods.registry
list(fl.methods.registry)

# sparsekit_fl.metrics, sparsekit_fl.metrics.accuracy
right, of = fl.metrics.accuracy(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))

# sparsekit_fl.policies
fl.policies.Constant(0.5)

# sparsekit_fl.run
result = fl.run(fl.methods.fedlps(), problem, clients, config)

# sparsekit_fl.engines.ClientExecutor, sparsekit_fl.engines.ClientStore, sparsekit_fl.engines.Reply, sparsekit_fl.engines.RunSpec, sparsekit_fl.engines.Unscored
from sparsekit_fl.engines import ClientExecutor, ClientStore, Reply, RunSpec, Unscored  # what an engine is made of

print(ClientExecutor.train.__doc__)  # examples/own_engine.py puts them together

# sparsekit_fl.engines.StateDict, sparsekit_fl.engines.Versions
state: fl.engines.StateDict = make_model().state_dict()
versions: fl.engines.Versions = {0: None}

# sparsekit_fl.engines.one_thread
fl.engines.one_thread()

# sparsekit_fl.errors.ClientError, sparsekit_fl.errors.TooFewRepliesError, sparsekit_fl.errors.UpdateError, sparsekit_fl.errors.WorkerDiedError, sparsekit_fl.errors.MemoryStateError, sparsekit_fl.errors.LostMemoryError, sparsekit_fl.errors.StorageError
try:
    fl.run(fl.methods.fedavg(), problem, clients, config)
except (fl.errors.ClientError, fl.errors.UpdateError, fl.errors.WorkerDiedError, fl.errors.MemoryStateError) as error:
    print(error)  # a failed client or a refused update ends a run only where too few are left
except (fl.errors.LostMemoryError, fl.errors.StorageError) as error:
    print(error)  # a damaged or full disk; the message says how to go on

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

# sparsekit_fl.metrics.IGNORED
targets = torch.tensor([1, fl.metrics.IGNORED])  # the second is padding and does not count


# sparsekit_fl.metrics.Metric
def top2(outputs, targets):
    """A metric returns a sum and what it is to be divided by."""
    return (outputs.topk(2).indices == targets[:, None]).any(1).sum(), len(targets)


metric: fl.metrics.Metric = top2

# sparsekit_fl.metrics.TokenAccuracy
metric = fl.metrics.TokenAccuracy(never_right=(0,))

# sparsekit_fl.metrics.cross_entropy
loss = fl.metrics.cross_entropy(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))

# sparsekit_fl.metrics.log_loss
total, of = fl.metrics.log_loss(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))

# sparsekit_fl.metrics.perplexity
fl.metrics.perplexity(2.3)

# sparsekit_fl.policies.RoundView
from sparsekit_fl.policies import RoundView  # a View that knows the round: what a criterion of UnitCriterion is given

view = RoundView(round=3)

# sparsekit_fl.Callback, sparsekit_fl.callbacks.Callback, sparsekit_fl.RunView, sparsekit_fl.callbacks.RunView
class StopEarly(fl.Callback):
    """Callbacks inherit `Callback` and override what they want to hear of; the run hands them a `RunView`."""


print([name for name in vars(fl.Callback) if name.startswith("on_")])

# sparsekit_fl.callbacks, sparsekit_fl.callbacks.loggers
list(fl.callbacks.loggers)

# sparsekit_fl.callbacks.BestCheckpoint
from sparsekit_fl.callbacks import BestCheckpoint

fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[BestCheckpoint()], out="runs-best")

# sparsekit_fl.callbacks.EarlyStopping
from sparsekit_fl.callbacks import EarlyStopping

fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[EarlyStopping(patience=3)])

# sparsekit_fl.callbacks.LiveProgress
from sparsekit_fl.callbacks import LiveProgress

with LiveProgress() as progress:
    fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[progress])

# sparsekit_fl.callbacks.MLflow, sparsekit_fl.callbacks.TensorBoard, sparsekit_fl.callbacks.NotebookDisplay
from sparsekit_fl.callbacks import MLflow, NotebookDisplay, TensorBoard  # observers, like the others; two need an extra

# sparsekit_fl.errors.FolderInUseError
try:
    fl.run(fl.methods.fedavg(), problem, clients, config, out="runs-mine")
except fl.errors.FolderInUseError as error:  # another process writes there
    print(error)

# sparsekit_fl.load_model, sparsekit_fl.load_result
fl.run(fl.methods.fedavg(), problem, clients, config, out="runs-mine")
result = fl.load_result("runs-mine")
model = fl.load_model("runs-mine", model=make_model)

# sparsekit_fl.metrics.lower_is_better
assert fl.metrics.lower_is_better("loss")

# sparsekit_fl.DeviceBudgets
budgets = fl.DeviceBudgets(problem)

# sparsekit_fl.callbacks.CentralTest
from sparsekit_fl.callbacks import CentralTest

fl.run(fl.methods.fedavg(), problem, clients, config, callbacks=[CentralTest(problem, split(20))])
