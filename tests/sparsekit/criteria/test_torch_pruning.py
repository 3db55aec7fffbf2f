"""TorchPruning: the scores of that library's classes on its own groups, and models that it cannot trace."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.criteria import ScoringContext
from sparsekit.criteria.torch_pruning import TorchPruning
from sparsekit.errors import InvalidValueError
from sparsekit.testing import CriterionContract

tp = pytest.importorskip("torch_pruning", reason="pip install '.[torch-pruning]'")


class TestAdapter(CriterionContract):
    @pytest.fixture
    def criterion(self) -> TorchPruning:
        return TorchPruning(tp.importance.MagnitudeImportance(p=1, normalizer=None))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Lambda(
        lambda m, x: m.head(F.relu(m.third((h := F.relu(m.norm(m.first(x)))) + m.second(h))).flatten(1)),
        first=nn.Conv2d(3, 6, 3, padding=1),
        norm=nn.BatchNorm2d(6),
        second=nn.Conv2d(6, 6, 3, padding=1),
        third=nn.Conv2d(6, 4, 1),
        head=nn.Linear(36, 5),
    ).eval()
    nn.init.uniform_(model.norm.weight)
    return model


DATA = [(torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(i)), torch.arange(4)) for i in range(2)]
CLASSES: dict[str, tuple[Any, bool]] = {
    "magnitude": (lambda: tp.importance.GroupMagnitudeImportance(), False),
    "BN scale of the first": (lambda: tp.importance.GroupMagnitudeImportance(group_reduction="max", normalizer="max"), False),
    "LAMP": (lambda: tp.importance.LAMPImportance(), False),
    "FPGM": (lambda: tp.importance.FPGMImportance(), False),
    "Taylor": (lambda: tp.importance.GroupTaylorImportance(), True),
}


@pytest.mark.parametrize("name", CLASSES)
def test_scores_are_those_on_the_librarys_own_groups(name: str, model: nn.Module) -> None:
    make, needs_data = CLASSES[name]
    graph = sk.trace_units(model, torch.randn(2, 3, 3, 3))
    importance = make()
    model.first.weight.grad = own = torch.ones_like(model.first.weight)
    found = TorchPruning(importance, batches=DATA if needs_data else None, loss=F.cross_entropy).scores(
        graph, ScoringContext(model=model)
    )
    for name, parameter in model.named_parameters():
        assert parameter.grad is (own if name == "first.weight" else None), "gradients of the model are restored"
    assert torch.equal(own, torch.ones_like(own))
    reference = make()
    model.first.weight.grad = None
    if needs_data:
        for x, y in DATA:
            F.cross_entropy(model(x), y).backward()
    library = tp.DependencyGraph().build_dependency(model, torch.randn(1, 3, 3, 3))
    for layer, group in ((model.first, "first"), (model.third, "third")):
        own = library.get_pruning_group(layer, tp.prune_conv_out_channels, list(range(layer.out_channels)))
        assert torch.allclose(found[group], reference(own).double(), rtol=1e-4, atol=1e-8), group


def test_classes_that_watch_other_passes_are_refused(model: nn.Module) -> None:
    graph = sk.trace_units(model, torch.randn(2, 3, 3, 3))
    for make in (tp.importance.GroupHessianImportance, tp.importance.ActivationImportance):
        with pytest.raises(InvalidValueError, match="use Fisher or Wanda"):
            TorchPruning(make(), batches=DATA, loss=F.cross_entropy).scores(graph, ScoringContext(model=model))
