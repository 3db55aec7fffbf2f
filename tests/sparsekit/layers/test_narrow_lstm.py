"""An LSTM with fewer cells than projected units computes what torch's layer computes with cells that are silenced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from sparsekit.layers import resize
from sparsekit.layers.narrow_lstm import NarrowProjectionLSTM


def narrowed(wide: nn.LSTM, cells: int) -> nn.LSTM:
    """The first cells of an LSTM, whose other cells are set to zero."""
    small = copy.deepcopy(wide)
    hidden = wide.hidden_size
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if name.startswith("weight_hr"):
                weight[:, cells:] = 0.0
                small._parameters[name] = nn.Parameter(weight[:, :cells].clone())
            else:
                gates = weight.unflatten(0, (4, hidden))
                gates[:, cells:] = 0.0
                small._parameters[name] = nn.Parameter(gates[:, :cells].flatten(0, 1).clone())
    resize(small)
    return small


@pytest.mark.parametrize(("cells", "kind"), [(1, NarrowProjectionLSTM), (3, NarrowProjectionLSTM), (4, nn.LSTM), (8, nn.LSTM)])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_any_number_of_cells_runs(cells: int, kind: type[nn.Module], layers: int, bidirectional: bool) -> None:
    torch.manual_seed(0)
    wide = nn.LSTM(3, 8, num_layers=layers, bidirectional=bidirectional, proj_size=3, batch_first=True).double()
    small = narrowed(wide, cells)
    assert type(small) is kind
    assert (small.hidden_size, small.proj_size) == (cells, 3)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    copies = layers * (2 if bidirectional else 1)
    first = torch.randn(copies, 2, 3, dtype=torch.float64), torch.randn(copies, 2, cells, dtype=torch.float64)
    silent = torch.nn.functional.pad(first[1], (0, 8 - cells))
    for given, dense in ((None, None), (first, (first[0], silent))):
        found, expected = small(x, given), wide(x, dense)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1][0], expected[1][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1][1], expected[1][1][..., :cells], rtol=1e-12, atol=1e-12)


def test_packed_sequences_gradients_and_copies() -> None:
    torch.manual_seed(0)
    wide = nn.LSTM(3, 6, proj_size=3).double()
    small = narrowed(wide, 2)
    x = pack_padded_sequence(torch.randn(4, 2, 3, dtype=torch.float64), torch.tensor([4, 2]))
    (found, _), (expected, _) = copy.deepcopy(small)(x), wide(x)
    assert isinstance(found, PackedSequence)
    torch.testing.assert_close(found.data, expected.data, rtol=1e-12, atol=1e-12)
    small(x)[0].data.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    assert small.hidden_size == 2
    assert [w.shape for w in small._flat_weights] == [p.shape for p in small.parameters()]
    again = nn.LSTM(3, 6, proj_size=3).double()
    resize(again)
    assert type(again) is nn.LSTM
