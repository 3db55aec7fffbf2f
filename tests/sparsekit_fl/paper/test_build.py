"""Presets and build_problem: data, partition and model by name, from the registries or from a factory."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import sparsekit_fl as fl
from sparsekit.cli.data_source import load_data
from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.paper.build import build_task
from sparsekit_fl.paper.presets import PRESETS, preset_for


@pytest.fixture
def own(monkeypatch):
    module = ModuleType("own_things")
    monkeypatch.setitem(sys.modules, "own_things", module)
    return module


def test_without_options_the_digits_are_dealt_to_a_small_cnn():
    problem, clients = fl.build_problem(preset_for())
    assert [client.id for client in clients] == list(range(20))
    assert {len(client.data.train) for client in clients} == {44}
    assert {len(client.data.val) for client in clients} == {6}
    assert problem.example_inputs[0].shape == (1, 1, 28, 28)
    outputs = problem.model()(*clients[0].data.train.batch()[0])
    assert outputs.shape == (44, 10)
    assert {client.capability.ratio for client in clients} == {1.0}


def test_a_partition_of_ones_own_is_called_with_its_options_and_must_give_each_client_data(own):
    def by_turns(source: fl.DataSource, *, clients: int, rng: np.random.Generator, most: int) -> list[fl.ClientData]:
        first = int(rng.integers(3))
        return [
            fl.ClientData(
                train=source.train.take(list(range(first + k, 1437, clients))[:most]),
                val=source.train.take([k]),
                test=source.test.take([k, k + clients]),
            )
            for k in range(clients)
        ]

    own.by_turns, own.nothing = by_turns, lambda source, *, clients, rng: []
    name = own.__name__
    _, clients = fl.build_problem(preset_for(), partition=f"{name}:by_turns", clients=6, options={"most": 7}, seed=4)
    _, again = fl.build_problem(preset_for(), partition=f"{name}:by_turns", clients=6, options={"most": 7}, seed=4)
    assert [len(client.data.train) for client in clients] == [7] * 6
    assert [c.data.train.index.tolist() for c in clients] == [c.data.train.index.tolist() for c in again]
    with pytest.raises(UnknownNameError, match="no option 'mots'; did you mean 'most'"):
        fl.build_problem(preset_for(), partition=f"{name}:by_turns", options={"mots": 7})
    with pytest.raises(InvalidValueError, match=r"must return a list of 6 ClientData, one for each client, got \[\]"):
        fl.build_problem(preset_for(), partition=f"{name}:nothing", clients=6)


def test_a_data_factory_may_bring_problem_and_clients(own):
    split = fl.TensorData((torch.zeros(2, 3),), torch.tensor([0, 1]))
    problem = fl.Problem(model=lambda: nn.Linear(3, 2), example_inputs=(torch.zeros(1, 3),))

    def load(root: Path | None, seed: int, ids: list[int] | None) -> tuple[fl.Problem, list[fl.Client]]:
        assert (root, seed) == (Path("there"), 4)
        data = fl.ClientData(split, split, split)
        return problem, [fl.Client(id=id, data=data) for id in (range(3) if ids is None else ids)]

    own.load = load
    preset = preset_for(dataset="own_things:load")
    assert fl.build_problem(preset, data_dir="there", seed=4)[0] is problem
    for ids in ((), (2, 0)):
        found = fl.build_problem(preset, data_dir="there", seed=4, ids=ids)
        assert found[0] is problem
        assert [client.id for client in found[1]] == list(ids)
    with pytest.raises(InvalidValueError, match="brings its own problem and clients, so model, clients cannot be changed"):
        fl.build_problem(preset, data_dir="there", seed=4, model="cnn", clients=3)


def table():
    """Two inputs of a table and their classes; the model gets them as they are."""
    rng = np.random.default_rng(0)
    points, age = torch.from_numpy(rng.normal(size=(90, 5)).astype(np.float32)), torch.arange(90)[:, None]
    data = fl.TensorData((points, age), (points[:, 0] > 0).long())
    return fl.DataSource(name="table", train=data.take(list(range(60))), test=data.take(list(range(60, 90))), classes=2)


class Wide(nn.Module):
    """Reads both inputs."""

    def __init__(self, classes, shape):
        super().__init__()
        self.hidden, self.out = nn.Linear(shape[0] + 1, 8), nn.Linear(8, classes)

    def forward(self, points, age):
        logits: torch.Tensor = self.out(torch.relu(self.hidden(torch.cat([points, age / 90], dim=1))))
        return logits


@pytest.mark.parametrize("brings_its_problem", [False, True])
def test_examples_of_any_kind_are_dealt_by_partition_and_number_of_clients(own, brings_its_problem):
    own.load, own.Wide = table, Wide
    given = {"model": "own_things:Wide"}
    if brings_its_problem:
        problem = fl.Problem(model=lambda: Wide(2, (5,)), example_inputs=(torch.zeros(1, 5), torch.zeros(1, 1)))
        own.load, given = lambda: (problem, table()), {}
    preset = preset_for(dataset="own_things:load")
    dealt = {"partition": "dirichlet", "clients": 3, "options": {"alpha": 5.0}}
    built, clients, described = build_task(preset, **given, **dealt)
    assert sum(len(client.data.train) + len(client.data.val) for client in clients) == 60
    assert (described["partition"], described["clients"]) == ("dirichlet", 3)
    assert [client.id for client in build_task(preset, **given, **dealt, ids=[1])[1]] == [1]
    config = fl.RunConfig(rounds=2, cohort=2, training=fl.TrainingConfig(local_epochs=1))
    result = fl.run(fl.methods.fedlps(), built, clients, config)
    assert 0 <= result.final.personal["accuracy"] <= 1
    if brings_its_problem:
        with pytest.raises(InvalidValueError, match="brings its own problem, so model cannot be changed"):
            build_task(preset, model="cnn")
    else:
        with pytest.raises(DataError, match="takes data of kind 'image', these are 'other'"):
            build_task(preset, **dealt)


class Rows(Dataset):
    """A map-style data set of 30 examples."""

    def __len__(self):
        return 30

    def __getitem__(self, place):
        if not 0 <= place < 30:
            raise IndexError(place)
        return torch.full((5,), float(place)), place % 3


def _image_source():
    pixels = torch.arange(30, dtype=torch.uint8)[:, None, None, None].expand(30, 1, 8, 8).clone()
    data = fl.TensorData((pixels,), torch.arange(30) % 3)
    return fl.DataSource(name="mine", kind="image", train=data, test=data, classes=3, mean=(0.1,), std=(0.5,))


def _clients():
    split = fl.TensorData((torch.zeros(15, 5),), torch.arange(15) % 3)
    return [fl.Client(id=id, data=fl.ClientData(split, split if id else None, split)) for id in range(2)]


PROBLEM = fl.Problem(model=partial(nn.Linear, 5, 3), example_inputs=(torch.zeros(1, 5),))
BATCHES = [(torch.zeros(3, 5), torch.arange(3)) for _ in range(10)]
FORMS = {
    "batches": (lambda: BATCHES, 24, 6), "a loader": (lambda: DataLoader(Rows(), batch_size=4), 30, None),
    "a pair of batches": (lambda: (BATCHES, BATCHES[:2]), 30, 6), "a data set": (Rows, 24, 6),
    "a pair of data sets": (lambda: (Rows(), Subset(Rows(), range(9))), 30, 9),
    "tensors": (lambda: fl.TensorData((torch.zeros(30, 5),), torch.arange(30) % 3), 24, 6),
    "a source": (lambda: table(), 48, 12), "an image source": (_image_source, 24, 6),
    "a problem and a source": (lambda: (PROBLEM, fl.DataSource.of("rows", Rows(), 0)), 20, 4),
    "a problem and batches": (lambda: (PROBLEM, BATCHES), 24, 6),
    "a problem and clients": (lambda: (PROBLEM, _clients()), 30, 15),
}  # fmt: skip
"""What a function of `--dataset` may return; examples that `prune` trains on, and those that it validates on."""


@pytest.mark.parametrize("form", FORMS)
def test_one_function_serves_prune_and_the_federated_commands(own, form):
    make, training, validating = FORMS[form]

    def load(root=None, data_dir=None, seed=0, ids=None, batch_size=1):
        assert (seed, root) == (3, data_dir)
        return make()

    own.load, own.Plain = load, lambda classes, shape: nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))
    own.Wide = Wide
    train, validation, note = load_data("own_things:load", "cpu", data_dir=None, batch_size=4, seed=3)
    assert sum(len(batch[-1]) for batch in train) == sum(len(batch[-1]) for batch in train) == training
    assert (None if validation is None else sum(len(batch[-1]) for batch in validation)) == validating
    assert bool(note) == (form not in ("a pair of batches", "a pair of data sets", "a problem and clients"))
    inputs = next(iter(train))[0]
    assert inputs.is_floating_point()
    if "image" in form:
        assert inputs.max() < 0.1, "normalized"
    given = {} if "problem" in form else {"model": "own_things:Wide" if form == "a source" else "own_things:Plain"}
    dealt = {} if "clients" in form else {"partition": "dirichlet", "clients": 2, "options": {"alpha": 100.0}}
    problem, clients, _ = build_task(preset_for(dataset="own_things:load"), seed=3, **given, **dealt)
    config = fl.RunConfig(rounds=1, cohort=2, training=fl.TrainingConfig(local_epochs=1))
    assert len(fl.run(fl.methods.fedavg(), problem, clients, config).final.per_client) == 2


@pytest.mark.parametrize("wrong", [7, [1, 2], BATCHES[:1]])
def test_other_data_are_refused_in_words(own, wrong):
    own.load = lambda: wrong
    with pytest.raises(DataError, match=r"must return a DataSource, .* batches \(input, …, target\)|too few examples to set"):
        build_task(preset_for(dataset="own_things:load"), model="cnn")


def test_speakers_become_clients_of_the_lstm(data_dir):
    example = Path(__file__).parents[3] / "examples" / "text_data.py"
    preset = preset_for(dataset=f"{example}:shakespeare")
    _, clients = fl.build_problem(preset, model="lstm", data_dir=data_dir, clients=20)
    (tokens,), targets = clients[0].data.train.batch()
    assert tokens.shape[1:] == targets.shape[1:] == (9,)
    assert tokens.dtype == torch.int64


def test_a_data_set_brings_its_own_preset_and_a_preset_takes_another_data_set():
    assert preset_for(dataset="cifar10").model == "vgg11"
    assert preset_for(preset="mnist", dataset="digits").training.batch_size == 32
    assert preset_for(dataset="mine:load").partition is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "val", "test"), [("mnist", 180, 20, 200), ("cifar10", 180, 20, 200), ("cifar100", 720, 80, 800)]
)
def test_presets_give_the_client_sizes_of_table_one(data_dir, name, train, val, test):
    _, clients = fl.build_problem(preset_for(preset=name), data_dir=data_dir)
    assert {(len(client.data.train), len(client.data.val)) for client in clients} == {(train, val)}
    options = PRESETS[name].options
    classes = [len(client.data.train.labels().unique()) for client in clients]
    # Two shards of a client may be of one class, as in the data behind Table I: for about one client in ten of two shards.
    assert max(classes) == options["classes_per_client"]
    assert sum(classes) >= 0.85 * options["classes_per_client"] * len(clients)
    assert [len(client.data.test) for client in clients] == [owned * options["images_per_class"] for owned in classes]
    assert max(len(client.data.test) for client in clients) == test
    if name == "mnist":
        again = fl.build_problem(preset_for(preset=name), data_dir=data_dir)[1]
        assert all(torch.equal(a.data.train.index, b.data.train.index) for a, b in zip(clients, again, strict=True))
    assert clients[0].data.val.batch()[0][0].isfinite().all()


def test_images_are_normalized_for_a_problem_of_ones_own_or_refused(own):
    images, labels = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8), torch.arange(40) % 4

    def load(*, mean=(0.5, 0.5, 0.5), shape=(1, 3, 8, 8)):
        problem = fl.Problem(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), example_inputs=(torch.zeros(shape),))
        data = fl.TensorData((images,), labels)
        source = fl.DataSource(name="mine", kind="image", classes=4, train=data, test=data, mean=mean, std=(0.25,) * 3)
        return problem, source

    own.load = load
    _, clients = fl.build_problem(preset_for(dataset="own_things:load"), clients=2, partition="dirichlet")
    found, rows = clients[0].data.train.batch([0])[0][0], clients[0].data.train.index
    assert torch.allclose(found[0], (images[rows[0]] / 255 - 0.5) / 0.25)
    own.load = lambda: load(shape=(1, 192))
    with pytest.raises(
        InvalidValueError, match=r"images of 'mine' are uint8, and cannot be normalized for inputs of shape \(192,\)"
    ):
        fl.build_problem(preset_for(dataset="own_things:load"), clients=2, partition="dirichlet")
