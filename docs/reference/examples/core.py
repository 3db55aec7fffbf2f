"""Examples of the core's public names for the API reference; a test runs each after the lines before the mark."""

import functools

import numpy as np
import torch
from torch import nn

import sparsekit as sk

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
x, y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
graph = sk.trace_units(model, x[:2])
mask = sk.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))
masked = sk.LearnableMask(model, (x[:2],), ratio=0.5)
small = sk.compact(model, graph, mask)
rng = np.random.default_rng(0)
bandit = sk.PUCBV(sk.Interval(0.0, 1.0), horizon=20, rng=rng)
batches = [(x, y)]


# --- examples ---
# sparsekit.Bandit
def search(bandit: sk.Bandit, loss, pulls: int) -> float:
    for _ in range(pulls):
        pull = bandit.ask()
        bandit.tell(pull, -loss(pull.value))
    return bandit.best().value


search(bandit, lambda value: (value - 0.3) ** 2, 20)

# sparsekit.Box
space = sk.Box({"lr": sk.Interval(1e-4, 1.0, scale="log"), "momentum": sk.Interval(0.0, 0.99)})
pull = sk.SplitUCBV(space, rng=rng).ask()
print(pull.value["lr"], pull.value["momentum"])

# sparsekit.Budget
budget = sk.Budget(flops="50%", params=100_000)  # a string is a share of the dense model, a number is absolute

# sparsekit.BudgetError
try:
    sk.prune(model, (x[:1],), budget=sk.Budget(params=1))
except sk.BudgetError as error:
    print(error)

# sparsekit.cost_model
costs = sk.cost_model(model, x[:2], graph=graph)

# sparsekit.Cost, sparsekit.count_cost
cost: sk.Cost = sk.count_cost(model, x[:1], graph=graph, mask=mask)
print(cost.flops, cost.parameters, cost.bytes)


# sparsekit.Criterion
class Norms:
    """A criterion: a unit is worth the norm of its own first weight."""

    learned = False
    needs = frozenset({"weights"})

    def scores(self, graph, context):
        own = {name: group.slices[0].name for name, group in graph.groups.items()}
        return {name: context.weights[key].flatten(1).norm(dim=1) for name, key in own.items()}


assert isinstance(Norms(), sk.Criterion)
sk.make_mask(Norms(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))

# sparsekit.Interval
rates = sk.Interval(1e-4, 1.0, scale="log")
rates.from_unit(0.5)  # 0.01, half of the way on a log scale

# sparsekit.LayerRule
rule = sk.layers.find_rule(nn.Conv2d(3, 8, 3))
assert isinstance(rule, sk.LayerRule)

# sparsekit.LearnableMask
masked = sk.LearnableMask(model, (x[:2],), ratio=0.25)
optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
for _ in range(3):
    loss = nn.functional.cross_entropy(masked(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
small = masked.compact()

# sparsekit.NarrowModel
narrow = sk.NarrowModel(model, graph)
narrow.load(model.state_dict(), mask)
narrow.module(x)

# sparsekit.PUCBV
bandit = sk.PUCBV(sk.Interval(1e-4, 1.0, scale="log"), horizon=40, rng=np.random.default_rng(0))
pull = bandit.ask()
bandit.tell(pull, reward=-0.1)

# sparsekit.Pull
pull = bandit.ask()
bandit.tell(sk.Pull(pull.id, 0.5), 0.9)  # 0.5 was tried instead

# sparsekit.SplitUCBV
bandit = sk.SplitUCBV(sk.Interval(0.0, 1.0), rng=np.random.default_rng(0))  # no horizon, no scale of rewards
bandit.tell(bandit.ask(), 12.5)

# sparsekit.UnitGraph
graph: sk.UnitGraph = sk.trace_units(model, x[:2])
print(graph)

# sparsekit.UnitGroup
group: sk.UnitGroup = graph.groups["0"]
print(group.size, group.kind, group.modules)

# sparsekit.UnitMask
keep = torch.tensor([True] * 4 + [False] * 4)
mask = sk.UnitMask({"0": keep})
print(mask.density(graph))

# sparsekit.UnitSlice
piece: sk.UnitSlice
for piece in graph.groups["0"].slices:  # what of each tensor goes with a unit
    print(piece.name, piece.dim, piece.side)

# sparsekit.ScoringContext
context = sk.ScoringContext(weights=model.state_dict())

# sparsekit.WeightMask
mask = sk.WeightMask({"0.weight": model[0].weight.detach().abs() > 0.05})
mask.check(graph)

# sparsekit.allocation
pruned = sk.prune(model, (x[:1],), budget="params=50%", allocation=sk.allocation.registry["uniform"])

# sparsekit.bandit
from sparsekit.bandit import PUCBV, Interval  # needs numpy alone

# sparsekit.mask_from_scores, sparsekit.allocation.mask_from_scores
scores = sk.criteria.Magnitude().scores(graph, sk.ScoringContext(weights=model.state_dict()))
mask = sk.mask_from_scores(graph, scores, {"0": 4})

# sparsekit.compact
small = sk.compact(model, graph, mask)
small(x)

# sparsekit.criteria
sk.criteria.registry["magnitude"]()

# sparsekit.errors
try:
    sk.LearnableMask(model, (x,), ratio=1.5)
except sk.errors.SparsekitError as error:  # the root of all errors
    print(error)

# sparsekit.expand
full = sk.expand(small.state_dict(), graph, mask, into=model.state_dict())

# sparsekit.layers
list(sk.layers.rules)

# sparsekit.load_compact
sk.save_compact(masked, "small.safetensors")
small = sk.load_compact("small.safetensors", lambda: model)

# sparsekit.load_mask
sk.save_compact(masked, "small.safetensors")
mask = sk.load_mask("small.safetensors", masked.graph)

# sparsekit.save_compact
sk.save_compact(masked, "small.safetensors")

# sparsekit.make_mask, sparsekit.allocation.make_mask
mask = sk.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))

# sparsekit.trace_units
graph = sk.trace_units(model, x[:2])

# sparsekit.allocation.balanced, sparsekit.allocation.by_cost, sparsekit.allocation.by_loss, sparsekit.allocation.global_ranking, sparsekit.allocation.uniform
for kind in (sk.allocation.balanced, sk.allocation.by_cost, sk.allocation.by_loss, sk.allocation.global_ranking, sk.allocation.uniform):
    pruned = sk.prune(model, (x[:1],), budget="params=50%", allocation=kind)

# sparsekit.allocation.by_ratio
quarter = functools.partial(sk.allocation.by_ratio, ratios={"0": 0.25})
pruned = sk.prune(model, (x[:1],), allocation=quarter)

# sparsekit.Allocation, sparsekit.allocation.Allocation, sparsekit.allocation.Problem, sparsekit.allocation.allocate
def first_half(problem: sk.allocation.Problem) -> dict[str, int]:
    return {name: counts[len(counts) // 2] for groups, counts in problem.free.items() for name in groups}


rule: sk.allocation.Allocation = first_half
scores = sk.criteria.Magnitude().scores(graph, sk.ScoringContext(weights=model.state_dict()))
counts = sk.allocation.allocate(rule, graph, scores, sk.cost_model(model, x[:2], graph=graph), budget=sk.Budget(params="90%"))

# sparsekit.allocation.PreferredMultiple
pruned = sk.prune(model, (x[:1],), budget="params=50%", multiple_of=sk.allocation.PreferredMultiple(16))

# sparsekit.allocation.CostModel
costs: sk.allocation.CostModel = sk.cost_model(model, x[:2], graph=graph)
print(costs.costs({"0": 4}))

# sparsekit.allocation.Schedule
schedule = sk.allocation.Schedule("linear", steps=5)

# sparsekit.allocation.ratio_counts
sk.allocation.ratio_counts(graph, 0.5)  # half of each group


# sparsekit.allocation.registry, sparsekit.bandit.registry, sparsekit.criteria.registry, sparsekit.layers.rules
for names in (sk.allocation.registry, sk.bandit.registry, sk.criteria.registry, sk.layers.rules):
    print(list(names))

# sparsekit.bandit.Arm
bandit.tell(bandit.ask(), 1.0)
arm: sk.bandit.Arm = bandit.arms[0]
print(arm.low, arm.mean)

# sparsekit.graph.StateDict
weights: sk.graph.StateDict = model.state_dict()

# sparsekit.bandit.BoxPull
box = sk.SplitUCBV(sk.Box({"lr": sk.Interval(0.0, 1.0)}), rng=rng)
pull = box.ask()
box.tell(sk.bandit.BoxPull(pull.id, {"lr": 0.5}), 1.0)

# sparsekit.bandit.make_bandit
again = sk.bandit.make_bandit("p-ucbv", sk.Interval(0.0, 1.0), rng=rng)

# sparsekit.criteria.Wanda, sparsekit.criteria.Fisher, sparsekit.criteria.PositionFisher, sparsekit.criteria.Taylor
loss = nn.functional.cross_entropy
for kind in (sk.criteria.Wanda, sk.criteria.Fisher, sk.criteria.PositionFisher, sk.criteria.Taylor):
    criterion = kind(batches, loss)
    sk.make_mask(criterion, graph, 0.5, sk.ScoringContext(weights=model.state_dict(), model=model))

# sparsekit.criteria.Magnitude
sk.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))

# sparsekit.criteria.Learned
sk.make_mask(sk.criteria.Learned(), graph, 0.5, sk.ScoringContext(importance=masked.importance()))

# sparsekit.criteria.is_comparable
assert not sk.criteria.is_comparable(sk.criteria.Magnitude())
assert sk.criteria.is_comparable(sk.criteria.Fisher())

# sparsekit.criteria.Ordered
sk.make_mask(sk.criteria.Ordered(), graph, 0.5, sk.ScoringContext())  # the first half of each group

# sparsekit.criteria.Random
sk.make_mask(sk.criteria.Random(), graph, 0.5, sk.ScoringContext(generator=torch.Generator().manual_seed(0)))

# sparsekit.criteria.Scored
scores = sk.criteria.Magnitude().scores(graph, sk.ScoringContext(weights=model.state_dict()))
mask = sk.make_mask(sk.criteria.Scored(scores), graph, 0.5, sk.ScoringContext())

# sparsekit.criteria.TorchPruning
adapter = sk.criteria.TorchPruning  # needs torch-pruning, in the extra `bench`

# sparsekit.errors.CompactFileError
try:
    sk.load_compact("nowhere.safetensors", lambda: model)
except (sk.errors.CompactFileError, OSError) as error:
    print(error)

# sparsekit.errors.install_hint
print(sk.errors.install_hint("optuna"))

# sparsekit.errors.require
pandas = sk.errors.require("pandas")

# sparsekit.errors.DataError
import sparsekit_fl as fl

try:
    fl.TensorData((torch.zeros(3, 2),), torch.zeros(4))
except sk.errors.DataError as error:
    print(error)

# sparsekit.errors.ForeignMaskError
try:
    sk.compact(nn.Linear(2, 2), graph, mask)
except sk.errors.ForeignMaskError as error:
    print(error)

# sparsekit.errors.InvalidValueError
try:
    masked.ratio = 30
except sk.errors.InvalidValueError as error:
    print(error)

# sparsekit.errors.MissingDependencyError
try:
    from sparsekit.bandit.optuna import BanditSampler
except sk.errors.MissingDependencyError as error:
    print(error)  # names the extra that brings it

# sparsekit.errors.MissingImportanceError
try:
    sk.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext())
except sk.errors.MissingImportanceError as error:
    print(error)

# sparsekit.errors.NoUnitsError, sparsekit.errors.SparsekitError
try:
    sk.trace_units(nn.Linear(4, 2), torch.randn(1, 4))
except sk.errors.NoUnitsError as error:  # one of the errors that are a SparsekitError, as all of this package
    print(error.unprunable)

# sparsekit.errors.TraceError, sparsekit.errors.UnsupportedModelError
for wrong in (model, torch.jit.script(nn.Linear(4, 2))):
    try:
        sk.trace_units(wrong, torch.randn(2, 5))
    except (sk.errors.TraceError, sk.errors.UnsupportedModelError) as error:
        print(error)

# sparsekit.errors.UnknownNameError
try:
    sk.criteria.registry["magnitud"]
except sk.errors.UnknownNameError as error:
    print(error)

# sparsekit.errors.nearest
print(sk.errors.nearest("vgg12", ["vgg11", "cnn"]))

# sparsekit.layers.ALWAYS_ZERO, sparsekit.layers.NOT_ZERO
assert sk.layers.ALWAYS_ZERO != sk.layers.NOT_ZERO  # what a layer may say of an entry of its output


# sparsekit.layers.Labels, sparsekit.layers.TensorLabels, sparsekit.layers.Tracer
class Filter(nn.Module):
    """Filters each feature over time; sparsekit knows no Fourier transform."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.gain, n=x.shape[1], dim=1)


class FilterRule(sk.LayerRule):
    """Gain j scales feature j, and feature j comes out at place j."""

    types = (Filter,)

    def resize(self, module) -> None:
        """The layer keeps no sizes."""

    def trace(self, tracer: sk.layers.Tracer, module, run, args, kwargs):
        out = run(*args, **kwargs)
        features: sk.layers.Labels = tracer.labels(args[0]).axes[-1]
        gains: sk.layers.Labels = tracer.labels(module.gain).axes[0]
        tracer.unite(features.nodes, gains.nodes)
        tracer.make(tracer.labels(module.gain), 0)
        tracer.set(out, sk.layers.TensorLabels((None, None, gains)))
        return out


net = nn.Sequential(nn.Linear(6, 32), Filter(32), nn.Linear(32, 4))
found = sk.trace_units(net, torch.randn(2, 16, 6), rules={Filter: FilterRule()})
print(found)

# sparsekit.layers.find_rule
rule = sk.layers.find_rule(nn.Linear(4, 2))

# sparsekit.layers.resize
layer = nn.Linear(4, 2)
layer.weight = nn.Parameter(torch.zeros(1, 4))
layer.bias = nn.Parameter(torch.zeros(1))
sk.layers.resize(layer)  # layer.out_features is 1 now

# sparsekit.PruneReport
report: sk.PruneReport = sk.prune(model, (x[:1],), budget=sk.Budget(flops="50%")).report
print(report.before["flops"], report.after["flops"])
for group in report.groups:
    print(group.name, group.before, group.after)

# sparsekit.Pruned, sparsekit.prune
pruned: sk.Pruned = sk.prune(model, (x[:1],), budget=sk.Budget(flops="50%"))
small = pruned.model
pruned.save("small.safetensors")

# sparsekit.reconstruct, sparsekit.finetuning.reconstruct
small = sk.compact(model, graph, mask)
sk.reconstruct(model, small, graph, mask, [x])  # the layers that read what was cut make up for its mean and shape

# sparsekit.finetune, sparsekit.finetuning.finetune, sparsekit.finetuning.FineTuned, sparsekit.finetuning.EpochRecord
tuned: sk.finetuning.FineTuned = sk.finetune(small, batches, nn.functional.cross_entropy, epochs=1)
first: sk.finetuning.EpochRecord = tuned.history[0]
print(first.loss)

# sparsekit.finetuning
from sparsekit.finetuning import Distillation

# sparsekit.finetuning.Distillation
tuned = sk.finetune(small, batches, nn.functional.cross_entropy, epochs=1, distillation=sk.finetuning.Distillation(model))

# sparsekit.finetuning.GroupSL
tuned = sk.finetune(model, batches, nn.functional.cross_entropy, epochs=1, regularizer=sk.finetuning.GroupSL(graph))

# sparsekit.recalibrate_batchnorm, sparsekit.finetuning.recalibrate_batchnorm
sk.recalibrate_batchnorm(small, [x])  # the statistics of batch norms, from data

# sparsekit.fit_config
small = sk.compact(model, graph, mask)  # of a transformers model: its config then says the widths of the small one
print(sk.fit_config.__doc__.splitlines()[0])

# sparsekit.save_pretrained, sparsekit.load_pretrained
from transformers import LlamaConfig, LlamaForCausalLM

llama = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2))
sk.save_pretrained(llama, "small")  # or what `prune` made of it, with layers of any widths
again = sk.load_pretrained("small")  # generates as before

# sparsekit.LearnedNarrowing
learning = sk.LearnedNarrowing(steps=500)
masked = sk.LearnableMask(model, (x[:2],), budget="flops=50%", learning=learning)

# sparsekit.GradientImportance
masked = sk.LearnableMask(model, (x[:2],), ratio=0.5, learning=sk.GradientImportance(lr=0.02))

# sparsekit.allocation.check_ratio
ratio = sk.allocation.check_ratio(0.5)  # an error that says what is allowed for 0, 1.5 or "half"

# sparsekit.criteria.unit_magnitudes
sums = {name: sk.criteria.unit_magnitudes(group, model.state_dict()) for name, group in graph.groups.items()}

# sparsekit.graph.Axes, sparsekit.graph.gather, sparsekit.graph.scatter_
axes: sk.graph.Axes = {0: torch.tensor([0, 2]), 1: torch.tensor([1])}  # rows 0 and 2, column 1
weight = torch.arange(12.0).reshape(4, 3)
part = sk.graph.gather(weight, axes)  # (2, 1)
sk.graph.scatter_(part * 10, weight, axes)

# sparsekit.graph.narrow_shape, sparsekit.graph.cut_axes
axes = {0: torch.tensor([0, 2]), 1: torch.arange(3)}
print(sk.graph.narrow_shape((4, 3), axes))  # torch.Size([2, 3])
print(list(sk.graph.cut_axes((4, 3), axes)))  # [0], since all columns stay

# sparsekit.graph.group_order
offsets = sk.graph.group_order(graph.groups.values())  # where each group begins in one vector of all units

# sparsekit.graph.Layer, sparsekit.graph.head_entries, sparsekit.graph.layer_weights, sparsekit.graph.prefix_entries
layers: tuple[sk.graph.Layer, ...] = graph.layers
print(sk.graph.head_entries(layers))  # ('4.weight', '4.bias')
print(sk.graph.layer_weights(layers, graph.shapes))  # ('0.weight',)
print(sk.graph.prefix_entries(layers, 1))  # what the convolution alone reads

# sparsekit.graph.to_weights
by_entry = sk.graph.to_weights(graph, mask)
print(by_entry.counts()["4.weight"])

# sparsekit.layers.is_convolution
convolutions = [module for module in model.modules() if sk.layers.is_convolution(module)]

# sparsekit.measure.CostModel, sparsekit.measure.CostTerm
costs: sk.measure.CostModel = sk.cost_model(model, x[:1], graph=graph)
first: sk.measure.CostTerm = costs.terms[0]
print(first.weight, costs.forward_flops(mask), costs.forward_flops(None))

# sparsekit.measure.format_cost
print(sk.measure.format_cost("flops", 3.2e9))  # 3.20 GFLOPs

# sparsekit.surgery.Factory
make: sk.surgery.Factory = lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

# sparsekit.surgery.export_onnx, sparsekit.surgery.export_program
program = sk.surgery.export_program(sk.compact(model, graph, mask), (x[:2],))
print(program.range_constraints)  # any number of examples
try:
    sk.surgery.export_onnx(sk.compact(model, graph, mask), (x[:2],), "small.onnx")
except sk.errors.MissingDependencyError as error:
    print(error)  # names the extra that brings onnx and onnxscript

# sparsekit.tracing.trace_layers
layers = sk.tracing.trace_layers(model, x[:2])
print([layer.name for layer in layers])  # ['0', '4']

# sparsekit.training.NarrowingReport
narrowing = sk.LearnableMask(model, (x[:2],), ratio=0.5, learning=sk.LearnedNarrowing(steps=500))
report: sk.training.NarrowingReport | None = narrowing.report  # steps, FLOPs and cuts so far

# sparsekit.training.ImportanceRegularizer
regularizer = sk.training.ImportanceRegularizer(strength=0.5)
rule = sk.GradientImportance(regularizer=regularizer)

# sparsekit.graph, sparsekit.tracing
from sparsekit.graph import UnitGraph
from sparsekit.tracing import trace_units

found: UnitGraph = trace_units(model, x[:2])

# sparsekit.measure
from sparsekit.measure import count_cost

print(count_cost(model, x[:1], graph=graph, mask=mask).flops)

# sparsekit.surgery
from sparsekit.surgery import compact, expand

small = compact(model, graph, mask)
whole = expand(small.state_dict(), graph, mask, into=model.state_dict())

# sparsekit.training
from sparsekit.training import LearnableMask

masked = LearnableMask(model, (x[:2],), ratio=0.5)
