"""DepthFL: a client trains the first layers, as many as it can afford, with exits that learn from each other.

Constants come from Flower's baseline, which follows the authors' code. The paper adds four exits to a ResNet by hand, each with
several layers. Here a model names the positions of its exits, and each exit is one linear layer: VGG has one after each of its
first four pools. With its own output, the small CNN has three outputs, and the LSTM two.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, WeightMask
from sparsekit.measure import CostModel
from sparsekit_fl.client.context import part_flops
from sparsekit_fl.client.fit import Adjust, Batch
from sparsekit_fl.client.messages import Cost
from sparsekit_fl.layers import CONVOLUTIONS, Layer, prefix_entries
from sparsekit_fl.methods.base import ClientContext, Method, Result, ServerContext, Setup, Task, Update, mean_change, moved, sgd
from sparsekit_fl.methods.client import Leaves, pull_towards, trained_leaves
from sparsekit_fl.problem.metrics import IGNORED

_ALPHA = 0.1  # α of FedDyn
_RAMP = 0.3  # share of the rounds after which distillation among exits has its full weight: 300 of 1000
_GRID = 4  # positions per axis to which an exit averages convolutional features


def exit_head(features: torch.Size, outputs: int, *, convolution: bool) -> nn.Module:
    """Return an exit: one linear layer. Convolutional features (N, C, H, W) are first averaged to at most 4 × 4 positions."""
    layers, width = OrderedDict[str, nn.Module](), features[-1]
    if convolution:
        rows, columns = min(_GRID, features[2]), min(_GRID, features[3])
        layers.update(pool=nn.AdaptiveAvgPool2d((rows, columns)), flat=nn.Flatten())
        width = features[1] * rows * columns
    layers["linear"] = nn.Linear(width, outputs)
    return nn.Sequential(layers)


class _Stop(BaseException):
    """Ends a forward pass at an exit; not an `Exception`, which a model's own code may catch."""


class WithExits(nn.Module):
    """A model with exits. It returns the mean of all outputs, including the model's own. Keys of the model begin with "model.".

    The exits `heads` get the inputs of the modules named by `places`, in forward order; each is called once per pass. A pass
    that ends at an exit computes none of the later layers.
    """

    def __init__(self, model: nn.Module, places: Sequence[str], heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.exits = nn.ModuleList(heads)
        self._places = tuple(places)

    def outputs(self, *inputs: Any, depth: int | None = None) -> list[Tensor]:
        """Return the outputs of the first `depth` exits (at least 1); None: all outputs, the model's own last."""
        found: list[Tensor] = []

        def leave(head: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001 - torch's signature
            found.append(head(args[0]))
            if len(found) == depth:
                raise _Stop

        handles = [
            self.model.get_submodule(place).register_forward_pre_hook(partial(leave, head))
            for place, head in zip(self._places, self.exits, strict=True)
        ]
        try:
            found.append(self.model(*inputs))
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return found

    def forward(self, *inputs: Any) -> Tensor:
        return torch.stack(self.outputs(*inputs)).mean(0)


def with_exits(build: Callable[[], nn.Module], inputs: tuple[Any, ...]) -> WithExits:
    """Build a model and add exits of one linear layer before the modules that its attribute `exits_before` names.

    A call with `inputs` finds the features at each exit. The model must be a chain of these modules.
    """
    model = build()
    places, read = tuple(getattr(model, "exits_before", ())), list[tuple[str, Any]]()

    def note(place: str, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001 - torch's signature
        read.append((place, args[0] if args else None))

    trial = copy.deepcopy(model).eval()
    known = dict(trial.named_modules(remove_duplicate=False))
    for place in set(known).intersection(places):
        known[place].register_forward_pre_hook(partial(note, place))
    with torch.no_grad():
        outputs = trial(*inputs)
    called, features = [place for place, _ in read], [one for _, one in read]
    whole = all(isinstance(one, Tensor) and one.is_floating_point() for one in (*features, outputs))
    if not places or called != [*places] or not whole:
        raise InvalidValueError(
            f"exits need a model that gives one tensor (N, …, outputs) and has the attribute exits_before, as in exits_before ="
            f" ('conv2', 'fc1'): the names of the modules before which a weak client may stop, each called once, in this order,"
            f" with a tensor of features; {type(model).__name__} names {places} and calls {called}"
        )
    convolution = [isinstance(known[place], CONVOLUTIONS) for place in places]
    sizes = zip(features, convolution, strict=True)
    return WithExits(model, places, [exit_head(one.shape, outputs.shape[-1], convolution=conv) for one, conv in sizes])


def _ends(layers: Sequence[Layer]) -> list[int]:
    return [*(place for place, layer in enumerate(layers, 1) if layer.name.startswith("exits.")), len(layers)]


def depth_entries(layers: Sequence[Layer]) -> list[frozenset[str]]:
    """Return the state-dict keys that a client of each depth trains, from depth 1."""
    return [frozenset(name for layer in layers[:end] for name in layer.entries) for end in _ends(layers)]


def depth_flops(layers: Sequence[Layer], costs: CostModel, *, bias: bool = False) -> list[int]:
    """Return the FLOPs of one example at each depth, from 1; `bias` adds bias entries, as the paper's convention does."""
    return [part_flops(costs, prefix_entries(layers, end), bias=bias) for end in _ends(layers)]


def affordable_depth(layers: Sequence[Layer], costs: CostModel, ratio: float) -> int:
    """Return the largest depth whose work is at most `ratio` of the whole model's, exits included; at least 1.

    A `ratio` that is exactly the share of a depth gives that depth, in spite of rounding.
    """
    work = depth_flops(layers, costs)
    return max([1, *(depth for depth, flops in enumerate(work, 1) if flops <= ratio * work[-1] * (1 + 1e-9))])


def distillation_loss(outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return Σ_i Σ_{j≠i} KL(p_j ‖ p_i) / (d − 1), averaged over examples (or positions with a target).

    `outputs` are the logits of d exits, classes last. The teachers p_j get no gradient.

    Source: Kim et al., ICLR 2023, equation of the local loss.
    """
    logs = [output.log_softmax(-1) for output in outputs]
    total = logs[0].new_zeros(())
    for i, student in enumerate(logs):
        for j, teacher in enumerate(logs):
            if i != j:
                fixed = teacher.detach()
                gaps = (fixed.exp() * (fixed - student)).sum(-1)
                total = total + (gaps[targets != IGNORED] if gaps.shape == targets.shape else gaps).mean()
    return total / (len(logs) - 1)


@dataclass(frozen=True, kw_only=True)
class DepthFL(Method):
    """Depth by capability, with exits. Each entry is averaged over the clients that hold it, with FedDyn's correction.

    A client runs the first layers and exits, as deep as its capability affords, and minimizes
    Σ_i CE_i + w_r · distillation among the exits − ⟨h, θ⟩ + (α/2) ‖θ − ω‖². After training, h ← h − α (θ − ω). For each entry,
    the server takes the mean over the clients that hold it. It subtracts h / α, with its own
    h ← h − α · (holders / clients) · (mean − ω). Both terms apply to parameters only; statistics are averaged. Entries that no
    client holds stay unchanged. α is 0.1. In round r of R, w_r = exp(−5 (1 − min(r, 0.3·R) / (0.3·R))²), which is 1 after three
    tenths of the rounds.

    The attribute `exits_before` of a model names the modules before which it has exits, in forward order; the mean of all
    outputs is the prediction. FedDyn is by Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
    """

    uses_capability = True
    source = "Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023"
    note = "The model has exits, one linear layer each, whose work is counted; clients run the first layers only."

    def check(self, setup: Setup) -> Setup:
        problem = setup.problem
        return replace(setup, problem=replace(problem, model=partial(with_exits, problem.model, problem.example_inputs)))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        entries, work = depth_entries(server.layers), depth_flops(server.layers, server.costs)
        depth = affordable_depth(server.layers, server.costs, server.roster[client_id].capability.ratio)
        ratio = work[depth - 1] / work[-1]
        if depth == len(entries):
            return Task(ratio=ratio)
        dropped = [name for name in server.graph.shapes if name not in entries[depth - 1]]
        mask = WeightMask({name: torch.zeros(server.graph.shapes[name], dtype=torch.bool) for name in dropped})
        return Task(mask=mask, ratio=ratio)

    def least(self, server: ServerContext) -> float:
        """Return the share of the model's FLOPs up to the first exit."""
        work = depth_flops(server.layers, server.costs)
        return work[0] / work[-1]

    def train(self, client: ClientContext, task: Task) -> Result:
        depth = affordable_depth(client.layers, client.costs, task.ratio)
        names = depth_entries(client.layers)[depth - 1]
        module, loss_of = client.masked.model, client.problem.loss
        assert isinstance(module, WithExits)
        ramp = _RAMP * client.rounds
        weight = math.exp(-5.0 * (1.0 - min(client.round, ramp) / ramp) ** 2)

        def forward(batch: Batch) -> tuple[Any, Tensor]:
            outputs = module.outputs(*batch.inputs, depth=depth)
            losses = torch.stack([loss_of(output, batch.targets) for output in outputs])
            total = losses.sum() + (weight * distillation_loss(outputs, batch.targets) if depth > 1 else 0.0)
            # Report the mean loss of the outputs, which is comparable with other methods.
            reported = losses.mean().detach() + (total - total.detach())
            return torch.stack([output.detach() for output in outputs]).mean(0), reported

        dynamic = partial(self._dynamic, client, task.state)
        result = sgd(client, task, forward=forward, only=names, adjusts=dynamic)
        log, state = result.log, result.state
        trained = [name for name in trained_leaves(client.masked) if name in names]  # in the order of the state
        for name in trained:
            drifts = client.memory.setdefault("drift", {})
            drifts[name] = drifts.get(name, torch.zeros(())) - _ALPHA * (state[name].cpu() - task.state[name].cpu())
        flops = depth_flops(client.layers, client.costs)[depth - 1]
        paper = depth_flops(client.layers, client.costs, bias=True)[depth - 1]
        work = Cost(flops=3 * flops * log.examples, flops_paper=3 * paper * log.padded_examples)
        return replace(result, work=work)

    def _dynamic(self, client: ClientContext, start: StateDict, leaves: Leaves) -> list[Adjust]:
        """Return adjusts that add the gradient of FedDyn's two terms, −h + α (θ − ω), to that of each step."""
        kept = client.memory.get("drift", {})
        drifts = {leaf: kept[name].to(leaf) for name, leaf in leaves.items() if name in kept}
        pull = pull_towards(client.masked, leaves, start, _ALPHA)
        return [pull, lambda gradients: {leaf: one - drifts.get(leaf, 0.0) for leaf, one in gradients.items()}]

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean over the holders of each entry, corrected by FedDyn's h."""
        drifts = server.memory.setdefault("drift", {})
        changes = mean_change(server.graph, server.state, updates, weights="uniform", over="holders")
        for name in list(changes):
            holders = sum(name not in (update.mask or ()) for update in updates)
            if not holders:
                del changes[name]
            elif name in server.parameters:
                change = changes[name]
                before = drifts.get(name, torch.zeros_like(change))
                drifts[name] = before - _ALPHA * (holders / len(server.roster)) * change
                changes[name] = change - drifts[name] / _ALPHA
        return moved(server.state, changes)
