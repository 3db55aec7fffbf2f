"""Distillation: the teacher teaches whatever kind of outputs a model has, or the call is an error."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import make_batches, make_model
from torch import Tensor, nn
from torch.optim import SGD
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.finetuning import Distillation

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


def _net(outputs: int, seed: int, shape: tuple[int, ...] = (), squeeze: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, outputs))
    shaped = nn.Unflatten(1, shape) if shape else nn.Flatten(0) if squeeze else nn.Identity()
    return nn.Sequential(*body, shaped)


def _bce(outputs: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, target)


def _labels(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


KINDS: dict[str, tuple[Any, Any, Tensor]] = {
    "one logit": ({"outputs": 1}, _bce, _labels(24, 1, classes=2).float()),
    "one logit without an axis": ({"outputs": 1, "squeeze": True}, _bce, _labels(24, classes=2).float()),
    "several binary labels": ({"outputs": 4}, _bce, _labels(24, 4, classes=2).float()),
    "classes": ({"outputs": 5}, F.cross_entropy, _labels(24, classes=5)),
    "probabilities of classes": ({"outputs": 5}, F.cross_entropy, F.one_hot(_labels(24, classes=5), 5).float()),
    "classes of sequences on axis 1": ({"outputs": 35, "shape": (5, 7)}, F.cross_entropy, _labels(24, 7, classes=5)),
    "as many positions as classes": ({"outputs": 25, "shape": (5, 5)}, F.cross_entropy, _labels(24, 5, classes=5)),
    "classes of images on axis 1": ({"outputs": 24, "shape": (3, 2, 4)}, F.cross_entropy, _labels(24, 2, 4, classes=3)),
    "classes of volumes on axis 1": ({"outputs": 24, "shape": (3, 2, 2, 2)}, F.cross_entropy, _labels(24, 2, 2, 2, classes=3)),
    "values": ({"outputs": 2}, F.mse_loss, 3 * torch.randn(24, 2, generator=torch.Generator().manual_seed(2))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_alone_pulls_its_student_to_it_whatever_the_outputs_are(kind: str) -> None:
    options, loss, target = KINDS[kind]
    teacher, student = _net(seed=1, **options), _net(seed=2, **options)

    def distance() -> float:
        own, other = student(X).detach(), teacher(X).detach()
        if "binary" in kind or "logit" in kind:
            return float(F.mse_loss(own.sigmoid(), other.sigmoid()))
        return float(F.mse_loss(own, other) if kind == "values" else F.mse_loss(own.softmax(1), other.softmax(1)))

    before = distance()
    make = lambda p: torch.optim.Adam(p, 0.01)  # noqa: E731
    sk.finetune(student, [(X, target)], loss, epochs=60, optimizer=make, distillation=Distillation(teacher, share=1.0))
    assert distance() < 0.2 * before


@pytest.mark.parametrize("axis", [1, -1])
def test_the_distance_is_the_divergence_over_the_classes(axis: int) -> None:
    torch.manual_seed(0)
    own, other = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    target = _labels(*own.movedim(axis, -1).shape[:-1], classes=5)
    rows = [(x / 2).movedim(axis, -1).reshape(-1, x.shape[axis]).log_softmax(-1) for x in (own, other)]
    expected = 4 * F.kl_div(*rows, reduction="batchmean", log_target=True)
    loss = F.cross_entropy(own.movedim(axis, 1), target)
    found = Distillation(nn.Identity(), share=1.0).combine(loss, own, other, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(Distillation(nn.Identity(), share=1.0, axis=axis).combine(loss, own, other), expected)


@pytest.mark.parametrize("shifted", [True, False])
def test_positions_of_language_models_that_predict_nothing_do_not_count(shifted: bool) -> None:
    torch.manual_seed(0)
    own, other, labels = torch.randn(3, 6, 9), torch.randn(3, 6, 9), torch.randint(9, (3, 6))
    labels[0, 3:], labels[1, :2] = -100, -100
    if shifted:
        loss, counted = F.cross_entropy(own[:, :-1].transpose(1, 2), labels[:, 1:]), labels[:, 1:] != -100
        rows = [(x[:, :-1][counted] / 2).log_softmax(-1) for x in (own, other)]
    else:
        loss, counted = F.cross_entropy(own.transpose(1, 2), labels), labels != -100
        rows = [(x[counted] / 2).log_softmax(-1) for x in (own, other)]
    expected = 4 * F.kl_div(*rows, reduction="batchmean", log_target=True)
    found = Distillation(nn.Identity(), share=1.0).combine(loss, SimpleNamespace(logits=own), other, labels)
    torch.testing.assert_close(found, expected)


def test_distillation_of_equal_outputs_leaves_the_share_of_the_loss() -> None:
    logits = torch.randn(4, 3)
    mixed = Distillation(nn.Identity(), share=0.25).combine(torch.tensor(2.0), logits, logits)
    assert float(mixed) == pytest.approx(1.5)


def test_a_teacher_that_teaches_nothing_is_an_error() -> None:
    model = make_model()
    with pytest.raises(InvalidValueError, match=r"share must be in \(0, 1\]"):
        Distillation(model, share=0.0)
    for teacher in (model, Lambda(lambda m, x: m.inner(x), inner=model)):
        with pytest.raises(InvalidValueError, match="shares its weights with the student"):
            sk.finetune(model, make_batches(12), F.cross_entropy, epochs=1, distillation=Distillation(teacher))


def test_hidden_outputs_are_matched_by_name_with_a_projection_where_widths_differ() -> None:
    teacher = make_model(1)
    batches = make_batches(48)
    pruned = sk.prune(teacher, (batches[0][0][:2],), budget="flops=40%", batches=batches, loss=F.cross_entropy, multiple_of=1)
    found = {}
    for hidden in ((), ("3", "6"), {"3": "3"}):
        student = copy.deepcopy(pruned.model)
        size = sum(parameter.numel() for parameter in student.parameters())
        taught = Distillation(teacher, share=0.5, hidden=hidden, hidden_share=5.0)
        result = sk.finetune(student, batches, F.cross_entropy, epochs=8, optimizer=lambda p: SGD(p, 0.02), distillation=taught)
        assert sum(parameter.numel() for parameter in student.parameters()) == size
        assert not any(module._forward_hooks for each in (student, teacher) for module in each.modules())
        found[str(hidden)] = [record.loss for record in result.history]
        if hidden:
            assert found[str(hidden)][-1] < found[str(hidden)][0]
    assert found["()"] != found["('3', '6')"]
    taught = Distillation(teacher, hidden=["nowhere"])
    with pytest.raises(InvalidValueError, match="hidden names 'nowhere', which is not a module of the student"):
        sk.finetune(copy.deepcopy(pruned.model), batches, F.cross_entropy, epochs=1, distillation=taught)


def test_hidden_outputs_go_with_an_average_and_a_resumed_training(tmp_path: Any) -> None:
    teacher, batches = make_model(1), make_batches(48)
    pruned = sk.prune(teacher, (batches[0][0][:2],), budget="flops=40%", batches=batches, loss=F.cross_entropy, multiple_of=1)

    def train(epochs: int, checkpoint: Any) -> nn.Module:
        student = copy.deepcopy(pruned.model)
        options = {"distillation": Distillation(teacher, hidden=["3"]), "average": 0.5, "validation": batches}
        return sk.finetune(student, batches, F.cross_entropy, epochs=epochs, checkpoint=checkpoint, **options).model

    whole = train(4, None)
    train(2, tmp_path / "run")
    torch.testing.assert_close(train(4, tmp_path / "run").state_dict(), whole.state_dict(), rtol=0, atol=0)
