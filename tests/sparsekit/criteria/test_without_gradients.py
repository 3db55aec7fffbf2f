"""Models whose forward pass runs without gradients, as of predictors and frozen feature extractors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import InvalidValueError


class _Net(nn.Module):
    def __init__(self, mode: Callable[[], Any], *, is_part: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.mode, self.is_part = mode, is_part

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            h = self.b(self.a(x).relu()).relu()
            if not self.is_part:
                return self.c(h)
        return self.c(h)


_DATA = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(2)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_part", [False, True])
def test_other_criteria_score_and_those_by_gradient_say_what_to_use(mode: Callable[[], Any], is_part: bool) -> None:
    model = _Net(mode, is_part=is_part)
    for criterion in (None, "wanda", "magnitude"):
        small = sk.prune(
            model, (_DATA[0][0],), budget="flops=50%", batches=_DATA, loss=nn.CrossEntropyLoss(), criterion=criterion
        )
        assert small.report.after["flops"] <= 0.5 * small.report.before["flops"] > 0
    with pytest.raises(InvalidValueError, match=r"torch\.no_grad.* Wanda or Magnitude"):
        sk.prune(model, (_DATA[0][0],), budget="flops=50%", batches=_DATA, loss=nn.CrossEntropyLoss(), criterion="fisher")
    if not is_part:
        with pytest.raises(InvalidValueError, match="Taylor needs gradients, and the forward pass of _Net runs without any"):
            sk.prune(model, (_DATA[0][0],), budget="flops=50%", batches=_DATA, loss=nn.CrossEntropyLoss(), criterion="taylor")
