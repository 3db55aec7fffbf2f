"""A compact model comes back from a file as it was, or is refused with a reason; torch exports, compiles and copies it."""

import copy
import functools
import io
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from laws import random_mask
from small import half
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import CompactFileError, ForeignMaskError, InvalidValueError
from sparsekit.surgery.optimizer_state import first_value
from sparsekit.surgery.rebuild import copy_with
from sparsekit.tracing.inputs import find_tensors

traced = functools.cache(zoo.traced)


def test_a_learnable_mask_is_saved_as_its_compact_model_with_its_mask(tmp_path: Path) -> None:
    model, (x,), _, _ = traced("vgg-small")
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=sk.GradientImportance()).eval()
    sk.save_compact(masked, tmp_path / "m.safetensors")
    small = sk.load_compact(tmp_path / "m.safetensors", lambda: zoo.build("vgg-small")[0])
    torch.testing.assert_close(small(x), masked(x))
    mask = sk.load_mask(tmp_path / "m.safetensors", sk.trace_units(model, x))
    assert mask == masked.unit_mask()
    full = sk.expand(small.state_dict(), masked.graph, mask, into=model.state_dict())
    assert {key: value.shape for key, value in full.items()} == {key: v.shape for key, v in model.state_dict().items()}


def test_frozen_parameters_dtypes_and_options_come_back(tmp_path: Path) -> None:
    def make(eps: float = 1e-5) -> nn.Module:
        return nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4, eps=eps), nn.ReLU(), nn.Conv1d(4, 2, 1))

    model = make(eps=0.25)
    graph = sk.trace_units(model, torch.zeros(1, 1, 5))
    model[0].weight.requires_grad_(False)
    small = sk.compact(model, graph, half(graph)).to(torch.bfloat16).eval()
    sk.save_compact(small, tmp_path / "m.safetensors")
    again = sk.load_compact(tmp_path / "m.safetensors", make)
    assert again[1].eps == 0.25
    assert again[0].weight.dtype == torch.bfloat16
    assert [p.requires_grad for p in again.parameters()] == [False, True, True, True, True, True]
    assert not again.training
    assert again[0].kernel_size == (3,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, _, _, graph = traced("mlp")
    path = tmp_path / "mlp.safetensors"
    sk.save_compact(sk.compact(model, graph, half(graph)), path, graph=graph, mask=half(graph))
    return path


def mlp() -> nn.Module:
    return zoo.build("mlp")[0]


def test_a_factory_on_the_meta_device_gives_a_model_with_the_data_of_the_file(saved: Path) -> None:
    def factory() -> nn.Module:
        with torch.device("meta"):
            return mlp()

    small, expected = sk.load_compact(saved, factory), sk.load_compact(saved, mlp)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in small.state_dict().items())
    assert not any(value.is_meta for value in small.state_dict().values())


def test_a_file_that_was_cut_off_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 5, 200, -10):
        saved.write_bytes(whole[:length])
        with pytest.raises(CompactFileError, match="cut off, damaged or no safetensors file"):
            sk.load_compact(saved, mlp)


def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CompactFileError, match=r"holds a Sequential, the factory makes a .*only in the file \['0.bias'"):
        sk.load_compact(saved, lambda: zoo.build("lstm")[0])
    small = nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(CompactFileError, match=r"'0.weight' is saved as \(4, 5\), which is not part of \(2, 5\)"):
        sk.load_compact(saved, small)
    other = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(CompactFileError, match=r"at '1' it has ReLU, the factory makes GELU"):
        sk.load_compact(saved, other)
    other = traced("lstm")[3]
    with pytest.raises(ForeignMaskError, match="belongs to other units"):
        sk.load_mask(saved, other)
    model, _, _, graph = traced("mlp")
    with pytest.raises(ForeignMaskError, match=r"'0.weight' of shape \(8, 5\), the mask gives \(4, 5\)"):
        sk.save_compact(model, tmp_path / "m.safetensors", graph=graph, mask=half(graph))
    with pytest.raises(InvalidValueError, match="together, or neither"):
        sk.save_compact(model, tmp_path / "m.safetensors", graph=graph)
    with pytest.raises(InvalidValueError, match=r"must make a torch\.nn\.Module, got int"):
        sk.load_compact(saved, lambda: 3)


@pytest.mark.parametrize(("width", "dtype"), [(5, torch.float32), (13, torch.float64), (200, torch.float32)])
@pytest.mark.same_bits
def test_a_loaded_model_gives_the_bits_of_the_saved_one(width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Products of matrices and vectors depend on memory addresses, and numbers of a file begin at any byte."""

    def make() -> nn.Module:
        layers = nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width), nn.Tanh(), nn.Linear(width, 3)
        return nn.Sequential(*layers).to(dtype)

    torch.manual_seed(0)
    model = make()
    graph = sk.trace_units(model, torch.randn(1, width, dtype=dtype))
    small = sk.compact(model, graph, half(graph))
    sk.save_compact(small, tmp_path / "small.safetensors")
    again = sk.load_compact(tmp_path / "small.safetensors", make)
    for rows in (1, 2, 5, 8):
        x = torch.randn(rows, width, dtype=dtype)
        assert torch.equal(again(x), small(x)), rows


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden": 8}
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")


def test_save_pretrained_of_a_pruned_model_of_another_library_names_the_function_that_can(tmp_path: Path) -> None:
    small = sk.LearnableMask(Pretrained(), (torch.randn(2, 4),), ratio=0.5).compact()
    for each in (small, copy.deepcopy(small)):
        with pytest.raises(sk.errors.UnsupportedModelError, match=r"sparsekit\.save_compact"):
            each.save_pretrained(tmp_path)
    Pretrained.save_pretrained(small, tmp_path)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._num_heads, self._scale, self.gain = 4, 32**-0.5, 1.0
        self.options: dict[str, Any] = {"gain": 1.0, "nested": [1.0, (1.0, 2)]}
        self._pair, self._list = (1.0, 3), [1.0, 2.0]
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self._num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, scale=self._scale).transpose(1, 2).reshape(b, n, -1)
        factor = self.gain * self.options["gain"] * self.options["nested"][1][0] * self._pair[0] * self._list[0]
        return self.out(h) * factor


PLANTED: dict[str, Callable[[Any], None]] = {
    "private": lambda m: setattr(m, "_scale", 0.5),
    "public": lambda m: setattr(m, "gain", 0.5),
    "tuple": lambda m: setattr(m, "_pair", (0.5, 3)),
    "list": lambda m: m._list.__setitem__(0, 0.5),
    "dict": lambda m: m.options.update(gain=0.5),
    "nested": lambda m: m.options.update(nested=[1.0, (0.5, 2)]),
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("planted", PLANTED)
def test_every_plain_attribute_of_a_saved_model_comes_back(planted: str, tmp_path: Path) -> None:
    x = torch.randn(2, 7, 32)
    model = Attention().eval()
    PLANTED[planted](model)
    graph = sk.trace_units(model, x)
    mask = sk.UnitMask({"qkv": torch.tensor([True, False, True, False])})
    small = sk.compact(model, graph, mask)
    sk.save_compact(small, tmp_path / "m.safetensors", graph=graph, mask=mask, example_inputs=(x,))
    again = sk.load_compact(tmp_path / "m.safetensors", Attention)
    assert torch.equal(again(x), small(x))
    assert (again._num_heads, again._pair, again._list, again.options) == (2, small._pair, small._list, small.options)


def test_an_attribute_that_the_code_lacks_is_refused_or_if_private_set(tmp_path: Path) -> None:
    model = mlp()
    model[1].slope, model[1]._cached = 0.5, 2.0
    sk.save_compact(model, tmp_path / "m.safetensors")
    with pytest.raises(CompactFileError, match=r"the attribute 'slope' of '1', which ReLU of the factory lacks"):
        sk.load_compact(tmp_path / "m.safetensors", mlp)
    other = mlp()
    other[1].slope = 1.0
    assert sk.load_compact(tmp_path / "m.safetensors", other)[1]._cached == 2.0
    other[1].slope = torch.ones(1)
    with pytest.raises(CompactFileError, match="has as Tensor"):
        sk.load_compact(tmp_path / "m.safetensors", other)


class Scaled(nn.Module):
    def __init__(self, factor: Callable[[Tensor], Tensor] = lambda y: y, noise: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.factor, self.noise = nn.Linear(6, 8), nn.Linear(8, 3), factor, (lambda: noise)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.factor(self.last(h + self.noise() * torch.randn_like(h)))


def test_a_file_proves_what_its_model_computes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    sk.prune(Scaled(), (torch.zeros(2, 6),), budget="params=70%").save(path)
    fresh, state = Scaled(), torch.random.get_rng_state()
    sk.load_compact(path, fresh)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(CompactFileError, match=r"differ from those of the saved one by 0\.1"):
        sk.load_compact(path, lambda: Scaled(lambda y: y * 1.1))
    sk.load_compact(path, lambda: Scaled(lambda y: y * 1.001))  # another kernel may do that
    with pytest.warns(UserWarning, match="was not compared with the saved one: 'Tensor' object has no attribute 'nothing'"):
        sk.load_compact(path, lambda: Scaled(lambda y: y.nothing))


def test_a_model_that_no_sum_can_prove_is_saved_without_a_proof(tmp_path: Path) -> None:
    path, x = tmp_path / "m.safetensors", torch.rand(2, 6)
    strange: list[tuple[nn.Module, Any]] = [(Scaled(noise=1.0), (x,)), (Scaled(lambda y: y / 0), (x,)), (Scaled(), ({1: x},))]
    strange += [(Scaled(lambda y: (y * 1e4).sin()), (x,)), (Scaled(lambda y: y.argmax(-1)), (x,))]
    for model, inputs in strange:
        sk.save_compact(model, path, example_inputs=inputs)
        sk.load_compact(path, lambda: Scaled(lambda y: 2 * y))


class Odd(nn.Module):
    def __init__(self, parent: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.again = [self.weight]
        self.parent = parent
        self.me = [self]
        self.table = {"a": [1], "b": self.weight}
        self.same_table = self.table
        self.register_buffer("scale", torch.ones(2))


def test_references_inside_a_copy_stay_inside() -> None:
    holder: list[nn.Module] = []
    model = nn.ModuleDict({"odd": Odd(holder), "plain": nn.Linear(2, 2)})
    holder.append(model)
    new = torch.full((3,), 7.0)
    twin = copy_with(model, {"odd.weight": new})
    odd: Any = twin["odd"]
    assert odd.parent[0] is twin
    assert odd.me[0] is odd
    assert odd.weight.data_ptr() == new.data_ptr()
    assert odd.again[0] is odd.weight
    assert odd.table["b"] is odd.weight
    assert odd.same_table is odd.table
    assert odd.table["a"] == [1]
    assert odd.table["a"] is not model["odd"].table["a"]
    assert odd.scale.data_ptr() != model["odd"].scale.data_ptr()


@pytest.mark.parametrize(
    ("make", "special"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True), {}),
        (lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1), {"sum": 0.1}),
        (lambda p: torch.optim.Rprop(p, lr=0.01), {"step_size": None}),
    ],
)
def test_state_begins_as_the_optimizer_begins_it(make: Callable[[Iterable[Any]], Any], special: dict[str, Any]) -> None:
    usual, faster = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = make([usual])
    optimizer.add_param_group({"params": [faster], "lr": 0.25})  # a group with a rate of its own
    for leaf, rate in ((usual, 0.01), (faster, 0.25)):
        expected = dict.fromkeys(("exp_avg", "momentum_buffer", "prev"), 0.0)
        expected |= {name: rate if value is None else value for name, value in special.items()}
        assert {name: first_value(optimizer, name, leaf) for name in expected} == expected


MODELS = ("resnet-small", "depthwise", "group-norm", "lstm-bidirectional", "gpt")
SLOW = ("resnet-small", "lstm-bidirectional", "gpt")


@functools.cache
def compacted(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs, graph = traced(name)
    return sk.compact(model, graph, random_mask(graph, 0.5, 3)).eval(), args, kwargs


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    for a, b in zip(find_tensors(found), find_tensors(expected), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export")  # of every nn.LSTM
@pytest.mark.parametrize("name", MODELS)
def test_torch_export_gives_the_same_outputs(name: str) -> None:
    small, args, kwargs = compacted(name)
    dense, _, _ = zoo.build(name)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in dense.parameters())
    program = torch.export.export(small, args, kwargs)
    assert {key: v.shape for key, v in program.state_dict.items()} == {k: v.shape for k, v in small.state_dict().items()}
    assert_same(program.module()(*args, **kwargs), small(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW)
def test_onnx_runtime_gives_the_same_outputs(name: str) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason='needs the extra "export"')
    runtime = pytest.importorskip("onnxruntime", reason='needs the extra "export"')
    small, args, kwargs = compacted(name)
    program = torch.onnx.export(small, args, kwargs=kwargs, dynamo=True, verbose=False)
    buffer = io.BytesIO()
    program.save(buffer)
    session = runtime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    given = [tensor.numpy() for tensor in find_tensors((args, kwargs))]
    found = session.run(None, dict(zip((entry.name for entry in session.get_inputs()), given, strict=True)))
    assert_same([torch.from_numpy(each) for each in found], small(*args, **kwargs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["depthwise", "lstm-bidirectional", "gpt"])
def test_torch_compile_gives_the_same_outputs_and_gradients(name: str) -> None:
    small, args, kwargs = compacted(name)
    small = copy.deepcopy(small)
    compiled = torch.compile(copy.deepcopy(small))
    assert_same(compiled(*args, **kwargs), small(*args, **kwargs), rtol=1e-4, atol=1e-5)
    for model in (compiled, small):
        torch.stack([t.square().sum() for t in find_tensors(model(*args, **kwargs))]).sum().backward()
    for (key, a), (_, b) in zip(compiled.named_parameters(), small.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.same_bits
def test_a_mask_is_not_scripted_and_what_to_script_is_said() -> None:
    masked = sk.LearnableMask(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(1, 4), ratio=0.5)
    with pytest.raises(sk.errors.UnsupportedModelError, match=r"masked\.compact\(\)"):
        torch.jit.script(masked)
    x = torch.randn(3, 4)
    small = masked.compact().eval()
    assert torch.equal(torch.jit.script(small)(x), small(x))
