"""Examples of the core's public names for the API reference; a test runs each after the lines before the mark."""

import functools

import numpy as np
import torch
from torch import nn

import sparsekit as sk

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
x, y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
graph = sk.trace_units(model, x[:2])
mask = sk.allocation.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))
masked = sk.LearnableMask(model, (x[:2],), ratio=0.5)
small = sk.compact(model, graph, mask)
rng = np.random.default_rng(0)
bandit = sk.bandit.PUCBV(sk.bandit.Interval(0.0, 1.0), horizon=20, rng=rng)
batches = [(x, y)]


# --- examples ---
# sparsekit.bandit.Bandit
def search(bandit: sk.bandit.Bandit, loss, pulls: int) -> float:
    for _ in range(pulls):
        pull = bandit.ask()
        bandit.tell(pull, -loss(pull.value))
    return bandit.best().value


search(bandit, lambda value: (value - 0.3) ** 2, 20)

# sparsekit.bandit.Box
space = sk.bandit.Box({"lr": sk.bandit.Interval(1e-4, 1.0, scale="log"), "momentum": sk.bandit.Interval(0.0, 0.99)})
pull = sk.bandit.SplitUCBV(space, rng=rng).ask()
print(pull.value["lr"], pull.value["momentum"])

# sparsekit.bandit.BanditSampler
import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=sk.bandit.BanditSampler(seed=0))
study.optimize(lambda trial: (trial.suggest_float("x", 0.0, 1.0) - 0.3) ** 2, n_trials=20)
print(study.sampler.recommended(study).params)

# sparsekit.Budget
budget = sk.Budget(flops="50%", params=100_000)  # a string is a share of the dense model, a number is absolute

# sparsekit.count_cost
cost: sk.Cost = sk.count_cost(model, (x[:1],), graph=graph, mask=mask)
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
sk.allocation.make_mask(Norms(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))

# sparsekit.bandit.Interval
rates = sk.bandit.Interval(1e-4, 1.0, scale="log")
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

# sparsekit.bandit.PUCBV
bandit = sk.bandit.PUCBV(sk.bandit.Interval(1e-4, 1.0, scale="log"), horizon=40, rng=np.random.default_rng(0))
pull = bandit.ask()
bandit.tell(pull, reward=-0.1)

# sparsekit.bandit.Pull
pull = bandit.ask()
bandit.tell(sk.bandit.Pull(pull.id, 0.5), 0.9)  # 0.5 was tried instead

# sparsekit.bandit.SplitUCBV
bandit = sk.bandit.SplitUCBV(sk.bandit.Interval(0.0, 1.0), rng=np.random.default_rng(0))  # no horizon, no scale of rewards
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

# sparsekit.ScoringContext
context = sk.ScoringContext(weights=model.state_dict())

# sparsekit.mask_from_scores
scores = sk.criteria.Magnitude().scores(graph, sk.ScoringContext(weights=model.state_dict()))
mask = sk.mask_from_scores(graph, scores, {"0": 4})

# sparsekit.compact
small = sk.compact(model, graph, mask)
small(x)

# sparsekit.expand
full = sk.expand(small.state_dict(), graph, mask, into=model.state_dict())

# sparsekit.load_compact
sk.save_compact(masked, "small.safetensors")
small = sk.load_compact("small.safetensors", lambda: model)

# sparsekit.save_compact
sk.save_compact(masked, "small.safetensors")

# sparsekit.allocation.make_mask
mask = sk.allocation.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))

# sparsekit.trace_units
graph = sk.trace_units(model, x[:2])

# sparsekit.allocation.by_cost, sparsekit.allocation.by_loss, sparsekit.allocation.uniform
for kind in (sk.allocation.by_cost, sk.allocation.by_loss, sk.allocation.global_ranking, sk.allocation.uniform):
    pruned = sk.prune(model, (x[:1],), budget="params=50%", allocation=kind)

# sparsekit.allocation.by_ratio
quarter = functools.partial(sk.allocation.by_ratio, ratios={"0": 0.25})
pruned = sk.prune(model, (x[:1],), allocation=quarter)

# sparsekit.Allocation, sparsekit.allocation.Problem
def first_half(problem: sk.allocation.Problem) -> dict[str, int]:
    return {name: counts[len(counts) // 2] for groups, counts in problem.free.items() for name in groups}


rule: sk.allocation.Allocation = first_half
scores = sk.criteria.Magnitude().scores(graph, sk.ScoringContext(weights=model.state_dict()))
counts = sk.allocation.allocate(rule, graph, scores, sk.cost_model(model, x[:2], graph=graph), budget=sk.Budget(params="90%"))

# sparsekit.allocation.Schedule
schedule = sk.allocation.Schedule("linear", steps=5)

# sparsekit.criteria.Wanda, sparsekit.criteria.Fisher, sparsekit.criteria.Taylor
loss = nn.functional.cross_entropy
for kind in (sk.criteria.Wanda, sk.criteria.Fisher, sk.criteria.Taylor):
    criterion = kind(batches, loss)
    sk.allocation.make_mask(criterion, graph, 0.5, sk.ScoringContext(weights=model.state_dict(), model=model))

# sparsekit.criteria.Magnitude
sk.allocation.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext(weights=model.state_dict()))

# sparsekit.criteria.Random
sk.allocation.make_mask(sk.criteria.Random(), graph, 0.5, sk.ScoringContext(generator=torch.Generator().manual_seed(0)))

# sparsekit.errors.CompactFileError
try:
    sk.load_compact("nowhere.safetensors", lambda: model)
except (sk.errors.CompactFileError, OSError) as error:
    print(error)

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
    sampler = sk.bandit.BanditSampler()
except sk.errors.MissingDependencyError as error:
    print(error)  # names the extra that brings it

# sparsekit.errors.MissingImportanceError
try:
    sk.allocation.make_mask(sk.criteria.Magnitude(), graph, 0.5, sk.ScoringContext())
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

# sparsekit.layers.TensorLabels, sparsekit.layers.Tracer
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

# sparsekit.plan
plan = sk.plan(model, (x[:1],), budget="flops=50%")
print(plan, plan.widths, plan.cost, plan.notes)

# sparsekit.Pruned, sparsekit.prune
pruned: sk.Pruned = sk.prune(model, (x[:1],), budget=sk.Budget(flops="50%"))
small = pruned.model
pruned.save("small.safetensors")

# sparsekit.reconstruct
small = sk.compact(model, graph, mask)
sk.reconstruct(model, small, graph, mask, [x])  # the layers that read what was cut make up for its mean and shape

# sparsekit.finetune
tuned: sk.finetuning.FineTuned = sk.finetune(small, batches, nn.functional.cross_entropy, epochs=1)
first: sk.finetuning.EpochRecord = tuned.history[0]
print(first.loss)

# sparsekit.Distillation
tuned = sk.finetune(small, batches, nn.functional.cross_entropy, epochs=1, distillation=sk.Distillation(model))

# sparsekit.recalibrate_batchnorm
sk.recalibrate_batchnorm(small, [x])  # the statistics of batch norms, from data

# sparsekit.fit_config
small = sk.compact(model, graph, mask)  # of a transformers model: its config then says the widths of the small one
print(sk.fit_config.__doc__.splitlines()[0])

# sparsekit.save_pretrained, sparsekit.load_pretrained, sparsekit.prune_folder, sparsekit.export_gguf
from transformers import LlamaConfig, LlamaForCausalLM

llama = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2))
sk.save_pretrained(llama, "small")  # or what `prune` made of it, with layers of any widths
again = sk.load_pretrained("small")  # generates as before
plan = sk.prune_folder("small", "pruned", budget="params=90%", multiple_of=1)  # the model is never in memory
print(plan.report.after["params"])
sk.export_gguf(again, "small.gguf", dtype="q8_0")  # for llama.cpp, Ollama and LM Studio

# sparsekit.LearnedNarrowing
learning = sk.LearnedNarrowing(steps=500)
masked = sk.LearnableMask(model, (x[:2],), budget="flops=50%", learning=learning)

# sparsekit.GradientImportance
masked = sk.LearnableMask(model, (x[:2],), ratio=0.5, learning=sk.GradientImportance(lr=0.02))

# sparsekit.surgery.export_program
program = sk.surgery.export_program(sk.compact(model, graph, mask), (x[:2],))
print(program.range_constraints)  # any number of examples

# sparsekit.export_onnx
try:
    sk.export_onnx(sk.compact(model, graph, mask), (x[:2],), "small.onnx")
except sk.errors.MissingDependencyError as error:
    print(error)  # names the extra that brings onnx and onnxscript

