"""What new users of the federated layer met in their first hour."""

import logging

import pytest
import torch
from personal import Read
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))


def _split(examples: int) -> fl.TensorData:
    x = torch.randn(examples, 20, generator=torch.Generator().manual_seed(examples))
    return fl.TensorData((x,), (x[:, 0] > 0).long())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_inputs_that_are_no_numbers_are_found_in_any_data_set(
    bad: float, lazy: bool, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    splits = {"train": _split(30), "val": _split(10), "test": _split(10)}
    splits[split].inputs[0][7, 3] = bad
    first = fl.ClientData(**{name: Read(data) if lazy else data for name, data in splits.items()})
    clients = [
        fl.Client(id=id, data=first if id == 0 else fl.ClientData(_split(30), _split(10), _split(10))) for id in range(2)
    ]
    problem = fl.Problem(model=_net, example_inputs=(torch.zeros(1, 20),))
    method = fl.methods.fedlps if (bad, split) == (float("inf"), "train") else fl.methods.fedavg
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        fl.run(method(), problem, clients, fl.RunConfig(rounds=3, cohort=2, seed=0))
    assert f"inputs of client 0 hold NaN or infinity, in example 7 of {split} first" in caplog.text
    assert "learning rate" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "continues without client 0" in record.getMessage()]
    assert len(lines) == (3 if split == "train" else 0)


class _Reader(nn.Module):
    """Attention with a float mask, in which hidden positions are minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x, src_key_padding_mask=mask)[:, 0])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.filterwarnings("ignore::sparsekit.tracing.trace.UnprunableWarning")
def test_minus_infinity_is_an_input_and_what_it_spoils_is_refused(lazy: bool, caplog: pytest.LogCaptureFixture) -> None:
    def split(examples: int) -> fl.TensorData:
        generator = torch.Generator().manual_seed(examples)
        x, y = torch.randn(examples, 5, 4, generator=generator), torch.randint(2, (examples,), generator=generator)
        hidden = torch.arange(5) > torch.randint(1, 5, (examples, 1), generator=generator)
        return fl.TensorData((x, torch.where(hidden, -torch.inf, 0.0)), y)

    whole, hurt = split(30), split(30)
    hurt.inputs[0][3, 0, 2] = -torch.inf
    clients = [
        fl.Client(id=id, data=fl.ClientData(*(Read(part) if lazy else part for part in (train, split(10), split(12)))))
        for id, train in enumerate((whole, hurt))
    ]
    problem = fl.Problem(model=_Reader, example_inputs=(torch.zeros(1, 5, 4), torch.zeros(1, 5)))
    config = fl.RunConfig(rounds=1, cohort=2, seed=0, training=fl.TrainingConfig(batch_size=30))
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        result = fl.run(fl.methods.fedavg(), problem, clients, config)
    assert [id for id, _ in result.rounds[0].dropped] == [1]
    assert "finite inputs may help" in caplog.text


@pytest.mark.parametrize("given", ["fedavg", fl.methods.fedavg])
def test_a_method_that_was_not_called_is_told_how_to_call_it(given: object) -> None:
    problem = fl.Problem(model=_net, example_inputs=(torch.zeros(1, 20),))
    with pytest.raises(InvalidValueError, match=r"method must be a Method, got .*(?i:fedavg).*: fl\.methods\.fedavg\(\)"):
        fl.run(given, problem, [], fl.RunConfig(rounds=1, cohort=1))  # type: ignore[arg-type]
