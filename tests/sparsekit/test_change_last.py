"""An object that raised equals its copy from before, whatever call was to change it, and wherever it failed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import half, make_batches, make_model
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.pruning import sequence
from sparsekit.pruning.least_squares import Fit

BATCHES = make_batches(64)


class Planted(Exception):
    """A fault of the test."""


def net() -> nn.Module:
    """A network that has seen data, with a frozen batch norm and a frozen bias."""
    model = make_model()
    model[3] = nn.Identity()  # a dropout draws in each pass
    model(BATCHES[0][0])
    model[1].momentum = 0.05
    model[1].eval()
    model[4].bias.requires_grad_(False)
    return model


def chain() -> nn.Module:
    return nn.Sequential(*(Lambda(lambda m, x: x + m.b(m.a(x).relu()), a=(6, 16), b=(16, 6)) for _ in range(3))).eval()


def masked() -> nn.Module:
    return sk.LearnableMask(net(), (torch.zeros(2, 6),), ratio=0.5, learning=sk.GradientImportance())


def lbfgs() -> nn.Module:
    """A fixed mask, and an optimizer that cannot follow a change of it."""
    model = sk.LearnableMask(net(), (torch.zeros(2, 6),), ratio=0.5)
    model.own_optimizer = torch.optim.LBFGS(model.parameters())
    (x, y), *_ = BATCHES
    F.cross_entropy(model(x), y).backward()
    model.own_optimizer.step(lambda: F.cross_entropy(model(x), y))
    return model


def broken(fault: str) -> Any:
    first, (x, y), *rest = BATCHES

    def load() -> Iterator[Any]:
        yield first
        raise Planted

    bad = {"device": (x.to("meta"), y), "width": (x[:, :3], y), "kind": "text", "nan": (x * float("nan"), y)}
    return load() if fault == "loader" else [first, bad[fault], *rest]


def at_second(call: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Planted
        return call(*args, **kwargs)

    return fails


def _finetune(model: nn.Module, data: Any = None, loss: Any = F.cross_entropy, **options: Any) -> None:
    options = {"epochs": 2, "optimizer": lambda p: torch.optim.SGD(p, 0.5), **options}
    sk.finetune(model, data or BATCHES, loss, **options)


def _checkpoint_of_another(model: nn.Module, folder: Path, _: Any) -> None:
    _finetune(net(), epochs=1, checkpoint=folder / "run")
    found = torch.load(folder / "run", weights_only=True)
    found["state"]["model"]["6.bias"] = torch.zeros(7)
    torch.save(found, folder / "run")
    _finetune(model, checkpoint=folder / "run")


def _graph(model: nn.Module) -> tuple[sk.UnitGraph, sk.UnitMask]:
    graph = sk.trace_units(model, torch.zeros(2, 6))
    return graph, half(graph)


def small() -> nn.Module:
    dense = net().eval()
    return sk.compact(dense, *_graph(dense))


def _reconstruct(model: nn.Module, data: Any) -> None:
    dense = net().eval()
    sk.reconstruct(dense, model, *_graph(dense), data)


def _second_layer(model: nn.Module, _: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "solve", at_second(Fit.solve))
    _reconstruct(model, BATCHES)


def _in_place(model: nn.Module, _: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, mask = _graph(model)
    monkeypatch.setattr(sequence, "reshape_leaf", at_second(sequence.reshape_leaf))
    with pytest.raises(Planted):
        sk.reconstruct(model, model, graph, mask, [x for x, _ in BATCHES])
    raise Planted


def _prune(model: nn.Module, data: Any = None, **options: Any) -> None:
    options = {"loss": F.cross_entropy, "budget": "flops=60%", **options}
    sk.prune(model, (torch.zeros(2, 6),), batches=data or BATCHES, **options)


def _score(model: nn.Module) -> float:
    return float(model(torch.randn(4, 6)).sum())


NARROWING = sk.LearnedNarrowing(steps=20)
DATA = ("loader", "device", "width", "kind")
CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    **{f"finetune, {fault}": (net, lambda m, *_, f=fault: _finetune(m, broken(f))) for fault in (*DATA, "nan")},
    "finetune, loss": (net, lambda m, *_: _finetune(m, loss=at_second(F.cross_entropy))),
    "finetune, metric": (net, lambda m, *_: _finetune(m, validation=lambda _: _score(m) / 0)),
    "finetune, metric is NaN": (net, lambda m, *_: _finetune(m, validation=lambda _: float("nan"))),
    "finetune, optimizer": (net, lambda m, *_: _finetune(m, optimizer=torch.optim.SGD(net().parameters(), 0.1))),
    "finetune, checkpoint": (net, _checkpoint_of_another),
    "finetune of a mask": (masked, lambda m, *_: _finetune(m, broken("loader"))),
    **{f"recalibrate, {fault}": (net, lambda m, *_, f=fault: sk.recalibrate_batchnorm(m, broken(f))) for fault in DATA},
    **{f"reconstruct, {fault}": (small, lambda m, *_, f=fault: _reconstruct(m, broken(f))) for fault in DATA},
    "reconstruct, second layer": (small, _second_layer),
    "reconstruct in place": (chain, _in_place),
    **{f"prune, {fault}": (net, lambda m, *_, f=fault: _prune(m, broken(f))) for fault in DATA},
    "prune, metric": (net, lambda m, *_: _prune(m, metric=at_second(_score))),
    "prune, loss": (net, lambda m, *_: _prune(m, criterion="fisher", loss=at_second(F.cross_entropy))),
    "prune, finetune": (net, lambda m, *_: _prune(m, schedule="linear", finetune=lambda *_: 1 / 0)),
    "load_importance": (masked, lambda m, *_: m.load_importance({"0": torch.ones(16), "4": torch.full((8,), torch.nan)})),
    **{
        f"load, {fault}": (masked, lambda m, *_, options=options: m.load(**{"state": net().state_dict(), **options}))
        for fault, options in {
            "state": {"state": {"0.weight": torch.zeros(3, 3)}, "ratio": 0.75},
            "ratio": {"ratio": 1.5, "learning": sk.GradientImportance(lr=0.5)},
            "mask": {"mask": sk.UnitMask({"0": torch.ones(16) > 0, "4": torch.ones(7) > 0}), "learning": NARROWING},
            "importance": {"importance": torch.full((24,), torch.nan), "ratio": 0.25},
            "a rule without a ratio": {"learning": NARROWING},
            "batches": {"learning": NARROWING, "ratio": 0.25, "batches": []},
        }.items()
    },
    "ratio": (lbfgs, lambda m, *_: setattr(m, "ratio", 0.25)),
    "load_importance, LBFGS": (lbfgs, lambda m, *_: m.load_importance({"0": -m.importance()["0"]})),
}


def _facts(model: nn.Module) -> tuple[dict[str, Tensor], list[Any]]:
    entries = dict([*model.named_parameters(), *model.named_buffers()])
    names = ("training", "momentum", "in_features", "out_features", "num_features", "_forward_hooks", "_forward_pre_hooks")
    plain = [[repr(getattr(module, name, None)) for name in names] for module in model.modules()]
    flags = [value.requires_grad for value in entries.values()]
    state = {f"state.{name}": value.clone() for name, value in model.state_dict().items()}
    tensors = {name: value.detach().clone() for name, value in entries.items()}
    return {**tensors, **state, "draws": torch.random.get_rng_state()}, [*plain, flags, repr(model)]


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_raised_equals_its_copy_from_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, call = CALLS[name]
    model = make()
    tensors, plain = _facts(model)
    with pytest.raises(Exception):  # noqa: B017 - whichever the fault is, the model is the point
        call(model, tmp_path, monkeypatch)
    found, now = _facts(model)
    assert now == plain
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)
