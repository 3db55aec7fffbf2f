"""prune_folder: equal to prune in memory, whatever happens to it on the way, and nothing half-written."""

import contextlib
import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsekit as sk
from sparsekit.errors import CompactFileError, DataError, InvalidValueError, UnsupportedModelError
from sparsekit.pruning import folder as pruning
from sparsekit.pruning import shards
from sparsekit.pruning.sweep import Sweep
from sparsekit.transformers.weights import FolderWeights

transformers: Any = None  # importing it takes seconds, also where these tests are not run

pytestmark = pytest.mark.filterwarnings("ignore::sparsekit.pruning.settings.UncalibratedWarning")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    globals()["transformers"] = pytest.importorskip("transformers", reason="pip install transformers")
    pytest.importorskip("accelerate", reason="pip install accelerate")


_SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "GPTNeoX": {},  # whose files have other names
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # whose experts are separate in files
}
IDS = {"input_ids": torch.arange(8)[None]}
WAYS: list[dict[str, Any]] = [{"budget": "params=70%"}, {"budget": "params=80%", "multiple_of": 1, "exclude": ["head"]}]


def _folder(family: str, path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = _SIZES | FAMILIES.get(family, {}) | more
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).to(dtype).eval()
    for entry in model.parameters():
        entry.data += 0.05 * torch.randn(entry.shape)
    model.save_pretrained(path, max_shard_size="20KB")
    return model


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**IDS).logits
    return found


def _batches(*, labels: bool = True, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, 97, (6, 2, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": each} | ({"labels": each} if labels else {}) for each in tokens]


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_pruned_as_its_model_in_memory(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SHARD_BYTES", 15_000)
    model = _folder(family, tmp_path / "dense", torch.bfloat16)
    for number, way in enumerate(WAYS[: 2 if family == "Llama" else 1]):
        plan = sk.prune_folder(tmp_path / "dense", tmp_path / f"{number}", **way)
        expected = sk.prune(model, IDS, **way)
        assert plan.widths == expected.widths
        assert all(torch.equal(plan.mask[name], expected.mask[name]) for name in plan.mask)
        small = sk.load_pretrained(tmp_path / f"{number}")
        torch.testing.assert_close(_logits(small), _logits(expected.model), rtol=0, atol=1e-2)  # rounding depends on alignment
        own = dict(expected.model.named_parameters())
        assert all(torch.equal(entry, own[name]) and entry.dtype is own[name].dtype for name, entry in small.named_parameters())
        assert len(list((tmp_path / f"{number}").glob("model-*.safetensors"))) > 2
        assert not (tmp_path / f"{number}" / ".weights").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "0", trust_remote_code=True)
    torch.testing.assert_close(_logits(again), _logits(sk.load_pretrained(tmp_path / "0")), rtol=0, atol=1e-2)


def test_a_call_that_was_stopped_continues_and_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SHARD_BYTES", 8_000)
    _folder("Llama", tmp_path / "dense")
    sk.prune_folder(tmp_path / "dense", tmp_path / "whole", budget="params=70%")
    whole, save = _digests(tmp_path / "whole"), shards.write_tensors
    count = sum(name.startswith("model-") for name in whole)
    written: list[str] = []

    def killed(shapes: Any, tensor_of: Any, path: Path) -> None:
        written.append(path.name)
        save(shapes, tensor_of, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "write_tensors", killed)
    out = tmp_path / "parts"
    for _ in range(2):  # killed before a shard gets its name: nothing is left of it
        with pytest.raises(KeyboardInterrupt):
            sk.prune_folder(tmp_path / "dense", out, budget="params=70%")
        assert [path.name for path in out.iterdir() if path.name not in (".weights", ".plan")] == []

    def counted(shapes: Any, tensor_of: Any, path: Path) -> None:
        if len(written) == stop:
            raise OSError("No space left on device")
        written.append(path.name)
        save(shapes, tensor_of, path)

    monkeypatch.setattr(shards, "write_tensors", counted)
    written.clear()
    stop = 2
    with pytest.raises(OSError, match=r"cannot write .*No space left on device; make room"):
        sk.prune_folder(tmp_path / "dense", out, budget="params=70%")
    assert (
        sorted(path.name for path in out.glob("*.safetensors"))
        == sorted(name for name in whole if name.startswith("model-"))[:2]
    )
    with pytest.raises((OSError, ValueError), match="config"):
        sk.load_pretrained(out)
    stop = -1
    sk.prune_folder(tmp_path / "dense", out, budget="params=70%")
    assert len(written) == count  # none was written twice
    assert _digests(out) == whole
    with pytest.raises(InvalidValueError, match="holds a model already"):
        sk.prune_folder(tmp_path / "dense", out, budget="params=70%")


@pytest.mark.parametrize(
    "dtypes", [[torch.bfloat16], [torch.bfloat16, torch.int64, torch.bool, torch.float32, torch.float8_e4m3fn]]
)
def test_a_file_written_tensor_by_tensor_is_one_of_safetensors(dtypes: list[torch.dtype], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shapes: list[tuple[int, ...]] = [(3, 5), (), (0, 2), (7,)]
    tensors = {f"{d}.ü{n}": torch.ones(shape).to(dtype) for d, dtype in enumerate(dtypes) for n, shape in enumerate(shapes)}
    tensors["turned"] = torch.arange(6).reshape(2, 3).to(dtypes[0]).t()
    shards.write_tensors({name: each.to("meta") for name, each in tensors.items()}, tensors.__getitem__, tmp_path / "own")
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    found = load_file(tmp_path / "own")
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        assert found[name].dtype is each.dtype
        assert torch.equal(found[name].float(), each.float())
    if len(dtypes) == 1:
        assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_one_tensor_is_in_memory_at_a_time_and_a_shard_that_breaks_off_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder("Llama", tmp_path / "dense")
    read, alive, stop = FolderWeights.__getitem__, [], -1  # the last tensor that was read

    def watched(self: FolderWeights, name: str) -> torch.Tensor:
        if len(alive) == stop:
            raise OSError("No space left on device")
        assert not alive or alive[-1]() is None, name
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(FolderWeights, "__getitem__", watched)
    sk.prune_folder(tmp_path / "dense", tmp_path / "whole", budget="params=70%")
    stop = len(alive) - 3
    alive.clear()
    with pytest.raises(OSError, match=r"No space left on device; make room"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", budget="params=70%")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name not in (".weights", ".plan")] == []


def test_a_disk_that_is_full_at_the_last_file_leaves_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder("Llama", tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")

    def cut_off(self: Any, folder: Path, **_: Any) -> None:
        Path(folder, "config.json").write_text('{"architectures"')
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PretrainedConfig, "save_pretrained", cut_off)
        with pytest.raises(OSError, match=r"cannot write .*No space left on device; make room"):
            sk.prune_folder(tmp_path / "dense", tmp_path / "out", budget="params=70%")
    assert not (tmp_path / "out" / "config.json").exists()
    for out in ("out", "whole"):
        sk.prune_folder(tmp_path / "dense", tmp_path / out, budget="params=70%")
    assert _digests(tmp_path / "out") == _digests(tmp_path / "whole")
    assert {"config.json", "tokenizer.json"} <= _digests(tmp_path / "out").keys()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in ("Llama", "Qwen3", "Mixtral", "Falcon")] + [("Llama", torch.bfloat16)],
)
@pytest.mark.parametrize("labels", [True, False])
def test_with_data_a_folder_is_pruned_block_by_block_as_its_model_in_memory(
    family: str, dtype: torch.dtype, labels: bool, tmp_path: Path
) -> None:
    if not labels and family != "Llama":
        pytest.skip("as with labels")
    model = _folder(family, tmp_path / "dense", dtype)
    given = {"budget": "params=70%", "batches": _batches(labels=labels)}
    plan = sk.prune_folder(tmp_path / "dense", tmp_path / "out", **given)
    expected = sk.prune(model, IDS, criterion="wanda", allocation="by_cost", **given)
    assert plan.widths == expected.widths
    assert all(torch.equal(plan.mask[name], expected.mask[name]) for name in plan.mask)
    small, own = sk.load_pretrained(tmp_path / "out"), dict(expected.model.named_parameters())
    near = 1e-5 if dtype is torch.float32 else 2**-9  # weights below 1/4 differ by at most one step of rounding, 2**-10
    for name, entry in small.named_parameters():
        torch.testing.assert_close(entry, own[name], rtol=near, atol=near)
    measured, error = plan.report.measured, expected.report.measured.get("reconstruction_error")
    assert measured.get("reconstruction_error") == (error if error is None else pytest.approx(error, rel=near))
    assert plan.report.notes == expected.report.notes
    assert (measured["loss_dense"] == 0.0) == (not labels)
    assert not any(path.name.startswith(".") for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral"])
@pytest.mark.parametrize(("criterion", "labels"), [("position_fisher", True), ("fisher", False), ("taylor", True)])
def test_scores_from_gradients_of_block_after_block_are_those_of_the_whole_model(
    family: str, criterion: str, labels: bool, tmp_path: Path
) -> None:
    model = _folder(family, tmp_path / "dense")
    given: dict[str, Any] = {"budget": "params=70%", "batches": _batches(labels=labels), "criterion": criterion}
    given |= {"allocation": "by_loss" if criterion == "position_fisher" else "by_cost"}
    plan = sk.prune_folder(tmp_path / "dense", tmp_path / "out", **given)
    expected = sk.prune(model, IDS, **given)
    (label,) = plan.scores
    for name, scores in plan.scores[label].values.items():
        torch.testing.assert_close(scores, expected.scores[label].values[name], rtol=1e-4, atol=1e-12)
    assert plan.widths == expected.widths
    assert all(torch.equal(plan.mask[name], expected.mask[name]) for name in plan.mask)
    own = dict(expected.model.named_parameters())
    for name, entry in sk.load_pretrained(tmp_path / "out").named_parameters():
        torch.testing.assert_close(entry, own[name], rtol=1e-5, atol=1e-5)
    assert not any(path.name.startswith(".") for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("way", [{"criterion": "magnitude"}, {"reconstruct": False}])
def test_magnitudes_are_refitted_too_and_a_refit_can_be_left_out(way: dict[str, Any], tmp_path: Path) -> None:
    model = _folder("Llama", tmp_path / "dense")
    given: dict[str, Any] = {"budget": "params=70%", "batches": _batches(), **way}
    sk.prune_folder(tmp_path / "dense", tmp_path / "out", **given)
    expected = sk.prune(model, IDS, **{"criterion": "wanda", "allocation": "by_cost"} | given).model
    own = dict(expected.named_parameters())
    assert all(torch.equal(each, own[name]) for name, each in sk.load_pretrained(tmp_path / "out").named_parameters())


@pytest.mark.parametrize(("harm", "criterion", "count"), [(False, "wanda", 4), (True, "wanda", 5), (False, "fisher", 6)])
def test_a_sweep_that_is_killed_after_any_step_continues_and_writes_the_same_bytes(
    harm: bool, criterion: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "losses", lambda _: {"judge": 0.0, "bare": 1.0, "refit": 1.0 + harm})
    _folder("Llama", tmp_path / "dense")
    given: dict[str, Any] = {"budget": "params=70%", "batches": _batches(), "criterion": criterion}
    graphs: list[Any] = []
    trace = pruning.trace_units
    monkeypatch.setattr(pruning, "trace_units", lambda *args, **more: (graphs or [trace(*args, **more)])[0])
    plan = sk.prune_folder(tmp_path / "dense", tmp_path / "whole", **given)
    graphs.append(plan.graph)
    whole, out = _digests(tmp_path / "whole"), tmp_path / "parts"
    left, stops = 0, 0
    is_full = False

    def stopping(function: Any, error: type[Exception]) -> Any:
        def run(*args: Any, **more: Any) -> None:
            nonlocal left
            if not left:
                raise error("no space left") if is_full else KeyboardInterrupt
            left -= 1
            function(*args, **more)

        return run

    monkeypatch.setattr(torch, "save", stopping(torch.save, RuntimeError))
    monkeypatch.setattr(shards, "write_tensors", stopping(shards.write_tensors, OSError))
    while not (out / "config.json").exists():
        left, stops = 3, stops + 1  # a call writes three files, and is killed at the next one
        with contextlib.suppress(KeyboardInterrupt):
            sk.prune_folder(tmp_path / "dense", out, **given)
        if stops == (4 if criterion == "fisher" else 2):
            is_full = True
            with pytest.raises(OSError, match=r"cannot write to .*no space left; make room, and the same call continues"):
                sk.prune_folder(tmp_path / "dense", out, **given)
            is_full = False
            min(out.glob("model-*.safetensors")).unlink()  # a lost block is made again, and all after it
        assert not [*out.glob("*.tmp"), *out.glob(".*.tmp")]
    assert stops == count
    assert _digests(out) == whole
    assert any("refit of layers" in note for note in plan.report.notes) == harm


def test_another_calibration_does_not_continue_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder("Llama", tmp_path / "dense")
    given: dict[str, Any] = {"budget": "params=70%"}
    monkeypatch.setattr(pruning, "describe_folder", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", batches=_batches(), **given)
    with pytest.raises(InvalidValueError, match="holds weights of another call"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", batches=_batches(seed=2), **given)


def test_what_cannot_be_pruned_block_by_block_is_refused_in_words(tmp_path: Path) -> None:
    _folder("Llama", tmp_path / "Llama")
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "GPT2")  # whose layers are not linear
    given: dict[str, Any] = {"budget": "params=70%", "batches": _batches()}
    for family, more in (("GPT2", {}), ("Llama", {"prune_hidden_size": True})):
        with pytest.raises(UnsupportedModelError, match=r"block by block.*leave out batches=, or load the model"):
            sk.prune_folder(tmp_path / family, tmp_path / "out", **given, **more)
    for wrong in ({"criterion": sk.criteria.TorchPruning(object())}, {"criterion": "wanda", "batches": None}):
        with pytest.raises(InvalidValueError, match=r"needs data or the whole model.*load the model and call sparsekit\.prune"):
            sk.prune_folder(tmp_path / "Llama", tmp_path / "out", **given | wrong)
    with pytest.raises(InvalidValueError, match="reconstruct must be True or False"):
        sk.prune_folder(tmp_path / "Llama", tmp_path / "out", **given, reconstruct="batchnorm")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="a loss needs batches"):
        sk.prune_folder(tmp_path / "Llama", tmp_path / "out", budget="params=70%", loss=torch.nn.functional.cross_entropy)
    with pytest.raises(DataError, match="got no batch"):
        sk.prune_folder(tmp_path / "Llama", tmp_path / "out", budget="params=70%", batches=[])
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_shards_of_another_plan_are_refused(tmp_path: Path) -> None:
    _folder("Llama", tmp_path / "dense")
    sk.prune_folder(tmp_path / "dense", tmp_path / "one", budget="params=70%")
    (tmp_path / "one" / "config.json").unlink()
    with pytest.raises(InvalidValueError, match="holds weights of another call"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "one", budget="params=80%")


@pytest.mark.parametrize("data", [False, True], ids=["no data", "data"])
@pytest.mark.parametrize("what", ["missing", "cut off", "garbled", "incomplete", "no model"])
def test_a_damaged_source_is_refused_and_nothing_is_written(what: str, data: bool, tmp_path: Path) -> None:
    _folder("Llama", tmp_path / "dense")
    shard = sorted((tmp_path / "dense").glob("*.safetensors"))[1]
    error: Any = CompactFileError
    if what == "missing":
        shard.unlink()
        error = (OSError, CompactFileError)
    elif what == "cut off":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif what == "garbled":
        shard.write_bytes(shard.read_bytes()[::-1])
    elif what == "incomplete":
        index = tmp_path / "dense" / "model.safetensors.index.json"
        from safetensors.torch import load_file, save_file

        weights = load_file(shard)
        gone = weights.popitem()[0]
        save_file(weights, shard, {"format": "pt"})
        text = index.read_text()
        index.write_text("\n".join(line for line in text.splitlines() if f'"{gone}"' not in line))
    else:
        config = tmp_path / "dense" / "config.json"
        config.write_text(config.read_text().replace("LlamaForCausalLM", "Strange"))
    with pytest.raises(error, match=r"cannot be read|lack|No such file|no file|Strange"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", budget="params=70%", batches=_batches() if data else None)
    assert not list((tmp_path / "out").glob("[!.]*")) if (tmp_path / "out").exists() else True
    with pytest.raises(InvalidValueError, match="cannot time"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", budget="latency_ms=1")


def test_a_model_that_accelerate_has_offloaded_is_recognized(tmp_path: Path) -> None:
    _folder("Llama", tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "off")
    for call in (sk.trace_units, lambda *given: sk.prune(*given, budget="params=70%"), sk.LearnableMask):
        with pytest.raises(UnsupportedModelError, match=r"accelerate has offloaded.*without device_map=.*prune_folder"):
            call(model, IDS)


def test_the_command_prunes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sparsekit.cli import main as cli

    _folder("Llama", tmp_path / "dense")
    command = ["prune", str(tmp_path / "dense"), "--budget", "params=70%"]
    assert cli.execute([*command, "--out", str(tmp_path / "out"), "-q"]) == 0
    assert f"model: {tmp_path / 'out'}" in capsys.readouterr().out
    sk.prune_folder(tmp_path / "dense", tmp_path / "same", budget="params=70%")
    assert _digests(tmp_path / "out") == _digests(tmp_path / "same")
    tokens = "torch.arange(192).reshape(6, 2, 16) % 97"
    loader = f"def load():\n    return [{{'input_ids': each, 'labels': each}} for each in {tokens}]\n"
    (tmp_path / "texts.py").write_text(f"import torch\n\n\n{loader}")
    data = ["--dataset", f"{tmp_path / 'texts.py'}:load", "--calibration-batches", "4", "--json"]
    assert cli.execute([*command, "--out", str(tmp_path / "data"), *data]) == 0
    assert json.loads(capsys.readouterr().out)["measured"].keys() == {"reconstruction_error", "loss_dense", "loss_pruned"}
    for more in ([], ["--out", str(tmp_path / "new"), "--epochs", "1"]):
        assert cli.execute([*command, *more]) == 2
        assert "a folder is pruned to --out" in capsys.readouterr().err
