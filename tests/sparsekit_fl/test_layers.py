"""Layers are found by the entries that a forward pass reads, whatever the modules are called."""

import torch
import torch.nn.functional as F
from torch import nn

from sparsekit_fl.layers import head_entries, layer_weights, prefix_entries, trace_layers


def shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


class Backwards(nn.Module):
    """Registers its layers in another order than it calls them, and keeps a bias of its own for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(6, 4)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.last(self.norm(self.first(x))) + self.shift


class Tied(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(7)) if bias else None

    def forward(self, x):
        return F.linear(self.lstm(self.embedding(x))[0], self.embedding.weight, self.bias)


def test_layers_come_in_the_order_of_the_forward_pass():
    layers = trace_layers(Backwards(), (torch.zeros(2, 6),))
    assert [layer.name for layer in layers] == ["first", "last"]
    assert set(layers[0].entries) == {"first.weight", "first.bias", *(n for n in shapes(Backwards()) if n.startswith("norm."))}
    assert set(layers[1].entries) == {"last.weight", "shift"}


def test_every_key_belongs_to_exactly_one_layer():
    for model, x in [
        (Backwards(), torch.zeros(2, 6)),
        (Tied(True), torch.zeros(2, 3, dtype=torch.int64)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 3, 8)),
        (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 4), nn.Dropout()), torch.zeros(2, 6)),
    ]:
        entries = [name for layer in trace_layers(model, (x,)) for name in layer.entries]
        assert sorted(entries) == sorted(model.state_dict())


def test_the_head_is_what_no_earlier_layer_reads():
    assert set(head_entries(trace_layers(Backwards(), (torch.zeros(2, 6),)))) == {"last.weight", "shift"}
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert head_entries(trace_layers(Tied(True), (tokens,))) == ("bias",)
    assert head_entries(trace_layers(Tied(False), (tokens,))) == ()


def test_prunable_weights_are_matrices_but_those_of_the_output_layer():
    assert layer_weights(trace_layers(Backwards(), (torch.zeros(2, 6),))) == {"first.weight": torch.Size([4, 6])}
    tied = trace_layers(Tied(True), (torch.zeros(2, 3, dtype=torch.int64),))
    assert tuple(layer_weights(tied)) == ("lstm.weight_ih_l0", "lstm.weight_hh_l0")
    assert layer_weights(trace_layers(nn.Linear(3, 2), (torch.zeros(2, 3),))) == {}


def test_a_prefix_leaves_out_what_a_later_layer_reads_too():
    layers = trace_layers(Tied(True), (torch.zeros(2, 3, dtype=torch.int64),))
    assert prefix_entries(layers, 1) == frozenset()
    assert all(name.startswith("lstm.") for name in prefix_entries(layers, 2))
    assert prefix_entries(layers, len(layers)) == frozenset(Tied(True).state_dict())
