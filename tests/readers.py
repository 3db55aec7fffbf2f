"""Random networks with one planted reader of a width, which makes cuts inexact, and whether a trace accepts such a cut."""

from collections.abc import Callable
from typing import Any

import fuzz
import numpy as np
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.graph.graph import UnitGraph
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.passes import train_without_dropout

__all__ = ["READERS", "WITH_GRADIENTS", "is_wrong", "plant_reader"]


class Keeps(nn.Module):
    """A block that leaves the width of one of its layers behind, as a number."""

    def __init__(self, op: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.op, self.layer = op, [layer]
        self.width = self._width = 0
        self.left, self.calls = torch.zeros(()), 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, *values: Tensor) -> Any:
        self.width = self._width = _width(self.layer[0])
        return self.op(*values)


class Layer(nn.Module):
    """A layer that keeps its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.made = torch.zeros(())

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        self.made = self.layer(x)
        return self.made


def _leave(block: Any, layer: Any) -> float:
    """Leave a tensor in an attribute that no output depends on."""
    block.left = layer.weight.sum() * 0.0 + _width(layer)
    return 1.0


def _write(block: Any, layer: Any) -> float:
    """Write a width into a buffer that no output depends on."""
    block.seen.mul_(0.5).add_(_width(layer))
    return 1.0


def _remembered(block: Any, layer: Any) -> float:
    """Use a width in a second call alone."""
    block.calls += 1
    return float(_width(layer)) if block.calls == 2 else 1.0


class ScaledGradient(torch.autograd.Function):
    """Multiplies gradients by a factor, and leaves values as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _width(layer: Any) -> int:
    return int(layer.weight.shape[0])


def _share(layer: Any) -> Tensor:
    """The mean of a layer's output, as code that reads a size computes it."""
    dim = 1 if layer.made.dim() == 4 else -1
    return layer.made.sum() / layer.made.shape[dim]  # type: ignore[no-any-return]


READERS: dict[str, Callable[[Any, Any, Any], float | Tensor]] = {
    "width": lambda a, _b, _k: float(_width(a)),
    "columns": lambda a, _b, _k: float(a.weight.shape[1]),
    "ratio": lambda a, b, _k: _width(a) / _width(b),
    "equality": lambda a, b, _k: 2.0 if _width(a) == _width(b) else 1.0,
    "order": lambda a, b, _k: 2.0 if _width(a) < _width(b) else 1.0,
    "minimum": lambda a, b, _k: float(min(_width(a), _width(b))),
    "maximum": lambda a, b, _k: float(max(_width(a), _width(b))),
    "parameters": lambda a, _b, _k: float(sum(p.numel() for p in a.parameters())),
    "length of a bias": lambda a, _b, _k: float(sum(len(p) for p in a.parameters() if p.dim() == 1)),
    "kept number": lambda _a, _b, k: float(k.width),
    "private number": lambda _a, _b, k: float(k._width),
    "kept tensor": lambda a, _b, _k: _share(a),
    "tensor of a number": lambda a, _b, _k: torch.tensor(float(_width(a)), device=a.weight.device),
    "ones": lambda a, _b, _k: torch.ones(_width(a), device=a.weight.device).sum(),
    "side output": lambda a, _b, k: _leave(k, a),
    "buffer": lambda a, _b, k: _write(k, a),
    "second call": lambda a, _b, k: _remembered(k, a),
    "bound": lambda a, _b, k: torch.rand(4, device=a.weight.device).mul(9.0).clamp(max=float(_width(a))).sum(),
    "with gradients": lambda a, _b, _k: float(_width(a)) if torch.is_grad_enabled() else 1.0,
    "gradient": lambda a, _b, _k: ScaledGradient.apply(torch.ones((), device=a.weight.device), _width(a)),
}
"""How a factor is read off two layers, and the block of the first."""
WITH_GRADIENTS = frozenset({"with gradients", "gradient"})
"""Of these, a large model is compared inside of its blocks alone, and one without values not at all."""


class Reads(nn.Module):
    """A network, or an operation inside it, whose results are multiplied with values read elsewhere.

    Args:
        op: What runs.
        reader: Key of `READERS`, or None to read nothing.
        seen: The two layers, and the block that the first is in.
        when: Read in train mode alone, in eval mode alone, or in both.
    """

    def __init__(self, op: nn.Module, reader: str | None, seen: list[nn.Module], when: bool | None) -> None:
        super().__init__()
        self.op, self.reader, self.seen, self.when = op, reader, seen, when

    def forward(self, *values: Tensor) -> Any:
        made = self.op(*values)
        if self.reader is None or self.when not in (None, self.training):
            return made
        factor = READERS[self.reader](*self.seen)
        return tuple(m * factor for m in made) if isinstance(made, tuple) else made * factor


class Beside(nn.Module):
    """A network beside an embedding of many rows, which makes the model a large one."""

    def __init__(self, net: nn.Module, rows: int) -> None:
        super().__init__()
        self.net, self.table = net, nn.Embedding(rows, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        row = self.table(torch.zeros(1, dtype=torch.long, device=x.device)).sum()
        return tuple(output + row for output in self.net(x))


def plant_reader(seed: int, rows: int) -> tuple[nn.Module, Tensor, str] | None:
    """A random network with a reader beside an embedding, its input, and the reader; None where no layer has a width."""
    net, x = fuzz.build(seed)
    rng = np.random.default_rng([11, seed])
    owners = [
        (number, parent, name)
        for number, op in enumerate(net.ops[:-1])
        for parent in op.modules()
        for name, module in parent.named_children()
        if type(module) in (nn.Linear, nn.Conv2d)
    ]
    if not owners:
        return None
    reader = list(READERS)[seed % len(READERS)]
    (at, parent, name), (other, home, second) = (owners[int(rng.integers(len(owners)))] for _ in range(2))
    seen = [parent.get_submodule(name), home.get_submodule(second), net.ops[at]]
    if reader == "kept tensor":
        seen[0] = Layer(seen[0])
        setattr(parent, name, seen[0])
    if reader in ("kept number", "private number", "side output", "buffer", "second call"):
        seen[2] = net.ops[at] = Keeps(net.ops[at], seen[0])
    when = (None, True, False)[int(rng.integers(3))]
    inside = other > at and bool(rng.random() < 0.5)
    if inside:
        net.ops[other] = Reads(net.ops[other], reader, seen, when)
    whole = net if inside else Reads(net, reader, seen, when)
    return Beside(whole, rows).double().eval(), x, reader


def uneven_mask(graph: UnitGraph, seed: int) -> sk.UnitMask:
    """A mask under which each set of tied groups keeps a share of its own."""
    rng = np.random.default_rng([12, seed])
    keep = {}
    for tied in graph.tied_sets:
        share = rng.uniform(0.05, 0.95)
        for name in tied:
            size = graph.groups[name].size
            keep[name] = torch.zeros(size, dtype=torch.bool)
            keep[name][torch.from_numpy(rng.permutation(size)[: graph.groups[name].rounded(max(1, round(share * size)))])] = (
                True
            )
    return sk.UnitMask(keep)


def _run(model: nn.Module, x: Tensor, *, train: bool) -> list[Tensor]:
    """Outputs of two calls, what they leave, and the gradients of the first one by the input and the kept parameters."""
    torch.manual_seed(0)
    model = train_without_dropout(model) if train else model.eval()
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    outputs = model(x)
    wanted = [*([x] if x.requires_grad else []), *model.parameters()]
    gradients = torch.autograd.grad(sum(t.sin().sum() for t in outputs), wanted, allow_unused=True)
    with torch.no_grad():
        found = [*outputs, *model(x)]
    for module in model.modules():
        found += [module.left, module.seen] if isinstance(module, Keeps) else []
    return [t.detach() for t in found] + [torch.zeros(()) if g is None else g for g in gradients]


def is_wrong(model: nn.Module, x: Tensor, graph: UnitGraph) -> str | None:
    """What breaks the law of masks under uneven masks, in either mode, or None."""
    for seed in range(4):
        mask = uneven_mask(graph, seed)
        for train in (False, True):
            gated = copy_with(model, graph.gate(named_entries(model), {name: keep.double() for name, keep in mask.items()}))
            small = sk.compact(model, graph, mask)
            try:
                with torch.random.fork_rng(devices=[]):
                    expected, found = _run(gated, x, train=train), _run(small, x, train=train)
                for a, b in zip(expected, found, strict=True):
                    if a.shape == b.shape:  # gradients of entries with units have others
                        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)
            except (AssertionError, RuntimeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
    return None
