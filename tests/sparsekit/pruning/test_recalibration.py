"""recalibrate_batchnorm() and reconstruct(): exact statistics, exact fits, better models, blocks in sequence."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from laws import random_mask, trace
from memory import Transformer
from small import half
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.pruning import least_squares, reconstruction


def test_statistics_are_averages_over_the_batches() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, momentum=0.3), nn.Dropout(0.5))
    model.eval()
    batches = [torch.randn(4, 2, 5, 5), torch.randn(4, 2, 5, 5)]
    assert sk.recalibrate_batchnorm(model, batches) == 1
    values = [model[0](x).detach() for x in batches]
    mean = torch.stack([v.mean((0, 2, 3)) for v in values]).mean(0)
    variance = torch.stack([v.transpose(0, 1).flatten(1).var(1) for v in values]).mean(0)
    assert torch.allclose(model[1].running_mean, mean, atol=1e-6)
    assert torch.allclose(model[1].running_var, variance, atol=1e-6)
    assert model[1].momentum == 0.3
    assert not any(module.training for module in model.modules())


def test_batches_of_one_example_give_the_statistics_of_all_and_a_last_one_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(24, 3)
    alone, together, ragged = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    sk.recalibrate_batchnorm(alone, x.split(1))
    sk.recalibrate_batchnorm(together, [x])
    sk.recalibrate_batchnorm(ragged, [x, x[:1], x[:0]])
    for name, value in together.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(alone.state_dict()[name], value)
            assert torch.equal(ragged.state_dict()[name], value)
    before = copy.deepcopy(model.state_dict())
    sk.recalibrate_batchnorm(model, [x[:1]])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "one value has no variance"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_prior_moves_statistics_a_share_of_the_way_to_those_of_the_training(share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    fresh = copy.deepcopy(model)
    sk.recalibrate_batchnorm(model, [2 * torch.randn(64, 3) + 1])  # "training" data, of which the batches below differ
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [torch.randn(64, 3)]
    prior = reconstruction.statistics_prior(model, batches, share=share)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    alone, moved = copy.deepcopy(model), copy.deepcopy(model)
    sk.recalibrate_batchnorm(alone, batches)
    sk.recalibrate_batchnorm(moved, batches, prior=prior)
    for name, value in moved.state_dict().items():
        if "running" in name:
            expected = (1 - share) * alone.state_dict()[name] + share * before[name]
            assert torch.allclose(value, expected, rtol=1e-5, atol=1e-6), name
    new = reconstruction.statistics_prior(fresh, batches, share=share)
    assert all(bool((value == (0 if name.endswith("mean") else 1)).all()) for name, value in new.items()), "no training yet"


def test_layers_are_fitted_in_parts_within_a_limit_of_memory() -> None:
    torch.manual_seed(0)
    model, batches = _net(), [torch.randn(32, 3, 8, 8) for _ in range(2)]
    graph = sk.trace_units(model, batches[0][:2])
    mask = half(graph)
    whole, parts, none = (sk.compact(model, graph, mask) for _ in range(3))
    left = sk.reconstruct(model, whole, graph, mask, batches)
    sizes = {"head": 8 * 5 * (5 + 4), "hidden": 8 * 64 * (64 + 5), "second": 8 * 54 * (54 + 6), "third": 8 * 54 * (54 + 4)}
    assert sk.reconstruct(model, parts, graph, mask, batches, memory_bytes=max(sizes.values())) == pytest.approx(left)
    torch.testing.assert_close(whole.state_dict(), parts.state_dict(), rtol=1e-5, atol=1e-5)
    fitted = sk.reconstruct(model, none, graph, mask, batches, memory_bytes=sizes["second"])
    assert fitted["hidden"] == 1.0, "its sums alone are too large"
    assert fitted["second"] == pytest.approx(left["second"])


@pytest.mark.parametrize("bias", [True, False])
def test_a_fit_in_blocks_is_the_ridge_regression_that_is_best_on_held_out_rows(bias: bool) -> None:
    torch.manual_seed(0)
    inputs, outputs, rows = 3 * least_squares._BLOCK, least_squares._BLOCK + 9, 2000
    layer, kept = nn.Linear(inputs, outputs, bias=bias), torch.arange(0, inputs, 2)
    small = nn.Linear(len(kept), outputs, bias=bias)
    x = torch.randn(16, rows // 16, 100) @ torch.randn(100, inputs) + torch.randn(16, rows // 16, inputs) + 0.3
    lossy = least_squares.LossyLayer("layer", layer, kept, None)
    fit = least_squares.Fit(lossy, torch.Generator())
    with torch.no_grad():
        small.load_state_dict({"weight": layer.weight[:, kept]} | ({"bias": layer.bias} if bias else {}))
        lost = F.linear(x[..., 1::2], layer.weight[:, 1::2])
        fit.add(x[..., kept], lost, 0)
        left = fit.solve(small, 0.01)
    held = sum(each.nbytes for sums in (fit.seen, fit.unseen) for each in (*sums._sums, *sums._inner.values()))
    assert 0.99 * held < lossy.sums_bytes < held
    away = torch.arange(16) % least_squares._HELD == 1
    (x, r), (u, v) = ((x[at][..., kept].flatten(0, 1).double(), lost[at].flatten(0, 1).double()) for at in (~away, away))
    x0, r0 = (x.mean(0), r.mean(0)) if bias else (torch.zeros(len(kept)).double(), torch.zeros(outputs).double())
    inner, cross = (x - x0).t() @ (x - x0) / len(x), (x - x0).t() @ (r - r0) / len(x)
    tried = {}
    for times in least_squares._RIDGES:
        change = torch.linalg.solve(inner + times * 0.01 * inner.diagonal().mean() * torch.eye(len(kept)), cross)
        tried[float((v - r0 - (u - x0) @ change).square().sum() / v.square().sum())] = change
    best = min(tried)
    assert left == pytest.approx(best, rel=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(small.weight, (layer.weight[:, kept] + tried[best].t()).float(), rtol=1e-3, atol=1e-4)
        if bias:
            torch.testing.assert_close(small.bias, (layer.bias + r0 - x0 @ tried[best]).float(), rtol=1e-3, atol=1e-4)


def test_units_that_are_sums_of_others_are_made_up_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    with torch.no_grad():  # what goes is affine in what stays
        model[0].weight[4:] = torch.randn(4, 4) @ model[0].weight[:4]
    x = torch.randn(64, 3)
    graph = sk.trace_units(model, x[:2])
    mask = half(graph)
    small = sk.compact(model, graph, mask)
    assert not torch.allclose(small(x), model(x), atol=1e-2)
    left = sk.reconstruct(model, small, graph, mask, [x], ridge=1e-9)
    assert torch.allclose(small(x), model(x), atol=1e-4)
    assert left["1"] < 1e-6


def _net() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.norm(m.first(x)))
        x = F.relu(m.third(x + m.second(x)))
        return m.head(F.relu(m.hidden(x.flatten(1))))

    second = nn.Conv2d(12, 12, 3, padding="same", dilation=2, bias=False)
    third = nn.Conv2d(12, 8, 3, stride=2, padding=1, padding_mode="reflect")
    first, norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
    return Lambda(run, first=first, norm=norm, second=second, third=third, hidden=(8 * 16, 10), head=(10, 4)).eval()


def _images(count: int, seed: int) -> Tensor:
    """Images whose columns differ, as in photographs: bright in the middle, noisy to the right."""
    generator = torch.Generator().manual_seed(seed)
    ramp = torch.linspace(0, 1, 8)
    mean = (3 * ramp * (1 - ramp))[None, None, None] * torch.randn(count, 3, 1, 1, generator=generator)
    return mean + ramp * torch.randn(count, 3, 8, 8, generator=generator)


@pytest.mark.parametrize("images", [lambda count, seed: torch.randn(count, 3, 8, 8), _images], ids=["noise", "columns differ"])
def test_every_kind_of_reader_is_fitted_and_the_whole_model_gets_nearer(images: Callable[[int, int], Tensor]) -> None:
    torch.manual_seed(0)
    model, batches, unseen = _net(), images(256, 1).split(64), images(64, 2)
    graph = sk.trace_units(model, batches[0][:2])
    mask = half(graph)
    before = {name: entry.clone() for name, entry in model.state_dict().items()}
    small, fitted = sk.compact(model, graph, mask), sk.compact(model, graph, mask)
    left = sk.reconstruct(model, fitted, graph, mask, [(x, None) for x in batches])
    assert sorted(left) == ["head", "hidden", "second", "third"]
    assert all(0 <= share < 1 for share in left.values())
    with torch.no_grad():
        errors = [float(F.mse_loss(m(unseen), model(unseen))) for m in (small, fitted)]
    assert errors[1] < 0.6 * errors[0]
    assert all(torch.equal(entry, before[name]) for name, entry in model.state_dict().items())


def _kernels(convolution: type[nn.Module], **options: Any) -> nn.Module:
    return nn.Sequential(convolution(2, 6, 3), nn.Tanh(), convolution(6, 3, 3, stride=2, **options)).eval()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3, bias=False)).eval(), (5, 6)),
        (lambda: _kernels(nn.Conv1d, padding=1, padding_mode="circular"), (2, 12)),
        (lambda: _kernels(nn.Conv2d, padding=(2, 1), bias=False), (2, 9, 12)),
        (lambda: _kernels(nn.Conv2d, dilation=2, padding=1, padding_mode="reflect"), (2, 9, 12)),
    ],
)
def test_the_share_that_is_left_is_that_of_the_layers_error_on_data_it_has_not_seen(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """For a model whose outputs come from the only reader, so that they have its error."""
    torch.manual_seed(0)
    model, x, unseen = make(), torch.randn(600, *shape), torch.randn(2000, *shape)
    graph = sk.trace_units(model, x[:2])
    mask = half(graph)
    small, fitted = sk.compact(model, graph, mask), sk.compact(model, graph, mask)
    [left] = sk.reconstruct(model, fitted, graph, mask, x.split(50)).values()
    with torch.no_grad():
        errors = [float(F.mse_loss(m(unseen), model(unseen))) for m in (small, fitted)]
    assert left == pytest.approx(errors[1] / errors[0], rel=0.15)
    assert left < 0.9


class Block(nn.Module):
    """Two branches, as in a transformer; `how` sets how they are added, and the result of a block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm1, self.a1, self.a2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm2, self.b1, self.b2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        a = self.drop(self.a2(torch.relu(self.a1(self.norm1(x)))))
        if self.how == "norm after":
            a = self.norm1(a)
        if self.how == "in place":
            a += x
            x = a
        else:
            x = x + a if self.how != "parallel" else x
        b = self.b2(torch.relu(self.b1(self.norm2(x))))
        x = x + b + (a if self.how == "parallel" else 0)
        return (x, shift) if self.how == "tuple" else x


def _blocks(how: str) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            found = layer(x, shift=torch.ones(1))
            x = found[0] if isinstance(found, tuple) else found
        return m.head(x)

    return Lambda(run, layers=nn.ModuleList(Block(how) for _ in range(4)), head=(16, 5)).eval()


@pytest.mark.parametrize("how", ["plain", "in place", "tuple", "parallel", "norm after"])
def test_blocks_in_sequence_come_nearer_on_unseen_data_than_layers_by_themselves(how: str) -> None:
    torch.manual_seed(0)
    model, mix = _blocks(how), torch.randn(6, 16)
    *batches, unseen = (torch.randn(32, 6) @ mix + 0.3 * torch.randn(32, 16) for _ in range(13))
    pruned = sk.prune(model, unseen, budget="flops=50%", criterion="magnitude", allocation="uniform", multiple_of=1)
    errors = {}
    for sequential in (False, True):
        small = sk.compact(model, pruned.graph, pruned.mask)
        left = sk.reconstruct(model, small, pruned.graph, pruned.mask, iter(batches), sequential=sequential)
        assert left.keys() == {f"layers.{place}.{name}" for place in range(4) for name in ("a2", "b2")}
        assert all(0 <= value < 1 for value in left.values())
        with torch.no_grad():
            errors[sequential] = float((small(unseen) - model(unseen)).square().mean())
    assert errors[True] < 0.9 * errors[False]
    # In place, block by block, the dense model becomes the same.
    assert sk.reconstruct(model, model, pruned.graph, pruned.mask, batches) == left
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(unseen), small(unseen))


def test_the_candidate_that_is_chosen_is_refitted_in_sequence() -> None:
    torch.manual_seed(0)
    model, batches = _blocks("plain"), [torch.randn(32, 16) for _ in range(6)]
    ways = ["uniform", "by_cost"]
    pruned = sk.prune(model, batches[0], budget="flops=50%", criterion="magnitude", allocation=ways, batches=batches)
    small = sk.compact(model, pruned.graph, pruned.mask)
    sk.reconstruct(model, small, pruned.graph, pruned.mask, batches[:4])
    torch.testing.assert_close(pruned.model.state_dict(), small.state_dict(), rtol=0, atol=0)


def test_a_model_is_cut_in_place_where_its_blocks_hold_all_units_and_their_states_fit_or_not_at_all() -> None:
    torch.manual_seed(0)
    model, x = _blocks("plain"), torch.randn(32, 16)
    graph = sk.trace_units(model, x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidValueError, match="more memory_bytes"):
        sk.reconstruct(model, model, graph, half(graph), [x], memory_bytes=6 * x.nbytes - 1)
    chain = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    graph = sk.trace_units(chain, x)
    with pytest.raises(InvalidValueError, match=r"'0.weight' is outside"):
        sk.reconstruct(chain, chain, graph, half(graph), [x])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt", "vit-separate", "a number of heads in the block"])
def test_heads_are_cut_in_place_as_in_a_copy_and_so_are_the_numbers_that_count_them(name: str) -> None:
    if name in zoo.ZOO:
        model, (x,), _, graph = zoo.traced(name)
    else:
        torch.manual_seed(0)
        model, x = Transformer(blocks=4, width=128, inner=512, heads=4, words=300), torch.randint(300, (2, 9))
        graph, _ = trace(model, x)
    mask = random_mask(graph, 0.5, 0)
    small = sk.compact(model.eval(), graph, mask)
    assert sk.reconstruct(model, small, graph, mask, [x]) == sk.reconstruct(model, model, graph, mask, [x])
    assert torch.equal(model(x), small(x))
