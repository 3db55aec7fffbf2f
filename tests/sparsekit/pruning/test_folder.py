"""prune_folder: equal to prune in memory, whatever happens to it on the way, and nothing half-written."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsekit as sk
from sparsekit.errors import CompactFileError, InvalidValueError, UnsupportedModelError
from sparsekit.pruning import folder as pruning

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
}
IDS = {"input_ids": torch.arange(8)[None]}
WAYS: list[dict[str, Any]] = [{"budget": "params=70%"}, {"budget": "params=80%", "multiple_of": 1, "exclude": ["head"]}]


def _folder(family: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**_SIZES | FAMILIES[family]))
    model = model.to(dtype).eval()
    model.save_pretrained(path, max_shard_size="20KB")
    return model


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**IDS).logits
    return found


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_pruned_as_its_model_in_memory(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_SHARD_BYTES", 15_000)
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
    monkeypatch.setattr(pruning, "_SHARD_BYTES", 8_000)
    _folder("Llama", tmp_path / "dense")
    sk.prune_folder(tmp_path / "dense", tmp_path / "whole", budget="params=70%")
    whole, save = _digests(tmp_path / "whole"), pruning.save_file
    shards = sum(name.startswith("model-") for name in whole)
    written: list[str] = []

    def killed(tensors: Any, path: Path, metadata: Any) -> None:
        written.append(path.name)
        save(tensors, path, metadata)
        raise KeyboardInterrupt

    monkeypatch.setattr(pruning, "save_file", killed)
    out = tmp_path / "parts"
    for _ in range(2):  # killed before a shard gets its name: nothing is left of it
        with pytest.raises(KeyboardInterrupt):
            sk.prune_folder(tmp_path / "dense", out, budget="params=70%")
        assert [path.name for path in out.iterdir() if path.name not in (".weights", ".plan")] == []

    def counted(tensors: Any, path: Path, metadata: Any) -> None:
        if len(written) == stop:
            raise OSError("No space left on device")
        written.append(path.name)
        save(tensors, path, metadata)

    monkeypatch.setattr(pruning, "save_file", counted)
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
    assert len(written) == shards  # none was written twice
    assert _digests(out) == whole
    with pytest.raises(InvalidValueError, match="holds a model already"):
        sk.prune_folder(tmp_path / "dense", out, budget="params=70%")


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


@pytest.mark.parametrize(("family", "more"), [("Mixtral", {"num_local_experts": 4}), ("Qwen3Moe", {"num_experts": 4})])
def test_a_mixture_of_experts_is_refused_before_anything_is_written(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    getattr(transformers, f"{family}Config")(**_SIZES | more, architectures=[f"{family}ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"has experts.*sparsekit\.prune"):
        sk.prune_folder(tmp_path, tmp_path / "out", budget="params=70%")
    assert not (tmp_path / "out").exists()


def test_shards_of_another_plan_are_refused(tmp_path: Path) -> None:
    _folder("Llama", tmp_path / "dense")
    sk.prune_folder(tmp_path / "dense", tmp_path / "one", budget="params=70%")
    (tmp_path / "one" / "config.json").unlink()
    with pytest.raises(InvalidValueError, match="holds weights of another call"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "one", budget="params=80%")


@pytest.mark.parametrize("what", ["missing", "cut off", "incomplete", "no model"])
def test_a_damaged_source_is_refused_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    _folder("Llama", tmp_path / "dense")
    shard = sorted((tmp_path / "dense").glob("*.safetensors"))[1]
    error: Any = CompactFileError
    if what == "missing":
        shard.unlink()
        error = (OSError, CompactFileError)
    elif what == "cut off":
        shard.write_bytes(shard.read_bytes()[:-100])
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
    with pytest.raises(error):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", budget="params=70%")
    assert not list((tmp_path / "out").glob("[!.]*")) if (tmp_path / "out").exists() else True
    with pytest.raises(InvalidValueError, match="cannot time"):
        sk.prune_folder(tmp_path / "dense", tmp_path / "out", budget="latency_ms=1")


def test_the_command_prunes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sparsekit.cli import main as cli

    _folder("Llama", tmp_path / "dense")
    command = ["prune", str(tmp_path / "dense"), "--budget", "params=70%"]
    assert cli.execute([*command, "--out", str(tmp_path / "out"), "-q"]) == 0
    assert f"model: {tmp_path / 'out'}" in capsys.readouterr().out
    sk.prune_folder(tmp_path / "dense", tmp_path / "same", budget="params=70%")
    assert _digests(tmp_path / "out") == _digests(tmp_path / "same")
    for more in ([], ["--out", str(tmp_path / "new"), "--epochs", "1"]):
        assert cli.execute([*command, *more]) == 2
        assert "a folder is pruned to --out" in capsys.readouterr().err
